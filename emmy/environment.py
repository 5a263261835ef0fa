"""What this machine offers Emmy and what it lacks, each with the next step. Looks; changes nothing, imports no package."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from emmy import __version__, config
from emmy.errors import DataBusy, DataError, DeviceBusy, EmmyError, StaleModel
from emmy.ir.target import Target, load_target

State = Literal["ok", "note", "missing"]

# package -> (extra that brings it, what it is for)
PACKAGES: dict[str, tuple[str, str]] = {
    "numpy": ("", "arrays, references"),
    "platformdirs": ("", "where data and caches live"),
    "duckdb": ("tune", "the dataset"),
    "lightgbm": ("tune", "the cost model"),
    "scikit-learn": ("tune", "training the cost model"),
    "optuna": ("tune", "choosing numbers"),
    "rich": ("tune", "progress bars"),
    "torch": ("torch", "the stock kernel to race against; numpy stands in"),
}
LOW_DISK_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at. "note": Emmy works, but somebody should know; "missing": something does not work without."""

    name: str
    state: State
    found: str
    next_step: str = ""


def examine(home: Path) -> tuple[Check, ...]:
    """Every check, what is most needed first."""
    checks: list[Check] = []
    for look in (_python, _compilers, _processor, _packages, _lock):
        checks += look()
    return (*checks, *_folder("home", home), *_folder("cache", config.cache_dir()), *_data(home), *_models(home))


def _python() -> Iterator[Check]:
    where = config.checkout() or Path(__file__).parent
    yield Check("emmy", "ok", f"{__version__} in {where}")
    yield Check(
        "python", "ok", f"{platform.python_version()} at {sys.executable}, {platform.system()} {platform.machine()}"
    )


def _compilers() -> Iterator[Check]:
    for name, command, variable in (
        ("C compiler", config.c_compiler(), "EMMY_CC"),
        ("C++ compiler", config.cxx_compiler(), "EMMY_CXX"),
    ):
        try:
            done = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=20, check=True)
            yield Check(name, "ok", done.stdout.splitlines()[0])
        except (OSError, subprocess.SubprocessError, IndexError) as e:
            step = f"install it (apt-get install gcc g++), or name another in {variable}"
            yield Check(name, "missing", f"{command} does not run: {e}", step)


def _processor() -> Iterator[Check]:
    t = load_target("cpu")
    caches = ", ".join(f"{n} {b >> 10} KiB" for n, b in (("L1d", t.l1d_bytes), ("L2", t.l2_bytes), ("L3", t.l3_bytes)))
    yield Check("processor", "ok", f"{t.product}: {t.isa}, {t.cores} cores, {caches}, {t.boost_mhz:.0f} MHz at most")
    yield Check(
        "its roofline", "ok", f"{t.peak_tflops['f32']:.2f} TFLOP/s f32, {t.dram_gbs:.0f} GB/s; upper bounds, to rank by"
    )
    assumed = sorted(figure for figure, source in t.sources.items() if "assum" in source)
    if assumed:
        yield Check("assumed", "note", f"{', '.join(assumed)}: this system does not tell them")


def _packages() -> Iterator[Check]:
    for package, (extra, use) in PACKAGES.items():
        try:
            yield Check(package, "ok", metadata.version(package))
        except metadata.PackageNotFoundError:
            yield Check(
                package,
                "note",
                f"not installed: {use}",
                f"pip install 'emmy[{extra}]'" if extra else f"pip install {package}",
            )


def _lock() -> Iterator[Check]:
    from emmy.measure.lock import DeviceLock

    try:
        with DeviceLock(config.cache_dir() / "locks", "cpu"):
            yield Check("device lock", "ok", "nobody measures on this processor")
    except DeviceBusy as e:
        yield Check("device lock", "note", str(e))


def _folder(name: str, folder: Path) -> Iterator[Check]:
    there = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(there).free
    state: State = "note" if free < LOW_DISK_BYTES else "ok"
    yield Check(
        name, state, f"{folder}{'' if folder.exists() else ' (not made yet)'}, {free / 2**30:.1f} GiB free on its disk"
    )


def _data(home: Path) -> Iterator[Check]:
    from emmy.measure.journal import closed_journals, is_live, open_journals

    running = open_journals(home)
    if running:
        live = sum(is_live(p) for p in running)
        step = (
            ""
            if live == len(running)
            else "the same `emmy tune` resumes them; `emmy data ingest --dead` takes their rows in"
        )
        yield Check("runs", "note", f"{live} at work, {len(running) - live} interrupted", step)
    try:
        from emmy.costmodel.dataset import Dataset

        with Dataset.of(home).snapshot() as snapshot:
            counts = snapshot.query(
                "SELECT target, count(*), count(DISTINCT op) FROM measurement GROUP BY target ORDER BY target"
            )
    except ModuleNotFoundError:
        return  # the package's own check has said it
    except (DataBusy, DataError) as e:
        yield Check("dataset", "note", str(e))
        return
    waiting = len(closed_journals(home))
    found = "; ".join(f"{target}: {n} rows of {ops} ops" for target, n, ops in counts.rows) or "no rows yet"
    yield Check("dataset", "ok", found + (f"; {waiting} journals wait to be taken in" if waiting else ""))


def _models(home: Path) -> Iterator[Check]:
    yield _guarded("model for cpu", lambda: _model(load_target("cpu"), home))


def _model(target: Target, home: Path) -> Check:
    from emmy.costmodel.registry import find, model_roots

    name = f"model for {target.name}"
    try:
        model = find(target.name, model_roots(home))
    except StaleModel as e:
        return Check(name, "note", str(e))
    if model is None:
        return Check(
            name,
            "note",
            "none: the search is led by its own trials",
            "emmy train-costmodel, once 50 different schedules are measured",
        )
    return Check(name, "ok", f"{model.digest}, trained on {model.card.rows} rows at {model.card.time_utc}")


def _guarded(name: str, look: Callable[[], Check]) -> Check:
    try:
        return look()
    except (EmmyError, ModuleNotFoundError) as e:
        return Check(name, "note", str(e))
