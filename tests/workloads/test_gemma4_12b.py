"""The catalogue of Gemma-4-12B: complete, consistent with the model's sizes, and readable by the op parser."""

from __future__ import annotations

from collections import Counter

import pytest

from emmy.errors import UsageError
from emmy.ir.ops import Attention, Geglu, GegluLinear, NormLinear, parse_op
from emmy.workloads import load, op_texts
from emmy.workloads.gemma4_12b import KINDS

HIDDEN, MLP, VOCAB = 3840, 15360, 262144


def test_the_catalogue_has_258_cases_of_which_254_are_charted() -> None:
    cases = load("@gemma4-12b")
    assert len({case.id for case in cases}) == 258
    assert sum(case.charted for case in cases) == 254


def test_every_kind_occurs_and_most_cases_are_matmuls() -> None:
    counts = Counter(case.kind for case in load("@gemma4-12b"))
    assert set(counts) == set(KINDS)
    assert counts["matmul"] == 129


def test_every_matmul_has_one_side_of_the_models_width() -> None:
    for case in load("@gemma4-12b"):
        if case.kind == "matmul":
            assert HIDDEN in (case.dims["N"], case.dims["K"]), case.id
            assert case.dims["N"] in (512, 2048, 4096, 8192, 8704, HIDDEN, MLP, 2 * MLP, VOCAB), case.id


def test_every_matmul_is_an_op_of_the_same_sizes_and_layout() -> None:
    for case in load("@gemma4-12b"):
        text = case.op_text()
        if case.kind != "matmul":
            assert text is not None, case.id
            continue
        assert text is not None
        op = parse_op(text)
        shapes = {value.name: value.axes for value in op.program().inputs}
        assert op.key == text
        assert shapes["B"] == (("n", "k") if case.weight_layout == "nk" else ("k", "n"))
        if not case.dynamic_m:
            assert op.work().flops == 2.0 * case.dims["M"] * case.dims["N"] * case.dims["K"]


def test_every_attention_is_an_op_of_the_same_sizes() -> None:
    cases = [case for case in load("@gemma4-12b") if case.kind == "attention"]
    assert len(cases) == 8
    for case in cases:
        op = parse_op(case.op_text() or "")
        assert isinstance(op, Attention)
        assert (op.heads, op.groups, op.dim) == tuple(case.dims[x] for x in ("q_heads", "kv_heads", "head_dim"))
        assert op.causal == case.dims["causal"]
        assert op.program().sizes({"m": case.dims["seq"]} if case.dynamic_m else None)["t"] == case.dims["seq"]


def test_every_gated_pair_is_an_op_of_the_same_sizes_and_layout() -> None:
    cases = [case for case in load("@gemma4-12b") if case.kind == "mlp_geglu"]
    assert len(cases) == 12
    for case in cases:
        op = parse_op(case.op_text() or "")
        assert isinstance(op, Geglu)
        assert (op.n, op.k) == (MLP, HIDDEN) == (case.dims["N_inter"], case.dims["K_hidden"])
        assert (op.dtype, op.layout) == (case.dtype, case.weight_layout)
        assert op.program().sizes({"m": case.dims["M"]} if case.dynamic_m else None)["m"] == case.dims["M"]


def test_every_case_of_rows_is_an_op_that_moves_as_many_bytes_as_its_sizes_say() -> None:
    for case in load("@gemma4-12b"):
        if case.kind not in ("rms_norm", "pointwise", "reduce"):
            continue
        op, rows = parse_op(case.op_text() or ""), case.dims["M"] * case.dims.get("heads", 1)
        assert op.key == case.op_text()
        columns = case.dims["N" if case.kind == "pointwise" else "K"]
        work = op.work({"m": rows} if case.dynamic_m else None)
        read = rows * columns * (2 if case.dtype == "f16" else 4)
        assert read < work.bytes <= 3.1 * read + 4 * columns, case.id
    assert parse_op(load("@gemma4-12b/rope.s512")[0].op_text() or "").work().flops > 0


def test_every_linear_behind_a_norm_or_a_gate_is_an_op_of_the_same_sizes_and_layout() -> None:
    cases = [case for case in load("@gemma4-12b") if case.kind == "norm_linear"]
    assert len(cases) == 41
    for case in cases:
        op = parse_op(case.op_text() or "")
        assert isinstance(op, GegluLinear if case.dims["K"] == MLP else NormLinear), case.id
        assert (op.n, op.k, op.dtype, op.layout) == (case.dims["N"], case.dims["K"], case.dtype, case.weight_layout)
        assert op.program().sizes({"m": case.dims["M"]} if case.dynamic_m else None)["m"] == case.dims["M"]


def test_a_linear_before_a_norm_adds_its_residual_and_leaves_the_norm_s_statistic() -> None:
    (case,) = (case for case in load("@gemma4-12b") if case.kind == "linear_norm")
    assert case.op_text() == "matmul:32x3840x4096:f16:nk,residual,sum_squares"


def test_a_symbolic_case_serves_its_hint_and_every_fixed_m() -> None:
    fixed = [case.dims["M"] for case in load("@gemma4-12b") if case.kind == "matmul" and not case.dynamic_m]
    (case,) = load("@gemma4-12b/q_proj.dynM")
    text = case.op_text()
    assert text is not None
    program = parse_op(text).program()
    for m in (min(fixed), case.dims["M"], max(fixed)):
        assert program.sizes({"m": m})["m"] == m


def test_published_times_are_positive_and_name_their_card_and_lane() -> None:
    for case in load("@gemma4-12b"):
        for card, lanes in case.published.items():
            assert card == "rtx5090"
            assert lanes and set(lanes) <= {"eager_us", "f32acc_us", "hybrid_us"}
            assert all(us > 0 for us in lanes.values()), case.id


def test_a_pattern_selects_cases_by_id() -> None:
    assert [case.id for case in load("@gemma4-12b/q_proj.m?4*")] == ["q_proj.m64", "q_proj.m64.lin"]


def test_op_texts_are_distinct_and_leave_out_what_no_op_expresses() -> None:
    texts = op_texts("@gemma4-12b")
    assert len(texts) == len(set(texts)) > 100
    assert op_texts("@gemma4-12b/rope*") == ("rope:16x512x256:f16",)


@pytest.mark.parametrize(
    ("name", "says"),
    [("@gemma3", "Workloads: @gemma4-12b"), ("@gemma4-12b/q_porj", "Close: q_proj"), ("gemma4-12b", "no workload")],
)
def test_an_unknown_set_or_pattern_is_refused_with_the_nearest_names(name: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        load(name)
