"""What moves refuse, each with the schedule that would otherwise compute something else; and what they need not refuse."""

from __future__ import annotations

import pytest

from emmy.errors import IllegalMove
from emmy.ir.expr import parse
from emmy.ir.ops import parse_op
from emmy.ir.program import MAX, SUM, Program, Reduce, Stage, Sym, Value
from emmy.ir.schedule import replay
from emmy.ir.target import load_target
from emmy.testing.five_plans import attention, norm_linear
from emmy.testing.move_contract import check_meaning

MATMUL = parse_op("matmul:70x33x56:f16:nk").program()
BIASED = parse_op("matmul:19x25x34:f32:bias,silu").program()
NORM = norm_linear(21, 19, 18)
ATTENTION = attention(2, 17, 24, 16)
SQUARE = parse_op("matmul:32x32x32:f16:nk").program()
SCALED = Program(
    (("m", 5), ("n", 16), ("k", 6)),
    (Value("A", ("m", "k")), Value("B", ("n", "k")), Value("g", ("k",))),
    (
        Stage("Xs", ("m", "k"), parse("A[m,k] * g[k]")),
        Stage("C", ("m", "n"), parse("Xs[m,k] * B[n,k]"), (Reduce("k", SUM),)),
    ),
    ("Xs", "C"),
)
PIPELINED = parse_op("matmul:32x32x96:f16:nk,bias").program()
AHEAD = "k0/split(k,serial,32) k0/stage(A,tma,2) k0/stage(B,tma,2)"
WIDE = parse_op("matmul:64x64x64:f16").program()
TILED = (
    "k0/split(m,grid,32) k0/split(n,grid,32) k0/split(k,serial,32) k0/split(m,warp,16) k0/split(n,warp,32) "
    "k0/stage(A,cp_async,2) k0/stage(B,cp_async,2) k0.C/atom(mma,16,8,16)"
)
JOINED = "k0/fuse(Xn,Y) k0/commute(Y) k0/operand(Y_acc,g,W)"

