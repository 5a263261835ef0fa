"""The operators on CPU kernels: who serves which rows, what a wrong kernel gives, and the deterministic lane. Needs no vLLM."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from emmy.pack import Pack
from emmy_vllm import coverage
from emmy_vllm.kernels import Kernels, Table
from emmy_vllm.settings import Settings
from tests.pack import packs as damaged
from tests.vllm import packs

pytestmark = pytest.mark.slow  # compiles the operators
N, K = 96, 64


def tables(
    path: Path, rows: int = packs.ROWS, schedules: Mapping[tuple[int, int], str] = packs.SCHEDULES, **options: Any
) -> tuple[Kernels, Table, torch.Tensor]:
    """A table that is loaded for steps of so many rows, and its weight."""
    if not path.exists():
        packs.built(path, [(N, K)], schedules)
    kernels = Kernels(Settings(path, Pack.open(path).digest, unmeasured=True, **options), "test")
    table = kernels.linear(N, K, torch.float32, "layer")
    assert table is not None
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(1))
    kernels.load_linear(table, rows, weight)
    return kernels, table, weight


def product(x: torch.Tensor, weight: torch.Tensor, table: Table) -> torch.Tensor:
    return torch.ops.emmy.linear(x, weight, table.number)


def test_the_kernel_of_its_range_serves_rows_and_stock_the_others(tmp_path: Path) -> None:
    _, table, weight = tables(tmp_path / "p")
    assert table.counts.values() == (0, 0, 0, 0)
    shapes = [(1, K), (32, K), (4, 8, K), (33, K), (64, K), (65, K), (2, 128, K), (257, K), (0, K), (K,)]
    for shape in shapes:
        x = torch.randn(shape)
        torch.testing.assert_close(product(x, weight, table), torch.nn.functional.linear(x, weight))
    assert table.counts.values() == (4, 4, 0, 2)


def test_what_a_kernel_could_not_read_is_stocks(tmp_path: Path) -> None:
    _, table, weight = tables(tmp_path / "p")
    x = torch.randn(8, 2 * K)
    for strange in (x[:, ::2], x[:, :K], torch.randn(8 * K + 1)[1:].view(8, K).double().float().t().contiguous().t()):
        torch.testing.assert_close(product(strange, weight, table), torch.nn.functional.linear(strange, weight))
    wrong = torch.randn(N + 1, K)
    torch.testing.assert_close(
        product(x[:, :K].contiguous(), wrong, table), torch.nn.functional.linear(x[:, :K], wrong)
    )
    assert table.counts.values() == (4, 0, 0, 0)


def test_its_fake_has_the_shape_and_it_is_traced(tmp_path: Path) -> None:
    _, table, weight = tables(tmp_path / "p")
    torch.library.opcheck(
        torch.ops.emmy.linear.default,
        (torch.randn(3, 8, K), weight, table.number),
        test_utils=["test_schema", "test_faketensor"],
    )


def test_launch_runs_a_table_on_memory_that_it_is_given_and_refuses_the_rest(tmp_path: Path) -> None:
    _, table, weight = tables(tmp_path / "p")
    x, y = torch.randn(8, K), torch.empty(8, N)
    torch.ops.emmy.launch([x, weight, y], [8], table.number)
    torch.testing.assert_close(y, x @ weight.t())
    for arguments, sizes, what in (
        ([x, weight, y], [40], "leaves this size to its caller"),
        ([x, weight, y], [9], "argument 0 .* smaller than"),
        ([x, weight, y], [], "takes one size, not 0"),
        ([x, weight, y], [8, 8], "takes one size, not 2"),
        ([x, weight], [8], "takes 3 arguments, not 2"),
        ([x.double(), weight, y], [8], "argument 0 is of another dtype"),
    ):
        with pytest.raises(RuntimeError, match=what):
            torch.ops.emmy.launch(arguments, sizes, table.number)


def test_a_table_is_loaded_anew_while_it_is_called(tmp_path: Path) -> None:
    """As by a second engine in one process, whose steps have more rows."""
    kernels, table, weight = tables(tmp_path / "p")
    x, over = torch.randn(8, K), threading.Event()

    def call() -> bool:
        same = True
        while not over.is_set():
            same &= torch.allclose(product(x, weight, table), torch.nn.functional.linear(x, weight), atol=1e-4)
        return same

    with ThreadPoolExecutor(2) as pool:
        callers = [pool.submit(call) for _ in range(2)]
        for _ in range(30):
            kernels.load(table, packs.ROWS)
        over.set()
    assert all(c.result() for c in callers)


def test_a_number_without_a_table_is_refused(tmp_path: Path) -> None:
    tables(tmp_path / "p")
    with pytest.raises(RuntimeError, match="no table 12345 is loaded"):
        torch.ops.emmy.linear(torch.randn(2, K), torch.randn(N, K), 12345)


def test_ranges_that_no_step_reaches_are_not_loaded(tmp_path: Path) -> None:
    kernels, table, weight = tables(tmp_path / "p", rows=20)
    product(torch.randn(100, K), weight, table)
    assert table.counts.values() == (1, 0, 0, 0)
    assert "stock 65..256 rows: no step has 65 rows" in "\n".join(coverage.lines(kernels)).replace("Emmy ", "Emmy")


def test_a_kernel_with_a_wrong_answer_is_left_to_stock_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel of many rows is in truth one for a weight in another layout."""
    path = tmp_path / "p"
    packs.built(path, [(N, K)], fused=[f"matmul:m(1..{packs.ROWS})x{N}x{K}:f32"])

    def swap(raw: Any) -> None:
        turned, plain = (case["ranges"] for case in raw["cases"])
        plain[2]["code"] = turned[2]["code"]

    damaged.with_manifest(path, swap)
    with caplog.at_level("ERROR", logger="emmy.vllm"):
        kernels, table, weight = tables(path)
    assert list(table.refused) == [65]
    assert ["from 65 rows: WRONG ANSWER, left to stock" in r.getMessage() for r in caplog.records] == [True]
    assert "stock 65..256 rows: at 65 rows its error is" in "\n".join(coverage.lines(kernels))
    x = torch.randn(100, K)
    torch.testing.assert_close(product(x, weight, table), torch.nn.functional.linear(x, weight))
    assert table.counts.values() == (1, 0, 0, 0)


