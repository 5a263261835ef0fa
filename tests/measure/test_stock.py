"""The stock kernels compute the op."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from emmy.ir.ops import Bmm, FormulaOp, Glu, GluLinear, NormLinear, parse_op
from emmy.ir.ops.matmul import Matmul
from emmy.measure.allocated import Allocated
from emmy.measure.answers import compare
from emmy.measure.check import operands
from emmy.measure.device import Runnable
from emmy.measure.guarded import plain
from emmy.measure.job import STOCK_ERROR_NORM, stock_error_norm
from emmy.measure.rivals import AUTOTUNED, COMPILED
from emmy.measure.stock import (
    NumpyBmm,
    NumpyGlu,
    NumpyMatmul,
    TorchBmm,
    TorchGlu,
    TorchMadeLinear,
    TorchMatmul,
    host_tensor,
    stock,
)
from emmy.measure.stock_warm import Warmed, inductor_cache, warm
from emmy.measure.torch_formula import TorchFormula

F32 = [
    "matmul:5x7x64:f32",
    "matmul:1x33x16:f32:nk",
    "matmul:4x6x33:f32:nk,bias,gelu_tanh",
    "matmul:3x5x16:f32:residual,scale,bias",
    "matmul:3x5x16:f32:silu",
    "matmul:3x50x16:f32:residual,sum_squares",
]


def run(op_text: str, kernel: Runnable, kind: str) -> float | None:
    """The error norm of the kernel's answer."""
    op = parse_op(op_text)
    inputs = op.inputs(kind, 4)  # type: ignore[arg-type]
    buffers = {name: plain(*form) for name, form in operands(op, {}).items()}
    for name, data in inputs.items():
        buffers[name].write(data)
    kernel.bind(buffers, {})()
    reference = op.reference(inputs)
    return compare(op, kind, {n: buffers[n].read() for n in reference}, reference).error_norm  # type: ignore[arg-type]


F32_PAIRS = ["geglu:5x7x64:f32", "swiglu:1x33x16:f32:nk"]


@pytest.mark.parametrize("op_text", F32_PAIRS)
def test_numpy_computes_a_pair(op_text: str) -> None:
    for kind in ("integer", "normal"):
        norm = run(op_text, NumpyGlu(pair(op_text)), kind)
        assert norm is not None
        assert norm <= 1


@pytest.mark.parametrize(
    "op_text", [*F32_PAIRS, "geglu:65x40x256:bf16:nk", "swiglu:65x40x256:f16", "geglu:65x40x256:f16:nk"]
)
def test_torch_computes_a_pair_up_to_roundings_between_its_steps(op_text: str) -> None:
    pytest.importorskip("torch")
    norm = run(op_text, TorchGlu(pair(op_text), host_tensor), "normal")
    assert norm is not None
    assert norm <= (1 if ":f32" in op_text else STOCK_ERROR_NORM)


@pytest.mark.parametrize(
    "op_text",
    [
        "norm_linear:65x40x256:f32",
        "norm_linear:65x40x256:f16:nk",
        "norm_linear:5x40x256:bf16:residual",
        "geglu_linear:65x40x256:f32:nk",
        "geglu_linear:65x40x256:f16:nk,residual",
        "swiglu_linear:65x40x256:bf16",
    ],
)
def test_torch_computes_a_linear_of_what_it_makes_first(op_text: str) -> None:
    pytest.importorskip("torch")
    op = parse_op(op_text)
    assert isinstance(op, NormLinear | GluLinear)
    norm = run(op_text, TorchMadeLinear(op, host_tensor), "normal")
    assert norm is not None and norm <= 1


def pair(text: str) -> Glu:
    op = parse_op(text)
    assert isinstance(op, Glu)
    return op


def batched(text: str) -> Bmm:
    op = parse_op(text)
    assert isinstance(op, Bmm)
    return op


