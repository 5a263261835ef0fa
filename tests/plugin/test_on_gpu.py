"""The operators on a real GPU: torch's current stream, captured graphs, workspaces across streams, the deterministic lane."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from emmy.ir.ops import parse_op
from emmy.measure.cuda import target_of
from emmy.pack import Choice, Offer, Pack
from emmy.runtime.cuda_driver import gpus
from emmy_vllm.kernels import Kernels, Table
from emmy_vllm.settings import Settings
from tests.vllm import packs

pytestmark = pytest.mark.gpu
N, K, ROWS = 256, 512, 256
TILE = (
    "k0/split(m,grid,64) k0/split(n,grid,64) k0/split(k,serial,32) k0/split(m,warp,32) k0/split(n,warp,32) "
    "k0/stage(A,cp_async,3) k0/stage(B,cp_async,3) k0.C/atom(mma,16,8,16)"
)
SCHEDULES = {(1, 64): TILE, (65, 128): "", (129, ROWS): f"k0/splitk(C,2) {TILE}"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    target = target_of(gpus()[0])
    op = parse_op(f"matmul:m(1..{ROWS})x{N}x{K}:f16:nk")
    choices = [
        Choice(
            lo,
            hi,
            op.within("m", lo, hi),
            s,
            "" if s else "no win",
            packs.predicted(op.within("m", lo, hi).key, s, target) if s else None,
        )
        for (lo, hi), s in SCHEDULES.items()
    ]
    made = tmp_path_factory.mktemp("gpu") / "p.emmypack"
    assert not Pack.build([Offer(op, "m", tuple(choices))], made, target).unbuilt
    yield made


def loaded(path: Path, **options: Any) -> tuple[Table, torch.Tensor]:
    kernels = Kernels(Settings(path, Pack.open(path).digest, unmeasured=True, **options), "gpu")
    table = kernels.linear(N, K, torch.float16, "layer")
    assert table is not None
    weight = torch.randn(N, K, device="cuda", dtype=torch.float16)
    kernels.load_linear(table, ROWS, weight)
    return table, weight


def close(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    torch.testing.assert_close(got, torch.nn.functional.linear(x, weight), atol=0.1, rtol=0.01)


def test_kernels_pass_their_test_and_serve_their_rows(path: Path) -> None:
    table, weight = loaded(path)
    assert not table.refused
    for rows in (1, 7, 64, 65, 128, 129, 256, 300):
        x = torch.randn(rows, K, device="cuda", dtype=torch.float16)
        close(torch.ops.emmy.linear(x, weight, table.number), x, weight)
    assert table.counts.values() == (3, 3, 0, 2)


@pytest.mark.parametrize("rows", [8, 100, 200])
def test_a_captured_graph_computes_on_what_its_input_holds_when_replayed(path: Path, rows: int) -> None:
    table, weight = loaded(path)
    x = torch.zeros(rows, K, device="cuda", dtype=torch.float16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = torch.ops.emmy.linear(x, weight, table.number)
    for _ in range(3):
        x.normal_()
        graph.replay()
        close(y, x, weight)


def test_runs_on_many_streams_share_a_workspace_and_stay_right(path: Path) -> None:
    table, weight = loaded(path)
    xs = [torch.randn(200, K, device="cuda", dtype=torch.float16) for _ in range(8)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in xs]
    for _ in range(20):
        got = []
        for x, stream in zip(xs, streams, strict=True):
            with torch.cuda.stream(stream):
                got.append(torch.ops.emmy.linear(x, weight, table.number))
        torch.cuda.synchronize()
        for y, x in zip(got, xs, strict=True):
            close(y, x, weight)


def test_deterministic_rows_have_the_same_bits_in_any_batch_and_in_a_graph(path: Path) -> None:
    table, weight = loaded(path, deterministic=True)
    assert table.alike == ((1, 64),)
    x = torch.randn(200, K, device="cuda", dtype=torch.float16)
    want = torch.cat([torch.ops.emmy.linear(row, weight, table.number) for row in x.split(1)])
    close(want, x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.ops.emmy.linear(x, weight, table.number)
    graph.replay()
    assert torch.equal(captured, want)
    for rows in (2, 63, 65, 130):
        assert torch.equal(torch.ops.emmy.linear(x[:rows], weight, table.number), want[:rows])
