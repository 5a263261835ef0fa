"""Shards: what is exported comes in the same elsewhere, damage is named, and other people's rows stay marked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import duckdb
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emmy.costmodel.database import in_memory, quote
from emmy.costmodel.dataset import Dataset
from emmy.costmodel.exchange import append_part, export_shard
from emmy.costmodel.files import sha256_of
from emmy.costmodel.place import Folder
from emmy.costmodel.pull import PullReport, pull
from emmy.costmodel.quarantine import Quarantine
from emmy.costmodel.schema import CREATE, insert
from emmy.costmodel.shards import (
    MANIFEST,
    Manifest,
    Part,
    as_shipped,
    read_manifest,
    read_part,
    verify,
    write_manifest,
    write_part,
)
from emmy.costmodel.stats import data_stats
from emmy.errors import DataError, UsageError
from tests.data.conftest import make_row as row_of


def _take_in(source: Path, dataset: Dataset, *, own: bool = False) -> tuple[int, int, PullReport]:
    """New rows and known ones, all of what came in being released."""
    report = pull(dataset, Folder(source))
    releases = [Quarantine(dataset).release(a, "by hand", own=own) for a in report.arrivals]
    return sum(r.new for r in releases), sum(r.known for r in releases), report


@pytest.fixture
def filled(tmp_path: Path, make_row, write_journal) -> Dataset:
    dataset = Dataset(tmp_path / "home")
    write_journal(dataset.home, "a", [make_row(i, target="cpu" if i < 30 else "h200") for i in range(40)])
    dataset.ingest()
    return dataset


def test_an_export_imported_as_ones_own_gives_the_same_rows_rounded(filled: Dataset, tmp_path: Path) -> None:
    """And exported again the same bytes."""
    report = export_shard(filled, "cpu", tmp_path / "out")
    assert report.rows == 30 and report.part is not None and verify(report.folder) == ()
    other = Dataset(tmp_path / "other")
    assert _take_in(tmp_path / "out", other, own=True)[:2] == (30, 0)
    assert [r.to_json() for r in other.rows()] == [as_shipped(r).to_json() for r in filled.rows(target="cpu")]
    again = export_shard(other, "cpu", tmp_path / "again")
    assert again.part is not None and again.part.read_bytes() == report.part.read_bytes()


def test_the_same_rows_make_the_same_file(filled: Dataset, tmp_path: Path) -> None:
    one = export_shard(filled, "cpu", tmp_path / "one").part
    two = export_shard(filled, "cpu", tmp_path / "two").part
    assert one is not None and two is not None and one.name == two.name and one.read_bytes() == two.read_bytes()


def test_a_second_export_writes_only_what_is_new_and_never_touches_a_part(
    filled: Dataset, tmp_path: Path, make_row, write_journal
) -> None:
    out = tmp_path / "out"
    first = export_shard(filled, "cpu", out, provenance="a laptop")
    assert first.part is not None
    before = first.part.read_bytes()
    assert export_shard(filled, "cpu", out).part is None
    write_journal(filled.home, "b", [make_row(100)])
    filled.ingest()
    second = export_shard(filled, "cpu", out)
    assert (second.rows, second.already) == (1, 30)
    assert first.part.read_bytes() == before and verify(first.folder) == ()
    assert [p.rows for p in read_manifest(first.folder).parts] == [30, 1]
    assert read_manifest(first.folder).provenance == "a laptop"


def test_other_peoples_rows_become_imported_and_derived_ones_stay_derived(tmp_path: Path, make_row) -> None:
    folder = tmp_path / "theirs" / "cpu"
    part = write_part(folder, [make_row(0), make_row(1, origin="derived"), make_row(2, origin="imported")])
    write_manifest(folder, Manifest("cpu", "MIT", "someone else", (part,)))
    dataset = Dataset(tmp_path / "home")
    assert _take_in(folder, dataset)[:2] == (3, 0)
    assert [r.origin for r in dataset.rows()] == ["imported", "derived", "imported"]
    with dataset.snapshot() as snapshot:
        assert snapshot.best() == ()
    manifest = read_manifest(dataset.imported / "cpu")
    assert (manifest.licence, manifest.provenance) == ("MIT", "someone else")


def test_taking_in_what_is_known_changes_nothing(filled: Dataset, tmp_path: Path) -> None:
    export_shard(filled, "cpu", tmp_path / "out")
    assert _take_in(tmp_path / "out", filled)[:2] == (0, 30)
    assert all(r.origin == "measured" for r in filled.rows())
    assert _take_in(tmp_path / "out", filled)[2].already == 1


def test_rows_under_another_licence_are_not_mixed_in_and_stay_held(tmp_path: Path, make_row) -> None:
    dataset = Dataset(tmp_path / "home")
    for i, licence in enumerate(("MIT", "CC-BY-4.0")):
        append_part(tmp_path / licence / "cpu", [make_row(i)], Manifest("cpu", licence, "x"))
    _take_in(tmp_path / "MIT", dataset)
    with pytest.raises(DataError, match=r"under MIT, these are under CC-BY-4\.0"):
        _take_in(tmp_path / "CC-BY-4.0", dataset)
    assert len(dataset.rows()) == 1
    (held,) = Quarantine(dataset).arrivals("held")
    assert [r.id for r in held.rows()] == [make_row(1).id]


def test_a_target_without_rows_cannot_be_exported(filled: Dataset, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no measured rows of target rtx4090"):
        export_shard(filled, "rtx4090", tmp_path / "out")


@pytest.fixture
def shard(tmp_path: Path, make_row) -> Path:
    folder = tmp_path / "shard" / "cpu"
    write_manifest(folder, Manifest("cpu", "MIT", "x", (write_part(folder, [make_row(0), make_row(1)]),)))
    return folder


def _faults(folder: Path) -> str:
    return "\n".join(f"{f.file.name}: {f.reason}" for f in verify(folder))


def _part_of(folder: Path) -> Path:
    return folder / read_manifest(folder).parts[0].file


def _rewrite(folder: Path, sql: str) -> None:
    """The part as `sql` makes it of table `t`, with a manifest that is right about its digest."""
    path = _part_of(folder)
    with duckdb.connect() as con:
        con.execute(f"CREATE TABLE t AS FROM read_parquet('{path}')")
        for statement in sql.split(";"):
            con.execute(statement)
        path.unlink()
        con.execute(f"COPY t TO '{path}' (FORMAT parquet)")
    from emmy.costmodel.files import sha256_of

    manifest = read_manifest(folder)
    write_manifest(folder, replace(manifest, parts=(replace(manifest.parts[0], sha256=sha256_of(path)),)))


def test_a_sound_shard_verifies(shard: Path) -> None:
    assert verify(shard) == ()


def test_verify_names_a_part_whose_bytes_changed(shard: Path) -> None:
    path = _part_of(shard)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert "SHA-256 is" in _faults(shard) and path.name in _faults(shard)


def test_verify_names_a_missing_and_an_unlisted_part(shard: Path) -> None:
    _part_of(shard).rename(shard / "part-0000000000000000.parquet")
    assert "no manifest lists it" in _faults(shard) and "listed by the manifest, but missing" in _faults(shard)


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("ALTER TABLE t DROP COLUMN clocks", "columns clocks differ from schema version 1"),
        ("ALTER TABLE t ALTER threads TYPE BIGINT", "columns threads differ"),
        ("UPDATE t SET status = 'fine'", "status 'fine'"),
        ("UPDATE t SET samples_us = [0.0]", "positive times"),
        ("UPDATE t SET samples_us = []", "is ok but has no sample"),
        ("UPDATE t SET id = 'same'", "'same' is empty or occurs twice"),
        ("UPDATE t SET target = 'h200'", "is of target h200, the folder of cpu"),
        ("DELETE FROM t WHERE rowid = 0", "holds 1 rows, the manifest says 2"),
    ],
)
def test_verify_finds_what_a_right_digest_hides(shard: Path, sql: str, expected: str) -> None:
    _rewrite(shard, sql)
    assert expected in _faults(shard)
    dataset = Dataset(shard.parent.parent / "home")
    (refused,) = pull(dataset, Folder(shard)).refused
    assert expected in "; ".join(refused.reasons) and not Quarantine(dataset).arrivals() and not dataset.rows()


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("schema_version", 2, "schema version 2, this Emmy reads 1. It is of a newer Emmy: update this one"),
        ("schema_version", 0, "Export again with the Emmy that wrote it"),
        ("licence", 7, "must be text"),
        ("licence", "", "is no SPDX expression such as Apache-2.0"),
        ("licence", "free for all!", "is no SPDX expression"),
        ("cards", [{"product": "x"}], "a card must have exactly product, uuid_hash, rows"),
        ("cards", [{"product": "x", "uuid_hash": "y", "rows": 9}], "its parts hold rows of"),
        ("target", "../../etc", "target name"),
        ("parts", [{"file": "../x.parquet", "sha256": "", "rows": 1, "emmy_version": ""}], "is not named part-"),
        ("parts", [{"file": "x"}], "a part must have exactly"),
        ("surprise", 1, "keys"),
    ],
)
def test_a_manifest_that_reaches_out_or_is_malformed_is_refused(
    shard: Path, key: str, value: object, expected: str
) -> None:
    raw = json.loads((shard / MANIFEST).read_text())
    (shard / MANIFEST).write_text(json.dumps({**raw, key: value}))
    assert expected in _faults(shard)
    (refused,) = pull(Dataset(shard.parent.parent / "home"), Folder(shard)).refused
    assert expected in "; ".join(refused.reasons)


def test_a_part_no_manifest_lists_is_not_read(shard: Path, make_row) -> None:
    write_part(shard, [make_row(7)])
    assert len(Dataset(shard.parent).rows()) == 2


def test_a_part_reads_as_it_was_written(shard: Path, make_row) -> None:
    assert read_part(_part_of(shard)) == (as_shipped(make_row(0)), as_shipped(make_row(1)))


@given(
    us=st.floats(1e-3, 1e9),
    cost=st.floats(0, 1e6),
    fact=st.floats(allow_nan=False, allow_infinity=False, min_value=-1e30, max_value=1e30),
)
def test_a_part_rounds_below_what_is_measured_and_whole_facts_not_at_all(us: float, cost: float, fact: float) -> None:
    row = row_of(
        0, samples_us=(us,), baseline_us=us, compile_s=cost, wall_s=cost, static={"x": fact, "n": float(2**31 + 1)}
    )
    shipped = as_shipped(row)
    assert shipped.samples_us == (float(np.float32(us)),) == (shipped.baseline_us,)
    assert shipped.compile_s == shipped.wall_s == pytest.approx(cost, rel=2**-12, abs=0)
    assert shipped.static["x"] == pytest.approx(fact, rel=5e-6, abs=0) and shipped.static["n"] == 2**31 + 1
    assert as_shipped(shipped) == shipped


def test_a_part_with_whole_digests_holds_the_sources_of_those_with_cut_ones(tmp_path: Path, make_row) -> None:
    """As they were exported once: `best` takes the median over both, and each row reads as it is written now."""
    full, cpu = "0123456789abcdef" * 4, tmp_path / "cpu"
    now = [make_row(i, op="o", schedule="s", source_digest=full) for i in (0, 2, 10)]
    assert {r.source_digest for r in now} == {full[:16]}
    new = write_part(cpu, now[:1])
    con = in_memory()
    con.execute(CREATE)
    insert(con, "measurement", now[1:])
    con.execute("UPDATE measurement SET source_digest = ?", [full])
    con.execute(f"COPY measurement TO {quote(cpu / 'old')} (FORMAT parquet)")
    digest = sha256_of(cpu / "old")
    old = Part((cpu / "old").rename(cpu / f"part-{digest[:16]}.parquet").name, digest, 2, "0.1.0")
    write_manifest(cpu, Manifest("cpu", "MIT", "x", (old, new)))
    assert verify(cpu) == () and read_part(cpu / old.file) == tuple(now[1:])
    with Dataset(tmp_path).snapshot() as snapshot:
        assert [b.n_rows for b in snapshot.best()] == [3]


def test_stats_count_rows_by_target_kind_status_and_origin(filled: Dataset) -> None:
    export_shard(filled, "cpu", filled.home)
    with filled.snapshot() as snapshot:
        stats = data_stats(snapshot)
        only = data_stats(snapshot, target="h200")
    assert (stats.rows, stats.duplicate_rows) == (40, 30)
    assert {(g.target, g.kind, g.status, g.origin): g.rows for g in stats.groups} == {
        ("cpu", "matmul", "correctness", "measured"): 6,
        ("cpu", "matmul", "ok", "measured"): 24,
        ("h200", "matmul", "correctness", "measured"): 2,
        ("h200", "matmul", "ok", "measured"): 8,
    }
    assert {g.target for g in only.groups} == {b.row.device.target for b in only.bests} == {"h200"}
