"""Rows that are measured outside of a search: through a journal of their own into the dataset. Knows no devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from emmy.costmodel.dataset import Dataset
from emmy.errors import DataBusy, DataError
from emmy.measure.journal import Journal, RunHeader, journal_path
from emmy.records import Measurement, new_id, now_utc

Keep = Callable[[Measurement], Measurement]


@contextmanager
def recording(home: Path, what: str, op: str, target: str, emmy_version: str) -> Iterator[Keep]:
    """Keeps rows as they come and gives them back as they are kept: measured is measured, whatever for."""
    run_id = new_id()
    header = RunHeader(run_id, op, target, what, 0, "", emmy_version=emmy_version, time_utc=now_utc())
    began = time.monotonic()
    with Journal.create(journal_path(home, run_id), header) as journal:

        def keep(row: Measurement) -> Measurement:
            kept = replace(row, run_id=run_id, emmy_version=emmy_version, id=row.id or new_id())
            kept = replace(kept, time_utc=kept.time_utc or now_utc())
            journal.append(kept, time.monotonic() - began)
            return kept

        try:
            yield keep
        finally:  # also after Ctrl-C: there is no run here that could be resumed
            journal.close()
    try_ingest(home)


def try_ingest(home: Path) -> str:
    """Takes closed journals in; why it could not, else "". Rows are safe there: a busy database is no reason to fail."""
    try:
        Dataset.of(home).ingest()
    except (DataBusy, DataError) as e:
        return f"{e} The rows stay in their journals until the next command."
    return ""
