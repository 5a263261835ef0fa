"""Attention of rows and a cache that lie where a server keeps them: what it means, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from emmy.errors import UsageError
from emmy.ir.ops import PagedAttention, ServedAttention, parse_op
from emmy.ir.program import Sym
from emmy.testing.op_contract import OpContract


class TestServedAttention(OpContract):
    ops = (
        ServedAttention(2, 4, 1, 20, 4, "f32", kv_heads=2, page=8),
        ServedAttention(3, 4, 5, 20, 4, "f16", kv_heads=1, page=4, pool=40, length=17),
        ServedAttention(2, 2, 3, 12, 4, "bf16", window=3, page=4, scale=0.25, length=12, order="pjgcd"),
        ServedAttention(2, 4, 2, 12, 4, "f32", kv_heads=2, page=4, order="pgcdj", values="pgcjd"),
        ServedAttention(Sym("m", 1, 4), 2, 1, 8, 4, "f16", page=4),
        ServedAttention(1, 2, Sym("m", 2, 7), 12, 4, "f32", page=4, window=4),
    )


def test_it_computes_what_attention_of_pages_does_from_other_places() -> None:
    served, paged = (
        parse_op(f"{kind}_attention:3x4x1x40x8:f32:{words}")
        for kind, words in (("served", "kv2,window9,page8,pjgcd"), ("paged", "causal,window9,kv2,page8"))
    )
    assert isinstance(served, ServedAttention) and isinstance(paged, PagedAttention)
    x = served.inputs("normal", 0)
    sides = {f"{name}_pages": x["cache"][:, :, :, side] for side, name in enumerate("KV")}
    y = paged.reference({"Q": x["Q"], "table": x["table"], "lengths": x["lengths"], **sides})
    np.testing.assert_allclose(served.reference(x)["O"], y["O"], atol=1e-12)


def test_an_order_says_where_keys_and_values_lie() -> None:
    def lies(text: str) -> list[object]:
        return [x.body for x in parse_op(f"served_attention:2x4x1x32x8:bf16:kv2,{text}").program().views]

    assert [str(x) for x in lies("page8,pcjgd")] == [
        "cache[table[b,t // 8],0,t % 8,g,d]",
        "cache[table[b,t // 8],1,t % 8,g,e]",
    ]
    assert [str(x) for x in lies("page16,pgcdj,pgcjd")] == [
        "K_cache[table[b,t // 16],g,0,d,t % 16]", "V_cache[table[b,t // 16],g,1,t % 16,e]",
    ]  # fmt: skip


def test_prompts_begin_with_nothing_before_them_unless_the_text_says_so() -> None:
    op = ServedAttention(1, 2, Sym("m", 2, 64), 128, 4, page=16)
    assert op.counts(1, 40).tolist() == [0] and replace(op, length=100).counts(1, 40).tolist() == [60]
    decoding = replace(op, batch=4, queries=1)
    assert decoding.counts(4, 1).tolist() == [128, 112, 96, 80]
    assert replace(decoding, length=64).counts(2, 1).tolist() == [64, 48]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("2x4x1x64:bf16", "the shape is not sequencesxheadsxqueriesxkeysxdim"),
        ("2x4x1xm(1..8)x8:bf16", "of which B or S may be open"),
        ("1x4xm(1..8)x64x8:bf16", "open numbers begin at 2"),
        ("1x4x9x8x8:bf16", "9 positions of 8 keys"),
        ("2x4x1x64x8:bf16:len65", "65 positions of 64 keys"),
        ("2x4x1x64x8:bf16:kv3", "3 heads of K and V do not divide the 4 of Q"),
        ("2x4x1x64x8:bf16:causal", "the order of pcjgd in memory; got 'causal'"),
        ("2x4x1x64x8:bf16:page8,page16", "each once"),
        ("2x4x1x64x8:bf16:jpcgd", "no order of pcjgd that begins with p"),
        ("2x4x1x64x8:bf16:pcjgg", "no order of pcjgd that begins with p"),
        ("2x4x1x64x8:bf16:pjgcd,pjgcd", "say it once"),
    ],
)
def test_its_text_says_what_is_wrong(text: str, why: str) -> None:
    with pytest.raises(UsageError) as e:
        parse_op(f"served_attention:{text}")
    assert why in str(e.value)
