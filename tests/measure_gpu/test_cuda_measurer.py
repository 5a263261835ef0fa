"""Measuring on a GPU against a stand-in driver: every way a kernel can go wrong becomes the right row, and the next measures."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from emmy.errors import DeviceBusy, NoSuchDevice, UsageError
from emmy.ir.target import load_target
from emmy.measure.cuda import CudaMeasurer, GpuState
from emmy.measure.measurer import Measurer
from emmy.measure.protocol import Report
from emmy.measure.worker_measurer import RunLimit
from emmy.records import Candidate, Status
from tests.measure.contract import MeasurerContract
from tests.measure_gpu import fake

LIMIT = RunLimit(least_s=1.0, times=50.0, unknown_s=5.0, patience=(30.0, 0.02))
RIGHT = Candidate(fake.OP, "right")

# kernel -> status and a piece of the message of its row, and whether the worker survives it
EXPECTED: dict[str, tuple[Status, str, bool]] = {
    "right 400": ("ok", "", True),
    "refused": ("constraints", "move 0 k0/split(m,grid,0): a step of 0", True),
    "spills": ("compile", "spills 40 bytes a thread", True),
    "illegal": ("runtime", "CUDA error 700, an illegal memory access was encountered", False),
    "breaks_the_gpu": ("device_lost", "CUDA error 214, uncorrectable ECC error", False),
    "hang": ("timeout", "did not come back in the time allowed, while checking integer inputs", False),
    "too_large": ("runtime", "CUDA error 701, too many resources requested for launch, while launching k0", True),
    "right 30000": ("timeout", "one run took 0.03 s, allowed are 0.02 s", True),
    "off_by_one": ("correctness", "integer inputs, seed 0: C[0,5] is", True),
    "nothing": ("correctness", "C[0,0] was never written", True),
    "past_the_end": (
        "correctness",
        "out of bounds of C: 4 bytes past its end were written, the nearest 4001 away",
        True,
    ),
    "before_the_start": (
        "correctness",
        "out of bounds of C: 4 bytes before its start were written, the nearest 1 away",
        True,
    ),
    "modifies_an_input": ("correctness", "input B was modified: the first change is at [0,3]", True),
    "wrong_after_a_while": ("correctness", "right at first, wrong after", True),
}


def make(folder: Path, gpu: int = 0) -> CudaMeasurer:
    return CudaMeasurer(
        load_target("rtx4090"),
        gpu=fake.gpu(gpu),
        build=fake.builder(folder),
        cache=folder,
        limit=LIMIT,
        compile_workers=2,
    )


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of a machine that has a GPU: workers that are started see the stand-ins."""
    folder = tmp_path_factory.mktemp("gpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_LIBRARY_PATH", str(fake.libraries(folder)))
        yield folder


@pytest.fixture(scope="module")
def shared(machine: Path) -> Iterator[CudaMeasurer]:
    with make(machine) as measurer:
        yield measurer


class TestCudaMeasurer(MeasurerContract):
    good, bad = RIGHT, Candidate(fake.OP, "off_by_one")

    @pytest.fixture
    def measurer(self, shared: CudaMeasurer) -> CudaMeasurer:
        return shared

    def test_a_race_gives_each_ok_row_the_stock_time_and_the_ratio(self, measurer: Measurer) -> None:
        pytest.skip("the stock kernel needs torch with CUDA")

    def test_a_heat_keeps_the_raw_times_of_its_rivals_too(self, measurer: Measurer) -> None:
        pytest.skip("the stock kernel needs torch with CUDA")


@pytest.mark.parametrize("name", EXPECTED)
def test_a_bad_kernel_becomes_the_right_row_and_the_next_measures_right(name: str, shared: CudaMeasurer) -> None:
    shared.measure([RIGHT])
    worker = shared.worker.pid
    row, after = shared.measure([Candidate(fake.OP, name), RIGHT])
    status, message, survives = EXPECTED[name]
    assert (row.status, message in row.message) == (status, True), row.message
    assert after.status == "ok", after.message
    assert (shared.worker.pid == worker) == survives


def test_times_are_those_of_the_events_and_the_row_says_how_they_were_taken(shared: CudaMeasurer) -> None:
    row, slow = shared.measure([RIGHT, Candidate(fake.OP, "right 123")])
    assert row.samples_us == pytest.approx((10.0,) * 3)
    assert slow.samples_us[0] == pytest.approx(123.0)
    assert (row.device.target, row.device.product, row.device.toolkit[:6]) == (
        "rtx4090",
        "NVIDIA GeForce RTX 4090",
        "nvrtc ",
    )
    assert (row.protocol.clock, row.protocol.cache, row.protocol.repeats) == ("event", "cold", 3)
    assert (row.clock_mhz, row.temperature_c) == (2520.0, 61.0)
    assert row.static["power_w"] == pytest.approx(310.5)
    assert row.static["warm_us"] == pytest.approx(10.0)
    assert row.static["registers"] == 40.0
    assert row.static["buffer_sets"] > 100  # small operands: many sets, until the cache has forgotten the first
    assert not row.contended


@pytest.mark.slow
def test_a_race_takes_turns_and_measures_long_kernels_under_lasting_load(shared: CudaMeasurer) -> None:
    names = ["right 60", "illegal", "right 90", "right 80", "off_by_one", "refused"]
    rows = shared.race([Candidate(fake.OP, n) for n in names], rounds=5)
    assert [r.status for r in rows] == ["ok", "runtime", "ok", "ok", "correctness", "constraints"]
    assert rows[0].samples_us == pytest.approx((60.0,) * 5)
    assert rows[3].static["sustained_us"] == pytest.approx(80.0)
    assert "sustained_us" in rows[0].static and "sustained_us" not in rows[2].static, "of the two fastest"
    assert rows[0].protocol.repeats == 5


