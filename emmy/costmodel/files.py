"""Files written whole or not at all, and their digests. Knows nothing of what is in them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """`path` holds `data`, or what it held before: never a part of either."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    temporary.replace(path)


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
