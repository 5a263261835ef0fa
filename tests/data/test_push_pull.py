"""Rows that travel: by any place, cut short at any moment, by several at once; and what is not as it must be is named."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emmy.costmodel.dataset import Dataset
from emmy.costmodel.exchange import append_part
from emmy.costmodel.place import Folder, NotThere, Place, Website, place_at
from emmy.costmodel.pull import INCOMING, pull
from emmy.costmodel.push import INDEX, manifests_at, push, read_index
from emmy.costmodel.quarantine import Quarantine
from emmy.costmodel.shards import Manifest, as_shipped, manifest_digest, verify
from emmy.errors import DataError, EmmyError, UsageError
from emmy.measure import identity
from emmy.records import Measurement
from tests.data.conftest import make_row, write_journal
from tests.tiers import some

N = 12


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def _home(path: Path, rows: list[Measurement], run: str = "a") -> Dataset:
    dataset = Dataset(path)
    write_journal(path, run, rows)
    dataset.ingest()
    return dataset


def _release_all(dataset: Dataset) -> list[Measurement]:
    quarantine = Quarantine(dataset)
    for arrival in quarantine.arrivals("held"):
        quarantine.release(arrival, "by hand")
    return list(dataset.rows())


@pytest.fixture
def filled(tmp_path: Path) -> Dataset:
    return _home(tmp_path / "home", [make_row(i, target="cpu" if i < N // 2 else "h200") for i in range(N)])


@pytest.fixture(params=["folder", pytest.param("memory", marks=pytest.mark.slow)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with _place(str(request.param), tmp_path) as made:
        yield made


@pytest.fixture(params=["folder", "memory"])
def any_place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with _place(str(request.param), tmp_path) as made:
        yield made


@contextlib.contextmanager
def _place(kind: str, tmp_path: Path) -> Iterator[Place]:
    if kind == "folder":
        yield Folder(tmp_path / "place")
        return
    fsspec = pytest.importorskip("fsspec")
    url = f"memory://{tmp_path.name}"
    yield place_at(url)
    with contextlib.suppress(FileNotFoundError):
        fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)


@contextlib.contextmanager
def _served(folder: Path, withheld: str = "") -> Iterator[str]:
    """A web server's URL, which gives nobody what lies under the path."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def do_GET(self) -> None:
            if withheld and self.path.startswith(withheld):
                self.send_error(403)
            else:
                super().do_GET()

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# ---------------------------------------------------------------- there and back
def test_what_is_pushed_comes_out_elsewhere_as_imported(filled: Dataset, place: Place, tmp_path: Path) -> None:
    sent = push(filled, place)
    assert (sent.rows, sent.sent, sent.already, len(sent.manifests)) == (N, 2, 0, 2)
    other = Dataset(tmp_path / "other")
    report = pull(other, place)
    assert sum(a.n_rows for a in report.arrivals) == N and not report.refused and not other.rows()
    assert _release_all(other) == [replace(as_shipped(r), origin="imported") for r in filled.rows()]


def test_the_same_command_again_moves_nothing(filled: Dataset, place: Place, tmp_path: Path) -> None:
    push(filled, place)
    other = Dataset(tmp_path / "other")
    pull(other, place)
    files = {name: place.files(name) for name in ("", *place.folders())}
    again = push(filled, place)
    assert (again.rows, again.sent, again.already, again.manifests) == (0, 0, 2, ())
    assert {name: place.files(name) for name in ("", *place.folders())} == files
    assert (pull(other, place).arrivals, pull(other, place).already) == ((), 2)
    _release_all(other)
    assert pull(other, place).already == 2 and not list((other.home / INCOMING).glob("*"))


@pytest.mark.slow
def test_only_new_rows_travel(filled: Dataset, place: Place, tmp_path: Path) -> None:
    push(filled, place)
    other = Dataset(tmp_path / "other")
    pull(other, place)
    write_journal(filled.home, "b", [make_row(100)])
    filled.ingest()
    assert push(filled, place).rows == 1
    (arrival,) = pull(other, place).arrivals
    assert [r.id for r in arrival.rows()] == [make_row(100).id]


