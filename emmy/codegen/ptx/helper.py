"""One device helper: an instruction's CUDA text and what it does on the emulator, side by side. Knows no kernel.

Generated kernels hold no inline PTX of their own: every instruction that C++ cannot say is a call of a helper `emmy_<name>`.
The emulator compiles the same kernel text with the helpers' other bodies.
"""

from __future__ import annotations

from dataclasses import dataclass

ARCHS: tuple[str, ...] = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_120a")
AMPERE = frozenset(ARCHS)  # and later
HOPPER = frozenset({"sm_90a", "sm_120a"})  # and later
WGMMA = frozenset({"sm_90a"})  # PTX ISA: wgmma.mma_async requires sm_90a, and no later family has it


@dataclass(frozen=True, slots=True)
class Helper:
    """A function of generated kernels.

    signature: C++ without the name's prefix, such as "void ldmatrix_x1(u32* r, u32 row)"; addresses of shared memory are u32
    section:   of the PTX ISA or the CUDA C++ Programming Guide, that the PTX and the meaning come from
    cuda:      the body on a GPU
    emu:       the body on the emulator; it may use `site`, the place of the call. None when the CUDA body is plain C++
    archs:     those whose assembler accepts the body
    template:  parameters of a template, such as "int N"
    uses:      names of helpers the CUDA body calls
    """

    name: str
    signature: str
    section: str
    cuda: str
    emu: str | None
    archs: frozenset[str] = AMPERE
    template: str = ""
    uses: tuple[str, ...] = ()

    @property
    def cuda_text(self) -> str:
        return f"{self._head(self.signature)} {{\n{_indent(self.cuda)}\n}}"

    @property
    def emu_text(self) -> str:
        if self.emu is None:
            return self.cuda_text
        signature = self.signature
        if "site" in self.emu:
            comma = "" if signature.endswith("()") else ", "
            signature = f"{signature[:-1]}{comma}EMMY_SITE)"
        return f"{self._head(signature)} {{\n{_indent(self.emu)}\n}}"

    def _head(self, signature: str) -> str:
        returns, rest = signature.split(" ", 1)
        template = f"template <{self.template}> " if self.template else ""
        return f"{template}EMMY_DEV {returns} emmy_{rest}"


def _indent(body: str) -> str:
    return "\n".join(f"  {line}" if line else line for line in body.strip("\n").splitlines())


def asm(text: str, outputs: str = "", inputs: str = "", *, volatile: bool = True, memory: bool = False) -> str:
    """An inline assembly statement. `memory`: other memory accesses may not be moved across it."""
    lines = [line.strip() for line in text.strip().splitlines()]
    quoted = " ".join(f'"{line}\\n"' for line in lines) if len(lines) > 1 else f'"{text}"'
    tail = [f" : {outputs}" if outputs else " :", f" : {inputs}" if inputs else " :", ' : "memory"' if memory else ""]
    while tail and tail[-1] in ("", " :"):
        tail.pop()
    return f"asm {'volatile' if volatile else ''}({quoted}{''.join(tail)});".replace("asm (", "asm(")


def registers(constraint: str, array: str, n: int) -> str:
    """Operands array[0] to array[n-1], such as `"=r"(r[0]), "=r"(r[1])`."""
    return ", ".join(f'"{constraint}"({array}[{i}])' for i in range(n))


def numbered(first: int, n: int) -> str:
    """`%first, ..., %first+n-1`: places of operands in assembly text."""
    return ", ".join(f"%{i}" for i in range(first, first + n))
