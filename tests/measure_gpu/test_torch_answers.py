"""Answers by torch: the same as the op's own, and as hard to please."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from emmy.ir.dtype import encode
from emmy.ir.ops import PagedAttention, Products, ServedAttention, parse_op
from emmy.measure import torch_answers
from emmy.measure.answers import HostAnswers
from emmy.measure.check import cases, operands
from emmy.measure.device import Buffer
from emmy.measure.guarded import guarded
from emmy.measure.references import Case, References
from emmy.measure.stock import host_tensor
from emmy.measure.torch_answers import Answered, TorchAnswers

torch = pytest.importorskip("torch")

OPS = [
    "matmul:33x20x48:f32",
    "matmul:8x24x16:bf16:nk,bias,gelu_tanh",
    "matmul:17x40x32:f16:nk,scale,residual,silu",
    "matmul:m(1..9)x8x16:f16:bias",
    "matmul:9x40x32:f16:nk,residual,sum_squares",
    "geglu:33x20x48:f32",
    "swiglu:m(1..9)x8x64:bf16:nk",
    "bmm:3x17x20x48:f16:nk",
    "bmm:2xm(1..9)x8x16:f32",
    "norm_linear:17x40x64:f16:nk",
    "norm_linear:m(1..9)x8x64:f32:residual",
    "geglu_linear:9x24x64:bf16:nk,residual",
    "swiglu_linear:33x20x48:f32",
    "paged_attention:3x4x5x12x8:f16:causal,window7,kv2,page4",
    "paged_attention:m(1..3)x2x1x9x8:f32:kv1,page4,k_is_v",
    "served_attention:m(1..3)x4x1x24x8:f32:kv2,window9,page8,pjgcd",
    "served_attention:2x4x5x24x8:f16:kv2,page8,len20,pgcdj,pgcjd",
]
ROWS = [
    "rms_norm:m(1..9)x20:f16:residual",
    "softmax:5x33:f32",
    "rstd:7x20:bf16",
    "rope:2x5x16:f16:8",
    "embedding:m(1..9)x8x30:f16",
    "formula:m=5,n=4,v=9;E[v,n]:f32:constant;i[m]:i32;j[m]:i32;Y[m,n]:f32=E[i[m],n]-E[j[m],n]+where(n<=1,E[8,n],silu(E[7,n]))",
]


def products(text: str) -> Answered:
    op = parse_op(text)
    assert isinstance(op, Answered)
    return op


def answers(text: str) -> TorchAnswers:
    return TorchAnswers(products(text), "cpu", host_tensor, 1 << 30)


def buffers(op: Answered, case: Case) -> dict[str, Buffer]:
    return {name: guarded(*form) for name, form in operands(op, case.sizes).items()}


def solve(op: Answered, held: Mapping[str, Buffer]) -> None:
    """Writes the right outputs for the inputs that the buffers hold."""
    inputs = {v.name: held[v.name].read() for v in op.program().inputs}
    for name, value in op.reference(inputs).items():
        held[name].write(encode(value, op.program().value(name).dtype))


@pytest.mark.parametrize("text", OPS + ROWS)
def test_the_ops_own_answers_are_right_in_every_case(text: str) -> None:
    op, by_torch = products(text), answers(text)
    for case in cases(op):
        held = buffers(op, case)
        by_torch.write(case, held)
        solve(op, held)
        verdict = by_torch.compare(case, held)
        assert verdict.wrong is None
        assert verdict.error_norm is not None
        assert verdict.error_norm <= 1
        assert by_torch.change(case, held) is None


@pytest.mark.parametrize("text", OPS)
def test_the_reference_is_the_ops_in_float64(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_answers, "CHUNK_ELEMENTS", 64)  # several pieces
    op = products(text)
    inputs = op.inputs("normal", 3, op.typical_sizes())
    tensors = {
        name: torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype == np.uint16 else torch.from_numpy(x)
        for name, x in inputs.items()
    }
    assert isinstance(op, Products | PagedAttention | ServedAttention)
    want, *_ = op.reference(inputs).values()
    np.testing.assert_allclose(torch_answers.reference(op, tensors).numpy(), want, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("text", ["matmul:256x256x64:f16:bias", "geglu:256x256x64:f16"])
def test_inputs_are_distributed_as_the_ops_own(text: str) -> None:
    op, by_torch = products(text), answers(text)
    for case in cases(op)[:2]:
        held = buffers(op, case)
        by_torch.write(case, held)
        for name, own in op.inputs(case.kind, 9).items():
            got = held[name].read().astype(np.float64)
            assert got.std() == pytest.approx(own.astype(np.float64).std(), rel=0.15)
            assert abs(got.mean()) < 0.3 * got.std()
            if case.kind == "integer":
                assert set(np.unique(got)) <= {-2, -1, 0, 1, 2}


DAMAGE = {
    "an element off": (lambda y: y.__setitem__((3, 5), y[3, 5] + np.float16(0.5)), "Y[3,5] is"),
    "not a number": (lambda y: y.__setitem__((7, 1), np.float16("nan")), "Y[7,1] is nan"),
    "the last row unwritten": (lambda y: y[-1:].view(np.uint8).fill(0xFF), "Y[16,0] was never written"),
}


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("chunk", [1 << 26, 64])
def test_a_wrong_element_is_found_wherever_it_is(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_answers, "CHUNK_ELEMENTS", chunk)
    damage, words = DAMAGE[name]
    op, by_torch = products(OPS[2]), answers(OPS[2])
    case = cases(op)[1]
    held = buffers(op, case)
    by_torch.write(case, held)
    solve(op, held)
    damage(held["Y"].read())  # type: ignore[no-untyped-call]
    verdict = by_torch.compare(case, held)
    assert verdict.wrong is not None
    assert verdict.wrong.startswith(words)


def test_a_changed_input_is_found(tmp_path: object) -> None:
    op, by_torch = products(OPS[1]), answers(OPS[1])
    case = cases(op)[0]
    held = buffers(op, case)
    by_torch.write(case, held)
    held["B"].read()[2, 7] ^= 1
    assert by_torch.change(case, held) == "input B was modified: the first change is at [2,7], 1 bytes in all"


def test_sums_in_f16_are_allowed_their_error_and_no_more(tmp_path: object) -> None:
    """On whole numbers such sums round once they are above 2048; f32 sums of them may not be off at all."""
    text = "matmul:64x64x4096:f16"
    op = products(text)
    case = cases(op)[0]
    host = HostAnswers(op, References(tmp_path), 1 << 30)  # type: ignore[arg-type]
    for own in (answers(text), host):
        held = buffers(op, case)
        own.prepare(case)
        own.write(case, held)
        solve(op, held)
        right = held["C"].read().copy()
        for off, sums, is_right in ((2, "f16", True), (2, "f32", False), (2, "hybrid", False), (300, "f16", False)):
            held["C"].write(right + np.float16(off))
            assert (own.compare(case, held, sums).wrong is None) == is_right, (type(own), off, sums)  # type: ignore[arg-type]
