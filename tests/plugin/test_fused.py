"""The pass on graphs, with kernels of a CPU pack: the same numbers after, and nothing touched that the pack does not serve."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from emmy.ir.ops import parse_op
from emmy_vllm.fusion import Fusion, load
from emmy_vllm.kernels import Kernels, Table
from emmy_vllm.torch_made import made_by_torch
from tests.plugin import test_chains as graphs
from tests.plugin.test_ranges import WON, offer, settings

pytestmark = pytest.mark.slow  # the operators are compiled: 20 s
N, K = graphs.N, graphs.K
SQUARE = (K, K)
OPS = (
    f"geglu:m(1..64)x{N}x{K}:f32:nk", f"swiglu:m(1..64)x{N}x{K}:f32:nk", f"rms_norm:m(1..64)x{K}:f32",
    f"rms_norm:m(1..64)x{K}:f32:residual", f"norm_add_norm:m(1..64)x{K}:f32", f"norm_add_norm:m(1..64)x{K}:f32:scale",
)  # fmt: skip
BLOCKS: Mapping[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "geglu": (graphs.gated(graphs.tanh_gelu), ((7, K), (2 * N, K))),
    "swiglu": (graphs.gated(torch.nn.functional.silu), ((7, K), (2 * N, K))),
    "rms_norm": (lambda x, w, a: graphs.norm(x, w) @ a.t(), ((7, K), (K,), SQUARE)),
    "rms_norm:residual": (graphs.llama, ((7, K), (7, K), (K,), SQUARE, SQUARE)),
    "norm_add_norm:scale": (graphs.gemma, ((7, K), (7, K), (K,), (K,), SQUARE, SQUARE, (1,))),
}


@pytest.fixture
def kernels(tmp_path: Path) -> Kernels:
    """Everything at 1..8 and 17..64 rows, loaded for a model with these widths."""
    spans = ((1, 8, WON), (9, 16, None), (17, 64, WON))
    made = Kernels(settings(tmp_path / "p", *(offer(op, *spans) for op in OPS)), "test")
    for shape in ((2 * N, K), SQUARE):
        made.note(torch.zeros(shape), "layer")
    load(made, 64)
    return made


def numbers(shapes: tuple[tuple[int, ...], ...], rows: int = 7) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn([rows if d == 7 else d for d in s], generator=generator) for s in shapes]


def vllm_norms(graph: fx.Graph) -> fx.GraphModule:
    """The graph with vLLM's norms by torch's own, to be run without vLLM."""
    made = fx.GraphModule(torch.nn.Module(), graph)
    for node in made.graph.nodes:
        if str(node.target) == "vllm_ir.rms_norm.default":
            node.target = lambda x, w, e: torch.nn.functional.rms_norm(x, (x.shape[-1],), w, e)
        elif str(node.target) == "vllm_ir.fused_add_rms_norm.default":
            node.target = lambda x, r, w, e: (torch.nn.functional.rms_norm(x + r, (x.shape[-1],), w, e), x + r)
    made.recompile()
    return made


def calls(graph: fx.Graph) -> int:
    return sum(str(n.target) == "emmy.fused.default" for n in graph.nodes)


@pytest.mark.parametrize("block", BLOCKS)
def test_a_replaced_chain_computes_the_same(block: str, kernels: Kernels) -> None:
    f, shapes = BLOCKS[block]
    graph = graphs.graph_of(f, *shapes, dtype=torch.float32)
    stock = vllm_norms(graphs.graph_of(f, *shapes, dtype=torch.float32))
    Fusion(kernels)(graph, 1, 8)
    graph.lint()
    assert calls(graph) == 1
    x = numbers(shapes)
    for got, want in zip(flat(vllm_norms(graph)(*x)), flat(stock(*x)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    (table,) = [t for t in kernels.tables.values() if sum(t.counts.values())]
    assert table.counts.values() == (0, 1, 0, 0)


def flat(x: Any) -> list[torch.Tensor]:
    return list(x) if isinstance(x, tuple | list) else [x]


@pytest.mark.parametrize("rows", [(1, 64), (9, 16), (8, 17), (1, 9)])
def test_a_range_that_the_pack_serves_in_part_is_left_as_it_is(rows: tuple[int, int], kernels: Kernels) -> None:
    f, shapes = BLOCKS["norm_add_norm:scale"]
    graph = graphs.graph_of(f, *shapes, dtype=torch.float32)
    before, run = str(graph), Fusion(kernels)
    run(graph, *rows)
    assert str(graph) == before
    (line,) = kernels.graphs
    assert f"rows {rows[0]}..{rows[1]}: left to the compiler: the pack serves 1..8, 17..64" in line


def test_a_chain_that_the_pack_lacks_is_left_as_it_is(tmp_path: Path) -> None:
    few = Kernels(settings(tmp_path / "p", offer(OPS[1], (1, 64, WON))), "test")
    few.note(torch.zeros(2 * N, K), "layer")
    load(few, 64)
    graph = graphs.graph_of(*BLOCKS["geglu"][:1], *BLOCKS["geglu"][1], dtype=torch.float32)
    before = str(graph)
    Fusion(few)(graph, 1, 8)
    assert str(graph) == before


def test_sizes_that_a_table_leaves_are_torchs_and_counted_so(kernels: Kernels) -> None:
    for text, table in kernels.tables.items():
        op = parse_op(text)
        program = op.program()
        sizes = {"m": 12, "n": table.case.arguments[-1].shape[-1]} | ({"k": K} if "k" in dict(program.dims) else {})
        x = {v.name: torch.randn([sizes[a] for a in v.axes]) for v in program.inputs}
        got = torch.ops.emmy.fused(list(x.values()), table.number)
        for a, b in zip(got, made_by_torch(op, x).values(), strict=True):
            torch.testing.assert_close(a, b)
        assert table.counts.values() == (1, 0, 0, 0)


def test_inputs_of_another_form_are_torchs(kernels: Kernels) -> None:
    (table,) = [t for op, t in kernels.tables.items() if op.startswith("rms_norm") and not op.endswith("residual")]
    x, w = torch.randn(K, 4).t(), torch.randn(K)
    (got,) = torch.ops.emmy.fused([x, w], table.number)
    torch.testing.assert_close(got, torch.nn.functional.rms_norm(x, (K,), w, 1e-6))
    assert table.counts.values() == (1, 0, 0, 0)


def test_a_wrong_kernel_is_found_before_a_graph_is_made(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import emmy_vllm.fusion as fusion

    monkeypatch.setattr(fusion, "made_by_torch", lambda op, x: {k: v + 0.1 for k, v in made_by_torch(op, x).items()})
    again = Kernels(settings(tmp_path / "q", offer(OPS[3], (1, 64, WON))), "test")
    again.note(torch.zeros(SQUARE), "layer")
    load(again, 64)
    (table,) = again.tables.values()
    assert isinstance(table, Table) and not any(map(table.serves, table.case.ranges))
    assert "times what is allowed" in table.refused[1]
    graph = graphs.graph_of(*BLOCKS["rms_norm:residual"][:1], *BLOCKS["rms_norm:residual"][1], dtype=torch.float32)
    Fusion(again)(graph, 1, 8)
    assert calls(graph) == 0


def test_the_key_follows_the_pack_and_what_was_refused(kernels: Kernels, tmp_path: Path) -> None:
    one = Fusion(kernels).uuid
    assert Fusion(kernels).uuid == one
    other = Kernels(settings(tmp_path / "q", offer(OPS[0], (1, 64, WON))), "test")
    assert Fusion(other).uuid != one
    next(iter(kernels.tables.values())).refused[1] = "wrong"
    assert Fusion(kernels).uuid != one
