"""Every error Emmy raises. Each says what happened, where, got against allowed, and the next step.

Expected refusals (a move that is illegal at a site) are values, not exceptions; see `emmy.ir.moves`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EmmyError(Exception):
    """Base of all errors. `exit_code` is what the command line returns for it."""

    exit_code = 1

    def __reduce__(self) -> tuple[object, ...]:
        """Errors are sent from process to process, whatever their classes are made from."""
        return _again, (type(self), self.args), self.__dict__ or None


def _again(kind: type[EmmyError], args: tuple[object, ...]) -> EmmyError:
    error = kind.__new__(kind)
    error.args = args
    return error


def meant(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The question whether the nearest of the known names was meant, behind a blank; "" where none is near."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f" Did you mean {close[0]}?" if close else ""


class UsageError(EmmyError):
    """The request cannot be understood or is out of range: op text, option, file path."""

    exit_code = 2


class NoSuchDevice(EmmyError):
    """The named target is unknown, or it is not present and the request needs it."""

    exit_code = 3


class DeviceBusy(EmmyError):
    """Another process holds the device's lock."""

    exit_code = 3


class FolderBusy(EmmyError):
    """Another process writes its results into the folder."""


class WrongAnswer(EmmyError):
    """A kernel that was to be trusted gives a wrong answer."""

    exit_code = 4


class PlanError(EmmyError):
    """A plan cannot be built, lowered or executed: what, where, got against allowed."""


class IllegalMove(PlanError):
    """A schedule's move was refused. `index` counts from 0; `reason` is the move's own sentence.

    where: which of several schedules it is of, such as the range of a table
    """

    exit_code = 2  # a search never lets it out: whoever sees it wrote the schedule

    def __init__(self, index: int, move: str, reason: str, where: str = "") -> None:
        super().__init__(f"{where}{where and ': '}move {index} {move}: {reason}")
        self.index, self.move, self.reason = index, move, reason


class Race(PlanError):
    """An agent read a slot that does not hold the fill it asked for."""


class Deadlock(PlanError):
    """Every agent waits at a barrier that nobody will complete."""


class CompileError(EmmyError):
    """The host compiler or NVRTC rejected generated source; the message carries its diagnostics."""


class EmuError(EmmyError):
    """The emulator found a kernel at fault; `kind` is one word: race, deadlock, bounds, ... (docs/emulator.md)."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class DataError(EmmyError):
    """A journal, Parquet shard or database does not have the expected form."""


class DataBusy(EmmyError):
    """Another process has the measurement database open; DuckDB then lets nobody else in, not even to read."""


class StaleModel(EmmyError):
    """A cost model was trained on another feature set than this Emmy computes."""


class PackError(EmmyError):
    """A kernel pack cannot be read, or something in it cannot be run here: what, where, and the next step."""


class WrongCard(PackError):
    """The pack was made for another device than the one that is here."""

    exit_code = 3


class ServingError(EmmyError):
    """A server cannot be started, died, or did not answer as it should; the message has the end of its log."""
