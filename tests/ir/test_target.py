"""Targets: the figures agree with each other and name their sources; the CPU is read from what systems really show."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields

import pytest

from emmy.errors import NoSuchDevice, PlanError
from emmy.ir import cpu_detect, target
from emmy.ir.cpu_detect import Cpu, detect, features_of, parse_cpuinfo, parse_size
from emmy.ir.target import CPU_ISAS, Target, load_target, target_names

GPUS = tuple(name for name in target_names() if name not in CPU_ISAS)
# Dense multiply-adds one SM starts a cycle: CUDA cores, and tensor cores with f16 inputs at the full rate.
FMA_PER_CYCLE = {
    "sm_80": (64, 1024),
    "sm_86": (128, 512),
    "sm_89": (128, 512),
    "sm_90a": (128, 2048),
    "sm_120a": (128, 512),
}
HOPPER_TENSOR_MHZ = 1830  # the clock NVIDIA quotes Hopper's tensor rates at
BLOCK_RESERVED_BYTES = 1024

ZEN4 = """\
processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model name\t: AMD EPYC 9R14
cpu MHz\t\t: 2600.000
flags\t\t: fpu sse2 avx avx2 fma avx512f avx512dq avx512bw avx512vl avx512_bf16

processor\t: 1
vendor_id\t: AuthenticAMD
"""
HASWELL = "vendor_id\t: GenuineIntel\nmodel name\t: Intel(R) Xeon(R)\nflags\t\t: fpu sse2 avx avx2 fma bmi2\n"
PENRYN = "vendor_id\t: GenuineIntel\nflags\t\t: fpu sse2 ssse3\n"
GRAVITON = "processor\t: 0\nFeatures\t: fp asimd evtstrm aes sve\n"


@pytest.fixture
def fresh() -> Iterator[None]:
    """No target loaded before this test is seen in it, nor one loaded in it after."""
    load_target.cache_clear()
    yield
    load_target.cache_clear()


def cpu_of(text: str, machine: str) -> Cpu:
    info = parse_cpuinfo(text)
    features = features_of(frozenset(info.get("flags", info.get("Features", "")).split()), machine)
    bits = 512 if "avx512" in features else 256 if "avx2" in features else 128
    return Cpu("any", info.get("vendor_id", "unknown"), machine, features, bits, 2, 3000.0, 1, 1, 1, 1)


def test_the_named_gpus_are_there() -> None:
    assert {"rtx3090", "rtx4090", "rtx5090", "rtxpro6000", "a100", "l40s", "h100", "h200"} <= set(GPUS)


@pytest.mark.parametrize("name", GPUS)
def test_a_gpus_peak_rates_follow_from_its_sms_and_clock(name: str) -> None:
    t = load_target(name)
    cores, tensor = FMA_PER_CYCLE[t.arch]
    tensor_mhz = HOPPER_TENSOR_MHZ if t.arch == "sm_90a" else t.boost_mhz
    assert t.peak_tflops["f32"] == pytest.approx(2 * t.n_sms * cores * t.boost_mhz / 1e6, rel=0.01)
    assert t.peak_tflops["f16->f16"] == pytest.approx(2 * t.n_sms * tensor * tensor_mhz / 1e6, rel=0.015)


@pytest.mark.parametrize("name", GPUS)
def test_f16_accumulation_is_faster_exactly_on_geforce_cards_and_by_two(name: str) -> None:
    t = load_target(name)
    ratio = t.peak_tflops["f16->f16"] / t.peak_tflops["f16->f32"]
    assert ratio == pytest.approx(2 if "GeForce" in t.product else 1, rel=0.01)
    assert t.can("hybrid_rate") == ("GeForce" in t.product)
    assert t.peak_tflops["bf16->f32"] == t.peak_tflops["f16->f32"]


@pytest.mark.parametrize("name", GPUS)
def test_a_block_may_opt_in_to_all_shared_memory_but_the_reserved_kibibyte(name: str) -> None:
    t = load_target(name)
    assert t.smem_sm_bytes - t.smem_block_bytes == BLOCK_RESERVED_BYTES


@pytest.mark.parametrize("name", GPUS)
def test_every_figure_of_a_gpu_names_its_document(name: str) -> None:
    t = load_target(name)
    figures = {f.name for f in fields(Target)} - {"name", "vendor", "arch", "levels", "sources"}
    given = {figure for figure in figures if getattr(t, figure)}
    assert given - set(t.sources) == set()
    assert all(len(document) > 20 for document in t.sources.values())


@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_has_the_levels_its_architecture_has(name: str) -> None:
    t = load_target(name)
    names = [level.name for level in t.levels]
    assert names[0] == "grid" and names[-1] == "atom"
    assert ("cluster" in names) == t.can("cluster") == (t.max_cluster > 0)
    assert ("warpgroup" in names) == t.can("wgmma")
    widths = {level.name: level.width for level in t.levels}
    assert widths["warp"] * widths["lane"] == t.max_threads_block


def test_tma_is_on_hopper_and_blackwell_and_wgmma_on_hopper_alone() -> None:
    assert {n for n in GPUS if load_target(n).can("tma", "mbarrier")} == {"h100", "h200", "rtx5090", "rtxpro6000"}
    assert {n for n in GPUS if load_target(n).can("wgmma")} == {"h100", "h200"}
    assert all(load_target(n).can("cp_async", "ldmatrix", "mma") for n in GPUS)


def test_targets_are_values_that_can_be_keys() -> None:
    assert len({load_target(name) for name in target_names()[:1] + GPUS}) == 1 + len(GPUS)


def test_an_unknown_target_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(NoSuchDevice, match=r"Did you mean rtx4090\?") as e:
        load_target("rtx409")
    assert e.value.exit_code == 3 and "h200" in str(e.value)


@pytest.mark.usefixtures("fresh")
def test_a_misspelt_key_in_a_target_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    read = target._read
    monkeypatch.setattr(target, "_read", lambda path: {**read(path), **({"n_sm": 1} if path == "h200.toml" else {})})
    with pytest.raises(PlanError, match=r"h200\.toml has unknown keys \['n_sm'\]"):
        load_target("h200")


def test_the_cpu_of_this_machine_is_detected_with_usable_figures() -> None:
    t = load_target("cpu")
    assert t.is_cpu and t.n_sms == 0 and t.product
    assert 1 <= t.cores <= (os.cpu_count() or 1)
    assert t.vector_bits in (128, 256, 512)
    assert 8 << 10 <= t.l1d_bytes <= t.l2_bytes
    assert 0 < t.peak_tflops["f32"] <= t.peak_tflops["bf16->f32"]
    assert [level.name for level in t.levels] == ["core", "serial", "reg", "vector"]
    assert {"boost_mhz", "caches", "dram_gbs", "peak_tflops"} <= set(t.sources)


def test_the_portable_variant_uses_no_more_than_every_cpu_of_its_kind_has() -> None:
    t = load_target("cpu-portable")
    assert t.isa == "portable" and t.vector_bits == 128
    assert not t.capabilities & {"avx2", "avx512", "bf16"}
    assert t.peak_tflops["f32"] <= load_target("cpu").peak_tflops["f32"]


@pytest.mark.usefixtures("fresh")
def test_the_avx2_variant_narrows_an_avx512_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "detect", lambda: cpu_of(ZEN4, "x86-64"))
    wide, narrow = load_target("cpu"), load_target("cpu-avx2")
    assert (wide.isa, wide.vector_bits) == ("avx512", 512)
    assert (narrow.isa, narrow.vector_bits) == ("avx2", 256)
    assert not narrow.can("bf16") and narrow.can("fma")


@pytest.mark.usefixtures("fresh")
def test_the_avx2_variant_is_refused_where_the_machine_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "detect", lambda: cpu_of(PENRYN, "x86-64"))
    with pytest.raises(NoSuchDevice, match="no AVX2"):
        load_target("cpu-avx2")


@pytest.mark.parametrize(
    ("text", "machine", "features", "isa_flops"),
    [
        (ZEN4, "x86-64", {"fma", "avx2", "avx512", "bf16"}, 64),
        (HASWELL, "x86-64", {"fma", "avx2"}, 32),
        (PENRYN, "x86-64", set(), 8),
        (GRAVITON, "aarch64", {"neon", "fma"}, 16),
        ("", "aarch64", {"neon", "fma"}, 16),  # macOS shows no /proc/cpuinfo
    ],
)
def test_instruction_sets_are_read_from_the_flags(text: str, machine: str, features: set[str], isa_flops: int) -> None:
    cpu = cpu_of(text, machine)
    assert cpu.features == features
    assert cpu.flops_per_cycle == isa_flops


def test_only_the_first_processor_of_cpuinfo_is_read() -> None:
    assert parse_cpuinfo(ZEN4)["model name"] == "AMD EPYC 9R14"
    assert parse_cpuinfo(ZEN4)["processor"] == "0"


@pytest.mark.parametrize(("text", "size"), [("32K", 32768), ("1024K\n", 1 << 20), ("32M", 32 << 20), ("4096", 4096)])
def test_cache_sizes_are_read_with_their_unit(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_a_system_that_shows_nothing_gets_stated_assumptions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_detect, "_read", lambda path: "")
    cpu = detect()
    assert cpu.max_mhz == cpu_detect.ASSUMED_MHZ
    assert cpu.l2_bytes == cpu_detect.ASSUMED_CACHES["l2_bytes"]
    assert cpu.sources["boost_mhz"].startswith("assumed") and cpu.sources["caches"].startswith("assumed")
    assert cpu.product
