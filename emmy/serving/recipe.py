"""A recipe: how one model is served on the cards it was thought through for. Read from a TOML file, and checked against this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from emmy.errors import NoSuchDevice, ServingError, UsageError
from emmy.ir.target import load_target
from emmy.runtime.cuda_driver import gpus, why_no_gpu
from emmy.serving.fields import Table, read_toml

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Card:
    """One card of a recipe. `memory_gib`: what the server takes at least; `pack`: the file's name; `flags`: of this card alone."""

    target: str
    memory_gib: float
    pack: str
    flags: tuple[str, ...]

    @property
    def product(self) -> str:
        return load_target(self.target).product


@dataclass(frozen=True, slots=True)
class Recipe:
    """`ops`: what a pack for it is built of; `weights_gib`: of the checkpoint; `sources`: where its figures come from."""

    name: str
    model: str
    dtype: str
    weights_gib: float
    ops: tuple[str, ...]
    flags: tuple[str, ...]
    cards: tuple[Card, ...]
    sources: tuple[str, ...]

    def flags_on(self, card: Card) -> tuple[str, ...]:
        return ("--dtype", self.dtype, *self.flags, *card.flags)

    def card(self, target: str) -> Card:
        """The card of a target. Raises UsageError when the recipe has none."""
        found = next((c for c in self.cards if c.target == target), None)
        if found is None:
            raise UsageError(
                f"the recipe {self.name} is for {', '.join(c.target for c in self.cards)}, not for {target!r}"
            )
        return found


def read_recipe(path: Path) -> Recipe:
    """The recipe in a file. Raises UsageError for a missing, mistyped or unknown key, an unknown target, a path as a pack's name."""
    t = read_toml(path)
    if (schema := t.count("schema")) != SCHEMA:
        raise UsageError(f"{path}: schema {schema}, this Emmy reads {SCHEMA}")
    recipe = Recipe(
        t.text("name"), t.text("model"), t.text("dtype"), t.number("weights_gib"), t.texts("ops", None), t.texts("flags"),
        tuple(_card(c) for c in t.tables("card")), t.texts("sources", None),
    )  # fmt: skip
    t.done()
    for what, values in (("ops", recipe.ops), ("sources", recipe.sources), ("cards", recipe.cards)):
        if not values:
            raise UsageError(f"{path}: {what} are missing")
    if len({c.target for c in recipe.cards}) < len(recipe.cards):
        raise UsageError(f"{path}: a card is there twice")
    return recipe


def _card(t: Table) -> Card:
    card = Card(t.text("target"), t.number("memory_gib"), t.text("pack"), t.texts("flags"))
    t.done()
    try:
        load_target(card.target)
    except NoSuchDevice as e:
        raise UsageError(f"{t.where}: {e}") from None
    if Path(card.pack).name != card.pack or card.pack in ("", ".."):
        raise UsageError(f"{t.where}: pack is {card.pack!r}, a file's name is needed, without a folder")
    return card


def card_here(recipe: Recipe) -> Card:
    """The recipe's card that is in this machine. Raises NoSuchDevice when none is, ServingError when its memory is too small."""
    found = gpus()
    if not found:
        if cpu := next((c for c in recipe.cards if c.target == "cpu"), None):
            return cpu
        raise NoSuchDevice(f"the recipe {recipe.name} needs a GPU, {_cards(recipe)}, and there is none: {why_no_gpu()}")
    card = next((c for c in recipe.cards if c.target != "cpu" and c.product == found[0].product), None)
    if card is None:
        raise NoSuchDevice(
            f"the recipe {recipe.name} is for {_cards(recipe)}; this is {found[0].product}. Add a [[card]] to it"
        )
    if (gib := found[0].memory_bytes / 2**30) < card.memory_gib:
        raise ServingError(
            f"{found[0].product} has {gib:.1f} GiB here, the recipe {recipe.name} takes {card.memory_gib:.1f}. A part of the card, such "
            "as a MIG slice, is too small for it"
        )
    return card


def _cards(recipe: Recipe) -> str:
    return " or ".join(c.product for c in recipe.cards if c.target != "cpu")


def find_pack(card: Card, recipe_file: Path, cache: Path) -> Path | None:
    """The card's pack, beside the recipe, in the folder one is in, or built earlier; None when there is none."""
    return next(
        (p for p in (recipe_file.parent / card.pack, Path(card.pack), built_pack(card, cache)) if p.is_file()), None
    )


def built_pack(card: Card, cache: Path) -> Path:
    """Where a pack that is built for the card is kept."""
    return cache / "packs" / card.pack


def model_state(recipe: Recipe) -> str:
    """Where the weights come from. Raises ServingError for a folder without a config.json."""
    folder = Path(recipe.model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ServingError(f"{folder} has no config.json: it is no model's folder")
        return f"{folder}"
    return f"{recipe.model}, from Hugging Face; {recipe.weights_gib:.1f} GiB where it is not in its cache"