def test_deterministic_rows_have_the_same_bits_in_any_batch(tmp_path: Path) -> None:
    """Few rows are padded, many are cut; the kernel that adds otherwise has no part."""
    ranges = {
        (1, 3): "",
        (4, 8): "k0/split(m,core,8)",
        (9, 20): "k0/split(m,core,4)",
        (21, packs.ROWS): "k0/splitk(C,2)",
    }
    _, table, weight = tables(tmp_path / "p", 50, ranges, deterministic=True)
    assert table.alike == ((4, 8), (9, 20))
    assert list(table.refused) == [21]
    x = torch.randn(200, K)
    want = torch.cat([product(row, weight, table) for row in x.split(1)])
    torch.testing.assert_close(want, torch.nn.functional.linear(x, weight))
    for rows in (2, 4, 8, 9, 20, 21, 50, 200):
        assert torch.equal(product(x[:rows], weight, table), want[:rows])
        assert torch.equal(product(x[-rows:].t().contiguous().t(), weight, table), want[-rows:])
    assert table.counts.values()[0] == 0
    assert product(torch.randn(2, 3, K), weight, table).shape == (2, 3, N)
    with pytest.raises(RuntimeError, match="the deterministic lane has no kernel"):
        product(x.double(), weight.double(), table)


def test_without_the_lane_bits_depend_on_the_batch(tmp_path: Path) -> None:
    _, table, weight = tables(tmp_path / "p", schedules=packs.IN_ANOTHER_ORDER)
    x = torch.randn(9, K)
    assert not torch.equal(product(x, weight, table)[:1], product(x[:1], weight, table))
