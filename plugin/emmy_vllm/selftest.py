"""Each kernel of a linear against torch's own on the layer's real weight, before a request reaches it. Knows no vLLM."""

from __future__ import annotations

from collections.abc import Callable

import torch

from emmy.ir.ops import parse_op
from emmy.pack import Case, Served

_MOST_BYTES = 256 << 20  # of an output that a test makes


def wrong_ranges(
    case: Case, number: int, is_served: Callable[[Served], bool], rows: int, weight: torch.Tensor
) -> dict[int, str]:
    """lo of each range with a wrong kernel -> the sentence that says so. The table must be loaded.

    Each range is tried at its ends, as far as steps of `rows` rows reach and the output stays under 256 MB.
    """
    wrong: dict[int, str] = {}
    for r in filter(is_served, case.ranges):
        most = max(r.lo, min(r.hi, rows, _MOST_BYTES // (weight.shape[0] * weight.element_size())))
        for m in sorted({r.lo, most}):
            error = _error(case, r, number, m, weight)
            if not error <= 1:
                wrong[r.lo] = f"at {m} rows its error is {error:.3g} times what is allowed"
                break
    return wrong


def _error(case: Case, r: Served, number: int, m: int, weight: torch.Tensor) -> float:
    """The largest difference from torch's product, in units of twice what the op allows and a rounding; inf for a NaN."""
    assert r.code is not None
    generator = torch.Generator(device=weight.device).manual_seed(m)
    x = torch.randn(m, weight.shape[1], generator=generator, device=weight.device, dtype=torch.float32).to(weight.dtype)
    got = torch.ops.emmy.linear(x, weight, number)
    want = torch.nn.functional.linear(x, weight)
    op = parse_op(case.op)
    absolute, relative = op.tolerance(r.code.accumulate)
    worst = 0.0
    for have, right in zip(got.split(1024), want.split(1024), strict=True):
        true = right.float()
        scale = float(true.square().mean().sqrt())
        allowed = (2 * absolute + 2 * relative) * scale + 2 * relative * true.abs() + torch.finfo(torch.float32).tiny
        difference = (have.float() - true).abs() / allowed
        difference[(true.isnan() & have.isnan()) | (true == have)] = 0.0
        worst = max(worst, float(difference.nan_to_num(nan=float("inf"), posinf=float("inf")).max()))
    return worst
