"""The near end of an engine of vLLM in a process of its own (`emmy_vllm.engine`): asks, and waits for the answer."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from emmy.errors import ServingError
from emmy.serving.command import Using, serve_words
from emmy.serving.installed import Vllm
from emmy.serving.process import Child, running

# One process, whose GPU is idle between requests; the plugin is loaded in it as in a server's workers.
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}


@dataclass(slots=True)
class Engine:
    """One lane's engine. `facts`: what it said of its start, `import_s` and `init_s` once it is ready."""

    child: Child
    facts: dict[str, object]

    def ask(self, do: str, **arguments: object) -> Mapping[str, object]:
        """The answer to a request. Raises ServingError when the engine fails at it or is gone."""
        self.say({"do": do, **arguments})
        return self.hear(do)

    def say(self, request: Mapping[str, object]) -> None:
        assert self.child.process.stdin is not None
        try:
            self.child.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.child.process.stdin.flush()
        except BrokenPipeError:
            self.child.process.wait()
            raise self.child.died("waiting for a request") from None

    def hear(self, doing: str) -> Mapping[str, object]:
        assert self.child.process.stdout is not None
        line = self.child.process.stdout.readline()
        if not line.endswith(b"\n"):
            self.child.process.wait()
            raise self.child.died(f"asked for {doing}")
        answer = json.loads(line)
        if "error" in answer:
            raise ServingError(
                f"{self.child.what} failed when asked for {doing}: {answer['error']}. The end of {self.child.log}:\n{self.child.tail()}"
            )
        return dict(answer)


@dataclass(frozen=True, slots=True)
class Spec:
    """What an engine is started with."""

    name: str
    model: str
    flags: tuple[str, ...]
    use: Using | None
    environment: Mapping[str, str]


@contextmanager
def engines(vllm: Vllm, specs: Sequence[Spec], folder: Path, *, together: bool) -> Iterator[dict[str, Engine]]:
    """An engine of each, by name, all of them ready, until the block is left. `together`: they start at the same time."""
    with ExitStack() as stack:
        made: dict[str, Engine] = {}
        for spec in specs:
            made[spec.name] = stack.enter_context(_engine(vllm, spec, folder))
            if not together:
                made[spec.name].facts.update(made[spec.name].hear("its start"))
        for engine in made.values():
            if together:
                engine.facts.update(engine.hear("its start"))
        yield made


@contextmanager
def _engine(vllm: Vllm, spec: Spec, folder: Path) -> Iterator[Engine]:
    log = folder / f"engine-{spec.name}.log"
    log.unlink(missing_ok=True)
    words = serve_words(spec.model, spec.flags, spec.use)[2:]
    with running(
        vllm.module("emmy_vllm.engine"), log, f"the engine of lane {spec.name}", {**ENVIRONMENT, **spec.environment},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as child:  # fmt: skip
        engine = Engine(child, {})
        engine.say({"model": spec.model, "flags": words})
        yield engine
