"""The dataset: rows come in once, survive kills, come out equal; best and query see what they should."""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import duckdb
import pytest

from emmy.costmodel.dataset import Dataset
from emmy.costmodel.shards import Manifest, as_shipped, write_manifest, write_part
from emmy.errors import DataBusy, DataError, UsageError
from emmy.measure.journal import Journal
from emmy.records import Protocol


def test_rows_come_out_as_they_went_in_to_the_last_bit(tmp_path: Path, make_row, write_journal) -> None:
    rows = [make_row(i) for i in range(50)]
    write_journal(tmp_path, "a", rows)
    dataset = Dataset(tmp_path)
    report = dataset.ingest()
    assert (report.journals, report.rows, report.new_rows, report.damaged) == (1, 50, 50, ())
    assert [r.to_json() for r in dataset.rows()] == [r.to_json() for r in rows]


def test_a_row_counts_once_however_often_its_journal_is_ingested(tmp_path: Path, make_row, write_journal) -> None:
    dataset = Dataset(tmp_path)
    path = write_journal(tmp_path, "a", [make_row(1), make_row(2), make_row(2)])
    dataset.ingest()
    (tmp_path / "journal" / "ingested" / path.name).rename(path)  # as if killed between commit and move
    assert dataset.ingest().new_rows == 0
    write_journal(tmp_path, "b", [make_row(2), make_row(3)])
    assert dataset.ingest().new_rows == 1
    assert [r.id for r in dataset.rows()] == [make_row(i).id for i in (1, 2, 3)]


def test_open_journals_wait_and_dead_ones_come_in_only_on_demand(tmp_path: Path, make_row, write_journal) -> None:
    dataset = Dataset(tmp_path)
    path = write_journal(tmp_path, "dead", [make_row(0)], close=False)
    assert dataset.ingest().journals == 0
    journal, _ = Journal.reopen(path)
    assert dataset.ingest(dead=True).journals == 0  # a live run's journal is left alone
    journal.leave()
    assert dataset.ingest(dead=True).new_rows == 1


def test_a_disk_that_fills_up_is_named_and_no_row_is_lost(tmp_path: Path, make_row, write_journal) -> None:
    write_journal(tmp_path, "a", [make_row(i) for i in range(3)])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(DataError, match=r"cannot write the database.*Free space"):
            Dataset(tmp_path).ingest()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    Dataset(tmp_path).ingest()
    assert [r.id for r in Dataset(tmp_path).rows()] == [make_row(i).id for i in range(3)]


def test_one_damaged_journal_keeps_no_other_out(tmp_path: Path, make_row, write_journal) -> None:
    bad = write_journal(tmp_path, "bad", [make_row(0), make_row(1)])
    bad.write_bytes(bad.read_bytes().replace(b'"status":"ok"', b'"status":"no"'))
    write_journal(tmp_path, "good", [make_row(2)])
    report = Dataset(tmp_path).ingest()
    assert report.new_rows == 1 and len(report.damaged) == 1 and f"{bad}:2" in report.damaged[0]
    assert bad.exists()


def test_a_home_with_quotes_and_blanks_in_its_name_works(tmp_path: Path, make_row, write_journal) -> None:
    home = tmp_path / "it's a 'home'; DROP TABLE measurement"
    write_journal(home, "a", [make_row(0)])
    dataset = Dataset(home)
    dataset.ingest()
    part = write_part(home / "cpu", [make_row(1)])
    write_manifest(home / "cpu", Manifest("cpu", "Apache-2.0", "test", (part,)))
    assert len(dataset.rows()) == 2 and dataset.rows(target="' OR 1=1 --") == ()


