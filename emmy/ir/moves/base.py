"""What a move is: a rewrite of a plan that enumerates its own legal sites and refuses with one sentence.

A move is a frozen dataclass: first the launch (and for some the work) it applies to, then its arguments in the order
the schedule text prints them: names (`str`, or `str | None` with a default) and numbers (`Knob`). A knob that holds OPEN
is still to be chosen by a search. To add a move, write one file that subclasses Move; the registry, the schedule text,
the search space and the contract tests follow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import ClassVar, Literal

from emmy.errors import PlanError
from emmy.ir.beside import beside
from emmy.ir.ops.op import Accumulate
from emmy.ir.plan import Launch, Loop, Plan, Tile, Work
from emmy.ir.target import Target


@dataclass(frozen=True, slots=True)
class Open:
    """A knob that is not chosen yet; prints `?`."""

    def __str__(self) -> str:
        return "?"


OPEN = Open()
Knob = int | Open
Domains = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Move(ABC):
    """A rewrite of the launch `launch` (and its work `work`, when given) of a plan."""

    launch: str
    work: str | None

    name: ClassVar[str]
    phase: ClassVar[int]  # a search applies moves in ascending phase, so that one plan has few spellings
    commutes: ClassVar[bool] = False  # the order among moves of this kind does not matter: a search sorts them
    first: ClassVar[bool] = False  # where it has a mandatory site, a search tries nothing else before it
    mandatory: ClassVar[bool] = False  # a search does not stop while this move has a site
    searched: ClassVar[bool] = True  # code is generated for what the move makes, so that a search may choose it

    @classmethod
    @abstractmethod
    def sites(cls, plan: Plan, target: Target) -> Iterator[Site]:
        """Every place of `plan` where the move may be worth trying on `target`, knobs open, with their domains.

        A site's domain holds only values for which `refuse` returns None on this plan.
        """

    @abstractmethod
    def refuse(self, plan: Plan, target: Target) -> str | None:
        """Why the move is illegal on `plan`, in one sentence with numbers; None when it is legal."""

    @abstractmethod
    def rewrite(self, plan: Plan, target: Target) -> Plan:
        """The plan after the move. Only called when `refuse` returned None."""

    @property
    def accumulate(self) -> Accumulate | None:
        """How sums are kept by what the move puts in place; None when it puts no instruction in place."""
        return None

    @property
    def path(self) -> str:
        return self.launch + (f".{self.work}" if self.work else "")

    @cached_property
    def arguments(self) -> tuple[tuple[str, str | Knob | None], ...]:
        """(field, value) after launch and work."""
        return tuple((f.name, getattr(self, f.name)) for f in fields(self)[2:])

    @cached_property
    def knobs(self) -> tuple[str, ...]:
        """Names of the fields still open."""
        return tuple(n for n, v in self.arguments if isinstance(v, Open))

    def fill(self, values: Mapping[str, int]) -> Move:
        """The move with knobs set."""
        assert values.keys() <= dict(self.arguments).keys(), f"{self} has no {', '.join(values)}"
        return type(self)(self.launch, self.work, **{n: values.get(n, v) for n, v in self.arguments})

    @cached_property
    def _text(self) -> str:
        shown = [(f, getattr(self, f.name)) for f in fields(self)[2:]]
        while shown and shown[-1][1] == shown[-1][0].default:
            shown.pop()
        return f"{self.path}/{self.name}({','.join(str(v) for _, v in shown)})"

    def __str__(self) -> str:  # written once: searches sort, name and compare moves by their text
        return self._text

    def __init_subclass__(cls) -> None:
        cls.__hash__ = Move.__hash__  # type: ignore[method-assign]  # else each dataclass has its own, of all fields

    def __hash__(self) -> int:  # of what is written once: plans are looked up by the moves that make them
        return hash(self._text)


@dataclass(frozen=True, slots=True)
class Site:
    """A move with its knobs open and, for each knob, the values that are legal here.

    mandatory: a search does not stop at this plan, because no code is generated for it as it stands.
    """

    move: Move
    domains: Domains = ()
    mandatory: bool = False


MOVES: dict[str, type[Move]] = {}
_ARGUMENT_TYPES = ("str", "str | None", "Knob")  # as written: the schedule text reads names and numbers


def register(cls: type[Move]) -> type[Move]:
    """Class decorator: the schedule text can name the move."""
    if cls.name in MOVES:
        raise PlanError(f"two moves are named {cls.name}: {MOVES[cls.name].__qualname__} and {cls.__qualname__}")
    odd = [f"{f.name}: {f.type}" for f in fields(cls)[2:] if f.type not in _ARGUMENT_TYPES]
    if odd:
        raise PlanError(f"move {cls.name} has arguments {', '.join(odd)}; the types are {', '.join(_ARGUMENT_TYPES)}")
    MOVES[cls.name] = cls
    return cls


# ---------------------------------------------------------------- small tools that moves share
def legal_sites(moves: Iterable[Move], plan: Plan, target: Target) -> Iterator[Site]:
    """A site for each of the moves that is not refused, for moves without a choice to leave open."""
    return (Site(move) for move in moves if move.refuse(plan, target) is None)


def put(plan: Plan, launch: Launch, tile: Tile) -> Plan:
    """The plan with a launch's tile replaced."""
    return plan.with_launch(replace(launch, tile=tile))


