"""docs/ir.md says what the code prints: its sessions are run, its table holds every move, its example move keeps the contract."""

from __future__ import annotations

import doctest
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from emmy.ir.moves import MOVES, Move
from emmy.testing.move_contract import MoveContract

PAGE = Path(__file__).parents[2] / "docs" / "ir.md"


@pytest.fixture
def page() -> Iterator[types.ModuleType]:
    """The page's Python blocks, run from top to bottom in one module; moves that it registers are taken back."""
    module, known = types.ModuleType("page"), dict(MOVES)
    sys.modules[module.__name__] = module  # where dataclasses look up annotations
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    try:
        for block in re.findall(r"```python\n(.*?)\n```", PAGE.read_text(encoding="utf-8"), flags=re.S):
            if ">>>" in block:
                test = doctest.DocTestParser().get_doctest(block + "\n", module.__dict__, "docs/ir.md", str(PAGE), None)
                test.globs = module.__dict__
                failed, _ = runner.run(test, clear_globs=False)
                assert not failed, "the session above prints something else: see the captured output"
            else:
                exec(compile(block, str(PAGE), "exec"), module.__dict__)
        yield module
    finally:
        del sys.modules[module.__name__]
        for name in MOVES.keys() - known.keys():
            del MOVES[name]


def test_its_sessions_print_what_the_page_says(page: types.ModuleType):
    assert "plan" in vars(page)


def test_its_table_holds_every_move_in_the_order_of_a_search():
    rows = re.findall(r"^\| `(\w+\([\w,]*\))` \| .+ \| .+ \|$", PAGE.read_text(encoding="utf-8"), flags=re.M)
    forms = {f"{m.name}({','.join(f.name for f in fields(m)[2:])})": m.phase for m in MOVES.values()}
    assert set(rows) == set(forms)
    assert rows == sorted(rows, key=forms.__getitem__)


def test_its_example_move_keeps_the_contract_of_moves(page: types.ModuleType):
    interchange: type[Move] = page.Interchange

    class Contract(MoveContract):
        move = interchange

    contract = Contract()
    for name in dir(contract):
        if name.startswith("test_"):
            getattr(contract, name)()