def test_what_a_home_pushed_does_not_come_back_to_it(filled: Dataset, place: Place) -> None:
    push(filled, place)
    assert pull(filled, place).arrivals == ()


def test_a_manifest_says_versions_digests_terms_and_cards(filled: Dataset, tmp_path: Path) -> None:
    place = Folder(tmp_path / "place")
    (name, _) = push(filled, place, licence="MIT", provenance="a lab").manifests
    said = json.loads(place.read(name))
    assert manifest_digest(place.read(name)) in name
    assert (said["schema_version"], said["licence"], said["provenance"], said["emmy_version"]) == (
        1,
        "MIT",
        "a lab",
        "0.1.0",
    )
    assert said["cards"] == [{"product": make_row(0).device.product, "uuid_hash": "9f" * 8, "rows": N // 2}]
    assert [p["rows"] for p in said["parts"]] == [N // 2]
    assert all(verify(place.path / folder) == () for folder in place.folders())


@pytest.mark.slow
def test_a_shard_folder_of_the_home_is_pushed_as_it_is_and_imported_rows_are_not(
    filled: Dataset, tmp_path: Path
) -> None:
    part = append_part(filled.home / "cpu", [make_row(0), make_row(200)], Manifest("cpu", "", "shipped"))
    append_part(filled.imported / "cpu", [make_row(300, origin="imported")], Manifest("cpu", "MIT", "others"))
    place = Folder(tmp_path / "place")
    push(filled, place, target="cpu")
    assert part.name in place.files("cpu")
    other = Dataset(tmp_path / "other")
    pull(other, place)
    ids = [r.id for r in _release_all(other)]
    assert sorted(ids) == sorted(make_row(i).id for i in (*range(N // 2), 200))


@pytest.mark.slow
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(numbers=st.sets(st.integers(0, 60), min_size=1, max_size=12), cut=st.integers(0, 12))
def test_any_rows_survive_the_round_trip_in_any_portions(
    tmp_path_factory: pytest.TempPathFactory, numbers: set[int], cut: int
) -> None:
    root = tmp_path_factory.mktemp("trip")
    rows = [make_row(i, target="h200" if i % 3 else "cpu") for i in sorted(numbers)]
    sender, receiver, place = Dataset(root / "a"), Dataset(root / "b"), Folder(root / "place")
    for run, portion in enumerate((rows[:cut], rows[cut:])):
        if portion:
            push(_home(sender.home, portion, f"run{run}"), place)
            pull(receiver, place)
    assert {r.to_json() for r in _release_all(receiver)} == {
        replace(as_shipped(r), origin="imported").to_json() for r in rows
    }


# ---------------------------------------------------------------- through a web server
@pytest.mark.slow
def test_a_web_server_is_read_through_the_index(filled: Dataset, tmp_path: Path) -> None:
    push(filled, Folder(tmp_path / "place"))
    other = Dataset(tmp_path / "other")
    with _served(tmp_path / "place") as url:
        assert sum(a.n_rows for a in pull(other, place_at(f"{url}/")).arrivals) == N
        with pytest.raises(UsageError, match="a web server is only read"):
            push(filled, Website(url))
        (tmp_path / "place" / INDEX).unlink()
        with pytest.raises(DataError, match=r"index.json: there is none, and a web server does not say"):
            pull(other, Website(url))
    with pytest.raises(DataError, match=r"does not answer.*Nothing is lost"):
        pull(other, Website(url))


@pytest.mark.parametrize(
    "answer",
    [b"hello\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{}", b"HTTP/1.1 302 Found\r\nLocation: http://[::x\r\n\r\n", b""],
    ids=["no http", "cut short", "sent nowhere", "nothing"],
)  # fmt: skip
def test_a_server_that_answers_oddly_is_named(answer: bytes, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with listener.accept()[0] as c:
                c.recv(1000)
                c.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(DataError, match="Nothing is lost: try again"):
            pull(Dataset(tmp_path), place_at(f"http://127.0.0.1:{listener.getsockname()[1]}"))
        thread.join()


@pytest.mark.parametrize("url", ["http://exa mple/", "http://[::1", "http://" + "a" * 300])
def test_a_url_that_is_none_is_named(url: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not answer"):
        pull(Dataset(tmp_path), place_at(url))


def test_an_index_that_reaches_out_or_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text('{"schema_version": 1, "manifests": ["../x/manifest-0123456789abcdef.json"]}')
    with pytest.raises(DataError, match=r"is not named TARGET/manifest-<16 hex digits>.json"):
        read_index(Folder(tmp_path))
    (tmp_path / INDEX).write_text('{"schema_version": 2, "manifests": []}')
    with pytest.raises(DataError, match=r"schema version 2, this Emmy reads 1\. Update"):
        read_index(Folder(tmp_path))
    (tmp_path / INDEX).write_text("[]")
    with pytest.raises(DataError, match="not an index"):
        read_index(Folder(tmp_path))


@pytest.mark.parametrize(
    ("url", "expected"),
    [("", "the folder's name is empty"), ("nosuch://x/y", "fsspec does not open it"), ("s3://", "fsspec|s3fs|answer")],
)
def test_a_place_that_cannot_be_opened_is_named(url: str, expected: str) -> None:
    pytest.importorskip("fsspec")
    with pytest.raises((UsageError, DataError), match=expected):
        place_at(url).files("")


def test_without_fsspec_folders_work_and_buckets_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(UsageError, match=r"pip install 'emmy\[exchange\]'"):
        place_at("s3://bucket/emmy")
    assert place_at(f"file://{tmp_path}").files("") == {}


@pytest.mark.slow
def test_a_file_and_an_empty_folder_are_no_place_to_pull_from(filled: Dataset, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file: name a folder"):
        push(filled, Folder(tmp_path / "file"))
    with pytest.raises(UsageError, match="holds no shard folder"):
        pull(filled, Folder(tmp_path / "nothing"))
    with pytest.raises(UsageError, match=r"no rows measured in .* on rtx4090 can be pushed"):
        push(filled, Folder(tmp_path / "place"), target="rtx4090")


# ---------------------------------------------------------------- damage
@pytest.mark.parametrize("kind", ["part", pytest.param("manifest", marks=pytest.mark.slow)])
def test_a_changed_byte_is_named_and_keeps_no_other_manifest_from_coming_in(
    filled: Dataset, tmp_path: Path, kind: str
) -> None:
    place = Folder(tmp_path / "place")
    push(filled, place)
    (file,) = (place.path / "cpu").glob(f"{kind}-*")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    other = Dataset(tmp_path / "other")
    report = pull(other, place)
    (refused,) = report.refused
    assert file.name in refused.reasons[0] and "SHA-256" in refused.reasons[0]
    assert [a.manifest.target for a in report.arrivals] == ["h200"]
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert [a.manifest.target for a in pull(other, place).arrivals] == ["cpu"]


def test_a_missing_part_is_named(filled: Dataset, tmp_path: Path) -> None:
    place = Folder(tmp_path / "place")
    push(filled, place)
    next((place.path / "h200").glob("part-*")).unlink()
    (refused,) = pull(Dataset(tmp_path / "other"), place).refused
    assert "there is no such file, though the manifest lists it" in refused.reasons[0]


@pytest.mark.parametrize("kind", ["part", "manifest"])
def test_what_a_place_withholds_keeps_no_other_manifest_from_coming_in(
    filled: Dataset, tmp_path: Path, kind: str
) -> None:
    push(filled, Folder(tmp_path / "place"))
    other = Dataset(tmp_path / "other")
    with _served(tmp_path / "place", f"/cpu/{kind}") as url:
        report = pull(other, place_at(url))
    (refused,) = report.refused
    assert "the server answers 403 Forbidden, though" in refused.reasons[0]
    assert [a.manifest.target for a in report.arrivals] == ["h200"]
    assert [a.manifest.target for a in pull(other, Folder(tmp_path / "place")).arrivals] == ["cpu"]


def test_a_manifest_in_the_folder_of_another_target_is_refused(filled: Dataset, tmp_path: Path) -> None:
    place = Folder(tmp_path / "place")
    push(filled, place)
    (place.path / "cpu").rename(place.path / "a100")
    (refused,) = pull(Dataset(tmp_path / "other"), place).refused
    assert "is of target cpu, in a folder of a100" in refused.reasons[0]


def test_a_damaged_shard_of_the_home_is_not_pushed(filled: Dataset, tmp_path: Path) -> None:
    push(filled, Folder(tmp_path / "place"))
    part = next((filled.home / "outbox" / "cpu").glob("part-*"))
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"nothing is pushed, it is damaged: part-.*SHA-256 is"):
        push(filled, Folder(tmp_path / "elsewhere"))


# ---------------------------------------------------------------- privacy
@pytest.mark.parametrize(
    "leaks",
    some(
        [
            {"uuid_hash": "GPU-12345678-1234-1234-1234-123456789abc"},
            {"uuid_hash": "no hash of anything"},
            {"message": "compiled at node-17.example.org"},
            {"message": "in /home/someone/kernels/k.cu"},
            {"message": "device 12345678-1234-1234-1234-123456789abc fell off the bus"},
        ],
        5,
    ),
)
def test_a_row_that_would_name_a_machine_stays_here_and_the_others_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaks: dict[str, str]
) -> None:
    monkeypatch.setattr(identity.platform, "node", lambda: "node-17.example.org")
    monkeypatch.setattr(identity.Path, "home", lambda: Path("/home/someone"))
    identity._own_names.cache_clear()
    dataset = _home(tmp_path / "home", [make_row(4, **leaks), make_row(1)])
    place = Folder(tmp_path / "place")
    report = push(dataset, place)
    assert report.rows == 1 and list(report.held_back.values()) == [1]
    sent = b"".join(p.read_bytes() for p in place.path.rglob("*") if p.is_file())
    assert all(str(text).encode() not in sent for text in leaks.values())
    with pytest.raises(UsageError, match=r"provenance .* would name this machine"):
        push(dataset, place, provenance="measured on node-17.example.org")
    append_part(dataset.home / "h200", [make_row(9, target="h200", **leaks)], Manifest("h200", "MIT", "x"))
    with pytest.raises(DataError, match="not pushed, it would name a machine"):
        push(dataset, place, target="h200")
    identity._own_names.cache_clear()


# ---------------------------------------------------------------- several at once, and cut short
@pytest.mark.slow
def test_pushers_at_once_lose_nothing_and_the_index_names_all(place: Place, tmp_path: Path) -> None:
    homes = [_home(tmp_path / f"home{i}", [make_row(100 * i + j) for j in range(3)]) for i in range(4)]
    url, failed = place.where, []

    def go(dataset: Dataset) -> None:
        try:
            push(dataset, place_at(url))
        except EmmyError as e:
            failed.append(e)

    threads = [threading.Thread(target=go, args=(home,)) for home in homes]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed
    assert len(manifests_at(place)) == 4 and read_index(place) == manifests_at(place)
    other = Dataset(tmp_path / "other")
    pull(other, place)
    assert len(_release_all(other)) == 12


class _Fails:
    """A place whose calls fail from the n-th on, as those of a process that was killed never happen."""

    def __init__(self, place: Place, calls: int) -> None:
        self.place, self.calls = place, calls

    def __getattr__(self, name: str) -> object:
        found = getattr(self.place, name)
        if name not in ("send", "write", "fetch", "read"):
            return found

        def call(*args: object) -> object:
            if self.calls == 0:
                raise DataError("cut off")
            self.calls -= 1
            return found(*args)

        return call


@pytest.mark.slow
def test_a_push_that_ends_anywhere_is_never_half_believed_and_goes_on(filled: Dataset, tmp_path: Path) -> None:
    for calls in range(7):
        place = Folder(tmp_path / f"place{calls}")
        with contextlib.suppress(DataError):
            push(filled, _Fails(place, calls))  # type: ignore[arg-type]
        seen = Dataset(tmp_path / f"early{calls}")
        with contextlib.suppress(UsageError):
            assert not pull(seen, place).refused
        push(filled, place)
        pull(seen, place)
        assert len(_release_all(seen)) == N and read_index(place) == manifests_at(place)


@pytest.mark.slow
def test_a_pull_that_ends_anywhere_goes_on(filled: Dataset, tmp_path: Path) -> None:
    place = Folder(tmp_path / "place")
    push(filled, place)
    for calls in range(5):
        other = Dataset(tmp_path / f"other{calls}")
        with contextlib.suppress(DataError):
            pull(other, _Fails(place, calls))  # type: ignore[arg-type]
        pull(other, place)
        assert len(_release_all(other)) == N and len(Quarantine(other).arrivals()) == 2


def test_parts_that_were_fetched_are_not_fetched_again(filled: Dataset, tmp_path: Path) -> None:
    place, other = Folder(tmp_path / "place"), Dataset(tmp_path / "other")
    push(filled, place, target="cpu")
    (name,) = (n for n in place.files("cpu") if n.startswith("part-"))
    place.fetch(f"cpu/{name}", other.home / INCOMING / name)
    pull(other, _Fails(place, 1))  # type: ignore[arg-type]  # the manifest is all that is read
    assert len(_release_all(other)) == N // 2


def _killed_at_any_moment(code: str, until: Callable[[], bool]) -> int:
    """How often a process that runs `code` was killed before it ended by itself."""
    for kills in range(200):
        process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
        try:
            process.wait(0.05 * (kills + 1))
            assert process.returncode == 0
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            continue
        assert until()
        return kills
    raise AssertionError("it never ended")


@pytest.mark.slow
def test_kill_9_during_push_and_pull_loses_and_doubles_nothing(tmp_path: Path) -> None:
    rows = [make_row(i, target=("cpu", "h200", "a100")[i % 3]) for i in range(300)]
    home = _home(tmp_path / "home", rows)
    place = tmp_path / "place"
    use = "from pathlib import Path; from emmy.costmodel.dataset import Dataset; from emmy.costmodel.place import Folder; "
    pushing = f"{use}from emmy.costmodel.push import push; push(Dataset(Path({str(home.home)!r})), Folder(Path({str(place)!r})))"
    kills = _killed_at_any_moment(pushing, lambda: read_index(Folder(place)) == manifests_at(Folder(place)))
    other = Dataset(tmp_path / "other")
    pulling = (
        f"{use}from emmy.costmodel.pull import pull; from emmy.costmodel.quarantine import Quarantine\n"
        f"d = Dataset(Path({str(other.home)!r})); pull(d, Folder(Path({str(place)!r})))\n"
        "for a in Quarantine(d).arrivals('held'): Quarantine(d).release(a, 'by hand')"
    )
    kills += _killed_at_any_moment(pulling, lambda: True)
    assert kills > 4
    assert {r.to_json() for r in other.rows()} == {replace(as_shipped(r), origin="imported").to_json() for r in rows}
    with other.snapshot() as snapshot:
        assert snapshot.query("SELECT count(*) FROM stored").rows == ((300,),)


# ---------------------------------------------------------------- what a place promises
def test_a_place_gives_back_what_it_was_given(any_place: Place, tmp_path: Path) -> None:
    place = any_place
    assert place.folders() == () and place.files("") == {} and place.files("none") == {}
    place.write("a/b.json", b"one")
    place.write("a/b.json", b"three")
    (tmp_path / "file").write_bytes(b"12345")
    place.send(tmp_path / "file", "a/c")
    assert place.folders() == ("a",) and place.files("a") == {"b.json": 5, "c": 5}
    assert place.read("a/b.json") == b"three"
    place.fetch("a/c", tmp_path / "below" / "back")
    assert (tmp_path / "below" / "back").read_bytes() == b"12345"
    with pytest.raises(NotThere, match=r"a/d: there is no such file"):
        place.read("a/d")
    with pytest.raises(NotThere):
        place.fetch("a/d", tmp_path / "back")
    assert not (tmp_path / "back").exists()
