"""What schedules replay to, remembered from one training to the next: features and source digests. Trains nothing.

A replay costs milliseconds, a training has thousands, and between two trainings hardly any row is new. An entry holds for one
target and one state of the code that this file reaches by its imports: moves, code generation and features. Another cache size
or a change there makes all of them void; a change of searches, measurement or training does not.
The file is a cache, no data: it is written in one step, and one that cannot be read is as good as none.
"""

from __future__ import annotations

import ast
import hashlib
import io
import logging
import zipfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from emmy import config
from emmy.codegen.build import source
from emmy.codegen.files import appearing
from emmy.costmodel.features import feature_set, features
from emmy.errors import CompileError, PlanError, UsageError
from emmy.ir.ops import Op, parse_op
from emmy.ir.schedule import replay
from emmy.ir.target import Target
from emmy.records import source_mark

log = logging.getLogger("emmy.costmodel.replayed")

Floats = NDArray[np.float64]
# (features, what a row keeps of the digest of the source), or None where the schedule is refused.
Outcome = tuple[Floats, str] | None
# The digest of the source that a schedule of an op is generated to for a target.
SourceDigest = Callable[[Op, str, Target], str]


def generated_digest(op: Op, schedule: str, target: Target) -> str:
    """The digest of the source that this Emmy generates. Raises PlanError or UsageError for a schedule it refuses."""
    return source(op, schedule, target).digest


def outcome_of(op: str, schedule: str, target: Target, threads: int, source_digest: SourceDigest) -> Outcome:
    """What a schedule of an op replays to now."""
    try:
        found = parse_op(op)
        plan = replay(found.program(), schedule, target)
        return features(found, plan, target, threads), source_mark(source_digest(found, schedule, target))
    except (PlanError, UsageError, CompileError):
        return None


class Replays:
    """Outcomes by op, schedule and threads, for one target. Loaded when made; `save` writes what was added."""

    def __init__(self, path: Path, tag: str) -> None:
        """`tag`: what the entries depend on; a file with another one counts as empty."""
        self._path, self._tag = path, tag
        self._known: dict[str, Outcome] = _load(path, tag)
        self._saved = len(self._known)

    @classmethod
    def of(cls, target: Target, source_digest: SourceDigest) -> Replays:
        """Those of this Emmy for the target, in the cache folder."""
        name = f"{source_digest.__module__}.{source_digest.__qualname__}"
        figures = replace(target, capabilities=frozenset(), sources={})  # a set prints in another order each time
        parts = (code_digest(), feature_set().digest, name, repr(figures), *sorted(target.capabilities))
        tag = hashlib.sha256("\n".join(parts).encode()).hexdigest()
        return cls(config.cache_dir() / "replays" / f"{target.name}.npz", tag)

    @property
    def tag(self) -> str:
        return self._tag

    def __len__(self) -> int:
        return len(self._known)

    def get(self, op: str, schedule: str, threads: int, make: Callable[[], Outcome]) -> Outcome:
        """The outcome: remembered, or made now."""
        key = hashlib.sha256(f"{op}\n{schedule}\n{threads}".encode()).hexdigest()[:32]
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def save(self) -> None:
        """Writes the file, if there is anything new; an unwritable folder costs time at the next training, nothing else."""
        if len(self._known) == self._saved:
            return
        held = [(k, *(v or (np.full(len(feature_set().names), np.nan), ""))) for k, v in self._known.items()]
        out = io.BytesIO()
        np.savez(
            out,
            tag=np.array(self._tag),
            keys=np.array([k for k, _, _ in held]),
            x=np.stack([x for _, x, _ in held]),
            digests=np.array([d for _, _, d in held]),
        )
        try:
            with appearing(self._path) as temporary:
                temporary.write_bytes(out.getbuffer())
        except OSError as e:
            log.warning("%s: not written: %s", self._path, e)
            return
        self._saved = len(self._known)


@cache
def code_digest() -> str:
    """Of every module of Emmy that a replay depends on: this one, and what it imports, at any remove."""
    digest = hashlib.sha256()
    for name, text in sorted(_reached(__name__).items()):
        digest.update(f"{name}\n{text}\n".encode())
    return digest.hexdigest()


def _reached(name: str) -> dict[str, str]:
    """Text by name of a module of this package and of all modules of it that its imports lead to."""
    top = Path(__file__).parent.parent
    found: dict[str, str] = {}
    todo = [name]
    while todo:
        name = todo.pop()
        path = top.joinpath(*name.split(".")[1:])
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if name in found or not name.startswith(f"{top.name}.") or not path.is_file():
            continue  # the package itself only names its surface
        found[name] = path.read_text()
        todo.append(name.rpartition(".")[0])
        for node in ast.walk(ast.parse(found[name])):
            if isinstance(node, ast.Import):
                todo += [a.name for a in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                todo += [node.module, *(f"{node.module}.{a.name}" for a in node.names)]  # a name may be a module
    return found


def _load(path: Path, tag: str) -> dict[str, Outcome]:
    try:
        with np.load(path, allow_pickle=False) as held:
            if str(held["tag"]) != tag:
                return {}
            keys, x, digests = held["keys"].tolist(), held["x"], held["digests"].tolist()
        if x.shape != (len(keys), len(feature_set().names)) or len(digests) != len(keys):
            return {}
        return {k: (row, d) if d else None for k, row, d in zip(keys, x, digests, strict=True)}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as e:
        log.warning("%s: not a file of replays, made anew: %s", path, e)
        return {}
