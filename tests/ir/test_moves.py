"""The contract of moves for every one in the registry: a new move is tested without a line here."""

from __future__ import annotations

from emmy.ir.moves import MOVES
from emmy.testing.move_contract import MoveContract

for _move in MOVES.values():
    _name = f"Test{_move.__name__}"
    globals()[_name] = type(_name, (MoveContract,), {"move": _move, "__module__": __name__})


def test_every_move_has_a_contract_test():
    assert {c.move for c in MoveContract.__subclasses__()} >= set(MOVES.values())
