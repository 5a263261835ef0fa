"""`emmy doctor`: what this machine offers and lacks."""

from __future__ import annotations

from argparse import Namespace

from emmy.cli.verb import Verb, add_home
from emmy.report import Screen, paint, record_of


def run(args: Namespace, screen: Screen) -> int:
    from emmy import config
    from emmy.environment import examine

    checks = examine(args.home or config.home())
    screen.rows("check", map(record_of, checks), {"name": "what", "state": "state", "found": "found"})
    colours = {"note": "yellow", "missing": "red", "ok": "green"}
    for c in checks:
        if c.next_step:
            screen.show(f"{paint(c.state, colours[c.state], screen.colour)}: {c.name}: {c.next_step}")
    return int(any(c.state == "missing" for c in checks))


VERB = Verb(
    "doctor",
    "say what this machine offers and lacks",
    ("doctor", "doctor --json"),
    add_home,
    run,
)