def test_shards_and_database_are_one_set_by_id(tmp_path: Path, make_row, write_journal) -> None:
    write_journal(tmp_path / "home", "a", [make_row(0), make_row(1)])
    part = write_part(tmp_path / "shipped" / "cpu", [make_row(1), make_row(2)])
    write_manifest(tmp_path / "shipped" / "cpu", Manifest("cpu", "Apache-2.0", "test", (part,)))
    dataset = Dataset(tmp_path / "home", (tmp_path / "shipped",))
    dataset.ingest()
    assert dataset.rows() == (make_row(0), make_row(1), as_shipped(make_row(2)))


def test_rows_are_filtered_by_target_op_status_and_origin(tmp_path: Path, make_row, write_journal) -> None:
    rows = [
        make_row(i, target="cpu" if i % 2 else "h200", origin="derived" if i == 3 else "measured") for i in range(10)
    ]
    write_journal(tmp_path, "a", rows)
    dataset = Dataset(tmp_path)
    dataset.ingest()
    assert dataset.rows(target="h200") == tuple(r for r in rows if r.device.target == "h200")
    assert dataset.rows(op=rows[0].op) == tuple(r for r in rows if r.op == rows[0].op)
    assert dataset.rows(statuses=("correctness",)) == tuple(r for r in rows if r.status == "correctness")
    assert dataset.rows(origins=("derived",)) == (rows[3],)


def _timed(make_row, number: int, us: float, **changes: object):
    same = {
        "op": "matmul:8x8x8:f32",
        "schedule": "s",
        "source_digest": "d",
        "protocol": Protocol(),
        "baseline_us": 20.0,
    }
    return make_row(number * 5, samples_us=(us,) * 3, status="ok", **{**same, **changes})


def test_best_is_the_fastest_honest_schedule_per_device_and_protocol(tmp_path: Path, make_row, write_journal) -> None:
    rows = [
        _timed(make_row, 1, 10.0, schedule="steady"),
        _timed(make_row, 2, 9.0, schedule="lucky once"),
        _timed(make_row, 3, 14.0, schedule="lucky once"),  # its median, 11.5, is slower than steady's
        _timed(make_row, 4, 1.0, schedule="contended", contended=True),
        _timed(make_row, 5, 1.0, schedule="derived", origin="derived"),
        _timed(make_row, 6, 1.0, schedule="imported", origin="imported"),
        _timed(make_row, 7, 1.0, schedule="implausible"),
        _timed(make_row, 8, 5.0, schedule="warm", protocol=Protocol(cache="warm")),
        _timed(make_row, 9, 7.0, schedule="other card", uuid_hash="77"),
    ]
    rows[6] = replace(rows[6], status="implausible")
    write_journal(tmp_path, "a", rows)
    dataset = Dataset(tmp_path)
    dataset.ingest()
    with dataset.snapshot() as snapshot:
        best = snapshot.best(op="matmul:8x8x8:f32", target="cpu")
    assert [(b.row.schedule, b.time_us, b.ratio) for b in best] == [
        ("warm", 5.0, 4.0),
        ("other card", 7.0, 20 / 7),
        ("steady", 10.0, 2.0),
    ]


@pytest.mark.parametrize(
    "sql",
    [
        "COPY measurement TO '{home}/stolen.csv'",
        "SELECT * FROM read_text('{home}/secret')",
        "ATTACH '{home}/emmy.duckdb' AS again",
        "SET enable_external_access = true",
        "SELECT * FROM nowhere",
    ],
)
def test_a_query_reads_the_copy_and_reaches_no_file(tmp_path: Path, make_row, write_journal, sql: str) -> None:
    (tmp_path / "secret").write_text("secret")
    write_journal(tmp_path, "a", [make_row(0)])
    dataset = Dataset(tmp_path)
    dataset.ingest()
    before = sorted(tmp_path.iterdir())
    with dataset.snapshot() as snapshot, pytest.raises(UsageError, match="the query failed"):
        snapshot.query(sql.format(home=tmp_path))
    assert sorted(tmp_path.iterdir()) == before


