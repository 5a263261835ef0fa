"""Static facts of a cubin, read without a GPU or a CUDA tool: registers, memory, instruction mix, loops, issue cycles.

A cubin is an ELF file. Sections `.text.<kernel>` hold instructions of 16 bytes, `.nv.info*` attributes in a format that
cuobjdump prints (CUDA Binary Utilities); field positions were checked against nvdisasm 13.2 for every architecture of
`emmy.codegen.ptx.ARCHS`. Knows no compiler: spills, which only the assembler's log tells, are in `emmy.codegen.nvrtc`.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources

from emmy.errors import CompileError

# .nv.info attributes (CUDA Binary Utilities name them EIATTR_*)
_REGISTERS, _FRAME, _MIN_STACK = 0x2F, 0x11, 0x12
_MAX_THREADS, _PARAM_BYTES, _N_BARRIERS = 0x05, 0x19, 0x4C
_BRANCHES = frozenset({0x947, 0x547})
_NEVER = 15  # the guard @!PT: ptxas pads asynchronous copies with instructions that never execute


@dataclass(frozen=True, slots=True)
class LoopFacts:
    """Instructions from a backward branch's target to the branch. `issue_cycles`: the sum of their stall counts."""

    first: int
    last: int
    issue_cycles: int
    mix: Mapping[str, int] = field(hash=False)

    @property
    def n_instrs(self) -> int:
        return self.last - self.first + 1

    def count(self, *mnemonics: str) -> int:
        """How many of its instructions have one of these names, such as "HMMA"."""
        return sum(self.mix.get(m, 0) for m in mnemonics)


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """One kernel of a cubin. `smem_static_bytes` includes the 1,024 bytes that the system reserves from sm_90 on."""

    name: str
    arch: int  # 90 for sm_90 and sm_90a
    n_regs: int
    stack_bytes: int
    smem_static_bytes: int
    param_bytes: int
    max_threads: int
    n_barriers: int
    code_bytes: int
    mix: Mapping[str, int] = field(hash=False)
    loops: tuple[LoopFacts, ...]

    @property
    def main_loop(self) -> LoopFacts | None:
        """The smallest loop with most of the matrix instructions, else the longest innermost one; None without loops.

        Not simply an innermost loop: one that waits for a copy holds the loop that spins on its mbarrier.
        """
        most = max((x.count(*MATRIX) for x in self.loops), default=0)
        if most:
            return min((x for x in self.loops if 2 * x.count(*MATRIX) > most), key=lambda x: x.n_instrs)
        inner = [
            a for a in self.loops if not any(b is not a and a.first <= b.first and b.last <= a.last for b in self.loops)
        ]
        return max(inner, key=lambda x: x.n_instrs, default=None)


MATRIX = ("HMMA", "HGMMA")


@cache
def opcodes() -> Mapping[int, str]:
    """Low 12 bits of an instruction -> mnemonic. One table serves every architecture."""
    text = (resources.files("emmy.codegen") / "sass_opcodes.json").read_text(encoding="utf-8")
    return {int(code, 16): name for name, codes in json.loads(text).items() for code in codes}


def read_cubin(data: bytes) -> tuple[KernelFacts, ...]:
    """Facts of every kernel in a cubin, in its order. Raises CompileError when the bytes are no 64-bit ELF file."""
    arch = cubin_arch(data)
    sections = _sections(data)
    symbols = _symbols(sections)
    found = {name.removeprefix(".text."): name for name in sections if name.startswith(".text.")}
    of_kernel: dict[str, dict[int, int]] = {name: {} for name in found}
    for attribute, value in _attributes(sections.get(".nv.info", b"")):
        if attribute in (_REGISTERS, _FRAME, _MIN_STACK) and len(value) == 8:
            symbol, number = struct.unpack("<II", value)
            if symbols[symbol] in of_kernel:
                of_kernel[symbols[symbol]][attribute] = number
    return tuple(_kernel(name, arch, sections, of_kernel[name]) for name in found)


