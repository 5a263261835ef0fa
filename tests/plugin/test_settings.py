"""additional_config["emmy"], read strictly, and what keys and refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from emmy.errors import PackError, UsageError
from emmy_vllm.identity import sources_digest
from emmy_vllm.settings import PARTS, Settings, read_settings
from tests.pack import packs

DIGEST = "0123456789abcdef" * 4
GOOD: dict[str, Any] = {"pack": "p.emmypack", "digest": DIGEST}


@pytest.mark.parametrize("config", [None, {}, {"other": 1}, 7])
def test_without_the_key_nothing_is_asked_of_emmy(config: object) -> None:
    assert read_settings(config) is None


def test_what_is_left_out_has_its_default() -> None:
    assert read_settings({"emmy": GOOD, "other": 1}) == Settings(
        Path("p.emmypack"), DIGEST, frozenset(PARTS), False, False
    )
    asked = read_settings({"emmy": {**GOOD, "parts": ["linear"], "deterministic": True, "unmeasured": True}})
    assert asked == Settings(Path("p.emmypack"), DIGEST, frozenset({"linear"}), True, True)


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        ("p.emmypack", "an object is needed"),
        ({"pack": "p"}, "digest is None"),
        ({**GOOD, "pack": ""}, "pack is ''"),
        ({**GOOD, "digest": DIGEST[:-1]}, "64 hexadecimal digits"),
        ({**GOOD, "digest": DIGEST.upper()}, "64 hexadecimal digits"),
        ({**GOOD, "parts": "linear"}, "parts is 'linear'"),
        ({**GOOD, "parts": ["linear", "all"]}, "linear, lm_head, fusion, attention"),
        ({**GOOD, "parts": [["linear"]]}, "parts is"),
        ({**GOOD, "deterministic": 1}, "deterministic is 1"),
        ({**GOOD, "unmeasured": "true"}, "unmeasured is 'true'"),
        ({**GOOD, "plan": "x"}, "has 'plan'; known are deterministic, digest, pack, parts, unmeasured"),
    ],
)
def test_anything_else_is_refused_by_name(raw: object, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        read_settings({"emmy": raw})


def test_the_deterministic_lane_has_products_alone() -> None:
    steady = Settings(Path("p"), DIGEST, deterministic=True)
    assert [steady.uses(part) for part in PARTS] == [True, True, False, False]


def test_another_file_than_the_digest_names_is_refused(tmp_path: Path) -> None:
    path = packs.cpu_pack(tmp_path)
    with pytest.raises(PackError, match=r"its digest is .*, additional_config names 0123"):
        Settings(path, DIGEST).open()


def test_the_plugins_identity_is_that_of_its_files() -> None:
    assert sources_digest() == sources_digest()
    assert len(sources_digest()) == 64
