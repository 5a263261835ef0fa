"""Engines in processes of their own: turns on one device, agreement of logits, and what a failure says."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from emmy.errors import ServingError
from emmy.serving.compare import entries
from emmy.serving.engine import Spec
from emmy.serving.experiment import Changes, read_experiment
from emmy.serving.installed import Vllm
from emmy.serving.offline import InProcess
from emmy.serving.quality import Asked, agreements, compare, why_no_gsm8k
from emmy.serving.results import Results
from tests.serving.conftest import Fake

HERE = Vllm(sys.executable, "0.32.0", "2.13.0", "", True)
OFFLINE = "\n[offline]\nprefill = [64]\ndecode = [2]\nsteps = 4\nrounds = 2\nmemory = 0.8\nkv_gib = 1.5\n"
Write = Callable[..., Path]


def in_process(path: Path, tmp_path: Path) -> InProcess:
    return InProcess(read_experiment(path, Changes(waves=1)), HERE, Results.open(tmp_path / "out"), "a card", print)


def test_engines_of_a_group_take_turns_on_the_same_prompts(vllm: Fake, experiment: Write, tmp_path: Path) -> None:
    here = in_process(experiment(OFFLINE), tmp_path)
    assert here.run() == 0
    timed = [(c["pid"], c["seed"]) for c in vllm.calls if c.get("do") == "time"]
    prefill = timed[:8]  # two that do not count, two rounds, of two engines
    assert len({pid for pid, _ in prefill[:2]}) == 2 and [s for _, s in prefill] == [0, 0, 1, 1, 2, 2, 3, 3]
    flags = [c["argv"] for c in vllm.calls if "do" not in c]
    assert all("0.4000" in f and str(int(1.5 * 2**30)) in f for f in flags)  # type: ignore[operator]
    found = {(e.point, e.lane): e for e in entries(here.results.rows)}
    assert found["prefill 64", "stock"].figures["ms"] == 110 and found["decode 2", "stock"].figures["ms"] == 10
    assert found["decode 2", "emmy"].figures["kernels_a_step"] == 700
    assert str(found["decode 2", "emmy"].ratios["ms"]) == "2.000"
    n = len(vllm.calls)
    assert in_process(experiment(OFFLINE), tmp_path).run() == 0 and len(vllm.calls) == n


def test_engines_that_were_timed_also_say_how_far_their_logits_are_from_stocks(
    vllm: Fake, experiment: Write, tmp_path: Path
) -> None:
    vllm.behaves(noise=3)
    asked = Asked((4,), (2,), 4, 3)
    here = replace(in_process(experiment(OFFLINE), tmp_path), asked=asked)
    assert here.run() == 0
    said = {e.point: e for e in entries(here.results.rows) if e.kind == "quality"}
    assert set(said) == {"prefill 4", "decode 2"} and all(e.lane == "emmy" for e in said.values())
    assert said["prefill 4"].figures["kl_mean"] > 0.5 and said["decode 2"].figures["same_sequences"] == 1.0
    assert len({c["pid"] for c in vllm.calls}) == 2 and not list((tmp_path / "out").rglob("*.npy"))
    n = len(vllm.calls)
    again = replace(in_process(experiment(OFFLINE), tmp_path), asked=asked)
    assert again.run() == 0 and len(vllm.calls) == n
    vllm.behaves(fail_at="decode_logits")
    failing = replace(again, asked=replace(asked, seed=1))
    assert failing.run() == 1 and [r.lane for r in failing.results.rows if r.status == "failed"] == ["emmy"]


@pytest.mark.parametrize(
    ("wrongly", "why"),
    [
        ({"die_at": "launches"}, "ended with code 9.*out of memory"),
        ({"fail_at": "time"}, "RuntimeError: no such thing"),
    ],
)
def test_an_engine_that_fails_is_told_of_and_costs_what_was_not_measured(
    vllm: Fake, experiment: Write, tmp_path: Path, wrongly: dict[str, object], why: str
) -> None:
    vllm.behaves(**wrongly)
    here = in_process(experiment(OFFLINE), tmp_path)
    assert here.run() == (1 if "die_at" in wrongly else 2)
    failed = [r for r in here.results.rows if r.status == "failed"]
    assert len(failed) == 2
    with pytest.raises(ServingError, match=f"(?s){why}"):
        raise ServingError(failed[0].message)


def test_an_engine_that_does_not_start_says_why(vllm: Fake, tmp_path: Path) -> None:
    gone = Vllm(sys.executable, "0.32.0", "", "", True)
    (tmp_path / "site" / "emmy_vllm" / "engine.py").write_text("raise SystemExit('no card')")
    spec = Spec("stock", "m", (), None, {})
    with pytest.raises(ServingError, match=r"(?s)asked for its start.*no card"):
        agreements(gone, spec, spec, Asked((4,), (), 4, 2, 0), tmp_path, print)


@pytest.mark.parametrize(("noise", "kl"), [pytest.param(0, 0.0, marks=pytest.mark.slow), (3, 0.5)])
def test_agreement_is_exact_for_the_same_and_grows_with_a_difference(
    vllm: Fake, tmp_path: Path, pack: Path, noise: int, kl: float
) -> None:
    from emmy.serving.command import using

    vllm.behaves(noise=noise)
    stock, emmy = Spec("stock", "m", (), None, {}), Spec("emmy", "m", (), using(pack), {})
    found = agreements(HERE, stock, emmy, Asked((5,), (2,), 4, 3, 0), tmp_path, print)
    assert [(a.case, a.positions) for a in found] == [("prefill 5", 5), ("decode 2", 6)]
    assert found[1].same_tokens == "2 of 2"
    assert all((a.kl_mean > kl) == bool(noise) and a.max_abs == pytest.approx(noise) for a in found)
    assert (found[0].top1 == 1.0) == (not noise)


def test_kl_and_top1_of_known_distributions() -> None:
    stock = np.log(np.array([[0.5, 0.5], [0.75, 0.25]], dtype=np.float32))
    other = np.log(np.array([[0.5, 0.5], [0.25, 0.75]], dtype=np.float32)) + 7  # a constant changes no distribution
    found = compare("x", stock, other)
    assert found.kl_max == pytest.approx(0.5 * np.log(3), rel=1e-5) and found.kl_mean == pytest.approx(found.kl_max / 2)
    assert found.top1 == 0.5


def test_a_decode_counts_until_the_sequences_differ() -> None:
    logits = np.zeros((3, 2, 4), dtype=np.float32)
    far = logits.copy()
    far[2, 0, 1] = 100  # after sequence 0 went its own way
    tokens = np.array([[1, 1, 1], [2, 2, 2]]), np.array([[1, 3, 1], [2, 2, 2]])
    found = compare("x", logits, far, *tokens)
    assert (found.positions, found.same_tokens, found.max_abs) == (5, "1 of 2", 0.0)


def test_nothing_agrees_with_logits_that_are_not_finite() -> None:
    bad = np.full((1, 3), np.nan, dtype=np.float32)
    with pytest.raises(ServingError, match="not finite"):
        compare("x", bad, bad)


def test_gsm8k_needs_real_weights_and_lm_eval() -> None:
    assert "random" in why_no_gsm8k(HERE, "emmy_random")
    assert "lm_eval[api]" in why_no_gsm8k(HERE, "auto")
    assert why_no_gsm8k(Vllm("p", "0.32.0", "", "0.4.9", True), "auto") == ""


@pytest.mark.slow
def test_gsm8k_runs_through_each_lanes_server(vllm: Fake, tmp_path: Path, pack: Path) -> None:
    from emmy.serving.command import using
    from emmy.serving.quality import gsm8k

    lm_eval = tmp_path / "site" / "lm_eval"
    lm_eval.mkdir()
    (lm_eval / "__main__.py").write_text(
        "import json, sys, urllib.request\nfrom pathlib import Path\na = sys.argv\nv = lambda n: a[a.index(n) + 1]\n"
        "url = dict(x.split('=', 1) for x in v('--model_args').split(','))['base_url']\n"
        "said = urllib.request.urlopen(url).read()\n"
        "out = Path(v('--output_path')) / 'm'; out.mkdir(parents=True)\n"
        "score = {'alias': 'gsm8k', 'exact_match,strict-match': 0.5 if said == b'emmy' else 0.25, 'exact_match_stderr,strict-match': 0.1}\n"
        "(out / 'results_1.json').write_text(json.dumps({'results': {'gsm8k': score}, 'n': v('--limit')}))\n"
    )
    for name, use, score in (("stock", None, 0.25), ("emmy", using(pack), 0.5)):
        found = gsm8k(HERE, Spec(name, "m", (), use, {}), tmp_path, 3, print)
        assert found["exact_match,strict-match"] == score
    assert vllm.order == ["serve stock", "stopped", "serve emmy", "stopped"]
