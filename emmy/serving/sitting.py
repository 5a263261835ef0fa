"""Runs an experiment: wave by wave every lane's server in turn, point by point. Keeps each figure as soon as it is there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from emmy import __version__
from emmy.errors import EmmyError
from emmy.records import now_utc
from emmy.serving import client
from emmy.serving.experiment import Experiment, Lane, Point
from emmy.serving.installed import Vllm
from emmy.serving.results import Results, Row
from emmy.serving.server import READY_LIMIT_S, Ready, serving

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

    def run(self) -> int:
        """How many points are left: not begun in time, or failed. Lanes take turns, A B A B, so that both see the same hour."""
        began = time.monotonic()
        for wave, lane in ((w, lane) for w in range(1, self.experiment.waves + 1) for lane in self.experiment.lanes):
            points = self.left(wave, lane)
            if not points:
                continue
            if self.seconds is not None and time.monotonic() - began > self.seconds:
                self.told(f"{self.seconds:.0f} s are over: no other server is started")
                break
            self._lane(wave, lane, points)
        return sum(
            len(self.left(w, lane)) for w in range(1, self.experiment.waves + 1) for lane in self.experiment.lanes
        )

    def left(self, wave: int, lane: Lane) -> tuple[Point, ...]:
        return tuple(p for p in self.experiment.points if not self.results.has(self._key(lane, p), wave))

    def _key(self, lane: Lane, point: Point) -> str:
        return self.experiment.key(lane, point, self.vllm.version)

    def _lane(self, wave: int, lane: Lane, points: tuple[Point, ...]) -> None:
        """Starts the lane's server and measures the points. A server that dies costs its lane the rest of the wave, no more."""
        folder = self.results.folder / f"wave{wave}-{lane.name}"
        self.told(f"wave {wave} of {self.experiment.waves}, lane {lane.name}: starting its server")
        left = iter(points)
        try:
            with serving(
                self.vllm, self.experiment.model, (*self.experiment.flags, *lane.server_flags), lane.use, folder / "server.log",
                f"the server of lane {lane.name}", lane.environment, self.ready_limit_s,
            ) as ready:  # fmt: skip
                self.told(f"lane {lane.name}: ready after {ready.startup_s:.0f} s")
                for point in left:
                    self._point(wave, lane, point, ready, folder)
        except EmmyError as e:
            for point in left:
                self._keep(wave, lane, point, "failed", str(e), {})

    def _point(self, wave: int, lane: Lane, point: Point, ready: Ready, folder: Path) -> None:
        about = {"startup_s": round(ready.startup_s, 1), "choices": list(ready.choices)}
        try:
            found = client.measure(self.vllm, ready.model, ready.flags, ready.url, point, folder, seed=wave)
        except EmmyError as e:
            died = ready.child.code is not None
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
