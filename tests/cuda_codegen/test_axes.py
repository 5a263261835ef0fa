"""Values of three axes and more on a GPU: a block is a matrix at one position of every other axis, whichever these are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from emmy.codegen.build import SourceUnit, source
from emmy.codegen.emulated import emulate_plan
from emmy.codegen.emulator import SCHEDULES
from emmy.codegen.execute import execute
from emmy.codegen.gpu_plan import gpu_plan
from emmy.codegen.kernel import Int
from emmy.codegen.kernel_gpu import GpuKernel
from emmy.errors import IllegalMove
from emmy.ir import interpret
from emmy.ir.dtype import decode, encode
from emmy.ir.expr import parse
from emmy.ir.program import SUM, Dim, Program, Reduce, Stage, Sym, Value
from emmy.ir.schedule import replay
from emmy.ir.target import load_target

SIZES: dict[str, Dim] = {"b": 2, "g": 2, "h": 3, "s": 40, "t": 56, "d": 136}
Axes = str  # each axis a letter


def scores(q: Axes, k: Axes, out: Axes, sizes: Mapping[str, Dim] = SIZES, added: Axes = "", y: Axes = "") -> Program:
    """S[out] = sum over d of Q * K; with `y`, Y[y] = S + R[added] is what leaves."""
    s = Stage(
        "S", tuple(out), parse(f"Q[{','.join(q)}] * K[{','.join(k)}]"), (Reduce("d", SUM),), "f32" if y else "f16"
    )
    stages, inputs = (s,), (Value("Q", tuple(q), "f16"), Value("K", tuple(k), "f16"))
    if y:
        body = parse(f"S[{','.join(out)}] + R[{','.join(added)}]")
        stages, inputs = (*stages, Stage("Y", tuple(y), body, (), "f16")), (*inputs, Value("R", tuple(added), "f16"))
    dims = tuple((a, n) for a, n in sizes.items() if a in {*q, *k, *out})
    return Program(dims, inputs, stages, (stages[-1].out,))


def tile(outer: Axes, d: int, stage: str, then: str = "") -> str:
    loops = "".join(f"k0/split({a},grid,1) " for a in outer)
    return (
        f"{loops}k0/split(s,grid,64) k0/split(t,grid,64) k0/split(d,serial,{d}) k0/split(s,warpgroup,64) "
        f"{stage} k0.S/atom(wgmma,64,64,16){then}"
    )


def warps(outer: Axes, transport: str) -> str:
    loops = "".join(f"k0/split({a},grid,1) " for a in outer)
    return (
        f"{loops}k0/split(s,grid,32) k0/split(t,grid,32) k0/split(d,serial,32) k0/split(s,warp,16) k0/split(t,warp,16) "
        f"k0/stage(Q,{transport},2) k0/stage(K,{transport},2) k0.S/atom(mma,16,8,16)"
    )


def wrong(u: SourceUnit, sizes: Mapping[str, int] | None = None, *, steps: bool = True, seed: int = 0) -> float:
    """The largest error of a unit's outputs on the emulator, and of its steps."""
    p, rng = u.plan.program, np.random.default_rng(0)
    size = p.sizes(sizes)
    normal = {v.name: rng.standard_normal([size[a] for a in v.axes], dtype=np.float32) for v in p.inputs}
    x = {v.name: encode(normal[v.name], v.dtype) for v in p.inputs}
    decoded = {v.name: decode(x[v.name], v.dtype) for v in p.inputs}
    want = interpret.run(p, decoded, dict(sizes or {}))
    got, _ = emulate_plan(u, x, sizes, seed=seed)
    out = max(float(np.abs(decode(got[o], p.value(o).dtype) - want[o]).max()) for o in p.outputs)
    if steps:
        made = execute(u.plan, decoded, dict(sizes or {}), seed=1)
        out = max(out, *(float(np.abs(made[o] - want[o]).max()) for o in p.outputs))
    return out


