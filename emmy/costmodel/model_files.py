"""A model's two files: its text, compressed with xz where its name ends in `.xz`, and its card beside it. Reads no model.

Digests are of the text, never of the compressed bytes, which another liblzma may write otherwise.
"""

from __future__ import annotations

import lzma
from pathlib import Path

from emmy.costmodel.files import write_atomically
from emmy.errors import DataError

TEXT, PACKED, CARD = ".txt", ".txt.xz", ".json"


def card_path(text: Path) -> Path:
    """Where the card of a model's text is: `h200.json` of `h200.txt` and of `h200.txt.xz`."""
    return text.with_name(text.name.removesuffix(".xz").removesuffix(TEXT) + CARD)


def found(text: Path) -> Path:
    """The file that holds a text: the one named, or its plain or compressed twin where only that exists."""
    twin = text.with_name(text.name.removesuffix(".xz") if text.name.endswith(".xz") else f"{text.name}.xz")
    return twin if twin.is_file() and not text.is_file() else text


def write_text(path: Path, text: str) -> None:
    """`path` holds the text, in one step."""
    data = text.encode()
    write_atomically(path, lzma.compress(data) if path.name.endswith(".xz") else data)


def read_text(path: Path, limit: int) -> str:
    """The text that a file holds. Raises DataError when it cannot be read, or is of more than `limit` bytes unpacked."""
    try:
        with lzma.open(path) if path.name.endswith(".xz") else path.open("rb") as f:
            data = f.read(limit + 1)
        if len(data) > limit:
            raise DataError(f"{path}: more than {limit} bytes")
        return data.decode()
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as e:
        raise DataError(f"{path}: cannot read it: {e}") from None
