"""What this machine offers Emmy and what it lacks, each with the next step. Looks; changes nothing, imports nothing heavy."""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from emmy import __version__, config
from emmy.errors import CompileError, DataBusy, DataError, DeviceBusy, EmmyError, StaleModel
from emmy.ir.target import Target, load_target

if TYPE_CHECKING:
    from emmy.runtime.cuda_driver import Gpu

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
    for look in (_python, _compilers, _processor, _packages, _lock, _gpus):
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
    yield _lock_of("cpu", "device lock", "nobody measures on this processor")


def _lock_of(device: str, name: str, free: str) -> Check:
    from emmy.measure.lock import DeviceLock, LockUnavailable

    try:
        with DeviceLock(config.cache_dir() / "locks", device):
            return Check(name, "ok", free)
    except DeviceBusy as e:
        return Check(name, "note", str(e))
    except LockUnavailable as e:
        return Check(name, "missing", str(e), "nothing can be measured until the locks can be written")


def _gpus() -> Iterator[Check]:
    """What measuring on GPUs needs. Without a GPU nothing of it is missing: everything else works."""
    from emmy.measure import nvml
    from emmy.measure.cuda import gpu_lock_name
    from emmy.runtime.cuda_driver import gpus, why_no_gpu

    found = gpus()
    if found:
        version = f"{nvml.driver_version() or 'version unknown'}, runs CUDA up to {found[0].cuda}"
        yield Check("NVIDIA driver", "ok", version)
    else:
        step = (
            "kernels for GPUs can be shown, compiled, emulated and predicted here (`emmy tune --gpu rtx4090`), and rows "
            "of other machines be used; `emmy tune --gpu cpu` measures on this processor"
        )
        yield Check("GPU", "note", f"none to measure on: {why_no_gpu()}", step)
    yield _nvrtc(found)
    for gpu in found:
        yield _gpu(gpu)
        yield _lock_of(gpu_lock_name(gpu), f"GPU {gpu.index} lock", "nobody measures on it")
    if found and (cuda := _torch_cuda()):
        yield Check("torch on the GPU", "ok", f"built for CUDA {cuda}: the stock kernel to race against")
    elif found:
        step = "pip install a torch that is built for CUDA; without it there is no stock kernel to race against"
        yield Check("torch on the GPU", "note", "no: torch is missing, or built without CUDA", step)


def _nvrtc(found: tuple[Gpu, ...]) -> Check:
    """The compiler; it must be there where a GPU is, and no newer than its driver by a major version."""
    from emmy.codegen.nvrtc import compiled_archs, nvrtc_version

    try:
        version = nvrtc_version()
        shown = f"{version}, compiles for {', '.join(compiled_archs())}"
    except CompileError as e:
        return Check("NVRTC", "missing" if found else "note", str(e))
    if found and int(version.split(".")[0]) > int(found[0].cuda.split(".")[0]):
        step = f"update the driver to one of CUDA {version}, or install an older cuda-python and nvidia-cuda-nvrtc"
        return Check("NVRTC", "missing", f"{shown}; the driver runs CUDA up to {found[0].cuda} only", step)
    return Check("NVRTC", "ok", shown)


def _gpu(gpu: Gpu) -> Check:
    """One GPU: which target it is, how it is set, and who else is there."""
    from emmy.measure.cuda import target_of
    from emmy.measure.nvml import Meter

    target, settings = target_of(gpu), Meter(gpu.uuid).settings()
    facts = [
        f"{gpu.product}: target {target or '-'}, sm_{gpu.capability[0]}{gpu.capability[1]}, {gpu.n_sms} multiprocessors, "
        f"{gpu.memory_bytes / 2**30:.1f} GiB"
    ]
    steps = []
    if target is None:
        steps.append(
            "no target describes it: add emmy/ir/targets/NAME.toml with this product, like the files beside it"
        )
    if settings.compute_mode is not None:
        facts.append(f"compute mode {settings.compute_mode}")
        if settings.compute_mode == "prohibited":
            steps.append(f"nothing may run on it: nvidia-smi -i {gpu.index} -c DEFAULT")
    if settings.persistence is not None:
        facts.append(f"persistence {'on' if settings.persistence else 'off'}")
    if settings.others is not None:
        facts.append(f"{settings.others or 'no'} other processes at work")
        if settings.others:
            steps.append("other processes compute on it: times taken meanwhile are marked as contended")
    return Check(f"GPU {gpu.index}", "note" if steps else "ok", ", ".join(facts), "; ".join(steps))


def _torch_cuda() -> str:
    """The CUDA that the installed torch is built for, without importing it; "" for none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    version = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    found = re.search(r"^cuda\b.*= '([\d.]+)'", version, re.MULTILINE)
    return found[1] if found else ""


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
    from emmy.measure.cuda import target_of
    from emmy.runtime.cuda_driver import gpus

    for name in dict.fromkeys(("cpu", *filter(None, map(target_of, gpus())))):
        yield _guarded(f"model for {name}", partial(_model, load_target(name), home))


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
            f"emmy train-costmodel{'' if target.is_cpu else f' --gpu {target.name}'}: of 50 different schedules or more; "
            "it leads once it ranks problems held out better than chance",
        )
    return Check(name, "ok", f"{model.digest}, trained on {model.card.rows} rows at {model.card.time_utc}")


def _guarded(name: str, look: Callable[[], Check]) -> Check:
    try:
        return look()
    except (EmmyError, ModuleNotFoundError) as e:
        return Check(name, "note", str(e))
