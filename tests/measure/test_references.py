"""Answers kept on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from emmy.ir.ops import parse_op
from emmy.ir.ops.matmul import Matmul
from emmy.measure.references import Case, References

OP = parse_op("matmul:5x7x64:f32")


def test_an_answer_is_computed_once_and_is_the_op_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("normal", 1, {})
    inputs = OP.inputs("normal", 1)
    want = OP.reference(inputs)
    assert (References(tmp_path).get(OP, case, inputs)["C"] == want["C"]).all()
    monkeypatch.delattr(Matmul, "reference")
    assert (References(tmp_path).get(OP, case, inputs)["C"] == want["C"]).all()


def test_other_inputs_have_another_answer(tmp_path: Path) -> None:
    case, store = Case("normal", 1, {}), References(tmp_path)
    inputs = OP.inputs("normal", 1)
    first = store.get(OP, case, inputs)["C"].copy()
    inputs["A"] = inputs["A"] * np.float32(2)
    assert (store.get(OP, case, inputs)["C"] == 2 * first).all()


def test_a_kept_answer_cannot_be_written(tmp_path: Path) -> None:
    answer = References(tmp_path).get(OP, Case("normal", 1, {}), OP.inputs("normal", 1))["C"]
    with pytest.raises(ValueError, match="read-only"):
        answer[0, 0] = 0


def test_the_folder_stays_within_its_limit_and_keeps_what_was_used_last(tmp_path: Path) -> None:
    one = 5 * 7 * 8 + 128
    store = References(tmp_path, limit_bytes=3 * one + 10)
    for seed in range(6):
        store.get(OP, Case("normal", seed, {}), OP.inputs("normal", seed))
    files = list(tmp_path.glob("*.npy"))
    assert 2 <= len(files) <= 3
    assert sum(f.stat().st_size for f in files) <= 3 * one + 10


def test_a_torn_file_is_computed_again(tmp_path: Path) -> None:
    case, inputs = Case("normal", 1, {}), OP.inputs("normal", 1)
    want = References(tmp_path).get(OP, case, inputs)["C"].copy()
    for file in tmp_path.glob("*.npy"):
        file.write_bytes(file.read_bytes()[:100])
    assert (References(tmp_path).get(OP, case, inputs)["C"] == want).all()


def test_a_folder_that_cannot_be_written_costs_no_answer(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    inputs = OP.inputs("normal", 1)
    answer = References(tmp_path / "file").get(OP, Case("normal", 1, {}), inputs)["C"]
    assert (answer == OP.reference(inputs)["C"]).all()
