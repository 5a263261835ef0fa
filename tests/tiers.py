"""Which of many like cases are in every run, where each costs a compilation; the slow tier has the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest
from _pytest.mark import ParameterSet

T = TypeVar("T")


def some(cases: Iterable[T], every: int, name: Callable[[T], str] | None = None) -> list[ParameterSet]:
    """Parameters of which every n-th is in every run; a tuple has one value for each name of a test's arguments."""
    return [
        pytest.param(
            *(x if isinstance(x, tuple) else (x,)), id=name(x) if name else None, marks=in_every_run(not i % every)
        )
        for i, x in enumerate(cases)
    ]


def in_every_run(chosen: bool) -> list[pytest.MarkDecorator]:
    return [] if chosen else [pytest.mark.slow]
