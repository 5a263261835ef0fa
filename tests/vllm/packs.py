"""A CPU pack for the tiny models' products. Nothing in it was measured, and it says so: it serves who asks for unmeasured kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from emmy.codegen.build import source
from emmy.ir.ops import parse_op
from emmy.ir.target import Target, load_target
from emmy.pack import Choice, Evidence, Offer, Pack

ROWS = 256  # of a step, at most
# Rows 33..64 are stock's; the others have a kernel each, made under another schedule.
SCHEDULES: Mapping[tuple[int, int], str] = {
    (1, 32): "k0/split(m,core,8)",
    (33, 64): "",
    (65, ROWS): "k0/split(m,core,16) k0/split(n,serial,32)",
}
# The second adds each sum in two halves.
IN_ANOTHER_ORDER: Mapping[tuple[int, int], str] = {(1, 8): "k0/split(m,core,8)", (9, ROWS): "k0/splitk(C,2)"}
FUSED: Mapping[tuple[int, int], str] = {(1, 32): "k0/split(m,core,8)", (33, 64): "", (65, ROWS): "k0/split(m,core,16)"}


def built(
    path: Path,
    shapes: Iterable[tuple[int, int]],
    schedules: Mapping[tuple[int, int], str] = SCHEDULES,
    fused: Iterable[str] = (),
) -> dict[str, object]:
    """The additional_config that names a pack of x @ w^T for weights of these shapes (n, k), which is written to `path`.

    fused: further ops, their rows open as m(1..ROWS)
    """
    products = [_offer(f"matmul:m(1..{ROWS})x{n}x{k}:f32:nk", schedules) for n, k in sorted(set(shapes))]
    found = Pack.build([*products, *(_offer(op, FUSED) for op in fused)], path, load_target("cpu"))
    return {"emmy": {"pack": str(path), "digest": found.digest, "unmeasured": True}}


def _offer(text: str, schedules: Mapping[tuple[int, int], str]) -> Offer:
    op = parse_op(text)
    choices = []
    for (lo, hi), schedule in schedules.items():
        part = op.within("m", lo, hi)
        why = "" if schedule else "no win: 0.9 times"
        choices.append(
            Choice(lo, hi, part, schedule, why, predicted(part.key, schedule, load_target("cpu")) if schedule else None)
        )
    return Offer(op, "m", tuple(choices))


def predicted(op: str, schedule: str, target: Target) -> Evidence:
    """Evidence that says that nothing was measured."""
    return Evidence(
        "predicted", op, source(parse_op(op), schedule, target).digest, 10.0, (), 5.0, 20.0, "torch", None, None, None, None, {}, None,
        {}, target.product, "", "", "0.1.0", "2026-11-30T00:00:00.000+00:00", 0, "", "a guess, to test with",
    )  # fmt: skip
