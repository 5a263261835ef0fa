"""Moves: the contract for each one, then what each refuses, with the schedule text that once went wrong."""

from __future__ import annotations

from emmy.ir.moves import (
    BindAtom,
    Commute,
    Cut,
    Fuse,
    Online,
    Operand,
    Persist,
    PingPong,
    Raster,
    Specialize,
    Split,
    SplitK,
    Stage,
    Unroll,
)
from emmy.testing.move_contract import MoveContract, every_move_is_tested


class TestBindAtom(MoveContract):
    move = BindAtom


class TestCommute(MoveContract):
    move = Commute


class TestCut(MoveContract):
    move = Cut


class TestFuse(MoveContract):
    move = Fuse


class TestOnline(MoveContract):
    move = Online


class TestOperand(MoveContract):
    move = Operand


class TestPersist(MoveContract):
    move = Persist


class TestPingPong(MoveContract):
    move = PingPong


class TestSpecialize(MoveContract):
    move = Specialize


class TestRaster(MoveContract):
    move = Raster


class TestSplit(MoveContract):
    move = Split


class TestSplitK(MoveContract):
    move = SplitK


class TestStage(MoveContract):
    move = Stage


class TestUnroll(MoveContract):
    move = Unroll


def test_every_move_in_the_registry_has_a_contract_test():
    assert every_move_is_tested(*MoveContract.__subclasses__())
