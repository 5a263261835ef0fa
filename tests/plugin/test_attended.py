"""Which attention kernels of a pack serve a step, and what they are told of it. Needs torch, not vLLM."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from emmy.pack import Pack  # noqa: E402
from emmy_vllm import attention_selftest, attention_steps  # noqa: E402
from emmy_vllm.attended import Attended, attended  # noqa: E402
from emmy_vllm.attention_selftest import _given, answer, wrong_answer  # noqa: E402
from emmy_vllm.attention_steps import Cache, Shape, Step, Told  # noqa: E402
from tests.plugin.attention_packs import attention_pack  # noqa: E402

DECODE = "served_attention:m(1..4)x4x1x24x8:f32:kv2,window16,page8,pcjgd"
PROMPT = "served_attention:1x4xm(2..40)x64x8:f32:kv2,window16,page8,pcjgd"
OTHERWISE = "served_attention:m(1..4)x4x1x24x8:f32:kv2,window16,page4,pcjgd"
SHAPE = Shape(4, 2, 8, "f32", 16, 8**-0.5)
PAGES = 12


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Attended:
    path, _ = attention_pack(tmp_path_factory.mktemp("packs"), DECODE, PROMPT, OTHERWISE)
    found = attended(Pack.open(path), SHAPE, "CPU_ATTN", torch.device("cpu"), "test", lambda op: 40)
    assert not found.left and len(found.kernels) == 3
    return found


def step(*requests: tuple[int, int]) -> Step:
    """Requests of (keys, queries): a table of random pages, with eight columns."""
    random = torch.Generator().manual_seed(len(requests))
    lengths, queries = (torch.tensor(x, dtype=torch.int32) for x in zip(*requests, strict=True))
    starts = (0, *queries.cumsum(0).tolist())
    table = torch.randint(0, PAGES, (len(requests), 8), generator=random, dtype=torch.int32)
    return Step(object(), starts[-1], int(queries.max()), int(lengths.max()), lengths, table, starts)


def given(tokens: int, page: int = 8) -> tuple[torch.Tensor, Cache]:
    random = torch.Generator().manual_seed(tokens)
    q, cache = torch.randn(tokens, 4, 8, generator=random), torch.randn(PAGES, 2, page, 2, 8, generator=random)
    return q, Cache(cache, "pcjgd")


def want(made: Attended, q: torch.Tensor, cache: Cache, s: Step) -> torch.Tensor:
    """Request by request, by torch."""
    assert s.starts is not None
    op = replace(made.kernels[-1].op, keys=64)
    rows = []
    for i, (begin, end) in enumerate(zip(s.starts, s.starts[1:], strict=False)):
        one = replace(op, queries=end - begin)
        before = s.lengths[i : i + 1] - (0 if one.decodes else end - begin)
        rows.append(answer(one, q[begin:end], cache.view, Told(None, s.table[i : i + 1], before)))
    return torch.cat(rows)


def test_kernels_are_tried_the_same_whatever_torch_s_default_device_and_dtype_are(made: Attended) -> None:
    """vLLM builds a model with both set to the model's."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            wrong = [wrong_answer(k, torch.device("cpu"), 40) for k in made.kernels]
            drawn = [_given(k.op, k.case.ranges[0].lo, torch.device("cpu")) for k in made.kernels]
    finally:
        torch.set_default_dtype(before)
    assert wrong == ["", "", ""]
    for k, (q, cache, told) in zip(made.kernels, drawn, strict=True):
        again = _given(k.op, k.case.ranges[0].lo, torch.device("cpu"))
        assert torch.equal(q, again[0]) and torch.equal(cache.view, again[1].view)
        assert torch.equal(told.counts, again[2].counts) and torch.equal(told.table, again[2].table)


@pytest.mark.parametrize(
    "requests",
    [((5, 1), (64, 1), (17, 1)), ((33, 33),), ((40, 12),), ((60, 1), (3, 1), (40, 30), (20, 1), (9, 9))],
    ids=["decoding", "a prompt", "a prompt's second half", "a mixture"],
)
def test_a_step_is_served_part_by_part(
    made: Attended, requests: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_steps, "LONG", 8)
    s = step(*requests)
    q, cache = given(s.tokens + 3)  # a graph's rows are more than a step's
    out, before = torch.full_like(q, 7.0), sum(sum(k.counts.values()) for k in made.kernels)
    assert made.run(1, q, cache, s, out)
    assert sum(sum(k.counts.values()) for k in made.kernels) == before + len(s.parts())
    torch.testing.assert_close(out[: s.tokens].double(), want(made, q[: s.tokens], cache, s), atol=1e-5, rtol=1e-5)
    assert (out[s.tokens :] == 7).all()


