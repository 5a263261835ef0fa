"""Chains are found in graphs as torch's compiler makes them, whatever their spelling, and only where they are a kernel of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import fx
from torch._decomp import get_decompositions
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from emmy_vllm.chains import Chain, Form, Part, chains, form_of

N, K, M = 24, 16, 7
Tensor = torch.Tensor
_spaces: list[torch.library.Library] = []


@cache
def ir() -> object:
    """vLLM's norms, which graphs hold as they are; without vLLM operators of the same form."""
    if not hasattr(torch.ops.vllm_ir, "rms_norm"):
        space = torch.library.Library("vllm_ir", "FRAGMENT")
        space.define("rms_norm(Tensor x, Tensor? weight, float epsilon, int? variance_size=None) -> Tensor")
        space.define(
            "fused_add_rms_norm(Tensor x, Tensor x_residual, Tensor? weight, float epsilon, int? variance_size=None) -> (Tensor, Tensor)"
        )
        space.impl("rms_norm", lambda x, w, e, v=None: torch.empty_like(x), "CompositeExplicitAutograd")
        both = lambda x, r, w, e, v=None: (torch.empty_like(x), torch.empty_like(x))  # noqa: E731
        space.impl("fused_add_rms_norm", both, "CompositeExplicitAutograd")
        _spaces.append(space)
    return torch.ops.vllm_ir


def graph_of(
    f: Callable[..., object], *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, inductor: bool = False
) -> fx.Graph:
    """What the compiler has of a function; activations as torch spells them out, or as its compiler does."""
    ir()
    if inductor:
        from torch._inductor.decomposition import select_decomp_table  # takes seconds to import

        spelled = select_decomp_table()
    else:
        aten = torch.ops.aten
        spelled = get_decompositions([aten.gelu, aten.silu, aten.t, aten.linear])
    inputs = [torch.zeros(s, dtype=dtype) for s in shapes]
    graph = make_fx(f, decomposition_table=spelled, tracing_mode="fake")(*inputs).graph
    graph.eliminate_dead_code()  # as the compiler does before
    return graph


