"""An op as an operator of torch: right on tensors of any strides, known to Dynamo by shapes, without a gradient and saying so."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

import emmy
from emmy.dynamo import TorchOp, torch_op
from emmy.errors import NoSuchDevice, UsageError

TABLE = "m 1: k0/split(n,core,8) | m 2..40: k0/split(m,core,16)"


def linear(threads: int = 1) -> TorchOp:
    return torch_op("matmul:8x24x32:f32:nk,bias,silu", threads=threads, schedule="k0/split(n,core,8)")


def operands() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(8, 32), torch.randn(24, 32), torch.randn(24)


def right(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(torch.nn.functional.linear(a, b, c))


def test_it_computes_what_the_op_says_on_tensors_by_place_or_name() -> None:
    a, b, c = operands()
    op = linear()
    for y in (op(a, b, c), op(a, bias=c, B=b), op.overload(a, b, c)):
        torch.testing.assert_close(y, right(a, b, c))
    assert op.op.key == "matmul:8x24x32:f32:nk,bias,silu" and op.origin == "given" and len(op.schedules) == 1
    assert emmy.torch_op(op.op, threads=1, schedule="k0/split(n,core,8)") is op  # made once
    assert emmy.torch_op("matmul:8x24x32:f32", threads=1, near=False).origin == "default"


def test_torch_finds_nothing_wrong_with_the_operator() -> None:
    found = torch.library.opcheck(linear().overload, operands())
    assert set(found.values()) == {"SUCCESS"}


def test_strides_and_addresses_are_the_operators_own_business() -> None:
    a, b, c = operands()
    shifted = torch.empty(8 * 32 + 1)[1:].view(8, 32).copy_(a)
    y = linear()(shifted, b.t().contiguous().t(), c.repeat_interleave(2)[::2])
    torch.testing.assert_close(y, right(a, b, c))


@pytest.mark.slow
def test_threads_take_turns() -> None:
    a, b, c = operands()
    op, found = linear(2), list[torch.Tensor]()

    def work() -> None:
        found.extend(op(a, b, c) for _ in range(50))

    workers = [threading.Thread(target=work) for _ in range(3)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert len(found) == 150
    for y in found:
        torch.testing.assert_close(y, right(a, b, c))


@pytest.mark.slow
def test_several_outputs_are_a_tuple() -> None:
    a, b, _ = operands()
    y, squares = torch_op("matmul:8x24x32:f32:nk,sum_squares", threads=1)(a, b)
    torch.testing.assert_close(y, a @ b.t())
    torch.testing.assert_close(squares, (a @ b.t()).square().sum(1), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_open_size_stays_open_under_dynamo() -> None:
    op = torch_op("matmul:m(1..40)x24x32:f32:nk", schedule=TABLE, threads=1)
    assert len(op.schedules) == 2
    _, b, _ = operands()
    graphs = 0

    def counting(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        nonlocal graphs
        graphs += 1
        return gm.forward

    call = torch.compile(lambda x: op(x, b) * 2, dynamic=True, fullgraph=True, backend=counting)
    with torch.no_grad():
        for m in (3, 2, 40):
            x = torch.randn(m, 32)
            torch.testing.assert_close(call(x), 2 * x @ b.t())
    assert graphs == 1
    with pytest.raises(UsageError, match=r"A is torch.float32\[41, 32\] on cpu; it takes f32\[m\(1\.\.40\), 32\]"):
        op(torch.randn(41, 32), b)


def test_a_tensor_that_requires_a_gradient_is_refused_with_the_way_out() -> None:
    a, b, c = operands()
    with pytest.raises(UsageError, match=r"requires a gradient.*torch\.no_grad"):
        linear()(a.requires_grad_(), b, c)
    with torch.no_grad():
        torch.testing.assert_close(linear()(a, b, c), right(a, b, c))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda a, b, c: (a.half(), b, c), r"A is torch.float16\[8, 32\]"),
        (lambda a, b, c: (a, b[:-1], c), r"B is torch.float32\[23, 32\] on cpu; it takes f32\[24, 32\]"),
        (lambda a, b, c: (a, b.to("meta"), c), "B is .* on meta"),
        (lambda a, b, c: (a, b), "got 2 tensors; it takes 3: A, B, bias"),
    ],
)
def test_tensors_of_another_form_are_refused_by_name(change: object, says: str) -> None:
    assert callable(change)
    with pytest.raises(UsageError, match=says):
        linear()(*change(*operands()))
    with pytest.raises(UsageError, match="by name it takes bias"):
        a, b, c = operands()
        linear()(a, b, C=c)


def test_positions_outside_of_a_table_are_refused_as_torch_refuses_them() -> None:
    op, e = torch_op("embedding:m(1..9)x16x7:f32", threads=1), torch.randn(7, 16)
    ids = torch.tensor([0, 6, 3], dtype=torch.int32)
    torch.testing.assert_close(op(ids, e), 4 * torch.nn.functional.embedding(ids, e))
    for bad in (7, -1):
        ids[1] = bad
        with pytest.raises(UsageError, match=f"ids: position {bad} of E along v, which has positions 0..6"):
            op(ids, e)
    nested = torch_op("formula:m=3,n=16,v=7;ids[v]:i32;E[v,n]:f32;Y[m,n]:f32=E[ids[m+1]-1,n]", threads=1)
    ids = torch.tensor([9, 1, 7, 3, 9, 9, 9], dtype=torch.int32)
    torch.testing.assert_close(nested(ids, e), e[[0, 6, 2]])
    ids[3] = 0
    with pytest.raises(UsageError, match="position -1 of E"):
        nested(ids, e)


def test_an_op_for_a_gpu_does_not_take_tensors_of_the_cpu() -> None:
    op = torch_op("matmul:128x128x64:f16:nk", gpu="h200")
    with pytest.raises(NoSuchDevice, match="made for h200; tensors are on cpu"):
        op(torch.zeros(128, 64).half(), torch.zeros(128, 64).half())


def test_an_op_that_was_never_tuned_takes_the_winner_of_a_near_one(monkeypatch: pytest.MonkeyPatch) -> None:
    winners = (
        ("matmul:8x24x48:f32:nk", "k0/split(n,core,6)"),
        ("matmul:8x24x40:f32:nk", "k0/split(m,core,5)"),
        ("matmul:8x24x33:f32:nk", "k0/split(q,core,2)"),  # refused
        ("geglu:8x24x32:f32:nk", "k0/split(m,core,1)"),
    )
    monkeypatch.setattr("emmy.lookup.fastest", lambda snapshot, target, threads: winners)
    op = torch_op("matmul:8x24x32:f32:nk,scale", threads=1)
    assert (op.schedules, op.origin) == (("k0/split(m,core,5)",), "near, the winner of matmul:8x24x40:f32:nk")
    a, b, _ = operands()
    torch.testing.assert_close(op(a, b, torch.tensor(0.5)), 0.5 * a @ b.t())


def test_importing_emmy_does_not_import_torch() -> None:
    script = "import sys, emmy, emmy.api, emmy.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
