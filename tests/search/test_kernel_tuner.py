"""Spaces that lie in Kernel Tuner's files and T4 results, its own strategies beside ours, and the pictures of both."""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from emmy.cli import main
from emmy.errors import DataError, UsageError
from emmy.search import kernel_tuner
from emmy.search.evaluate import evaluate, standings
from emmy.search.recorded_space import load_recorded
from emmy.search.siblings import siblings
from emmy.workloads import recorded
from emmy.workloads.recorded.files import read_recording

HAS_KERNEL_TUNER = importlib.util.find_spec("kernel_tuner") is not None
needs_kernel_tuner = pytest.mark.skipif(not HAS_KERNEL_TUNER, reason="the package kernel-tuner is not installed")

ROWS = [(bx, pad, vec) for bx in (16, 32, 48) for pad in (False, True) for vec in ("float", "float4")]


def _time_ms(bx: int, pad: bool, vec: str) -> float:
    return 0.5 + abs(bx - 32) / 16 + 0.25 * pad + 0.125 * (vec == "float")


def _cache(folder: Path, objective: object = "time") -> Path:
    """As Kernel Tuner writes it, with one configuration that did not compile."""
    entries = {}
    for bx, pad, vec in ROWS:
        time: object = "CompilationFailedConfig" if (bx, pad, vec) == (48, True, "float4") else _time_ms(bx, pad, vec)
        entries[f"{bx},{pad},{vec}"] = {"block_size_x": bx, "pad": pad, "vec": vec, "time": time, "times": [1.0]}
    header = {"device_name": "X", "kernel_name": "k", "problem_size": [4096, 1], "objective": objective}
    names = ["block_size_x", "pad", "vec"]
    path = folder / "cache.json"
    path.write_text(json.dumps(header | {"tune_params_keys": names, "tune_params": {}, "cache": entries}))
    return path


def _measured(bx: int, pad: bool, vec: str, unit: str, factor: float) -> dict[str, object]:
    return {"name": "time", "value": _time_ms(bx, pad, vec) * factor, "unit": unit}


def _t4(folder: Path, unit: str, factor: float) -> Path:
    results = [
        {
            "configuration": {"block_size_x": bx, "pad": pad, "vec": vec},
            "times": {"runtimes": []},
            "invalidity": "compile" if (bx, pad, vec) == (48, True, "float4") else "correct",
            "correctness": 1,
            "objectives": ["time"],
            "measurements": [{"name": "GFLOP/s", "value": 7.0, "unit": ""}, _measured(bx, pad, vec, unit, factor)],
        }
        for bx, pad, vec in ROWS
    ]
    path = folder / "results.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"schema_version": "1.0.0", "results": results}).encode()))
    return path


def test_a_cache_and_t4_results_of_one_tuning_give_one_space(tmp_path: Path) -> None:
    cache, t4 = load_recorded(str(_cache(tmp_path))), load_recorded(str(_t4(tmp_path, "seconds", 1e-3)))
    assert [p.key for p in cache.points()] == [p.key for p in t4.points()]
    np.testing.assert_allclose(cache.times_us, t4.times_us)
    assert cache.size(100) == len(ROWS) - 1  # the one that failed is no point
    assert cache.times_us.min() == pytest.approx(500.0)
    best = next(p for p in cache.points() if cache.trial(p).time_us == cache.times_us.min())
    assert best.as_dict() == {"block_size_x": 32, "pad": 0, "vec": 1}  # texts by the alphabet: float, float4


def test_a_cache_that_was_left_open_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = _cache(tmp_path)
    text = path.read_text()
    path.write_text(text[: text.rindex('"48,True,float4"')].rstrip().rstrip(",") + ",")
    found = read_recording(path)
    assert len(found.status) == len(ROWS) - 1 and set(found.status) == {"ok"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1}', "neither a cache"),
        ("[1, 2", "cannot be read as JSON"),
        ('{"results": [{"configuration": {"a": 1}}]}', "lacks or mistypes 'invalidity'"),
        ('{"cache": {}, "tune_params_keys": ["a"]}', "no configuration"),
    ],
)
def test_another_file_is_refused_with_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        recorded.load(str(path))


