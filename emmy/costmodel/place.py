"""Where pushed measurements lie: a folder, a web server, or whatever fsspec opens. Moves bytes; knows nothing of what is in them.

Names are relative and of letters, digits, `.`, `_`, `-` and `/`. A file that is written appears whole or not at all. Folders and
the reading of web servers need no package; `s3://`, `gs://`, `sftp://`, `memory://` and the rest need fsspec (`emmy[exchange]`).
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

from emmy.codegen.files import appearing
from emmy.errors import DataError, UsageError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

TIMEOUT_S = 30.0  # without an answer
_CHUNK = 1 << 20
_BUCKETS = frozenset(
    ("s3", "gs", "abfs", "oss", "obs")
)  # have no folders, and asked for one might make a bucket of that name
_SCHEME = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://")


class NotThere(DataError):
    """A place has no file of that name."""


class Withheld(DataError):
    """A place answers, and does not give a file of that name: to this user, or now. It may give others."""


class Place(Protocol):
    """A folder somewhere. Every call raises DataError, saying where, when the place does not answer as it must."""

    @property
    def where(self) -> str:
        """The folder, as its user names it."""
        ...

    @property
    def lists(self) -> bool:
        """Whether it can say which files it has. A web server cannot."""
        ...

    def folders(self) -> tuple[str, ...]:
        """Names of the folders directly in it, in order; () where there is nothing yet."""
        ...

    def files(self, folder: str) -> dict[str, int]:
        """Sizes in bytes by name of the files directly in one of its folders, "" being itself."""
        ...

    def read(self, name: str) -> bytes:
        """A file's content. Raises NotThere or Withheld."""
        ...

    def fetch(self, name: str, to: Path) -> None:
        """Copies a file to a path here, which holds all of it or what it held before. Raises NotThere or Withheld."""
        ...

    def send(self, path: Path, name: str) -> None:
        """Copies a file from here, in the place of one of that name."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Makes a file, in the place of one of that name."""
        ...


