"""An engine of vLLM in this process that does what it is asked, line by line: `python -m emmy_vllm.engine`, started by `emmy bench`.

Reads requests from stdin and answers on what was stdout, one JSON object a line; all else that this process prints goes to stderr.
The first request holds the engine's flags, as `vllm serve` takes them; `emmy/serving/engine.py` is the other end.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    import torch
    from vllm import LLM, EngineArgs, RequestOutput

FIRST_WORD = 4  # ids below are special ones in most vocabularies


@dataclass(slots=True)
class Engine:
    """A loaded model. Prompts are drawn from seeds, so that two engines that are asked alike see the same ones."""

    llm: LLM
    vocabulary: int
    _logits: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def start(cls, model: str, flags: Sequence[str]) -> Engine:
        """The engine that `vllm serve MODEL FLAGS` would have, in this process. Flags of the server alone are passed over."""
        from vllm import LLM

        llm = LLM.from_engine_args(engine_args(model, flags))
        return cls(llm, llm.llm_engine.model_config.get_vocab_size())

    def answer(self, request: Mapping[str, object]) -> dict[str, object]:
        """What one request asks for."""
        tasks: dict[str, Callable[..., dict[str, object]]] = {
            "time": self.time_ms,
            "launches": self.launches,
            "prefill_logits": self.prefill_logits,
            "decode_logits": self.decode_logits,
        }
        return tasks[str(request["do"])](**{k: v for k, v in request.items() if k != "do"})

    def time_ms(self, batch: int, context: int, new: int, seed: int) -> dict[str, object]:
        """Milliseconds from handing in `batch` prompts of `context` tokens until each has `new` tokens."""
        prompts = self._prompts(batch, context, seed)
        began = time.perf_counter()
        self._generate(prompts, new)
        return {"ms": 1e3 * (time.perf_counter() - began)}

    def launches(self, batch: int, context: int, new: int) -> dict[str, object]:
        """Kernels of a decode step on a GPU, those inside CUDA graphs included; None on a CPU."""
        import torch

        if not torch.cuda.is_available():
            return {"kernels": None}
        counts = [self._kernels(batch, context, n) for n in (new + 1, 1)]
        return {"kernels": (counts[0] - counts[1]) / new}

    def _kernels(self, batch: int, context: int, new: int) -> int:
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        prompts = self._prompts(batch, context, 0)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            self._generate(prompts, new)
        on_device = (e.name for e in seen.events() if e.device_type == DeviceType.CUDA)
        return sum(not name.startswith(("Memcpy", "Memset")) for name in on_device)

    def prefill_logits(self, length: int, seed: int, path: str) -> dict[str, object]:
        """Writes float32 logits [length, vocabulary] of a prompt, of the next token after each position, as .npy."""
        self._capture()
        self._generate(self._prompts(1, length, seed), 1, of_prompt=True)
        # The runner asks for the last position first, to draw the next token, then for the prompt's, the last among them or not.
        drawn, *rest = self._logits
        found = [*rest, *([drawn] if sum(map(len, rest)) < length else [])]
        return self._written(path, found, length)

    def decode_logits(self, batch: int, context: int, new: int, seed: int, path: str) -> dict[str, object]:
        """Writes float32 logits [new, batch, vocabulary] of a greedy decode; answers with the tokens [batch][new] that came."""
        self._capture()
        outputs = self._generate(self._prompts(batch, context, seed), new)
        tokens = [list(o.outputs[0].token_ids) for o in outputs]
        return {**self._written(path, self._logits, new, batch), "tokens": tokens}

    def _capture(self) -> None:
        """From now on what `compute_logits` gives is kept, in the order of its calls."""
        import torch

        self._logits.clear()
        kept = self._logits

        def wrap(model: torch.nn.Module) -> None:
            plain = model.compute_logits
            if getattr(plain, "is_captured", False):
                return

            def compute_logits(*args: object, **options: object) -> torch.Tensor | None:
                logits: torch.Tensor | None = plain(*args, **options)
                if logits is not None:
                    kept.append(logits.detach().to("cpu", torch.float32, copy=True))
                return logits

            compute_logits.is_captured = True  # type: ignore[attr-defined]
            model.compute_logits = compute_logits

        self.llm.apply_model(wrap)

    def _written(self, path: str, found: Sequence[torch.Tensor], *shape: int) -> dict[str, object]:
        import numpy as np
        import torch

        kept = torch.cat(list(found))
        self._logits.clear()
        if len(kept) != (rows := math.prod(shape)):
            raise RuntimeError(
                f"{len(kept)} rows of logits came, {rows} were expected: the prompts did not fit one step"
            )
        np.save(path, kept[:, : self.vocabulary].reshape(*shape, -1).numpy())
        return {"rows": rows}

    def _prompts(self, batch: int, length: int, seed: int) -> list[dict[str, list[int]]]:
        draw = random.Random(seed)
        return [
            {"prompt_token_ids": [draw.randrange(FIRST_WORD, self.vocabulary) for _ in range(length)]}
            for _ in range(batch)
        ]

    def _generate(self, prompts: list[dict[str, list[int]]], new: int, of_prompt: bool = False) -> list[RequestOutput]:
        from vllm import SamplingParams

        how = SamplingParams(
            temperature=0,
            max_tokens=new,
            ignore_eos=True,
            detokenize=False,
            prompt_logprobs=0 if of_prompt else None,
        )
        outputs: list[RequestOutput] = self.llm.generate(prompts, how, use_tqdm=False)
        return outputs


def engine_args(model: str, flags: Sequence[str]) -> EngineArgs:
    """What an engine is made of, as `vllm serve` would have it of these flags; those of the server alone are passed over."""
    from vllm import EngineArgs

    from emmy_vllm.compat import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        """`parse_args` alone knows all spellings, -O3, --a_b and -cc.a=b, and asks this for the rest, of which there is none."""

        def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
            return super().parse_known_args(args, namespace)[0], []

    words = ["--model", model, "--skip-tokenizer-init", *flags]
    made: EngineArgs = EngineArgs.from_cli_args(EngineArgs.add_cli_args(Parser()).parse_args(words))
    return made


def main() -> int:
    """Serves the requests on stdin until it ends. 1 when one of them failed, which its answer says too."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        began = time.perf_counter()
        first = json.loads(sys.stdin.readline())
        import vllm  # noqa: F401  # timed by itself

        imported = time.perf_counter()
        engine = Engine.start(first["model"], first["flags"])
        ready = time.perf_counter()
        _say(answers, {"import_s": imported - began, "init_s": ready - imported})
        for line in sys.stdin:
            _say(answers, engine.answer(json.loads(line)))
    except Exception as e:  # noqa: BLE001  # a process's edge: whoever asked must hear of it
        traceback.print_exc()
        _say(answers, {"error": f"{type(e).__name__}: {e}"})
        return 1
    return 0


def _say(answers: TextIO, answer: Mapping[str, object]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    sys.exit(main())
