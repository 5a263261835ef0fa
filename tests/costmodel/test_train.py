"""Training finds a planted law on shapes it has not seen, says so honestly when there is none, and drops what it must."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from emmy.costmodel.built import NAMES as BUILT
from emmy.costmodel.features import feature_set
from emmy.costmodel.fit import Samples, fit
from emmy.costmodel.samples import CHANGED, CONTENDED, DERIVED, DISTURBED, ELSEWHERE, FAILED, ILLEGAL, Prepared
from emmy.costmodel.train import TrainedModel, is_exam, judge, train
from emmy.errors import UsageError
from emmy.ir.target import Target
from emmy.records import Measurement, Protocol

SEEDS = (0, 1)

Synthetic = Callable[..., list[Measurement]]
PrepareRows = Callable[[list[Measurement]], Prepared]


@pytest.fixture(scope="module")
def samples(synthetic_rows: Synthetic, prepare_rows: PrepareRows) -> Samples:
    return prepare_rows(synthetic_rows()).samples


def invented(each: int) -> Samples:
    """So many samples of each of 24 workloads, whose times follow from their first feature; few others say anything."""
    names = tuple(f"matmul:{64 + 8 * i}x256x256:f32" for i in range(24))
    n = len(names) * each
    workload = np.repeat(np.arange(len(names)), each)
    x = np.zeros((n, len(feature_set().names)))
    x[:, :4] = np.random.default_rng(0).random((n, 4))
    ids = tuple(map(str, range(n)))
    return Samples(x, 2 ** (6 * x[:, 0]), workload, names, workload, names, ("s",) * n, ids, feature_set())


@pytest.fixture(scope="module")
def trained(samples: Samples, target: Target) -> TrainedModel:
    return train(samples, target.name, seeds=SEEDS)


def test_the_model_beats_random_and_copying_on_shapes_it_has_not_seen(trained: TrainedModel) -> None:
    s = {x.ranker: x for x in trained.scores}
    assert set(s) == {"model", "pick", "nearest", "fixed", "random"} and s["model"].problems == 6
    assert s["model"].top10 < 0.01 < s["random"].top10
    assert s["model"].top1 < min(s[x].top1 for x in ("nearest", "fixed", "random"))
    assert s["pick"].top1 < 0.1 and s["model"].spearman > 0.9


@pytest.mark.slow
def test_a_member_that_sees_binaries_knows_what_the_plan_does_not_tell(target: Target) -> None:
    samples = invented(30)
    built = np.full((len(samples), len(BUILT)), np.nan)
    built[:, 0] = np.random.default_rng(1).random(len(samples))
    with_binaries = replace(samples, time_us=samples.time_us * 2 ** (4 * built[:, 0]), built=built)
    found = train(with_binaries, target.name, seeds=SEEDS)
    s = {x.ranker: x for x in found.scores}
    assert s["built"].spearman > 0.9 > s["model"].spearman and found.model.card.built_names == BUILT
    x, seen = with_binaries.x[:9], built[:9]
    assert np.abs(found.model.predict_built(x, seen) - np.log2(with_binaries.time_us[:9])).max() < 1
    assert train(samples, target.name, seeds=SEEDS).model.card.built_names == ()


def test_a_model_of_shuffled_times_is_no_better_than_random_and_is_not_deployed(
    samples: Samples, target: Target
) -> None:
    rng = np.random.default_rng(0)
    shuffled = replace(samples, time_us=rng.lognormal(5.0, 1.0, len(samples)))
    model = train(shuffled, target.name, seeds=SEEDS)
    s = {x.ranker: x for x in model.scores}
    assert abs(s["model"].spearman) < 0.2
    worse = replace(s["model"], top10=s["random"].top10)
    scores = (worse, *(x for x in model.scores if x.ranker != "model"))
    verdict = judge(replace(model, scores=scores), shuffled, None)
    assert not verdict.deploy and "at random" in verdict.why


def test_the_card_holds_how_far_off_the_best_predicted_were_on_unseen_problems(trained: TrainedModel) -> None:
    found = trained.model.card.pick_error_log2
    assert found is not None and found[0] <= found[1] <= found[2]
    assert found[0] > -0.5 and found[2] < 0.5


def test_predictions_are_times_in_microseconds_on_a_log2_scale(trained: TrainedModel, samples: Samples) -> None:
    log2_us, spread = trained.model.predict(samples.x)
    error = log2_us - np.log2(samples.time_us)
    assert np.median(np.abs(error)) < 0.1
    assert (spread >= (trained.model.card.residual_log2 or 9)).all()
    assert trained.model.is_calibrated


def test_the_same_samples_give_the_same_text(samples: Samples) -> None:
    assert fit(samples, (3,)) == fit(samples, (3,))


def test_members_disagree_more_where_nothing_was_seen(trained: TrainedModel, samples: Samples) -> None:
    strange = samples.x.copy()
    strange[:, samples.features.names.index("atom_m")] = 9.0
    strange[:, samples.features.names.index("sums")] = 1.0
    known, unknown = (trained.model.predict(x)[1].mean() for x in (samples.x, strange))
    assert unknown > known


def test_no_workload_is_known_and_unseen_at_once(samples: Samples) -> None:
    from emmy.costmodel.heldout import folds as split

    folds = list(split(samples, 5))
    assert len(folds) == 5
    for known, unseen in folds:
        assert not {*samples.workload[known]} & {*samples.workload[unseen]}
    assert sorted(np.concatenate([u for _, u in folds])) == list(range(len(samples)))


def test_one_workload_alone_makes_an_uncalibrated_model_that_is_not_deployed(
    synthetic_rows: Synthetic, prepare_rows: PrepareRows, target: Target
) -> None:
    one = prepare_rows(synthetic_rows(60, shapes=((128, 256, 256),))).samples
    model = train(one, target.name, seeds=SEEDS)
    assert not model.model.is_calibrated and model.scores == ()
    verdict = judge(model, one, None)
    assert not verdict.deploy and verdict.why.startswith("uncalibrated")


def test_too_few_samples_are_refused_with_what_to_do(samples: Samples, target: Target) -> None:
    with pytest.raises(UsageError, match=r"20 usable samples .* at least 50 are needed.*emmy tune"):
        train(samples.take(np.arange(20)), target.name)


def test_an_eighth_of_many_workloads_is_kept_out_of_every_final_fit(target: Target) -> None:
    s = invented(10)
    names, workload = s.workloads, s.workload
    exam = {names[i] for i in workload[is_exam(s)]}
    assert 0 < len(exam) < len(names) / 3
    model = train(s, target.name, seeds=(0,))
    assert set(model.model.card.workloads) == set(names) - exam
    few = s.take(np.flatnonzero(workload < 15))
    assert not is_exam(replace(few, workloads=names[:15])).any()


def test_a_model_that_fails_the_exam_does_not_replace_the_deployed_one(target: Target) -> None:
    good = invented(20)
    bad = replace(good, x=np.random.default_rng(1).permutation(good.x))
    old, new = train(good, target.name, seeds=(0,)), train(bad, target.name, seeds=(0,))
    flattering = replace(new, scores=old.scores)
    verdict = judge(flattering, good, old.model)
    assert not verdict.deploy and verdict.exam_problems >= 1
    assert verdict.new_top10 is not None and verdict.old_top10 is not None
    assert verdict.new_top10 > verdict.old_top10 + 0.02
    assert judge(old, good, new.model).deploy


def test_rows_that_say_nothing_about_todays_code_here_are_dropped_and_counted(
    synthetic_rows: Synthetic, prepare_rows: PrepareRows, target: Target
) -> None:
    rows = synthetic_rows(4, shapes=((64, 256, 512),))
    assert len(rows) == 4
    bad = [
        replace(rows[0], id="1", status="correctness"),
        replace(rows[0], id="2", contended=True),
        replace(rows[0], id="8", contended=True, protocol=Protocol(clock="wall")),
        replace(rows[0], id="3", origin="derived"),
        replace(rows[0], id="4", device=replace(rows[0].device, product="another CPU")),
        replace(rows[0], id="5", schedule="k0/split(q,core,64)"),
        replace(rows[0], id="6", schedule="not a schedule"),
        replace(rows[0], id="7", source_digest="an older source"),
    ]
    prepared = prepare_rows([*rows, *bad])
    assert prepared.dropped == {FAILED: 1, CONTENDED: 1, DISTURBED: 1, DERIVED: 1, ELSEWHERE: 1, ILLEGAL: 2, CHANGED: 1}
    assert sorted(prepared.samples.ids) == sorted(r.id for r in rows)


def test_several_rows_of_one_candidate_are_one_sample_their_median(
    synthetic_rows: Synthetic, prepare_rows: PrepareRows, target: Target
) -> None:
    rows = synthetic_rows(3, shapes=((64, 256, 512),), repeats=3, noise=0.5)
    s = prepare_rows(rows).samples
    assert len(s) == 3
    assert s.time_us[0] == sorted(r.time_us or 0 for r in rows[:3])[1]


def test_imported_rows_train(synthetic_rows: Synthetic, prepare_rows: PrepareRows) -> None:
    rows = [replace(r, origin="imported") for r in synthetic_rows(3, shapes=((64, 256, 512),))]
    assert len(prepare_rows(rows).samples) == 3


def test_contended_rows_by_the_threads_own_clock_train_where_there_are_no_better_ones(
    synthetic_rows: Synthetic, prepare_rows: PrepareRows
) -> None:
    rows = synthetic_rows(4, shapes=((64, 256, 512),))
    disturbed = [replace(r, contended=True) for r in rows[:3]]
    prepared = prepare_rows([*disturbed, rows[3]])
    assert (len(prepared.samples), prepared.contended, prepared.dropped) == (4, 3, {})
