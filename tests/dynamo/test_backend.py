"""torch.compile(backend="emmy"): which kernels a graph becomes, what is left and why, and that the answers are torch's."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import emmy
from emmy.dynamo import CompiledModule, TorchOp, reports
from emmy.dynamo.attentions import find_attentions
from emmy.errors import UsageError

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def weights(*shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(s) / s[-1] ** 0.5 for s in shapes]


W = dict(zip("gudqm", weights((48, 32), (48, 32), (32, 48), (32, 32), (96, 32)), strict=True))
W |= dict(zip(("bias", "norm"), weights((32,), (32,)), strict=True))
CAST = {(name, dtype): w.to(dtype) for name, w in W.items() for dtype in TOLERANCE}


def of(name: str, x: Tensor) -> Tensor:
    return CAST[name, x.dtype]


def norm(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * of("norm", x).float()).type_as(x)


def merged(x: Tensor) -> Tensor:
    gate, up = F.linear(x, of("m", x)).chunk(2, -1)
    return F.silu(gate) * up


def merged_by_slices(x: Tensor) -> Tensor:
    y = F.linear(x, of("m", x))
    return y[..., 48:] * F.gelu(y[..., :48], approximate="tanh")


# name -> (function of x[2,5,32], op keys with the dtype left open)
GRAPHS: dict[str, tuple[Callable[[Tensor], object], list[str]]] = {
    "a linear": (lambda x: F.linear(x, of("q", x)), ["matmul:10x32x32:{}:nk"]),
    "a linear with bias, activation, scale, residual": (
        lambda x: F.silu(F.linear(x, of("q", x), of("bias", x))) * 0.5 + x,
        ["matmul:10x32x32:{}:nk,bias,silu,scale,residual"],
    ),
    "a product with a matrix": (lambda x: x[0] @ of("q", x), ["matmul:5x32x32:{}"]),
    "a bias that is added": (lambda x: F.linear(x, of("q", x)) + of("bias", x), ["matmul:10x32x32:{}:nk,bias"]),
    "a gated pair": (
        lambda x: F.gelu(F.linear(x, of("g", x)), approximate="tanh") * F.linear(x, of("u", x)),
        ["geglu:10x48x32:{}:nk"],
    ),
    "a gated pair in one weight": (merged, ["swiglu:10x48x32:{}:nk"]),
    "a gated pair in one weight, by slices": (merged_by_slices, ["geglu:10x48x32:{}:nk"]),
    "a norm": (norm, ["rms_norm:10x32:{}"]),
    "torch's norm": (lambda x: F.rms_norm(x, (32,), of("norm", x), 1e-6), ["rms_norm:10x32:{}"]),
    "a residual and its norm": (
        lambda x: ((h := x + x.flip(0)), norm(h)),
        ["rms_norm:10x32:{}:residual"],
    ),
    "a softmax": (lambda x: F.softmax(x, -1), ["softmax:10x32:{}"]),
    "a gated product": (lambda x: F.silu(x) * x.flip(0), ["swiglu_mul:10x32:{}"]),
    "a chain": (
        lambda x: torch.exp(-x * x) * torch.tanh(x) + 1,
        ["formula:m=10,n=32;X0[m,n]:{0};Y0[m,n]:{0}=exp(-X0[m,n]*X0[m,n])*tanh(X0[m,n])+1"],
    ),
    "a reduction and what is made of it": (
        lambda x: x - x.amax(-1, keepdim=True),
        ["formula:m=10,n=32;X0[m,n]:{0};S0[m]=max(n,X0[m,n]);Y0[m,n]:{0}=X0[m,n]-S0[m]"],
    ),
}


def compiled(f: Callable[..., object], *inputs: object, **options: object) -> CompiledModule:
    torch._dynamo.reset()
    return emmy.compile(f, inputs, threads=1, **options)  # type: ignore[arg-type]


def close(got: object, want: object, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


QUICK = ("a linear", "a norm")  # in the first tier: each kernel is compiled


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in GRAPHS])
@pytest.mark.parametrize(
    "dtype", [torch.float32, *(pytest.param(d, marks=pytest.mark.slow) for d in (torch.float16, torch.bfloat16))]
)
def test_a_graph_becomes_kernels_with_torchs_answers(name: str, dtype: torch.dtype) -> None:
    f, keys = GRAPHS[name]
    torch.manual_seed(2)
    x = torch.randn(2, 5, 32).to(dtype)
    call = compiled(f, x, check=True)
    with torch.no_grad():
        close(call(x), f(x), dtype)
    (report,) = call.reports
    short = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}[dtype]
    assert [k.op for k in report.kernels] == [k.format(short) for k in keys]
    assert not report.wrong and len(report.checked) == len(keys)
    assert all(f.operator == "aten.flip" for f in report.fallbacks)


def test_rounding_to_a_coarser_type_is_kept() -> None:
    def pieces(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        high = x.bfloat16().float()
        return high, (x - high) * 256

    x = torch.tensor([[1e5, 3.14159, 1e-9, -7e4]])
    with torch.no_grad():
        for got, want in zip(compiled(pieces, x)(x), pieces(x), strict=True):
            close(got, want, torch.float32)


def test_what_is_left_to_torch_is_named_with_a_reason() -> None:
    def f(x: Tensor) -> Tensor:
        y = F.linear(x, W["q"]).double()
        return (
            torch.cumsum(y @ W["q"].double(), -1)
            + torch.bmm(x, x.transpose(1, 2)).sum()
            + F.linear(x[..., :0], W["q"][:, :0])
        )

    call = compiled(f, torch.randn(2, 5, 32))
    (report,) = call.reports
    reasons = {x.operator: x.reason for x in report.fallbacks}
    assert reasons["aten.bmm"] == "products in batches are not looked for"
    assert reasons["aten.cumsum"] == "no op of Emmy's computes it"
    assert reasons["aten.mm"] in (
        "it is empty",
        "torch.float64 with sizes 10x32: f32, f16 or bf16 of known sizes is needed",
    )
    assert [k.op for k in report.kernels] == ["matmul:10x32x32:f32:nk"]
    text = str(report)
    assert "1 kernels of Emmy for cpu" in text and "torch: 1 x aten.bmm: products in batches" in text


@pytest.mark.slow
def test_a_result_that_is_read_elsewhere_is_not_swallowed() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = F.linear(x, W["g"]), F.linear(x, W["u"])
        return F.silu(gate) * up, gate

    x = torch.randn(2, 5, 32)
    call = compiled(f, x)
    close(call(x), f(x), torch.float32)
    assert [k.op for k in call.reports[0].kernels] == ["matmul:10x48x32:f32:nk"] * 2 + ["swiglu_mul:10x48:f32"]


@pytest.mark.slow
def test_a_chain_does_not_close_over_what_torch_computes_in_between() -> None:
    def f(x: Tensor) -> Tensor:
        a = torch.tanh(x) * 2
        return a + torch.cumsum(torch.exp(a), -1)

    x = torch.randn(2, 5, 32)
    call = compiled(f, x)
    close(call(x), f(x), torch.float32)
    assert [x.operator for x in call.reports[0].fallbacks] == ["aten.cumsum", "aten.add"]


@pytest.mark.slow
def test_an_input_that_is_changed_in_place_is_changed() -> None:
    def f(x: Tensor) -> Tensor:
        x.mul_(2).add_(1)
        return F.linear(x, W["q"])

    x = torch.randn(2, 5, 32)
    call, y = compiled(f, x.clone()), x.clone()
    close(call(y), F.linear(2 * x + 1, W["q"]), torch.float32)
    close(y, 2 * x + 1, torch.float32)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_sizes_that_dynamo_leaves_open_get_kernels_when_they_come_and_torch_has_the_rest() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.cat((F.silu(F.linear(x, W["q"])), x), -1)

    call = emmy.compile(f, gpu="cpu", threads=1, dynamic=True, sizes=2)
    for m in (7, 9, 7, 5, 6, 9):
        x = torch.randn(m, 32)
        close(call(x), f(x), torch.float32)
    kernels = [[k.op for k in r.kernels] for r in call.reports]
    assert kernels == [["matmul:7x32x32:f32:nk,silu"], ["matmul:9x32x32:f32:nk,silu"], []]
    assert all("`sizes`" in f.reason or "known sizes" in f.reason for f in call.reports[-1].fallbacks)


@pytest.mark.slow
def test_sizes_that_follow_from_numbers_are_left_to_torch() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        call = emmy.compile(lambda x: F.linear(x[x[:, 0] > 0], W["q"]), gpu="cpu", threads=1, dynamic=True)
        for seed in range(3):
            x = torch.randn(9, 32, generator=torch.Generator().manual_seed(seed))
            close(call(x), F.linear(x[x[:, 0] > 0], W["q"]), torch.float32)
    assert len(call.reports) == 1 and not call.reports[0].kernels


def test_the_self_check_gives_a_wrong_kernel_back_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = TorchOp.__call__

    def wrong(self: TorchOp, *tensors: Tensor) -> object:
        y = right(self, *tensors)
        if self.op.kind == "matmul":
            assert isinstance(y, Tensor)
            y.view(-1)[-1] += 0.01
        return y

    monkeypatch.setattr(TorchOp, "__call__", wrong)
    x = torch.randn(2, 5, 32)
    with caplog.at_level(logging.ERROR, "emmy.dynamo"):
        call = compiled(lambda x: norm(F.linear(x, W["q"])), x, check=True)
    (report,) = call.reports
    assert [k.op for k in report.kernels] == ["rms_norm:10x32:f32"]
    assert len(report.wrong) == 1 and "matmul:10x32x32:f32:nk" in report.wrong[0] and "WRONG" in str(report)
    assert [f.reason for f in report.fallbacks] == ["its kernel's answer was wrong"]
    assert "wrong answer" in caplog.text
    monkeypatch.undo()
    close(call(x), norm(F.linear(x, W["q"])), torch.float32)


def test_a_kernel_that_cannot_be_made_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: TorchOp, device: torch.device) -> None:
        raise UsageError("no such thing")

    monkeypatch.setattr(TorchOp, "prepare", refuse)
    x = torch.randn(2, 5, 32)
    call = compiled(lambda x: F.linear(x, W["q"]), x)
    close(call(x), F.linear(x, W["q"]), torch.float32)
    assert [f.reason for f in call.reports[0].fallbacks] == ["no kernel of matmul:10x32x32:f32:nk: no such thing"]


@pytest.mark.slow
def test_parameters_that_require_gradients_are_refused_with_the_way_out() -> None:
    torch._dynamo.reset()
    layer = nn.Linear(32, 32, bias=False)
    call = torch.compile(layer, backend="emmy", options={"threads": 1})
    with pytest.raises(Exception, match=r"requires a gradient.*torch\.no_grad"):
        call(torch.randn(4, 32))
    with torch.no_grad():
        close(call(torch.ones(4, 32)), layer(torch.ones(4, 32)), torch.float32)
    assert reports()[-1].kernels[-1].op == "matmul:4x32x32:f32:nk"


def test_an_option_that_is_unknown_is_refused() -> None:
    torch._dynamo.reset()
    call = torch.compile(lambda x: x * 2, backend="emmy", options={"gpus": "h200"})
    with pytest.raises(Exception, match="options of the backend are gpu, threads, check"), torch.no_grad():
        call(torch.ones(4))


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_is_a_kernel_where_that_is_asked_for(kv_heads: int) -> None:
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, 6, h, 16).transpose(1, 2) for h in (4, kv_heads, kv_heads))

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        causal = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return causal + F.scaled_dot_product_attention(q, k[:, :, :5], v[:, :, :5], scale=0.5, enable_gqa=True)

    call = compiled(f, q, k, v, attention="always", check=True)
    close(call(q, k, v), f(q, k, v), torch.float32)
    (report,) = call.reports
    group = "" if kv_heads == 4 else ",kv4"
    assert [x.op for x in report.kernels] == [
        f"attention:8x6x6x16:f32:causal{group}",
        f"attention:8x6x5x16:f32:{group[1:]}{',' * bool(group)}scale0.5",
    ]
    assert len(report.checked) == 2
    left = compiled(f, q, k, v).reports[0].fallbacks
    assert sum("no measured schedule is stored" in x.reason for x in left) == 2


@pytest.mark.parametrize(
    ("scale", "found"),
    [
        (0.0, "a scale of 0"),
        (-1.0, "scale is -1, allowed"),
        (None, "attention:2x6x6x16:f32"),
        (0.5, "attention:2x6x6x16:f32:scale0.5"),
    ],
)
def test_a_scale_that_is_no_attention_of_emmys_is_left_to_torch(scale: float | None, found: str) -> None:
    q = torch.randn(1, 2, 6, 16)
    traced = make_fx(lambda q: F.scaled_dot_product_attention(q, q, q, scale=scale), tracing_mode="fake")(q)
    traced.graph.eliminate_dead_code()
    (group,) = find_attentions(traced.graph)
    assert found in (group[1] if isinstance(group, tuple) else group.op.key)


@pytest.mark.slow
def test_inductor_may_run_the_rest() -> None:
    x = torch.randn(2, 5, 32)

    def f(x: Tensor) -> Tensor:
        return torch.cumsum(F.silu(F.linear(x, W["q"])), -1).sin() + x

    call = compiled(f, x, rest="inductor")
    close(call(x), f(x), torch.float32)
    assert [k.op for k in call.reports[0].kernels] == ["matmul:10x32x32:f32:nk,silu"]
    with pytest.raises(Exception, match="rest is 'nobody'; allowed are torch, inductor"):
        compiled(f, x, rest="nobody")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoder_layer_of_gemma_4s_form_has_eagers_answer(dtype: torch.dtype) -> None:
    from experiments.decoder_layer import Sizes, layer_and_inputs

    layer, inputs = layer_and_inputs(Sizes(64, 96, 4, 2, 16), 9, dtype, "cpu")
    call = compiled(layer, *inputs, check=True)
    close(call(*inputs), layer(*inputs), dtype)
    (report,) = call.reports
    kinds = [k.op.partition(":")[0] for k in report.kernels]
    assert (kinds.count("geglu"), kinds.count("matmul")) == (1, 5)
    assert kinds.count("rms_norm") == 3
    assert len(report.checked) == len(report.kernels) and not report.wrong
    assert {f.operator for f in report.fallbacks} <= {
        "aten.cat",
        "aten.neg",
        "aten._scaled_dot_product_flash_attention_for_cpu",
    }
