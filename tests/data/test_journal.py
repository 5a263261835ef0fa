"""The journal loses no row that was written, whatever becomes of its writer, its disk or its bytes."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emmy.errors import DataError
from emmy.measure.journal import (
    Journal,
    RunHeader,
    closed_journals,
    ingested_path,
    is_live,
    journal_path,
    open_journals,
    read_journal,
)
from emmy.records import Measurement

HEADER = RunHeader("r", "matmul:8x8x8:f32", "cpu", "random", 7, "10 trials", model="ab", emmy_version="0.1.0")
quick = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def test_what_was_appended_is_read_back_equal_and_in_order(tmp_path: Path, make_row) -> None:
    rows = [make_row(i) for i in range(12)]
    path = journal_path(tmp_path, "r")
    with Journal.create(path, HEADER) as journal:
        for i, row in enumerate(rows):
            journal.append(row, elapsed_s=i / 4)
    contents = read_journal(closed_journals(tmp_path)[0])
    assert contents.header == HEADER and contents.rows == tuple(rows) and not contents.torn
    assert contents.elapsed_s == tuple(i / 4 for i in range(12))


def test_every_line_of_a_journal_is_one_json_object(tmp_path: Path, make_row, write_journal) -> None:
    path = write_journal(tmp_path, "r", [make_row(0), make_row(4)])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [sorted(x) for x in lines] == [["crc", "run", "v"]] + 2 * [["crc", "elapsed_s", "row", "v"]]


def test_a_journal_cut_at_any_byte_keeps_every_whole_row_and_can_be_continued(
    tmp_path: Path, make_row, write_journal
) -> None:
    rows = [make_row(i) for i in range(2)]
    data = write_journal(tmp_path, "whole", rows, close=False).read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    path = journal_path(tmp_path, "cut")
    for length in range(ends[0], len(data) + 1):
        path.write_bytes(data[:length])
        whole = sum(end <= length for end in ends) - 1
        contents = read_journal(path)
        assert contents.rows == tuple(rows[:whole])
        assert contents.torn == (length not in ends)
        if length % 97 and not {length - 1, length, length + 1} & set(ends):
            continue  # continuing syncs the disk each time: at a sample of the lengths
        journal, kept = Journal.reopen(path)
        assert kept.rows == contents.rows
        journal.append(make_row(99), elapsed_s=1.0)
        journal.leave()
        again = read_journal(path)
        assert again.rows == (*rows[:whole], make_row(99)) and not again.torn


def test_a_journal_whose_header_is_cut_is_refused_with_its_line(tmp_path: Path, make_row, write_journal) -> None:
    data = write_journal(tmp_path, "whole", [], close=False).read_bytes()
    path = tmp_path / "cut.jsonl"
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(DataError, match=r"cut\.jsonl:1"):
            read_journal(path)


@quick
@given(data=st.data())
def test_any_flipped_bit_in_a_whole_line_is_an_error_that_names_the_line(
    tmp_path: Path, make_row, write_journal, data
) -> None:
    path = tmp_path / "journal" / "flip-0.jsonl"
    path.unlink(missing_ok=True)
    original = write_journal(tmp_path, "flip", [make_row(i) for i in range(3)], close=False).read_bytes()
    at = data.draw(st.integers(0, len(original) - 2))
    bit = data.draw(st.integers(0, 7))
    damaged = bytearray(original)
    damaged[at] ^= 1 << bit
    path.write_bytes(damaged)
    line = original[:at].count(b"\n") + 1
    with pytest.raises(DataError, match=rf"flip-0\.jsonl:{line}: "):
        read_journal(path)


def test_a_row_moved_to_a_journal_of_another_schema_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.jsonl"
    import zlib

    body = b'{"run":{},"v":99}'
    path.write_bytes(b'{"crc":"%08x",' % zlib.crc32(body) + body[1:] + b"\n")
    with pytest.raises(DataError, match=r"old\.jsonl:1: schema version 99, this Emmy reads 1"):
        read_journal(path)


def test_the_dropped_tail_is_reported_in_the_log(tmp_path: Path, make_row, write_journal, caplog) -> None:
    path = write_journal(tmp_path, "r", [make_row(0)])
    path.write_bytes(path.read_bytes() + b'{"crc":')
    with caplog.at_level(logging.WARNING, logger="emmy.measure.journal"):
        assert read_journal(path).torn_bytes == 7
    assert "dropped 7 bytes" in caplog.text


def test_a_row_without_an_id_is_not_written(tmp_path: Path, make_row) -> None:
    with pytest.raises(DataError, match="has no id"), Journal.create(journal_path(tmp_path, "r"), HEADER) as journal:
        journal.append(make_row(0, id=""), elapsed_s=0.0)


def test_a_second_writer_of_the_same_journal_is_refused(tmp_path: Path) -> None:
    path = journal_path(tmp_path, "r")
    with Journal.create(path, HEADER):
        with pytest.raises(DataError, match="exists already"):
            Journal.create(path, HEADER)
        with pytest.raises(DataError, match="another run is writing"):
            Journal.reopen(path)


def test_a_closed_journal_is_neither_reopened_nor_made_again(tmp_path: Path) -> None:
    path = journal_path(tmp_path, "r")
    closed = Journal.create(path, HEADER).close()
    with pytest.raises(DataError, match="its run ended"):
        Journal.reopen(closed)
    with pytest.raises(DataError, match="exists already"):
        Journal.create(path, HEADER)


def test_a_run_that_raises_leaves_its_journal_open_to_be_resumed(tmp_path: Path, make_row) -> None:
    path = journal_path(tmp_path, "r")
    with pytest.raises(RuntimeError), Journal.create(path, HEADER) as journal:
        journal.append(make_row(0), elapsed_s=0.0)
        raise RuntimeError
    assert open_journals(tmp_path) == (path,) and closed_journals(tmp_path) == () and not is_live(path)


WRITER = """
import os, resource, signal, sys
from pathlib import Path
from emmy.errors import DataError
from emmy.measure.journal import Journal, RunHeader, is_live, journal_path
from emmy.records import Measurement

