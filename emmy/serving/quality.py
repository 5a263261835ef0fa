"""Whether a model says the same with a pack as without: logits of the same prompts, position by position; GSM8K through a server."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from emmy.errors import ServingError
from emmy.serving.engine import Engine, Spec, engines
from emmy.serving.installed import Vllm
from emmy.serving.process import running
from emmy.serving.server import serving
from emmy.serving.sitting import Told

if TYPE_CHECKING:
    from numpy.typing import NDArray

RANDOM_FORMATS = ("dummy", "emmy_random")
EVAL_LIMIT_S = 4 * 3600.0
STOCK, EMMY = "stock", "emmy"


@dataclass(frozen=True, slots=True)
class Asked:
    """The seeded prompts: one of each of `lengths` alone, and batches of `batches`, each with `context` tokens, decoded for `steps`."""

    lengths: tuple[int, ...] = (7, 64, 512)
    batches: tuple[int, ...] = (1, 8)
    context: int = 32
    steps: int = 16
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far two lanes agree over some positions. Logits as the model gives them; KL in nats, of stock's distribution from the lane's.

    same_tokens: of a decode, the sequences that came out alike; positions after the first difference do not count
    """

    case: str
    positions: int
    max_abs: float
    mean_abs: float
    kl_mean: float
    kl_max: float
    top1: float  # share of positions with the same most likely token
    same_tokens: str = ""

    @property
    def figures(self) -> dict[str, float]:
        """Its numbers; of a decode also the share of sequences that came out alike."""
        alike, _, of = self.same_tokens.partition(" of ")
        shares = {"top1": self.top1} | ({"same_sequences": int(alike) / int(of)} if of else {})
        return {"positions": self.positions, "max_abs": self.max_abs, "mean_abs": self.mean_abs, "kl_mean": self.kl_mean,
                "kl_max": self.kl_max, **shares}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Said:
    """What a lane said: its answers by case, and the folder that holds their logits."""

    folder: Path
    answers: Mapping[str, Mapping[str, object]]

    def path(self, case: str) -> Path:
        return self.folder / f"{case.replace(' ', '-')}.npy"

    def forget(self) -> None:
        """Deletes the logits."""
        for case in self.answers:
            self.path(case).unlink()


def agreements(vllm: Vllm, stock: Spec, other: Spec, asked: Asked, folder: Path, told: Told) -> tuple[Agreement, ...]:
    """Of each case, stock beside the other lane. One engine at a time is loaded. Raises ServingError when one fails."""
    said: list[Said] = []
    for spec in (stock, other):
        told(f"loading the model, lane {spec.name}")
        with engines(vllm, [spec], folder, together=False) as made:
            said.append(logits(made[spec.name], asked, folder / spec.name))
    found = agreed(*said)
    for lane in said:
        lane.forget()
    return found


def logits(engine: Engine, asked: Asked, folder: Path) -> Said:
    """What an engine says to the prompts. Logits of 262,144 tokens are a megabyte a position: `forget` them."""
    folder.mkdir(parents=True, exist_ok=True)
    said = Said(folder.absolute(), {})
    answers: dict[str, Mapping[str, object]] = {}
    for n in asked.lengths:
        case = f"prefill {n}"
        answers[case] = engine.ask("prefill_logits", length=n, seed=asked.seed, path=str(said.path(case)))
    for b in asked.batches:
        case = f"decode {b}"
        answers[case] = engine.ask(
            "decode_logits", batch=b, context=asked.context, new=asked.steps, seed=asked.seed, path=str(said.path(case))
        )
    return Said(said.folder, answers)


def agreed(stock: Said, other: Said) -> tuple[Agreement, ...]:
    """Of each case how far the other lane is from stock. Raises ServingError as `compare` does."""
    found = []
    for case, answer in stock.answers.items():
        ours, theirs = (np.load(said.path(case), mmap_mode="r") for said in (stock, other))
        tokens = [np.array(a["tokens"]) for a in (answer, other.answers[case]) if "tokens" in a]
        found.append(compare(case, ours, theirs, *tokens))
    return tuple(found)


