"""Trained models on disk: which one is deployed for a target, and which were before. Trains nothing.

    <root>/<target>.txt.xz, .json                     the deployed model and its card
    <root>/versions/<target>-<digest>.txt.xz, .json   every model that was trained, by its digest
    <root>/versions/<target>.lock                     held while a model of the target is trained or deployed

A deployment is atomic: the card, written last and in one step, names its texts by digest. When a deployment is killed between
text and card, the old card still finds its text among the versions, where it is kept before anything else is written.
A text that is not compressed (`.txt`) is read as well, and replaced by one that is.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from emmy import config
from emmy.costmodel.evaluate import unfit
from emmy.costmodel.features import FeatureSet, feature_set
from emmy.costmodel.model import CostModel, ModelCard, read_card
from emmy.costmodel.model_files import PACKED, TEXT, card_path, found
from emmy.costmodel.shards import check_target
from emmy.errors import DataError, EmmyError, StaleModel, UsageError

Standing = Literal["deployed", "superseded", "not deployed", "stale", "damaged"]
_DIGEST = "[0-9a-f]" * 16  # as a pattern of file names


class TrainingBusy(EmmyError):
    """Another process trains or deploys a model of the target."""


@dataclass(frozen=True, slots=True)
class Version:
    """A model that was kept. `standing`: in use; in use before; never in use; of features that this Emmy does not compute;
    not what its card says (`fault` has the reason, and there may be no card)."""

    target: str
    digest: str
    standing: Standing
    card: ModelCard | None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class ModelStore:
    """The models below one folder."""

    root: Path

    def card(self, target: str) -> ModelCard | None:
        """The card of the model in use for `target`, whatever its feature set; None without one."""
        path = card_path(self._text(target))
        return read_card(path) if path.exists() else None

    def deployed(self, target: str, expected: FeatureSet | None = None) -> CostModel | None:
        """The model in use for `target`, None without one. Raises StaleModel or DataError as `CostModel.load` does."""
        if (card := self.card(target)) is None:
            return None
        return self._load(target, card, expected)

    def version(self, target: str, digest: str) -> CostModel | None:
        """A model that was kept, None without one. Raises as `deployed` does."""
        text = self._version(target, digest)
        return CostModel.load(text) if text.is_file() else None

    def keep(self, model: CostModel) -> Path:
        """The text file of the model among the versions, where it now is."""
        path = self._version(model.card.target, model.digest)
        model.save(path)
        return path

    def deploy(self, model: CostModel) -> Path:
        """The text file of the model, in use from now on. It is kept among the versions, with the one it replaces."""
        target = model.card.target
        before = self._keep_deployed(target)
        replaces = before.replaces if before and before.digest == model.digest else before.digest if before else ""
        named = CostModel(replace(model.card, replaces=replaces), model.text, f"the new model of {target}")
        self.keep(named)
        return self._save_deployed(named)

    def rollback(self, target: str, version: str = "", *, force: bool = False) -> ModelCard:
        """The card of the version that is in use again: the one before the deployed, or the one whose digest begins so.

        force: deploy it although held-out problems did not speak for it, or it is of another feature set
        Raises UsageError when there is no such version or it may not be deployed, DataError when it is damaged or not of
        the target, StaleModel when this Emmy could not use it.
        """
        deployed = card_path(self._text(target))
        now = (
            c if deployed.exists() and isinstance(c := _card(deployed), ModelCard) else None
        )  # a damaged one may be left
        text = self._chosen(target, version, now.replaces if now else "")
        card = read_card(card_path(text))
        if card.target != target or text != self._version(target, card.digest):
            raise DataError(
                f"{text}: its card is of {card.target}, version {card.digest}: a foreign model. "
                f"`emmy train-costmodel --gpu {target} --list` names those there are"
            )
        model = CostModel.load(text, FeatureSet(card.feature_names, card.feature_digest) if force else feature_set())
        why = unfit(card.scores) or ("" if model.is_calibrated else "uncalibrated: its error was never measured")
        if why and not force:
            raise UsageError(
                f"version {card.digest} of {target} may not be deployed: {why}. Measure more ops and train anew, "
                "or deploy it all the same with --force"
            )
        self._keep_deployed(target)
        if now and version and now.digest != card.digest and not card.replaces:
            model = CostModel(replace(card, replaces=now.digest), model.text, str(text))
        self._save_deployed(model)
        return model.card

    def versions(self, target: str) -> tuple[ModelCard, ...]:
        """Cards of every model of `target` that was kept, oldest first. Raises DataError when one cannot be read."""
        return tuple(sorted(map(read_card, self._cards(target)), key=lambda card: card.time_utc))

    def newest(self, target: str) -> ModelCard | None:
        """The card of the model of `target` that was trained last, deployed or not; damaged ones are left out."""
        deployed = (card_path(self._text(target)),)
        cards = [c for p in (*self._cards(target), *deployed) if p.exists() and isinstance(c := _card(p), ModelCard)]
        return max(cards, key=lambda card: card.time_utc, default=None)

    def history(self, target: str) -> tuple[Version, ...]:
        """Every version of `target`, oldest first, damaged ones at the end; one that was deployed from elsewhere included."""
        deployed = card_path(self._text(target))
        now = _card(deployed) if deployed.exists() else None
        kept = {p.stem.rpartition("-")[2]: (_card(p), found(p.with_suffix(PACKED))) for p in self._cards(target)}
        if isinstance(now, ModelCard) and now.digest not in kept:
            kept[now.digest] = (now, self._text(target))
        cards = [c for c, _ in kept.values() if isinstance(c, ModelCard)]
        in_use = now.digest if isinstance(now, ModelCard) else ""
        before = {c.replaces for c in (*cards, *([now] if isinstance(now, ModelCard) else []))}
        out = [_version_of(target, digest, c, text, in_use, before) for digest, (c, text) in kept.items()]
        return tuple(sorted(out, key=lambda v: (v.card is None, v.card.time_utc if v.card else v.digest)))

    def targets(self) -> tuple[str, ...]:
        """Targets that have a model here, deployed or kept."""
        kept = {p.stem.rpartition("-")[0] for p in (self.root / "versions").glob(f"*-{_DIGEST}.json")}
        return tuple(sorted(kept | {p.stem for p in self.root.glob("*.json") if found(p.with_suffix(PACKED)).exists()}))

    @contextmanager
    def training(self, target: str, *, wait: bool = True) -> Iterator[None]:
        """Within, no other process trains or deploys a model of `target` here. Raises TrainingBusy when one does, unless
        `wait`. The lock dies with its holder."""
        path = self.root / "versions" / f"{check_target(target)}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as f:
            try:
                fcntl.flock(f, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                raise TrainingBusy(f"{path}: another process trains a model of {target}. Let it end.") from None
            yield

    def _keep_deployed(self, target: str) -> ModelCard | None:
        """The card in use, its model being among the versions from now on; None when there is none that is whole."""
        try:
            card = self.card(target)
            if card is None:
                return None
            if not self._version(target, card.digest).exists():  # it came with Emmy, or was copied here
                self.keep(self._load(target, card, FeatureSet(card.feature_names, card.feature_digest)))
        except DataError:  # a damaged one is no reason not to deploy a sound one
            return None
        return card

    def _chosen(self, target: str, version: str, before: str) -> Path:
        """The text file of a version by the beginning of its digest, or of the one before."""
        listed = f"`emmy train-costmodel --gpu {target} --list` names those there are"
        if not version:
            text = self._version(target, before)
            if not before or not text.exists():
                raise UsageError(
                    f"{self.root} has no model of {target} from before the deployed one. Train one: `emmy train-costmodel`"
                )
            return text
        cards = [p for p in self._cards(target) if p.stem.rpartition("-")[2].startswith(version)]
        if len(cards) != 1:
            what = "no version" if not cards else f"{len(cards)} versions"
            raise UsageError(f"{self.root} has {what} of {target} that begins with {version!r}; {listed}")
        return found(cards[0].with_suffix(PACKED))

    def _cards(self, target: str) -> tuple[Path, ...]:
        return tuple(sorted((self.root / "versions").glob(f"{check_target(target)}-{_DIGEST}.json")))

    def _load(self, target: str, card: ModelCard, expected: FeatureSet | None) -> CostModel:
        """The model in use: of the first text that is what its card says. Raises what the first text raised otherwise."""
        text = self._text(target)
        faults: list[DataError] = []
        for file in dict.fromkeys((text, self._plain(target), self._version(target, card.digest))):
            try:
                if file == text or file.is_file():
                    return CostModel.load(file, expected, card_path(text))
            except DataError as e:
                faults.append(e)
        raise faults[0]

    def _save_deployed(self, model: CostModel) -> Path:
        """Where the model is now in use. A plain text of the one before it goes last: it is among the versions."""
        text = self.root / f"{check_target(model.card.target)}{PACKED}"
        model.save(text)
        self._plain(model.card.target).unlink(missing_ok=True)
        return text

    def _plain(self, target: str) -> Path:
        return self.root / f"{check_target(target)}{TEXT}"

    def _text(self, target: str) -> Path:
        return found(self.root / f"{check_target(target)}{PACKED}")

    def _version(self, target: str, digest: str) -> Path:
        return found(self.root / "versions" / f"{check_target(target)}-{digest}{PACKED}")


def model_roots(home: Path) -> tuple[Path, ...]:
    """Folders that may hold models, first choice first: the home's (a checkout's own, when it is the home), the package's."""
    checkout = config.checkout()
    own = checkout / "models" if checkout and home == checkout / "datasets" else home / "models"
    shipped = (*((checkout / "models",) if checkout else ()), Path(__file__).parent.parent / "models")
    return (own, *(shipped if config.uses_shipped() else ()))


