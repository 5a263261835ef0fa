"""Several kinds of card in one command, without Ray: fakes by formula; and what is told of it."""

from __future__ import annotations

import json
import threading
import urllib.request
from _thread import interrupt_main
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from emmy import records
from emmy.cli import main
from emmy.errors import DeviceBusy, NoSuchDevice, UsageError
from emmy.fleet import cluster, node, tuning
from emmy.fleet.actors import Sent
from emmy.fleet.cluster import _refuse_silent
from emmy.fleet.status import Board, SearchStatus, Status, running
from emmy.fleet.tuning import FleetResult, tune_on
from emmy.ir.ops import parse_op
from emmy.measure import factory
from emmy.measure.compile_pool import Built, NotBuilt, compiled
from emmy.measure.device_pool import DevicePool
from emmy.measure.fake import FakeMeasurer
from emmy.measure.member import LocalMember
from emmy.records import Candidate
from emmy.runtime.cuda_driver import Gpu
from emmy.search.budget import parse_budget
from emmy.search.events import Event, Finished, Measured, Note, Planned, Racing, Started
from emmy.serving.process import free_port
from emmy.tuning import Terms

OP = "matmul:64x96x128:f32"


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "ray://127.0.0.1:{}", "127.0.0.1:9{:06}"])
def test_an_address_where_nothing_listens_is_refused_before_ray_asks_there_for_minutes(address: str) -> None:
    with pytest.raises(NoSuchDevice, match=r"no Ray cluster at .*emmy fleet head"):
        _refuse_silent(address.format(free_port()))


@pytest.mark.parametrize("status", ["compile", "constraints", "device_lost"])
def test_what_came_of_compiling_elsewhere_is_what_the_row_says(status: records.Status) -> None:
    def never(candidate: Candidate) -> Built:
        raise AssertionError

    sent, candidate = Sent(never), Candidate(OP, "")
    sent.put(candidate, NotBuilt(status, "the compiler was killed"), b"")
    assert compiled(sent, candidate).result == NotBuilt(status, "the compiler was killed")


def pool(target: str, n: int) -> DevicePool:
    fakes = [FakeMeasurer(target, name=f"card {i}") for i in range(n)]
    return DevicePool(fakes[0].device, [LocalMember(f) for f in fakes])


Told = tuple[FleetResult, list[Event], Status]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """A tune of two kinds: its result, its events, and the status that another process would have read last."""
    home, events, seen = tmp_path_factory.mktemp("home"), [], []

    def tell(event: Event) -> None:
        events.append(event)
        if isinstance(event, Racing):
            seen.extend(running(home))

    terms = Terms(parse_budget("10"), "random", 0, 1, False, True, 0, "roofline")
    with pool("h200", 2) as one, pool("rtx4090", 1) as other:
        result = tune_on({"h200": one, "rtx4090": other}, [parse_op(OP)], terms, home, tell)
    assert not list((home / "fleet").iterdir()), "nothing is left of a command that has ended"
    return result, events, seen[-1]


def test_each_kind_of_card_is_tuned_for_by_itself(told: Told) -> None:
    result, events, _ = told
    assert [(r.target, r.trials, r.raced) for r in result.results] == [("h200", 10, True), ("rtx4090", 10, True)]
    assert {r.device.target for r in result.results[0].rows} == {"h200"} and not result.failed
    h200, rtx4090 = ({r.schedule for r in x.rows} for x in result.results)
    assert h200 != rtx4090
    for kind in (Started, Racing, Finished):
        assert sorted(e.target for e in events if isinstance(e, kind)) == ["h200", "rtx4090"]
    counts = [e.n for e in events if isinstance(e, Measured) and e.row.device.target == "h200"]
    assert counts == list(range(1, 11))


def test_another_process_can_read_how_it_goes(told: Told) -> None:
    kinds = {k.target: k for k in told[2].kinds}
    assert len(kinds["h200"].devices) == 2 and kinds["h200"].product == "fake"
    assert {(k.abreast, *(s.op for s in k.searches)) for k in kinds.values()} <= {(1,), (1, OP)}
    assert {s.phase for k in kinds.values() for s in k.searches} <= {"search", "race"}


