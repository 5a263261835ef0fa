"""A fleet on Ray: nodes of this machine with cards that answer by formula, and its processor."""

from __future__ import annotations

import random
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

import pytest

from emmy.costmodel.dataset import Dataset
from emmy.fleet.cluster import Cluster
from emmy.fleet.tuning import FleetResult, cluster_pools, tune_on
from emmy.ir.ops import parse_op
from emmy.measure.device_pool import DevicePool
from emmy.measure.measurer import Measurer
from emmy.measure.member import LocalMember
from emmy.search.budget import parse_budget
from emmy.search.events import Event, Measured
from emmy.search.tuner import Stop, TuneResult
from emmy.testing.fleet import fake_here, fake_that_loads
from emmy.tuning import Terms
from tests.fleet.conftest import Nodes

pytestmark = pytest.mark.slow
OP = "matmul:64x96x128:f32"


def terms(trials: int, ahead: int) -> Terms:
    return Terms(parse_budget(f"{trials}"), "random", 0, 1, False, True, ahead, "roofline")


def alone(target: str, home: Path, trials: int, ahead: int) -> TuneResult:
    """What one card of the target finds by itself."""
    card: Measurer = fake_here(target, 1, lambda build: pytest.fail("fakes build nothing"), delay_s=0.0)
    with DevicePool(card.device, [LocalMember(card)]) as pool:
        (result,) = tune_on({target: pool}, [parse_op(OP)], terms(trials, ahead), home).results
    return result


def course(result: TuneResult) -> list[tuple[str, str, float | None]]:
    return [(r.schedule, r.status, r.time_us) for r in result.rows]


def churn(nodes: Nodes, until: Future[FleetResult], rng: random.Random) -> int:
    """Ends one node of cards after another, at random, and puts another in its place, until it is done; how many."""
    killed = 0
    while not until.done():
        cards = nodes.kill(rng.randrange(1, len(nodes.there)))  # the first has the processor
        nodes.add(**cards)
        killed += 1
        wait([until], timeout=rng.uniform(1, 4))
    return killed


def test_three_kinds_are_tuned_in_one_run_while_nodes_die_and_join(nodes: Nodes, tmp_path: Path) -> None:
    """Nothing is lost or stored twice, and each kind of card finds what one such card finds."""
    nodes.add(cpu=1)
    for cards in ({"h200": 1, "rtx4090": 1}, {"h200": 1}, {"h200": 1, "rtx4090": 1}):
        nodes.add(**cards)
    home, said, make = tmp_path / "home", [], partial(fake_here, delay_s=0.25)
    with Cluster(nodes.address, make=make, say=said.append) as cluster, ThreadPoolExecutor(1) as thread:
        assert cluster.devices() == {"cpu": 1, "h200": 3, "rtx4090": 2}
        pools = cluster_pools(cluster, ())
        tuning = thread.submit(tune_on, pools, [parse_op(OP)], terms(60, 3), home)
        killed = churn(nodes, tuning, random.Random(0))
        done = tuning.result()
        lost = sum(pool.census().lost for pool in pools.values())
    by_target = {r.target: r for r in done.results}
    assert not done.failed and set(by_target) == {"cpu", "h200", "rtx4090"}
    assert killed >= 2 and lost >= 1 and any("left" in text for text in said), said
    rows = Dataset.of(home).rows(op=OP)
    assert len({r.id for r in rows}) == len(rows)
    for target, result in by_target.items():
        stored = [r for r in rows if r.device.target == target and "speedup" not in r.static]
        assert sorted(r.schedule for r in stored) == sorted(r.schedule for r in result.rows)
        assert len({r.schedule for r in stored}) == len(stored) == result.trials == 60
    for target in ("h200", "rtx4090"):
        one, many = alone(target, tmp_path / target, 60, 3), by_target[target]
        assert course(many) == course(one)
        assert many.best is not None and one.best is not None and many.best.schedule == one.best.schedule


def test_candidates_are_compiled_on_any_node_and_their_binaries_reach_the_device(nodes: Nodes, tmp_path: Path) -> None:
    nodes.add(h200=2)
    nodes.add()
    with Cluster(nodes.address, make=fake_that_loads) as cluster:
        (result,) = tune_on(cluster_pools(cluster, ()), [parse_op(OP)], terms(12, 2), tmp_path).results
    ok = [r for r in result.rows if r.status == "ok"]
    assert ok and all(r.static["plan_bytes"] > 0 and r.static["registers"] > 0 and r.source_digest for r in ok)
    assert all(r.compile_s > 0 for r in ok) and {r.status for r in result.rows} <= {"ok", "compile", "constraints"}
    assert {r.device.uuid_hash for r in result.finalists} < {r.device.uuid_hash for r in result.rows}


def test_a_head_that_is_stopped_goes_on_with_other_nodes_where_it_was(nodes: Nodes, tmp_path: Path) -> None:
    nodes.add(h200=2)
    stop = Stop()

    def listen(event: Event) -> None:
        stop.asked = stop.asked or (isinstance(event, Measured) and event.n >= 13)

    def tune(events: object, stop: Stop | None = None) -> FleetResult:
        with Cluster(nodes.address, make=fake_here) as cluster:
            return tune_on(cluster_pools(cluster, ()), [parse_op(OP)], terms(40, 0), tmp_path / "home", listen, stop)

    first = tune(listen, stop).results[0]
    assert first.why == "interrupted" and 13 <= first.trials < 40
    nodes.add(h200=1)
    nodes.kill(0)
    (second,) = tune(listen).results
    assert second.resumed >= 13 and course(second) == course(alone("h200", tmp_path / "alone", 40, 2))
