"""A chain of decode projections three ways on one GPU: torch (cuBLAS), Emmy, and Emmy with launches that begin early.

    python experiments/h200_chain.py --out chain.jsonl

A layer is q, o, gate_up and down of one model without what stands between them, each fed by the one before; eight layers, each
with weights of its own, are one CUDA graph, so that weights come from memory as they do in a model. Each way has its graph; they
are replayed in turns, each after an idle gap and one replay that is not timed. Schedules are the stored winners of
`emmy tune` (the default where none is stored), among the rows that ship and those of WORK/home, where h200_matmul.py
leaves what it measured; the same with `pdl()` on every launch; rings: the best stored schedules with slots in shared
memory, with `pdl()`; and picked: for one projection after another the one of these three that makes the whole chain
fastest, twice round, from the best of the three (the choice is made on rounds of its own, before those that are reported).
Beside the chain, each projection in a chain of itself, over so many weights that they come from memory; and those of a
Gemma-4-12B that the layer lacks. One JSON line a width M: medians and ranges over rounds in microseconds of a layer (or
of one projection), and ratios of torch's time to Emmy's, round by round.

All outputs are poisoned before they are checked: each must be the product of what the same way computed before it, and exactly
the same with and without `pdl()`. Exit code 4 when one is not.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from emmy.runtime.launcher import LoadedPlan

GPU = "h200"
WIDTHS = (1, 8, 32, 64)
LAYERS = 8
# name -> (N, K); each takes as many elements of what the one before it left as it needs
PROJECTIONS = {"q": (4096, 3840), "o": (3840, 4096), "gate_up": (30720, 3840), "down": (3840, 15360)}
# In a chain of themselves only.
OTHERS = {
    "kv": (2048, 3840),
    "qkv": (8192, 3840),
    "global_o": (3840, 8192),
    "global_k": (512, 3840),
    "lm_head": (262144, 3840),
}
COLD_BYTES = 240e6  # of weights that take turns: several times the last-level cache
BUILT = ("emmy", "pdl", "rings")
WAYS = ("torch", *BUILT, "picked")
ROUNDS, REPLAYS, IDLE_S = (
    7,
    3,
    0.015,
)  # rounds of all ways; timed replays a round, of which the median counts; before each
PASSES, LESS = 2, 0.997  # over the projections when one is picked for each; of the chain's time, for a change to count
ALONE_US = 1000  # about how long the graph of a projection alone runs
CHECKS = 3  # poisoned replays
ALLOWED = 1e-3  # relative L2 error; rounding to f16 alone makes 2e-4, sums in hybrid precision 4e-4
WRONG = 4  # exit code

Launch = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Chosen:
    """A projection's op and its schedule without pdl()."""

    op: str
    schedule: str
    stored: bool
    rings: str  # the best stored schedule of the op that has slots, else the schedule itself

    @property
    def weights_by_rows(self) -> bool:
        return self.op.endswith(":nk")


def choose(m: int, n: int, k: int, home: Path) -> Chosen:
    """The stored winner, of weights stored (N,K) where there is one, else of weights stored (K,N); the default without any."""
    from emmy import api

    ops = [f"matmul:{m}x{n}x{k}:f16:nk", f"matmul:{m}x{n}x{k}:f16"]
    for op in ops:
        if best := api.winner(op, gpu=GPU, home=home):
            return Chosen(op, best.schedule, True, with_rings(op, home) or best.schedule)
    default = api.subject(ops[0], gpu=GPU, home=home).schedule
    return Chosen(ops[0], default, False, default)


def with_rings(op: str, home: Path) -> str | None:
    """The fastest stored schedule that stages its operands in slots of one launch; None without any."""
    from emmy.ir.target import load_target
    from emmy.winner import by_schedule, measured_rows

    times = by_schedule(measured_rows(home, op, load_target(GPU), threads=1))
    found = {s: us for s, us in times.items() if "/stage(" in s and "k1" not in s}
    return min(found, key=lambda s: found[s]) if found else None


