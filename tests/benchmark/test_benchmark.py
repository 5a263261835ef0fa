"""The benchmark of a set: what is measured stays, what is left goes on, and the page tells it without a network."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from emmy import api
from emmy.benchmark.cases import bench_cases, by_value
from emmy.benchmark.chart import chart_svg
from emmy.benchmark.choice import Stored
from emmy.benchmark.evidence import evidence
from emmy.benchmark.lanes import AUTOTUNED_CASES, parse_lanes
from emmy.benchmark.page import page
from emmy.benchmark.results import LINES, PARQUET, LaneRow, Results, read, read_parquet
from emmy.benchmark.summary import case_lanes, geometric_mean, groups, worst
from emmy.cli import main
from emmy.codegen.files import alone_in
from emmy.errors import DataError, FolderBusy, UsageError
from emmy.ir.ops import parse_op
from emmy.ir.schedule import replay, sums_of
from emmy.ir.target import load_target
from emmy.measure.fake import FakeMeasurer
from emmy.measure.measurer import Heat
from emmy.search.tuner import Stop

OPS = ("matmul:64x96x128:f32", "matmul:64x96x128:f32:bias", "rms_norm:64x256:f32", "matmul:m(1..64)x96x128:f32:nk")


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMMY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("EMMY_SHIPPED", "0")
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # these folders need not survive a power cut


@pytest.fixture(scope="session")
def _measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the results of all cases, to be copied."""
    folder, patch = tmp_path_factory.mktemp("bench"), pytest.MonkeyPatch()
    with patch.context() as m:
        m.setenv("EMMY_SHIPPED", "0")
        bench(folder / "out", Recorder(), home=folder / "home")
    return folder


@pytest.fixture
def measured(_measured: Path, tmp_path: Path) -> Path:
    """Results of all cases; the rows of Emmy's lanes are in the home that commands use."""
    shutil.copytree(_measured / "home", tmp_path / "home")
    return Path(shutil.copytree(_measured / "out", tmp_path / "out"))


class Recorder(FakeMeasurer):
    """Notes the heats, and asks to stop after the one of number `after`."""

    def __init__(self, stop: Stop | None = None, after: int = 0) -> None:
        super().__init__()
        self.heats: list[tuple[str, tuple[str, ...]]] = []
        self.stop, self.after = stop, after

    def heat(self, op: str, schedules: Sequence[str], rivals: Sequence[str] = ("",), rounds: int = 7) -> Heat:
        self.heats.append((op, tuple(rivals)))
        if self.stop is not None and len(self.heats) == self.after:
            self.stop.asked = True
        return super().heat(op, schedules, rivals, rounds)


def bench(out: Path, measurer: FakeMeasurer, **options: object) -> tuple[Results, int]:
    return api.bench_kernels(OPS, out, measurer=measurer, **options)  # type: ignore[arg-type]


def test_a_folder_that_another_sitting_measures_into_is_left_alone(tmp_path: Path) -> None:
    here = Recorder()
    with alone_in(tmp_path), pytest.raises(FolderBusy, match="another command writes its results there"):
        bench(tmp_path, here)
    assert not here.heats


def test_all_lanes_of_a_case_take_turns_in_one_heat_and_a_second_sitting_measures_the_rest_alone(
    tmp_path: Path,
) -> None:
    stop = Stop()
    first = Recorder(stop, after=3)
    _, left = bench(tmp_path, first, stop=stop)
    assert left == 1 and len(first.heats) == 3
    assert {rivals for _, rivals in first.heats} == {("", "torch.compile", "torch.compile:max-autotune")}
    second = Recorder()
    results, left = bench(tmp_path, second)
    assert left == 0 and len(second.heats) == 1
    assert {op for op, _ in (*first.heats, *second.heats)} == {parse_op(o).key for o in OPS}
    third = Recorder()
    assert bench(tmp_path, third)[1] == 0 and third.heats == []
    for case in case_lanes(results.rows):
        assert len({r.heat for r in case.lanes.values()}) == 1
        assert case.lanes["emmy"].origin in ("default", "near")  # near what the first sitting measured
        assert case.lanes["emmy-hybrid"].status == "none" and case.lanes["compile"].status == "ok"


