"""A decoder layer in plain torch, of Gemma 4's form, through torch.compile(backend="emmy") beside eager and Inductor.

python experiments/decoder_layer.py                                  small, on this CPU
python experiments/decoder_layer.py --sizes gemma4-12b --clock cpu   the sizes of Gemma-4-12B, in time on the processor
python experiments/decoder_layer.py --gpu h200 --out DIR             the sizes of Gemma-4-12B in f16, on the card

Writes the report (kernels, what was left to torch and why) and a table of times to stdout; with --out also DIR/report.txt and
DIR/times.jsonl. Exit code 4 when an answer is off. Inputs and weights are random; times are medians of turns, on a GPU with
and without a CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from emmy.dynamo import GraphReport, reports  # which also makes the backend's name known, where Emmy is not installed

Run = Callable[[], object]


@dataclass(frozen=True)
class Sizes:
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int


SIZES = {
    "small": Sizes(512, 2048, 8, 4, 64),
    "gemma4-12b": Sizes(3840, 15360, 16, 8, 256),
    "gemma4-12b-global": Sizes(3840, 15360, 16, 1, 512),
}


class RmsNorm(nn.Module):
    """x / sqrt(mean(x^2) + 1e-6) * weight, in f32 inside, as the published models write it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * self.weight.float()).type_as(x)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class DecoderLayer(nn.Module):
    """One layer: norms before and after both blocks, norms of heads, rotary positions, grouped attention, a GeGLU MLP."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.s = s
        self.before_attention, self.after_attention = RmsNorm(s.hidden), RmsNorm(s.hidden)
        self.before_mlp, self.after_mlp = RmsNorm(s.hidden), RmsNorm(s.hidden)
        self.q_norm, self.k_norm = RmsNorm(s.head_dim), RmsNorm(s.head_dim)
        self.q = nn.Linear(s.hidden, s.heads * s.head_dim, bias=False)
        self.k = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.v = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.o = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)
        self.gate = nn.Linear(s.hidden, s.intermediate, bias=False)
        self.up = nn.Linear(s.hidden, s.intermediate, bias=False)
        self.down = nn.Linear(s.intermediate, s.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        s, (batch, tokens, _) = self.s, x.shape
        h = self.before_attention(x)
        q = self.q_norm(self.q(h).view(batch, tokens, s.heads, s.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k(h).view(batch, tokens, s.kv_heads, s.head_dim)).transpose(1, 2)
        v = self.v(h).view(batch, tokens, s.kv_heads, s.head_dim).transpose(1, 2)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.after_attention(self.o(a.transpose(1, 2).reshape(batch, tokens, -1)))
        h = self.before_mlp(x)
        h = self.down(F.gelu(self.gate(h), approximate="tanh") * self.up(h))
        return x + self.after_mlp(h)


def layer_and_inputs(s: Sizes, tokens: int, dtype: torch.dtype, device: str) -> tuple[DecoderLayer, tuple[Tensor, ...]]:
    """A layer with random weights, in inference mode, and one sequence for it."""
    torch.manual_seed(0)
    layer = DecoderLayer(s).to(device=device, dtype=dtype).requires_grad_(False)
    angle = torch.outer(torch.arange(tokens).float(), 1e4 ** -(torch.arange(0, s.head_dim, 2).float() / s.head_dim))
    turns = torch.cat((angle, angle), -1)
    x = torch.randn(1, tokens, s.hidden)
    return layer, tuple(t.to(device=device, dtype=dtype) for t in (x, turns.cos(), turns.sin()))


def timed_ms(runs: dict[str, Run], device: str, rounds: int, clock: str = "wall") -> dict[str, float]:
    """Milliseconds of each, the median over rounds in which they take turns; clock "cpu": of this process's threads."""
    now = time.process_time if clock == "cpu" else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            if device == "cuda":
                torch.cuda.synchronize()
            begin = now()
            n = 0
            while n < 1 or now() - begin < 0.05:
                run()
                n += 1
            if device == "cuda":
                torch.cuda.synchronize()
            times[name].append((now() - begin) / n * 1e3)
    return {name: median(ms) for name, ms in times.items()}


