"""What the user asks for: `additional_config["emmy"]`, read strictly. Knows neither vLLM nor torch.

    --additional-config '{"emmy": {"pack": "gemma4-12b-h200.emmypack", "digest": "SHA256"}}'

vLLM hashes additional_config into the key of its compile cache, so that the digest is what keeps a cached graph from calling
kernels of another pack.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, TypeGuard, get_args

from emmy.errors import PackError, UsageError
from emmy.pack import Pack

KEY = "emmy"
Part = Literal["linear", "lm_head", "fusion", "attention"]
PARTS: tuple[Part, ...] = get_args(Part)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_EXAMPLE = (
    '--additional-config \'{"emmy": {"pack": "FILE", "digest": "SHA256"}}\'; `emmy pack inspect FILE` prints the digest'
)


@dataclass(frozen=True, slots=True)
class Settings:
    """A pack and how it is used.

    digest:        the pack's identity, which the file must have
    parts:         what may be replaced; everything else is stock's
    deterministic: a request's tokens do not depend on what it is batched with
    unmeasured:    also serve what was never measured on this device
    """

    pack: Path
    digest: str
    parts: frozenset[Part] = frozenset(PARTS)
    deterministic: bool = False
    unmeasured: bool = False

    def uses(self, part: Part) -> bool:
        """Whether a part is Emmy's. Fused kernels and attention are not tested to be batch invariant: the deterministic lane has none."""
        return part in self.parts and not (self.deterministic and part in ("fusion", "attention"))

    def open(self) -> Pack:
        """The pack, whole. Raises PackError, also for another pack than the digest names."""
        return _opened(self.pack, self.digest, self.unmeasured)


def read_settings(additional_config: object) -> Settings | None:
    """What the emmy key asks for; None without one. Raises UsageError naming what is unknown, missing or of another type."""
    if not isinstance(additional_config, Mapping) or KEY not in additional_config:
        return None
    raw = additional_config[KEY]
    if not isinstance(raw, Mapping):
        raise UsageError(f"additional_config[{KEY!r}] is {raw!r}; an object is needed: {_EXAMPLE}")
    known = set(Settings.__dataclass_fields__)
    if odd := sorted(set(map(str, raw)) - known):
        raise UsageError(f"additional_config[{KEY!r}] has {odd[0]!r}; known are {', '.join(sorted(known))}")
    path, digest = raw.get("pack"), raw.get("digest")
    if not isinstance(path, str) or not path:
        raise UsageError(f"additional_config[{KEY!r}]: pack is {path!r}; the path of a pack is needed: {_EXAMPLE}")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise UsageError(
            f"additional_config[{KEY!r}]: digest is {digest!r}; 64 hexadecimal digits are needed: {_EXAMPLE}"
        )
    flags = {name: raw.get(name, False) for name in ("deterministic", "unmeasured")}
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise UsageError(f"additional_config[{KEY!r}]: {name} is {value!r}; true or false is needed")
    return Settings(Path(path), digest, _parts(raw.get("parts", list(PARTS))), **flags)


def _parts(raw: object) -> frozenset[Part]:
    if not isinstance(raw, list) or not all(map(_is_part, raw)):
        raise UsageError(f"additional_config[{KEY!r}]: parts is {raw!r}; a list of any of {', '.join(PARTS)} is needed")
    return frozenset(raw)


def _is_part(x: object) -> TypeGuard[Part]:
    return x in PARTS


@cache
def _opened(path: Path, digest: str, unmeasured: bool) -> Pack:
    pack = Pack.open(path, unmeasured=unmeasured)
    if pack.digest != digest:
        raise PackError(
            f"{path}: its digest is {pack.digest}, additional_config names {digest}: it is another pack, or was built again. "
            "Name the one that is meant: it keys the graphs that vLLM caches."
        )
    return pack