def test_of_several_ops_of_a_card_each_is_told_and_the_time_left_is_of_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    budget = parse_budget("60s")
    with pool("h200", 2) as devices:
        board = Board(tmp_path, {"h200": devices})
        row = FakeMeasurer("h200").measure([Candidate(OP, "")])[0]
        other = replace(row, op="matmul:8x8x8:f32")
        for event in (
            Planned("h200", 6, 1, 2),
            *(Started(r.op, "h200", "random", budget, "", n, 0, "") for r, n in ((row, 0), (other, 1))),
            Measured(row, 1, 7.5, True, 20.0, 40.0),
            Measured(other, 1, 9.0, True, 30.0, 30.0),
            Measured(other, 2, 8.0, True, 50.0, 10.0),
            Racing(OP, 5, "h200"),
            Note("busy"),
        ):
            board(event)
        status = board.status()
        (kind,) = status.kinds
        assert kind.searches == (
            SearchStatus(OP, "race", 1, 7.5, 0.0), SearchStatus(other.op, "search", 2, 8.0, 10.0)
        )  # fmt: skip
        assert (kind.abreast, kind.ops_done, kind.ops, kind.eta_all_s) == (2, 1, 6, 120.0)
        assert kind.statuses == {"ok": 2}, "the first row of the other is told again, and not new"
        with board:
            while not running(tmp_path):
                pass
            assert main(["fleet", "status", "--home", str(tmp_path)]) == 0
        lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
        assert "h200 2 0 120 0 0 0 2 of 2 1 of 6 2 min" in lines and f"h200 {OP} race 1 7.500 0 s" in lines
        assert f"h200 {other.op} search 2 8.000 10 s" in lines
        prometheus = scraped(status)
        assert f'emmy_best_seconds{{op="{OP}",target="h200"}} 7.5e-06' in prometheus
        assert f'emmy_trials{{op="{other.op}",target="h200"}} 2.0' in prometheus
        assert 'emmy_eta_seconds{target="h200"} 120.0' in prometheus
        board(Finished(OP, "60 s", 1, 60.0, "h200"))
        (kind,) = board.status().kinds
        assert [s.op for s in kind.searches] == [other.op] and kind.ops_done == 2
        assert f'op="{OP}"' not in scraped(board.status())


def test_nothing_goes_on_behind_a_program_that_was_interrupted(tmp_path: Path) -> None:
    def interrupt(event: Event) -> None:
        if isinstance(event, Measured) and event.n == 3:
            interrupt_main()

    terms = Terms(parse_budget("100000"), "random", 0, 1, False, True, 0, "roofline")
    with pool("h200", 2) as devices:
        with pytest.raises(KeyboardInterrupt):
            tune_on({"h200": devices}, [parse_op(OP)], terms, tmp_path, interrupt)
        for thread in threading.enumerate():
            if thread.name == "emmy-h200":
                thread.join(9)
                assert not thread.is_alive()


@pytest.mark.slow
def test_two_processes_that_search_for_one_card_are_both_told(tmp_path: Path) -> None:
    seen: list[Status] = []

    def look(event: Event) -> None:
        if isinstance(event, Measured):
            seen.extend(running(tmp_path))

    ops = [parse_op(o) for o in (OP, "matmul:32x96x128:f32", "matmul:16x96x128:f32")]
    terms = Terms(parse_budget("40"), "random", 0, 1, False, True, 0, "roofline", searches=2)
    fakes = [FakeMeasurer("h200", name=f"card {i}", delay_s=0.1) for i in range(2)]
    with DevicePool(fakes[0].device, [LocalMember(f) for f in fakes]) as devices:
        tune_on({"h200": devices}, ops, terms, tmp_path, look)
    kinds = [k for s in seen for k in s.kinds]
    assert max(len(k.searches) for k in kinds) == 2 == kinds[-1].abreast and kinds[-1].ops == 3


def scraped(status: Status) -> str:
    """What Prometheus reads of it."""
    pytest.importorskip("prometheus_client")
    from emmy.fleet.metrics import served

    port = free_port()
    with served(port, lambda: status), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        with pytest.raises(UsageError, match="Name another port"), served(port, lambda: status):
            pass
        return str(answer.read().decode())


def test_prometheus_reads_the_same(told: Told) -> None:
    text = scraped(told[2])
    idle = sum(d.state == "idle" for d in next(k for k in told[2].kinds if k.target == "h200").devices)
    assert f'emmy_devices{{state="idle",target="h200"}} {idle}.0' in text
    assert 'emmy_finished_searches_total{target="rtx4090"}' in text


def test_what_a_killed_command_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "fleet").mkdir()
    (tmp_path / "fleet" / "1234.json").write_text(json.dumps({"v": 1}))
    assert running(tmp_path) == () and not list((tmp_path / "fleet").iterdir())


