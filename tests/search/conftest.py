"""Searches that need not survive a power cut."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _without_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal waits for the disk at every row. Processes that are killed (test_kill) do so still."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
