"""The file of a pack: a zip whose first member is `manifest.json`, whose others are named by the sha256 of what they hold.

The zip's comment is the manifest's own sha256, which is also the pack's identity: it fixes every byte that can be run. The same
contents give the same file. A file is read whole, so that replacing it changes nothing for whoever opened it, and nothing is
ever extracted under a name that it gives. Knows nothing of what members hold.
"""

from __future__ import annotations

import hashlib
import io
import lzma
import os
import re
import secrets
import struct
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from emmy.errors import PackError

MANIFEST = "manifest.json"
_COMMENT = b"emmy-pack sha256 "
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip can say
_MEMBER = re.compile(r"(source|binary/[\w-]+)/[0-9a-f]{64}\.(cu|c|cubin|so)", re.ASCII)
_MOST = 256 << 20  # bytes of a member: far above any, far below a machine's memory
_MOST_MANIFEST = 32 << 20  # what is read of it takes many times as much
_MOST_FILE = 2 << 30
_FIRST = b"PK\3\4"  # of a zip with a member
# What zipfile raises for bytes that are no zip, or are one that it cannot read.
_BROKEN = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
    OSError,
    KeyError,
)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write(path: Path, manifest: bytes, members: Mapping[str, bytes]) -> None:
    """Makes the file, whole or not at all: whoever looks sees the old one or the new one. Raises PackError."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as z:
        for name, data in ((MANIFEST, manifest), *sorted(members.items())):
            info = zipfile.ZipInfo(name, _EPOCH)
            info.compress_type, info.create_system, info.external_attr = zipfile.ZIP_DEFLATED, 3, 0o644 << 16
            z.writestr(info, data)
        z.comment = _COMMENT + sha256(manifest).encode()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as f:
            f.write(out.getvalue())
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(path)
    except OSError as e:
        where = path if e.filename in (None, str(temporary)) else e.filename
        raise PackError(f"{where}: cannot be written: {e.strerror}. Free space, or name another file") from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


class Archive:
    """A pack's file in memory, its members checked by name. `digest` is the pack's identity."""

    def __init__(self, path: Path) -> None:
        """Raises PackError for a file that is not there, is no pack, or is damaged as far as the manifest tells."""
        self.path = path
        try:
            if path.exists() and not path.is_file() and not path.is_dir():  # a device may have no end
                raise PackError(f"{path} is no regular file. Name the pack, or copy it into one")
            data = self._bytes()
        except (OSError, ValueError) as e:  # ValueError: a name that no file can have
            raise PackError(f"{path}: {getattr(e, 'strerror', None) or e}. Build one: `emmy pack build`") from None
        try:
            self._zip = zipfile.ZipFile(io.BytesIO(data))
            names = self._zip.namelist()
        except _BROKEN as e:
            raise self._damaged(f"it is no zip, or is cut off ({_brief(e)})") from None
        if names[:1] != [MANIFEST]:
            raise self._damaged(f"its first member is not {MANIFEST}: it is another kind of file")
        if len(set(names)) < len(names):
            raise self._damaged("a member is there twice")
        for name in names[1:]:
            if not _MEMBER.fullmatch(name):
                raise self._damaged(f"a member is called {name[:120]!r}; none of a pack is")
        self.names = frozenset(names[1:])
        self.manifest = self._read(MANIFEST, _MOST_MANIFEST)
        self.digest = sha256(self.manifest)
        if self._zip.comment != _COMMENT + self.digest.encode():
            raise self._damaged("its manifest is not the one it was built with")

    def read(self, name: str, digest: str) -> bytes:
        """What a member holds. Raises PackError when it is not there, or not what the digest says."""
        if name not in self.names:
            raise self._damaged(f"{name} is missing")
        data = self._read(name)
        if sha256(data) != digest:
            raise self._damaged(f"{name} is not what the manifest says: sha256 {sha256(data)[:16]}...")
        return data

    def _bytes(self) -> bytes:
        """The file's; of what cannot be a pack no more than its first ones."""
        with self.path.open("rb") as f:
            first = f.read(len(_FIRST))
            if first != _FIRST:
                raise self._damaged("it is no zip, or is cut off: it does not begin like one")
            data = first + f.read(_MOST_FILE)
        if len(data) > _MOST_FILE:
            raise self._damaged(f"it is larger than {_MOST_FILE} bytes")
        return data

    def _read(self, name: str, most: int = _MOST) -> bytes:
        try:
            with self._zip.open(name) as f:
                data = f.read(most + 1)
        except _BROKEN as e:
            raise self._damaged(f"{name} cannot be read ({_brief(e)})") from None
        if len(data) > most:
            raise self._damaged(f"{name} is larger than {most} bytes")
        return data

    def _damaged(self, what: str) -> PackError:
        return PackError(f"{self.path}: damaged: {what}. Copy or build the pack again.")


def _brief(e: BaseException) -> str:
    """An error of zipfile's, which may quote what the file holds."""
    return repr(str(e))[1:-1][:120] or type(e).__name__
