"""A pack of a CPU: right answers from what was chosen, nothing from what was not, the same bytes each time, whole or absent."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emmy.cli import main
from emmy.errors import CompileError, PackError, UsageError
from emmy.ir.ops import parse_op
from emmy.ir.target import load_target
from emmy.pack import Offer, Pack
from emmy.pack.archive import MANIFEST
from tests.pack import packs


def test_sizes_with_a_win_are_computed_and_the_others_left_to_the_caller(tmp_path: Path) -> None:
    pack = Pack.open(packs.cpu_pack(tmp_path))
    op, plan = parse_op(packs.OPEN), pack.plan(packs.OPEN)
    assert plan is not None and [plan.serves(m) for m in (0, 1, 2, 8, 9, 24, 25)] == [
        False,
        False,
        True,
        True,
        True,
        True,
        False,
    ]
    for m in (2, 5, 8, 9, 24):
        inputs = op.inputs("integer", m, {"m": m})
        out = np.full((m, 16), np.nan, np.float32)
        plan({**inputs, "C": out}, {"m": m})
        assert np.array_equal(out, op.reference(inputs)["C"])
    for m in (1, 25):
        with pytest.raises(UsageError, match=f"m is {m}"):
            plan([1, 1, 1], [m])
    assert not pack.rebuilt


@pytest.mark.parametrize("name", ["/dev/zero", "pack\0", "\ud800"])
def test_what_can_be_no_file_is_no_pack(name: str) -> None:
    with pytest.raises(PackError, match=r"no regular file|null byte|surrogates"):
        Pack.open(name)


def test_no_plan_comes_of_what_lost_is_absent_or_was_only_predicted(tmp_path: Path) -> None:
    path = packs.cpu_pack(tmp_path)
    pack = Pack.open(path)
    for op, why in (
        (packs.LOST, "no win: 0.9"),
        ("matmul:7x16x32:f32", "the pack has no"),
        (packs.GUESSED, "predicted, never measured"),
    ):
        assert pack.plan(op) is None and why in pack.why_stock(op)
    assert pack.manifest.predicted
    assert Pack.open(path, unmeasured=True).plan(packs.GUESSED) is not None


def test_the_same_offers_in_any_order_give_the_same_bytes(tmp_path: Path) -> None:
    one, two = (tmp_path / f"{i}.emmypack" for i in (1, 2))
    made = Pack.build(packs.cpu_offers(), one, load_target("cpu"), workers=2)
    Pack.build(packs.cpu_offers()[::-1], two, load_target("cpu"), workers=1)
    assert one.read_bytes() == two.read_bytes() and made.digest == Pack.open(one).digest
    assert next(iter(packs.members(one))) == MANIFEST


def test_a_range_whose_schedule_makes_another_source_than_was_timed_is_left_to_stock(tmp_path: Path) -> None:
    offer = packs.cpu_offers()[1]
    stale = packs.won(packs.FIXED, "k0/split(n,core,8)", "cpu", source="0" * 64)
    made = Pack.build([type(offer)(offer.op, "", (stale,))], tmp_path / "p", load_target("cpu"))
    assert "another source now than the one that was timed" in made.unbuilt[0].why and not made.manifest.codes


def test_without_a_compiler_nothing_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMMY_CC", "no-such-compiler")
    with pytest.raises(CompileError, match="no-such-compiler"):
        Pack.build(packs.cpu_offers(), tmp_path / "p", load_target("cpu"))
    assert not list(tmp_path.iterdir())


def _build_for_ever(path: Path) -> None:
    while True:
        Pack.build(packs.cpu_offers(), path, load_target("cpu"))


def test_a_build_that_is_killed_leaves_a_whole_pack_or_none(tmp_path: Path) -> None:
    whole = packs.cpu_pack(tmp_path).read_bytes()
    path, seen = tmp_path / "k.emmypack", set()
    for i in range(8):
        path.unlink(missing_ok=True)
        child = multiprocessing.get_context("fork").Process(target=_build_for_ever, args=(path,))
        child.start()
        while i > 3 and not path.exists():
            time.sleep(0.001)
        time.sleep(0.007 * i)
        os.kill(child.pid or 0, signal.SIGKILL)
        child.join()
        seen.add(path.exists())
        assert not path.exists() or path.read_bytes() == whole
    assert seen == {False, True}


def test_a_pack_that_cannot_be_written_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, why in ((tmp_path, "Is a directory"), (tmp_path / "file" / "x", "File exists")):
        named = path if path == tmp_path else path.parent
        with pytest.raises(PackError, match=f"^{named}: cannot be written: {why}. Free space, or name another file$"):
            Pack.build(packs.cpu_offers(), path, load_target("cpu"))
    assert [p.name for p in tmp_path.iterdir()] == ["file"] and not list(tmp_path.parent.glob(f".{tmp_path.name}*"))


# ---------------------------------------------------------------- the command line
def said(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, list[dict[str, object]], str]:
    code = main([*map(str, argv), "--json"])
    out, err = capsys.readouterr()
    return code, [json.loads(line) for line in out.splitlines()], err


def test_inspect_verify_and_load_say_what_a_pack_holds_and_that_it_is_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = packs.cpu_pack(tmp_path)
    code, (head, *ranges), err = said(capsys, "pack", "inspect", path)
    assert code == 0 and head["predicted"] is True and "PREDICTED, never measured" in err
    assert [r["use"] for r in ranges if r["op"] == packs.OPEN] == ["stock", "emmy", "emmy"]
    assert {(r["use"], r["basis"]) for r in ranges if r["op"] == packs.GUESSED} == {("predicted", "predicted")}
    lacking = "matmul:5x16x33:f32"
    code, (_, *rows), _ = said(capsys, "pack", "inspect", path, "--of", packs.OPEN, packs.GUESSED, lacking)
    cases = {r["op"]: (r["use"], r["why"]) for r in rows if r["record"] == "case"}
    assert code == 0 and cases[packs.OPEN][0] == "emmy" and cases[packs.GUESSED][0] == "predicted"
    assert cases[lacking] == ("stock", f"the pack has no {lacking}")
    (kind,) = (r for r in rows if r["record"] == "served")
    assert (kind["emmy"], kind["predicted"], kind["stock"]) == (1, 1, 1)
    code, (_, *found), err = said(capsys, "pack", "verify", path)
    assert code == 0 and len(found) == 4
    assert all((f["digests"], f["rebuild"], f["answers"]) == ("ok", "ok", "ok") and f["error"] < 1 for f in found)  # type: ignore[operator]
    code, (_, loaded), err = said(capsys, "pack", "load", path)
    assert code == 0 and (loaded["ready"], loaded["stock"], loaded["rebuilt"]) == (2, 2, 0)
    assert (
        "left to stock: 1 op: no win: 0.9 times" in err and "1 op: predicted, never measured: open the pack with" in err
    )


def test_verify_finds_a_changed_member_and_a_kernel_that_computes_something_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = packs.cpu_pack(tmp_path)
    packs.rewritten(path, lambda f: f.update({n: packs.flipped(f, n) for n in f if n.startswith("source")}))
    code, _, err = said(capsys, "pack", "verify", path, "--depth", "digests")
    assert code == 1 and err.count("is not what the manifest says") == 4

    code, _, err = said(capsys, "pack", "verify", lying(path, "gelu_tanh", "silu"))
    assert code == 4 and "want" in err and "1 at fault" in err  # though the other op of this source is right
    code, _, err = said(capsys, "pack", "verify", lying(path, "gelu_tanh", "bias"))
    assert code == 4 and "the kernel is of another op" in err


def lying(path: Path, one: str, other: str) -> Path:
    """A pack of two products followed by something, of which the first has the other's code."""
    ops = sorted(f"matmul:5x16x32:f32:{x}" for x in (one, other))
    made = (Offer(parse_op(op), "", (packs.won(op, "k0/split(n,core,8)", "cpu"),)) for op in ops)
    Pack.build(list(made), path, load_target("cpu"))

    def swap(raw: Any) -> None:
        raw["cases"][0]["ranges"][0]["code"] = raw["cases"][1]["ranges"][0]["code"]

    return packs.with_manifest(path, swap)


