"""What a device can do and hold, as data. Knows no programs, no drivers and whether no device is present.

A GPU is one TOML of product figures under `targets/`, on top of one TOML per compute capability under `targets/arch/`.
`cpu` is detected on this machine; `cpu-avx2` and `cpu-portable` are that machine kept to fewer instructions.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import resources
from typing import Any

from emmy.errors import NoSuchDevice, PlanError, meant
from emmy.ir.cpu_detect import Isa, detect

CPU_ISAS: dict[str, Isa | None] = {"cpu": None, "cpu-avx2": "avx2", "cpu-portable": "portable"}


@dataclass(frozen=True, slots=True)
class Level:
    """A kind of loop a nest can be bound to. Its iterations run on agents that share `memory` and meet by `sync`.

    `width` is the most iterations that can run side by side; 0 means that the launch or the schedule decides.
    """

    name: str
    width: int
    scope: str  # who the agents are: blocks, warps, lanes, cores; "thread" for loops one agent runs by itself
    memory: str  # the nearest memory all of them see
    sync: str  # how they wait for one another; "order" for loops one agent runs by itself


@dataclass(frozen=True, slots=True)
class Target:
    """A device by its figures. Counts are per device unless named otherwise; 0 means it does not apply or is not known.

    Peaks are dense rates at the rated boost clock. A card may run above that clock (GeForce cards do), so judge a
    measured rate against `peak_tflops` scaled by the clock it was measured at. `sources`: figure -> document.
    """

    name: str
    product: str
    vendor: str
    arch: str  # what the compiler is told: sm_89, sm_90a, x86-64
    levels: tuple[Level, ...]  # outermost first
    capabilities: frozenset[str]
    boost_mhz: float
    dram_gbs: float  # GB/s, 1e9
    dram_bytes: int
    l2_bytes: int  # the whole device's on a GPU, one core's on a CPU
    peak_tflops: Mapping[str, float] = field(hash=False)  # "f16->f32": inputs -> accumulator; "f32": the FMA units
    tdp_w: float = 0.0
    n_sms: int = 0
    smem_block_bytes: int = 0  # the opt-in maximum
    smem_sm_bytes: int = 0
    regs_sm: int = 0  # 32-bit registers
    max_regs_thread: int = 0
    max_threads_block: int = 0
    max_threads_sm: int = 0
    max_blocks_sm: int = 0
    max_cluster: int = 0  # blocks; the portable maximum
    cores: int = 0  # that this process may use
    l1d_bytes: int = 0  # of one core
    l3_bytes: int = 0
    vector_bits: int = 0
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __hash__(self) -> int:  # of a name: whatever is remembered of a plan is looked up by plan and target
        return hash(self.name)

    @property
    def is_cpu(self) -> bool:
        return self.vendor != "NVIDIA"

    @property
    def isa(self) -> Isa | None:
        """The vector instruction set of a CPU; None for a GPU. Off x86 it is "portable", whatever the vector width."""
        if not self.is_cpu:
            return None
        if "avx512" in self.capabilities:
            return "avx512"
        return "avx2" if "avx2" in self.capabilities else "portable"

    def can(self, *needed: str) -> bool:
        """Whether the device has every one of the named capabilities."""
        return self.capabilities.issuperset(needed)

    @property
    def block_level(self) -> str:
        """The level whose iterations are the blocks of a launch."""
        return "core" if self.is_cpu else "grid"

    @property
    def loop_levels(self) -> tuple[str, ...]:
        """Levels a nest's loops may be bound to."""
        return tuple(level.name for level in self.levels if level.name not in ("atom", "vector"))

    @property
    def tile_bytes(self) -> int:
        """Bytes one block may hold in staged slots: shared memory, or on a CPU half of the cache all cores share."""
        return max(self.l3_bytes // 2, 8 << 20) if self.is_cpu else self.smem_block_bytes

    @property
    def vector_registers(self) -> int:
        """Architectural vector registers of a CPU; 0 on a GPU."""
        if not self.is_cpu:
            return 0
        return 32 if self.isa == "avx512" or "neon" in self.capabilities else 16


@cache
def load_target(name: str) -> Target:
    """The target of that name. Raises NoSuchDevice, with the names there are, for any other."""
    if name in CPU_ISAS:
        return _cpu(name, CPU_ISAS[name])
    if name not in target_names():
        hint = meant(name, target_names(), cutoff=0.5)
        raise NoSuchDevice(f"no target is named {name!r}.{hint} Targets: {', '.join(target_names())}")
    return _gpu(name)


@cache
def target_names() -> tuple[str, ...]:
    """Every name `load_target` knows: the CPU and its narrower variants, then the GPUs in alphabetical order."""
    files = (resources.files("emmy.ir") / "targets").iterdir()
    gpus = {f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml")} - {"cpu"}
    return (*CPU_ISAS, *sorted(gpus))


def _gpu(name: str) -> Target:
    product = _read(f"{name}.toml")
    arch = _read(f"arch/{product['arch']}.toml")
    figures = {**arch, **product, "name": name}
    figures["levels"] = _levels(arch["levels"])
    figures["capabilities"] = frozenset((*arch["capabilities"], *product.get("capabilities", ())))
    figures["sources"] = _sources(arch) | _sources(product)
    known = {f.name for f in fields(Target)}
    if unknown := figures.keys() - known:
        raise PlanError(f"targets/{name}.toml has unknown keys {sorted(unknown)}. Allowed are {sorted(known)}.")
    return Target(**figures)


def _cpu(name: str, isa: Isa | None) -> Target:
    """This machine's CPU, kept to `isa` when one is given. Peak and bandwidth are estimates from above, to rank by."""
    cpu = detect()
    if isa is not None:
        if isa == "avx2" and "avx2" not in cpu.features:
            raise NoSuchDevice(f"{name}: {cpu.product} has no AVX2 with FMA. Use cpu or cpu-portable on this machine.")
        cpu = cpu.narrowed(isa)
    static = _read("cpu.toml")
    f32 = cpu.cores * cpu.max_mhz * cpu.flops_per_cycle / 1e6
    return Target(
        name=name,
        product=cpu.product,
        vendor=cpu.vendor,
        arch=cpu.machine,
        levels=_levels(static["levels"], core=cpu.cores, vector=cpu.vector_bits // 32),
        capabilities=cpu.features.union(static["capabilities"]),
        boost_mhz=cpu.max_mhz,
        dram_gbs=min(cpu.cores * static["dram_gbs_core"], static["dram_gbs_most"]),
        dram_bytes=cpu.dram_bytes,
        l2_bytes=cpu.l2_bytes,
        # 16-bit inputs are widened to f32 first, except that AVX512_BF16 multiplies and adds them in pairs.
        peak_tflops={"f32": f32, "f16->f32": f32, "bf16->f32": f32 * (2 if "bf16" in cpu.features else 1)},
        cores=cpu.cores,
        l1d_bytes=cpu.l1d_bytes,
        l3_bytes=cpu.l3_bytes,
        vector_bits=cpu.vector_bits,
        sources={**_sources(static), **cpu.sources},
    )


def _levels(rows: list[tuple[str, int, str, str, str]], **widths: int) -> tuple[Level, ...]:
    return tuple(Level(name, widths.get(name, width), *rest) for name, width, *rest in rows)


def _sources(table: dict[str, Any]) -> dict[str, str]:
    """figure -> document; a file lists document -> figures."""
    return {figure: document for document, figures in table["sources"].items() for figure in figures}


def _read(path: str) -> dict[str, Any]:
    return tomllib.loads((resources.files("emmy.ir") / "targets" / path).read_text(encoding="utf-8"))
