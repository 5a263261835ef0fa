"""What the lines of a GPU plan file say, as objects: the launch facts that `emmy/runtime/cuda.cpp` reads, for code that prints them.

`emmy/codegen/gpu_plan.py` says the lines' form. Knows no kernel and no schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from emmy.errors import DataError

Postfix = tuple[str, ...]  # a whole number: constants, $i, + - * / % min max


@dataclass(frozen=True, slots=True)
class HeadSym:
    name: str
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class HeadBuffer:
    name: str
    item_bytes: int
    elements: Postfix
    is_argument: bool


@dataclass(frozen=True, slots=True)
class HeadMap:
    """A tensor map of a buffer. `panels`: 0 = none, else boxes of so many panels of `box_columns`, a dimension behind the rows.

    further: () = rows one after another; else how many elements apart they are, then (size, elements apart) of each further
             dimension, of which a box holds one position
    """

    of: str
    dtype: str
    box_rows: int
    box_columns: int
    swizzle: int
    panels: int
    columns: Postfix
    rows: Postfix
    further: tuple[Postfix, ...] = ()


@dataclass(frozen=True, slots=True)
class HeadKernel:
    """A launch. `parameters`, in order: a tensor map, or the name of a buffer or of a symbol."""

    name: str
    threads: int
    smem_bytes: int
    blocks: Postfix
    cluster: int = 1
    early: bool = False
    parameters: tuple[HeadMap | tuple[Literal["pass", "size"], str], ...] = ()


@dataclass(frozen=True, slots=True)
class PlanHead:
    syms: tuple[HeadSym, ...]
    buffers: tuple[HeadBuffer, ...]
    kernels: tuple[HeadKernel, ...]

    @property
    def arguments(self) -> tuple[HeadBuffer, ...]:
        return tuple(b for b in self.buffers if b.is_argument)

    @property
    def workspaces(self) -> tuple[HeadBuffer, ...]:
        return tuple(b for b in self.buffers if not b.is_argument)

    def most_bytes(self, b: HeadBuffer) -> int:
        """Bytes of a buffer at the largest sizes."""
        return b.item_bytes * value(b.elements, [s.hi for s in self.syms])


def read_head(lines: Sequence[str]) -> PlanHead:
    """The head that the lines say. Raises DataError for a line of another form."""
    syms, buffers, kernels = [], [], list[HeadKernel]()
    for number, line in enumerate(lines[1:], 2):
        match line.split():
            case ["sym", name, lo, hi]:
                syms.append(HeadSym(name, int(lo), int(hi)))
            case [("argument" | "workspace") as kind, name, item, *elements]:
                buffers.append(HeadBuffer(name, int(item), tuple(elements), kind == "argument"))
            case ["kernel", name, threads, smem, *blocks]:
                kernels.append(HeadKernel(name, int(threads), int(smem), tuple(blocks)))
            case ["cluster", n] if kernels:
                kernels[-1] = replace(kernels[-1], cluster=int(n))
            case ["early"] if kernels:
                kernels[-1] = replace(kernels[-1], early=True)
            case ["map", *words] if kernels:
                kernels[-1] = replace(kernels[-1], parameters=(*kernels[-1].parameters, _map(words)))
            case [("pass" | "size") as kind, name] if kernels:
                kernels[-1] = replace(kernels[-1], parameters=(*kernels[-1].parameters, (kind, name)))
            case _:
                raise DataError(f"line {number} of a plan file cannot be read: {line[:80]!r}")
    return PlanHead(tuple(syms), tuple(buffers), tuple(kernels))


def _map(words: Sequence[str]) -> HeadMap:
    form, columns, rows, *further = (tuple(part.split()) for part in " ".join(words).split(":"))
    name, dtype, box_rows, box_columns, swizzle, *panels = form
    box = int(box_rows), int(box_columns), int(swizzle), int(panels[0]) if panels else 0
    return HeadMap(name, dtype, *box, columns, rows, tuple(further))


_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a // b, "%": lambda a, b: a % b,
    "min": min, "max": max,
}  # fmt: skip


def value(x: Postfix, syms: Sequence[int]) -> int:
    """The number for these sizes."""
    stack: list[int] = []
    for w in x:
        if w in _OPERATIONS:
            b, a = stack.pop(), stack.pop()
            stack.append(_OPERATIONS[w](a, b))
        else:
            stack.append(syms[int(w[1:])] if w.startswith("$") else int(w))
    return stack[0]


def infix(x: Postfix, syms: Sequence[str]) -> str:
    """The number as a C expression of 64-bit values, symbols by the names given; `least` and `most` are called for min and max."""
    stack: list[str] = []
    for w in x:
        if w in ("min", "max"):
            b, a = stack.pop(), stack.pop()
            stack.append(f"{'least' if w == 'min' else 'most'}({a}, {b})")
        elif w in _OPERATIONS:
            b, a = stack.pop(), stack.pop()
            stack.append(f"({a} {w} {b})")
        else:
            stack.append(syms[int(w[1:])] if w.startswith("$") else f"INT64_C({w})")
    return stack[0]
