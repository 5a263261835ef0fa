"""Schedules as text: parse, print, replay. The one currency of Emmy.

    k0/split(m,core,64) k0/stage(B,pack,1) k0.C/atom(fma,8,32,1,16)

A skeleton is the same with knobs open, printed `?`. Replay gives the same plan for the same text.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from functools import lru_cache

from emmy.errors import IllegalMove, UsageError
from emmy.ir.moves import MOVES, OPEN, Move
from emmy.ir.plan import Plan, naive
from emmy.ir.program import Program
from emmy.ir.target import Target

_MOVE = re.compile(r"(?P<launch>\w+)(?:\.(?P<work>\w+))?/(?P<name>\w+)\((?P<args>[^()]*)\)")


def parse_schedule(text: str) -> tuple[Move, ...]:
    """The moves of a schedule or skeleton, separated by blanks. Raises UsageError naming the first bad one."""
    return tuple(parse_move(word, i) for i, word in enumerate(text.split()))


def parse_move(text: str, index: int = 0) -> Move:
    """The move one word names. Raises UsageError that shows the expected form."""
    hit = _MOVE.fullmatch(text)
    if not hit:
        raise UsageError(
            f"schedule move {index}: {text!r} has not the form launch/move(arguments), such as k0/split(m,core,64)"
        )
    cls = MOVES.get(hit["name"])
    if cls is None:
        raise UsageError(f"schedule move {index}: {text!r} names no move; the moves are {', '.join(sorted(MOVES))}")
    wanted = fields(cls)[2:]
    given = [a.strip() for a in hit["args"].split(",")] if hit["args"].strip() else []
    required = sum(f.default is MISSING for f in wanted)
    form = f"{cls.name}({','.join(f.name for f in wanted)})"
    if not required <= len(given) <= len(wanted):
        raise UsageError(
            f"schedule move {index}: {text!r} has {len(given)} arguments, {form} takes {required}..{len(wanted)}"
        )
    values: dict[str, object] = {}
    for f, word in zip(wanted, given, strict=False):
        is_number = "int" in str(f.type) or "Knob" in str(f.type)
        if word == "?":
            values[f.name] = OPEN
        elif re.fullmatch(r"\d+", word) and is_number:
            values[f.name] = int(word)
        elif is_number:
            raise UsageError(
                f"schedule move {index}: {text!r}: {f.name} is {word!r}, a whole number is needed in {form}"
            )
        else:
            values[f.name] = word
    return cls(hit["launch"], hit["work"], **values)


def format_schedule(moves: tuple[Move, ...]) -> str:
    """The one line that `parse_schedule` reads back."""
    return " ".join(str(m) for m in moves)


def apply_move(plan: Plan, move: Move, target: Target, index: int = 0) -> Plan:
    """The plan after one move. Raises IllegalMove with the move's own reason."""
    reason = f"knob {move.knobs[0]} is open" if move.knobs else move.refuse(plan, target)
    if reason is not None:
        raise IllegalMove(index, str(move), reason)
    return move.rewrite(plan, target)


@lru_cache(maxsize=100_000)
def _replay(program: Program, moves: tuple[Move, ...], target: Target) -> Plan:
    if not moves:
        return naive(program)
    return apply_move(_replay(program, moves[:-1], target), moves[-1], target, len(moves) - 1)


def replay(program: Program, schedule: str | tuple[Move, ...], target: Target) -> Plan:
    """The plan a schedule makes of a program for a target. Raises IllegalMove(index, move, reason) or UsageError."""
    moves = parse_schedule(schedule) if isinstance(schedule, str) else schedule
    return _replay(program, moves, target)
