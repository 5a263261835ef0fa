"""A trained cost model: LightGBM trees as text and a card that says what they are. Loads, predicts, saves; trains nothing.

`<name>.txt.xz` (or `.txt`, not compressed) is the texts of all members, one after the other; `<name>.json` is the card,
which knows where each begins.
No pickle. A model is used only with the feature set it was trained on.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from emmy.costmodel.built import NAMES as BUILT
from emmy.costmodel.evaluate import RankerScore
from emmy.costmodel.features import FeatureSet, feature_set
from emmy.costmodel.files import write_atomically
from emmy.costmodel.model_files import card_path, found, read_text, write_text
from emmy.costmodel.model_text import MAX_BYTES, check_model_text
from emmy.errors import DataError, StaleModel

if TYPE_CHECKING:
    import lightgbm

Floats = NDArray[np.float64]
Role = Literal["time", "pick", "built"]

CARD_VERSION = 1
MAX_CARD_BYTES = 1 << 20
MAX_MEMBERS = 16
UNCALIBRATED_LOG2 = 1.0  # spread of a model that no held-out problem has judged: a factor of two


@dataclass(frozen=True, slots=True)
class Member:
    """One LightGBM model. "time": log2(time) less the offset feature, by regression; "pick": order within a problem;
    "built": as "time", but from what the compiler made of a candidate too.
    """

    role: Role
    seed: int
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Donor:
    """Samples of another card in a model's fit: how many, and what each counts beside the card's own, which count 1."""

    target: str
    samples: int
    weight: float


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a model was trained on and how good it was on problems it had not seen."""

    target: str
    feature_names: tuple[str, ...]
    feature_digest: str
    offset: str  # the feature a "time" member's output is added to; "" = none
    members: tuple[Member, ...]
    rows: int
    rows_digest: str  # of the ids of the rows
    workloads: tuple[str, ...]  # ops trained on
    residual_log2: float | None  # typical error of a predicted ratio between two candidates; None = never held out
    scores: tuple[RankerScore, ...]  # on held-out problems
    emmy_version: str
    time_utc: str
    replaces: str = ""  # digest of the model deployed before
    # log2(time / predicted) of the ten best predicted on each held-out problem: 10 %, 50 % and 90 % of them lie below.
    # Picks are flattered, being chosen for a low prediction; so are these. None = never taken.
    pick_error_log2: tuple[float, float, float] | None = None
    donors: tuple[Donor, ...] = ()  # other cards' samples in the fit
    rows_stored: int = (
        0  # usable rows that the dataset held of the target: more of them make the model old. 0 = not known
    )
    train_s: float = 0.0  # what the training took; 0 = not known
    built_names: tuple[str, ...] = ()  # features of binaries that its "built" member sees beside the others

    @property
    def digest(self) -> str:
        """Tells models apart by their texts: 16 hexadecimal digits."""
        return hashlib.sha256("".join(m.sha256 for m in self.members).encode()).hexdigest()[:16]


class Ensemble:
    """The members of a model, ready to predict. `offset`: index of the feature that "time" outputs are added to."""

    def __init__(self, texts: Sequence[tuple[Role, str]], offset: int | None) -> None:
        self._offset = offset
        self._times = [_booster(text) for role, text in texts if role == "time"]
        self._picks = [_booster(text) for role, text in texts if role == "pick"]
        self._built = [_booster(text) for role, text in texts if role == "built"]

    @property
    def sees_binaries(self) -> bool:
        return bool(self._built)

    def predict(self, x: Floats) -> tuple[Floats, Floats]:
        """(log2 of the time in microseconds, disagreement of the members in the same unit), one each a row."""
        each = _outputs(self._times, x)
        return np.asarray(each.mean(axis=0) + self._offsets(x)), np.asarray(each.std(axis=0))

    def predict_built(self, x: Floats, built: Floats) -> Floats:
        """log2 of the time in microseconds, of candidates with features x and binaries of which `built` is known; as
        `predict` where the model sees no binaries.
        """
        if not self._built:
            return self.predict(x)[0]
        return np.asarray(_outputs(self._built, np.hstack([x, built])).mean(axis=0) + self._offsets(x))

    def pick(self, x: Floats) -> Floats:
        """A score by which the candidates of one problem are ordered; lower is better, and nothing else is meant."""
        if not self._picks:
            return self.predict(x)[0]
        return np.asarray(-_outputs(self._picks, x).mean(axis=0))

    def _offsets(self, x: Floats) -> Floats | float:
        return x[:, self._offset] if self._offset is not None else 0.0