def test_a_query_that_deletes_changes_the_copy_alone(tmp_path: Path, make_row, write_journal) -> None:
    write_journal(tmp_path, "a", [make_row(0)])
    dataset = Dataset(tmp_path)
    dataset.ingest()
    with dataset.snapshot() as snapshot:
        snapshot.query("DELETE FROM stored")
        assert snapshot.query("SELECT count(*) AS n FROM measurement").rows == ((0,),)
    assert len(dataset.rows()) == 1


def test_an_empty_home_has_no_rows_and_gets_no_database(tmp_path: Path) -> None:
    assert Dataset(tmp_path).rows() == () and list(tmp_path.iterdir()) == []


HOLD = """
import sys, duckdb
con = duckdb.connect(sys.argv[1])
print("open", flush=True)
sys.stdin.read()
"""


def test_a_database_that_another_process_holds_is_busy_with_its_pid(tmp_path: Path, make_row, write_journal) -> None:
    write_journal(tmp_path, "a", [make_row(0)])
    dataset = Dataset(tmp_path, wait_s=0.2)
    dataset.ingest()
    path = write_journal(tmp_path, "b", [make_row(1)])
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(dataset.database)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    with pytest.raises(DataBusy, match=str(holder.pid)):
        dataset.rows()
    with pytest.raises(DataBusy, match=str(holder.pid)):
        dataset.ingest()
    assert path.exists()
    holder.communicate()
    assert dataset.ingest().new_rows == 1


INGEST = """
import sys
from pathlib import Path
from emmy.costmodel.dataset import Dataset
import duckdb
print("ready", flush=True)
Dataset(Path(sys.argv[1])).ingest()
"""


@pytest.mark.slow
def test_an_ingest_killed_at_any_moment_loses_and_doubles_no_row(tmp_path: Path, make_row, write_journal) -> None:
    rng = random.Random(0)
    dataset = Dataset(tmp_path)
    expected = 0
    for round_ in range(6):
        rows = [make_row(1000 * round_ + i) for i in range(200)]
        for run in range(4):
            write_journal(tmp_path, f"{round_}-{run}", rows[50 * run : 50 * run + 50])
        expected += len(rows)
        process = subprocess.Popen(
            [sys.executable, "-c", INGEST, str(tmp_path)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )
        assert process.stdout is not None
        process.stdout.readline()
        try:
            process.wait(timeout=rng.uniform(0.0, 0.4))
        except subprocess.TimeoutExpired:
            process.kill()
        process.wait()
        process.stdout.close()
        dataset.rows()  # reopens, whatever state the kill left
        dataset.ingest()
        assert len(dataset.rows()) == expected
    with dataset.snapshot() as snapshot:
        assert snapshot.query("SELECT count(*) FROM stored").rows == ((expected,),)


def test_a_killed_writer_leaves_a_database_that_reopens_with_what_it_committed(
    tmp_path: Path, make_row, write_journal
) -> None:
    write_journal(tmp_path, "a", [make_row(i) for i in range(20)])
    script = (
        "import os, sys\nfrom pathlib import Path\nfrom emmy.costmodel import dataset, database\n"
        "real = dataset.append_new\n"
        "def die(con, rows):\n    real(con, rows)\n    con.execute('BEGIN')\n"
        "    con.execute('INSERT INTO measurement SELECT * FROM measurement')\n    os.kill(os.getpid(), 9)\n"
        "dataset.append_new = die\ndataset.Dataset(Path(sys.argv[1])).ingest()\n"
    )
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=env, check=False)
    assert killed.returncode == -9
    dataset = Dataset(tmp_path)
    assert (tmp_path / "emmy.duckdb.wal").exists() and len(dataset.rows()) == 20
    assert dataset.ingest().new_rows == 0 and len(dataset.rows()) == 20


