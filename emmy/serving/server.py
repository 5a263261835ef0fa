"""A server of one lane: started on a free port, awaited, measured, stopped."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from emmy.errors import UsageError
from emmy.serving.command import Using, serve_words, value_of
from emmy.serving.installed import Vllm
from emmy.serving.process import Child, await_health, free_port, is_free, running

READY_LIMIT_S = 1800.0
_LINE = r"^\W*(?:\(.*?\) )?\w+ [\d: -]+\[[\w./]+:\d+\] "
# What vLLM says of its choices while it starts; kept beside the numbers.
_CHOICES = re.compile(
    rf"{_LINE} *(Emmy serves .*|.*\b(?:Using|forcing)\b.*\b(?:backend|FlashAttention version)\b.*)$", re.MULTILINE
)
_COVERAGE = re.compile(rf"{_LINE}Emmy serves .*\n((?:{_LINE}  .*\n)*)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Ready:
    """A server that answers. `choices`: lines of its log that say which backends it took, and which pack; `coverage`: what the plugin
    says that the pack serves, of the first worker.
    """

    url: str
    startup_s: float
    child: Child
    model: str
    flags: tuple[str, ...]

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(line.strip() for line in _CHOICES.findall(self._text())))[:12]

    @property
    def coverage(self) -> tuple[str, ...]:
        said = _COVERAGE.search(self._text())
        return tuple(re.sub(_LINE, "", line) for line in said[1].splitlines()) if said else ()

    def _text(self) -> str:
        return self.child.log.read_text(encoding="utf-8", errors="replace")


def _reached(host: str) -> str:
    """How a server that listens there is reached from here, as URLs name it."""
    here = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{here}]" if ":" in here else here


@contextmanager
def serving(
    vllm: Vllm,
    model: str,
    flags: Sequence[str],
    use: Using | None,
    log: Path,
    what: str,
    environment: Mapping[str, str] | None = None,
    ready_limit_s: float = READY_LIMIT_S,
) -> Iterator[Ready]:
    """A server that is ready, until the block is left.

    Raises UsageError when the flags name a port that is taken, ServingError when the server dies or is not ready in time.
    """
    flags = list(flags)
    if (named := value_of(flags, "--port")) is None:
        port = free_port()
        flags += ["--port", str(port)]
    else:
        port = int(named) if named.isdecimal() else 0
        if not 0 < port < 65536 or not is_free(port):
            raise UsageError(f"--port {named}: taken, or no port. Leave it out, and a free one is chosen")
    if value_of(flags, "--host") is None:
        flags += ["--host", "127.0.0.1"]
    url = f"http://{_reached(value_of(flags, '--host') or '')}:{port}"
    log.unlink(missing_ok=True)  # the lines of an earlier start would be taken for this one's
    with running(vllm.command(*serve_words(model, flags, use)), log, what, environment) as child:
        yield Ready(url, await_health(child, url, ready_limit_s), child, model, tuple(flags))
