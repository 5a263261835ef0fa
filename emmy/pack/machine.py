"""The device that is here, and whether a pack's binaries run on it as they are. Compiles and loads nothing."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from emmy.codegen.nvrtc import nvrtc_version
from emmy.codegen.ptx import ARCHS
from emmy.errors import CompileError, NoSuchDevice, WrongCard
from emmy.ir.target import CPU_ISAS, Target, load_target
from emmy.pack.schema import Card, Manifest
from emmy.runtime.cuda_driver import gpus, why_no_gpu

_WIDTH = {"portable": 0, "avx2": 1, "avx512": 2}  # a CPU with one of them has those before it


@dataclass(frozen=True, slots=True)
class Machine:
    """`arch`: sm_90 of a GPU, without the a that code for exactly this one has. `cuda`: the newest that the driver runs."""

    product: str
    arch: str
    isa: str = ""
    cuda: str = ""


def machine_for(card: Card) -> Machine:
    """What is here of the kind the card is. Raises NoSuchDevice, saying why there is none."""
    if card.is_cpu:
        cpu = load_target("cpu")
        return Machine(cpu.product, cpu.arch, cpu.isa or "portable")
    found = gpus()
    if not found:
        raise NoSuchDevice(f"the pack is for {card.product}, and there is no GPU here: {why_no_gpu()}")
    gpu = found[0]
    return Machine(gpu.product, f"sm_{gpu.capability[0]}{gpu.capability[1]}", "", gpu.cuda)


def refuse_card(manifest: Manifest, here: Machine) -> None:
    """Raises WrongCard unless this is the very product: on another, nothing says that the kernels win."""
    if manifest.card.product != here.product:
        raise WrongCard(
            f"the pack is for {manifest.card.product} ({manifest.card.arch}), this is {here.product} ({here.arch}). Build one for it "
            "(`emmy pack build --gpu NAME`), or open this one with unmeasured=True: kernels that cannot be loaded are compiled, "
            "and none was measured here"
        )


def why_rebuild(manifest: Manifest, here: Machine) -> str:
    """Why binaries must be compiled anew here, "" when they run as they are.

    A driver runs binaries of toolkits of its own major version, and of older ones (CUDA Compatibility, minor version compatibility).
    """
    card = manifest.card
    if card.arch.rstrip("a") != here.arch:
        return f"binaries are of {card.arch}, this is {here.arch}"
    if card.is_cpu:
        needed, has = _WIDTH[card.isa], _WIDTH.get(here.isa, 0)
        return f"binaries need {card.isa}, this CPU has {here.isa}" if needed > has else ""
    toolkit = manifest.toolkit.rpartition(" ")[2]
    if _major(toolkit) > _major(here.cuda):
        return f"binaries are of CUDA {toolkit}, this driver runs up to {here.cuda}"
    return ""


def _major(version: str) -> int:
    major = version.partition(".")[0]
    return int(major) if major.isdecimal() else sys.maxsize  # unknown: as if it were too new


def refuse_compiler(here: Machine) -> None:
    """Raises CompileError when what is compiled here would not run here: without NVRTC, or with one newer than the driver."""
    toolkit = nvrtc_version()
    if _major(toolkit) > _major(here.cuda):
        raise CompileError(
            f"the NVRTC installed is of CUDA {toolkit}, this driver runs up to {here.cuda}: update the driver, or install "
            f"nvidia-cuda-nvrtc of CUDA {_major(here.cuda)}"
        )


def arch_here(here: Machine) -> str:
    """The architecture to compile for. Raises WrongCard for one that Emmy generates no code for."""
    found = next((a for a in ARCHS if a.rstrip("a") == here.arch), None)
    if found is None:
        raise WrongCard(f"{here.product} is of {here.arch}; Emmy compiles for {', '.join(ARCHS)}")
    return found


def cpu_target(card: Card, here: Machine) -> Target:
    """The target that a CPU's sources are compiled for: with the instructions that both the pack's CPU and this one have."""
    narrower = _WIDTH[card.isa] < _WIDTH.get(here.isa, 0)
    return load_target(next(n for n, isa in CPU_ISAS.items() if isa == card.isa) if narrower else "cpu")
