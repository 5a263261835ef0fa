"""Servers and clients as processes: turns, what is kept when something goes wrong, and that nothing is left running."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from emmy.errors import ServingError, UsageError
from emmy.serving import process, server
from emmy.serving.command import value_of
from emmy.serving.compare import entries
from emmy.serving.experiment import Changes, read_experiment
from emmy.serving.installed import Vllm
from emmy.serving.process import free_port, running
from emmy.serving.results import Results
from emmy.serving.server import serving
from emmy.serving.sitting import Sitting
from tests.serving.conftest import Fake

HERE = Vllm(sys.executable, "0.32.0", "2.13.0", "", True)
Write = Callable[..., Path]


def sitting(path: Path, tmp_path: Path, told: Callable[[str], None] = print, **changes: object) -> Sitting:
    experiment = read_experiment(path, Changes(**changes))  # type: ignore[arg-type]
    return Sitting(experiment, HERE, Results.open(tmp_path / "out"), "a card", told)


def alive(pid: object) -> bool:
    try:
        os.kill(int(str(pid)), 0)
    except ProcessLookupError:
        return False
    return True


def test_lanes_take_turns_and_what_is_done_is_not_done_again(vllm: Fake, experiment: Write, tmp_path: Path) -> None:
    path = experiment()
    assert sitting(path, tmp_path).run() == 0
    stock, emmy = ["serve stock", "bench", "stopped"], ["serve emmy", "bench", "stopped"]
    assert vllm.order == [*stock, *emmy, *stock, *emmy]
    assert sitting(path, tmp_path).run() == 0 and len(vllm.order) == 12
    found = entries(Results.open(tmp_path / "out").rows)
    assert [(e.lane, e.waves) for e in found] == [("stock", 2), ("emmy", 2)]
    assert str(found[1].ratios["ttft_p50_ms"]) == "1.250" and found[1].figures["tpot_p99_ms"] == 16.0
    (row, *_) = Results.open(tmp_path / "out").rows
    assert row.about["choices"] == ["Using TRITON_ATTN attention backend"] and row.about["device"] == "a card"
    assert not any(alive(call["pid"]) for call in vllm.calls)


def test_lanes_that_are_compared_may_be_loaded_together_and_take_turns_point_by_point(
    vllm: Fake, experiment: Write, tmp_path: Path
) -> None:
    path = experiment("\n[[point]]\ninput = 16\noutput = 4\nconcurrency = 1\n[offline]\nmemory = 0.8\nkv_gib = 2\n")
    both = replace(sitting(path, tmp_path, waves=1), together=True)
    assert both.run() == 0
    assert sorted(vllm.order[:2]) == ["serve emmy", "serve stock"]
    assert vllm.order[2:] == ["bench"] * 4 + ["stopped"] * 2
    assert len({c["pid"] for c, what in zip(vllm.calls, vllm.order, strict=True) if what == "bench"}) == 1
    asked = [c["argv"] for c in vllm.calls if c["argv"][0] == "serve"]  # type: ignore[index]
    assert all(value_of(a, "--gpu-memory-utilization") == "0.4000" for a in asked)  # type: ignore[arg-type]
    assert all(value_of(a, "--kv-cache-memory-bytes") == str(2 << 30) for a in asked)  # type: ignore[arg-type]
    found = entries(Results.open(tmp_path / "out").rows)
    assert [(e.point, e.lane) for e in found][1::2] == [("32/8@2", "emmy"), ("16/4@1", "emmy")]
    assert all(str(e.ratios["ttft_p50_ms"]) == "1.250" for e in found[1::2])
    n = len(vllm.order)
    assert replace(both, results=Results.open(tmp_path / "out")).run() == 0 and len(vllm.order) == n
    assert sitting(path, tmp_path, waves=1).run() == 0 and len(vllm.order) > n  # loaded alone they are measured anew


def test_together_a_server_that_dies_costs_its_lane_alone_and_a_port_is_not_shared(
    vllm: Fake, experiment: Write, tmp_path: Path
) -> None:
    vllm.behaves(die="emmy")
    both = replace(sitting(experiment(), tmp_path, waves=1), together=True)
    assert both.run() == 1
    assert sorted((r.lane, r.status) for r in both.results.rows) == [("emmy", "failed"), ("stock", "ok")]
    assert not any(alive(call["pid"]) for call in vllm.calls)
    with pytest.raises(UsageError, match="--port names one port"):
        replace(sitting(experiment(), tmp_path, flags=("--port", "1234")), together=True).run()


@pytest.mark.parametrize(
    ("wrongly", "why"),
    [
        ({"failed": 8}, "8 of 8 requests failed, 0 completed: Internal Server Error"),
        ({"short": 3}, "61 tokens came, 8 times 8 were asked for"),
        ({"cut": 40}, "is no result: Unterminated string|is no result: Expecting"),
        pytest.param({"absent": True}, "wrote no result", marks=pytest.mark.slow),
        ({"die_serving": True}, "ended with code 134 while serving 32/8@2.*illegal memory access"),
        ({"die": True}, "ended with code 1 while starting.*no memory left"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_measurement_that_fails_says_why_and_is_left_to_do(
    vllm: Fake, experiment: Write, tmp_path: Path, wrongly: dict[str, object], why: str
) -> None:
    vllm.behaves(**wrongly)
    here = sitting(experiment(), tmp_path, waves=1, lanes=("stock",))
    assert here.run() == 1
    rows = here.results.rows
    assert [(r.lane, r.status) for r in rows] == [("stock", "failed")]
    assert re.search(why, rows[0].message, re.DOTALL), rows[0].message
    assert not any(alive(call["pid"]) for call in vllm.calls)


def test_a_lane_whose_server_dies_leaves_the_others_their_turn(vllm: Fake, experiment: Write, tmp_path: Path) -> None:
    vllm.behaves(die=True)
    here = sitting(experiment(), tmp_path, waves=1)
    assert here.run() == 2
    assert [(r.lane, r.status) for r in here.results.rows] == [("stock", "failed"), ("emmy", "failed")]


def test_an_interrupted_sitting_stops_its_server_and_keeps_what_it_has(
    vllm: Fake, experiment: Write, tmp_path: Path
) -> None:
    def interrupted(text: str) -> None:
        if "lane emmy: ready" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sitting(experiment(), tmp_path, interrupted, waves=1).run()
    assert vllm.order == ["serve stock", "bench", "stopped", "serve emmy", "stopped"]
    assert [r.lane for r in Results.open(tmp_path / "out").rows] == ["stock"]
    assert not any(alive(call["pid"]) for call in vllm.calls)


def test_a_taken_port_is_refused_and_a_free_one_chosen_otherwise(vllm: Fake, tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = str(s.getsockname()[1])
        with (
            pytest.raises(UsageError, match=f"--port {port}: taken"),
            serving(HERE, "m", ["--port", port], None, tmp_path / "log", "it"),
        ):
            pass
    assert vllm.calls == [] and free_port() != free_port()


@pytest.mark.parametrize(
    ("host", "reached"), [("", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("fe80::2", "[fe80::2]")]
)
def test_a_host_is_reached_by_a_url(host: str, reached: str) -> None:
    assert server._reached(host) == reached


def test_what_speaks_no_http_is_not_healthy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with listener.accept()[0] as c:
                c.sendall(b"SSH-2.0-OpenSSH\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert not process._healthy(f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread.join()


def test_a_server_that_is_never_ready_is_given_up(vllm: Fake, tmp_path: Path) -> None:
    with (
        pytest.raises(ServingError, match="was not ready after"),
        serving(HERE, "m", [], None, tmp_path / "log", "it", ready_limit_s=0.0),
    ):
        pass


def test_a_child_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """kill -9 leaves no server behind that holds the card's memory."""
    program = (
        "import sys, time; from pathlib import Path; from emmy.serving.process import running\n"
        f"with running([sys.executable, '-c', 'import time; time.sleep(60)'], Path({str(tmp_path / 'log')!r}), 'it') as c:\n"
        "    print(c.process.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    time.sleep(0.2)  # the child asks to be ended with its parent in its first moments
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    for _ in range(200):
        if not alive(pid) or Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            return
        time.sleep(0.02)
    pytest.fail("the child lives on")


def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emmy.serving.process.GRACE_S", 0.1)
    program = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    log = tmp_path / "log"
    with running([sys.executable, "-c", program], log, "it") as child:
        while "deaf" not in child.tail():
            time.sleep(0.01)
    assert child.code == -signal.SIGKILL


def test_the_first_error_of_a_log_is_shown_before_its_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    filler = "\n".join(f"frame {i}" for i in range(60))
    log.write_text(
        f"INFO fine\n(EngineCore pid=7) ERROR [core.py:1] ValueError: no such card\n{filler}\nRuntimeError: see above\n"
    )
    with running([sys.executable, "-c", ""], log, "it") as child:
        child.wait(20)
        shown = child.tail().splitlines()
    assert (
        shown[0].endswith("ValueError: no such card") and shown[4] == "[...]" and shown[-1] == "RuntimeError: see above"
    )