def test_a_rate_instead_of_a_time_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="only times can be replayed"):
        recorded.load(str(_cache(tmp_path, "GFLOP/s")))
    with pytest.raises(UsageError, match="no such file"):
        recorded.load(str(tmp_path / "none.json"))


def test_strategies_replay_on_a_file_and_random_is_always_beside_them(tmp_path: Path) -> None:
    path = str(_cache(tmp_path))
    rows = evaluate(("evolve",), (path,), seeds=2, budget=11, processes=1)
    assert [(r.space, r.strategy, r.points) for r in rows] == [(path, "evolve", 11), (path, "random", 11)]
    for r in rows:
        assert (
            len(r.speed) == 11
            and r.speed[-1] == 1.0
            and all(a <= b for a, b in zip(r.speed, r.speed[1:], strict=False))
        )
    assert not siblings(path)


def test_slow_strategies_get_fewer_seeds_and_each_row_its_own_runs(tmp_path: Path) -> None:
    rows = evaluate(("optuna", "evolve"), (str(_cache(tmp_path)),), seeds=3, slow_seeds=1, budget=5, processes=1)
    assert [(r.strategy, r.seeds) for r in rows] == [("optuna", 1), ("evolve", 3), ("random", 3)]


def test_unknown_strategies_of_kernel_tuner_are_refused_before_anything_runs() -> None:
    with pytest.raises(UsageError, match="kt:genetic_algorithm"):
        evaluate(("kt:genetics",), ("convolution.a4000",), seeds=1)


@pytest.mark.skipif(HAS_KERNEL_TUNER, reason="it is installed")
def test_without_kernel_tuner_the_error_says_how_to_get_it() -> None:
    with pytest.raises(UsageError, match=r"pip install 'emmy\[eval\]'"):
        evaluate(("kt:all",), ("convolution.a4000",), seeds=1)


@needs_kernel_tuner
@pytest.mark.slow
def test_kernel_tuners_strategies_see_our_points_and_count_as_ours_do() -> None:
    space = load_recorded("convolution.a4000")
    for name in ("random_sample", "genetic_algorithm", "adaptive_tabu_greywolf"):
        best = kernel_tuner.replay(space, f"kt:{name}", 3, 60)
        assert 0 < len(best) <= 60
        assert set(best) <= set(map(float, space.times_us)) and list(best) == sorted(best, reverse=True)
        assert best == kernel_tuner.replay(space, f"kt:{name}", 3, 60)


@needs_kernel_tuner
@pytest.mark.slow
def test_every_name_is_a_strategy_of_the_installed_kernel_tuner_and_runs(tmp_path: Path) -> None:
    space = load_recorded("convolution.w6600")
    for name in kernel_tuner.NAMES:
        assert kernel_tuner.replay(space, f"kt:{name}", 0, 30)


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is not None, reason="it is installed")
def test_without_matplotlib_the_command_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["eval", "search", "--spaces", str(_cache(tmp_path)), "--strategies", "random", "--seeds", "1"]
    assert main([*arguments, "--budget", "3", "--plot", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "pip install 'emmy[eval]'" in said.err and "replaying" not in said.err and not said.out  # before the runs


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_curves_are_drawn_a_picture_a_space_and_one_of_their_mean(tmp_path: Path) -> None:
    from emmy.plots import best_so_far

    rows = evaluate(("random",), (str(_cache(tmp_path)), "convolution.w6600"), seeds=1, budget=5, processes=1)
    drawn = best_so_far(rows, standings(rows), tmp_path / "curves")
    assert [p.name for p in drawn] == ["search-cache.png", "search-convolution.w6600.png", "search-mean.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in drawn)
    one = [r for r in rows if r.space == "convolution.w6600"]
    assert len(best_so_far(one, standings(one), tmp_path / "one")) == 1
