"""Which runs of a command over several ops have ended: what the same command leaves out when it goes on after an interruption.

A small file below the home, a line an op; it is there for as long as the command has not ended. It is no data: rows are in the
journals, and without the file the ops are only searched once more.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

from emmy.codegen.files import appearing, whole_lines
from emmy.ir.ops import Op
from emmy.search.events import Planned
from emmy.search.session import Request


class Finished:
    """Keys of ops. Used by several threads."""

    def __init__(self, path: Path | None = None, keys: Iterable[str] = ()) -> None:
        """`path`: where they are kept; None = nowhere."""
        self._path, self._keys, self._lock = path, set(keys), threading.Lock()

    @classmethod
    def of(
        cls, requests: Sequence[Request], where: str, home: Path, emmy_version: str, tables: Iterable[str] = ()
    ) -> Self:
        """Of the command that asks for these: empty unless it was interrupted. Of one request, or fresh ones, nothing is kept.

        where:  the product that measures, or who predicts its times
        tables: keys of ops whose ranges are among the requests, and are raced when they were tuned
        """
        if len(requests) < 2 or any(r.fresh for r in requests):
            return cls()
        said = [f"{where} {emmy_version}"]
        # Whatever the order, which follows from what is known when a command begins.
        said += sorted(f"{r.op.key} {r.target.name} {r.strategy} {r.seed} {r.threads} {r.sums}" for r in requests)
        digest = hashlib.sha256("\n".join(said).encode()).hexdigest()[:16]
        path = home / "sittings" / f"{digest}.txt"
        found = cls(path, whole_lines(path))
        if all(k in found for k in (*(r.op.key for r in requests), *tables)):  # killed between the last op and `forget`
            found.forget()
        return found

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def plan(self, requests: Sequence[Request], abreast: int = 1) -> Planned:
        """What is told before these begin, which are of one target, `abreast` of them at a time."""
        keys = {r.op.key for r in requests}
        return Planned(requests[0].target.name, len(keys), len(keys & self._keys), abreast)

    def add(self, key: str) -> None:
        """The op's run has ended, or its ranges were raced."""
        with self._lock:
            self._keys.add(key)
            if self._path is not None:
                with appearing(self._path) as new:
                    new.write_text("".join(f"{k}\n" for k in sorted(self._keys)), encoding="utf-8")

    def forget(self) -> None:
        """The command has ended: asked for again, it begins anew."""
        with self._lock:
            self._keys.clear()
            if self._path is not None:
                self._path.unlink(missing_ok=True)


def had_been_finished(op: Op) -> str:
    """What is said of an op that is left out."""
    return f"{op}: had been finished, and is left out now"