def found(f: Callable[..., object], *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[Chain]:
    return list(chains(graph_of(f, *shapes, dtype=dtype)))


def norm(x: Tensor, w: Tensor | None, eps: float = 1e-6) -> Tensor:
    return torch.ops.vllm_ir.rms_norm(x, w, eps)


def add_norm(x: Tensor, r: Tensor, w: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    return torch.ops.vllm_ir.fused_add_rms_norm(x, r, w, eps)


def gated(act: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def f(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w.t()
        return act(y[..., :N]) * y[..., N:]

    return f


def tanh_gelu(g: Tensor) -> Tensor:
    return functional.gelu(g, approximate="tanh")


# ---------------------------------------------------------------- gated pairs
@pytest.mark.parametrize("inductor", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("kind", "act"), [("geglu", tanh_gelu), ("swiglu", functional.silu)])
def test_a_gated_pair_is_found_by_what_it_computes(
    kind: str, act: Callable[[Tensor], Tensor], dtype: torch.dtype, inductor: bool
) -> None:
    (chain,) = chains(graph_of(gated(act), (M, K), (2 * N, K), dtype=dtype, inductor=inductor))
    short = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}[dtype]
    assert chain.form == Form(kind, (N, K), short) == form_of(f"{kind}:m(1..8)x{N}x{K}:{short}:nk")
    gate, up = chain.inputs["G"], chain.inputs["U"]
    assert isinstance(gate, Part) and isinstance(up, Part) and gate.of is up.of
    assert (gate.lo, gate.hi, up.lo, up.hi) == (0, N, N, 2 * N)


def test_other_spellings_of_an_activation_are_the_same_chain() -> None:
    def by_hand(x: Tensor, w: Tensor) -> Tensor:
        gate, up = (x @ w.t())[:, :N], (x @ w.t())[:, N:]
        return up * (gate * torch.sigmoid(gate))

    assert found(by_hand, (M, K), (2 * N, K), dtype=torch.float32) == []  # two products, before they are made one
    y = gated(lambda g: g * (1 / (1 + torch.exp(-g))))
    assert [c.form.kind for c in found(y, (M, K), (2 * N, K), dtype=torch.float32)] == ["swiglu"]


@pytest.mark.parametrize(
    "act",
    [functional.gelu, functional.relu, torch.tanh, lambda g: functional.silu(1.01 * g), lambda g: g],
    ids=["gelu by erf", "relu", "tanh", "a scaled silu", "nothing"],
)
def test_another_activation_is_no_chain(act: Callable[[Tensor], Tensor]) -> None:
    assert found(gated(act), (M, K), (2 * N, K)) == []


def test_a_product_that_something_else_reads_too_is_left_alone() -> None:
    def whole(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ w.t()
        return tanh_gelu(y[:, :N]) * y[:, N:], y

    def gate(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ w.t()
        return functional.silu(y[:, :N]) * y[:, N:], y[:, :N]

    def uneven(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w.t()
        return functional.silu(y[:, 2 : N + 2]) * y[:, N:]

    def turned(x: Tensor, w: Tensor) -> Tensor:  # the gate's rows behind those it gates
        y = x @ w.t()
        return functional.silu(y[:, N:]) * y[:, :N]

    for f in (whole, gate, uneven, turned):
        assert found(f, (M, K), (2 * N, K)) == []


def test_a_bias_or_a_weight_in_another_layout_is_left_alone() -> None:
    def biased(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = functional.linear(x, w, b)
        return functional.silu(y[:, :N]) * y[:, N:]

    def plain(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        return functional.silu(y[:, :N]) * y[:, N:]

    assert found(biased, (M, K), (2 * N, K), (2 * N,)) == []
    assert found(plain, (M, K), (K, 2 * N)) == []


# ---------------------------------------------------------------- norms
def llama(x: Tensor, r: Tensor, w: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """A product, the sum with what was before it, a norm, and the next product."""
    y, h = add_norm(x @ a.t(), r, w)
    return y @ b.t(), h


def gemma(x: Tensor, r: Tensor, v: Tensor, w: Tensor, a: Tensor, b: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """A block's end is normed before the sum, as its beginning is; then the layer's scale."""
    h = (norm(x @ a.t(), v) + r) * s
    return norm(h, w) @ b.t(), h


SQUARE = (K, K)
GEMMA = ((M, K), (M, K), (K,), (K,), SQUARE, SQUARE, (1,))


def test_a_sum_and_norm_between_products_are_one_op() -> None:
    (chain,) = found(llama, (M, K), (M, K), (K,), SQUARE, SQUARE)
    assert chain.form == form_of(f"rms_norm:m(1..8)x{K}:bf16:residual")
    assert set(chain.inputs) == {"X", "R", "w"} and set(chain.outputs) == {"H", "Y"}


def test_norms_on_both_sides_of_a_sum_are_one_op() -> None:
    (chain,) = found(gemma, *GEMMA)
    assert chain.form == form_of(f"norm_add_norm:m(1..8)x{K}:bf16:scale")

    def unscaled(x: Tensor, r: Tensor, v: Tensor, w: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        h = r + norm(x @ a.t(), v)
        return norm(h, w) @ b.t(), h

    (chain,) = found(unscaled, *GEMMA[:-1])
    assert chain.form == form_of(f"norm_add_norm:m(1..8)x{K}:bf16")

    def by_vllm(x: Tensor, r: Tensor, v: Tensor, w: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        y, h = add_norm(norm(x @ a.t(), v), r, w)
        return y @ b.t(), h

    (chain,) = found(by_vllm, *GEMMA[:-1])
    assert chain.form == form_of(f"norm_add_norm:m(1..8)x{K}:bf16")


def test_a_norm_between_products_is_found_and_one_that_the_compiler_fuses_is_not() -> None:
    (chain,) = found(lambda x, w, a, b: norm(x @ a.t(), w) @ b.t(), (M, K), (K,), SQUARE, SQUARE)
    assert chain.form == form_of(f"rms_norm:m(1..8)x{K}:bf16")
    assert found(lambda x, w, a: norm(x * 2, w) @ a.t(), (M, K), (K,), SQUARE) == []  # with what makes its input
    assert found(lambda x, w: norm(x, w) * 2, (M, K), (K,)) == []  # with what reads it
    heads = lambda x, w, a: norm((x @ a.t()).view(-1, 4), w)  # noqa: E731
    assert [c.form.sizes for c in found(heads, (M, K), (4,), SQUARE)] == [(4,)]


def test_a_norm_of_another_kind_is_left_alone() -> None:
    assert found(lambda x, w: norm(x, w, 1e-5), (M, K), (K,)) == []  # Emmy's epsilon is 1e-6
    assert found(lambda x: norm(x, None), (M, K)) == []
    assert found(lambda x, w: norm(x, 1 + w), (M, K), (K,)) == []  # the compiler makes the weight on the way
    partly = lambda x, w: torch.ops.vllm_ir.rms_norm(x, w, 1e-6, 8)  # noqa: E731
    assert found(partly, (M, K), (K,)) == []


def test_a_sum_that_the_compilers_kernel_works_on_too_is_left_alone() -> None:
    def read(x: Tensor, r: Tensor, w: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        y, h = add_norm(x @ a.t(), r, w)
        return y @ b.t(), h * 2

    def made(x: Tensor, r: Tensor, w: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        y, h = add_norm(x @ a.t(), r * 2, w)
        return y @ b.t(), h

    for f in (read, made):
        assert found(f, (M, K), (M, K), (K,), SQUARE, SQUARE) == []


def test_a_sum_that_is_read_again_behind_a_later_product_is_a_chain_each_time() -> None:
    def two(x: Tensor, r: Tensor, w: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        y, h = add_norm(x @ a.t(), r, w)
        return add_norm(y @ b.t(), h, w)

    assert len(found(two, (M, K), (M, K), (K,), SQUARE, SQUARE)) == 2
