"""Packs of attention kernels for this CPU, to test with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from emmy.ir.ops import parse_op
from emmy.ir.target import load_target
from emmy.pack import Offer, Pack
from tests.pack.packs import won

RACED = {"vllm:CPU_ATTN": 1.2}


def attention_pack(folder: Path, *ops: str, **changes: Any) -> tuple[Path, str]:
    """A pack in which plain schedules of the ops won, and its digest. changes: of the evidence."""
    path = folder / "attention.emmypack"
    return path, Pack.build([_offer(op, **changes) for op in ops], path, load_target("cpu")).digest


def _offer(text: str, **changes: Any) -> Offer:
    op = parse_op(text)
    syms = op.program().syms
    lo, hi = (syms[0].lo, syms[0].hi) if syms else (0, 0)
    schedule = "k0/split(g,core,1)"
    return Offer(
        op, syms[0].name if syms else "", (won(text, schedule, "cpu", lo, hi, **{"rivals": RACED, **changes}),)
    )