def build(chosen: Chosen, way: str) -> Path:
    """The plan file of a projection."""
    from emmy import api
    from emmy.codegen import gpu_build
    from emmy.codegen.build import source
    from emmy.ir.ops import parse_op
    from emmy.ir.target import load_target

    target = load_target(GPU)
    schedule = chosen.rings if way == "rings" else chosen.schedule
    if way != "emmy" and "/pdl()" not in schedule:
        schedule = api.with_pdl(chosen.op, schedule, gpu=GPU)
    return gpu_build.build(source(parse_op(chosen.op), schedule, target), target).path


@dataclass(slots=True)
class Weights:
    """Weights of each projection, one a layer at least, stored (N,K); stored (K,N) too once that is asked for."""

    rows: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    columns: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def draw(self) -> None:
        import torch

        random = torch.Generator("cuda").manual_seed(0)
        for name, (n, k) in (PROJECTIONS | OTHERS).items():
            copies = max(LAYERS if name in PROJECTIONS else 1, ceil(COLD_BYTES / (2 * n * k)))
            self.rows[name] = [
                torch.randn(n, k, generator=random, device="cuda", dtype=torch.float16).div_(k**0.5)
                for _ in range(copies)
            ]

    def of(self, name: str, by_rows: bool) -> list[torch.Tensor]:
        if not by_rows and name not in self.columns:
            self.columns[name] = [w.t().contiguous() for w in self.rows[name]]
        return self.rows[name] if by_rows else self.columns[name]


@dataclass(slots=True)
class Chain:
    """The chain of one width, one way: where each projection of each layer reads and writes."""

    m: int
    way: str
    first: torch.Tensor  # [M, K of q]
    outputs: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def allocate(self) -> None:
        import torch

        for _ in range(LAYERS):
            sizes = {name: (self.m, n) for name, (n, _) in PROJECTIONS.items()}
            self.outputs.append({x: torch.empty(s, device="cuda", dtype=torch.float16) for x, s in sizes.items()})

    def input(self, layer: int, name: str) -> torch.Tensor:
        """The beginning of what the projection before left, as rows of the length that is needed."""
        names, k = list(PROJECTIONS), PROJECTIONS[name][1]
        at = names.index(name)
        if at:
            left = self.outputs[layer][names[at - 1]]
        else:
            left = self.outputs[layer - 1][names[-1]] if layer else self.first
        return left.view(-1)[: self.m * k].view(self.m, k)

    def poison(self) -> None:
        for layer in self.outputs:
            for y in layer.values():
                y.fill_(float("nan"))

    def errors(self, weights: Weights) -> dict[str, float]:
        """The largest relative L2 error of each projection over all layers; NaN is an error too."""
        out = dict.fromkeys(PROJECTIONS, 0.0)
        for layer, made in enumerate(self.outputs):
            for name, y in made.items():
                want = self.input(layer, name).float() @ weights.rows[name][layer].float().t()
                error = float((y.float() - want).norm() / want.norm())
                out[name] = max(out[name], error) if error == error else float("inf")
        return out


def launches(
    chain: Chain,
    chosen: Mapping[str, Chosen],
    plans: Mapping[str, LoadedPlan],
    weights: Weights,
    stream: torch.cuda.Stream,
) -> list[dict[str, Launch]]:
    """What runs each projection of each layer on the stream."""
    import torch

    out: list[dict[str, Launch]] = []
    for layer in range(LAYERS):
        here: dict[str, Launch] = {}
        for name, c in chosen.items():
            x, w, y = chain.input(layer, name), weights.of(name, c.weights_by_rows)[layer], chain.outputs[layer][name]
            if chain.way == "torch":
                here[name] = partial(torch.mm, x, w.t() if c.weights_by_rows else w, out=y)
            else:
                addresses = {"A": x.data_ptr(), "B": w.data_ptr(), "C": y.data_ptr()}
                here[name] = plans[name].bind(addresses, stream=stream.cuda_stream)
        out.append(here)
    return out