REFUSED = {
    "pieces that are gone when a loop is walked again": (
        ATTENTION, "cpu", "k0/split(k,serial,8)", "P reads A, of which the loop over k leaves but",
    ),
    "an operand made in a loop that its reader does not share": (
        NORM, "rtx4090", f"{JOINED} k0/split(m,serial,8) k0/split(k,serial,8)", "reads W_g outside the loop over k",
    ),
    "an output stored by every block of an axis it lacks": (
        SCALED, "cpu", "k0/split(n,core,8)", "Xs leaves k0 and has no axis n: every block over n would store it",
    ),
    "an operand stored by every block for another launch": (NORM, "cpu", "k0/cut(Y) k0/split(n,core,8)", "k0 has no axis n; k0 has m, k"),
    "writing a value that leaves the program into its reader": (
        SCALED, "cpu", "k0/fuse(Xs,C)", "Xs is read by C and leaves the program",
    ),
    "a loop over blocks that parts the blocks of a cluster": (
        SQUARE, "h200", "k0/split(k,cluster,16) k0/split(m,grid,16)", "the grid loop over m would part the blocks of a cluster over k",
    ),
    "sums exchanged anew in each piece of another axis": (
        SQUARE, "h200", "k0/split(k,cluster,16) k0/split(n,serial,8)", "in each piece of n: the serial loop over n comes after",
    ),
    "more workers that wait for one another than have a place": (
        SQUARE, "h200", f"k0/split(m,grid,16) {AHEAD} k0/streamk(133)", "133 workers wait for one another: h200 certainly has",
    ),
    "shares of steps that no ring takes": (SQUARE, "h200", "k0/split(m,grid,16) k0/streamk(2)", "A, B has no channel: streamk needs"),
    "shares of a tile filled at once": (
        SQUARE, "h200", "k0/split(m,grid,16) k0/stage(A,tma,1) k0/split(k,serial,16) k0/stage(B,tma,2) k0/streamk(2)",
        "A is filled in loop 0, not in loop 1",
    ),
    "shares of clusters": (
        SQUARE, "h200", f"k0/split(m,grid,16) k0/split(m,cluster,8) {AHEAD} k0/streamk(2)", "clusters of 2 blocks make tiles",
    ),
    "shares of tiles taken in turn": (
        WIDE, "h200", "k0/split(m,grid,64) k0/split(n,grid,32) k0/split(k,serial,16) k0/stage(A,tma,2) k0/stage(B,tma,2) "
        "k0/specialize(2,40,232) k0/streamk(2) k0/pingpong()", "tiles of k0 are streamk: persist first",
    ),
    "shares of what is left in parts": (
        WIDE, "h200", "k0/splitk(C,2) k0/split(m,grid,32) k0/split(k,serial,16) k0/stage(A,tma,2) k0/stage(B,tma,2) k0/streamk(2)",
        "C is left in 2 parts already",
    ),
    "shares of a loop beside another": (
        WIDE, "h200", "k0/split(m,grid,32) k0/split(k,serial,32) k0/split(k,serial,16) k0/stage(A,tma,2) k0/stage(B,tma,2) k0/streamk(2)",
        "the serial loop over k in pieces of 16 stands inside",
    ),
    "a cluster of whole blocks": (
        SQUARE, "h200", "k0/split(n,grid,16) k0/split(m,cluster,16)", "a cluster over m cuts up the piece of a block: split",
    ),
    "clusters over two axes": (
        SQUARE, "h200", "k0/split(m,grid,32) k0/split(m,cluster,16) k0/split(k,cluster,16)", "k0 form clusters over m already",
    ),
    "blocks of a cluster that walk their pieces unevenly": (
        SQUARE, "h200", "k0/split(m,grid,32) k0/split(m,cluster,16) k0/split(m,serial,8)", "would walk m unevenly at its edge",
    ),
    "workers that are no whole clusters": (
        SQUARE, "h200", "k0/split(m,grid,32) k0/split(m,cluster,8) k0/persist(6)", "6 workers are not whole clusters of 4 blocks",
    ),
    "another sum over the axis that splitk shares out": (
        Program(
            (("m", 5), ("k", 24)), (Value("X", ("m", "k")),),
            (
                Stage("top", ("m",), parse("X[m,k]"), (Reduce("k", MAX),)),
                Stage("s", ("m",), parse("X[m,k]"), (Reduce("k", SUM),)),
                Stage("d", ("m",), parse("s[m] + top[m]")),
            ), ("d",),
        ), "cpu", "k0/splitk(s,2)", "top folds k in k0 too",
    ),
    "blocks along an axis that the split state lacks": (
        ATTENTION, "h200", "k0/online(O) k0/splitk(O,2) k0/split(e,grid,8)", "the state m of O has no axis e",
    ),
    "pieces along an axis that the split state lacks": (
        ATTENTION, "h200", "k0/online(O) k0/splitk(O,2) k0/split(e,serial,8)", "the state m of O has no axis e",
    ),
    "a loop that would fold a row statistic again": (
        ATTENTION, "h200", "k0/online(O) k0/split(k,serial,8) k0/split(e,serial,8)", "fold m of O again for each piece",
    ),
    "an own loop that would fold a row statistic again": (
        ATTENTION, "h200", "k0/online(O) k0.O/split(e,warp,8)", "would fold its state m",
    ),
    "blocks that share a sum": (MATMUL, "rtx4090", "k0/split(k,grid,16)", "blocks cannot share k, which C folds"),
    "blocks inside a loop in time": (MATMUL, "rtx4090", "k0/split(k,serial,16) k0/split(m,grid,16)", "grid loops come first"),
    "a tile loop outside loops that are made": (
        SQUARE, "h200", "k0.C/atom(mma,16,8,16) k0/split(m,serial,16)", "C has 3 loops of its own inside the tile",
    ),
    "an own loop inside an atom": (
        SQUARE, "rtx4090", "k0.C/atom(mma,16,8,16) k0.C/split(m,reg,4)", "before atoms",
    ),
    "more warps than a block has": (MATMUL, "rtx4090", "k0/split(m,warp,2)", "35 pieces side by side .* has 32"),
    "a step beyond what is left": (MATMUL, "cpu", "k0/split(m,core,71)", "m has 70 left, the step is 71: it must be 1..70"),
    "a level of another device": (MATMUL, "rtx4090", "k0/split(m,core,8)", "rtx4090 has no level core; it has grid"),
    "a ring inside a loop over warps": (
        MATMUL, "rtx4090", "k0/split(m,warp,35) k0/split(k,serial,16) k0/stage(A,cp_async,2)", "inside the loop over m at level warp",
    ),
    "a ring beside roles that would not fill it": (
        MATMUL, "h200", "k0/split(k,serial,16) k0/stage(A,tma,2) k0/specialize(1,40,232) k0/stage(B,tma,2)", "2 roles already",
    ),
    "a ring beside those that are read ahead": (
        PIPELINED, "h200", f"{AHEAD} k0.C/atom(mma,16,8,16) k0.C/pipeline() k0/stage(bias,ldg,1)", "stage comes before pipeline",
    ),
    "a producer for rings that are read ahead": (
        PIPELINED, "h200", f"{AHEAD} k0.C/atom(mma,16,8,16) k0.C/pipeline() k0/specialize(1,40,232)", "specialize comes before pipeline",
    ),
    "a stored block that no atom makes": (WIDE, "h200", "k0/store(C,tma)", "made by no atom; stmatrix writes the sums of mma"),
    "a stored block without a copy engine": (WIDE, "rtx4090", f"{TILED} k0/store(C,tma)", "rtx4090 cannot store by tma"),
    "a stored block by another transport": (WIDE, "h200", f"{TILED} k0/store(C,ldg)", "h200 cannot store by ldg"),
    "a stored block of odd rows": (
        parse_op("matmul:32x68x32:f16").program(), "h200", f"{TILED} k0/store(C,tma)", "rows of C allow 8 bytes at a time along n, 16",
    ),
    "a stored block of partial sums": (WIDE, "h200", f"k0/splitk(C,2) {TILED} k0/store(C,tma)", "k0 stores partial sums only, not C"),
    "a block that is stored twice": (WIDE, "h200", f"{TILED} k0/store(C,tma) k0/store(C,tma)", "placed in shared memory already"),
    "a stored block that does not fit beside the rings": (
        parse_op("matmul:512x512x512:f16").program(), "h200",
        "k0/split(m,grid,128) k0/split(n,grid,256) k0/split(k,serial,64) k0/split(m,warp,64) k0/split(n,warp,64) "
        "k0/stage(A,cp_async,4) k0/stage(B,cp_async,4) k0.C/atom(mma,16,8,16) k0/store(C,tma)", "takes 65536 bytes beside 196608 of rings",
    ),
    "an unknown layout": (MATMUL, "h200", "k0/stage(A,tma,1,banana)", "layout banana of A against .*swizzle128"),
    "staging what a finishing launch does not read": (MATMUL, "h200", "k0/splitk(C,2) k1/stage(A,tma,1)", "A is not an input that k1"),
    "an atom where partial states are combined": (MATMUL, "h200", "k0/splitk(C,2) k1.C/atom(wgmma,64,8,16)", "nothing to multiply in k1"),
    "an atom whose second operand varies along m": (
        Program(
            (("m", 16), ("n", 16), ("k", 16)), (Value("A", ("m", "k"), "f16"), Value("B", ("m", "n", "k"), "f16")),
            (Stage("C", ("m", "n"), parse("A[m,k] * B[m,n,k]"), (Reduce("k", SUM),)),), ("C",),
        ), "rtx4090", "k0.C/atom(mma,16,8,16)", "C is a sum of A",
    ),
    "no consumer at all": (MATMUL, "h200", "k0/stage(A,tma,1) k0/specialize(0,40,232)", "0 consumer warpgroups"),
    "registers beyond the multiprocessor's": (
        MATMUL, "h200", "k0/stage(A,tma,1) k0/specialize(3,40,232)", "736 registers for a thread of each warpgroup, 4 .* begin with 512",
    ),
    "ping-pong whose whole rows of a swizzle do not fit": (
        parse_op("matmul:512x480x512:f16").program(), "h200", "k0/split(m,grid,64) k0/split(n,grid,240) k0/split(k,serial,16) "
        "k0/stage(A,tma,23) k0/stage(B,tma,23) k0/specialize(2,40,232) k0/persist(8) k0/pingpong()", "the rings take 236256 bytes of the",
    ),
    "ping-pong by one": (MATMUL, "h200", "k0/stage(A,tma,1) k0/specialize(1,40,232) k0/pingpong()", "needs 2 consumer warpgroups, got 1"),
    "a work where the launch is meant": (MATMUL, "h200", "k0.C/stage(A,tma,1)", "write k0/stage"),
    "a launch that is not there": (MATMUL, "cpu", "k1/split(m,core,8)", "launch k1 does not exist; the plan has k0"),
    "a work that is not there": (MATMUL, "cpu", "k0.D/split(m,serial,8)", "k0 has no work D; it has C"),
    "a program change after loops": (NORM, "cpu", "k0/split(m,core,8) k0/fuse(Xn,Y)", "1 loops and 0 channels: fuse comes before"),
    "a program change after an own loop": (NORM, "cpu", "k0.Y/split(k,serial,8) k0/fuse(Xn,Y)", "fuse comes before tile-level moves"),
    "a program change after a cut": (NORM, "cpu", "k0/cut(Y) k0/fuse(Xn,Y)", "2 launches: fuse comes before cut"),
    "a second copy of a stage's name": (NORM, "cpu", f"{JOINED} k0/commute(Y_acc)", "all 2 factors of Y_acc depend on k"),
    "as many parts as do not come out even": (MATMUL, "cpu", "k0/splitk(C,40)", "k has 56, which does not make 40 parts"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_it_refuses(what: str):
    program, target, schedule, reason = REFUSED[what]
    with pytest.raises(IllegalMove, match=reason) as e:
        replay(program, schedule, load_target(target))
    assert e.value.index == len(schedule.split()) - 1, "an earlier move was refused"


ALLOWED = {
    "the launch that was cut off last runs before what reads it": (ATTENTION, "cpu", "k0/cut(O) k0/cut(N) k0/cut(P)"),
    "the launch that finishes a sum runs before what reads it": (BIASED, "cpu", "k0/cut(Y) k0/splitk(C,3)"),
    "a ring turns only where its value is read": (
        BIASED, "cpu", "k0/split(k,serial,16) k0/split(m,serial,8) k0/stage(A,pack,1) k0/stage(B,pack,1)",
    ),
    "blocks along an axis outside the accumulators of a recurrence": (
        ATTENTION, "h200", "k0/online(O) k0/split(e,grid,8) k0/split(k,serial,8)",
    ),
    "loops over one axis three times, ragged each time": (
        MATMUL, "cpu", "k0/split(k,serial,23) k0/split(k,serial,9) k0/split(k,serial,4) k0/stage(A,pack,1)",
    ),
    "a sum shared by warps": (MATMUL, "rtx4090", "k0/split(m,grid,8) k0/split(k,warp,16) k0.C/split(k,reg,4)"),
    "a factor that stands twice keeps its other place": (
        Program(
            (("m", 3), ("n", 4), ("k", 7)), (Value("X", ("n", "k")), Value("g", ("k",)), Value("W", ("m", "k"))),
            (Stage("s", ("m", "n"), parse("W[m,k] * X[n,k] * X[n,k] * g[k]"), (Reduce("k", SUM),)),), ("s",),
        ), "cpu", "k0/operand(s,g,X)",
    ),
    "an output whose axes stand in another order than its sum's": (
        Program(
            (("q", 3), ("e", 4), ("k", 7)), (Value("A", ("q", "k")), Value("V", ("k", "e"))),
            (
                Stage("M", ("q",), parse("A[q,k]"), (Reduce("k", MAX),)),
                Stage("P", ("q", "k"), parse("exp(A[q,k] - M[q])")),
                Stage("L", ("q",), parse("P[q,k]"), (Reduce("k", SUM),)),
                Stage("N", ("q", "e"), parse("P[q,k] * V[k,e]"), (Reduce("k", SUM),)),
                Stage("O", ("e", "q"), parse("N[q,e] / L[q]")),
            ), ("O",),
        ), "cpu", "k0/online(O) k0/split(k,serial,3)",
    ),
    "fewer keys than parts": (
        Program(
            (("m", 3), ("k", Sym("k", 1, 24))), (Value("X", ("m", "k")),),
            (Stage("s", ("m",), parse("X[m,k]"), (Reduce("k", SUM),)),), ("s",),
        ), "cpu", "k0/splitk(s,4)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", ALLOWED)
def test_it_computes_the_same(what: str):
    program, target, schedule = ALLOWED[what]
    check_meaning(replay(program, schedule, load_target(target)), program, what)


def softmax(weighted: str, *more: Stage, outputs: tuple[str, ...] = ("O",)) -> Program:
    """Softmax of A along k, its weighted sum as written, and stages beside it."""
    sums = (Reduce("k", SUM),)
    return Program(
        (("q", 3), ("e", 4), ("k", 7)),
        (Value("A", ("q", "k")), Value("V", ("k", "e"))),
        (
            Stage("M", ("q",), parse("A[q,k]"), (Reduce("k", MAX),)),
            Stage("P", ("q", "k"), parse("exp(A[q,k] - M[q])")),
            Stage("L", ("q",), parse("P[q,k]"), sums),
            Stage("N", ("q", "e"), parse(weighted), sums),
            Stage("O", ("q", "e"), parse("N[q,e] / L[q]")),
            *more,
        ),
        outputs,
    )


ONLY_SOFTMAX = {
    "weights squared": (softmax("P[q,k] * P[q,k] * V[k,e]"), "not a quotient"),
    "weights added to": (softmax("P[q,k] + V[k,e]"), "not a quotient"),
    "the maximum read again": (softmax("P[q,k] * V[k,e] * M[q]"), "not a quotient"),
    "a sum that leaves the program": (softmax("P[q,k] * V[k,e]", outputs=("O", "L")), "L leaves the program"),
    "weights with another reader": (
        softmax("P[q,k] * V[k,e]", Stage("T", ("k",), parse("P[q,k]"), (Reduce("q", SUM),)), outputs=("O", "T")),
        "T reads P, which online",
    ),
}


@pytest.mark.parametrize("what", ONLY_SOFTMAX)
def test_online_refuses_what_is_not_just_a_softmax(what: str):
    program, reason = ONLY_SOFTMAX[what]
    with pytest.raises(IllegalMove, match=reason):
        replay(program, "k0/online(O)", load_target("cpu"))


def test_commute_refuses_a_name_that_is_taken():
    program = Program(
        (("m", 3), ("n", 4), ("k", 5)),
        (Value("X", ("m", "k")), Value("W", ("n", "k")), Value("Y_acc", ("m",))),
        (Stage("Y", ("m", "n"), parse("X[m,k] * W[n,k] * Y_acc[m]"), (Reduce("k", SUM),)),),
        ("Y",),
    )
    with pytest.raises(IllegalMove, match="a value named Y_acc already"):
        replay(program, "k0/commute(Y)", load_target("cpu"))
