"""The command line of `vllm serve` for a lane: a user's own flags verbatim, and Emmy's key in --additional-config. Starts nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from emmy.errors import PackError, UsageError
from emmy.pack import Pack

FLAG, KEY = "--additional-config", "emmy"


@dataclass(frozen=True, slots=True)
class Using:
    """What the plugin is told: the pack, and how it is used. `digest` keys vLLM's cache of compiled graphs.

    deterministic: a request's tokens do not depend on what it is batched with
    unmeasured:    also serve what was never measured on this device
    parts:         all that may be replaced; (): whatever the plugin can
    """

    pack: Path
    digest: str
    deterministic: bool = False
    unmeasured: bool = False
    parts: tuple[str, ...] = ()

    @property
    def options(self) -> dict[str, object]:
        """The value of `additional_config["emmy"]`."""
        more: dict[str, object] = {name: True for name in ("deterministic", "unmeasured") if getattr(self, name)}
        if self.parts:
            more["parts"] = list(self.parts)
        return {"pack": str(self.pack), "digest": self.digest, **more}


def using(pack: Path, *, deterministic: bool = False, unmeasured: bool = False, parts: Sequence[str] = ()) -> Using:
    """How to use the pack in a file, which is opened to see that it is whole. Raises PackError when it is not, or is absent."""
    if not pack.is_file():
        raise PackError(
            f"there is no pack {pack}. Build it where rows of the card are: `emmy pack build --gpu NAME OP... --out {pack}`; "
            "or serve without one: --stock"
        )
    opened = Pack.open(pack)
    return Using(pack.absolute(), opened.digest, deterministic, unmeasured, tuple(parts))


def refuse_card(use: Using) -> None:
    """Raises NoSuchDevice or WrongCard where the pack is for another device than is here: before a minute of loading, not after."""
    _ = Pack.open(use.pack, unmeasured=use.unmeasured).here


def serve_words(model: str, flags: Sequence[str], use: Using | None) -> list[str]:
    """The words after `vllm`. `use` None: stock, the flags exactly as they are.

    Raises UsageError when the flags' own --additional-config is no JSON object, has the key "emmy" already, or cannot be merged.
    """
    if use is None:
        return ["serve", model, *flags]
    own, others = _own_config(flags)
    if KEY in own:
        raise UsageError(
            f'{FLAG} has the key "{KEY}" already, which --pack writes. Name the pack in one place; --stock passes yours on as it is'
        )
    return ["serve", model, *others, FLAG, json.dumps({**own, KEY: use.options}, separators=(",", ":"))]


def _own_config(flags: Sequence[str]) -> tuple[Mapping[str, object], list[str]]:
    """The user's own additional config, and the flags without it."""
    given: list[str] = []
    others: list[str] = []
    words = iter(flags)
    for word in words:
        name, has_value, value = word.partition("=")
        name = name.replace("_", "-")
        if name == FLAG:
            given.append(value if has_value else next(words, ""))
        elif name.startswith(f"{FLAG}."):
            raise UsageError(f"{word}: write {FLAG} as one JSON object, so that Emmy's key can be added to it")
        else:
            others.append(word)
    if config := value_of(flags, "--config"):
        _refuse_config_file(Path(config))
    own: object = {}
    if given:
        try:
            own = json.loads(given[-1])
        except (ValueError, RecursionError) as e:
            raise UsageError(f"{FLAG} is no JSON: {e}: {given[-1][:200]!r}") from None
    if not isinstance(own, dict):
        raise UsageError(f"{FLAG} is {given[-1]!r}, a JSON object is needed")
    return own, others


def _refuse_config_file(path: Path) -> None:
    """vLLM lets a flag replace what its file says of the same name: what stands there would be lost."""
    if path.is_file() and re.search(
        r"^\s*additional[-_]config\b", path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE
    ):
        raise UsageError(f"{path} has additional-config, which the one with the pack would replace. Move it to {FLAG}")


def value_of(flags: Sequence[str], *names: str) -> str | None:
    """The value that `vllm serve` takes for a flag of one of these names, the last one given; None when it is not there."""
    found = None
    for i, word in enumerate(flags):
        name, has_value, value = word.partition("=")
        if name.replace("_", "-") in names:
            found = value if has_value else next(iter(flags[i + 1 : i + 2]), "")
    return found
