"""One tuner a device."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from emmy.errors import DeviceBusy
from emmy.measure.lock import DeviceLock, LockUnavailable

HOLD = """
import sys, time
from pathlib import Path
from emmy.measure.lock import DeviceLock
DeviceLock(Path(sys.argv[1]), "cpu").acquire()
print("held", flush=True)
time.sleep(60)
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    """A process that has the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_holder_is_told_who_holds_the_device(tmp_path: Path) -> None:
    process = holder(tmp_path)
    try:
        with pytest.raises(DeviceBusy, match=rf"process {process.pid} \(-c .*--wait"):
            DeviceLock(tmp_path, "cpu").acquire()
    finally:
        process.kill()
        process.wait()


def test_a_killed_holder_leaves_no_lock(tmp_path: Path) -> None:
    process = holder(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with DeviceLock(tmp_path, "cpu") as lock:
        assert lock.held


def test_waiting_gets_the_lock_when_its_holder_lets_go(tmp_path: Path) -> None:
    first, second = DeviceLock(tmp_path, "cpu"), DeviceLock(tmp_path, "cpu")
    first.acquire()
    waiter = threading.Thread(target=second.acquire, kwargs={"wait": True}, daemon=True)
    waiter.start()
    waiter.join(0.2)
    assert not second.held
    first.release()
    waiter.join(10)
    assert second.held
    second.release()


def test_devices_are_locked_one_by_one(tmp_path: Path) -> None:
    with DeviceLock(tmp_path, "cpu"), DeviceLock(tmp_path, "9f3a"):
        pass


def test_a_folder_that_cannot_be_written_is_no_busy_device(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "locks"
    with pytest.raises(LockUnavailable, match=f"^{folder}: the lock cpu.lock cannot be opened.*EMMY_CACHE"):
        DeviceLock(folder, "cpu").acquire()


@pytest.mark.slow
def test_what_a_killed_holder_was_starting_is_waited_for_and_one_that_stays_is_not(tmp_path: Path) -> None:
    """A process that is killed between fork and exec leaves a copy of the lock for that long."""
    for stays_s, is_taken in ((0.3, True), (30, False)):
        forks = HOLD.replace("print(", f"import os\nif os.fork() == 0: time.sleep({stays_s}); os._exit(0)\nprint(")
        process = subprocess.Popen(
            [sys.executable, "-c", forks, str(tmp_path)], stdout=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        process.kill()
        process.wait()
        if is_taken:
            with DeviceLock(tmp_path, "cpu") as lock:
                assert lock.held
        else:
            with pytest.raises(DeviceBusy, match=f"process {process.pid} "):
                DeviceLock(tmp_path, "cpu").acquire()
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
