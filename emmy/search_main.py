"""A process that searches: `python -m emmy.search_main`, started by `emmy.abreast` only.

What it asks measured goes through standard input and output (`emmy.measure.served`); what it is to search, its events and
its results go through a connection of their own. What libraries print goes to standard error.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property, lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

from emmy import __version__
from emmy.abreast import Asked, Told, receive
from emmy.costmodel.model import CostModel
from emmy.costmodel.upkeep import Upkeep
from emmy.errors import EmmyError
from emmy.ir.target import Target
from emmy.measure.served import ServedMeasurer
from emmy.measure.worker_main import die_with_parent
from emmy.search.events import Event, ignore
from emmy.search.finished import Finished
from emmy.search.session import load_model
from emmy.search.sitting import Sitting
from emmy.search.tuner import Stop
from emmy.tuning import leading_absent, predicted, tuned

log = logging.getLogger("emmy.search_main")


class Fault(EmmyError):
    """Something that is not to happen in a search."""


def main(words: list[str]) -> int:
    """Searches what is asked until the parent closes its end."""
    fd, parent, level = map(int, words)
    if not die_with_parent(parent):
        return 0
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle, which says when to stop
    logging.basicConfig(level=level, format="%(name)s: %(message)s")
    connection = Connection(fd)
    measured, asks = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    jobs: SimpleQueue[Asked | None] = SimpleQueue()
    stop = Stop()
    threading.Thread(target=_listen, args=(connection, jobs, stop), daemon=True).start()
    searching = _Searching(connection, lambda: ServedMeasurer(measured, asks), stop)
    while (asked := jobs.get()) is not None:
        with suppress(BrokenPipeError):  # the parent is gone, and this process about to be killed
            connection.send(_told(searching, asked))
    return 0


def _told(searching: _Searching, asked: Asked) -> Told:
    try:
        return searching.answer(asked)
    except (EmmyError, OSError) as e:
        return Told(error=e)
    except Exception as e:  # the loop of a worker: the command says what kept it from going on
        log.exception("%s: a fault", asked.group.op)
        return Told(
            error=Fault(f"{asked.group.op}: a fault in Emmy: {type(e).__name__}: {e}. Please report what is above.")
        )


def _listen(connection: Connection, jobs: SimpleQueue[Asked | None], stop: Stop) -> None:
    """Hears what is asked while something is searched: to stop, above all."""
    while True:
        try:
            asked = receive(connection)
        except (EOFError, OSError):
            jobs.put(None)
            return
        if asked is None:
            stop.asked = True
        else:
            jobs.put(asked)


@lru_cache(maxsize=1)  # it is led so until the command ends, which said by whom
def _leading_absent(choice: str | None, target: Target, home: Path) -> CostModel | None:
    return leading_absent(load_model(choice, target, home), choice, target, home, ignore)


class _Searching:
    def __init__(self, connection: Connection, device: Callable[[], ServedMeasurer], stop: Stop) -> None:
        self._connection, self._device, self._stop = connection, device, stop
        self._upkeep: Upkeep | None = None

    @cached_property
    def _here(self) -> ServedMeasurer:
        """Who measures; nobody is asked for where all is predicted."""
        return self._device()

    def answer(self, asked: Asked) -> Told:
        group = asked.group
        if self._stop.asked:
            return Told()
        if asked.absent:
            return self._predicted(asked)
        if asked.model is None:
            self._upkeep = self._upkeep or Upkeep(asked.home, group.target.name)
            self._upkeep.new = asked.rows
        leader = load_model(asked.model, group.target, asked.home, self._tell)
        sitting = Sitting(
            group.requests, self._here, asked.home, __version__, leader, self._upkeep, Finished(keys=asked.done),
            self._tell, self._stop, asked.more,
        )  # fmt: skip
        results = tuned(group, sitting)
        return Told(tuple(results), self._upkeep is not None and self._upkeep.new == 0)

    def _predicted(self, asked: Asked) -> Told:
        leader = _leading_absent(asked.model, asked.group.target, asked.home)
        done = Finished(keys=asked.done)
        return Told(tuple(predicted(asked.group, asked.home, leader, done, self._tell, self._stop)))

    def _tell(self, event: Event) -> None:
        self._connection.send(event)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
