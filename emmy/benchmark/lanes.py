"""The lanes of the chart: what takes turns on a case. Names only.

A lane is stock torch in one of its forms, or Emmy with sums kept in f32, or kept in f16 and promoted (hybrid).
"""

from __future__ import annotations

from typing import Literal, get_args

from emmy.errors import UsageError
from emmy.ir.ops.op import Accumulate
from emmy.measure.rivals import AUTOTUNED, COMPILED

Lane = Literal["eager", "compile", "max-autotune", "emmy", "emmy-hybrid"]
LANES: tuple[Lane, ...] = get_args(Lane)
RIVALS: dict[Lane, str] = {"eager": "", "compile": COMPILED, "max-autotune": AUTOTUNED}  # lane -> the measurer's name
SUMS: dict[Lane, Accumulate] = {"emmy": "f32", "emmy-hybrid": "hybrid"}

# max-autotune times templates of its own for seconds a case: these twenty stand for the others. Of attention there is no
# template. Every kind that torch.compile makes kernels for, and widths from 1 to 4096, open ones too.
SUBSET = "max-autotune-20"
AUTOTUNED_CASES: tuple[str, ...] = (
    "qkv_cat.m1.t", "down_proj.m1.t", "o_proj.m8.lin", "q_proj.m16", "mlp_down.m32", "lm_head.m64",
    "q_proj.m256", "q_proj", "q_proj.dynM", "qkv_cat.m2048.lin", "q_proj.m4096",
    "norm_qkv.m1.lin", "norm_q_proj.m32", "norm_gate_up.m256.lin", "mlp_down_fused.m64.lin",
    "mlp_geglu.m32", "mlp_geglu.m4096", "post_attn_norm.sink.m32", "rms_norm.k3840.m2048", "pw.n8704.m256",
)  # fmt: skip


def parse_lanes(text: str) -> tuple[Lane, ...]:
    """The lanes that a text names, with commas, in the order of `LANES`. Raises UsageError."""
    words = {w.strip() for w in text.split(",")}
    if unknown := sorted(words - set(LANES)):
        raise UsageError(f"no lane is named {unknown[0]!r}; the lanes are {', '.join(LANES)}")
    return tuple(lane for lane in LANES if lane in words)
