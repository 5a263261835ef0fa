"""`emmy fleet`: make machines into a cluster that `emmy tune --fleet` measures on, and see how such a tune is doing."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING

from emmy.cli.verb import Verb, add_home, add_tasks, positive
from emmy.report import Screen, counted, lasting, number, table

if TYPE_CHECKING:
    from emmy.fleet.status import KindStatus, Status

Task = Callable[[Namespace, Screen], int]


def configure(parser: ArgumentParser) -> None:
    add_task = add_tasks(parser, EXAMPLES)
    sub = add_task(
        "status", _status, "show the tunes that run on several devices: cards, rates, queue, failures, time left"
    )
    sub.add_argument("--fleet", metavar="ADDRESS", help="also what this cluster has: auto, HOST:6379, ray://HOST:10001")
    add_home(sub)
    sub = add_task("head", _head, "start a cluster here, with the cards that are found")
    sub.add_argument("--port", type=positive, default=6379, metavar="N", help="that nodes join at (default: 6379)")
    _node_options(sub)
    sub = add_task("node", _node, "join this machine's cards to a cluster")
    sub.add_argument("--head", required=True, metavar="HOST:PORT", help="where the head is, such as 10.0.0.1:6379")
    _node_options(sub)


def _node_options(sub: ArgumentParser) -> None:
    sub.add_argument("--cpu", action="store_true", help="also measure on this machine's processor")
    sub.add_argument("--compile-only", action="store_true", help="offer no device, only cores for compilers")
    sub.add_argument("--show", action="store_true", help="print the command that starts Ray, and start nothing")


def run(args: Namespace, screen: Screen) -> int:
    task: Task = args.task
    return task(args, screen)


def _head(args: Namespace, screen: Screen) -> int:
    return _start(None, args.port, args, screen)


def _node(args: Namespace, screen: Screen) -> int:
    return _start(args.head, 0, args, screen)


def _start(head: str | None, port: int, args: Namespace, screen: Screen) -> int:
    """Ends as Ray, which stays in the foreground: whatever starts it, such as systemd, sees it live and die."""
    from emmy import config
    from emmy.fleet.node import shown, start

    command = start(head, cpu=args.cpu, compile_only=args.compile_only, port=port)
    screen.show(shown(command))
    screen.record("node", {"command": command.words, "variables": command.variables, "devices": command.devices})
    if not args.show:
        offered = ", ".join(f"{n} x {target}" for target, n in command.devices.items())
        screen.say(f"offering {offered or 'cores for compilers alone'}")
        os.execve(command.words[0], list(command.words), config.child_env(**command.variables))
    return 0


def _status(args: Namespace, screen: Screen) -> int:
    from emmy import config
    from emmy.fleet.status import running

    if args.fleet:
        from emmy.fleet.cluster import connected_devices

        devices = connected_devices(args.fleet)
        screen.record("cluster", {"address": args.fleet, "devices": devices})
        screen.show(f"{args.fleet}: " + (", ".join(f"{n} x {t}" for t, n in devices.items()) or "no devices"))
    found = running(args.home or config.home())
    if not found:
        screen.say("no tune is running on several devices with this home")
    for status in found:
        _show(status, screen)
    return 0


def _show(status: Status, screen: Screen) -> None:
    from emmy.report import record_of

    screen.record("fleet", record_of(status))
    screen.show(f"process {status.pid}, since {status.began_utc}, as of {status.time_utc}")
    screen.show(table(_HEAD, (_line(k) for k in status.kinds)))
    searches = [(k.target, s) for k in status.kinds for s in k.searches]
    if searches:
        lines = ((t, s.op, s.phase, s.trials, number(s.best_us), _left(s.eta_s)) for t, s in searches)
        screen.show("\n" + table(_SEARCH_HEAD, lines) + "\n")
    for k in status.kinds:
        for d in k.devices:
            screen.show(
                f"  {k.target} at {d.place}: {d.state}, {counted(d.answered, 'row')}, {d.per_minute:.0f} a minute"
            )


def _line(k: KindStatus) -> tuple[object, ...]:
    failed = sum(n for status, n in k.statuses.items() if status not in ("ok", "passed_over"))
    busy = sum(d.state == "busy" for d in k.devices)
    at_once = f"{len(k.searches)} of {k.abreast}"
    return (
        k.target, len(k.devices), busy, f"{k.per_minute:.0f}", k.waiting, failed, k.lost, at_once,
        f"{k.ops_done} of {k.ops}", _left(k.eta_all_s),
    )  # fmt: skip


def _left(eta_s: float | None) -> str:
    return "" if eta_s is None else lasting(eta_s)


_HEAD = ("card", "devices", "busy", "rows/min", "waiting", "failed", "lost", "searching", "ended", "left")
_SEARCH_HEAD = ("card", "op", "phase", "trials", "best us", "left")
EXAMPLES = {
    "status": "fleet status --json",
    "head": "fleet head --cpu",
    "node": "fleet node --head 10.0.0.1:6379",
}
VERB = Verb(
    "fleet",
    "gather machines for a tune, and see how it goes",
    tuple(EXAMPLES.values()),
    configure,
    run,
    has_tasks=True,
)
