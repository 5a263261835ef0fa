"""A run's journal as the run sees it: rows that an earlier sitting stored, by schedule, and where new ones go, from any thread.

A row is stored when it arrives, which on several devices may be before its turn. Its time of arrival is stored with it, so
that what was decided after it is decided again when the run is resumed.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from emmy.measure.journal import Journal, RunHeader, journal_path
from emmy.records import Measurement, new_id, now_utc


class RunJournal:
    """Open from its making to `close` or `leave`. `resumed`: rows that were there; `spent_s`: seconds until the last of them."""

    def __init__(self, home: Path, header: RunHeader) -> None:
        """The journal of the run that the header names: the interrupted one's, else a new one with this header."""
        self._header, self._lock = header, threading.Lock()
        self._recorded: dict[str, deque[Measurement]] = defaultdict(deque)
        self._elapsed_s: dict[str, float] = {}  # by row
        self.resumed, self.spent_s = 0, 0.0
        path = journal_path(home, header.run_id)
        if path.exists():
            self._journal, old = Journal.reopen(path)
            for row, elapsed_s in zip(old.rows, old.elapsed_s, strict=True):
                self._recorded[row.schedule].append(row)
                self._elapsed_s[row.id] = elapsed_s
            self.resumed, self.spent_s = len(old.rows), max(old.elapsed_s, default=0.0)
        else:
            self._journal = Journal.create(path, header)
        self.begin()

    def begin(self) -> None:
        """The clock of this sitting starts now."""
        self._began = time.monotonic()

    def keep(self, row: Measurement, static: Callable[[str], dict[str, float]] = lambda schedule: {}) -> Measurement:
        """The row as it is stored. `static`: what is noted of a schedule besides."""
        row = replace(
            row,
            run_id=self._header.run_id,
            id=row.id or new_id(),
            emmy_version=self._header.emmy_version,
            time_utc=row.time_utc or now_utc(),
            static={**row.static, **static(row.schedule)},
        )
        with self._lock:
            elapsed_s = self.spent_s + time.monotonic() - self._began
            self._journal.append(row, elapsed_s)
            self._elapsed_s[row.id] = elapsed_s
        return row

    def elapsed_s(self, row: Measurement) -> float:
        """The seconds that had been spent on the run when the row was stored."""
        return self._elapsed_s[row.id]

    def take(self, schedule: str) -> Measurement | None:
        """The next row that an earlier sitting stored of the schedule; each is given once."""
        return self._recorded[schedule].popleft() if self._recorded.get(schedule) else None

    def left(self) -> list[Measurement]:
        """The next row of each schedule that was not taken yet."""
        return [rows[0] for rows in self._recorded.values() if rows]

    def close(self) -> None:
        """The run has ended: its rows may be ingested."""
        self._journal.close()

    def leave(self) -> None:
        """Lets go of the file, so that the same command can resume the run."""
        self._journal.leave()
