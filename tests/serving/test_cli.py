"""`emmy serve`, `bench serving`, `bench quality` and `deploy local` as a user meets them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from emmy import config
from emmy.cli import main
from emmy.codegen.files import alone_in
from emmy.errors import NoSuchDevice, ServingError, UsageError
from emmy.runtime.cuda_driver import Gpu
from emmy.serving import recipe as recipes
from emmy.serving.fields import read_toml
from emmy.serving.recipe import card_here, find_pack, read_recipe
from tests.pack.packs import gpu_pack
from tests.serving.conftest import Fake

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "gemma-4-12B-it.toml"
Write = Callable[..., Path]
Out = pytest.CaptureFixture[str]


def test_unknown_flags_reach_vllm_word_by_word(vllm: Fake, pack: Path, capsys: Out) -> None:
    flags = ["--max-model-len", "4096", "-tp", "2", "--pac", "x", "--hf-overrides", '{"a b": 1}', "-O3"]
    assert main(["serve", "m", "--pack", str(pack), *flags, "--dry-run"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[4:-2] == ["serve", "m", *flags]
    assert json.loads(words[-1])["emmy"]["pack"] == str(pack)


def test_parts_say_what_alone_may_be_replaced(vllm: Fake, pack: Path, capsys: Out) -> None:
    assert main(["serve", "m", "--pack", str(pack), "--parts", "linear,lm_head", "--dry-run"]) == 0
    assert json.loads(shlex.split(capsys.readouterr().out)[-1])["emmy"]["parts"] == ["linear", "lm_head"]
    assert main(["bench", "quality", "m", "--parts", "linear"]) == 2
    assert "--parts are ways to use a pack" in capsys.readouterr().err


def test_stock_is_vllms_command_alone(vllm: Fake, capsys: Out) -> None:
    assert main(["serve", "m", "--stock", "--port", "1", "--dry-run", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (
        said["command"][1:] == ["-P", "-m", "vllm.entrypoints.cli.main", "serve", "m", "--port", "1"]
        and said["digest"] is None
    )


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (["m"], 2, "no pack is named"),
        (["m", "--pack", "none.emmypack"], 1, "there is no pack none.emmypack"),
        (["m", "--stock", "--deterministic"], 2, "without --pack"),
        (["m", "--stock", "--parts", "linear"], 2, "and --parts"),
        (["--max-model-len"], 2, "required: model"),
        (["m", "--stock", "--bench", "fast"], 2, "no point of work"),
    ],
)
def test_what_cannot_be_served_is_said(vllm: Fake, words: list[str], code: int, why: str, capsys: Out) -> None:
    assert main(["serve", *words]) == code
    assert why in capsys.readouterr().err


def test_a_pack_of_a_card_that_is_not_here_is_refused_before_the_server_starts(
    vllm: Fake, tmp_path: Path, capsys: Out
) -> None:
    pack = gpu_pack(tmp_path)
    assert main(["serve", "m", "--pack", str(pack)]) == 3
    assert "NVIDIA H200" in capsys.readouterr().err and vllm.calls == []
    assert main(["serve", "m", "--pack", str(pack), "--dry-run"]) == 0


@pytest.mark.parametrize("way", [["serving"], ["serving", "--offline"], ["quality"]], ids=" ".join)
def test_two_commands_do_not_write_into_one_folder(
    vllm: Fake, experiment: Write, tmp_path: Path, way: list[str], capsys: Out
) -> None:
    out, what = tmp_path / "out", str(experiment()) if way[0] == "serving" else "m"
    with alone_in(out):
        assert main(["bench", way[0], what, "--out", str(out), *way[1:]]) == 1
    assert "another command writes its results there" in capsys.readouterr().err and vllm.calls == []


def test_the_server_takes_our_place_with_its_signals_and_exit_code(vllm: Fake) -> None:
    vllm.behaves(code=7)
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from emmy.cli import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", program, "serve", "m", "--stock", "--port", "0"]
    served = subprocess.Popen(words, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    for _ in range(1000):
        if vllm.calls:
            break
        time.sleep(0.02)
    served.send_signal(signal.SIGTERM)
    assert served.wait(20) == 7
    assert [c["pid"] for c in vllm.calls] == [served.pid, served.pid]


def test_a_bench_of_a_server_prints_its_point_and_stops_it(vllm: Fake, pack: Path, capsys: Out) -> None:
    assert main(["serve", "m", "--pack", str(pack), "--bench", "32/8@2", "--json", "--dtype", "float32"]) == 0
    said = capsys.readouterr()
    command, point = map(json.loads, said.out.splitlines())
    assert command["record"] == "serve" and "float32" in command["command"]
    assert "    matmul:8x8x8:f32: 2 layers\n      Emmy  1..8 rows\nready after" in said.err
    assert (point["lane"], point["point"], point["ttft_p50_ms"]) == ("emmy", "32/8@2", 80.0)
    assert vllm.order == ["serve emmy", "bench", "stopped"]


def test_a_pack_that_the_environment_switches_off_is_said_not_to_serve(
    vllm: Fake, pack: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["serve", "m", "--pack", str(pack), "--dry-run"]
    assert main(words) == 0 and "EMMY_DISABLE" not in capsys.readouterr().err
    monkeypatch.setenv("EMMY_DISABLE", "1")
    assert main(words) == 0 and "EMMY_DISABLE is set: the plugin does nothing" in capsys.readouterr().err
    assert main(["bench", "quality", "m", "--pack", str(pack)]) == 2
    assert "the lane with a pack would be stock too" in capsys.readouterr().err


def test_a_bench_whose_requests_failed_fails_and_the_logs_it_names_stay(
    vllm: Fake, tmp_path: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["serve", "m", "--stock", "--bench", "32/8@2"]) == 0
    assert not list(tmp_path.glob("emmy-serve-*"))
    vllm.behaves(failed=1)
    assert main(["serve", "m", "--stock", "--bench", "32/8@2"]) == 1
    said = capsys.readouterr().err
    assert "1 of 8 requests failed" in said
    (named,) = re.findall(r"The end of (\S+\.log)", said)
    assert Path(named).is_file() and list(tmp_path.glob("emmy-serve-*/server.log"))


def test_an_experiment_gives_rows_a_table_and_a_report(
    vllm: Fake, experiment: Write, tmp_path: Path, capsys: Out
) -> None:
    words = [
        "bench",
        "serving",
        str(experiment()),
        "--out",
        str(tmp_path / "out"),
        "--waves",
        "1",
        "--most-output",
        "4",
    ]
    assert main([*words, "--json", "--seed-of-vllm", "3"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(r["lane"], r["note"]) for r in rows] == [
        ("stock", "output 4 instead of 8"), ("emmy", "output 4 instead of 8"),
    ]  # fmt: skip
    assert rows[1]["ratios"]["ttft_p50_ms"] == {"median": 1.25, "low": 1.25, "high": 1.25} and rows[0]["ratios"] == {}
    assert "output 4 instead of 8" in (tmp_path / "out" / "report.md").read_text()
    serves = [c["argv"] for c in vllm.calls if c["argv"][0] == "serve"]  # type: ignore[index]
    assert all("--seed-of-vllm" in argv for argv in serves)  # type: ignore[operator]


@pytest.mark.slow
def test_an_experiment_may_keep_its_servers_side_by_side(
    vllm: Fake, experiment: Write, tmp_path: Path, capsys: Out
) -> None:
    words = ["bench", "serving", str(experiment()), "--out", str(tmp_path / "out"), "--waves", "1", "--together"]
    assert main([*words, "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert vllm.order[2:] == ["bench", "bench", "stopped", "stopped"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_experiment_leaves_nothing_running(
    vllm: Fake, experiment: Write, tmp_path: Path, number: signal.Signals
) -> None:
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from emmy.cli import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", program, "bench", "serving", str(experiment()), "--out", str(tmp_path / "out")]
    running = subprocess.Popen(
        words,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # what runs in the background ignores it
    )
    while "bench" not in vllm.order:
        assert running.poll() is None
        time.sleep(0.01)
    running.send_signal(number)
    assert running.wait(60) == 130
    for call in vllm.calls:
        with pytest.raises(ProcessLookupError):
            os.kill(int(str(call["pid"])), 0)


@pytest.mark.slow
def test_quality_without_a_pack_compares_stock_with_itself(vllm: Fake, tmp_path: Path, capsys: Out) -> None:
    words = [
        "bench",
        "quality",
        "m",
        "--load-format",
        "emmy_random",
        "--lengths",
        "4",
        "--batches",
        "2",
        "--gsm8k",
        "5",
    ]
    assert main([*words, "--json"]) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(s["case"], s["kl_max"], s["top1"]) for s in said[:-1]] == [("prefill 4", 0.0, 1.0), ("decode 2", 0.0, 1.0)]
    assert "random" in said[-1]["why"]


@pytest.mark.slow
def test_quality_that_is_lost_is_a_wrong_answer(vllm: Fake, pack: Path, capsys: Out) -> None:
    vllm.behaves(noise=3)
    assert main(["bench", "quality", "m", "--pack", str(pack), "--lengths", "4", "--batches", "2"]) == 4
    assert "the lanes do not say the same" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------- recipes
def gpu(product: str, gib: float) -> tuple[Gpu, ...]:
    return (Gpu(0, product, "GPU-0", (9, 0), int(gib * 2**30), 0, 132, "13.0"),)


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda p: p.stem)
def test_every_recipe_that_ships_is_valid(path: Path) -> None:
    found = read_recipe(path)
    assert found.name == path.stem
    assert all(card.memory_gib > found.weights_gib for card in found.cards)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("schema = 1", "schema = 2", "this Emmy reads 1"),
        ('model = "google/gemma-4-12B-it"', "", "'model' is missing"),
        ('target = "h100"', 'target = "h900"', "h900"),
        ('target = "h100"', 'target = "h200"', "there twice"),
        ('pack = "gemma-4-12B-h100.emmypack"', 'pack = "/x/y.emmypack"', "without a folder"),
        ("[[card]]", "[[cards]]", "unknown key 'cards'"),
    ],
)
def test_what_a_recipe_may_not_say(tmp_path: Path, old: str, new: str, why: str) -> None:
    path = tmp_path / "r.toml"
    path.write_text(RECIPE.read_text().replace(old, new))
    with pytest.raises(UsageError, match=why):
        read_recipe(path)


def test_the_card_that_is_here_is_chosen_and_a_slice_of_it_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = read_recipe(RECIPE)
    monkeypatch.setattr(recipes, "gpus", lambda: gpu("NVIDIA H200", 139))
    assert card_here(found).target == "h200"
    monkeypatch.setattr(recipes, "gpus", lambda: gpu("NVIDIA H200", 17))
    with pytest.raises(ServingError, match=r"17\.0 GiB here"):
        card_here(found)
    for here in (gpu("Tesla T4", 15), ()):
        monkeypatch.setattr(recipes, "gpus", lambda here=here: here)
        with pytest.raises(NoSuchDevice, match="NVIDIA H200"):
            card_here(found)


def test_a_recipe_is_carried_out_with_the_pack_that_was_built(
    vllm: Fake, pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    monkeypatch.setattr(recipes, "gpus", lambda: gpu("NVIDIA H200", 139))
    monkeypatch.setenv("EMMY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache" / "packs").mkdir(parents=True)
    there = Path(shutil.copy(pack, tmp_path / "cache" / "packs" / "gemma-4-12B-h200.emmypack"))
    assert find_pack(read_recipe(RECIPE).card("h200"), RECIPE, config.cache_dir()) == there
    assert main(["deploy", "local", "--recipe", str(RECIPE), "--dry-run", "--port", "8001"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[4:6] == ["serve", "google/gemma-4-12B-it"] and words[-4:-2] == ["--port", "8001"]
    assert "--max-num-seqs" in words and json.loads(words[-1])["emmy"]["pack"] == str(there)


@pytest.mark.slow
def test_a_recipe_without_rows_does_not_serve_a_pack_of_nothing(
    vllm: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    monkeypatch.setattr(recipes, "gpus", lambda: gpu("NVIDIA H200", 139))
    monkeypatch.setenv("EMMY_CACHE", str(tmp_path / "cache"))
    words = ["deploy", "local", "--recipe", str(RECIPE), "--dry-run", "--home", str(tmp_path)]
    assert main(words) == 2
    assert "Tune first" in capsys.readouterr().err
    assert main([*words, "--stock"]) == 0
    assert read_toml(RECIPE).text("name") == "gemma-4-12B-it"
