"""Experiments: what a file may say, what a command line changes of it, and which results need no measuring again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from emmy.errors import UsageError
from emmy.serving.client import bench_words, figures
from emmy.serving.compare import entries
from emmy.serving.experiment import Changes, Experiment, parse_point, read_experiment
from emmy.serving.page import page
from emmy.serving.results import Results, Row

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "experiments" / "serving" / "gemma-4-12b.toml"
Write = Callable[..., Path]


def test_the_published_points_and_lanes_are_there(pack: Path) -> None:
    e = read_experiment(PUBLISHED, Changes(packs={"": pack}))
    assert [p.name for p in e.points] == ["4096/4096@1", "4096/4096@4", "4096/4096@8", "8192/256@4", "256/256@64"]
    assert [(x.name, x.dtype, x.against) for x in e.lanes] == [
        ("stock", "bfloat16", ""), ("emmy", "bfloat16", "stock"),
        ("stock-triton", "bfloat16", ""), ("emmy-triton", "bfloat16", "stock-triton"),
        ("stock-f16", "float16", ""), ("emmy-hybrid", "float16", "stock-f16"),
    ]  # fmt: skip
    assert [x.name for x in e.lanes if x.environment] == ["emmy-hybrid"]
    assert e.lanes[-1].environment == {"EMMY_FAST_MATH": "1"}


def test_a_lane_brings_the_stock_it_is_compared_with(pack: Path) -> None:
    e = read_experiment(PUBLISHED, Changes(packs={"emmy-hybrid": pack}, lanes=["emmy-hybrid"]))
    assert [x.name for x in e.lanes] == ["stock-f16", "emmy-hybrid"]


def test_a_cut_output_is_said_beside_the_published_point(pack: Path) -> None:
    e = read_experiment(PUBLISHED, Changes(packs={"": pack}, most_output=1024, most_prompts=2))
    assert (e.points[0].name, e.points[0].output, e.points[0].note) == (
        "4096/4096@1", 1024, "output 1024 instead of 4096",
    )  # fmt: skip
    assert e.points[3].note == "" and [p.prompts for p in e.points] == [2, 4, 8, 4, 64]  # never fewer than run at once


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("waves = 2", "wave = 2", "unknown key 'wave'"),
        ("waves = 2", 'waves = "2"', "waves is '2', a whole number"),
        ("waves = 2", "waves = 1001", "1001 waves; at most 1000"),
        ("waves = 2", "waves = 9_999_999_999", "a whole number from 1 to 1000000000"),
        ("input = 32", "", "'input' is missing"),
        ("concurrency = 2", "concurrency = 0", "from 1"),
        ("concurrency = 2", "concurrency = 2\nprompts = 1", "never keep 2 in flight"),
        ('name = "emmy"', 'name = "stock"', "a name each"),
        ('against = "stock"', 'against = "none"', "no lane of stock"),
        ('against = "stock"', 'against = "stock"\ndtype = "float16"', "like with like"),
        ('pack = "p.emmypack"', "", "--pack emmy=FILE"),
        ('name = "tiny"', "name = ", "no TOML"),
        ('name = "stock"', 'name = "stock"\ndtype = "int8"', "allowed are"),
        ('name = "stock"', 'name = "../stock"', "up to 64 letters"),
        ('name = "stock"', 'name = "stock\\u0000"', "up to 64 letters"),
        ("waves = 2", "waves = " + "9" * 5000, "no TOML"),
        ("waves = 2", "waves = " + "[" * 9000, "no TOML"),
        ("[[point]]", "[offline]\nkv_gib = inf\n[[point]]", "kv_gib is inf, a number from 0 to"),
        ("[[point]]", "[offline]\nmemory = 1.5\n[[point]]", "memory is 1.5, a number from 0 to 1 is"),
    ],
)
def test_what_a_file_may_not_say(experiment: Write, old: str, new: str, why: str) -> None:
    path = experiment()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(UsageError, match=why):
        read_experiment(path, Changes())


def test_names_that_are_not_there_are_refused(experiment: Write) -> None:
    for changes in (Changes(lanes=["emy"]), Changes(points=["1/1@1"]), Changes(packs={"stock": Path("x")})):
        with pytest.raises(UsageError, match=r"is not there|has no pack"):
            read_experiment(experiment(), changes)


def test_a_key_holds_all_that_decides_what_is_measured(experiment: Write, pack: Path) -> None:
    e = read_experiment(experiment(), Changes())
    stock, emmy = e.lanes
    point = e.points[0]
    assert emmy.use is not None

    def key(e: Experiment = e, lane: object = emmy, point: object = point, vllm: str = "0.32.0") -> str:
        return e.key(lane, point, vllm)  # type: ignore[arg-type]

    other = replace(emmy, use=replace(emmy.use, digest="f" * 64))
    fast = replace(emmy, environment={"EMMY_FAST_MATH": "1"})
    changed = [
        key(lane=stock), key(lane=other), key(lane=fast), key(replace(e, model="x")), key(replace(e, flags=("-O3",))),
        key(point=point.cut(most_output=4)), key(vllm="0.25.1"),
    ]  # fmt: skip
    assert len({key(), *changed}) == 1 + len(changed)
    assert key() == key(replace(e, waves=7)) == key(lane=replace(emmy, use=replace(emmy.use, pack=Path("/moved"))))


def test_a_point_in_words() -> None:
    point = parse_point("4096/256@4x64")
    assert (point.input, point.output, point.concurrency, point.prompts) == (4096, 256, 4, 64)
    assert parse_point("8/8@3").prompts == 12
    for text in ("4096", "1/2@0", "0/1@1", "1/2@3x", "9" * 5000 + "/1@1"):
        with pytest.raises(UsageError, match="no point of work"):
            parse_point(text)


def test_a_client_gets_the_servers_names_and_the_points_numbers(tmp_path: Path) -> None:
    flags = ["--tokenizer", "tok", "--served-model-name", "gemma", "--port", "1"]
    words = bench_words("m", flags, "http://127.0.0.1:1", parse_point("32/8@2x5"), tmp_path / "r.json", 3)
    said = dict(pairwise(words))
    assert (said["--served-model-name"], said["--tokenizer"], said["--seed"]) == ("gemma", "tok", "3")
    assert (said["--num-prompts"], said["--max-concurrency"], said["--num-warmups"]) == ("5", "2", "2")
    assert "--ignore-eos" in words and said["--percentile-metrics"] == "ttft,tpot,itl,e2el"


def test_a_result_of_another_client_is_refused() -> None:
    from emmy.errors import ServingError

    with pytest.raises(ServingError, match="no number 'completed'"):
        figures({}, parse_point("1/1@1"))


# ---------------------------------------------------------------------------------------------------------- results
def row(lane: str, wave: int, ttft: float, tokens_per_s: float, **more: object) -> Row:
    against = "stock" if lane == "emmy" else ""
    figures = {"ttft_p50_ms": ttft, "tpot_p50_ms": 8.0, "output_tokens_per_s": tokens_per_s}
    made: dict[str, object] = {
        "point": "4096/4096@1",
        "status": "ok",
        "note": "output 8 instead of 4096",
        "figures": figures,
        **more,
    }
    return Row(f"key-{lane}", "x", "online", wave, lane, against, "bfloat16", **made)  # type: ignore[arg-type]


def test_ratios_are_of_the_same_wave_and_above_1_where_the_lane_is_better() -> None:
    of_another_pack = replace(row("emmy", 4, 1, 1), key="older")
    rows = [
        of_another_pack, row("stock", 4, 100, 50),
        row("stock", 1, 100, 50), row("emmy", 1, 80, 60), row("stock", 2, 110, 50), row("emmy", 2, 100, 55),
        row("emmy", 3, 1, 999), row("stock", 2, 1, 1, status="failed"),
    ]  # fmt: skip
    stock, emmy = entries(rows)
    assert stock.ratios == {} and stock.figures["ttft_p50_ms"] == 100 and emmy.waves == 3
    assert (emmy.ratios["ttft_p50_ms"].low, emmy.ratios["ttft_p50_ms"].high) == (1.1, 1.25)
    assert emmy.ratios["output_tokens_per_s"].median == pytest.approx(1.15)
    assert str(emmy.ratios["tpot_p50_ms"]) == "1.000"


def test_offline_ratios_are_of_rounds_in_turns() -> None:
    def of(lane: str, *ms: float) -> Row:
        return replace(row(lane, 1, 0, 0), kind="offline", point="decode 1", figures={"ms": ms[0]}, samples=ms)

    _, emmy = entries([of("stock", 8.0, 9.0, 8.0), of("emmy", 4.0, 6.0, 8.0)])
    assert (emmy.ratios["ms"].low, emmy.ratios["ms"].median, emmy.ratios["ms"].high) == (1.0, 1.5, 2.0)
    _, noisy = entries([of("stock", 8.0, 9.0, -8.0), of("emmy", 4.0, 0.0, 8.0)])
    assert str(noisy.ratios["ms"]) == "2.000"


def test_results_survive_a_torn_line_and_refuse_what_is_none(tmp_path: Path) -> None:
    from emmy.errors import DataError

    results = Results.open(tmp_path)
    results.append(row("stock", 1, 100.0, 50))
    results.append(row("emmy", 1, 0, 0, status="failed", message="gone"))
    file = tmp_path / "serving.jsonl"
    file.write_text(file.read_text() + '{"v":1,"key":"tor')
    again = Results.open(tmp_path)
    assert again.rows == results.rows and file.read_text().count("\n") == 2
    assert again.has("key-stock", 1) and not again.has("key-stock", 2) and not again.has("key-emmy", 1)
    text = page(again, entries(again.rows))
    assert "output 8 instead of 4096" in text and "gone" in text and "| 100.0 |" in text
    file.write_text("{}\n" + file.read_text())
    with pytest.raises(DataError, match="line 1 is no row"):
        Results.open(tmp_path)
