"""Points of work against servers that are ready, through `vllm bench serve`; their figures, or why there are none."""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from emmy.errors import ServingError
from emmy.serving.command import value_of
from emmy.serving.experiment import Point
from emmy.serving.installed import Vllm
from emmy.serving.process import Child, running

LATENCIES = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = (50, 90, 99)
TOTALS = {"request_throughput": "requests_per_s", "output_throughput": "output_tokens_per_s",
          "total_token_throughput": "tokens_per_s", "duration": "duration_s"}  # fmt: skip
LIMIT_S = 3600.0
# Runs a command of vLLM for every line it reads, and answers with its exit code: importing vLLM takes longer than many a point.
_STAYS = """\
import json, os, runpy, sys, traceback
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
import vllm.benchmarks.serve  # which may print
for line in sys.stdin:
    sys.argv, code = ["vllm", *json.loads(line)], 0
    try:
        runpy.run_module("vllm.entrypoints.cli.main", run_name="__main__")
    except SystemExit as e:
        code = e.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    print(json.dumps(str(code or 0)), file=answers, flush=True)
"""
# figure -> heading, as tables show them
COLUMNS = {"lane": "lane", "point": "point", "ttft_p50_ms": "TTFT p50 ms", "ttft_p99_ms": "p99", "tpot_p50_ms": "TPOT p50 ms",
           "tpot_p99_ms": "p99", "itl_p50_ms": "ITL p50 ms", "itl_p99_ms": "p99", "output_tokens_per_s": "output tok/s"}  # fmt: skip


def bench_words(model: str, flags: Sequence[str], url: str, point: Point, result: Path, seed: int) -> list[str]:
    """The words after `vllm`. `flags` are the server's: the names that a client needs too are taken from them."""
    served = (value_of(flags, "--served-model-name") or "").split(",")[0]
    shared = [w for name in ("--tokenizer", "--tokenizer-mode") if (v := value_of(flags, name)) for w in (name, v)]
    return [
        "bench", "serve", "--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions", "--model", model,
        *(("--served-model-name", served) if served else ()), *shared,
        *(("--trust-remote-code",) if "--trust-remote-code" in flags else ()),
        "--dataset-name", "random", "--random-input-len", str(point.input), "--random-output-len", str(point.output),
        "--random-range-ratio", "0", "--num-prompts", str(point.prompts), "--max-concurrency", str(point.concurrency),
        "--num-warmups", str(point.warmups), "--request-rate", "inf", "--ignore-eos", "--temperature", "0", "--seed", str(seed),
        "--percentile-metrics", ",".join(LATENCIES), "--metric-percentiles", ",".join(map(str, PERCENTILES)),
        "--disable-tqdm", "--save-result", "--result-dir", str(result.parent), "--result-filename", result.name,
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Client:
    """A process that measures one point after another, of any server."""

    child: Child

    def measure(
        self, model: str, flags: Sequence[str], url: str, point: Point, folder: Path, *, seed: int = 0
    ) -> dict[str, float]:
        """The figures of a point: `ttft_p50_ms`, `tpot_mean_ms`, ..., `output_tokens_per_s`. Leaves the result in `folder`.

        Raises ServingError when vLLM's client ends with an error, or any request failed: it exits with 0 even when all did.
        """
        result = (folder / f"bench-{point.input}-{point.output}-{point.concurrency}.json").absolute()
        result.unlink(missing_ok=True)
        os.truncate(self.child.log, 0)  # what it says of a point is not taken for an error of the next
        what = f"`vllm bench serve` at {point.name}"
        code = self._run(bench_words(model, flags, url, point, result, seed))
        try:
            if code != "0":
                raise ServingError(f"it ended with code {code}")
            if not result.is_file():
                raise ServingError("it wrote no result")
            return figures(_result(result), point)
        except ServingError as e:
            raise ServingError(f"{what}: {e}. The end of {self.child.log}:\n{self.child.tail()}") from None

    def _run(self, words: Sequence[str]) -> str:
        """The exit code of `vllm WORDS`. Raises ServingError when the process ends, or takes too long."""
        asked, answers = self.child.process.stdin, self.child.process.stdout
        assert asked is not None and answers is not None
        try:
            asked.write(json.dumps(words).encode() + b"\n")
            asked.flush()
        except BrokenPipeError:
            self.child.process.wait()
            raise self.child.died("waiting for a point") from None
        if not select.select([answers], [], [], LIMIT_S)[0]:
            raise ServingError(
                f"{self.child.what} did not answer within {LIMIT_S:.0f} s. The end of {self.child.log}:\n{self.child.tail()}"
            )
        line = answers.readline()
        if not line.endswith(b"\n"):
            self.child.process.wait()
            raise self.child.died("measuring")
        return str(json.loads(line))


@contextmanager
def client(vllm: Vllm, log: Path) -> Iterator[Client]:
    """A client until the block is left. It loads while servers start."""
    command = [vllm.python, "-P", "-c", _STAYS]
    with running(command, log, "`vllm bench serve`", stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        yield Client(child)


def figures(result: Mapping[str, object], point: Point) -> dict[str, float]:
    """What counts of a result of `vllm bench serve`. Raises ServingError when it is not of all that was asked."""
    completed, failed = _number(result, "completed"), _number(result, "failed")
    if failed or completed != point.prompts:
        why = next((e for e in _errors(result) if e), "")
        raise ServingError(
            f"{failed:.0f} of {point.prompts} requests failed, {completed:.0f} completed{why and f': {why}'}"
        )
    tokens = _number(result, "total_output_tokens")
    if tokens != point.prompts * point.output:
        raise ServingError(f"{tokens:.0f} tokens came, {point.prompts} times {point.output} were asked for")
    found = {f"{m}_mean_ms": _number(result, f"mean_{m}_ms") for m in LATENCIES}
    found |= {f"{m}_p{p}_ms": _number(result, f"p{p}_{m}_ms") for m in LATENCIES for p in PERCENTILES}
    return found | {ours: _number(result, theirs) for theirs, ours in TOTALS.items()}


def _result(path: Path) -> Mapping[str, object]:
    """Raises ServingError for a file that is no JSON object, as one that a full disk cut short."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise ServingError(f"{path} is no result: {e}") from None
    if not isinstance(raw, dict):
        raise ServingError(f"{path} is no result: a JSON object is needed, it holds {type(raw).__name__}")
    return raw


def _errors(result: Mapping[str, object]) -> list[str]:
    errors = result.get("errors", [])
    return [str(e).strip().splitlines()[-1] for e in errors if e] if isinstance(errors, list) else []


def _number(result: Mapping[str, object], key: str) -> float:
    value = result.get(key)
    if not isinstance(value, int | float) or not isfinite(value):
        raise ServingError(f"the result has no number {key!r}: another `vllm bench serve` than this Emmy knows")
    return float(value)
