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
from emmy.ir.ops.op import Accumulate
from emmy.ir.plan import Plan, naive
from emmy.ir.program import Program
from emmy.ir.target import Target

_MOVE = re.compile(r"(?P<launch>\w+)(?:\.(?P<work>\w+))?/(?P<name>\w+)\((?P<args>[^()]*)\)", re.ASCII)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,18}")


def parse_schedule(text: str) -> tuple[Move, ...]:
    """The moves of a schedule or skeleton, separated by blanks. Raises UsageError naming the first bad one."""
    return tuple(parse_move(word, i) for i, word in enumerate(text.split()))


@lru_cache(maxsize=1 << 15)  # stored schedules, and those of one search, share most of their words
def parse_move(text: str, index: int = 0) -> Move:
    """The move one word names. Raises UsageError that shows the expected form."""
    hit = _MOVE.fullmatch(text)
    where = f"schedule move {index}: {text if len(text) <= 100 else text[:100] + '...'!r}"
    if not hit:
        raise UsageError(f"{where} has not the form launch/move(arguments), such as k0/split(m,core,64)")
    cls = MOVES.get(hit["name"])
    if cls is None:
        raise UsageError(f"{where} names no move; the moves are {', '.join(sorted(MOVES))}")
    wanted = fields(cls)[2:]
    given = hit["args"].split(",") if hit["args"] else []
    required = sum(f.default is MISSING for f in wanted)
    form = f"{cls.name}({','.join(f.name for f in wanted)})"
    if not required <= len(given) <= len(wanted):
        takes = f"{required}" if required == len(wanted) else f"{required}..{len(wanted)}"
        raise UsageError(f"{where} has {len(given)} arguments, {form} takes {takes}")
    values: dict[str, object] = {}
    for f, word in zip(wanted, given, strict=False):
        if str(f.type) == "Knob":
            if word != "?" and not _NUMBER.fullmatch(word):
                raise UsageError(f"{where}: {f.name} is {word!r}, a whole number below 10^18 or ? is needed in {form}")
            values[f.name] = OPEN if word == "?" else int(word)
        elif not _NAME.fullmatch(word):
            raise UsageError(f"{where}: {f.name} is {word!r}, a name is needed in {form}")
        else:
            values[f.name] = word
    return cls(hit["launch"], hit["work"], **values)


def sums_of(schedule: str) -> Accumulate:
    """How the schedule keeps its sums where it is least exact; what this Emmy cannot read of it says nothing."""
    kinds = set(map(_accumulates, schedule.split()))
    return "f16" if "f16" in kinds else "hybrid" if "hybrid" in kinds else "f32"


@lru_cache(maxsize=1 << 14)  # stored schedules share most of their words
def _accumulates(word: str) -> Accumulate | None:
    try:
        return parse_move(word).accumulate
    except UsageError:
        return None


def format_schedule(moves: tuple[Move, ...]) -> str:
    """The one line that `parse_schedule` reads back."""
    return " ".join(str(m) for m in moves)


def apply_move(plan: Plan, move: Move, target: Target, index: int = 0) -> Plan:
    """The plan after one move. Raises IllegalMove with the move's own reason."""
    after = _after(plan, move, target)
    if isinstance(after, str):
        raise IllegalMove(index, str(move), after)
    return after


@lru_cache(maxsize=1 << 15)  # schedules of one search share most of their prefixes
def _after(plan: Plan, move: Move, target: Target) -> Plan | str:
    """The plan after the move, or why there is none."""
    reason = f"knob {move.knobs[0]} is open" if move.knobs else move.refuse(plan, target)
    return move.rewrite(plan, target) if reason is None else reason


@lru_cache(maxsize=1024)
def _start(program: Program) -> Plan:
    return naive(program)


def replay(program: Program, schedule: str | tuple[Move, ...], target: Target) -> Plan:
    """The plan a schedule makes of a program for a target. Raises IllegalMove(index, move, reason) or UsageError."""
    plan = _start(program)
    for i, move in enumerate(parse_schedule(schedule) if isinstance(schedule, str) else schedule):
        plan = apply_move(plan, move, target, i)
    return plan