def test_a_broken_database_is_named_with_the_way_out_and_rebuilt_from_the_journals(
    tmp_path: Path, make_row, write_journal
) -> None:
    write_journal(tmp_path, "a", [make_row(i) for i in range(8)])
    dataset = Dataset(tmp_path)
    dataset.ingest()
    dataset.database.write_bytes(b"\0" * 4096)
    (tmp_path / "emmy.duckdb.wal").write_bytes(b"junk")
    with pytest.raises(DataError, match="emmy data rebuild"):
        dataset.rows()
    report = dataset.rebuild()
    assert report.rows == 8 and report.salvaged is None and report.kept_as is not None and report.kept_as.exists()
    assert len(dataset.rows()) == 8 and not (tmp_path / "emmy.duckdb.wal").exists()


def test_a_rebuild_keeps_rows_whose_journal_is_gone(tmp_path: Path, make_row, write_journal) -> None:
    dataset = Dataset(tmp_path)
    path = write_journal(tmp_path, "a", [make_row(0), make_row(1)])
    dataset.ingest()
    (tmp_path / "journal" / "ingested" / path.name).unlink()
    write_journal(tmp_path, "b", [make_row(2)])
    report = dataset.rebuild()
    assert (report.rows, report.salvaged) == (1, 2)
    assert dataset.rows() == (make_row(0), make_row(1), make_row(2))


def test_a_database_of_another_schema_version_is_refused(tmp_path: Path, make_row, write_journal) -> None:
    write_journal(tmp_path, "a", [make_row(0)])
    dataset = Dataset(tmp_path)
    dataset.ingest()
    with duckdb.connect(str(dataset.database)) as con:
        con.execute("INSERT INTO schema_version VALUES (2)")
    with pytest.raises(DataError, match=r"schema version \[1, 2\], this Emmy reads 1"):
        dataset.rows()


def test_rows_of_an_edited_shard_are_not_used(tmp_path: Path, make_row) -> None:
    """Whole Parquet with other rows in it: only the digest can tell."""
    folder = tmp_path / "cpu"
    part, other = write_part(folder, [make_row(0)]), write_part(folder, [make_row(1)])
    write_manifest(folder, Manifest("cpu", "Apache-2.0", "test", (part,)))
    (folder / other.file).replace(folder / part.file)
    with pytest.raises(DataError, match=r"not the file that its manifest describes.*emmy data verify"):
        Dataset(tmp_path).rows()


@pytest.mark.parametrize("at", [0.1, 0.5, 0.9])
def test_a_damaged_shard_is_an_error_that_names_it(tmp_path: Path, make_row, at: float) -> None:
    part = write_part(tmp_path / "cpu", [make_row(i) for i in range(30)])
    write_manifest(tmp_path / "cpu", Manifest("cpu", "Apache-2.0", "test", (part,)))
    path = tmp_path / "cpu" / part.file
    data = bytearray(path.read_bytes())
    begin = int(len(data) * at)
    data[begin : begin + 200] = b"\xff" * len(data[begin : begin + 200])
    path.write_bytes(data)
    with pytest.raises(DataError, match=path.name):
        Dataset(tmp_path).rows()


@pytest.mark.parametrize("sql", ["", " ", "-- nothing"])
def test_an_empty_query_is_refused(tmp_path: Path, sql: str) -> None:
    with Dataset(tmp_path).snapshot() as snapshot, pytest.raises(UsageError, match="the query is empty"):
        snapshot.query(sql)


def test_a_manifest_that_is_nested_without_end_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "manifest.json").write_text("[" * 200_000)
    with pytest.raises(DataError, match="not a readable manifest"):
        Dataset(tmp_path).rows()


def test_a_folder_named_as_a_journal_is_left_alone(tmp_path: Path, make_row, write_journal) -> None:
    write_journal(tmp_path, "a", [make_row(0)])
    (tmp_path / "journal" / "b-0.jsonl").mkdir()
    (tmp_path / "journal" / "c-0.closed.jsonl").mkdir()
    report = Dataset(tmp_path).ingest(dead=True)
    assert (report.new_rows, report.damaged) == (1, ())
