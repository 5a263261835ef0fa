"""On a real GPU: hand-written kernels that go wrong in every way, generated ones of every transport, torch beside."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from emmy.codegen.files import appearing
from emmy.codegen.nvrtc import compile_cubin
from emmy.errors import IllegalMove, UsageError
from emmy.ir.dispatch import parse_dispatch
from emmy.ir.ops import parse_op
from emmy.ir.target import Target, load_target
from emmy.loading import load_table
from emmy.measure.check import cases, operands
from emmy.measure.compile_pool import Builder, Built
from emmy.measure.cuda import CudaMeasurer, target_of
from emmy.measure.worker_measurer import RunLimit
from emmy.records import Candidate, Status
from emmy.runtime.cuda_driver import Context, gpus
from emmy.search.schedule_space import ScheduleSpace
from tests.measure.contract import MeasurerContract

pytestmark = pytest.mark.gpu

OP = "matmul:33x17x9:f32"
LIMIT = RunLimit(least_s=3.0, times=50.0, unknown_s=5.0, patience=(30.0, 0.02))

_KERNEL = """
extern "C" __global__ void k0(const float* A, const float* B, float* C) {
  int m = blockIdx.x, n = threadIdx.x;
  if (n < 17) {
    float sum = 0;
    for (int k = 0; k < 9; ++k) sum += A[m * 9 + k] * B[k * 17 + n];
    C[m * 17 + n] = sum;
  }
  if (m == 0 && n == 0) { BODY }
}
"""
# Slow on any card: by the clock, several times what patience allows (20 ms) and far from a hang (3 s).
SLOW = """
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - begin < 100000000ull);
"""
# what the kernel does besides being right -> status and a piece of the message of its row, whether the worker survives it
EXPECTED: dict[str, tuple[str, Status, str, bool]] = {
    "right": ("", "ok", "", True),
    "illegal": ("*(volatile int*)8 = 1;", "runtime", "CUDA error 700", False),
    "misaligned": ("*(volatile int*)((char*)C + 1) = 1;", "runtime", "CUDA error 716", False),
    "trap": ('asm volatile("trap;");', "runtime", "CUDA error 71", False),
    "hang": ("for (volatile int i = 0;; ++i) {}", "timeout", "did not come back in the time allowed", False),
    "slow": (SLOW, "timeout", "one run took", True),
    "off_by_one": ("C[5] += 1;", "correctness", "C[0,5] is", True),
    "past_the_end": ("C[33 * 17 + 1000] = 1;", "correctness", "out of bounds of C: 4 bytes past its end", True),
    "before_the_start": ("C[-1] = 1;", "correctness", "out of bounds of C: 4 bytes before its start", True),
    "modifies_an_input": (
        "((float*)B)[3] += 1;",
        "correctness",
        "input B was modified: the first change is at [0,3]",
        True,
    ),
    "not_a_number": ("C[4] = __int_as_float(0x7fc00000);", "correctness", "C[0,4] is nan", True),
    "too_much_memory": ("", "runtime", "while asking for 300000 bytes of shared memory", True),
}


@pytest.fixture(scope="module")
def target() -> Target:
    found = gpus()
    name = target_of(found[0]) if found else None
    if name is None:
        pytest.skip("no GPU that a target describes")
    return load_target(name)


def builder(folder: Path, target: Target) -> Builder:
    def build(candidate: Candidate) -> Built:
        name = candidate.schedule
        if name == "refused":
            raise IllegalMove(0, "k0/split(m,grid,0)", "a step of 0 makes no progress")
        cubin = compile_cubin(_KERNEL.replace("BODY", EXPECTED[name][0]), target.arch).data
        smem = 300000 if name == "too_much_memory" else 0
        lines = (
            "emmy-gpu-plan 2\nargument A 4 297\nargument B 4 153\nargument C 4 561\n"
            f"kernel k0 32 {smem} 33\npass A\npass B\npass C\ncubin {len(cubin)}\n"
        )
        path = folder / f"{name}.plan"
        with appearing(path) as new:
            new.write_bytes(lines.encode() + cubin)
        return Built(path, f"digest of {name}", {"registers": 1.0})

    return build


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, target: Target) -> Iterator[CudaMeasurer]:
    folder = tmp_path_factory.mktemp("gpu")
    with CudaMeasurer(target, build=builder(folder, target), cache=folder, limit=LIMIT, compile_workers=2) as measurer:
        yield measurer


class TestCudaMeasurerOnGpu(MeasurerContract):
    good, bad = Candidate(OP, "right"), Candidate(OP, "off_by_one")

    @pytest.fixture
    def measurer(self, shared: CudaMeasurer) -> CudaMeasurer:
        return shared


@pytest.mark.parametrize("name", EXPECTED)
def test_a_bad_kernel_becomes_the_right_row_and_the_next_measures_right(name: str, shared: CudaMeasurer) -> None:
    right = Candidate(OP, "right")
    shared.measure([right])
    worker = shared.worker.pid
    row, after = shared.measure([Candidate(OP, name), right])
    _, status, message, survives = EXPECTED[name]
    assert (row.status, message in row.message) == (status, True), row.message
    assert after.status == "ok", after.message
    assert (shared.worker.pid == worker) == survives


def test_a_row_says_at_which_clock_and_temperature_it_was_taken(shared: CudaMeasurer) -> None:
    (row,) = shared.measure([Candidate(OP, "right")])
    assert row.clock_mhz is not None and row.clock_mhz > 100
    assert row.temperature_c is not None and 10 < row.temperature_c < 110
    assert row.device.driver[0].isdigit()
    assert row.static["warm_us"] > 0


GENERATED = {
    "matmul:256x256x512:f16:nk": [
        "k0/stage(A,cp_async,3) k0/stage(B,cp_async,3) k0.C/atom(mma,16,8,16)",
        "k0/stage(A,cp_async,1) k0/stage(B,cp_async,1) k0.C/atom(mma,16,8,16)",
        "k0/stage(A,ldg,2) k0/stage(B,ldg,2) k0.C/atom(mma,16,8,16)",
        "k0/stage(A,tma,3) k0/stage(B,tma,3) k0.C/atom(mma,16,8,16)",
        "k0/stage(A,tma,3) k0/stage(B,tma,3) k0.C/atom(mma,16,8,16) k0.C/pipeline()",
        "k0/stage(A,cp_async,3) k0/stage(B,cp_async,3) k0.C/atom(hybrid,16,8,32)",
        "k0/stage(A,cp_async,3) k0/stage(B,cp_async,3) k0.C/atom(f16,16,8,16)",
    ],
}
TILE = "k0/split(m,grid,64) k0/split(n,grid,64) k0/split(k,serial,64) k0/split(m,warp,32) k0/split(n,warp,32)"


def test_generated_kernels_of_every_transport_are_right_and_raced_against_torch(target: Target) -> None:
    with CudaMeasurer(target, compile_workers=4) as measurer:
        for op, tails in GENERATED.items():
            candidates = [Candidate(op, f"{TILE} {t}") for t in tails if "tma" not in t or target.can("tma")]
            rows = measurer.race(candidates, rounds=3)
            assert [(r.status, r.message) for r in rows] == [("ok", "")] * len(candidates)
            assert all(r.baseline == "torch" and r.static["speedup"] > 0 for r in rows)


@pytest.mark.parametrize(
    "text",
    [
        "matmul:16x512x1024:bf16",
        "matmul:96x160x352:f16:nk,bias,gelu_tanh",
        "matmul:m(1..300)x512x512:f16:nk",
        "matmul:64x64x256:f32:residual",
    ],
)
def test_default_schedules_are_right(text: str, target: Target) -> None:
    op = parse_op(text)
    with CudaMeasurer(target, compile_workers=1) as measurer:
        row, raced = (
            *measurer.measure([Candidate(op.key, ScheduleSpace(op, target).default().key)]),
            *measurer.race([Candidate(op.key, ScheduleSpace(op, target).default().key)], rounds=3),
        )
    assert (row.status, row.message) == ("ok", "")
    assert raced.baseline_us is not None


def test_answers_on_the_gpu_are_the_ops_own(target: Target) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA")
    from emmy.measure import torch_answers
    from emmy.measure.cuda_device import CudaDevice
    from emmy.measure.references import References

    op = parse_op("matmul:96x160x352:bf16:nk,bias,gelu_tanh")
    device = CudaDevice(References(Path("/nowhere")), 0)
    answers = device.answers(op)
    assert isinstance(answers, torch_answers.TorchAnswers)
    for case in cases(op):
        held = {name: device.guarded(*form) for name, form in operands(op, case.sizes).items()}
        answers.prepare(case)
        answers.write(case, held)
        inputs = {v.name: held[v.name].read() for v in op.program().inputs}
        (want,) = op.reference(inputs).values()
        (got,) = answers._right(case).values()
        np.testing.assert_allclose(got.cpu().numpy(), want, rtol=1e-12, atol=1e-12)
        assert answers.change(case, held) is None
        stock = device.stock(op)
        assert stock is not None
        device.time_ns([stock[1].bind(held, case.sizes)])
        norm = answers.compare(case, held).error_norm
        assert norm is not None and norm < 4


def test_a_table_by_ranges_is_right_at_both_ends_of_each_and_its_choice_is_cheap(target: Target) -> None:
    op = parse_op("matmul:m(1..200)x64x96:f16:nk")
    small = "k0/split(m,grid,16) k0/split(n,grid,16) k0/split(k,serial,32) k0/split(m,warp,16) "
    small += "k0/stage(A,cp_async,2) k0/stage(B,cp_async,2) k0.C/atom(mma,16,8,16)"
    large = small.replace("k0/split(m,grid,16)", "k0/split(m,grid,64)").replace("cp_async,2", "cp_async,3")
    table, context = load_table(op, parse_dispatch(f"m 1..16: {small} | m 17..200: {large}"), target), Context()
    for m in (1, 16, 17, 200):
        x = op.inputs("integer", 0, {"m": m})
        y = np.full((m, 64), np.nan, np.float16)
        at = {name: context.allocate(a.nbytes) for name, a in {**x, "C": y}.items()}
        for name, a in x.items():
            context.write(at[name], a)
        table.run(at, {"m": m}, stream=context.stream)
        context.read(at["C"], y)
        assert op.error_norm({"C": y}, x, "integer") <= 1, m
        for address in at.values():
            context.free(address)
    assert table.choice_ns((1, 16, 17, 200), rounds=1000) < 2000
    with pytest.raises(UsageError, match=r"m is 201, this table serves 1\.\.200"):
        table.choose(201)
