"""Faults planted in kernels: each must be noticed, and by the check that is meant to notice it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from _pytest.mark import ParameterSet

from emmy.codegen.emulator import SCHEDULES
from emmy.errors import EmuError
from tests.emulator.bugs import BUGS, Bug
from tests.emulator.cases import CASES
from tests.emulator.generated import GENERATED, GeneratedBug, run, stored_bytes, unharmed
from tests.emulator.generated_bugs import GENERATED_BUGS
from tests.tiers import in_every_run, some


@pytest.mark.parametrize("bug", some(BUGS, 3, lambda b: f"{b.case}: {b.what}"))
def test_a_planted_bug_is_noticed(bug: Bug, record_property: Callable[[str, object], None]) -> None:
    case = CASES[bug.case]
    kernel = case.kernel
    for old, new in bug.edits:
        assert old in kernel, f"{bug.case}.cu has changed: {old!r} is not there"
        kernel = kernel.replace(old, new)
    noticed = ""
    for seed, eager in SCHEDULES:
        try:
            case.run(kernel, seed=seed, eager=eager)
        except EmuError as e:
            noticed = e.kind
        except AssertionError:
            noticed = "wrong"
        if noticed:
            break
    record_property("planted_bug", [bug.case, bug.what, noticed])
    assert noticed in bug.kinds, f"noticed as {noticed or 'nothing'}, meant to be noticed as {' or '.join(bug.kinds)}"


@pytest.mark.parametrize("kernel", some(GENERATED, 2, str))
def test_a_generated_kernel_is_right_before_it_is_harmed(kernel: str) -> None:
    for seed, eager in SCHEDULES:
        error, stored = run(kernel, unharmed(kernel), seed, eager)
        assert error <= 1 and stored == stored_bytes(kernel)


def _generated_bugs() -> list[ParameterSet]:
    """Of each kernel's bugs one is planted in every run, which costs a compilation, the others in the slow tier."""
    first = {b.kernel: b for b in reversed(GENERATED_BUGS)}
    return [
        pytest.param(b, id=f"{b.kernel}: {b.what}", marks=in_every_run(first[b.kernel] is b)) for b in GENERATED_BUGS
    ]


@pytest.mark.parametrize("bug", _generated_bugs())
def test_a_bug_planted_in_a_generated_kernel_is_noticed(
    bug: GeneratedBug, record_property: Callable[[str, object], None]
) -> None:
    noticed = bug.notice()
    record_property("planted_bug", [bug.kernel, bug.what, noticed])
    assert noticed in bug.kinds, f"noticed as {noticed or 'nothing'}, meant to be noticed as {' or '.join(bug.kinds)}"


def test_at_least_forty_kinds_of_bug_are_planted() -> None:
    assert len({b.what for b in BUGS} | {b.what for b in GENERATED_BUGS}) >= 40