def test_an_error_of_one_kind_stops_that_kind_alone(tmp_path: Path) -> None:
    gone = DevicePool(FakeMeasurer("rtx4090").device)
    terms = Terms(parse_budget("9"), "random", 0, 1, False, True, 0, "roofline")
    with pool("h200", 1) as here, gone:
        done = tune_on({"h200": here, "rtx4090": gone}, [parse_op(OP)], terms, tmp_path)
        assert [r.target for r in done.results] == ["h200"] and isinstance(done.failed["rtx4090"], NoSuchDevice)
        with pytest.raises(NoSuchDevice, match="no device is left"):
            tune_on({"rtx4090": gone}, [parse_op(OP)], terms, tmp_path)


# ---------------------------------------------------------------- this machine's GPUs
def gpu(i: int, product: str) -> Gpu:
    return Gpu(i, product, f"GPU-{i:08d}-0000-0000-0000-000000000000", (9, 0), 1 << 37, 1 << 25, 132, "13.0")


class FakeCuda(FakeMeasurer):
    """In the place of CudaMeasurer: `open` are those that hold a device; the third card is taken."""

    open: ClassVar[list[str]] = []

    def __init__(self, target: object, *, gpu: Gpu, pool: object, floor_us: object, wait: bool) -> None:
        super().__init__(target.name, name=gpu.uuid)  # type: ignore[attr-defined]
        if gpu.index == 2:
            raise DeviceBusy("it is taken")
        self.open.append(gpu.uuid)

    def close(self) -> None:
        self.open.pop()


class NoCompilers:
    begin = None
    closed = 0

    def close(self) -> None:
        type(self).closed += 1


def test_gpu_all_gathers_the_gpus_of_each_product(monkeypatch: pytest.MonkeyPatch) -> None:
    here = [gpu(0, "NVIDIA H200"), gpu(1, "NVIDIA H200"), gpu(3, "NVIDIA GeForce RTX 4090")]
    monkeypatch.setattr(factory, "gpus", lambda: tuple(here))
    monkeypatch.setattr("emmy.measure.cuda.CudaMeasurer", FakeCuda)
    monkeypatch.setattr("emmy.measure.cuda.compilers", lambda target: NoCompilers())
    with tuning.local_pools((), 1, False, lambda text: None) as pools:
        assert {name: len(p.members) for name, p in pools.items()} == {"h200": 2, "rtx4090": 1}
        assert pools["h200"].device.uuid_hash == "several" and pools["rtx4090"].device.uuid_hash != "several"
        (row,) = pools["h200"].measure([Candidate(OP, "k0/split(m,core,8)")])
        assert row.device in {m.device for m in pools["h200"].members} and len(FakeCuda.open) == 3
    assert not FakeCuda.open and NoCompilers.closed == 2
    here.append(gpu(2, "NVIDIA H200"))
    with pytest.raises(DeviceBusy), tuning.local_pools(("h200",), 1, False, lambda text: None):
        pass
    assert not FakeCuda.open, "the ones that were held are given back"
    with (
        pytest.raises(NoSuchDevice, match="this machine has h200, rtx4090"),
        tuning.local_pools(("a100",), 1, False, str),
    ):
        pass
    assert node.devices_here(cpu=True, needed=True) == {"cpu": 1, "h200": 3, "rtx4090": 1}


def test_a_node_says_what_it_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "ray_command", lambda: "/venv/bin/ray")
    monkeypatch.setattr(factory, "gpus", lambda: (gpu(0, "NVIDIA H200"), gpu(1, "NVIDIA H200")))
    said = node.shown(node.start("10.0.0.1:6379"))
    assert said == (
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1 ray start --address=10.0.0.1:6379 --num-gpus=0 "
        "'--resources={\"emmy:h200\":2}' --disable-usage-stats --block"
    )
    monkeypatch.setattr(factory, "gpus", lambda: ())
    with pytest.raises(NoSuchDevice, match="--compile-only"):
        node.start("10.0.0.1:6379")
    assert node.start("10.0.0.1:6379", compile_only=True).devices == {} == node.start(None).devices


def test_an_address_where_nobody_listens_is_refused_before_ray_tries_for_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    for address in (f"127.0.0.1:{free_port()}", f"ray://localhost:{free_port()}", "127.0.0.1:99999"):
        with pytest.raises(NoSuchDevice, match=f"no Ray cluster at {address}: .*`emmy fleet head` starts one"):
            cluster.connect(address)


def test_without_ray_a_fleet_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(UsageError, match=r"pip install 'emmy\[fleet\]'"):
        tuning.tune_fleet([], Terms(parse_budget("1"), "random", 0, 1, False, True, 0, None), address="auto")
