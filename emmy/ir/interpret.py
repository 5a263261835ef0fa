"""What a Program means: every stage evaluated whole, in float64. The yardstick for plans, kernels and devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from emmy.errors import PlanError
from emmy.ir.expr import Array, Block, Env, Named, evaluate
from emmy.ir.program import Monoid, Program, Stage

Load = Callable[[str], Block]
State = dict[str, Named]


def _no_reads(name: str) -> Block:
    raise PlanError(f"a monoid's expression reads the value {name}; it may use only its own components")


def combine(m: Monoid, left: State, right: State) -> State:
    """The state of two neighbouring pieces of the reduced axis together."""
    names = {**{f"a_{c}": x for c, x in left.items()}, **{f"b_{c}": x for c, x in right.items()}}
    return {c: evaluate(e, {}, _no_reads, names) for (c, _), e in zip(m.state, m.combine, strict=True)}


def finish(m: Monoid, state: State) -> Named:
    """The value a state stands for."""
    return evaluate(m.finish, {}, _no_reads, state)


def lift(s: Stage, env: Env, load: Load) -> State:
    """The state of the block `env` of a stage; {"x": body} when it reduces nothing."""
    m = s.monoid
    if m is None:
        return {"x": evaluate(s.body, env, load)}
    if m.lift:
        local: dict[str, Block] = {}
        for inner in m.lift:
            got = value_of(inner, env, lambda n: local[n] if n in local else load(n))
            local[inner.out] = whole(inner.out, inner.axes, env, got)
        return {c: Named(local[c].axes, local[c].data) for c, _ in m.state}
    x = _expand(evaluate(s.body, env, load), s.folded, env)
    for axis in s.folded:
        x = _fold(m, x, axis)
    return {"x": x}


def _expand(x: Named, folded: tuple[str, ...], env: Env) -> Named:
    """x with every folded axis at full size, so that a body that ignores an axis still counts once per position."""
    axes = x.axes + tuple(a for a in folded if a not in x.axes)
    shape = [x.data.shape[x.axes.index(a)] if a in x.axes else env[a][1] - env[a][0] for a in axes]
    return Named(axes, np.broadcast_to(x.to(axes), shape))


def _fold(m: Monoid, x: Named, axis: str) -> Named:
    """x reduced over one axis by combining neighbours, all pairs at once: the monoid's only meaning."""
    at = x.axes.index(axis)
    rest, data = x.axes[:at] + x.axes[at + 1 :], np.moveaxis(x.data, at, 0)
    if len(data) == 0:
        return Named(rest, np.full(data.shape[1:], m.identity[0]))
    while len(data) > 1:
        even = len(data) & ~1
        pairs = combine(m, {"x": Named(x.axes, data[0:even:2])}, {"x": Named(x.axes, data[1:even:2])})["x"].data
        data = np.concatenate([pairs, data[even:]])
    return Named(rest, data[0])


def value_of(s: Stage, env: Env, load: Load) -> Named:
    """The finished block of a stage."""
    state = lift(s, env, load)
    return finish(s.monoid, state) if s.monoid else state["x"]


def whole(name: str, axes: tuple[str, ...], env: Env, x: Named) -> Block:
    """`x` as a block of `env`, broadcast to its full shape."""
    shape = [env[a][1] - env[a][0] for a in axes]
    return Block(name, axes, tuple(env[a][0] for a in axes), np.array(np.broadcast_to(x.to(axes), shape)))


def run(program: Program, inputs: Mapping[str, Array], sizes: Mapping[str, int] | None = None) -> dict[str, Array]:
    """Every output, float64. `inputs` are float64 arrays of the values' shapes; `sizes` gives each symbol's size."""
    env: dict[str, tuple[int, int]] = {a: (0, n) for a, n in program.sizes(sizes).items()}
    memory = load_inputs(program, inputs, env)
    for s in program.stages:
        memory[s.out] = whole(s.out, s.axes, env, value_of(s, env, memory.__getitem__))
    return {o: memory[o].data for o in program.outputs}


def load_inputs(program: Program, inputs: Mapping[str, Array], env: Env) -> dict[str, Block]:
    """The inputs as blocks, and views of them. Raises PlanError naming the first one that is missing or has the wrong shape."""
    memory: dict[str, Block] = {}
    for v in program.inputs:
        want = tuple(env[a][1] - env[a][0] for a in v.axes)
        if v.name not in inputs or inputs[v.name].shape != want:
            got = inputs[v.name].shape if v.name in inputs else "nothing"
            raise PlanError(f"input {v.name}: got {got}, needs shape {want}")
        memory[v.name] = Block(v.name, v.axes, (0,) * len(want), np.asarray(inputs[v.name], dtype=np.float64))
    for x in program.views:
        memory[x.out] = whole(x.out, x.axes, env, evaluate(x.body, env, memory.__getitem__))
    return memory