def test_the_budget_in_seconds_ends_a_sitting_between_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, left = bench(tmp_path, Recorder(), seconds=0.0)
    assert left == len(OPS) and results.rows == []
    assert api.bench_kernels(OPS[0], str(tmp_path / "one"), measurer=Recorder(), seconds=0.0)[1] == 1
    assert (tmp_path / PARQUET).exists()
    assert main(["bench", "report", str(tmp_path)]) == 0 and "no ratio yet: of 0 cases" in capsys.readouterr().err


def test_a_torn_last_line_is_dropped_and_its_case_measured_again(measured: Path) -> None:
    text = (measured / LINES).read_text()
    lines = text.splitlines(keepends=True)
    last = json.loads(lines[-1])["case"]
    kept = [line for line in lines if json.loads(line)["case"] != last]
    (measured / LINES).write_text("".join(kept) + lines[-1][:40])
    again = Recorder()
    results, _ = bench(measured, again)
    assert len(again.heats) == 1 and {r.case for r in results.rows} == {parse_op(o).key for o in OPS}
    damaged = "nonsense\n" + "".join(lines)
    (measured / LINES).write_text(damaged)
    with pytest.raises(DataError, match="line 1"):
        read(measured)
    (measured / LINES).write_text('{"v":1,"case":"a"}\n' + "".join(lines))
    with pytest.raises(DataError, match=r"line 1 is no row of the benchmark: lacks fields"):
        read(measured)
    for name, odd in (
        ("samples_us", [0.0]),
        ("time_us", "1"),
        ("kind", 3),
        ("lane", "mine"),
        ("static", "[]"),
        ("flops", 1e999),
    ):
        (measured / LINES).write_text(json.dumps({**json.loads(lines[0]), name: odd}) + "\n")
        with pytest.raises(DataError, match=f"line 1 is no row of the benchmark: .*({name}|a time|static)"):
            read(measured)


def test_a_row_comes_out_of_parquet_as_it_went_in(measured: Path) -> None:
    found = read(measured)
    assert read_parquet(measured / PARQUET) == found == read(measured / LINES)
    rows = [r for r in found if r.status == "ok"]
    assert all(len(r.samples_us) == 7 and r.product == "fake" and r.roof_us > 0 for r in rows)


def test_rows_of_emmys_lanes_enter_the_dataset_and_a_better_winner_is_measured_when_asked(measured: Path) -> None:
    before = api.winner(OPS[0])
    result = api.tune(OPS[0], budget="8", strategy="random", measurer=Recorder())
    assert before is not None and result.best is not None and result.best.schedule != before.schedule
    again = Recorder()
    bench(measured, again)
    assert again.heats == []
    bench(measured, again, again=True)
    assert [op for op, _ in again.heats] == [OPS[0]]


def test_an_open_size_is_timed_at_the_catalogues_hint() -> None:
    by_id = {c.id: c for c in bench_cases(["@gemma4-12b"])}
    assert len(by_id) == 258
    assert by_id["q_proj.dynM"].at().key == "matmul:m(1..512)x4096x3840:f16"
    assert by_id["q_norm.dynM"].at(257).key == "rms_norm:m(257..8192)x256:f16"  # 16 heads a token
    assert by_id["attention.hd256.dynM"].at().typical_sizes() == {"m": 512}
    assert by_id["q_proj"].at().key == "matmul:512x4096x3840:f16"


def test_every_kind_and_tier_is_heard_before_any_comes_twice_and_known_winners_go_first() -> None:
    cases = bench_cases(["@gemma4-12b"])
    n = len({(c.kind, c.tier) for c in cases})
    ordered = by_value(cases, load_target("h200"), 1, frozenset())
    assert len({(c.kind, c.tier) for c in ordered[:n]}) == n
    known = frozenset(c.id for c in cases if c.kind == "rope")
    assert by_value(cases, load_target("h200"), 1, known)[0].kind == "rope"


def test_the_subset_of_max_autotune_is_of_the_catalogue_and_spread() -> None:
    cases = {c.id: c for c in bench_cases(["@gemma4-12b"])}
    chosen = [cases[name] for name in AUTOTUNED_CASES]
    assert len(set(AUTOTUNED_CASES)) == 20
    assert len({c.kind for c in chosen}) >= 6 and len({c.tier for c in chosen}) >= 8
    with pytest.raises(UsageError, match="no lane is named 'fast'"):
        parse_lanes("eager,fast")


