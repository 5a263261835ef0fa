"""Counters in memory that another process reads."""

from __future__ import annotations

import subprocess
import sys
import uuid

from emmy_vllm import counts


def test_what_one_process_counts_another_reads_while_it_lives() -> None:
    instance = uuid.uuid4().hex[:8]
    program = f"""
import sys
from emmy_vllm.counts import Counts
c = Counts({instance!r}, "matmul:m(1..9)x4x4:f32:nk", ["1..3", "", "7..9"])
c.array[0], c.array[1], c.array[2], c.array[3] = 5, 6, 7, 8
print("ready", flush=True)
sys.stdin.readline()
"""
    import os

    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        op = "matmul:m(1..9)x4x4:f32:nk"
        assert list(counts.read(instance)) == [(op, "", 5), (op, "1..3", 6), (op, "7..9", 8)]
        child.communicate("\n")
    assert list(counts.read(instance)) == []  # it took its file along


def test_a_damaged_file_is_passed_over() -> None:
    instance = uuid.uuid4().hex[:8]
    kept = counts.Counts(instance, "op", ["all"])
    kept.array[1] = 3
    (counts.folder(instance) / "1-x.counts").write_bytes(b"\x08\x00")
    assert list(counts.read(instance)) == [("op", "", 0), ("op", "all", 3)]
    kept.clear()
    assert kept.values() == (0, 0)