def place_at(text: str) -> Place:
    """The place that a folder's name or a URL means. Raises UsageError where a package is missing or the scheme is none."""
    named = _SCHEME.match(text)
    if named is None:
        if not text:
            raise UsageError("the folder's name is empty; '.' is the one you are in")
        return Folder(Path(text))
    scheme = named["scheme"].lower()
    if scheme in ("http", "https"):
        return Website(text.rstrip("/"))
    if scheme == "file":
        return Folder(Path(text[named.end() :]))
    return _through_fsspec(text, scheme)


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of this machine, or one that is mounted."""

    path: Path
    lists: bool = True

    @property
    def where(self) -> str:
        return str(self.path)

    def folders(self) -> tuple[str, ...]:
        with _answers(self.where):
            self._must_be_folder()
            return tuple(sorted(p.name for p in self.path.iterdir() if p.is_dir())) if self.path.exists() else ()

    def files(self, folder: str) -> dict[str, int]:
        with _answers(self.where):
            there = self.path / folder
            return {p.name: p.stat().st_size for p in sorted(there.iterdir()) if p.is_file()} if there.is_dir() else {}

    def read(self, name: str) -> bytes:
        with _answers(f"{self.where}/{name}"):
            return (self.path / name).read_bytes()

    def fetch(self, name: str, to: Path) -> None:
        with _answers(f"{self.where}/{name}"):
            _copy(self.path / name, to)

    def send(self, path: Path, name: str) -> None:
        with _answers(f"{self.where}/{name}"):
            self._must_be_folder()
            _copy(path, self.path / name)

    def write(self, name: str, data: bytes) -> None:
        with _answers(f"{self.where}/{name}"):
            self._must_be_folder()
            with appearing(self.path / name) as temporary, temporary.open("wb") as out:
                out.write(data)
                _settle(out)

    def _must_be_folder(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"{self.path} is a file: name a folder")


@dataclass(frozen=True, slots=True)
class Website:
    """A folder of a web server. It is only read, and says nothing of what it has."""

    where: str
    lists: bool = False

    def folders(self) -> tuple[str, ...]:
        return ()

    def files(self, folder: str) -> dict[str, int]:
        return {}

    def read(self, name: str) -> bytes:
        url = f"{self.where}/{name}"
        with _answers(url), urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            data: bytes = answer.read()
            return data

    def fetch(self, name: str, to: Path) -> None:
        url = f"{self.where}/{name}"
        with (
            _answers(url),
            urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer,
            appearing(to) as temporary,
            temporary.open("wb") as out,
        ):
            shutil.copyfileobj(answer, out, _CHUNK)
            _settle(out)

    def send(self, path: Path, name: str) -> None:
        raise self._read_only()

    def write(self, name: str, data: bytes) -> None:
        raise self._read_only()

    def _read_only(self) -> UsageError:
        return UsageError(
            f"{self.where}: a web server is only read. Push to the folder or the bucket that it serves: DIR, s3://..., gs://..."
        )


@dataclass(frozen=True, slots=True)
class Remote:
    """A folder of a file system that fsspec knows. Files are sent within its transactions: none is seen before it is whole."""

    where: str
    root: str
    system: AbstractFileSystem
    lists: bool = True

    def folders(self) -> tuple[str, ...]:
        return tuple(sorted(_base(e["name"]) for e in self._entries("") if e["type"] == "directory"))

    def files(self, folder: str) -> dict[str, int]:
        return {_base(e["name"]): int(e["size"] or 0) for e in self._entries(folder) if e["type"] == "file"}

    def _entries(self, folder: str) -> list[dict[str, str]]:
        path = f"{self.root}/{folder}".rstrip("/")
        try:
            with _answers(f"{self.where}/{folder}"):
                self.system.invalidate_cache(path)
                found: list[dict[str, str]] = self.system.ls(path, detail=True)
                return found
        except NotThere:
            return []

    def read(self, name: str) -> bytes:
        with _answers(f"{self.where}/{name}"):
            data: bytes = self.system.cat_file(f"{self.root}/{name}")
            return data

    def fetch(self, name: str, to: Path) -> None:
        with _answers(f"{self.where}/{name}"), appearing(to) as temporary:
            self.system.get_file(f"{self.root}/{name}", str(temporary))

    def send(self, path: Path, name: str) -> None:
        with self._writing(name):
            self.system.put_file(str(path), f"{self.root}/{name}")

    def write(self, name: str, data: bytes) -> None:
        with self._writing(name):
            self.system.pipe_file(f"{self.root}/{name}", data)

    @contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        """Within it a file is written, which is not seen before its end."""
        kinds = self.system.protocol
        try:
            with _answers(f"{self.where}/{name}"):
                if _BUCKETS.isdisjoint((kinds,) if isinstance(kinds, str) else kinds):
                    self.system.makedirs(f"{self.root}/{name}".rpartition("/")[0], exist_ok=True)
                with self.system.transaction:
                    yield
        except NotThere:
            raise DataError(
                f"{self.where}: there is no such bucket, and none is made. Make it, or name another"
            ) from None


def _through_fsspec(url: str, scheme: str) -> Remote:
    try:
        import fsspec
    except ImportError:
        raise UsageError(
            f"{url}: fsspec opens {scheme}:// and is not installed. `pip install 'emmy[exchange]'`, or name a folder"
        ) from None
    try:
        # Not the shared instance: a transaction is one of the instance, and threads may push at once.
        system, path = fsspec.core.url_to_fs(url, skip_instance_cache=True)
    except ImportError as e:
        raise UsageError(f"{url}: {e}. It is a package beside fsspec: s3fs for s3://, gcsfs for gs://") from None
    except ValueError as e:
        raise UsageError(f"{url}: fsspec does not open it: {e}") from None
    except _faults() as e:
        raise DataError(f"{url}: does not answer: {e}") from None
    return Remote(url.rstrip("/"), path.rstrip("/"), system)


def _copy(source: Path, to: Path) -> None:
    with source.open("rb") as read, appearing(to) as temporary, temporary.open("wb") as out:
        shutil.copyfileobj(read, out, _CHUNK)
        _settle(out)


def _settle(file: BinaryIO) -> None:
    """What was written is on the disk: a name that appears must not be of a file that a power cut emptied."""
    file.flush()
    os.fsync(file.fileno())


def _base(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2]


@contextmanager
def _answers(where: str) -> Iterator[None]:
    """What goes wrong with a place, as DataError."""
    try:
        yield
    except (FileNotFoundError, IsADirectoryError):
        raise NotThere(f"{where}: there is no such file") from None
    except urllib.error.HTTPError as e:
        if e.code in (404, 410):
            raise NotThere(f"{where}: the server answers {e.code} {e.reason}") from None
        raise Withheld(f"{where}: the server answers {e.code} {e.reason}") from None
    except PermissionError as e:
        raise Withheld(f"{where}: {e.strerror or e}") from None
    except _faults() as e:
        reason = getattr(e, "reason", None) or e
        raise DataError(f"{where}: does not answer: {reason or type(e).__name__}. Nothing is lost: try again") from None


def _faults() -> tuple[type[Exception], ...]:
    """What file systems and web servers raise: OSError, ValueError for an odd name or URL, http's for an answer that is cut short or
    none, and what the libraries below those that are loaded have of their own."""
    loaded = (
        ("botocore.exceptions", "BotoCoreError"), ("aiohttp", "ClientError"), ("google.auth.exceptions", "GoogleAuthError"),
    )  # fmt: skip
    own = (getattr(sys.modules.get(module), name, None) for module, name in loaded)
    return (
        OSError,
        ValueError,
        HTTPException,
        *(kind for kind in own if isinstance(kind, type) and issubclass(kind, Exception)),
    )