def graphed(run: Run) -> Run:
    """A CUDA graph of one run."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


@dataclass(frozen=True)
class Measured:
    sizes: str
    tokens: int
    dtype: str
    gpu: str
    error: float  # of Emmy against eager, largest, relative to the root mean square of eager's answer
    eager_error: float  # of eager against float64, in the same units
    emmy_error: float  # of Emmy against float64
    kernels: int
    left_to_torch: int
    ms: dict[str, float]


def measure(name: str, tokens: int, args: argparse.Namespace) -> tuple[Measured, GraphReport]:
    device = "cpu" if args.gpu == "cpu" else "cuda"
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[args.dtype]
    layer, inputs = layer_and_inputs(SIZES[name], tokens, dtype, device)
    torch._dynamo.reset()
    n_before = len(reports())
    options = {"gpu": args.gpu, "check": True, "attention": args.attention} | (
        {"threads": args.threads} if device == "cpu" else {}
    )
    compiled = {"eager": layer, "emmy": torch.compile(layer, backend="emmy", dynamic=False, options=options)}
    if not args.no_inductor:
        rest = options | {"rest": "inductor"}
        compiled["emmy, rest by inductor"] = torch.compile(layer, backend="emmy", dynamic=False, options=rest)
        compiled["inductor"] = torch.compile(layer, dynamic=False)
    with torch.no_grad():
        answers = {}
        for lane, call in list(compiled.items()):
            try:
                answers[lane] = call(*inputs).double()
            except Exception as e:  # Inductor needs a compiler that may not be here
                if lane in ("eager", "emmy"):
                    raise
                sys.stderr.write(f"{lane} does not run here: {str(e).splitlines()[0][:200]}\n")
                del compiled[lane]
        exact = layer.double()(*(t.double() for t in inputs))
        layer.to(dtype)
        rms = float(exact.square().mean().sqrt())
        off = {lane: float((y - exact).abs().max()) / rms for lane, y in answers.items()}
        runs: dict[str, Run] = {lane: (lambda c=c: c(*inputs)) for lane, c in compiled.items()}
        ms = timed_ms(runs, device, args.rounds, args.clock)
        if device == "cuda":
            ms |= timed_ms({f"{lane} in a graph": graphed(run) for lane, run in runs.items()}, device, args.rounds)
    report = reports()[n_before]
    error = float((answers["emmy"] - answers["eager"]).abs().max()) / rms
    found = Measured(
        name,
        tokens,
        args.dtype,
        args.gpu,
        error,
        off["eager"],
        off["emmy"],
        len(report.kernels),
        len(report.fallbacks),
        ms,
    )
    return found, report


def table(rows: Sequence[Measured]) -> str:
    lanes = list(dict.fromkeys(lane for r in rows for lane in r.ms))
    lines = [
        "| sizes | tokens | dtype | kernels, left to torch | error: Emmy, eager | "
        + " | ".join(f"{n} ms" for n in lanes)
        + " |"
    ]
    lines.append("|---" * (5 + len(lanes)) + "|")
    for r in rows:
        cells = [
            r.sizes,
            str(r.tokens),
            r.dtype,
            f"{r.kernels}, {r.left_to_torch}",
            f"{r.emmy_error:.1e}, {r.eager_error:.1e}",
        ]
        lines.append("| " + " | ".join([*cells, *(f"{r.ms[n]:.3f}" if n in r.ms else "-" for n in lanes)]) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="cpu", help="target (default: cpu)")
    parser.add_argument(
        "--sizes", help=f"{', '.join(SIZES)} (default: small on a CPU, else gemma4-12b,gemma4-12b-global)"
    )
    parser.add_argument("--tokens", help="of the sequence (default: 64 on a CPU, else 1,64,512,2048)")
    parser.add_argument("--dtype", choices=("f32", "f16", "bf16"), help="default: f32 on a CPU, else f16")
    parser.add_argument("--threads", type=int, default=1, help="of a CPU (default: 1)")
    parser.add_argument(
        "--attention", choices=("tuned", "always", "never"), default="tuned", help="when Emmy's (default: tuned)"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: time on the processor, where it is shared (default: wall)",
    )
    parser.add_argument("--no-inductor", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    on_cpu = args.gpu == "cpu"
    args.dtype = args.dtype or ("f32" if on_cpu else "f16")
    logging.basicConfig(level=logging.ERROR)
    if on_cpu:
        torch.set_num_threads(args.threads)
    names = (args.sizes or ("small" if on_cpu else "gemma4-12b,gemma4-12b-global")).split(",")
    tokens = [int(t) for t in (args.tokens or ("64" if on_cpu else "1,64,512,2048")).split(",")]
    rows, texts = [], []
    for name in names:
        for t in tokens:
            row, report = measure(name, t, args)
            rows.append(row)
            texts.append(f"{name}, {t} tokens, {args.dtype}: {report}")
            sys.stdout.write(texts[-1] + "\n\n")
            sys.stdout.flush()
            if args.out:  # after each, in case that a later one dies
                args.out.mkdir(parents=True, exist_ok=True)
                (args.out / "report.txt").write_text("\n\n".join(texts) + "\n")
                (args.out / "times.jsonl").write_text("".join(json.dumps(asdict(r)) + "\n" for r in rows))
                (args.out / "table.md").write_text(table(rows) + "\n")
    sys.stdout.write(table(rows) + "\n")
    # Emmy rounds less often than eager: it must not be further from the exact answer than twice what eager is, but that its
    # f32 sums on a CPU may be of many terms in a row, where a library adds sums of parts.
    return 0 if all(r.emmy_error <= 2 * r.eager_error + (5e-5 if on_cpu else 1e-6) for r in rows) else 4


if __name__ == "__main__":
    sys.exit(main())