@pytest.mark.parametrize("op_text", ["bmm:3x5x7x64:f32", "bmm:2x1x33x16:f32:nk"])
def test_numpy_computes_a_batched_product(op_text: str) -> None:
    for kind in ("integer", "normal"):
        norm = run(op_text, NumpyBmm(batched(op_text)), kind)
        assert norm is not None
        assert norm <= 1


@pytest.mark.parametrize("op_text", ["bmm:3x5x7x64:f32", "bmm:2x9x33x16:f16:nk", "bmm:2x9x33x16:bf16"])
def test_torch_computes_a_batched_product(op_text: str) -> None:
    pytest.importorskip("torch")
    norm = run(op_text, TorchBmm(batched(op_text), host_tensor), "normal")
    assert norm is not None
    assert norm <= STOCK_ERROR_NORM


def matmul(text: str) -> Matmul:
    op = parse_op(text)
    assert isinstance(op, Matmul)
    return op


@pytest.mark.parametrize(
    "op_text",
    [
        "paged_attention:3x4x5x40x8:f32:causal,window7,kv1,page16,k_is_v",
        "paged_attention:2x2x6x6x8:f32:causal,page4",
        "served_attention:3x4x1x40x8:f32:kv2,window7,page8,pjgcd",
        "served_attention:2x4x5x40x8:f32:kv1,page8,len33,pgcdj,pgcjd",
    ],
)
def test_torch_attends_to_pages_and_leaves_zeros_where_nothing_is_seen(op_text: str) -> None:
    pytest.importorskip("torch")
    found = stock(parse_op(op_text), 1)
    assert found is not None
    norm = run(op_text, found[1], "normal")
    assert norm is not None
    assert norm <= 1


@pytest.mark.parametrize("op_text", F32)
def test_numpy_computes_the_op(op_text: str) -> None:
    for kind in ("integer", "normal"):
        norm = run(op_text, NumpyMatmul(matmul(op_text)), kind)
        assert norm is not None
        assert norm <= 1


@pytest.mark.parametrize("op_text", [*F32, "matmul:5x7x64:bf16:nk,bias,gelu_tanh", "matmul:5x7x64:f16:residual"])
def test_torch_computes_the_op_up_to_roundings_between_its_steps(op_text: str) -> None:
    pytest.importorskip("torch")
    norm = run(op_text, TorchMatmul(matmul(op_text), host_tensor), "normal")
    assert norm is not None
    assert norm <= (1 if ":f32" in op_text else STOCK_ERROR_NORM)


def test_torch_is_preferred_when_it_is_there() -> None:
    pytest.importorskip("torch")
    found = stock(parse_op(F32[0]), 1)
    assert found is not None
    assert found[0] == "torch"


@pytest.mark.slow
@pytest.mark.parametrize(
    "op_text",
    [
        "matmul:5x8x64:f32:nk,bias,gelu_tanh",
        "matmul:3x50x16:f32:residual,sum_squares",
        "geglu:5x8x64:f32:nk",
        "rms_norm:5x64:f32:residual",
        "softmax:5x64:f32",
        "rope:2x5x16:f32",
        "embedding:5x8x30:f32",
    ],
)
def test_what_torch_compiles_computes_the_op(op_text: str) -> None:
    pytest.importorskip("torch")
    found = stock(parse_op(op_text), 1, COMPILED)
    assert found is not None
    norm = run(op_text, found[1], "normal")
    assert found[0] == COMPILED
    assert norm is not None
    assert norm <= 1


def test_a_product_alone_is_not_compiled_and_no_op_has_a_rival_of_another_kind() -> None:
    pytest.importorskip("torch")
    assert stock(parse_op("matmul:5x8x64:f32"), 1, COMPILED) is None


def test_what_stock_rounds_between_stages_may_be_off_by_roundings_of_its_type_and_no_more() -> None:
    alone, added = parse_op("matmul:5x64x512:f16"), parse_op("matmul:5x64x512:f16:residual")
    assert stock_error_norm(alone) == STOCK_ERROR_NORM
    norm = run(added.key, TorchMatmul(matmul(added.key), host_tensor), "normal") if find_spec("torch") else 0.0
    assert norm is not None
    assert norm <= stock_error_norm(added)
    assert stock_error_norm(added) * added.tolerance()[0] < 0.02  # what computes something else is off by about 1


