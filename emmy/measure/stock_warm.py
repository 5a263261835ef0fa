"""torch.compile's kernels made ahead, by several processes at once, into the cache that the measuring worker reads.

What a process chooses among kernels by timing them is thrown away afterwards: many share the device, and their times mean
nothing. `python -m emmy.measure.stock_warm` is one of the processes: lines [op, rival] in, a line of JSON each out.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from emmy import config
from emmy.errors import EmmyError
from emmy.ir.ops import parse_op
from emmy.measure.check import operands
from emmy.measure.rivals import AUTOTUNED
from emmy.measure.stock_compiled import compiled
from emmy.measure.worker_main import die_with_parent

if TYPE_CHECKING:
    import torch

LIMIT_S = 180.0  # without a word from any process


@dataclass(frozen=True, slots=True)
class Warmed:
    """What became of one op's kernels for one rival: the seconds it took, and why there are none, else ""."""

    op: str
    against: str
    seconds: float
    error: str = ""


def inductor_cache(cache: Path) -> dict[str, str]:
    """The variables that give torch.compile its place in Emmy's folder of compiled kernels."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor")}


def warm(
    asked: Sequence[tuple[str, str]],
    *,
    workers: int,
    threads: int,
    on_gpu: bool,
    environment: Mapping[str, str],
    seconds: float = inf,
    on_progress: Callable[[Warmed], None] = lambda w: None,
) -> list[Warmed]:
    """Compiles each (op, rival) in one of `workers` processes, as many again for max-autotune; those that did not answer
    are left out.

    threads:     of torch on a CPU: what the measuring worker has, for the code depends on it
    environment: as the measuring worker's, with `inductor_cache`
    seconds:     after which the rest is left to be compiled when its turn comes
    """
    # With its cache of graphs max-autotune would keep what it chose on a crowded device: only its kernels are kept.
    groups = [("1", [a for a in asked if a[1] != AUTOTUNED]), ("0", [a for a in asked if a[1] == AUTOTUNED])]
    started: list[subprocess.Popen[bytes]] = []
    done: list[Warmed] = []
    try:
        for graphs, group in groups:  # at once, so that the last of one does not keep the other waiting
            n = min(workers, len(group))
            env = {**environment, "TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_FX_GRAPH_CACHE": graphs}
            started += [_start(group[i::n], threads, on_gpu, env) for i in range(n)]
        for warmed in _answers(started, time.monotonic() + seconds):
            done.append(warmed)
            on_progress(warmed)
    finally:
        for p in started:
            p.kill()
            p.communicate()
    _forget_choices(Path(environment["TORCHINDUCTOR_CACHE_DIR"]))
    return done


def _start(
    asked: Sequence[tuple[str, str]], threads: int, on_gpu: bool, env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "emmy.measure.stock_warm", str(os.getpid()), str(threads), str(int(on_gpu))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=config.child_env(PYTHONPATH=os.pathsep.join(p for p in sys.path if p), OMP_NUM_THREADS=str(threads), **env),
    )
    assert process.stdin is not None
    process.stdin.write("".join(json.dumps(a) + "\n" for a in asked).encode())
    process.stdin.close()
    process.stdin = None
    return process


def _answers(processes: Sequence[subprocess.Popen[bytes]], end_s: float) -> Iterator[Warmed]:
    """What the processes say, as they say it, until the last has ended, all are silent for too long, or the time is up."""
    kept = dict.fromkeys((p.stdout for p in processes), b"")
    with selectors.DefaultSelector() as ready:
        for out in kept:
            assert out is not None
            ready.register(out, selectors.EVENT_READ)
        while ready.get_map() and (events := ready.select(max(0.0, min(LIMIT_S, end_s - time.monotonic())))):
            for key, _ in events:
                data = os.read(key.fd, 1 << 16)
                if not data:
                    ready.unregister(key.fileobj)
                    continue
                *lines, kept[key.fileobj] = (kept[key.fileobj] + data).split(b"\n")  # type: ignore[index]
                yield from (Warmed(**json.loads(line)) for line in lines)


def _forget_choices(cache: Path) -> None:
    """Removes what was chosen by timing: configurations of Triton kernels, and templates of max-autotune."""
    for chosen in cache.rglob("*.best_config"):
        chosen.unlink(missing_ok=True)
    shutil.rmtree(cache / "cache", ignore_errors=True)


# ---------------------------------------------------------------- a process
def main(parent: int, threads: int, on_gpu: bool) -> int:
    """Compiles what standard input lists, until its end."""
    if not die_with_parent(parent):
        return 0
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what compilers print is no answer
    import torch

    torch.set_grad_enabled(False)
    torch.set_num_threads(threads)
    for line in sys.stdin:
        op, against = json.loads(line)
        begin_s = time.monotonic()
        error = _compile(op, against, "cuda" if on_gpu else "cpu")
        out.write(
            json.dumps({"op": op, "against": against, "seconds": time.monotonic() - begin_s, "error": error}) + "\n"
        )
        out.flush()
    return 0


def _compile(text: str, against: str, device: str) -> str:
    """Compiles and runs once, on zeros; why it did not, else ""."""
    import torch

    op = parse_op(text)
    dtypes = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i32": torch.int32}
    try:
        forms = operands(op, op.typical_sizes())
        buffers = {n: _Zeros(torch.zeros(shape, dtype=dtypes[d], device=device)) for n, (shape, d) in forms.items()}
        found = compiled(op, lambda b: b.tensor, autotune=against == AUTOTUNED)  # type: ignore[attr-defined]
        if found:
            found.bind(buffers, {})()  # type: ignore[arg-type]  # nothing but the tensor is asked of a buffer here
    except (EmmyError, RuntimeError) as e:  # torch's own errors are RuntimeErrors
        return str(e).splitlines()[0][:300]
    return ""


@dataclass(frozen=True, slots=True)
class _Zeros:
    tensor: torch.Tensor


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1"))