def put_work(plan: Plan, launch: Launch, *new: Work) -> Plan:
    """The plan with the works of those stages replaced."""
    by_stage = {w.stage: w for w in new}
    works = tuple(by_stage.get(w.stage, w) for w in launch.tile.works)
    return put(plan, launch, replace(launch.tile, works=works))


def works_beside(plan: Plan, launch: Launch, stage: str, target: Target) -> tuple[Work, ...]:
    """The work of a stage and those that its instructions are made with: on a GPU all that are folded side by side with it."""
    return tuple(map(launch.tile.work, (stage,) if target.is_cpu else beside(plan.program, launch.tile, stage)))


def refuse_beside(move: Move, plan: Plan, stage: str) -> str | None:
    """Why the move must name another stage: this one is folded beside it, and the two are treated alike."""
    first = beside(plan.program, plan.launch(move.launch).tile, stage)[0]
    return None if first == stage else f"{stage} is folded beside {first}: {move.name} of {first} is of both"


def refuse_path(move: Move, plan: Plan, work: Literal["none", "optional", "required"] = "none") -> str | None:
    """Why the move's launch or work does not exist. `work` says whether the move is one of a launch or of a work."""
    if not plan.has_launch(move.launch):
        return f"launch {move.launch} does not exist; the plan has {', '.join(x.name for x in plan.launches)}"
    stages = [w.stage for w in plan.launch(move.launch).tile.works]
    if move.work is not None and work == "none":
        return f"{move.name} changes the whole launch: write {move.launch}/{move.name}(...), without {move.work}"
    if move.work is not None and move.work not in stages:
        return f"{move.launch} has no work {move.work}; it has {', '.join(stages)}"
    if move.work is None and work == "required":
        return f"{move.name} needs a work, such as {move.launch}.{stages[-1]}/{move.name}(...)"
    return None


def refuse_late_loop(move: Move, launch: Launch) -> str | None:
    """Why a loop can no longer be added to the launch's tile: a work's own loops already cut what is left."""
    own = next((w for w in launch.tile.works if w.nest), None)
    if own is None:
        return None
    return f"{own.stage} has {len(own.nest)} loops of its own inside the tile: {move.name} comes before them"


def refuse_ahead(move: Move, launch: Launch) -> str | None:
    """Why the launch's rings can no longer change: a work reads them ahead, by waits that fit them as they are."""
    ahead = next((w.stage for w in launch.tile.works if w.ahead), None)
    return (
        f"{ahead} reads the rings of {launch.name} ahead already: {move.name} comes before pipeline" if ahead else None
    )


def full_nest(plan: Plan, launch: Launch, work: Work | None) -> tuple[Loop, ...]:
    """The loops around the innermost piece of a work (of the tile, without one)."""
    return launch.tile.nest + (work.nest if work else ())


def powers(lo: int, hi: int) -> tuple[int, ...]:
    """Powers of two in lo..hi."""
    return tuple(1 << i for i in range(hi.bit_length()) if lo <= 1 << i <= hi)
