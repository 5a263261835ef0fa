"""Programs beyond matmul: norms, softmax, attention with its online form, elementwise stages, all of them right on a CPU."""

from __future__ import annotations

import numpy as np
import pytest

from emmy.codegen.build import source
from emmy.errors import PlanError
from emmy.ir.dtype import DTYPES, DType, decode, encode, storage
from emmy.ir.expr import FUNCTIONS, parse
from emmy.ir.interpret import run
from emmy.ir.program import MAX, SUM, Program, Reduce, Stage, Sym, Value
from emmy.ir.target import load_target
from tests.codegen.running import compiled, interpreted, usable

TARGETS = usable("cpu", "cpu-avx2", "cpu-portable")


def attention() -> Program:
    dims = (("h", 2), ("q", 5), ("k", 7), ("e", 4), ("d", 4))
    inputs = (Value("Q", ("h", "q", "e")), Value("K", ("h", "k", "e")), Value("V", ("h", "k", "d")))
    over_k = (Reduce("k", SUM),)
    stages = (
        Stage("S", ("h", "q", "k"), parse("Q[h,q,e] * K[h,k,e]"), (Reduce("e", SUM),)),
        Stage("A", ("h", "q", "k"), parse("where(k <= q + 2, S[h,q,k] * 0.5, -1e30)")),
        Stage("M", ("h", "q"), parse("A[h,q,k]"), (Reduce("k", MAX),)),
        Stage("P", ("h", "q", "k"), parse("exp(A[h,q,k] - M[h,q])")),
        Stage("L", ("h", "q"), parse("P[h,q,k]"), over_k),
        Stage("N", ("h", "q", "d"), parse("P[h,q,k] * V[h,k,d]"), over_k),
        Stage("O", ("h", "q", "d"), parse("N[h,q,d] / L[h,q]")),
    )
    return Program(dims, inputs, stages, ("O",))


def norm_linear() -> Program:
    stages = (
        Stage("s", ("m",), parse("X[m,k] * X[m,k]"), (Reduce("k", SUM),)),
        Stage("r", ("m",), parse("rsqrt(s[m] / 11 + 0.001)")),
        Stage("Xn", ("m", "k"), parse("X[m,k] * r[m] * g[k]")),
        Stage("Y", ("m", "n"), parse("Xn[m,k] * W[n,k]"), (Reduce("k", SUM),)),
    )
    inputs = (Value("X", ("m", "k")), Value("g", ("k",)), Value("W", ("n", "k")))
    return Program((("m", 5), ("n", 37), ("k", 11)), inputs, stages, ("Y",))


def gated() -> Program:
    """Two contractions that share an operand, and an elementwise stage that reads both."""
    stages = (
        Stage("G", ("m", "n"), parse("X[m,k] * V[k,n]"), (Reduce("k", SUM),)),
        Stage("U", ("m", "n"), parse("X[m,k] * W[n,k]"), (Reduce("k", SUM),)),
        Stage("Y", ("m", "n"), parse("silu(G[m,n]) * U[m,n]")),
    )
    inputs = (Value("X", ("m", "k")), Value("V", ("k", "n")), Value("W", ("n", "k")))
    return Program((("m", 13), ("n", 37), ("k", 11)), inputs, stages, ("Y",))


PACKED = "k0/split(m,core,5) k0/split(k,serial,4) k0/stage(X,pack,1) k0/stage(V,pack,1) k0/stage(W,pack,1)"


@pytest.mark.parametrize(
    ("make", "schedule"),
    [
        (gated, ""),
        (gated, f"{PACKED} k0.G/atom(fma,2,8,1,4) k0.U/atom(fma,4,4,1,4)"),
        (gated, f"{PACKED} k0.G/atom(fma,4,8,1,4) k0.U/atom(dot,2,2,4,4)"),
        (gated, "k0/split(n,core,16) k0.G/atom(fma,4,8,1,4) k0.U/atom(dot,2,2,4,4)"),
        (norm_linear, ""),
        (norm_linear, "k0/split(m,core,2)"),
        (norm_linear, "k0/fuse(Xn,Y) k0/commute(Y) k0/split(m,core,2)"),
        (norm_linear, "k0/fuse(Xn,Y) k0/commute(Y) k0/operand(Y_acc,g,W)"),
        (norm_linear, "k0/splitk(s,2)"),
        (norm_linear, "k0/cut(Y) k1/splitk(Y,3) k1/split(m,core,2) k1.Y/atom(fma,2,16,1,4)"),
        (attention, ""),
        (attention, "k0/split(h,core,1) k0/split(q,core,2)"),
        (attention, "k0/online(O) k0/split(h,core,1) k0/split(q,core,2) k0/split(k,serial,3)"),
        (attention, "k0/online(O) k0/splitk(O,3)"),
    ],
)
def test_a_program_of_several_stages_agrees_with_its_meaning(make: object, schedule: str) -> None:
    program, target = make(), load_target("cpu-portable")  # type: ignore[operator]
    rng = np.random.default_rng(7)
    inputs = {v.name: rng.standard_normal([program.dim(a) for a in v.axes], dtype=np.float32) for v in program.inputs}
    want = run(program, {name: x.astype(np.float64) for name, x in inputs.items()})
    unit = source(program, schedule, target)
    for got in (compiled(unit, target, inputs, threads=2), interpreted(unit, inputs)):
        for name, ref in want.items():
            np.testing.assert_allclose(got[name], ref, rtol=1e-5, atol=1e-5)