def test_verify_finds_launches_that_are_not_those_of_the_schedule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fewer_blocks(raw: Any) -> None:
        code = next(r["code"] for r in raw["cases"][1]["ranges"])
        code["launch"] = [x + " 1 -" if x.startswith("kernel") else x for x in code["launch"]]

    path = packs.with_manifest(packs.gpu_pack(tmp_path), fewer_blocks)
    code, (_, *found), _ = said(capsys, "pack", "verify", path, "--depth", "rebuild")
    assert code == 1 and [f["rebuild"] for f in found] == ["ok", "its launch is not what its schedule gives"]


@pytest.mark.slow
def test_an_h200s_kernels_are_checked_on_the_emulator_where_the_card_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = packs.gpu_pack(tmp_path)
    code, (_, *found), _ = said(capsys, "pack", "verify", path, "--op", "matmul:64*")
    assert code == 0 and [(f["digests"], f["rebuild"], f["answers"]) for f in found] == [("ok", "ok", "ok")]
    assert str(found[0]["ran"]).startswith("on the emulator")
    assert said(capsys, "pack", "load", path)[0] == 3
    with pytest.raises(PackError):
        Pack.open(tmp_path / "none")


def test_ranges_that_the_caller_leaves_to_stock_are_not_loaded(tmp_path: Path) -> None:
    pack = Pack.open(packs.cpu_pack(tmp_path))
    plan = pack.plan(packs.OPEN, leave=lambda r: "not wanted" if r.lo == 2 else "")
    assert plan is not None
    assert [plan.serves(m) for m in (1, 2, 8, 9, 24)] == [False, False, False, True, True]
    assert [r.why for r in plan.case.ranges][:2] == ["no win: 0.9 times", "not wanted"]
    assert pack.plan(packs.OPEN, leave=lambda _: "not wanted") is None
    assert pack.case(packs.OPEN) == pack.case(packs.OPEN) is not None
    plan.close()
    with pytest.raises(UsageError, match="is closed"):
        _ = plan.loaded.handle