def test_a_lane_of_hybrid_sums_gets_a_hybrid_schedule_that_replays_and_other_ops_none(tmp_path: Path) -> None:
    stored = Stored(tmp_path, load_target("h200"), 1)
    product, rows, wide = bench_cases(["matmul:64x256x256:f16:nk", "rms_norm:64x256:f16", "matmul:64x256x256:bf16"])
    pick = stored.pick(product, "hybrid")
    assert pick is not None and sums_of(pick.schedule) == "hybrid" and pick.origin == "default"
    replay(product.op.program(), pick.schedule, load_target("h200"))
    exact = stored.pick(product, "f32")
    assert exact is not None and sums_of(exact.schedule) == "f32"
    assert stored.pick(rows, "hybrid") is None and stored.pick(wide, "hybrid") is None


# ---------------------------------------------------------------- what is told
def row(case: str, lane: str, us: float, kind: str = "matmul", tier: str = "m1", **more: object) -> LaneRow:
    made = LaneRow("heat " + case, "2026-01-01", case, kind, tier, "matmul:64x96x128:f32", lane, "ok")  # type: ignore[arg-type]
    return replace(made, samples_us=(us,) * 3, time_us=us, flops=1e9, bytes=1e6, roof_us=5.0, target="cpu", **more)  # type: ignore[arg-type]


ROWS = [
    row("a", "eager", 20), row("a", "compile", 10), row("a", "emmy", 10),
    row("b", "eager", 10), replace(row("b", "compile", 1), status="none", samples_us=(), time_us=None), row("b", "emmy", 20),
    row("c", "eager", 40, "rope", "m8"), row("c", "emmy", 10, "rope", "m8"),
]  # fmt: skip


def test_ratios_are_summed_up_by_kind_and_tier_and_the_worst_come_first() -> None:
    cases = case_lanes(ROWS)
    found = {(g.by, g.name, g.rival): g for g in groups(cases)}
    total = found["all", "all", "eager"]
    assert (total.cases, total.behind) == (3, 1) and total.mean == pytest.approx((2 * 0.5 * 4) ** (1 / 3))
    assert found["kind", "matmul", "eager"].mean == pytest.approx(1.0)
    # Where torch.compile compiles nothing eager's time stands for it; c was not asked for it.
    assert found["all", "all", "compile"].cases == 2 and found["all", "all", "compile"].least == pytest.approx(0.5)
    assert [c.case for c, _ in worst(cases, "emmy", "eager")] == ["b", "a", "c"]
    assert geometric_mean([]) is None


def test_ratios_are_taken_within_a_heat_only() -> None:
    other = replace(row("a", "emmy", 1), heat="another")
    assert other.ratio(ROWS[0]) is None


