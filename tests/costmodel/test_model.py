"""A model comes back as it was saved, and nothing else is ever loaded: stale, damaged or hostile texts are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import lightgbm
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emmy.costmodel.features import FeatureSet, feature_set
from emmy.costmodel.fit import Samples
from emmy.costmodel.model import CostModel, Ensemble, in_precision
from emmy.costmodel.model_files import read_text, write_text
from emmy.costmodel.model_text import check_model_text, compact
from emmy.costmodel.registry import ModelStore, find
from emmy.costmodel.samples import Prepared
from emmy.costmodel.train import train
from emmy.errors import DataError, EmmyError, StaleModel, UsageError
from emmy.ir.target import Target
from emmy.records import Measurement

Synthetic = Callable[..., list[Measurement]]
PrepareRows = Callable[[list[Measurement]], Prepared]


@pytest.fixture(scope="module")
def samples(synthetic_rows: Synthetic, prepare_rows: PrepareRows) -> Samples:
    return prepare_rows(synthetic_rows(30)).samples


@pytest.fixture(scope="module")
def model(samples: Samples, target: Target) -> CostModel:
    return train(samples, target.name, seeds=(0,)).model


@pytest.fixture(scope="module")
def other(samples: Samples, target: Target) -> CostModel:
    return train(samples, target.name, seeds=(5,)).model


@pytest.fixture
def saved(model: CostModel, tmp_path: Path) -> Path:
    path = tmp_path / "cpu-portable.txt"
    model.save(path)
    return path


def test_a_loaded_model_predicts_what_the_saved_one_did(model: CostModel, saved: Path, samples: Samples) -> None:
    again = CostModel.load(saved)
    assert again.card == model.card and again.digest == model.digest
    assert all(np.array_equal(a, b) for a, b in zip(again.predict(samples.x), model.predict(samples.x), strict=True))
    assert np.array_equal(again.pick(samples.x), model.pick(samples.x))


def test_a_texts_short_form_predicts_as_lightgbms_own(samples: Samples) -> None:
    x = in_precision(samples.x)
    data = lightgbm.Dataset(x, np.log2(samples.time_us), feature_name=list(samples.features.names))
    options = {"num_threads": 1, "deterministic": True, "force_row_wise": True, "verbosity": -1, "min_data_in_leaf": 2}
    booster = lightgbm.train(options, data, num_boost_round=20)
    text = booster.model_to_string()
    short = compact(text)
    check_model_text(short, samples.features.names, "short")
    assert len(short) < 0.6 * len(text)
    again = lightgbm.Booster(model_str=short).predict(x, num_threads=1)
    np.testing.assert_allclose(again, booster.predict(x, num_threads=1), rtol=1e-4)


def test_a_model_of_other_features_of_binaries_is_refused(saved: Path) -> None:
    card = json.loads(saved.with_suffix(".json").read_text())
    saved.with_suffix(".json").write_text(json.dumps({**card, "built_names": ["built_of_before"]}))
    with pytest.raises(StaleModel, match="train-costmodel"):
        CostModel.load(saved)


def test_a_model_of_other_features_is_refused_with_the_way_out(saved: Path) -> None:
    theirs = FeatureSet((*feature_set().names, "new"), "9c41aaaa00000000")
    with pytest.raises(StaleModel) as e:
        CostModel.load(saved, theirs)
    ours = feature_set().digest[:8]
    assert str(e.value) == (
        f"{saved} was trained on feature set {ours}, this Emmy computes 9c41aaaa.\n"
        "Retrain with `emmy train-costmodel --gpu cpu-portable`, or tune without it: --model roofline"
    )


def test_a_text_that_is_not_its_cards_is_refused(saved: Path, other: CostModel) -> None:
    saved.write_text(other.text)
    with pytest.raises(DataError, match="member 0 is not the text its card describes"):
        CostModel.load(saved)
    saved.unlink()
    with pytest.raises(DataError, match="cannot read it"):
        CostModel.load(saved)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda raw: {**raw, "surprise": 1}, "not a model card"),
        (lambda raw: {**raw, "v": 2}, "not a model card of version 1"),
        (lambda raw: {**raw, "members": []}, "0 members"),
        (lambda raw: {**raw, "members": [{**raw["members"][0], "role": "shell"}]}, "mistyped"),
        (lambda raw: {**raw, "offset": "nothing"}, "is not one of its features"),
        (lambda raw: {**raw, "rows": None}, "mistyped"),
        (lambda raw: {**raw, "pick_error_log2": [0.5, 0.0, 1.0]}, "do not ascend"),
        (lambda raw: {**raw, "pick_error_log2": [0.5]}, "not three numbers"),
        (lambda raw: {k: v for k, v in raw.items() if k != "scores"}, "not a model card"),
    ],
)
def test_a_malformed_card_is_refused(saved: Path, change: Callable[[dict], dict], expected: str) -> None:
    card = saved.with_suffix(".json")
    card.write_text(json.dumps(change(json.loads(card.read_text()))))
    with pytest.raises(DataError, match=expected):
        CostModel.load(saved)


def test_a_card_from_before_errors_of_picks_were_taken_is_as_good(saved: Path) -> None:
    card = saved.with_suffix(".json")
    raw = json.loads(card.read_text())
    assert raw.pop("pick_error_log2") is not None
    card.write_text(json.dumps(raw))
    assert CostModel.load(saved).card.pick_error_log2 is None


def test_a_card_that_names_a_key_twice_is_refused(saved: Path) -> None:
    card = saved.with_suffix(".json")
    card.write_text(card.read_text().replace('"rows":', '"rows": 1, "rows":', 1))
    with pytest.raises(DataError, match="a key occurs twice"):
        CostModel.load(saved)


def _first_member(model: CostModel) -> str:
    return model.text[: model.card.members[0].bytes]


@pytest.mark.parametrize(
    ("pattern", "replacement", "expected"),
    [
        (r"num_leaves=(\d+)\n", r"num_leaves=\1\nnum_leaves=3\n", "occurs twice|reaches past|begins with|trees"),
        (r"left_child=(-?\d+)", r"left_child=900", "is not a tree"),
        (r"split_feature=(\d+)", r"split_feature=77777", "splits on a feature outside|trees are not|begins with"),
        (r"leaf_value=(\S+) ", r"leaf_value=", "leaf_value has|trees are not|begins with"),
        (r"threshold=(\S+) ", r"threshold=x ", "list of numbers|trees are not|begins with"),
        (r"num_cat=0", "num_cat=1", "categories"),
        (r"is_linear=0", "is_linear=1", "linear"),
        (r"num_class=1", "num_class=2", "num_class is 2"),
        (r"version=v4", "version=v9", "version is v9"),
        (r"feature_names=\S+ ", "feature_names=other ", "its features are not those"),
        (r"max_feature_idx=\d+", "max_feature_idx=3", "max_feature_idx 3"),
        (r"tree_sizes=\d+", "tree_sizes=99999999", "reaches past the end"),
        (r"end of trees\n", "end of trees\nparameters:\n", "are not followed by"),
        (r"^tree\n", "forest\n", "must begin with 'tree'"),
    ],
)
def test_a_tampered_text_never_reaches_lightgbm(
    model: CostModel, pattern: str, replacement: str, expected: str
) -> None:
    text = _first_member(model)
    check_model_text(text, feature_set().names, "m")
    tampered = re.sub(pattern, replacement, text, count=1)
    assert tampered != text
    if len(tampered) != len(text):  # keep tree_sizes right where the change is inside the first tree
        start, end = text.index("Tree=0\n"), text.index("Tree=1\n")
        if start <= next((i for i, (a, b) in enumerate(zip(text, tampered, strict=False)) if a != b), len(text)) < end:
            size = end - start
            tampered = tampered.replace(f"tree_sizes={size} ", f"tree_sizes={size + len(tampered) - len(text)} ", 1)
    with pytest.raises(DataError, match=expected):
        check_model_text(tampered, feature_set().names, "m")


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_a_text_with_any_bytes_changed_is_refused_or_still_a_sound_model(model: CostModel, data) -> None:
    text = _first_member(model)
    at = data.draw(st.integers(0, len(text) - 1))
    span = data.draw(st.integers(0, 40))
    tampered = text[:at] + data.draw(st.text("0123456789-=. \nabcT", max_size=20)) + text[at + span :]
    try:
        check_model_text(tampered, feature_set().names, "m")
        loaded = Ensemble([("time", tampered)], None)
    except DataError:
        return
    prediction, _ = loaded.predict(np.zeros((1, len(feature_set().names))))
    assert prediction.shape == (1,)


def test_deploying_keeps_what_was_there_and_a_rollback_brings_it_back(
    tmp_path: Path, model: CostModel, other: CostModel
) -> None:
    store, target = ModelStore(tmp_path), model.card.target
    assert store.deployed(target) is None
    store.deploy(model)
    store.deploy(other)
    deployed = store.deployed(target)
    assert deployed is not None and deployed.digest == other.digest and deployed.card.replaces == model.digest
    assert {card.digest for card in store.versions(target)} == {model.digest, other.digest}
    assert store.rollback(target).digest == model.digest
    back = store.deployed(target)
    assert back is not None and back.digest == model.digest
    with pytest.raises(UsageError, match="no model of cpu-portable from before"):
        store.rollback(target)


def test_deploying_the_same_model_twice_does_not_make_it_its_own_predecessor(
    tmp_path: Path, model: CostModel, other: CostModel
) -> None:
    store = ModelStore(tmp_path)
    for m in (model, other, other):
        store.deploy(m)
    deployed = store.deployed(model.card.target)
    assert deployed is not None and deployed.card.replaces == model.digest


def test_a_deployment_killed_between_text_and_card_leaves_the_old_model_in_use(
    tmp_path: Path, model: CostModel, other: CostModel
) -> None:
    store = ModelStore(tmp_path)
    store.deploy(model)
    write_text(tmp_path / "cpu-portable.txt.xz", other.text)
    deployed = store.deployed("cpu-portable")
    assert deployed is not None and deployed.digest == model.digest


def test_a_plain_text_that_its_card_describes_counts_beside_a_compressed_one_of_another_model(
    tmp_path: Path, model: CostModel, other: CostModel
) -> None:
    store = ModelStore(tmp_path)
    other.save(tmp_path / "cpu-portable.txt.xz")
    model.save(tmp_path / "cpu-portable.txt")  # the same card's name
    deployed = store.deployed("cpu-portable")
    assert deployed is not None and deployed.digest == model.digest


def test_a_compressed_text_that_is_cut_no_archive_or_too_long_is_refused(tmp_path: Path, model: CostModel) -> None:
    path = tmp_path / "cpu-portable.txt.xz"
    model.save(path)
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"tree" + whole):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="cannot read it"):
            CostModel.load(path)
    write_text(path, "0" * 10_000)  # which a few bytes unpack to
    with pytest.raises(DataError, match="more than 9999 bytes"):
        read_text(path, 9_999)


def test_the_first_root_with_a_model_wins_and_none_gives_none(
    tmp_path: Path, model: CostModel, other: CostModel
) -> None:
    roots = (tmp_path / "home", tmp_path / "shipped")
    assert find("cpu-portable", roots) is None
    ModelStore(roots[1]).deploy(model)
    found = find("cpu-portable", roots)
    assert found is not None and found.digest == model.digest
    ModelStore(roots[0]).deploy(other)
    found = find("cpu-portable", roots)
    assert found is not None and found.digest == other.digest


def test_a_stale_model_is_reported_not_skipped(tmp_path: Path, model: CostModel) -> None:
    store = ModelStore(tmp_path)
    store.deploy(model)
    with pytest.raises(StaleModel):
        store.deployed("cpu-portable", FeatureSet(("one",), "x"))


def test_a_target_name_cannot_leave_the_folder(tmp_path: Path) -> None:
    with pytest.raises(EmmyError, match="target name"):
        ModelStore(tmp_path).deployed("../../etc/passwd")


def test_a_card_without_times_is_refused(model: CostModel) -> None:
    card = replace(model.card, members=model.card.members[:1])
    with pytest.raises(DataError, match="its card describes"):
        CostModel(card, model.text, "m")