def alone(
    name: str,
    m: int,
    chosen: Chosen,
    plans: Mapping[str, Mapping[str, LoadedPlan]],
    weights: Weights,
    stream: torch.cuda.Stream,
) -> tuple[dict[str, dict[str, float]], float]:
    """Times of a projection in a chain of itself, each way, and the largest relative L2 error of what it left."""
    import torch

    n, k = (PROJECTIONS | OTHERS)[name]
    x = torch.randn(m, k, generator=torch.Generator("cuda").manual_seed(m), device="cuda", dtype=torch.float16)
    ws = weights.of(name, chosen.weights_by_rows)
    ys = {way: [torch.empty(m, n, device="cuda", dtype=torch.float16) for _ in ws] for way in ("torch", *BUILT)}
    calls: dict[str, list[Launch]] = {
        "torch": [
            partial(torch.mm, x, w.t() if chosen.weights_by_rows else w, out=y)
            for w, y in zip(ws, ys["torch"], strict=True)
        ]
    }
    for way in BUILT:
        addresses = [
            {"A": x.data_ptr(), "B": w.data_ptr(), "C": y.data_ptr()} for w, y in zip(ws, ys[way], strict=True)
        ]
        calls[way] = [plans[way][name].bind(a, stream=stream.cuda_stream) for a in addresses]
    torch.cuda.synchronize()  # weights must be there: an early launch does not wait for what writes them
    rounds = max(1, round(ALONE_US / (len(ws) * (2 * n * k / 4.4e6 + 1))))
    found = compare({way: c * rounds for way, c in calls.items()}, len(ws) * rounds, stream)
    torch.cuda.synchronize()
    error = 0.0
    for i, w in enumerate(weights.rows[name]):
        want = x.float() @ w.float().t()
        for y in ys.values():
            off = float((y[i].float() - want).norm() / want.norm())
            error = max(error, off) if off == off else float("inf")
    return found, error


