"""Each kernel of a linear against torch's own on the layer's real weight, before a request reaches it. Knows no vLLM."""

from __future__ import annotations

from collections.abc import Callable

import torch

from emmy.ir.ops import parse_op
from emmy.pack import Case, Served

_ROWS = 512  # of the same answers that kernels are compared on; their bits differ in thousands where they add otherwise
_MOST_BYTES = 256 << 20  # of an output that a test makes


def wrong_ranges(
    case: Case, number: int, is_served: Callable[[Served], bool], rows: int, weight: torch.Tensor
) -> dict[int, str]:
    """lo of each range with a wrong kernel -> the sentence that says so. The table must be loaded.

    Each range is tried at its ends, as far as steps of `rows` rows reach and the output stays under 256 MB.
    """
    wrong: dict[int, str] = {}
    for r in filter(is_served, case.ranges):
        for m in sorted({r.lo, _most(r, rows, weight)}):
            error = _error(case, r, number, m, weight)
            if not error <= 1:
                wrong[r.lo] = f"at {m} rows its error is {error:.3g} times what is allowed"
                break
    return wrong


def alike_ranges(
    case: Case, number: int, is_served: Callable[[Served], bool], rows: int, weight: torch.Tensor
) -> tuple[tuple[int, int], ...]:
    """lo..hi of the ranges whose kernels give each row the same bits, wherever in a batch it stands and however large that is.

    The first range that agrees with itself sets the order of summation; the others join where not one bit differs. It is a test,
    on random rows and the real weight, twice each: kernels that add in another order differ in most elements.
    """
    served = list(filter(is_served, case.ranges))
    x = _random_rows(max([_ROWS, *(r.lo for r in served)]) + 7, weight)
    wanted: torch.Tensor | None = None
    alike: list[tuple[int, int]] = []
    for r in served:
        most = min(max(_ROWS, r.lo), _most(r, rows, weight))
        seen = torch.full((x.shape[0], weight.shape[0]), float("nan"), device=x.device, dtype=weight.dtype)
        agrees = True
        for at, m in [(0, most), (7, most), (3, r.lo), (0, (r.lo + most) // 2), (0, most)]:
            got = torch.ops.emmy.linear(x[at : at + m].clone(), weight, number)
            agrees &= _joins(seen[at : at + m], got)
        if agrees and (wanted is None or _joins(wanted.clone(), seen)):
            wanted = seen if wanted is None else torch.where(wanted.isnan(), seen, wanted)
            alike.append((r.lo, r.hi))
    return tuple(alike)


def _joins(seen: torch.Tensor, got: torch.Tensor) -> bool:
    """Whether nothing that was seen before differs; what was not is noted. NaN: not seen yet."""
    same = bool(((seen == got) | seen.isnan() | got.isnan()).all())
    seen.copy_(torch.where(seen.isnan(), got, seen))
    return same


def _most(r: Served, rows: int, weight: torch.Tensor) -> int:
    """The most rows of a range that are tried: those that a step may have and whose output has room."""
    room = _MOST_BYTES // (int(weight.shape[0]) * int(weight.element_size()))
    return max(r.lo, min(r.hi, rows, room))


def _random_rows(m: int, weight: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator(device=weight.device).manual_seed(m)
    shape = (m, weight.shape[1])
    return torch.randn(shape, generator=generator, device=weight.device, dtype=torch.float32).to(weight.dtype)


def _error(case: Case, r: Served, number: int, m: int, weight: torch.Tensor) -> float:
    """The largest difference from torch's product, in units of twice what the op allows and a rounding; inf for a NaN."""
    assert r.code is not None
    x = _random_rows(m, weight)
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
