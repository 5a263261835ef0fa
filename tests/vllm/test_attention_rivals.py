"""vLLM's own attention kernels as rivals in a race: what they compute from an op's arrays."""

from __future__ import annotations

import pytest

from emmy.errors import UsageError
from emmy.ir.ops import parse_op
from emmy.measure.stock import stock
from tests.measure.test_stock import run

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    "shape",
    [
        "3x4x1x96x32:f32:kv2,page32",
        "3x4x1x96x32:f32:kv2,window40,page32,scale0.5",
        "2x4x20x96x64:f32:kv1,window30,page32,len90",
    ],
)
def test_the_cpu_backend_s_kernel_computes_the_op(shape: str) -> None:
    text = f"served_attention:{shape},pgcdj,pgcjd"
    found = stock(parse_op(text), 1, "vllm:CPU_ATTN")
    assert found is not None and found[0] == "vllm:CPU_ATTN"
    norm = run(text, found[1], "normal")
    assert norm is not None and norm <= 1


@pytest.mark.parametrize("backend", ["vllm:CPU_ATTN", "vllm:TRITON_ATTN"])
def test_a_cache_that_a_backend_does_not_read_is_refused(backend: str) -> None:
    order = "pcjgd" if "CPU" in backend else "pgcdj,pgcjd"
    with pytest.raises(UsageError, match="reads caches"):
        stock(parse_op(f"served_attention:3x4x1x96x32:f32:page32,{order}"), 1, backend)
