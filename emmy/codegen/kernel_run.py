"""What Kernel IR means: executes kernels on tiny shapes, one statement at a time, in numpy. Prints nothing, compiles nothing.

Every access is checked: against the bounds of its memory, and against elements nobody has written yet. Workspaces, outputs
and scratch start unwritten; a block's scratch is forgotten when the block ends. Blocks run in an order of the caller's choice,
so that a block that relies on another one is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from emmy.codegen.kernel import (
    Buffer,
    Call,
    For,
    If,
    Kernel,
    LaneMax,
    LaneSum,
    Let,
    LetInt,
    Load,
    Num,
    Number,
    Ramp,
    Set,
    Splat,
    Stmt,
    Store,
    Transpose,
    Var,
    View,
    Whole,
    evaluated,
    show_int,
)
from emmy.errors import PlanError
from emmy.ir.dtype import DType, decode, encode, storage
from emmy.ir.expr import FUNCTIONS

F32 = NDArray[np.float32]
Storage = NDArray[np.generic]


@dataclass(slots=True)
class _Memory:
    """A flat array and which of its elements have been written."""

    name: str
    dtype: DType
    data: Storage
    written: NDArray[np.bool_]
    read_only: bool = False

    @classmethod
    def empty(cls, name: str, dtype: DType, elements: int) -> _Memory:
        return cls(name, dtype, np.zeros(elements, storage(dtype)), np.zeros(elements, bool))

    def load(self, at: NDArray[np.int64], where: str) -> F32:
        self._check(at, where)
        if not self.written[at].all():
            raise PlanError(f"{where}: reads {self.name}[{int(at[~self.written[at]][0])}], which nobody has written")
        return decode(self.data[at], self.dtype).astype(np.float32)

    def store(self, at: NDArray[np.int64], x: F32, where: str) -> None:
        self._check(at, where)
        if self.read_only:
            raise PlanError(f"{where}: writes the input {self.name}")
        self.data[at] = encode(x, self.dtype)
        self.written[at] = True

    def _check(self, at: NDArray[np.int64], where: str) -> None:
        bad = at[(at < 0) | (at >= len(self.data))]
        if len(bad):
            raise PlanError(f"{where}: element {int(bad[0])} of {self.name}, which has {len(self.data)}")


def run(
    kernels: Sequence[Kernel],
    inputs: Mapping[str, Storage],
    syms: Mapping[str, int] | None = None,
    order: Callable[[int], Sequence[int]] = range,
) -> dict[str, Storage]:
    """Every output in storage form, flat. `order(n)` is the order in which a launch's n blocks run.

    Raises PlanError for an access out of bounds, a read of an unwritten element, and an output element left unwritten.
    """
    ints = {f"len_{name}": n for name, n in (syms or {}).items()}
    memory = {b.name: _buffer(b, inputs, ints) for b in kernels[0].buffers}
    for k in kernels:
        for block in order(evaluated(k.blocks, ints)):
            scratch = {s.name: _Memory.empty(s.name, "f32", evaluated(s.elements, ints)) for s in k.scratch}
            views = {name: (m, 0) for name, m in {**memory, **scratch}.items()}
            _Run(f"{k.name} block {block}", {**ints, "block": block}, views).body(k.body)
    for b in kernels[0].buffers:
        if b.role == "output" and not memory[b.name].written.all():
            raise PlanError(f"output {b.name}: element {int(np.argmin(memory[b.name].written))} is never written")
    return {b.name: memory[b.name].data for b in kernels[0].buffers if b.role == "output"}


def _buffer(b: Buffer, inputs: Mapping[str, Storage], ints: Mapping[str, int]) -> _Memory:
    n = evaluated(b.elements, ints)
    if b.role != "input":
        return _Memory.empty(b.name, b.dtype, n)
    data = inputs[b.name].reshape(-1)
    if len(data) != n:
        raise PlanError(f"input {b.name} has {len(data)} elements, the kernel reads {n}")
    return _Memory(b.name, b.dtype, data, np.ones(n, bool), read_only=True)


@dataclass(slots=True)
class _Run:
    """One block: names in scope and their values."""

    where: str
    ints: dict[str, int]
    views: dict[str, tuple[_Memory, int]]
    numbers: dict[str, F32] = field(default_factory=dict)

    def body(self, body: tuple[Stmt, ...]) -> None:
        for s in body:
            self.stmt(s)

    def stmt(self, s: Stmt) -> None:
        match s:
            case LetInt(name, whole):
                self.ints[name] = self.whole(whole)
            case Let(name, x) | Set(name, x):
                if isinstance(s, Set) and self.numbers[name].shape != (x.lanes,):
                    raise PlanError(
                        f"{self.where}: {name} has {len(self.numbers[name])} lanes, its new value {x.lanes}"
                    )
                self.numbers[name] = self.number(x)
            case View(name, of, at):
                memory, offset = self.views[of]
                self.views[name] = (memory, offset + self.whole(at))
            case Store(view, at, x, count):
                lanes = np.arange(x.lanes if count is None else min(x.lanes, self.whole(count)))
                memory, offset = self.views[view]
                memory.store(
                    offset + self.whole(at) + lanes, self.number(x)[lanes], f"{self.where}: {view}[{show_int(at)}]"
                )
            case Transpose():
                self.transpose(s)
            case For(var, lo, hi, step, body):
                for i in range(self.whole(lo), self.whole(hi), step):
                    self.ints[var] = i
                    self.body(body)
            case If(cond, then, other):
                self.body(then if self.whole(cond) else other)

    def whole(self, x: Whole) -> int:
        return evaluated(x, self.ints, self.position)

    def position(self, view: str, at: int) -> int:
        memory, offset = self.views[view]
        return int(memory.load(np.array([offset + at]), f"{self.where}: {view}[{at}]")[0])

    def transpose(self, s: Transpose) -> None:
        (to, to_offset), (of, of_offset) = self.views[s.to], self.views[s.of]
        lanes = np.arange(s.lanes)
        for j in range(s.lanes):
            column = of.load(of_offset + self.whole(s.of_at) + lanes * self.whole(s.of_pitch) + j, self.where)
            to.store(to_offset + self.whole(s.to_at) + j * self.whole(s.to_pitch) + lanes, column, self.where)

    def number(self, x: Number) -> F32:
        match x:
            case Num(v, lanes):
                return np.full(lanes, v, np.float32)
            case Var(name):
                return self.numbers[name]
            case Load():
                return self.load(x)
            case Splat(a, lanes):
                return np.repeat(self.number(a), lanes)
            case Ramp(start, lanes):
                return (self.whole(start) + np.arange(lanes)).astype(np.float32)
            case LaneSum(a):
                return np.array([self.number(a).sum()], np.float32)
            case LaneMax(a):
                return np.array([self.number(a).max()], np.float32)
            case Call(fn, args):
                wide = [self.number(a).astype(np.float64) for a in args]
                if len({len(w) for w in wide}) > 1:
                    raise PlanError(f"{self.where}: {fn} of {', '.join(str(len(w)) for w in wide)} lanes")
                with np.errstate(all="ignore"):
                    y = wide[0] * wide[1] + wide[2] if fn == "fma" else FUNCTIONS[fn][1](*wide)
                    return np.asarray(y).astype(np.float32)

    def load(self, x: Load) -> F32:
        memory, offset = self.views[x.view]
        n = x.lanes if x.count is None else min(x.lanes, self.whole(x.count))
        at = offset + self.whole(x.at) + np.arange(n) * self.whole(x.stride)
        out = np.zeros(x.lanes, np.float32)
        out[:n] = memory.load(at, f"{self.where}: {x.view}[{show_int(x.at)}]")
        return out