def captured(calls: Sequence[Launch], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """A graph of the calls, which ran once before: loading and workspaces are done with by then."""
    import torch

    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return graph


def time_us(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> float:
    """Median of a few replays after an idle gap and one replay that is not timed."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    taken: list[float] = []
    stream.synchronize()
    time.sleep(IDLE_S)
    with torch.cuda.stream(stream):
        graph.replay()
        for _ in range(REPLAYS):
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            taken.append(begin.elapsed_time(end) * 1e3)
    return median(taken)


def compare(
    calls: Mapping[str, Sequence[Launch]], parts: int, stream: torch.cuda.Stream
) -> dict[str, dict[str, float]]:
    """Times of a part of each way's graph, and ratios to torch's, taken in turns."""
    graphs = {way: captured(c, stream) for way, c in calls.items()}
    rounds: dict[str, list[float]] = {way: [] for way in graphs}
    for i in range(ROUNDS):
        order = [*graphs][i % len(graphs) :] + [*graphs][: i % len(graphs)]
        for way in order:
            rounds[way].append(time_us(graphs[way], stream) / parts)
    out = {f"{way}_us": spread(t) for way, t in rounds.items()}
    for way in (x for x in rounds if "torch" in rounds and x != "torch"):
        out[f"{way}_ratio"] = spread([a / b for a, b in zip(rounds["torch"], rounds[way], strict=True)])
    return out


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": round(median(values), 4), "low": round(min(values), 4), "high": round(max(values), 4)}


@contextmanager
def loaded(chosen: Mapping[str, Chosen]) -> Iterator[dict[str, dict[str, LoadedPlan]]]:
    """way -> projection -> its plan. They are closed when no graph needs their kernels any more."""
    from emmy.runtime.launcher import LoadedPlan

    with ExitStack() as open_plans:
        yield {
            way: {x: open_plans.enter_context(LoadedPlan(build(c, way), "cuda")) for x, c in chosen.items()}
            for way in BUILT
        }


def measure(m: int, weights: Weights, stream: torch.cuda.Stream, home: Path) -> dict[str, object]:
    """The line of one width."""
    import torch

    random = torch.Generator("cuda").manual_seed(m)
    first = torch.randn(m, PROJECTIONS["q"][1], generator=random, device="cuda", dtype=torch.float16)
    every = {name: choose(m, n, k, home) for name, (n, k) in (PROJECTIONS | OTHERS).items()}
    chosen = {name: every[name] for name in PROJECTIONS}
    with loaded(every) as plans:
        chains = {way: Chain(m, way, first) for way in WAYS}
        for chain in chains.values():
            chain.allocate()
        calls = {way: launches(chains[way], chosen, plans.get(way, {}), weights, stream) for way in ("torch", *BUILT)}
        torch.cuda.synchronize()  # weights must be there: an early launch does not wait for what writes them
        parts = {name: alone(name, m, c, plans, weights, stream) for name, c in every.items()}
        picked = pick(calls, stream)
        mixed = {x: plans[way][x] for x, way in picked.items()}
        calls["picked"] = launches(chains["picked"], chosen, mixed, weights, stream)
        whole = {way: [call for layer in c for call in layer.values()] for way, c in calls.items()}
        errors, same = check(chains, whole, weights, stream)
        record: dict[str, object] = {
            "v": 4,
            "m": m,
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "layers": LAYERS,
            "chosen": {x: {"op": c.op, "schedule": c.schedule, "stored": c.stored} for x, c in every.items()},
            "rings": {x: c.rings for x, c in every.items()},
            "picked": picked,
            "relative_l2": errors,
            "pdl_is_the_same": same,
            "alone_relative_l2": {x: error for x, (_, error) in parts.items()},
            "right": same
            and all(e <= ALLOWED for way in errors.values() for e in way.values())
            and all(error <= ALLOWED for _, error in parts.values()),
            "layer": compare(whole, LAYERS, stream),
            "projections": {x: found for x, (found, _) in parts.items()},
        }
        stream.synchronize()
    return record


def pick(calls: Mapping[str, list[dict[str, Launch]]], stream: torch.cuda.Stream) -> dict[str, str]:
    """projection -> the way of building it that the chain is fastest with, changed one at a time.

    Where outputs of one way feed another does not matter for time: all read and write as many bytes.
    """

    def timed(tried: Mapping[str, Mapping[str, str]]) -> dict[str, float]:
        order = {key: [calls[use[x]][i][x] for i in range(LAYERS) for x in PROJECTIONS] for key, use in tried.items()}
        found = compare(order, LAYERS, stream)
        return {key: found[f"{key}_us"]["median"] for key in tried}

    us = timed({way: dict.fromkeys(PROJECTIONS, way) for way in BUILT})
    out = dict.fromkeys(PROJECTIONS, min(us, key=lambda way: us[way]))
    for _ in range(PASSES):
        for name in PROJECTIONS:
            us = timed({way: {**out, name: way} for way in BUILT})
            best = min(us, key=lambda way: us[way])
            if us[best] < LESS * us[out[name]]:
                out[name] = best
    return out


def check(
    chains: Mapping[str, Chain],
    calls: Mapping[str, Sequence[Launch]],
    weights: Weights,
    stream: torch.cuda.Stream,
) -> tuple[dict[str, dict[str, float]], bool]:
    """(errors of each way in the worst of a few poisoned replays, whether pdl() changed no bit in any)."""
    import torch

    graphs = {way: captured(c, stream) for way, c in calls.items()}
    errors = {way: dict.fromkeys(PROJECTIONS, 0.0) for way in chains}
    same = True
    for _ in range(CHECKS):
        for way, chain in chains.items():
            with torch.cuda.stream(stream):
                chain.poison()
                graphs[way].replay()
            stream.synchronize()
            found = chain.errors(weights)
            errors[way] = {x: max(e, found[x]) for x, e in errors[way].items()}
        pairs = zip(chains["emmy"].outputs, chains["pdl"].outputs, strict=True)
        same = same and all(torch.equal(a[x], b[x]) for a, b in pairs for x in PROJECTIONS)
    return errors, same


def shown(record: Mapping[str, object]) -> str:
    """A few words about a line."""
    layer = record["layer"]
    assert isinstance(layer, dict)
    us = ", ".join(f"{way} {layer[f'{way}_us']['median']:.1f}" for way in WAYS)
    ratios = ", ".join(f"{way} x{layer[f'{way}_ratio']['median']:.3f}" for way in WAYS[1:])
    return f"M={record['m']}: us a layer: {us}; {ratios}; right: {record['right']}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file for the lines")
    parser.add_argument(
        "--work", type=Path, default=Path("/tmp/emmy-collect"), help="folder where h200_matmul.py worked"
    )
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False  # of the reference
    weights, stream, wrong = Weights(), torch.cuda.Stream(), False
    weights.draw()
    torch.cuda.synchronize()
    with args.out.open("w") as out:
        for m in WIDTHS:
            record = measure(m, weights, stream, args.work / "home")
            wrong = wrong or not record["right"]
            out.write(json.dumps(record) + "\n")
            out.flush()
            sys.stdout.write(shown(record) + "\n")
    return WRONG if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
