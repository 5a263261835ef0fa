"""`emmy data`, `doctor`, `cache`, `train-costmodel` and `eval`: what they say of a home, and what they leave in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from emmy import config
from emmy.measure.journal import closed_journals, open_journals
from emmy.measure.lock import DeviceLock
from tests.cli.conftest import OP, Emmy, FakeDevice

N_ROWS = 43  # 40 trials, 3 finalists


def test_stats_counts_rows_and_lists_the_best(emmy: Emmy, tuned: Path) -> None:
    said = emmy("data", "stats", "--json")
    assert sum(int(str(g["rows"])) for g in said.of("group")) == N_ROWS
    assert OP in {b["op"] for b in said.of("best")}
    text = emmy("data", "stats")
    assert f"{N_ROWS} rows" in text.err and "matmul" in text.out and OP not in text.out
    assert "1 op with a best: --ops TEXT lists those" in text.err
    (kind,) = said.of("kind")
    assert (kind["rows"], kind["ops"], kind["with_best"], kind["raced"]) == (N_ROWS, 1, 1, 1)
    narrowed = emmy("data", "stats", "--ops", OP[:10])
    assert OP in narrowed.out and "correctness" not in narrowed.out and OP in emmy("data", "stats", "--full").out
    assert "no op with a best has 'softmax'" in emmy("data", "stats", "--ops", "softmax").err
    assert emmy("data", "stats", "--gpu", "h200").out.strip() == ""


@pytest.mark.parametrize("task", ["stats", "doctor", "export --out x"])
def test_a_target_that_does_not_exist_is_a_usage_error_and_not_an_empty_answer(emmy: Emmy, task: str) -> None:
    said = emmy("data", *task.split(), "--gpu", "rtx409")
    assert said.code == 2 and "no target is named 'rtx409'. Did you mean rtx4090?" in said.err


def test_query_answers_sql_as_a_table_and_as_objects(emmy: Emmy, tuned: Path) -> None:
    sql = "SELECT status, count(*) AS n FROM measurement GROUP BY status"
    assert emmy("data", "query", sql).out.split() == ["status", "n", "------", "--", "ok", str(N_ROWS)]
    assert [o["cells"] for o in emmy("data", "query", sql, "--json").of("row")] == [{"status": "ok", "n": N_ROWS}]


def test_a_query_cannot_write(emmy: Emmy, tuned: Path, tmp_path: Path) -> None:
    said = emmy("data", "query", f"COPY measurement TO '{tmp_path / 'out.csv'}'")
    assert said.code == 2 and not (tmp_path / "out.csv").exists()


def test_rows_travel_from_one_home_to_another(emmy: Emmy, tuned: Path, tmp_path: Path) -> None:
    assert emmy("data", "export", "--gpu", "cpu", "--out", tmp_path / "out").code == 0
    assert "0 rows written" in emmy("data", "export", "--gpu", "cpu", "--out", tmp_path / "out").out
    assert emmy("data", "verify", tmp_path / "out" / "cpu").code == 0
    assert "1 shard folders, 0 faults" in emmy("data", "verify", tmp_path / "out").err
    assert emmy("data", "verify", tmp_path / "nothing").code == 1
    other = tmp_path / "other"
    said = emmy("data", "import", tmp_path / "out", "--home", other)
    assert (
        f"{N_ROWS} rows came from" in said.out and f"{N_ROWS} rows stay in quarantine: target: rows of fake" in said.out
    )
    assert f"{N_ROWS} more rows wait in quarantine, in 1 set" in emmy("data", "stats", "--home", other).err
    assert emmy("data", "stats", "--home", other, "--json").of("group") == []
    assert (
        "`... release SET` takes a set in" in said.err
        and "release SET" in emmy("data", "quarantine", "--home", other).err
    )
    (held,) = emmy("data", "quarantine", "--home", other, "--json").of("held")
    released = emmy("data", "quarantine", "release", held["set"], "--home", other, "--no-train")
    assert f"{N_ROWS} rows taken in, 0 were known" in released.out
    (group,) = emmy("data", "stats", "--home", other, "--json").of("group")
    assert "no best is listed" in emmy("data", "stats", "--home", other).err
    assert (group["origin"], group["rows"]) == ("imported", N_ROWS)


def test_rows_of_ones_own_come_in_as_measured_by_way_of_a_place(emmy: Emmy, tuned: Path, tmp_path: Path) -> None:
    place, other = tmp_path / "place", tmp_path / "other"
    (pushed,) = emmy("data", "push", place, "--json").of("push")
    assert (pushed["rows"], pushed["sent"], pushed["held_back"]) == (N_ROWS, 1, {})
    assert "0 rows sent" in emmy("data", "push", place).out
    assert emmy("data", "verify", place).code == 0
    assert (
        f"{N_ROWS} rows taken in as measured; 0 were known" in emmy("data", "pull", place, "--own", "--home", other).out
    )
    (group,) = emmy("data", "stats", "--home", other, "--json").of("group")
    assert (group["origin"], group["rows"]) == ("measured", N_ROWS)
    assert "1 manifest brought nothing new" in emmy("data", "pull", place, "--home", other).out


def test_a_set_in_quarantine_is_checked_again_and_dropped_on_request(emmy: Emmy, tuned: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    emmy("data", "push", tmp_path / "place")
    (judged,) = emmy("data", "pull", tmp_path / "place", "--home", other, "--json").of("calibration")
    assert (judged["calibrated"], judged["rows"]) == (False, 0)
    assert "target: rows of fake" in emmy("data", "quarantine", "check", "--home", other).out
    assert emmy("data", "quarantine", "release", "--home", other).code == 2
    assert (
        "no set of rows in quarantine begins with 'x'" in emmy("data", "quarantine", "drop", "x", "--home", other).err
    )
    assert "dropped; a pull will not bring it again" in emmy("data", "quarantine", "drop", "cpu", "--home", other).out
    assert "nothing is in quarantine" in emmy("data", "quarantine", "--home", other).err


def test_what_is_damaged_or_not_there_ends_a_pull_with_the_reason(emmy: Emmy, tuned: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    emmy("data", "push", place)
    (part,) = (place / "cpu").glob("*.parquet")
    part.write_bytes(part.read_bytes()[:-1])
    said = emmy("data", "pull", place, "--home", tmp_path / "other")
    assert said.code == 1 and "not taken: cpu/manifest-" in said.err and "SHA-256 is" in said.err
    assert emmy("data", "pull", tmp_path / "nothing").code == 2
    said = emmy("data", "pull", "http://127.0.0.1:9/emmy")
    assert said.code == 1 and "127.0.0.1:9/emmy/index.json: does not answer" in said.err
    assert emmy("data", "push", "https://example.org/emmy").code == 2


def test_verify_finds_a_shard_that_was_tampered_with(emmy: Emmy, tuned: Path, tmp_path: Path) -> None:
    emmy("data", "export", "--gpu", "cpu", "--out", tmp_path)
    (part,) = (tmp_path / "cpu").glob("*.parquet")
    raw = bytearray(part.read_bytes())
    raw[len(raw) // 2] ^= 1
    part.write_bytes(raw)
    said = emmy("data", "verify", tmp_path / "cpu")
    assert said.code == 1 and part.name in said.out


def test_doctor_of_the_data_finds_rows_whose_source_has_changed(emmy: Emmy, tuned: Path) -> None:
    said = emmy("data", "doctor", "--json")
    assert said.code in (0, 1)
    assert {"kind", "op", "detail", "ids"} <= set(said.of("fault")[0]) if said.of("fault") else said.code == 0


def test_rebuild_makes_the_same_rows_again(emmy: Emmy, tuned: Path) -> None:
    assert f"{N_ROWS} rows from 1 journals" in emmy("data", "rebuild").out
    assert f"{N_ROWS} rows" in emmy("data", "stats").err


def test_ingest_takes_in_the_rows_of_a_run_that_died(emmy: Emmy, tuned: Path) -> None:
    (archived,) = (tuned / "journal" / "ingested").glob("*.jsonl")
    dead = tuned / "journal" / archived.name.replace(".closed", "")
    archived.rename(dead)
    assert "0 new rows" in emmy("data", "ingest").out and open_journals(tuned) == (dead,)
    (report,) = emmy("data", "ingest", "--dead", "--json").of("ingest")
    assert (report["journals"], report["new_rows"]) == (1, 0)
    assert not open_journals(tuned) and not closed_journals(tuned)


def test_doctor_says_what_is_there_and_what_is_missing(
    emmy: Emmy, tuned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = emmy("doctor", "--json")
    states = {str(c["name"]): c["state"] for c in said.of("check")}
    assert said.code == 0
    assert {"python", "C compiler", "processor", "numpy", "device lock", "home", "cache", "dataset"} <= set(states)
    monkeypatch.setenv("EMMY_CC", "no-such-compiler")
    said = emmy("doctor")
    assert said.code == 1 and "missing: C compiler: install it" in said.out and "EMMY_CC" in said.out


def test_doctor_names_who_holds_the_device_and_interrupted_runs(
    emmy: Emmy, tuned: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EMMY_CACHE", str(tmp_path / "cache"))
    (archived,) = (tuned / "journal" / "ingested").glob("*.jsonl")
    archived.rename(tuned / "journal" / archived.name.replace(".closed", ""))
    with DeviceLock(config.cache_dir() / "locks", "cpu"):
        found = {str(c["name"]): str(c["found"]) for c in emmy("doctor", "--json").of("check")}
    assert "is being measured by process" in found["device lock"]
    assert found["runs"] == "0 at work, 1 interrupted"


def test_cache_clean_removes_everything_but_the_locks(
    emmy: Emmy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EMMY_CACHE", str(tmp_path))
    for name in ("lib/ab/x.so", "references/y.npy", "locks/cpu.lock"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * 1024)
    assert {str(o["folder"]) for o in emmy("cache", "info", "--json").of("cache")} == {
        str(tmp_path / n) for n in ("lib", "references")
    }
    assert emmy("cache").out == emmy("cache", "info").out
    assert emmy("cache", "clean").code == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["locks"]


def test_too_few_rows_train_no_model_and_say_so(emmy: Emmy, tuned: Path) -> None:
    said = emmy("train-costmodel")
    assert said.code == 1 and "not deployed" in said.out and "at least 50" in said.out


def test_eval_of_a_cost_model_needs_rows(emmy: Emmy, fake_device: FakeDevice) -> None:
    said = emmy("eval", "costmodel")
    assert said.code == 2 and "at least 50" in said.err


def test_eval_of_the_search_scores_strategies_against_random(emmy: Emmy) -> None:
    said = emmy(
        "eval",
        "search",
        "--spaces",
        "dedispersion.a100",
        "--strategies",
        "random",
        "--seeds",
        "2",
        "--budget",
        "20",
        "--json",
    )
    (space,), (strategy,) = said.of("space"), said.of("strategy")
    assert (space["points"], space["seeds"], space["budget"]) == (11130, 2, 20)
    assert space["score"] == strategy["score"] and "at_20" in strategy
    assert said.err.startswith("replaying: ")


@pytest.mark.parametrize("argv", [("--spaces", "nope"), ("--strategies", "luck"), ("--seeds", "0")])
def test_eval_of_the_search_refuses_unknown_names(emmy: Emmy, argv: tuple[str, ...]) -> None:
    assert emmy("eval", "search", *argv).code == 2
