"""Shared by all tests: golden texts, rewritten by `pytest --update-golden`; the emulator's catch rate at the end."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

os.environ["EMMY_SHIPPED"] = "0"  # what a test finds must not depend on the rows and models that ship
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # what a shell starts in the background ignores Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
with suppress(ModuleNotFoundError):  # the environment of vLLM's tests has no Hypothesis, and they need none
    from hypothesis import settings

    settings.register_profile("emmy", deadline=None)  # no test asserts on wall time: machines are shared
    settings.load_profile("emmy")

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite the texts under tests/golden, then read the diff"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a text with tests/golden/NAME, or writes it there."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
        assert path.is_file(), f"{path} is missing: write it with --update-golden, and read it"
        assert text.rstrip("\n") == path.read_text(encoding="utf-8").rstrip("\n"), (
            f"{name} changed: --update-golden, then explain the diff"
        )

    return check


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints how many planted bugs the emulator noticed, and how; see tests/emulator/test_planted_bugs.py."""
    reports = [r for outcome in ("passed", "failed") for r in terminalreporter.stats.get(outcome, ())]
    planted = [value for r in reports for name, value in r.user_properties if name == "planted_bug"]
    if not planted:
        return
    terminalreporter.section("planted bugs")
    for kernel in sorted({case for case, _, _ in planted}):
        kinds = Counter(kind or "NOT NOTICED" for case, _, kind in planted if case == kernel)
        by = ", ".join(f"{kind} {n}" for kind, n in kinds.most_common())
        terminalreporter.line(f"{kernel:12s} {kinds.total() - kinds['NOT NOTICED']:3d} of {kinds.total():3d}   {by}")
    terminalreporter.line(f"{'all':12s} {sum(bool(kind) for *_, kind in planted):3d} of {len(planted):3d} noticed")
