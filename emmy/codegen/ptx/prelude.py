"""The text in front of a kernel: types, macros, and the helpers it uses, for one architecture. Knows no kernel.

Generated source is `prelude(used(kernel), arch) + kernel`. The kernel says

    EMMY_KERNEL(256, 1) name(EMMY_TENSORMAP(a), const u16* b, float* c, int m) {     // threads, least blocks an SM
      EMMY_SMEM(smem);                                                                // u32 address, 1024-byte aligned
      ...threadIdx.x, blockIdx.x, gridDim.x as in CUDA...
    }

and EMMY_CLUSTER(x, y, z) between EMMY_KERNEL(...) and the name fixes a cluster's shape. Device functions begin with EMMY_DEV.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from types import MappingProxyType

from emmy.codegen.ptx import barrier, math, matrix, memory, tma, wgmma
from emmy.codegen.ptx.helper import ARCHS, Helper
from emmy.errors import CompileError

HELPERS = MappingProxyType(
    {
        h.name: h
        for h in (*memory.HELPERS, *matrix.HELPERS, *barrier.HELPERS, *tma.HELPERS, *wgmma.HELPERS, *math.HELPERS)
    }
)
_CALL = re.compile(r"\bemmy_(\w+)")
_OWN = re.compile(r"EMMY_DEV[\w\s*&]*?\bemmy_(\w+)\s*\(")  # a device function the text defines itself
_PRELUDE = re.compile(r"^#ifndef EMMY_EMU$.*?^#endif$", re.DOTALL | re.MULTILINE)
_NOT_HELPERS = frozenset({"tensormap", "smem_bytes"})
# The emulator gives all of this its own meaning (emmy_emu.h), so the text is skipped there.
_BASE = """\
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
struct __align__(64) emmy_tensormap { u64 words[16]; };
#define EMMY_DEV static __device__ __forceinline__
#define EMMY_KERNEL(threads, min_blocks) extern "C" __global__ void __launch_bounds__(threads, min_blocks)
#define EMMY_CLUSTER(x, y, z) __cluster_dims__(x, y, z)
#define EMMY_SMEM(name) \\
  extern __shared__ __align__(1024) u8 emmy_smem_bytes[]; \\
  const u32 name = (u32)__cvta_generic_to_shared(emmy_smem_bytes)
#define EMMY_TENSORMAP(name) const __grid_constant__ emmy_tensormap name
"""


@cache
def helper(name: str) -> Helper:
    """The helper of that name, without the prefix `emmy_`. Raises CompileError when there is none."""
    found = HELPERS.get(name) or wgmma.wgmma(name)
    if found is None:
        raise CompileError(f"there is no helper emmy_{name}. Helpers are listed in emmy/codegen/ptx.")
    return found


def used(kernel: str) -> tuple[str, ...]:
    """Names of the helpers that a kernel's text, with or without its prelude, calls; in alphabetical order."""
    text = _PRELUDE.sub("", kernel)
    return tuple(sorted(set(_CALL.findall(text)) - set(_OWN.findall(text)) - _NOT_HELPERS))


def prelude(names: Iterable[str], arch: str) -> str:
    """The text that goes in front of a kernel which uses these helpers.

    Raises CompileError when the architecture lacks one of them, or is none that Emmy compiles for.
    """
    if arch not in ARCHS:
        raise CompileError(f"architecture {arch!r} is not supported. Supported are {', '.join(ARCHS)}.")
    helpers = _closed(names)
    for h in helpers:
        if arch not in h.archs:
            have = ", ".join(a for a in ARCHS if a in h.archs)
            raise CompileError(f"emmy_{h.name} ({h.section}) does not exist on {arch}; it needs one of {have}.")
    body = "\n".join(h.cuda_text for h in helpers)
    return f"// For {arch}.\n#ifndef EMMY_EMU\n{_BASE}{body}\n#endif\n\n"


def twins(names: Iterable[str]) -> str:
    """The same helpers as the emulator executes them."""
    return "\n".join(h.emu_text for h in _closed(names)) + "\n"


def _closed(names: Iterable[str]) -> list[Helper]:
    """The helpers and those they use, each after what it uses."""
    out: dict[str, Helper] = {}

    def add(name: str) -> None:
        h = helper(name)
        for other in h.uses:
            add(other)
        out.setdefault(name, h)

    for name in sorted(set(names)):
        add(name)
    return list(out.values())