def compare(
    case: str,
    stock: NDArray[np.float32],
    other: NDArray[np.float32],
    stock_tokens: NDArray[np.int64] | None = None,
    other_tokens: NDArray[np.int64] | None = None,
) -> Agreement:
    """Of logits [positions, vocabulary], or of a greedy decode [steps, batch, vocabulary] with its tokens [batch, steps].

    A decode's position counts as long as the sequence before it is the same in both lanes. Raises ServingError for logits that are
    not finite: nothing agrees with them.
    """
    counts = np.ones(stock.shape[:-1], dtype=bool)
    same = ""
    if stock_tokens is not None and other_tokens is not None:
        alike = stock_tokens == other_tokens
        counts[1:] = np.logical_and.accumulate(alike, axis=1)[:, :-1].T
        same = f"{int(alike.all(axis=1).sum())} of {len(alike)}"
    pairs = list(zip(stock[counts], other[counts], strict=True))
    if not all(np.isfinite(row).all() for pair in pairs for row in pair):
        raise ServingError(
            f"{case}: logits that are not finite. Look at the model's weights, or leave parts of the plugin out"
        )
    away = [np.abs(a - b) for a, b in pairs]
    kl = [_kl(a, b) for a, b in pairs]
    top1 = [a.argmax() == b.argmax() for a, b in pairs]
    return Agreement(
        case, len(pairs), float(max(d.max() for d in away)), float(np.mean([d.mean() for d in away])), float(np.mean(kl)),
        float(max(kl)), float(np.mean(top1)), same,
    )  # fmt: skip


def _kl(stock: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    p, q = (_log_softmax(x.astype(np.float64)) for x in (stock, other))
    return max(0.0, float((np.exp(p) * (p - q)).sum()))


def _log_softmax(x: NDArray[np.float64]) -> NDArray[np.float64]:
    x = x - x.max()
    shifted: NDArray[np.float64] = x - np.log(np.exp(x).sum())
    return shifted


# ---------------------------------------------------------------------------------------------------------- GSM8K
def why_no_gsm8k(vllm: Vllm, load_format: str) -> str:
    """Why GSM8K says nothing here, "" when it does."""
    if load_format in RANDOM_FORMATS:
        return f"weights are random (--load-format {load_format}): GSM8K needs a model's own"
    if not vllm.lm_eval:
        return f"lm_eval is not installed for {vllm.python}. Install it: {vllm.python} -m pip install 'lm_eval[api]'"
    return ""


def gsm8k(vllm: Vllm, spec: Spec, folder: Path, limit: int, told: Told) -> dict[str, float]:
    """GSM8K's exact match (strict and flexible) of a lane, by lm-eval against its server. `limit`: questions; 0: all.

    Raises ServingError when the server or lm-eval fails.
    """
    folder = (folder / f"gsm8k-{spec.name}").absolute()
    told(f"lane {spec.name}: starting its server for GSM8K")
    with serving(
        vllm, spec.model, spec.flags, spec.use, folder / "server.log", f"the server of lane {spec.name}", spec.environment
    ) as ready:  # fmt: skip
        model = f"model={spec.model},base_url={ready.url}/v1/completions,num_concurrent=32,tokenized_requests=False"
        command = vllm.module(
            "lm_eval", "--model", "local-completions", "--model_args", model, "--tasks", "gsm8k", "--output_path", str(folder),
            *(("--limit", str(limit)) if limit else ()),
        )  # fmt: skip
        with running(command, folder / "lm_eval.log", "lm_eval") as child:
            if child.wait(EVAL_LIMIT_S):
                raise child.died("running GSM8K")
    written = sorted(folder.rglob("results*.json"), key=lambda p: p.stat().st_mtime)
    if not written:
        raise ServingError(f"lm_eval wrote no results below {folder}: see {folder / 'lm_eval.log'}")
    scores = json.loads(written[-1].read_text(encoding="utf-8"))["results"]["gsm8k"]
    return {k: v for k, v in scores.items() if k.startswith("exact_match") and isinstance(v, float)}


def worst(found: Sequence[Agreement]) -> Agreement:
    """The case whose mean KL is greatest."""
    return max(found, key=lambda a: a.kl_mean)