def kept(target: str, digest: str, roots: Sequence[Path]) -> CostModel | None:
    """The version of that digest, in use or not; None where no root has it, or this Emmy cannot use it."""
    for root in dict.fromkeys(roots):
        try:
            if (model := ModelStore(root).version(target, digest)) is not None:
                return model
        except DataError:  # StaleModel included
            continue
    return None


def find(target: str, roots: Sequence[Path]) -> CostModel | None:
    """The deployed model of `target` in the first root that has one. Raises StaleModel when it is of other features."""
    for root in dict.fromkeys(roots):
        if (model := ModelStore(root).deployed(target)) is not None:
            return model
    return None


def _card(path: Path) -> ModelCard | str:
    """The card, or what is wrong with it."""
    try:
        return read_card(path)
    except DataError as e:
        return str(e)


def _version_of(target: str, digest: str, card: ModelCard | str, text: Path, in_use: str, before: set[str]) -> Version:
    if isinstance(card, str):
        return Version(target, digest, "damaged", None, card)
    try:
        if (card.target, card.digest) != (target, digest):
            raise DataError(f"{text}: its card is of {card.target}, version {card.digest}: a foreign model")
        CostModel.load(text, card_file=card_path(text))
    except StaleModel as e:
        return Version(target, digest, "stale", card, str(e))
    except DataError as e:
        return Version(target, digest, "damaged", card, str(e))
    standing: Standing = "deployed" if digest == in_use else "superseded" if digest in before else "not deployed"
    return Version(target, digest, standing, card)