ROWS = [
    "rms_norm:5x33:f32", "rms_norm:5x64:f16:residual", "rstd:5x64:f16", "row_sum:5x64:f32", "softmax:5x64:f16", "scale:5x64:f16",
    "norm_scale:5x64:f16", "geglu_mul:5x64:f32", "swiglu_mul:5x64:bf16", "cast:5x64:f32:f16", "copy:5x64:bf16", "rope:2x5x16:f16",
    "norm_add_norm:5x64:f32:scale",
    "rope:2x5x16:f32:8", "embedding:5x8x30:f16", "formula:m=5,n=8;X[m,n]:f16;S[m]=max(n,X[m,n]);Y[m,n]:f16=X[m,n]-S[m]",
]  # fmt: skip


@pytest.mark.parametrize("op_text", ROWS)
def test_torch_computes_rows_and_copies_its_answer_only_when_it_is_checked(op_text: str) -> None:
    pytest.importorskip("torch")
    op = parse_op(op_text)
    found = stock(op, 1)
    assert found is not None and found[0] == "torch" and isinstance(op, FormulaOp)
    norm = run(op_text, found[1], "normal")
    assert norm is not None
    assert norm <= (1 if ":f32" in op_text else STOCK_ERROR_NORM)
    assert isinstance(found[1], TorchFormula) and found[1].results.checked


def test_results_that_torch_allocates_rotate_through_memory_as_operands_do() -> None:
    """A run that wrote where the last one wrote would find a warm cache, which a kernel with arrays of its own does not."""
    torch = pytest.importorskip("torch")
    made: list[int] = []

    def make() -> dict[str, torch.Tensor]:
        made.append((y := torch.full((256, 256), float(len(made)))).data_ptr())
        return {"Y": y}

    outputs, shared = [{"Y": torch.zeros(256, 256)} for _ in range(4)], Allocated()
    calls = [shared.call(make, x) for x in outputs]
    for call in calls * 2:
        call()
    assert len(set(made[:4])) == len(set(made[4:])) == 4
    assert [float(x["Y"].max()) for x in outputs] == [0.0] * 4 and shared.checked


@pytest.mark.slow
def test_a_kernel_compiled_ahead_is_found_by_the_process_that_measures(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    op, environment = "rms_norm:5x64:f32", inductor_cache(tmp_path)
    told: list[Warmed] = []
    asked = [(op, COMPILED), ("matmul:5x8x64:f32", AUTOTUNED), ("matmul:5x8x64:f32", COMPILED)]
    done = warm(asked, workers=2, threads=1, on_gpu=False, environment=environment, on_progress=told.append)
    assert sorted((w.op, w.against) for w in done) == sorted(asked) and not any(w.error for w in done) and told == done
    assert not (tmp_path / "inductor" / "cache").exists()  # what was chosen by timing
    script = (
        "import torch; torch.set_grad_enabled(False); torch.set_num_threads(1)\n"
        "from emmy.measure.stock_warm import _compile; from torch._dynamo.utils import counters\n"
        f"assert _compile({op!r}, {COMPILED!r}, 'cpu') == ''; print(dict(counters['inductor']))"
    )
    env = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    said = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True).stdout
    assert "'fxgraph_cache_hit': 1" in said


@pytest.mark.slow
def test_max_autotune_computes_a_product_alone_too() -> None:
    pytest.importorskip("torch")
    found = stock(parse_op("matmul:5x8x64:f32:nk"), 1, AUTOTUNED)
    assert found is not None and found[0] == AUTOTUNED
    norm = run("matmul:5x8x64:f32:nk", found[1], "normal")
    assert norm is not None and norm <= 1
