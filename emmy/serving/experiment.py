"""What an experiment compares: lanes, points of work, how often, of which model. Read from a TOML file; starts nothing."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from emmy.errors import UsageError
from emmy.serving.command import Using, using
from emmy.serving.fields import Table, read_toml

DTYPES = ("auto", "bfloat16", "float16", "float32")
if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
MOST_WAVES = 1000
WARMUPS = 4  # requests that do not count, as long as those that do
_POINT = re.compile(r"([0-9]{1,9})/([0-9]{1,9})@([0-9]{1,9})(?:x([0-9]{1,9}))?")
_LANE = re.compile(r"\w[\w.+-]{0,63}")  # names files


@dataclass(frozen=True, slots=True)
class Point:
    """A workload: `prompts` requests of `input` random tokens that give `output` tokens each, at most `concurrency` at once.

    published_output: the tokens that the published point gives; more than `output` where that was cut to save time
    """

    input: int
    output: int
    concurrency: int
    prompts: int
    warmups: int
    published_output: int

    @property
    def name(self) -> str:
        """4096/4096@1: what the point is published as."""
        return f"{self.input}/{self.published_output}@{self.concurrency}"

    @property
    def note(self) -> str:
        """What was cut, for whoever reads a number of it."""
        return (
            "" if self.output == self.published_output else f"output {self.output} instead of {self.published_output}"
        )

    def cut(self, most_output: int = 0, most_prompts: int = 0) -> Point:
        """The same with fewer tokens or requests; 0: as it is. There are never fewer requests than run at once."""
        output = min(self.output, most_output or self.output)
        prompts = max(self.concurrency, min(self.prompts, most_prompts or self.prompts))
        return replace(self, output=output, prompts=prompts)


def parse_point(text: str) -> Point:
    """IN/OUT@CONCURRENCY, and xREQUESTS where it is not four times that. Raises UsageError."""
    found = _POINT.fullmatch(text)
    numbers = [int(n or 0) for n in found.groups()] if found else []
    if not numbers or not all(numbers[:3]):
        raise UsageError(
            f"{text!r} is no point of work: INPUT/OUTPUT@CONCURRENCY is, such as 4096/256@4 or 256/64@8x32"
        )
    n_in, n_out, at_once, prompts = numbers
    return Point(n_in, n_out, at_once, prompts or 4 * at_once, min(at_once, WARMUPS), n_out)


@dataclass(frozen=True, slots=True)
class Lane:
    """One way to serve. `against`: the lane of stock with the same dtype that it is compared with, "" for stock itself."""

    name: str
    dtype: str
    against: str = ""
    use: Using | None = None
    environment: Mapping[str, str] | None = None
    flags: tuple[str, ...] = ()

    @property
    def server_flags(self) -> tuple[str, ...]:
        return ("--dtype", self.dtype, *self.flags)


def groups(lanes: Sequence[Lane]) -> tuple[tuple[Lane, ...], ...]:
    """Each lane of stock with the lanes that are compared with it: what may be loaded side by side."""
    return tuple((s, *(x for x in lanes if x.against == s.name)) for s in lanes if not s.against)


@dataclass(frozen=True, slots=True)
class Offline:
    """What is timed in process: prompts of `prefill` tokens alone; per token, batches of `decode` requests after `context` tokens."""

    prefill: tuple[int, ...] = (512, 2048, 4096)
    decode: tuple[int, ...] = (1, 8, 64)
    context: int = 512
    steps: int = 64
    rounds: int = 7
    memory: float = 0.85  # share of the device's, for the lanes that are loaded together
    kv_gib: float = 0.0  # keys and values of each lane; with it engines start at the same time. 0: what is left

    def shared(self, n: int) -> tuple[str, ...]:
        """Flags of each of n engines that are on one device together."""
        flags = ("--gpu-memory-utilization", f"{self.memory / n:.4f}")
        return (*flags, "--kv-cache-memory-bytes", str(int(self.kv_gib * 2**30))) if self.kv_gib else flags


@dataclass(frozen=True, slots=True)
class Experiment:
    """All that is compared. `flags` go to the server of every lane; `waves`: how often every lane is started."""

    name: str
    model: str
    lanes: tuple[Lane, ...]
    points: tuple[Point, ...]
    waves: int
    flags: tuple[str, ...]
    offline: Offline

    def key(self, lane: Lane, what: DataclassInstance, vllm: str) -> str:
        """Digest of all that decides what is measured, `what` being a point or a case: the same need not be measured again."""
        parts = (self.model, self.flags, lane.dtype, lane.flags, sorted((lane.environment or {}).items()))
        use = lane.use.options if lane.use else {}
        said = json.dumps([*parts, {k: v for k, v in use.items() if k != "pack"}, asdict(what), vllm])
        return hashlib.sha256(said.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Changes:
    """What a command line changes of the file. `packs`: of a lane by name, "" of all that have one."""

    model: str = ""
    packs: Mapping[str, Path] | None = None
    lanes: Sequence[str] = ()
    points: Sequence[str] = ()
    waves: int = 0
    most_output: int = 0
    most_prompts: int = 0
    rounds: int = 0
    flags: Sequence[str] = ()


def read_experiment(path: Path, changes: Changes) -> Experiment:
    """The experiment in a file, with the changes. Raises UsageError for what is wrong in either, PackError for a lane's pack."""
    top = read_toml(path)
    name, model, waves = top.text("name"), top.text("model", changes.model or None), top.count("waves", 1)
    flags, offline = top.texts("flags"), _offline(top.table("offline"))
    points = tuple(map(_point, top.tables("point")))
    drafts = [_Draft.read(t, path.parent) for t in top.tables("lane")]
    top.done()
    points = _chosen(points, changes.points, f"{path}: point", lambda p: p.name)
    drafts = list(_chosen(drafts, _with_stock(drafts, changes.lanes), f"{path}: lane", lambda d: d.name))
    _refuse_lanes(path, drafts)
    if (waves := changes.waves or waves) > MOST_WAVES:
        raise UsageError(f"{path}: {waves} waves; at most {MOST_WAVES}, each of which starts every server")
    return Experiment(
        name,
        changes.model or model,
        tuple(d.lane(path, changes.packs or {}) for d in drafts),
        tuple(p.cut(changes.most_output, changes.most_prompts) for p in points),
        waves,
        (*flags, *changes.flags),
        replace(offline, rounds=changes.rounds or offline.rounds),
    )


