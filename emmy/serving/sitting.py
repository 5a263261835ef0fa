"""Runs an experiment: wave by wave every lane's server in turn, point by point. Keeps each figure as soon as it is there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from emmy import __version__
from emmy.errors import EmmyError, UsageError
from emmy.records import now_utc
from emmy.serving.client import Client, client
from emmy.serving.command import value_of
from emmy.serving.experiment import Experiment, Lane, Point, groups
from emmy.serving.installed import Vllm
from emmy.serving.results import Results, Row
from emmy.serving.server import READY_LIMIT_S, Ready, Starting, all_ready, started

Told = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Sitting:
    """One go at an experiment. `device`: the card, as rows name it; `seconds`: no server is started later than that."""

    experiment: Experiment
    vllm: Vllm
    results: Results
    device: str
    told: Told
    seconds: float | None = None
    ready_limit_s: float = READY_LIMIT_S
    together: bool = False  # lanes that are compared are loaded side by side, and take turns point by point

    def run(self) -> int:
        """How many points are left: not begun in time, or failed. Lanes take turns, A B A B, so that both see the same hour."""
        began = time.monotonic()
        at_once = [self._side_by_side(g) for g in groups(self.experiment.lanes)] if self.together else []
        turns = at_once or [(lane,) for lane in self.experiment.lanes]
        for wave, lanes in ((w, lanes) for w in range(1, self.experiment.waves + 1) for lanes in turns):
            points = self.left(wave, lanes)
            if not points:
                continue
            if self.seconds is not None and time.monotonic() - began > self.seconds:
                self.told(f"{self.seconds:.0f} s are over: no other server is started")
                break
            self._lanes(wave, lanes, points)
        return sum(
            len(self.left(w, (lane,))) for w in range(1, self.experiment.waves + 1) for lanes in turns for lane in lanes
        )

    def left(self, wave: int, lanes: Sequence[Lane]) -> tuple[Point, ...]:
        """Points that a lane lacks."""
        return tuple(
            p for p in self.experiment.points if not all(self.results.has(self._key(x, p), wave) for x in lanes)
        )

    def _side_by_side(self, group: Sequence[Lane]) -> tuple[Lane, ...]:
        """Lanes that share the device, as [offline] shares it. Raises UsageError where a port is named."""
        if any(value_of((*self.experiment.flags, *lane.flags), "--port") for lane in group):
            raise UsageError(
                "--port names one port for servers that run side by side. Leave it out, and free ones are chosen"
            )
        flags = self.experiment.offline.shared(len(group))
        return tuple(replace(lane, flags=(*lane.flags, *flags)) for lane in group)

    def _key(self, lane: Lane, point: Point) -> str:
        return self.experiment.key(lane, point, self.vllm.version)

    def _lanes(self, wave: int, lanes: Sequence[Lane], points: Sequence[Point]) -> None:
        """Starts the lanes' servers and measures the points in turns. One that dies costs its lane the rest of the wave, no more."""
        names, several = ", ".join(x.name for x in lanes), "s" * (len(lanes) > 1)
        self.told(f"wave {wave} of {self.experiment.waves}, lane{several} {names}: starting the server{several}")
        with ExitStack() as stack:
            servers: dict[str, Starting] = {}
            here: dict[str, Ready | EmmyError] = {}
            for lane in lanes:
                try:
                    servers[lane.name] = stack.enter_context(self._started(wave, lane))
                except EmmyError as e:
                    here[lane.name] = e
            asks = stack.enter_context(client(self.vllm, self.results.folder / f"wave{wave}-client.log"))
            here |= all_ready(servers, self.ready_limit_s)
            for name, found in here.items():
                if isinstance(found, Ready):
                    self.told(f"lane {name}: ready after {found.startup_s:.0f} s")
            for point, lane in ((p, x) for p in points for x in lanes):
                server = here[lane.name]
                if isinstance(server, EmmyError):
                    self._keep(wave, lane, point, "failed", str(server), {})
                    continue
                try:
                    self._point(wave, lane, point, server, asks)
                except EmmyError as e:
                    here[lane.name] = e

    def _started(self, wave: int, lane: Lane) -> AbstractContextManager[Starting]:
        return started(
            self.vllm, self.experiment.model, (*self.experiment.flags, *lane.server_flags), lane.use,
            self._folder(wave, lane) / "server.log", f"the server of lane {lane.name}", lane.environment,
        )  # fmt: skip

    def _folder(self, wave: int, lane: Lane) -> Path:
        return self.results.folder / f"wave{wave}-{lane.name}"

    def _point(self, wave: int, lane: Lane, point: Point, ready: Ready, asks: Client) -> None:
        about = {"startup_s": round(ready.startup_s, 1), "choices": list(ready.choices)}
        try:
            found = asks.measure(ready.model, ready.flags, ready.url, point, self._folder(wave, lane), seed=wave)
        except EmmyError as e:
            died = ready.child.has_died()
            why = f"{ready.child.died(f'serving {point.name}')}" if died else str(e)
            self._keep(wave, lane, point, "failed", why, about)
            if died:
                raise ready.child.died(f"serving {point.name}") from None
            return
        self._keep(wave, lane, point, "ok", "", about, found)

    def _keep(
        self, wave: int, lane: Lane, point: Point, status: str, message: str, about: Mapping[str, object],
        found: Mapping[str, float] | None = None,
    ) -> None:  # fmt: skip
        row = Row(
            self._key(lane, point), self.experiment.name, "online", wave, lane.name, lane.against, lane.dtype, point.name, status,
            message, point.note, found or {}, (), {**circumstances(self.vllm, self.device, lane), **about}, now_utc(),
        )  # fmt: skip
        self.results.append(row)
        brief = message.splitlines()[0] if message else ""
        shown = (
            f"TTFT {found['ttft_p50_ms']:.1f} ms, TPOT {found['tpot_p50_ms']:.2f} ms" if found else f"{status}: {brief}"
        )
        self.told(f"lane {lane.name}, {point.name}{point.note and f' ({point.note})'}: {shown}")


def circumstances(vllm: Vllm, device: str, lane: Lane) -> dict[str, object]:
    """What a number of the lane was measured with."""
    packed = (
        {"pack": lane.use.digest, **{k: v for k, v in lane.use.options.items() if k not in ("pack", "digest")}}
        if lane.use
        else {}
    )
    return {
        "vllm": vllm.version,
        "torch": vllm.torch,
        "emmy": __version__,
        "device": device,
        **packed,
        **(lane.environment or {}),
    }


def device_name() -> str:
    """The card, or the processor where there is none, as it names itself."""
    from emmy.ir.target import load_target
    from emmy.runtime.cuda_driver import gpus

    found = gpus()
    return found[0].product if found else load_target("cpu").product


def failures(rows: Results) -> Iterator[Row]:
    """Rows that failed and were not measured later."""
    return (r for r in rows.rows if r.status != "ok" and not rows.has(r.key, r.wave))
