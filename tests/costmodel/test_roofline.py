"""The roofline is the larger of two divisions, and scales as the device does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from emmy.errors import PlanError
from emmy.ir.ops import parse_op
from emmy.ir.ops.op import Work
from emmy.ir.roofline import peak_tflops, roofline_us
from emmy.ir.target import load_target

H200 = load_target("h200")
CPU = replace(load_target("cpu-portable"), cores=4, dram_gbs=100.0, peak_tflops={"f32": 0.4}, l3_bytes=1 << 20)


def test_a_large_matmul_is_bound_by_arithmetic_and_a_decode_step_by_memory() -> None:
    big = roofline_us(parse_op("matmul:8192x8192x8192:f16").work(), H200, "f16")
    assert big.binding == "compute" and big.time_us == pytest.approx(2 * 8192**3 / 989.4e12 * 1e6)
    one = roofline_us(parse_op("matmul:1x30720x3840:f16:nk").work(), H200, "f16")
    moved = 2 * (3840 + 3840 * 30720 + 30720)
    assert one.binding == "dram" and one.time_us == pytest.approx(moved / 4800e9 * 1e6)


def test_a_measured_h200_matmul_lies_above_its_roofline() -> None:
    """cuBLAS, q_proj of 4096 rows, f16, random data: 173.4 us at burst clocks."""
    assert roofline_us(parse_op("matmul:4096x4096x3840:f16").work(), H200, "f16").time_us < 173.4


def test_fewer_threads_have_their_share_of_arithmetic_and_bandwidth() -> None:
    work = Work(flops=4e9, bytes=1e6)
    assert roofline_us(work, CPU, "f32").compute_us == pytest.approx(1e4)
    assert roofline_us(work, CPU, "f32", 1).compute_us == pytest.approx(4e4)
    assert roofline_us(work, CPU, "f32", 1).dram_us == pytest.approx(40.0)
    assert roofline_us(work, CPU, "f32", 99) == roofline_us(work, CPU, "f32", 4)


def test_warm_operands_count_only_beyond_the_last_cache() -> None:
    fits, exceeds = Work(1.0, float(1 << 20)), Work(1.0, float(3 << 20))
    assert roofline_us(fits, CPU, "f32", cache="warm").dram_us == 0.0
    assert roofline_us(exceeds, CPU, "f32", cache="warm").dram_us == pytest.approx((2 << 20) / 1e5)


def test_a_card_that_ran_above_its_rated_clock_has_a_higher_peak() -> None:
    work = Work(1e12, 1.0)
    faster = roofline_us(work, H200, "f16", clock_mhz=2 * H200.boost_mhz)
    assert faster.compute_us == pytest.approx(roofline_us(work, H200, "f16").compute_us / 2)
    assert roofline_us(work, H200, "f16", clock_mhz=100.0) == roofline_us(work, H200, "f16")


def test_a_dtype_without_a_rate_is_an_error_that_lists_the_rates() -> None:
    with pytest.raises(PlanError, match=r"no peak rate for bf16; its file has f32"):
        peak_tflops(CPU, "bf16")
