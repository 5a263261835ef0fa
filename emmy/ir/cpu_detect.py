"""What CPU this process runs on: instruction set, cores, caches, clock, memory. Reads /proc and /sys, runs nothing.

Where a figure cannot be read (macOS, a container without /sys) a stated assumption stands in, and `sources` says so.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

Isa = Literal["avx512", "avx2", "portable"]

KIB = 1024
ASSUMED_MHZ = 3000.0
# A virtual machine shows the nominal clock and hides the boost clock; server parts boost to 1.5 x nominal at most.
BOOST_HEADROOM = 1.5
ASSUMED_CACHES = {"l1d_bytes": 32 * KIB, "l2_bytes": 512 * KIB, "l3_bytes": 8 * KIB * KIB}
ASSUMED_DRAM_BYTES = 8 * KIB**3


@dataclass(frozen=True, slots=True)
class Cpu:
    """The CPU as far as code generation and a roofline need it. Cache sizes are of one core, except the shared L3."""

    product: str
    vendor: str
    machine: str  # x86-64, aarch64
    features: frozenset[str]  # of: fma avx2 avx512 bf16 neon
    vector_bits: int
    cores: int  # that this process may use
    max_mhz: float
    l1d_bytes: int
    l2_bytes: int
    l3_bytes: int
    dram_bytes: int
    full_rate_512: bool = True  # 512-bit FMA units are two, as 256-bit ones; AMD's Zen 4 has half
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def flops_per_cycle(self) -> int:
        """f32 operations a core can start a cycle: lanes x two pipes, x two when an instruction multiplies and adds."""
        pipes = 1 if self.vector_bits == 512 and not self.full_rate_512 else 2
        return self.vector_bits // 32 * pipes * (2 if "fma" in self.features else 1)

    def narrowed(self, isa: Isa) -> Cpu:
        """The same CPU told to use no more than `isa`: AVX2 with FMA, or what every CPU of this machine type has."""
        match isa:
            case "avx512":
                return self
            case "avx2":
                return replace(self, features=self.features - {"avx512", "bf16"}, vector_bits=256)
            case "portable":
                kept = self.features & {"neon"}  # AArch64 has NEON with FMA in its base; x86-64's base is SSE2, without
                return replace(self, features=kept | ({"fma"} if kept else set()), vector_bits=128)


def detect() -> Cpu:
    """The CPU of this machine, limited to the cores this process may run on."""
    info = parse_cpuinfo(_read(Path("/proc/cpuinfo")))
    flags = frozenset(info.get("flags", info.get("Features", "")).split())
    machine = platform.machine().lower()
    machine = {"x86_64": "x86-64", "amd64": "x86-64", "arm64": "aarch64"}.get(machine, machine)
    features = features_of(flags, machine)
    caches, cache_source = _caches(Path("/sys/devices/system/cpu/cpu0/cache"))
    mhz, mhz_source = _max_mhz(info)
    return Cpu(
        product=info.get("model name") or platform.processor() or machine,
        vendor=info.get("vendor_id", "unknown"),
        machine=machine,
        features=features,
        vector_bits=512 if "avx512" in features else 256 if "avx2" in features else 128,
        cores=_cores(),
        max_mhz=mhz,
        dram_bytes=_dram_bytes(),
        full_rate_512=not (info.get("vendor_id") == "AuthenticAMD" and info.get("cpu family") == "25"),
        sources={"boost_mhz": mhz_source, "caches": cache_source, "capabilities": "the system's feature flags"},
        **caches,
    )


def parse_cpuinfo(text: str) -> dict[str, str]:
    """The first processor's lines of /proc/cpuinfo as key -> value; empty for empty text."""
    first = text.split("\n\n", 1)[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs if key.strip()}


def features_of(flags: frozenset[str], machine: str) -> frozenset[str]:
    """The capabilities code generation knows, of the operating system's flag names."""
    if machine == "aarch64":
        return frozenset({"neon", "fma"})
    features = set()
    if {"avx2", "fma"} <= flags:
        features |= {"avx2", "fma"}
        if {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags:
            features |= {"avx512"}
            if "avx512_bf16" in flags:
                features |= {"bf16"}
    return frozenset(features)


def parse_size(text: str) -> int:
    """Bytes of a /sys cache size: "32K", "1024K", "8M"."""
    units = {"K": KIB, "M": KIB**2, "G": KIB**3}
    text = text.strip()
    return int(text[:-1]) * units[text[-1]] if text and text[-1] in units else int(text)


def _caches(folder: Path) -> tuple[dict[str, int], str]:
    """Sizes of the data and unified caches of core 0, and where they come from."""
    found: dict[str, int] = {}
    for index in sorted(folder.glob("index*")) if folder.is_dir() else ():
        kind, level, size = (_read(index / name).strip() for name in ("type", "level", "size"))
        if kind in ("Data", "Unified") and size:
            found["l1d_bytes" if level == "1" else f"l{level}_bytes"] = parse_size(size)
    known = {name: found.get(name, assumed) for name, assumed in ASSUMED_CACHES.items()}
    return known, "/sys/devices/system/cpu/cpu0/cache" if found else "assumed: this system does not show its caches"


def _max_mhz(info: Mapping[str, str]) -> tuple[float, str]:
    """The highest clock to expect, and where it comes from."""
    if khz := _read(Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")).strip():
        return float(khz) / 1e3, "cpufreq/cpuinfo_max_freq"
    if shown := info.get("cpu MHz"):
        source = f"estimate: {BOOST_HEADROOM} x the {float(shown):.0f} MHz that /proc/cpuinfo shows"
        return float(shown) * BOOST_HEADROOM, source
    return ASSUMED_MHZ, "assumed: this system does not show its clock"


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # absent on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _dram_bytes() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return ASSUMED_DRAM_BYTES


def _read(path: Path) -> str:
    """A file's text; empty when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