def test_short_kernels_have_one_state_only(shared: CudaMeasurer) -> None:
    assert "sustained_us" not in shared.race([RIGHT], rounds=3)[0].static


READINGS = """
from emmy.measure.nvml import Meter
print(Meter({uuid!r}).read())
"""


def test_readings_are_the_librarys_and_nothing_is_claimed_of_another_card(machine: Path) -> None:
    uuid, other = fake.gpu().uuid, fake.gpu(1).uuid
    calm = {
        "sm_mhz": 2520.0,
        "memory_mhz": 10501.0,
        "temperature_c": 61.0,
        "power_w": 310.5,
        "slowdown": 0,
        "others": 0,
    }
    assert ast.literal_eval(fake.run(READINGS.format(uuid=uuid), machine)) == calm
    assert ast.literal_eval(fake.run(READINGS.format(uuid=other), machine)) == {}
    hot = fake.run(READINGS.format(uuid=uuid), machine, FAKE_NVML_HOT="1", FAKE_NVML_OTHER="1")
    assert ast.literal_eval(hot) == {**calm, "slowdown": 1.0, "others": 1.0}


@pytest.mark.parametrize(
    ("facts", "samples_us", "contended"),
    [
        ({}, (10.0, 10.1, 10.2), False),
        ({"others": 0.0, "slowdown": 0.0, "sm_mhz": 1980.0}, (10.0, 10.1, 10.2), False),
        ({"others": 1.0}, (10.0, 10.1, 10.2), True),
        ({"slowdown": 1.0}, (10.0, 10.1, 10.2), True),
        ({}, (10.0, 12.0, 14.0), True),
        ({}, (10.0,), False),
    ],
)
def test_a_busy_hot_or_restless_gpu_marks_the_row(
    facts: dict[str, float], samples_us: tuple[float, ...], contended: bool
) -> None:
    around = GpuState().judge(Report(1, (), circumstances=facts), samples_us)
    assert around.contended == contended
    assert around.clock_mhz == facts.get("sm_mhz")


def test_a_gpu_is_measured_by_one_at_a_time_but_two_gpus_are_two_devices(machine: Path, shared: CudaMeasurer) -> None:
    with pytest.raises(DeviceBusy, match="is being measured by process"):
        make(machine)
    with make(machine, gpu=1) as other:
        assert other.device.uuid_hash != shared.device.uuid_hash


def test_a_target_that_is_not_here_is_refused_with_what_is(machine: Path) -> None:
    script = """
from emmy.errors import NoSuchDevice
from emmy.ir.target import load_target
from emmy.measure.cuda import find_gpu, target_of
from emmy.runtime.cuda_driver import gpus
print([target_of(g) for g in gpus()], find_gpu(load_target("rtx4090")).uuid)
try:
    find_gpu(load_target("h200"))
except NoSuchDevice as e:
    print(e)
"""
    out = fake.run(script, machine, FAKE_CUDA_COUNT="2")
    assert f"['rtx4090', 'rtx4090'] {fake.gpu().uuid}" in out
    assert "h200 (NVIDIA H200) is not here; this machine has NVIDIA GeForce RTX 4090 (rtx4090), NVIDIA" in out
    out = fake.run(script.replace("rtx4090", "h100"), machine, FAKE_CUDA_NAME="NVIDIA H100 80GB HBM3")
    assert "['h100']" in out


def test_a_launcher_that_cannot_be_built_is_no_fault_of_a_candidate(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMMY_CXX", "no-such-compiler")
    monkeypatch.setenv("EMMY_CACHE", str(tmp_path))
    with make(tmp_path, gpu=1) as measurer, pytest.raises(NoSuchDevice, match="no-such-compiler"):
        measurer.measure([RIGHT])


def test_a_cpu_is_not_measured_here_and_no_gpu_is_no_device() -> None:
    with pytest.raises(UsageError, match="cpu is no GPU"):
        CudaMeasurer(load_target("cpu"))
    with pytest.raises(NoSuchDevice, match="a100"):
        CudaMeasurer(load_target("a100"))


@pytest.mark.parametrize("stage", ["cp_async,2", pytest.param("ldg,1", marks=pytest.mark.slow)])
def test_generated_code_goes_all_the_way_to_the_card(stage: str, machine: Path) -> None:
    """Compiled by NVRTC in a process of its own, loaded, bound and launched; the stand-in only does not compute."""
    op = "matmul:64x64x64:f16:nk"
    with CudaMeasurer(load_target("rtx4090"), gpu=fake.gpu(1), cache=machine, compile_workers=1) as measurer:
        done, refused = measurer.measure([Candidate(op, SIMPLE.format(stage)), Candidate(op, "k0/split(m,grid,3)")])
    assert (done.status, done.message.split(";")[0]) == (
        "correctness",
        "integer inputs, seed 0: C[0,0] was never written (or computed from what lies outside an operand)",
    )
    assert done.static["registers"] > 0
    assert done.source_digest != ""
    assert refused.status == "constraints"


SIMPLE = (
    "k0/split(m,grid,32) k0/split(n,grid,32) k0/split(k,serial,32) k0/split(m,warp,16) k0/split(n,warp,16) "
    "k0/stage(A,{0}) k0/stage(B,{0}) k0.C/atom(mma,16,8,16)"
)