@pytest.mark.parametrize(
    ("requests", "why"),
    [
        (((5, 1),) * 5, "no kernel of such a decoding step"),
        (((50, 50),), "no kernel of such a prompt"),
        (((70, 10),), "no kernel of such a prompt"),  # more keys than the kernel has
        (((5, 1), (9, 9)), "several requests, of which some are short prompts"),
    ],
)
def test_other_steps_are_left_to_stock_and_counted(
    made: Attended, requests: tuple[tuple[int, int], ...], why: str
) -> None:
    s = step(*requests)
    q, cache = given(s.tokens)
    before, times = made.counts.values(), made.why[why]
    assert not made.run(1, q, cache, s, torch.zeros_like(q))
    assert made.why[why] == times + 1 and made.counts.values() == (before[0] + 1,)


def test_what_only_stock_can_read_is_left_to_it(made: Attended) -> None:
    s = step((5, 1), (9, 1))
    q, cache = given(2)
    assert made.choose(q, given(2, page=16)[1], s, q) == "no kernel of such a decoding step"
    heads_first = replace(cache, view=cache.view.transpose(2, 3).contiguous().transpose(2, 3))
    assert made.choose(q, heads_first, s, q) == "a cache that lies otherwise"
    assert (
        made.choose(q.transpose(0, 1).contiguous().transpose(0, 1), cache, s, q)
        == "rows that do not follow one another"
    )
    assert made.choose(q, cache, replace(s, tokens=3), q) == "requests without a query"
    assert made.choose(q, cache, replace(s, most_queries=2, starts=None), q) == (
        "several requests, of which nobody says where they begin"
    )


def test_layers_of_a_group_share_what_a_step_tells_and_a_second_visit_reads_it_anew(made: Attended) -> None:
    kernel = next(k for k in made.kernels if k.op.key == DECODE)
    s, other = step((5, 1), (60, 1)), step((4, 1), (8, 1))
    (part,) = s.parts()
    one = kernel.told(s, part, 1)
    group = replace(s, of=object(), table=s.table + 1)
    beside = kernel.told(group, part, 5)  # another group of the same step, with a table of its own
    assert beside.counts is one.counts and torch.equal(beside.table, one.table + 1)
    assert kernel.told(other, part, 1) is not one and kernel.told(s, part, 2) is not one  # layer 1 went on: a new step
    again = kernel.told(s, part, 3)
    assert kernel.told(s, part, 4) is again
    s.lengths[0] = 7  # a drafting model goes through its layers again with numbers changed in place
    assert kernel.told(s, part, 3).counts.tolist() == [7, 60 - 8 * ((60 - 16) // 8)]
    assert kernel.told(group, part, 5).counts.tolist() == [7, 60 - 8 * ((60 - 16) // 8)]


def test_a_kernel_that_did_not_beat_the_backend_or_is_wrong_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left(rivals: dict[str, float], unmeasured: bool = False) -> list[str]:
        pack = Pack.open(attention_pack(tmp_path, DECODE, rivals=rivals)[0], unmeasured=unmeasured)
        found = attended(pack, SHAPE, "CPU_ATTN", torch.device("cpu"), "test", lambda op: 4)
        assert bool(found.kernels) != bool(found.left) == any("stock: " in x for x in found.lines())
        return list(found.left)

    assert left({"vllm:CPU_ATTN": 1.01}) == []
    assert left({}, unmeasured=True) == []
    assert left({"vllm:TRITON_ATTN": 3.0}) == [f"{DECODE}: it was never raced with CPU_ATTN"]
    assert left({"vllm:CPU_ATTN": 0.98}) == [f"{DECODE}: no win: 0.980 times as fast as CPU_ATTN"]
    monkeypatch.setattr(attention_selftest, "answer", lambda *x: answer(*x) + 0.01)
    assert "times what is allowed" in left({"vllm:CPU_ATTN": 1.01})[0]
