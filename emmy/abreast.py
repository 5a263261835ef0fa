"""Several searches at once on one device, one pool of them, or none: each in a process of its own, which asks here for its rows.

A search by `auto` takes a sixth of a second to propose a candidate, and is one thread of Python; an H200 measures one in a
fiftieth (`docs/fleet.md`). So a device that serves one search waits most of the time, and two devices all the more. The
searches are `emmy.search_main`; what they find and how they resume does not depend on which process has them, but an op knows
the winners of those that ended before it began.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from emmy import config
from emmy.errors import EmmyError
from emmy.measure.measurer import Measurer
from emmy.measure.served import Served, Turns
from emmy.ranged import Group
from emmy.search.events import Event, Listener, Note
from emmy.search.events import Finished as RunEnded
from emmy.search.finished import Finished, had_been_finished
from emmy.search.tuner import INTERRUPTED, Stop, TuneResult

log = logging.getLogger("emmy.abreast")

_LOOK_S = 0.2
_ATTEMPTS = 2  # of an op whose process was lost; the second goes on with the first one's journal


@dataclass(frozen=True, slots=True)
class Asked:
    """What a process is asked to search. `model`: as in `Terms`; `rows`: usable ones since a model was trained.

    absent: there is no device, and what it would take is predicted
    """

    group: Group
    home: Path
    model: str | None
    absent: bool = False
    done: tuple[str, ...] = ()  # of its ranges
    more: bool = True
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Told:
    """What came of it. `trained`: the model was trained anew meanwhile. Otherwise `error` says why nothing did."""

    results: tuple[TuneResult, ...] = ()
    trained: bool = False
    error: EmmyError | OSError | None = None


class Lost(EmmyError):
    """A process that searches is gone."""


class Searches:
    """Groups searched by `n` processes, in order, the next by whichever is free."""

    def __init__(
        self, here: Measurer | None, asked: Sequence[Asked], n: int, finished: Finished, on_event: Listener, stop: Stop
    ) -> None:
        """`here`: who measures; None where all that is asked is to be predicted."""
        self.here, self.finished, self.stop = here, finished, stop
        self.turns = Turns(lambda: not self.goes_on)
        self._n, self._on_event, self._lock = n, on_event, threading.RLock()
        self._todo = dict(enumerate(asked))
        self._busy: dict[int, set[str]] = {}  # ops that are being searched, by group
        self._ended = threading.Condition(self._lock)
        self._results: dict[int, tuple[TuneResult, ...]] = {}
        self._rows = 0
        self._failed: BaseException | None = None

    def results(self) -> list[TuneResult]:
        """Those of the groups in order, up to an interruption. Raises what kept a search from going on, when the others have ended."""
        lanes = [_Lane(self, i) for i in range(self._n)]
        try:
            run_all(lanes)
        except BaseException as e:  # Ctrl-C twice: no lane begins anything behind the back of who called
            self.fail(e)
            raise
        finally:
            for lane in lanes:
                lane.end()
        if self._failed is not None:
            raise self._failed
        return [r for i in sorted(self._results) for r in self._results[i]]

    # ------------------------------------------------------------ what lanes ask
    def next(self) -> tuple[int, Asked] | None:
        """A group that nobody has begun; None when there is none, or the searches should end.

        An op may be in several groups, as a size of its own and as a range of another: it is searched in the first, and then known.
        """
        with self._lock:
            while self._todo and self.goes_on:
                busy = set().union(*self._busy.values())
                free = (i for i, a in self._todo.items() if busy.isdisjoint(a.group.keys))
                if (i := next(free, None)) is None:
                    self._ended.wait(_LOOK_S)
                    continue
                asked = self._todo.pop(i)
                done = self.done(asked.group)
                if asked.group.is_in(self.finished):
                    self.tell(Note(had_been_finished(asked.group.op)))
                    continue
                self._busy[i] = set(asked.group.keys)
                return i, replace(asked, done=done, more=bool(self._todo), rows=self._rows)
            return None

    def done(self, group: Group) -> tuple[str, ...]:
        """What is left out of a group."""
        return tuple(k for k in group.keys if k in self.finished)

    @property
    def goes_on(self) -> bool:
        """Whether anything more is to be begun."""
        return not self.stop.asked and self._failed is None

    def tell(self, event: Event) -> None:
        """One event, by one thread at a time."""
        with self._lock:
            if isinstance(event, RunEnded) and event.why != INTERRUPTED:
                self.finished.add(event.op)
            self._on_event(event)

    def keep(self, i: int, asked: Asked, told: Told) -> None:
        """What came of a group."""
        with self._lock:
            if self.goes_on and (table := asked.group.table_key) is not None:
                self.finished.add(table)
            del self._busy[i]
            self._ended.notify_all()
            self._results[i] = told.results
            self._rows = 0 if told.trained else self._rows + sum(r.counts.get("ok", 0) for r in told.results)

    def fail(self, error: BaseException) -> None:
        """No group is begun any more."""
        with self._lock:
            self._failed = self._failed or error


class _Lane(threading.Thread):
    """One process, and what it is told and says. The process ends with this thread, however that ends."""

    def __init__(self, of: Searches, number: int) -> None:
        super().__init__(name=f"emmy-search-{number}", daemon=True)
        self._of = of
        self._process: _Process | None = None
        self._lock, self._over = threading.Lock(), False

    def run(self) -> None:
        try:
            while (found := self._of.next()) is not None:
                self._of.keep(*found, self._search(found[1]))
        except BaseException as e:  # noqa: BLE001  # raised by the thread that waits
            self._of.fail(e)
        finally:
            self._kill()

    def _search(self, asked: Asked) -> Told:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                told = self._process_here().search(replace(asked, done=self._of.done(asked.group)), self._of)
            except Lost as e:
                self._kill()
                if self._of.stop.asked:  # what it had is in its journal
                    return Told()
                if attempt == _ATTEMPTS or not self._of.goes_on:
                    raise
                self._of.tell(Note(f"{asked.group.op}: {e}; another goes on with its rows"))
                continue
            if told.error is not None:
                raise told.error
            return told
        raise AssertionError("an attempt returns or raises")

    def _process_here(self) -> _Process:
        with self._lock:
            if self._over:
                raise Lost("the searches have ended")
            self._process = self._process or _Process(self._of.here, self._of.turns)
            return self._process

    def _kill(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.close()

    def end(self) -> None:
        """Ends the process, if there is one still, and begins no other."""
        with self._lock:
            self._over = True
        self._kill()


class _Process:
    """A process that searches, with a thread here that measures for it, where anything is to be measured."""

    def __init__(self, here: Measurer | None, turns: Turns) -> None:
        self._connection, theirs = Pipe()
        words = (theirs.fileno(), os.getpid(), log.getEffectiveLevel())
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "emmy.search_main", *map(str, words)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    pass_fds=(theirs.fileno(),),
                    env=config.child_env(PYTHONPATH=os.pathsep.join(p for p in sys.path if p), **config.ONE_THREAD),
                    start_new_session=True,  # a terminal's Ctrl-C is for this process, which says when to stop
                )
            except OSError as e:
                self._connection.close()
                raise EmmyError(
                    f"no process that searches can be started with {sys.executable!r}: {e.strerror}. Search here: --searches 1"
                ) from None
        self._has_said = False
        self._device_error: BaseException | None = None
        if here is not None:
            threading.Thread(target=self._serve, args=(here, turns), name="emmy-search-device", daemon=True).start()

    def _serve(self, here: Measurer, turns: Turns) -> None:
        requests, answers = self._process.stdout, self._process.stdin
        assert requests is not None and answers is not None
        with requests:
            try:
                Served(here, requests, answers, turns).serve()
            except BaseException as e:  # noqa: BLE001  # a device that is gone, say: the search hears of the end, this thread's owner why
                self._device_error = e
            with contextlib.suppress(BrokenPipeError):
                answers.close()
            for _ in requests:  # until it is gone, so that it has somebody to say it to
                pass

    def search(self, asked: Asked, of: Searches) -> Told:
        """What came of it; events are told as they come. Raises Lost, or what kept the device from measuring."""
        is_stopped = not self._send(asked)
        while True:
            if of.stop.asked and not self._has_said:  # it is starting still: there is nothing to finish
                return Told()
            if of.stop.asked and not is_stopped:
                is_stopped = True
                self._send(None)
            try:
                said = self._connection.recv() if self._connection.poll(_LOOK_S) else None
            except (EOFError, OSError):  # OSError: it ended with something unread, or this end was closed by `close`
                raise self._device_error or self._lost() from None
            self._has_said = self._has_said or said is not None
            if isinstance(said, Told):
                if said.error is not None and self._device_error is not None:
                    raise self._device_error
                return said
            if said is not None:
                of.tell(said)

    def _send(self, asked: Asked | None) -> bool:
        """False when the process is gone, which whoever reads hears next."""
        try:
            self._connection.send(asked)
        except OSError:
            return False
        return True

    def _lost(self) -> Lost:
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return Lost("the process that searches has let go of its end")
        return Lost(
            f"the process that searches was killed by signal {-code}" if code < 0 else f"it ended with code {code}"
        )

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._connection.close()


def run_all(threads: Sequence[threading.Thread]) -> None:
    """Starts threads and waits until all have ended; Ctrl-C is heard meanwhile."""
    for thread in threads:
        thread.start()
    while any(t.is_alive() for t in threads):
        for thread in threads:
            thread.join(_LOOK_S)


def receive(connection: Connection) -> Asked | None:
    """What the other end asks next: something to search, or None to stop searching. Raises EOFError when it is gone."""
    said = connection.recv()
    assert said is None or isinstance(said, Asked)
    return said
