"""Warpgroup matrix instructions: one entry for each N, dtype, operand place and operand order, made when asked for.

wgmma_n128_f16_ss      m64n128k16, f32 sums, A and B in shared memory, both K-major
wgmma_n128_bf16_rs_tb  A in registers, B MN-major ("transposed")
"""

from __future__ import annotations

import re

from emmy.codegen.ptx.helper import WGMMA, Helper, asm, numbered, registers

_SECTION = "Asynchronous Warpgroup Level Matrix Instructions"
_NAME = re.compile(r"wgmma_n(\d+)_(f16|bf16)_(ss|rs)(_ta)?(_tb)?")
NS: tuple[int, ...] = tuple(range(8, 257, 8))


def wgmma_name(n: int, dtype: str, a_place: str, *, a_mn: bool = False, b_mn: bool = False) -> str:
    """The name of m64 n{n} k16: dtype "f16" or "bf16", A in "smem" or "reg", `*_mn`: that operand is MN-major."""
    return f"wgmma_n{n}_{dtype}_{'ss' if a_place == 'smem' else 'rs'}{'_ta' if a_mn else ''}{'_tb' if b_mn else ''}"


def wgmma(name: str) -> Helper | None:
    """The entry of that name, or None when it names no instruction."""
    found = _NAME.fullmatch(name)
    if found is None or int(found[1]) not in NS or (found[3] == "rs" and found[4]):
        return None
    n, dtype, from_smem = int(found[1]), found[2], found[3] == "ss"
    a_mn, b_mn = found[4] is not None, found[5] is not None
    sums = n // 2
    a_regs = 1 if from_smem else 4
    a = f"%{sums}" if from_smem else f"{{{numbered(sums, 4)}}}"
    trans = f"{int(a_mn)}, {int(b_mn)}" if from_smem else f"{int(b_mn)}"
    ptx = (
        f"{{\n.reg .pred p;\nsetp.ne.b32 p, %{sums + a_regs + 1}, 0;\n"
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype} "
        f"{{{numbered(0, sums)}}}, {a}, %{sums + a_regs}, p, 1, 1, {trans};\n}}"
    )
    operand = '"l"(a)' if from_smem else registers("r", "a", 4)
    shape = f"{{{n}, {_bool(dtype == 'bf16')}, {_bool(a_mn)}, {_bool(b_mn)}}}"
    return Helper(
        name,
        f"void {name}(float* d, {'u64 a' if from_smem else 'const u32* a'}, u64 b, bool accumulate)",
        f"{_SECTION}: wgmma.mma_async; d = a * b, plus d when accumulating; lane layout: Register Fragments and Matrix Layout",
        asm(ptx, registers("+f", "d", sums), f'{operand}, "l"(b), "r"((int)accumulate)', memory=True),
        f"emu::wgmma_issue({shape}, d, {'a, nullptr' if from_smem else '0, a'}, b, accumulate, site);",
        WGMMA,
    )


def _bool(x: bool) -> str:
    return "true" if x else "false"


def _descriptor(major: str, swizzle: int) -> Helper:
    """A tile of rows as wide as the swizzle; without one, of 8 x 16-byte blocks. PTX ISA: Matrix Descriptor Format.

    K-major rows run along k, MN-major ones along m or n. 8 rows follow each other; the next 8 come 8 rows later. An MN-major
    operand wider than a row goes on `lead` bytes later. Without a swizzle both strides are given.
    """
    code = {128: 1, 64: 2, 32: 3, 0: 0}[swizzle]
    name = f"desc_{major}_sw{swizzle}" if swizzle else f"desc_{major}"
    parameters = "u32 address" + (", u32 lead, u32 stride" if not swizzle else ", u32 lead" if major == "mn" else "")
    lead = (
        "1u" if swizzle and major == "k" else "(lead >> 4 & 0x3fffu)"
    )  # unused with K-major swizzles, 1 by convention
    stride = f"{8 * swizzle // 16}u" if swizzle else "(stride >> 4 & 0x3fffu)"
    low = f"const u32 low = (address >> 4 & 0x3fffu) | {lead} << 16;"
    high = f"const u32 high = {stride} | {code}u << 30;"
    return Helper(
        name,
        f"u64 {name}({parameters})",
        f"{_SECTION}: Matrix Descriptor Format",
        f"{low}\n{high}\nreturn (u64)high << 32 | low;",
        None,
    )


_FENCE = Helper(
    "wgmma_fence",
    "void wgmma_fence()",
    f"{_SECTION}: wgmma.fence: before the first wgmma, and between other uses of its registers and the next wgmma",
    asm("wgmma.fence.sync.aligned;", memory=True),
    "emu::wgmma_fence(site);",
    WGMMA,
)

HELPERS: tuple[Helper, ...] = (
    _FENCE,
    Helper(
        "wgmma_commit",
        "void wgmma_commit()",
        f"{_SECTION}: wgmma.commit_group",
        asm("wgmma.commit_group.sync.aligned;", memory=True),
        "emu::wgmma_commit(site);",
        WGMMA,
    ),
    Helper(
        "wgmma_wait",
        "void wgmma_wait()",
        f"{_SECTION}: wgmma.wait_group: at most N groups are still under way",
        asm("wgmma.wait_group.sync.aligned %0;", "", '"n"(N)', memory=True),
        "emu::wgmma_wait(N, site);",
        WGMMA,
        "int N",
    ),
    # Sums that other instructions work on between wgmmas must be pinned to their registers, or ptxas serialises (C7513).
    Helper(
        "pin_f32",
        "void pin_f32(float& x)",
        f"{_SECTION}: wgmma.fence",
        asm("", '"+f"(x)', memory=True),
        "(void)x;",
    ),
    Helper(
        "pin_b32",
        "void pin_b32(u32& x)",
        f"{_SECTION}: wgmma.fence",
        asm("", '"+r"(x)', memory=True),
        "(void)x;",
    ),
    Helper(
        "pin_b32x4",
        "void pin_b32x4(u32* x)",
        f"{_SECTION}: wgmma.mma_async: registers of A are not to be written before their group is waited for",
        asm("", registers("+r", "x", 4), memory=True),
        "(void)x;",
    ),
    *(_descriptor(major, swizzle) for major in ("k", "mn") for swizzle in (0, 32, 64, 128)),
    # The upper word is a constant, so that a step costs one addition in a uniform register.
    Helper(
        "desc_step",
        "u64 desc_step(u64 descriptor, u32 bytes)",
        f"{_SECTION}: Matrix Descriptor Format: the same tile, that many bytes further on",
        "return (descriptor & ~0xffffffffull) | (u32)((u32)descriptor + (bytes >> 4));",
        None,
    ),
)
