"""A machine with an RTX 4090, from the command line: found, locked, measured on, rows stored under its name. The driver is a stand-in.

What is real: detection, the lock, NVRTC, the worker, plans loaded and launched, checks of the answers, journals and dataset.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from emmy.ir.ops import parse_op
from emmy.ir.target import load_target
from emmy.runtime import launcher
from emmy.search.schedule_space import ScheduleSpace
from tests.measure_gpu import fake

OP = "matmul:32x16x16:f16"
# Holds the card as any measuring command does, until its input ends.
HOLD = """
import sys
from emmy.ir.target import load_target
from emmy.measure.factory import measurer_for
with measurer_for(load_target("rtx4090")):
    print("held", flush=True)
    sys.stdin.read()
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """Processes started here see the card, and keep what they have in `folder`."""

    folder: Path

    def environment(self, **more: str) -> dict[str, str]:
        own = {"EMMY_HOME": str(self.folder / "home"), "EMMY_CACHE": str(self.folder / "cache"), "EMMY_SHIPPED": "0"}
        return fake.environment(self.folder, **{**own, "FAKE_CUDA_MATMUL": "32 16 16", **more})

    def emmy(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "emmy", *words, "--json"]
        return subprocess.run(command, capture_output=True, text=True, env=self.environment(**more), check=False)

    def query(self, sql: str) -> list[dict[str, object]]:
        done = self.emmy("data", "query", sql)
        assert done.returncode == 0, done.stderr
        return [json.loads(line)["cells"] for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """Its cache holds the launcher alone, which takes a compiler seconds."""
    folder = tmp_path_factory.mktemp("card")
    launcher.build()
    made = Path(launcher.library()._name)
    kept = folder / "cache" / "lib" / made.parent.name
    kept.mkdir(parents=True)
    for file in made.parent.glob(f"{made.stem}.*"):
        shutil.copy2(file, kept)
    return Machine(folder)


def error(done: subprocess.CompletedProcess[str]) -> str:
    return str(json.loads(done.stdout.splitlines()[-1])["message"])


@pytest.mark.slow
def test_tune_measures_on_the_card_and_stores_rows_under_its_name(machine: Machine) -> None:
    done = machine.emmy("tune", OP, "--gpu", "rtx4090", "--budget", "4", "--strategy", "random")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = machine.query("SELECT * FROM measurement")
    assert len({r["schedule"] for r in rows}) == 4
    assert {(r["target"], r["product"], r["driver"], r["op"]) for r in rows} == {
        ("rtx4090", "NVIDIA GeForce RTX 4090", "580.159.04, CUDA 13.0", OP)
    }
    assert {r["status"] for r in rows} <= {
        "ok",
        "timeout",
    }  # the stand-in computes on this processor, which may be busy
    right = [r for r in rows if r["status"] == "ok"]
    assert {(r["clock_mhz"], r["contended"]) for r in right} == {(2520.0, False)}
    assert {(r["clock"], r["cache"], json.loads(str(r["static"]))["registers"] > 0) for r in right} == {
        ("event", "cold", True)
    }
    (best,) = machine.query("SELECT schedule FROM best WHERE target = 'rtx4090'")
    done = machine.emmy("show", OP, "--gpu", "rtx4090", "--ir", "op")
    assert json.loads(done.stdout)["schedule"] == best["schedule"]
    default = ScheduleSpace(parse_op(OP), load_target("rtx4090")).default().key
    assert best["schedule"] != default and default in {r["schedule"] for r in rows}


@pytest.mark.slow
def test_a_second_process_is_told_who_holds_the_card(machine: Machine) -> None:
    command = [sys.executable, "-c", HOLD]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=machine.environment()
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        done, looked = machine.emmy("tune", OP, "--gpu", "rtx4090", "--budget", "5"), doctor(machine)
    said = f"is being measured by process {holder.pid}"
    assert (done.returncode, said in error(done)) == (3, True)
    assert (looked["GPU 0 lock"][0], said in looked["GPU 0 lock"][1]) == ("note", True)
    assert doctor(machine)["GPU 0 lock"] == ("ok", "nobody measures on it")


@pytest.mark.slow
def test_measuring_on_another_card_is_refused_with_what_is_here(machine: Machine) -> None:
    done = machine.emmy("bench", OP, "--gpu", "rtx5090")
    assert done.returncode == 3
    assert "rtx5090 (NVIDIA GeForce RTX 5090) is not here" in error(done)
    assert "this machine has NVIDIA GeForce RTX 4090 (rtx4090)" in error(done)


@pytest.mark.slow
def test_a_card_that_no_target_describes_is_named(machine: Machine) -> None:
    done = machine.emmy("bench", OP, "--gpu", "rtx4090", FAKE_CUDA_NAME="NVIDIA GeForce RTX 4080")
    assert done.returncode == 3
    assert "this machine has NVIDIA GeForce RTX 4080 (no target describes it)" in error(done)


@pytest.mark.slow
def test_doctor_says_how_the_card_is_set_and_who_else_is_there(machine: Machine) -> None:
    checks = doctor(machine)
    assert checks["NVIDIA driver"] == ("ok", "580.159.04, runs CUDA up to 13.0")
    assert checks["GPU 0"][0] == "ok"
    for fact in (
        "target rtx4090",
        "sm_89",
        "128 multiprocessors",
        "24.0 GiB",
        "compute mode default",
        "persistence on",
    ):
        assert fact in checks["GPU 0"][1]
    assert checks["GPU 0 lock"] == ("ok", "nobody measures on it")
    assert "sm_89" in checks["NVRTC"][1] and "model for rtx4090" in checks and "torch on the GPU" in checks
    busy = doctor(machine, FAKE_NVML_OTHER="1", FAKE_NVML_MODE="2", FAKE_CUDA_NAME="NVIDIA GeForce RTX 4080")["GPU 0"]
    assert busy[0] == "note"
    for piece in ("target -", "no target describes it", "prohibited", "-c DEFAULT", "1 other processes", "contended"):
        assert piece in " ".join(busy)


@pytest.mark.slow
def test_doctor_finds_a_driver_too_old_for_the_compiler_and_hidden_cards(machine: Machine) -> None:
    state, found, step = doctor(machine, FAKE_CUDA_VERSION="12040")["NVRTC"]
    assert (state, "runs CUDA up to 12.4 only" in found, "update the driver" in step) == ("missing", True, True)
    assert "CUDA_VISIBLE_DEVICES" in doctor(machine, FAKE_CUDA_COUNT="0")["GPU"][1]


@pytest.mark.slow
def test_doctor_names_a_lock_folder_that_cannot_be_written(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "locks").write_text("")
    for name in ("device lock", "GPU 0 lock"):
        state, found, *_ = doctor(machine, EMMY_CACHE=str(tmp_path))[name]
        assert (state, f"{tmp_path}/locks: the lock" in found) == ("missing", True)


def doctor(machine: Machine, **more: str) -> dict[str, tuple[str, ...]]:
    """What each check found: state, words, and the next step where there is one."""
    lines = [json.loads(line) for line in machine.emmy("doctor", **more).stdout.splitlines()]
    return {c["name"]: tuple(filter(None, (c["state"], c["found"], c["next_step"]))) for c in lines}