def in_precision(x: Floats) -> Floats:
    """Features as models see them: to single precision, in which sums taken in another order are equal."""
    return x.astype(np.float32).astype(np.float64)


def _outputs(members: Sequence[lightgbm.Booster], x: Floats) -> Floats:
    """[member, row]"""
    seen = in_precision(x)
    return np.stack([np.asarray(b.predict(seen, num_threads=1)) for b in members])


class CostModel:
    """A model with its card. Implements the search's `Ranker`."""

    def __init__(self, card: ModelCard, text: str, where: str) -> None:
        """Raises DataError when the text is not what the card says."""
        self.card, self.text = card, text
        texts = _split(card, text, where)
        names = card.feature_names
        for i, (role, member) in enumerate(texts):
            own = (*names, *card.built_names) if role == "built" else names
            check_model_text(member, own, f"{where}: member {i}")
        self._texts = texts

    @cached_property
    def ensemble(self) -> Ensemble:
        names = self.card.feature_names
        return Ensemble(self._texts, names.index(self.card.offset) if self.card.offset else None)

    @property
    def digest(self) -> str:
        return self.card.digest

    @property
    def is_calibrated(self) -> bool:
        """Whether problems it had not seen have judged it."""
        return self.card.residual_log2 is not None

    def predict(self, x: Floats) -> tuple[Floats, Floats]:
        """(log2 of the time in microseconds, spread in the same unit) for each row of x [n, n_features].

        The spread joins the members' disagreement with the error seen on held-out problems.
        """
        log2_us, disagreement = self.ensemble.predict(x)
        residual = self.card.residual_log2 if self.card.residual_log2 is not None else UNCALIBRATED_LOG2
        return log2_us, np.hypot(disagreement, residual)

    def pick(self, x: Floats) -> Floats:
        """A score by which the candidates of one problem are ordered for a final choice; lower is better."""
        return self.ensemble.pick(x)

    def predict_built(self, x: Floats, built: Floats) -> Floats:
        """log2 of the time in microseconds, of rows of x whose binaries are known: `built` [n, len(built.NAMES)]."""
        return self.ensemble.predict_built(x, built)

    def save(self, text_path: Path) -> None:
        """Writes the text, then the card beside it; each in one step."""
        write_text(text_path, self.text)
        write_atomically(card_path(text_path), card_json(self.card).encode())

    @classmethod
    def load(cls, text_path: Path, expected: FeatureSet | None = None, card_file: Path | None = None) -> CostModel:
        """The model saved there, or under the name's plain or compressed twin.

        card_file: where its card is; None = beside it
        Raises StaleModel for another feature set, DataError for anything malformed.
        """
        text_path = found(text_path)
        card = read_card(card_file or card_path(text_path))
        expected = expected or feature_set()
        of_binaries = card.built_names and card.built_names != BUILT
        if card.feature_digest != expected.digest or card.feature_names != expected.names or of_binaries:
            raise StaleModel(
                f"{text_path} was trained on feature set {card.feature_digest[:8]}, this Emmy computes "
                f"{expected.digest[:8]}.\nRetrain with `emmy train-costmodel --gpu {card.target}`, or tune without it: "
                "--model roofline"
            )
        return cls(card, read_text(text_path, MAX_BYTES * MAX_MEMBERS), str(text_path))


def member_of(role: Role, seed: int, text: str) -> Member:
    """The card's entry for a member's text."""
    data = text.encode()
    return Member(role, seed, len(data), hashlib.sha256(data).hexdigest())


def card_json(card: ModelCard) -> str:
    """The card as it is written: indented JSON."""
    return json.dumps({"v": CARD_VERSION, **asdict(card)}, indent=1) + "\n"


