"""A table of a TOML file, read key by key: what is missing, mistyped or unknown is named. Knows no particular file."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from emmy.errors import UsageError

MOST = 1e9  # of a number that nothing else bounds: no infinity


@dataclass(slots=True)
class Table:
    """A table and where it is, as an error calls it. Every getter marks its key as known; `done` refuses the others."""

    where: str
    values: Mapping[str, object]
    _known: set[str] = field(default_factory=set)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        return value if isinstance(value, str) else self._refuse(key, "a text", value)

    def count(self, key: str, default: int | None = None, least: int = 1, most: int = int(MOST)) -> int:
        value = self._get(key, default)
        fits = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        return value if fits else self._refuse(key, f"a whole number from {least} to {most}", value)  # type: ignore[return-value]

    def number(self, key: str, default: float | None = None, most: float = MOST) -> float:
        value = self._get(key, default)
        fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most
        return float(value) if fits else self._refuse(key, f"a number from 0 to {most:g}", value)  # type: ignore[arg-type]

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._get(key, default)
        return value if isinstance(value, bool) else self._refuse(key, "true or false", value)

    def texts(self, key: str, default: tuple[str, ...] | None = ()) -> tuple[str, ...]:
        value = self._get(key, default)
        if isinstance(value, list | tuple) and all(isinstance(v, str) for v in value):
            return tuple(value)
        return self._refuse(key, "a list of texts", value)

    def counts(self, key: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        value = self._get(key, default)
        if isinstance(value, list | tuple) and all(type(v) is int and 0 < v <= MOST for v in value):
            return tuple(value)
        return self._refuse(key, f"a list of whole numbers from 1 to {MOST:.0f}", value)

    def table(self, key: str) -> Table:
        """The table below a key; an empty one where it is left out."""
        value = self._get(key, {})
        return (
            Table(f"{self.where}, [{key}]", value) if isinstance(value, dict) else self._refuse(key, "a table", value)
        )

    def tables(self, key: str) -> tuple[Table, ...]:
        """The tables of an array, `[[key]]`."""
        value = self._get(key, [])
        if isinstance(value, list) and all(isinstance(v, dict) for v in value):
            return tuple(Table(f"{self.where}, [[{key}]] {i}", v) for i, v in enumerate(value, 1))
        return self._refuse(key, f"tables, [[{key}]]", value)

    def done(self) -> None:
        """Raises UsageError for a key that nobody asked for: a misspelt one must not be ignored."""
        if unknown := sorted(set(self.values) - self._known):
            raise UsageError(f"{self.where}: unknown key {unknown[0]!r}. Known are {', '.join(sorted(self._known))}")

    def _get(self, key: str, default: object) -> object:
        self._known.add(key)
        if key not in self.values and default is None:
            raise UsageError(f"{self.where}: {key!r} is missing")
        return self.values.get(key, default)

    def _refuse(self, key: str, wanted: str, value: object) -> NoReturn:
        raise UsageError(f"{self.where}: {key} is {value!r}, {wanted} is needed")


def read_toml(path: Path) -> Table:
    """The whole file. Raises UsageError when there is none, or it is no TOML."""
    try:
        return Table(str(path), tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as e:
        raise UsageError(f"{path}: {e.strerror}. Name the .toml file") from None
    except (
        ValueError,
        RecursionError,
    ) as e:  # tomllib's own, of the encoding, of a number too long, of brackets too deep
        raise UsageError(f"{path} is no TOML: {e}") from None
