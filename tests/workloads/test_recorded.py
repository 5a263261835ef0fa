"""The recorded spaces: complete, unchanged by the conversion, and refused when misnamed."""

from __future__ import annotations

import numpy as np
import pytest

from emmy.errors import UsageError
from emmy.workloads import recorded

pytest.importorskip("duckdb")

# kernel.gpu -> configurations, failures, the fastest time in ms as published
FACTS = {
    "convolution.a100": (4362, 161, 0.55360),
    "convolution.a4000": (4362, 161, 1.02117),
    "convolution.mi250x": (4362, 0, 0.65880),
    "convolution.w6600": (4362, 0, 1.72762),
    "dedispersion.a100": (11130, 0, 68.11658),
    "dedispersion.a4000": (11130, 0, 147.69778),
    "gemm.rtx2080ti": (17956, 0, 11.48278),
    "gemm.rtx3090": (17956, 0, 5.65784),
}


def test_the_recorded_spaces_are_the_documented_eight() -> None:
    assert recorded.names() == tuple(FACTS)


@pytest.mark.parametrize("name", FACTS)
def test_a_space_has_its_documented_size_failures_and_optimum(name: str) -> None:
    table = recorded.load(name)
    n, failures, best_ms = FACTS[name]
    assert table.values.shape == (n, len(table.parameters)) and table.time_ms.shape == (n,) and len(table.status) == n
    assert int(np.isnan(table.time_ms).sum()) == failures
    assert table.best_ms == pytest.approx(best_ms, abs=1e-5)


@pytest.mark.parametrize("name", FACTS)
def test_a_configuration_has_a_positive_time_exactly_when_its_status_is_ok(name: str) -> None:
    table = recorded.load(name)
    ok = np.array([status == "ok" for status in table.status])
    assert (ok == ~np.isnan(table.time_ms)).all()
    assert (table.time_ms[ok] > 0).all()


@pytest.mark.parametrize("name", FACTS)
def test_no_configuration_is_recorded_twice(name: str) -> None:
    table = recorded.load(name)
    assert len(np.unique(table.values, axis=0)) == len(table.values)


def test_spaces_of_one_kernel_have_the_same_parameters_and_configurations() -> None:
    for kernel in ("gemm", "convolution", "dedispersion"):
        tables = [recorded.load(name) for name in recorded.names() if name.startswith(kernel + ".")]
        assert len({table.parameters for table in tables}) == 1
        assert len({np.unique(table.values, axis=0).tobytes() for table in tables}) == 1


def test_a_loaded_table_cannot_be_changed_by_accident() -> None:
    table = recorded.load("gemm.rtx3090")
    with pytest.raises(ValueError, match="read-only"):
        table.time_ms[0] = 1.0


def test_an_unknown_space_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match=r"Did you mean gemm\.rtx3090"):
        recorded.load("gemm.rtx3080")