def read_card(path: Path) -> ModelCard:
    """The card written there. Raises DataError naming the field that is not as it must be."""
    try:
        raw = json.loads(read_text(path, MAX_CARD_BYTES), object_pairs_hook=_no_repeats)
    except (ValueError, RecursionError) as e:
        raise DataError(f"{path}: not a model card: {e}") from None
    names = {f.name for f in fields(ModelCard)}
    if isinstance(raw, dict):  # cards without these are as good
        for name, otherwise in (
            ("pick_error_log2", None),
            ("donors", []),
            ("rows_stored", 0),
            ("train_s", 0.0),
            ("built_names", []),
        ):
            raw.setdefault(name, otherwise)
    if not isinstance(raw, dict) or raw.get("v") != CARD_VERSION or raw.keys() != names | {"v"}:
        raise DataError(f"{path}: not a model card of version {CARD_VERSION}: keys {sorted(raw)}")
    texts = ("target", "feature_digest", "offset", "rows_digest", "emmy_version", "time_utc", "replaces")
    try:
        residual = raw["residual_log2"]
        card = ModelCard(
            feature_names=tuple(_text(x) for x in raw["feature_names"]),
            members=tuple(_member(x) for x in raw["members"]),
            rows=int(raw["rows"]),
            workloads=tuple(_text(x) for x in raw["workloads"]),
            residual_log2=None if residual is None else float(residual),
            scores=tuple(RankerScore(**x) for x in raw["scores"]),
            pick_error_log2=_quantiles(raw["pick_error_log2"]),
            donors=tuple(Donor(_text(d["target"]), int(d["samples"]), float(d["weight"])) for d in raw["donors"]),
            rows_stored=int(raw["rows_stored"]),
            train_s=float(raw["train_s"]),
            built_names=tuple(_text(x) for x in raw["built_names"]),
            **{key: _text(raw[key]) for key in texts},
        )
    except (KeyError, TypeError, ValueError) as e:
        raise DataError(f"{path}: a field of the model card is missing or mistyped: {e}") from None
    if not 1 <= len(card.members) <= MAX_MEMBERS or all(m.role != "time" for m in card.members):
        raise DataError(f"{path}: {len(card.members)} members; 1 to {MAX_MEMBERS} are allowed, one of them for times")
    if card.offset and card.offset not in card.feature_names:
        raise DataError(f"{path}: the offset {card.offset!r} is not one of its features")
    return card


def _member(raw: Mapping[str, object]) -> Member:
    role, seed, size, digest = (raw[k] for k in ("role", "seed", "bytes", "sha256"))
    if role not in get_args(Role) or not isinstance(seed, int) or not isinstance(size, int) or size < 1:
        raise ValueError(f"member {dict(raw)}")
    return Member(cast(Role, role), seed, size, _text(digest))


def _quantiles(raw: object) -> tuple[float, float, float] | None:
    if raw is None:
        return None
    if not isinstance(raw, list) or len(raw) != 3 or not all(isinstance(x, int | float) for x in raw):
        raise TypeError(f"{raw!r} is not three numbers")
    low, middle, high = map(float, raw)
    if not low <= middle <= high:
        raise ValueError(f"{raw!r} do not ascend")
    return low, middle, high


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


def _no_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object, refused when it names a key twice: readers would differ on which one counts."""
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a key occurs twice")
    return out


def _split(card: ModelCard, text: str, where: str) -> list[tuple[Role, str]]:
    data, at, out = text.encode(), 0, []
    for i, m in enumerate(card.members):
        part = data[at : at + m.bytes]
        if hashlib.sha256(part).hexdigest() != m.sha256:
            raise DataError(f"{where}: member {i} is not the text its card describes; copy both files anew, or retrain")
        out.append((m.role, part.decode()))
        at += m.bytes
    if at != len(data):
        raise DataError(f"{where}: {len(data)} bytes, its card describes {at}")
    return out


def _booster(text: str) -> lightgbm.Booster:
    import lightgbm

    lightgbm.register_logger(logging.getLogger("emmy.costmodel.lightgbm"))
    try:
        return lightgbm.Booster(model_str=text)
    except lightgbm.basic.LightGBMError as e:
        raise DataError(f"LightGBM cannot read a model's text: {e}. Train it anew: `emmy train-costmodel`") from None