path = journal_path(Path(sys.argv[1]), "r")
row = Measurement.from_json(sys.argv[3])
journal = Journal.create(path, RunHeader("r", "op", "cpu", "random", 0, "1 trial"))
if sys.argv[2] == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
n = 0
try:
    while True:
        journal.append(row, float(n))
        n += 1
        print(n, flush=True)
except DataError as e:
    print(e, flush=True)
"""


def _writer(home: Path, mode: str, row: Measurement) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(home), mode, row.to_json()]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.getcwd()})


def test_a_disk_that_fills_up_stops_the_run_and_keeps_every_row(tmp_path: Path, make_row) -> None:
    out, _ = _writer(tmp_path, "full", make_row(1)).communicate(timeout=30)
    *counts, message = out.splitlines()
    path = journal_path(tmp_path, "r")
    contents = read_journal(path)
    assert len(contents.rows) == int(counts[-1]) > 3 and not contents.torn
    assert f"row {len(counts) + 1} cannot be written" in message and "resume" in message
    journal, kept = Journal.reopen(path)
    journal.append(make_row(2), elapsed_s=0.0)
    assert len(read_journal(journal.close()).rows) == len(kept.rows) + 1


def test_a_killed_writer_loses_no_row_it_had_reported(tmp_path: Path, make_row) -> None:
    for after in (1, 3, 8):
        home = tmp_path / str(after)
        process = _writer(home, "run", make_row(after))
        assert process.stdout is not None
        reported = 0
        while reported < after:
            reported = int(process.stdout.readline())
        path = journal_path(home, "r")
        assert is_live(path)
        process.send_signal(signal.SIGKILL)
        reported = max([reported, *(int(line) for line in process.stdout.read().split())])
        process.wait()
        process.stdout.close()
        assert reported <= len(read_journal(path).rows) <= reported + 1
        assert not is_live(path)


def test_what_one_of_the_same_number_left_when_it_was_killed_does_not_keep_a_journal_from_being_made(
    tmp_path: Path,
) -> None:
    """In a container every tuner may have the same process id."""
    path = journal_path(tmp_path, "r")
    path.parent.mkdir()
    path.with_name(f".{path.name}.{os.getpid()}.tmp").write_text("half a hea")
    with Journal.create(path, HEADER):
        assert read_journal(path).header == HEADER
    assert [p.name for p in path.parent.iterdir()] == [closed_journals(tmp_path)[0].name]


def test_a_journal_that_is_closed_and_ingested_after_it_was_listed_is_still_read(tmp_path: Path, make_row) -> None:
    path = journal_path(tmp_path, "r")
    with Journal.create(path, HEADER) as journal:
        journal.append(make_row(1), elapsed_s=0.0)
    (closed,) = closed_journals(tmp_path)
    assert read_journal(path).path == closed and len(read_journal(path).rows) == 1 and not is_live(path)
    ingested_path(closed).parent.mkdir()
    closed.rename(ingested_path(closed))
    assert read_journal(path).path == read_journal(closed).path == ingested_path(closed)
    ingested_path(closed).unlink()
    with pytest.raises(DataError, match="no such file"):
        read_journal(path)


def test_a_journal_closed_by_another_while_it_is_reopened_takes_no_more_rows(
    tmp_path: Path, make_row, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = journal_path(tmp_path, "r")
    Journal.create(path, HEADER).leave()
    really = fcntl.flock

    def late(fd: int, operation: int) -> None:
        monkeypatch.undo()
        Journal.reopen(path)[0].close()
        really(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(DataError, match="another run has closed this journal"):
        Journal.reopen(path)
    assert len(closed_journals(tmp_path)) == 1 and not open_journals(tmp_path)