def cubin_arch(data: bytes) -> int:
    """What a cubin is for: 90 for sm_90 and sm_90a. Raises CompileError when the bytes are no 64-bit ELF file."""
    if data[:5] != b"\x7fELF\x02" or len(data) < 64:
        raise CompileError(f"not a cubin: it begins with {data[:5]!r}, an ELF file with b'\\x7fELF\\x02'")
    return _arch(data)


def _kernel(name: str, arch: int, sections: Mapping[str, bytes], attributes: dict[int, int]) -> KernelFacts:
    for attribute, value in _attributes(sections.get(f".nv.info.{name}", b"")):
        if attribute == _MAX_THREADS:
            x, y, z = struct.unpack("<III", value)
            attributes[attribute] = x * y * z
        elif attribute in (_PARAM_BYTES, _N_BARRIERS):
            attributes[attribute] = int.from_bytes(value, "little")
    code = sections[f".text.{name}"]
    words = list(struct.iter_unpack("<QQ", code))
    return KernelFacts(
        name,
        arch,
        attributes.get(_REGISTERS, 0),
        max(attributes.get(_FRAME, 0), attributes.get(_MIN_STACK, 0)),
        len(sections.get(f".nv.shared.{name}", b"")),
        attributes.get(_PARAM_BYTES, 0),
        attributes.get(_MAX_THREADS, 0),
        attributes.get(_N_BARRIERS, 0),
        len(code),
        _mix(words),
        _loops(words, arch),
    )


def _mix(words: list[tuple[int, int]]) -> dict[str, int]:
    names = opcodes()
    counts = Counter(names.get(w & 0xFFF, f"op_{w & 0xFFF:03x}") for w, _ in words if w >> 12 & 15 != _NEVER)
    return dict(counts.most_common())


def _loops(words: list[tuple[int, int]], arch: int) -> tuple[LoopFacts, ...]:
    spans = set()
    for at, (w, high) in enumerate(words):
        if w & 0xFFF in _BRANCHES and w >> 12 & 15 != _NEVER:
            back = _branch_bytes(w, high, arch)
            if back < -16:  # the branch to itself after EXIT is no loop
                spans.add((at + 1 + back // 16, at))
    return tuple(
        LoopFacts(a, z, sum(max(1, high >> 41 & 15) for _, high in words[a : z + 1]), _mix(words[a : z + 1]))
        for a, z in sorted(spans)
    )


def _branch_bytes(w: int, high: int, arch: int) -> int:
    """Bytes from the next instruction to a branch's target; from sm_90 on, 8 more low bits stand at bit 16."""
    offset = w >> 34 | (high & 0x3FFFF) << 30
    offset -= (offset >> 47 & 1) << 48
    return (offset << 8 | (w >> 16 & 0xFF) if arch >= 90 else offset) * 4


def _arch(data: bytes) -> int:
    """The compute capability in the ELF flags; ELF ABI 8 moved it up by a byte."""
    flags = int.from_bytes(data[0x30:0x34], "little")
    return flags & 0xFF if data[8] < 8 else flags >> 8 & 0xFF


def _sections(data: bytes) -> dict[str, bytes]:
    """name -> contents; a section without bytes in the file, such as shared memory, is as many zeros."""
    table = int.from_bytes(data[0x28:0x30], "little")
    count, names_at = struct.unpack_from("<HH", data, 0x3C)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, table + 64 * i) for i in range(count)]
    names = headers[names_at][4]
    out = {}
    for name_at, kind, _, _, offset, size, *_ in headers:
        name = data[names + name_at : data.index(b"\0", names + name_at)].decode()
        out[name] = bytes(size) if kind == 8 else data[offset : offset + size]
    return out


def _symbols(sections: Mapping[str, bytes]) -> list[str]:
    table, names = sections[".symtab"], sections[".strtab"]
    starts = [int.from_bytes(table[o : o + 4], "little") for o in range(0, len(table), 24)]
    return [names[s : names.index(b"\0", s)].decode() for s in starts]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(attribute, value): format 4 is followed by that many bytes, the others hold 16 bits."""
    o = 0
    while o + 4 <= len(data):
        form, attribute, value = struct.unpack_from("<BBH", data, o)
        o += 4
        if form == 4:
            yield attribute, data[o : o + value]
            o += value
        else:
            yield attribute, value.to_bytes(2, "little")