@dataclass(frozen=True, slots=True)
class _Draft:
    """A lane as the file has it, whose pack was not looked at yet."""

    name: str
    dtype: str
    against: str
    pack: Path | None
    deterministic: bool
    unmeasured: bool
    parts: tuple[str, ...]
    fast_math: bool
    flags: tuple[str, ...]

    @classmethod
    def read(cls, t: Table, folder: Path) -> _Draft:
        pack = t.text("pack", "")
        draft = cls(
            t.text("name"), t.text("dtype", "bfloat16"), t.text("against", ""), folder / pack if pack else None,
            t.flag("deterministic"), t.flag("unmeasured"), t.texts("parts"), t.flag("fast_math"), t.texts("flags"),
        )  # fmt: skip
        t.done()
        if not _LANE.fullmatch(draft.name):
            raise UsageError(
                f"{t.where}: name is {draft.name!r}, up to 64 letters, digits, '_', '.', '+' and '-' are needed"
            )
        if draft.dtype not in DTYPES:
            raise UsageError(f"{t.where}: dtype is {draft.dtype!r}, allowed are {', '.join(DTYPES)}")
        return draft

    def lane(self, path: Path, packs: Mapping[str, Path]) -> Lane:
        pack = packs.get(self.name) or packs.get("") or self.pack
        use = None
        if self.against:
            if pack is None:
                raise UsageError(f"{path}: lane {self.name} has no pack. Name it: --pack {self.name}=FILE")
            use = using(pack, deterministic=self.deterministic, unmeasured=self.unmeasured, parts=self.parts)
        elif self.name in packs:
            raise UsageError(f"{path}: lane {self.name} is stock, which has no pack")
        return Lane(
            self.name, self.dtype, self.against, use, {"EMMY_FAST_MATH": "1"} if self.fast_math else {}, self.flags
        )


def _with_stock(drafts: Sequence[_Draft], asked: Sequence[str]) -> list[str]:
    """The lanes asked for, and those they are compared with."""
    return [*asked, *(d.against for d in drafts if d.name in asked and d.against and d.against not in asked)]


def _refuse_lanes(path: Path, drafts: Sequence[_Draft]) -> None:
    by_name = {d.name: d for d in drafts}
    if len(by_name) < len(drafts) or not drafts:
        raise UsageError(f"{path}: lanes need a name each, and there must be one: [[lane]]")
    for d in drafts:
        if d.against and (d.against not in by_name or by_name[d.against].against):
            raise UsageError(f"{path}: lane {d.name} is against {d.against!r}, which is no lane of stock here")
        if d.against and by_name[d.against].dtype != d.dtype:
            raise UsageError(
                f"{path}: lane {d.name} is {d.dtype}, but {d.against}, which it is against, is {by_name[d.against].dtype}: compare like "
                "with like"
            )


def _point(t: Table) -> Point:
    n_in, n_out, at_once = t.count("input"), t.count("output"), t.count("concurrency")
    point = Point(
        n_in, n_out, at_once, t.count("prompts", 4 * at_once), t.count("warmups", min(at_once, WARMUPS), 0), n_out
    )
    t.done()
    if point.prompts < at_once:
        raise UsageError(f"{t.where}: {point.prompts} prompts never keep {at_once} in flight. Ask for at least as many")
    return point


def _offline(t: Table) -> Offline:
    d = Offline()
    offline = Offline(
        t.counts("prefill", d.prefill), t.counts("decode", d.decode), t.count("context", d.context), t.count("steps", d.steps),
        t.count("rounds", d.rounds), t.number("memory", d.memory, 1.0), t.number("kv_gib", d.kv_gib),
    )  # fmt: skip
    t.done()
    return offline


def _chosen(all_of: Sequence[T], asked: Sequence[str], what: str, name: Callable[[T], str]) -> tuple[T, ...]:
    """Those asked for, in the file's order; all when none is. Raises UsageError for a name that is not there."""
    names = [name(x) for x in all_of]
    if strange := [a for a in asked if a not in names]:
        raise UsageError(f"{what} {strange[0]!r} is not there, only {', '.join(names) or 'none'}")
    return tuple(x for x in all_of if not asked or name(x) in asked)