BOTH, PANELS = "k0/stage(Q,tma,2) k0/stage(K,tma,2)", "k0/stage(Q,tma,2,panels) k0/stage(K,tma,2,panels)"
LONG = {**SIZES, "d": 256}
CASES: dict[str, tuple[Program, str, str]] = {
    "heads come first": (scores("hsd", "htd", "hst"), "h200", tile("h", 64, BOTH)),
    "heads lie side by side": (scores("shd", "thd", "hst"), "h200", tile("h", 64, BOTH, " k0/store(S,tma)")),
    "grouped query": (scores("bsghd", "bgtd", "bghst"), "h200", tile("bgh", 64, BOTH)),
    "panels, four dimensions": (scores("shd", "htd", "hst", LONG), "h200", tile("h", 128, PANELS)),
    "panels, five dimensions": (scores("bshd", "bhtd", "bhst", LONG), "h200", tile("bh", 128, PANELS)),
    "a residual and a result of other orders": (
        scores("shd", "thd", "hst", added="sht", y="sht"),
        "h200",
        tile("h", 64, BOTH, " k0/store(Y,tma)"),
    ),
    "stored by lanes": (scores("shd", "thd", "hst", added="sht", y="sht"), "h200", tile("h", 64, BOTH)),
    "cp_async": (scores("bshd", "bthd", "bhst"), "rtx4090", warps("bh", "cp_async")),
    "ldg": (scores("bshd", "bhtd", "bhst"), "rtx4090", warps("bh", "ldg")),
    "rows of a size that is open": (
        scores("bhsd", "bthd", "bhst", {**SIZES, "s": Sym("s", 1, 90)}),
        "h200",
        tile("bh", 64, BOTH, " k0/store(S,tma)"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_text_and_the_steps_are_right(name: str):
    p, gpu, schedule = CASES[name]
    for s in (33, 90) if p.syms else (None,):
        assert wrong(source(p, schedule, load_target(gpu)), s and {"s": s}) < 0.04


def kernel(u: SourceUnit) -> GpuKernel:
    (k,) = u.kernels
    assert isinstance(k, GpuKernel)
    return k


def flat(u: SourceUnit, value: str, rows: int) -> SourceUnit:
    """The unit with a value's copies by a map of two dimensions, all its heads' rows one below another."""
    k, last = kernel(u), re.compile(rf"(&{value}_map, .*), (\S[^,]*), block\);")
    lines = [
        last.sub(rf"\1, block * {rows} + \2);", x.replace("_3d(", "_2d(") if f"&{value}_map" in x else x)
        for x in u.text.splitlines()
    ]
    maps = tuple(replace(m, rows=Int(3 * rows), outer=()) if m.value == value else m for m in k.maps)
    text = "\n".join(lines)
    assert text != u.text
    return replace(u, text=text, kernels=(replace(k, maps=maps),))


def test_copies_that_read_on_into_the_next_matrix_are_noticed():
    """Where the axis that is folded has the rows of both operands, what lies over its end is multiplied."""
    u = source(scores("hds", "hdt", "hst"), tile("h", 64, BOTH), load_target("h200"))
    assert wrong(u, steps=False) < 0.04
    assert wrong(flat(flat(u, "Q", 136), "K", 136), steps=False) > 1


def test_a_store_that_goes_on_into_the_next_matrix_is_noticed():
    u = source(scores("hsd", "htd", "hst"), tile("h", 64, BOTH, " k0/store(S,tma)"), load_target("h200"))
    bad = flat(u, "S", 40)
    errors = [wrong(bad, steps=False, seed=seed) for seed, _ in SCHEDULES]  # which block comes last is chance
    assert any(not e < 1 for e in errors) and wrong(u, steps=False, seed=1) < 0.04


@pytest.mark.parametrize("value", ["Q", "K", "S"])
def test_a_head_left_out_of_a_copy_is_noticed(value: str):
    u = source(scores("hsd", "htd", "hst"), tile("h", 64, BOTH, " k0/store(S,tma)"), load_target("h200"))
    lines = [x.replace(", block);", ", 0);") if f"&{value}_map" in x else x for x in u.text.splitlines()]
    bad = replace(u, text="\n".join(lines))
    assert bad.text != u.text
    assert not wrong(bad, steps=False) < 1


def test_a_launcher_is_told_every_dimension():
    u = source(*CASES["panels, five dimensions"][::2], load_target("h200"))
    lines = gpu_plan(u.plan, (kernel(u),), b"").decode().splitlines()
    assert "map Q f16 64 64 3 2 : 256 : 40 : 768 : 3 : 256 : 2 : 30720" in lines
    assert "map K f16 64 64 3 2 : 256 : 56 : 256 : 3 : 14336 : 2 : 43008" in lines


def test_blocks_that_are_no_matrices_are_refused():
    p, h200 = scores("shd", "htd", "hst"), load_target("h200")
    loops = "k0/split(s,grid,64) k0/split(t,grid,64) k0/split(d,serial,64) k0/split(s,warpgroup,64) "
    with pytest.raises(IllegalMove, match=r"a block of Q has 64 of s, 3 of h; .* split\(s,grid,1\)"):
        replay(p, f"{loops}k0/stage(Q,tma,2)", h200)