class Links(HTMLParser):
    """Everything that a page would fetch or go to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [v or "" for name, v in attrs if name in ("src", "href", "action", "data", "poster", "srcset")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass


def test_the_page_holds_everything_and_asks_nothing_of_a_network(tmp_path: Path) -> None:
    schedule = "k0/split(k,serial,64) k0.C/atom(fma,4,32,1,16)"
    target = load_target("cpu")
    replay(parse_op("matmul:64x96x128:f32").program(), schedule, target)
    rows = [replace(r, schedule=schedule, message="<b>&") if r.lane == "emmy" else r for r in ROWS]
    cases = case_lanes([*rows, replace(row("<d>", "emmy", 3), status="runtime", samples_us=(), time_us=None)])
    api.tune("matmul:64x96x128:f32", budget="4", strategy="random", measurer=FakeMeasurer(), home=tmp_path)
    known = evidence(cases, tmp_path)
    assert known.statuses["matmul"]["ok"] > 4 and known.regret(cases[0], "emmy") is not None
    text = page(cases, known)
    links = Links()
    links.feed(text)
    assert links.open == [] and links.found and all(link.startswith("#") for link in links.found)
    assert not re.search(r"https?:|//[a-z0-9.-]+\.[a-z]{2,}/|@import|url\(", text)
    assert "<d>" not in text and "&lt;d&gt;" in text
    (source,) = known.texts.values()
    assert source.splitlines()[0] in text and "details" in text and schedule in text


def test_what_a_compiler_coloured_is_still_a_picture() -> None:
    coloured = [replace(r, case=f"\x1b[31m{r.case}\0<") for r in ROWS]
    names = [t.text or "" for t in ElementTree.fromstring(chart_svg(case_lanes(coloured))).iter()]
    assert any(name.startswith("a<, emmy: ") for name in names)


def test_the_chart_by_itself_is_a_picture_with_a_bar_a_case_and_lane() -> None:
    root = ElementTree.fromstring(chart_svg(case_lanes(ROWS)))
    titles = [t.text or "" for t in root.iter("{http://www.w3.org/2000/svg}title")]
    assert sorted(titles) == [
        "a, compile: 2.000 times eager, 10 us", "a, emmy: 2.000 times eager, 10 us", "b, emmy: 0.500 times eager, 20 us",
        "c, emmy: 4.000 times eager, 10 us",
    ]  # fmt: skip
    assert float(root.get("width", "0")) >= 500, "the title has room however few cases there are"


def test_the_command_sums_up_and_writes_both_pictures(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    html, svg = tmp_path / "page.html", tmp_path / "chart.svg"
    assert main(["bench", "report", str(measured), "--html", str(html), "--svg", str(svg), "--json"]) == 0
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    totals = [o for o in objects if o["record"] == "group" and o["by"] == "all"]
    assert {(o["lane"], o["rival"]) for o in totals} == {("emmy", r) for r in ("eager", "compile", "max-autotune")}
    (plain := tmp_path / "plain").touch()
    assert {p.stat().st_mode for p in (html, svg, measured / LINES)} == {plain.stat().st_mode}  # for others to read too
    assert html.read_text().startswith("<!doctype html>") and svg.read_text().startswith("<svg xmlns")
    assert main(["bench", "report", str(tmp_path)]) == 1 and "holds no results" in capsys.readouterr().err


def test_rows_of_two_cards_in_a_folder_are_told_apart(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = read(measured)
    Results.open(measured).append([replace(r, target="h200", product="H200", samples_us=(5.0,)) for r in rows])
    assert main(["bench", "report", str(measured)]) == 0
    assert "note: rows of H200 (h200), fake (cpu): a case counts where it was measured last" in capsys.readouterr().err
    assert main(["bench", "report", str(measured), "--gpu", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert "note" not in err and "matmul:64x96x128:f32" in out
    assert (
        main(["bench", "report", str(measured), "--gpu", "a100"]) == 2
        and "only of cpu, h200" in capsys.readouterr().err
    )


def test_the_error_of_sums_is_told_of_gpus_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "accum-error"]) == 2 and "keeps sums in f32 alone" in capsys.readouterr().err
    assert main(["bench", "accum-error", "--gpu", "h200", "--emulate", "--k", "100"]) == 2


@pytest.mark.slow
def test_sums_in_f16_err_more_than_promoted_ones_and_those_more_than_f32(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "accum-error", "--gpu", "h200", "--emulate", "--k", "256", "--json"]) == 0
    errors = {o["sums"]: o["relative_l2"] for o in map(json.loads, capsys.readouterr().out.splitlines())}
    assert errors["f32"] < errors["hybrid 16"] < errors["hybrid 128"] < errors["f16"] < 1e-2


@pytest.mark.slow
@pytest.mark.serial
def test_all_lanes_are_really_measured_on_this_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    ops = ("matmul:16x32x64:f32", "matmul:16x32x64:f32:bias")
    assert main(["bench", "kernels", *ops, "--out", str(tmp_path), "--rounds", "3", "--compilers", "2"]) == 0
    alone, biased = case_lanes(read(tmp_path))
    if alone.case != ops[0]:
        alone, biased = biased, alone
    assert {lane for lane, r in biased.lanes.items() if r.status == "ok"} == {
        "eager",
        "compile",
        "max-autotune",
        "emmy",
    }
    assert alone.lanes["compile"].status == "none" and alone.ratio("emmy", "compile") == alone.ratio("emmy", "eager")
    assert all(len(r.samples_us) == 3 and r.torch for r in biased.lanes.values() if r.status == "ok")
