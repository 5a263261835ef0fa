"""A shared object's GPU code cut down to one architecture, as the archives for a host without a network have it."""

from __future__ import annotations

import importlib.util
import struct
import sys
from pathlib import Path
from types import ModuleType

import pytest

PTX, CUBIN = 1, 2
Entries = list[tuple[int, int, bytes]]  # kind, architecture, code


@pytest.fixture(scope="module")
def slim() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "experiments" / "serving" / "slim_fatbin.py"
    spec = importlib.util.spec_from_file_location("slim_fatbin", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def entry(kind: int, arch: int, code: bytes) -> bytes:
    head = struct.pack("<HHIQ", kind, 0x101, 64, len(code)).ljust(28, b"\0") + struct.pack("<I", arch)
    return head.ljust(64, b"\0") + code


def container(entries: Entries) -> bytes:
    body = b"".join(entry(*e) for e in entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


@pytest.mark.parametrize(
    ("entries", "kept"),
    [
        ([(CUBIN, 80, b"a" * 64), (CUBIN, 90, b"b" * 64), (CUBIN, 100, b"c" * 64), (PTX, 90, b"d" * 64)], b"b"),
        ([(CUBIN, 80, b"a" * 64), (PTX, 75, b"b" * 64), (PTX, 80, b"c" * 64), (PTX, 120, b"d" * 64)], b"c"),
        ([(CUBIN, 100, b"a" * 128), (CUBIN, 120, b"b" * 64)], b"b"),
    ],
    ids=["its cubin", "the newest PTX before it", "the smallest, for no container is empty"],
)
def test_a_container_keeps_what_the_driver_would_choose_and_all_offsets(
    slim: ModuleType, entries: Entries, kept: bytes
) -> None:
    other = container([(CUBIN, 90, b"z" * 64)])
    whole = bytearray(b"\0" * 8 + container(entries) + other)
    n_bytes = len(whole)
    slim.slim(whole, 8, n_bytes, 90)
    (_, _, left), (at, _, beside) = slim.containers(bytes(whole), 8, n_bytes)
    assert len(whole) == n_bytes and whole[at:] == other and len(beside) == 1
    (only,) = left
    assert set(whole[only.at + 64 : only.at + only.n_bytes]) == set(kept)
