"""The exams: who is held out, that intervals are counted, what donors and own rows are worth, and recorded spaces as samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from emmy.costmodel.donors import DonorSamples
from emmy.costmodel.exam import Exam, examine, learning_curve, leave_gpu_out
from emmy.costmodel.features import ROOF, feature_set
from emmy.costmodel.fit import Samples
from emmy.costmodel.heldout import each_op, folds
from emmy.costmodel.recorded_samples import by_parameters, gemm_rows, siblings_of
from emmy.costmodel.samples import Prepared
from emmy.errors import UsageError
from emmy.measure.journal import Journal, RunHeader, journal_path
from emmy.records import Measurement
from emmy.search.siblings import siblings
from emmy.workloads import recorded

Synthetic = Callable[..., list[Measurement]]
PrepareRows = Callable[[list[Measurement]], Prepared]
RANKERS = {"model", "pick", "nearest", "fixed", "random"}


@pytest.fixture(scope="module")
def samples(synthetic_rows: Synthetic, prepare_rows: PrepareRows) -> Samples:
    return prepare_rows(synthetic_rows(25)).samples


@pytest.fixture(scope="module")
def exam(samples: Samples) -> Exam:
    return examine(samples, list(folds(samples)), seeds=(0,))


def test_leaving_one_op_out_holds_each_out_once_and_alone(samples: Samples, exam: Exam) -> None:
    splits = list(folds(samples))
    assert len(splits) == len(samples.workloads) == 6
    assert all(len(np.unique(samples.workload[unseen])) == 1 for _, unseen in splits)
    assert {p.problem for p in exam.problems} == set(samples.problems)
    assert {s.ranker for s in exam.scores} == RANKERS and len(exam.measured) == len(samples)


def test_an_op_with_few_candidates_judges_nothing_and_is_never_held_out_by_itself(samples: Samples) -> None:
    few = np.flatnonzero(samples.workload == 0)[10:]
    fewer = samples.take(np.setdiff1d(np.arange(len(samples)), few))
    held = [set(fewer.workload[unseen]) for _, unseen in each_op(fewer)]
    assert len(held) == 5 and set.union(*held) == {1, 2, 3, 4, 5}
    assert all(len(known) + len(unseen) == len(fewer) for known, unseen in each_op(fewer))


def test_intervals_hold_more_the_wider_they_are_and_ratios_are_no_worse_than_their_share(exam: Exam) -> None:
    held = [(c.level, c.time, c.ratio) for c in exam.coverage]
    assert held == sorted(held) and [c.level for c in exam.coverage] == [0.5, 0.8, 0.9, 0.95]
    assert exam.coverage[-1].ratio > 0.85 and exam.coverage[0].samples == len(exam.measured)


def test_a_single_op_leaves_nothing_to_hold_out(samples: Samples) -> None:
    one = samples.take(np.flatnonzero(samples.workload == 0))
    for exam_of in (lambda: examine(one, list(folds(one))), lambda: learning_curve(one)):
        with pytest.raises(UsageError, match=r"of 1 ops; at least 50 of two ops"):
            exam_of()


@pytest.mark.slow
def test_the_curve_falls_with_own_rows_and_donors_of_the_same_law_help_where_there_are_few(samples: Samples) -> None:
    donor = DonorSamples("other", samples, 500.0)
    points = learning_curve(samples, [donor], shares=(0.0, 0.1, 1.0), n_folds=3, seeds=(0,))
    found = {(p.share, bool(p.donors), p.ranker): p for p in points}
    assert {k[:2] for k in found} == {(0.0, True), (0.1, False), (0.1, True), (1.0, False), (1.0, True)}
    assert found[1.0, False, "model"].top1 < found[0.1, False, "model"].top1
    assert found[0.1, True, "model"].top1 < found[0.1, False, "model"].top1
    assert found[0.1, False, "model"].rows == 10 and found[0.0, True, "model"].rows == 0
    assert {k[2] for k in found} == RANKERS


def test_a_card_held_out_is_ranked_by_its_donors_alone_and_one_without_donors_is_left_out(samples: Samples) -> None:
    other = replace(samples, time_us=samples.time_us * 3.0)  # the same order at another speed
    donors = {"a": ["b"], "b": [], "c": []}
    problems = leave_gpu_out([("a", samples), ("b", other), ("c", samples)], donors.__getitem__, seeds=(0,))
    assert len(problems) == 6 and all(set(p.scores) == RANKERS for p in problems)
    assert max(p.scores["nearest"].top10 for p in problems) < 0.02
    mixed = replace(samples, time_us=np.random.default_rng(0).permutation(samples.time_us))
    blind = leave_gpu_out([("a", samples), ("b", mixed)], {"a": ["b"], "b": []}.__getitem__, seeds=(0,))
    assert np.mean([p.scores["model"].spearman for p in blind]) < 0.5


def test_recorded_spaces_are_one_problem_each_with_their_parameters_as_features() -> None:
    for name in recorded.names():
        assert siblings_of(name) == siblings(name)
    s, table = by_parameters("convolution.a100"), recorded.load("convolution.a100")
    assert len(s) == int(np.isfinite(table.time_ms).sum()) and s.features.names == table.parameters
    assert s.problems == ("convolution.a100",) and s.time_us.min() == pytest.approx(1000 * table.best_ms)
    assert by_parameters("convolution.a4000").features == s.features


def test_clblasts_gemm_has_our_features_where_they_mean_the_same() -> None:
    ((card, s),) = gemm_rows()  # the other card is none that Emmy describes
    assert card == "rtx3090" and s.features == feature_set() and s.offset == ROOF
    at = {name: i for i, name in enumerate(s.features.names)}
    table = recorded.load("gemm.rtx3090")
    row = table.values[0].tolist()
    p = dict(zip(table.parameters, row, strict=True))
    assert s.x[0, at["log2_blocks"]] == np.log2((4096 // p["MWG"]) * (4096 // p["NWG"]))
    assert s.x[0, at["sums"]] == p["MWG"] * p["NWG"] / (p["MDIMC"] * p["NDIMC"])
    assert np.isnan(s.x[0, at["by_tma"]]) and (s.time_us > 2 ** s.x[:, at[ROOF]]).all()


@pytest.mark.slow
def test_the_command_prints_each_exam(
    tmp_path_factory: pytest.TempPathFactory,
    synthetic_rows: Synthetic,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from emmy.cli import main
    from emmy.costmodel.samples import generated_digest
    from emmy.ir.ops import parse_op
    from emmy.ir.target import load_target

    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("EMMY_CACHE", str(home / "cache"))
    target = load_target("cpu-portable")
    with Journal.create(journal_path(home, "r"), RunHeader("r", "some", target.name, "random", 0, "1 trial")) as j:
        for r in synthetic_rows(25):
            j.append(replace(r, source_digest=generated_digest(parse_op(r.op), r.schedule, target)), elapsed_s=0.0)
    of = ["--gpu", target.name, "--home", str(home)]
    assert main(["eval", "costmodel", *of, "--folds", "2"]) == 0
    out = capsys.readouterr().out
    assert "holds ratios within a problem" in out and all(f"\n{name} " in out for name in RANKERS)
    assert main(["eval", "costmodel", *of, "--folds", "2", "--curve", "--donors", "recorded"]) == 0
    out = capsys.readouterr().out
    assert out.count("\nmodel") == 0 and out.count(" model ") == 9  # 0 % with donors only
    assert main(["eval", "costmodel", *of, "--curve", "--donors", target.name]) == 2
