"""Attention kernels on a real GPU: the caller's cache and stream, pages that a graph finds anew when it is replayed."""

from __future__ import annotations

import pytest
import torch

from emmy.ir.ops import ServedAttention, parse_op
from emmy.ir.target import Target
from emmy.measure.cuda import target_of
from emmy.pack import Choice, Offer, Pack
from emmy.runtime.cuda_driver import gpus
from emmy_vllm.attended import Attended, attended
from emmy_vllm.attention_selftest import answer
from emmy_vllm.attention_steps import Cache, Shape, Step, Told
from tests.cuda_codegen.test_paged import in_parts
from tests.cuda_codegen.test_served import by_warps
from tests.vllm import packs

pytestmark = pytest.mark.gpu
SHAPE = Shape(4, 2, 64, "f16", 64, 64**-0.5)
DECODE = "served_attention:m(1..8)x4x1x96x64:f16:kv2,window64,page16,pcjgd"
PROMPT = "served_attention:1x4xm(2..200)x512x64:f16:kv2,window64,page16,pcjgd"
PAGES = 40


def schedules(target: Target) -> dict[str, str]:
    how = "cp_async" if target.name in ("rtx4090", "a100") else "tma"
    return {DECODE: in_parts(by_warps("q", 16, 32, how), 3, 64), PROMPT: by_warps("s", 32, 32, how)}


def offer(text: str, schedule: str, target: Target) -> Offer:
    op = parse_op(text)
    (m,) = op.program().syms
    choice = Choice(m.lo, m.hi, op, schedule, "", packs.predicted(text, schedule, target))
    return Offer(op, "m", (choice,))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Attended:
    target, path = target_of(gpus()[0]), tmp_path_factory.mktemp("gpu") / "p.emmypack"
    assert not Pack.build([offer(*x, target) for x in schedules(target).items()], path, target).unbuilt
    pack = Pack.open(path, unmeasured=True)
    found = attended(pack, SHAPE, "TRITON_ATTN", torch.device("cuda"), "gpu", lambda op: 200)
    assert not found.left and len(found.kernels) == 2  # each passed its own test
    return found


def step(*requests: tuple[int, int]) -> Step:
    lengths, queries = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in zip(*requests, strict=True))
    starts = (0, *queries.cumsum(0).tolist())
    table = torch.randint(0, PAGES, (len(requests), 32), dtype=torch.int32, device="cuda")
    return Step(object(), starts[-1], int(queries.max()), 512, lengths, table, starts)


def given(tokens: int) -> tuple[torch.Tensor, Cache, torch.Tensor]:
    q = torch.randn(tokens, 4, 64, device="cuda", dtype=torch.float16)
    cache = torch.randn(PAGES, 2, 16, 2, 64, device="cuda", dtype=torch.float16)
    return q, Cache(cache, "pcjgd"), torch.full_like(q, float("nan"))


def check(made: Attended, q: torch.Tensor, cache: Cache, s: Step, out: torch.Tensor) -> None:
    decoding, prompt = (next(k.op for k in made.kernels if k.op.decodes == x) for x in (True, False))
    op: ServedAttention = decoding if s.most_queries == 1 else prompt
    before = s.lengths - (0 if op.decodes else s.tokens)
    torch.testing.assert_close(
        out.double(), answer(op, q, cache.view, Told(None, s.table, before)), atol=0.02, rtol=0.01
    )


@pytest.mark.parametrize("requests", [((500, 1), (1, 1), (64, 1), (33, 1)), ((150, 150),), ((400, 90),)])
def test_steps_are_right_on_a_stream_of_their_own(made: Attended, requests: tuple[tuple[int, int], ...]) -> None:
    s = step(*requests)
    q, cache, out = given(s.tokens)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert made.run(1, q, cache, s, out)
    stream.synchronize()
    check(made, q, cache, s, out)


def test_a_replayed_graph_reads_lengths_and_tables_as_they_are_then(made: Attended) -> None:
    s = step((1, 1), (1, 1), (1, 1))
    q, cache, out = given(3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert made.run(1, q, cache, s, out)
    for lengths in ((300, 20, 0), (64, 65, 512)):  # a request that is not there leaves zeros
        s.lengths.copy_(torch.tensor(lengths))
        s.table.random_(0, PAGES)
        q.normal_()
        graph.replay()
        torch.cuda.synchronize()
        check(made, q, cache, s, out)
