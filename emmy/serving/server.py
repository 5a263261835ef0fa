"""A server of one lane: started on a free port, awaited, measured, stopped."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from emmy.errors import ServingError, UsageError
from emmy.serving import process
from emmy.serving.command import Using, serve_words, value_of
from emmy.serving.installed import Vllm
from emmy.serving.process import Child, free_port, is_free, is_ready, running

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


@dataclass(frozen=True, slots=True)
class Starting:
    """A server that was started. `began`: when, by the monotonic clock."""

    url: str
    began: float
    child: Child
    model: str
    flags: tuple[str, ...]

    def look(self, limit_s: float) -> Ready | None:
        """Itself, once it answers. Raises ServingError when it has ended, or takes longer than that."""
        took = time.monotonic() - self.began
        return (
            Ready(self.url, took, self.child, self.model, self.flags)
            if is_ready(self.child, self.url, took, limit_s)
            else None
        )


@contextmanager
def started(
    vllm: Vllm,
    model: str,
    flags: Sequence[str],
    use: Using | None,
    log: Path,
    what: str,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Starting]:
    """A server that is not ready yet, until the block is left. Raises UsageError when the flags name a port that is taken."""
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
    began = time.monotonic()
    with running(vllm.command(*serve_words(model, flags, use)), log, what, environment) as child:
        yield Starting(url, began, child, model, tuple(flags))


def all_ready(servers: Mapping[str, Starting], limit_s: float) -> dict[str, Ready | ServingError]:
    """Each server once it answers, or why it never will, by name, in the order in which that was known."""
    found: dict[str, Ready | ServingError] = {}
    while waiting := [name for name in servers if name not in found]:
        for name in waiting:
            try:
                if ready := servers[name].look(limit_s):
                    found[name] = ready
            except ServingError as e:
                found[name] = e
        if len(found) < len(servers):
            time.sleep(process.POLL_S)
    return found


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
    with started(vllm, model, flags, use, log, what, environment) as server:
        found = all_ready({what: server}, ready_limit_s)[what]
        if isinstance(found, ServingError):
            raise found
        yield found