def elementwise(body: str, inputs: dict[str, DType], out: DType, n: int) -> Program:
    values = tuple(Value(name, ("i",), dtype) for name, dtype in inputs.items())
    return Program((("i", n),), values, (Stage("Y", ("i",), parse(body), (), out),), ("Y",))


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered in cast")  # NaN and infinity are meant
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_all_65536_numbers_of_a_narrow_format_are_read_exactly(dtype: DType, name: str) -> None:
    program, target = elementwise("X[i] * 1", {"X": dtype}, "f32", 65536), load_target(name)
    bits = np.arange(65536, dtype=np.uint16).view(storage(dtype))
    got = compiled(source(program, "", target), target, {"X": bits})["Y"]
    np.testing.assert_array_equal(got, decode(bits, dtype).astype(np.float32))


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered in cast")  # NaN and infinity are meant
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_stores_to_a_narrow_format_round_to_nearest_even_and_keep_infinities_and_nan(dtype: DType, name: str) -> None:
    # every number of the format, the midpoints to the next one, and their f32 neighbours: where rounding decides
    exact = decode(np.arange(65536, dtype=np.uint16).view(storage(dtype)), dtype).astype(np.float32)
    finite = np.sort(exact[np.isfinite(exact)])
    middle = ((finite[1:].astype(np.float64) + finite[:-1]) / 2).astype(np.float32)
    x = np.concatenate(
        [exact, middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf))]
    )
    x = np.concatenate([x, np.float32([65504, 65519.99, 65520, 1e6, -1e9, 3.4e38, 1e-40, -1e-45, 0.0, -0.0])])
    program, target = elementwise("X[i] * 1", {"X": "f32"}, dtype, len(x)), load_target(name)
    got = compiled(source(program, "", target), target, {"X": x})["Y"]
    want = decode(encode(x, dtype), dtype)
    np.testing.assert_array_equal(decode(got, dtype), want)
    assert (np.signbit(decode(got, dtype)) == np.signbit(want))[~np.isnan(want)].all()


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("fn", sorted(fn for fn, (arity, _) in FUNCTIONS.items() if arity == 1))
def test_a_function_of_one_number_is_right_to_four_ulp_and_keeps_nan(fn: str, name: str) -> None:
    x = np.concatenate(
        [np.linspace(-12, 12, 4001), np.geomspace(1e-30, 80, 500), -np.geomspace(1e-30, 80, 500)]
    ).astype(np.float32)
    if fn in ("sqrt", "rsqrt"):
        x = np.abs(x) + np.float32(1e-30)
    x = np.append(x, np.float32(np.nan))
    program, target = elementwise(f"{fn}(X[i])", {"X": "f32"}, "f32", len(x)), load_target(name)
    got = compiled(source(program, "", target), target, {"X": x})["Y"]
    assert np.isnan(got[-1])
    with np.errstate(all="ignore"):
        want = FUNCTIONS[fn][1](x[:-1].astype(np.float64))
    # an activation loses relative accuracy where it goes to zero, as its own definition in f32 does
    slack = 1e-6 if fn in ("gelu_tanh", "silu") else 1e-37
    np.testing.assert_allclose(got[:-1], want, rtol=4 * 2.0**-23, atol=slack)


@pytest.mark.parametrize("name", TARGETS)
def test_choices_and_positions_work_on_vectors_and_tails(name: str) -> None:
    program, target = (
        elementwise(
            "where(i < 20, maximum(X[i], Z[i]), minimum(X[i], Z[i]) - i)", {"X": "f32", "Z": "bf16"}, "f32", 37
        ),
        load_target(name),
    )
    rng = np.random.default_rng(3)
    inputs = {"X": rng.standard_normal(37).astype(np.float32), "Z": encode(rng.standard_normal(37), "bf16")}
    want = run(program, {"X": decode(inputs["X"], "f32"), "Z": decode(inputs["Z"], "bf16")})["Y"]
    unit = source(program, "", target)
    for got in (compiled(unit, target, inputs), interpreted(unit, inputs)):
        np.testing.assert_allclose(got["Y"], want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_symbolic_size_is_not_baked_into_the_source(dtype: DType) -> None:
    program = Program(
        (("i", Sym("i", 1, 100)),),
        (Value("X", ("i",), dtype),),
        (Stage("Y", ("i",), parse("X[i] + 1"), (), dtype),),
        ("Y",),
    )
    target = load_target("cpu")
    unit = source(program, "k0/split(i,core,7)", target)
    for n in (1, 7, 20, 100):
        x = {"X": encode(np.arange(n, dtype=np.float64), dtype)}
        for got in (compiled(unit, target, x, {"i": n}, threads=2), interpreted(unit, x, {"i": n})):
            np.testing.assert_array_equal(decode(got["Y"], dtype), np.arange(n) + 1.0)


def test_a_gpu_refuses_a_contraction_without_an_atom() -> None:
    with pytest.raises(PlanError, match="has no atom; a GPU makes contractions of mma"):
        source(gated(), "", load_target("rtx4090"))
