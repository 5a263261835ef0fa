"""Trained models on disk: which one is deployed for a target, and which were before. Trains nothing.

    <root>/<target>.txt, .json                        the deployed model and its card
    <root>/versions/<target>-<digest>.txt, .json      every model that was trained, by its digest

The card is written last and names its texts by digest: when a deployment is killed between text and card, the old card
still finds its text among the versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from emmy import config
from emmy.costmodel.features import FeatureSet
from emmy.costmodel.model import CostModel, ModelCard, read_card
from emmy.costmodel.shards import check_target
from emmy.errors import DataError, UsageError


@dataclass(frozen=True, slots=True)
class ModelStore:
    """The models below one folder."""

    root: Path

    def card(self, target: str) -> ModelCard | None:
        """The card of the model in use for `target`, whatever its feature set; None without one."""
        path = self._text(target).with_suffix(".json")
        return read_card(path) if path.exists() else None

    def deployed(self, target: str, expected: FeatureSet | None = None) -> CostModel | None:
        """The model in use for `target`, None without one. Raises StaleModel or DataError as `CostModel.load` does."""
        if (card := self.card(target)) is None:
            return None
        text = self._text(target)
        try:
            return CostModel.load(text, expected)
        except DataError:
            version = self._version(target, card.digest)
            if not version.exists():
                raise
            return CostModel.load(version, expected, text.with_suffix(".json"))

    def keep(self, model: CostModel) -> Path:
        """The text file of the model among the versions, where it now is."""
        path = self._version(model.card.target, model.digest)
        model.save(path)
        return path

    def deploy(self, model: CostModel) -> Path:
        """The text file of the model, in use from now on. It is kept among the versions, with the one it replaces."""
        target = model.card.target
        before = self.card(target)
        replaces = before.replaces if before and before.digest == model.digest else before.digest if before else ""
        named = CostModel(replace(model.card, replaces=replaces), model.text, f"the new model of {target}")
        self.keep(named)
        named.save(self._text(target))
        return self._text(target)

    def rollback(self, target: str) -> ModelCard:
        """The card of the model that was deployed before, which is in use again. Raises UsageError without one."""
        now = self.card(target)
        version = self._version(target, now.replaces if now else "")
        if not version.exists():
            raise UsageError(
                f"{self.root} has no model of {target} from before the deployed one. Train one: `emmy train-costmodel`"
            )
        # Whatever its feature set: Emmy itself may be rolled back next.
        card = read_card(version.with_suffix(".json"))
        CostModel.load(version, FeatureSet(card.feature_names, card.feature_digest)).save(self._text(target))
        return card

    def versions(self, target: str) -> tuple[ModelCard, ...]:
        """Cards of every model of `target` that was kept, oldest first."""
        cards = (self.root / "versions").glob(f"{check_target(target)}-{'[0-9a-f]' * 16}.json")
        return tuple(sorted(map(read_card, cards), key=lambda card: card.time_utc))

    def _text(self, target: str) -> Path:
        return self.root / f"{check_target(target)}.txt"

    def _version(self, target: str, digest: str) -> Path:
        return self.root / "versions" / f"{check_target(target)}-{digest}.txt"


def model_roots(home: Path) -> tuple[Path, ...]:
    """Folders that may hold models, first choice first: the home's (a checkout's own, when it is the home), the package's."""
    checkout = config.checkout()
    own = checkout / "models" if checkout and home == checkout / "datasets" else home / "models"
    shipped = (*((checkout / "models",) if checkout else ()), Path(__file__).parent.parent / "models")
    return (own, *(shipped if config.uses_shipped() else ()))


def find(target: str, roots: Sequence[Path]) -> CostModel | None:
    """The deployed model of `target` in the first root that has one. Raises StaleModel when it is of other features."""
    for root in dict.fromkeys(roots):
        if (model := ModelStore(root).deployed(target)) is not None:
            return model
    return None
