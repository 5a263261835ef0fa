"""Schedules and what is known of them -> a pack. Who serves a size is decided by whoever calls; what cannot be built is stock's."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from emmy import __version__, config, hostcc
from emmy.codegen import gcc
from emmy.codegen.build import SourceUnit, plan_source
from emmy.codegen.cpu import buffers
from emmy.codegen.gpu_plan import plan_lines
from emmy.codegen.kernel import evaluated
from emmy.codegen.kernel_gpu import GpuKernel
from emmy.codegen.nvrtc import compile_cubin, nvrtc_version
from emmy.errors import CompileError, PlanError, UsageError
from emmy.ir.dtype import size_bytes
from emmy.ir.gpu import accumulation
from emmy.ir.ops import Op
from emmy.ir.schedule import replay
from emmy.ir.target import Target
from emmy.pack import archive
from emmy.pack.schema import FORMAT, LICENCE, SCHEMA, Card, Case, Code, Evidence, Manifest, Served
from emmy.pack.sound import arguments_of
from emmy.records import source_mark

Progress = Callable[[str, int, int], None]  # what, done, of


@dataclass(frozen=True, slots=True)
class Choice:
    """Sizes lo..hi, 0..0 where none is open, and the op of them under a schedule. `why` the stock kernel serves them; "" = it does not."""

    lo: int
    hi: int
    op: Op
    schedule: str
    why: str
    evidence: Evidence | None = None


@dataclass(frozen=True, slots=True)
class Offer:
    """An op and the choices for all of its sizes, ascending and without gaps. `symbol`: the open size, "" without one."""

    op: Op
    symbol: str
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class Built:
    """A pack that was written. `digest` is its identity; `unbuilt`: ranges left to stock because their code did not come out."""

    path: Path
    digest: str
    n_bytes: int
    manifest: Manifest
    unbuilt: tuple[Served, ...]


def build(
    offers: Sequence[Offer], path: Path, target: Target, workers: int = 0, on_progress: Progress = lambda *_: None
) -> Built:
    """Compiles what the offers choose, each source once, and writes the pack. The same offers give the same bytes.

    workers: threads that compile; 0 = one a core
    Raises CompileError when there is no compiler, UsageError for no offers, PackError when the file cannot be written.
    """
    if not offers:
        raise UsageError("a pack of no op: name at least one")
    toolkit = hostcc.version(config.c_compiler()) if target.is_cpu else f"nvrtc {nvrtc_version()}"
    members: dict[str, bytes] = {}
    card = Card(target.name, target.product, target.arch, target.isa or "")
    ordered = sorted({o.op.key: o for o in offers}.values(), key=lambda o: o.op.key)
    todo = [c for o in ordered for c in o.choices]
    served: list[Served] = []
    unbuilt: list[Served] = []
    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0)), "pack") as pool:
        for c, made in zip(todo, pool.map(lambda c: _compiled(c, target), todo), strict=True):
            served.append(Served(c.lo, c.hi, c.op.key, made if isinstance(made, str) else "", c.schedule,
                                 None if isinstance(made, str) else made.code, c.evidence))  # fmt: skip
            if not c.why and isinstance(made, str):
                unbuilt.append(served[-1])
            on_progress(f"compiling for {target.name}", len(served), len(todo))
            if not isinstance(made, str):
                members |= made.members(card)
    at = iter(served)
    cases = tuple(
        Case(o.op.key, o.symbol, arguments_of(o.op.program()), tuple(next(at) for _ in o.choices)) for o in ordered
    )
    found = [r.evidence for r in served if r.evidence and r.code]
    manifest = Manifest(
        FORMAT, SCHEMA, LICENCE, __version__, card, toolkit, any(e.origin == "predicted" for e in found),
        max((e.time_utc for e in found), default=""), cases,
    )  # fmt: skip
    text = manifest.to_json()
    archive.write(path, text, members)
    return Built(path, archive.sha256(text), path.stat().st_size, manifest, tuple(unbuilt))


@dataclass(frozen=True, slots=True)
class _Made:
    code: Code
    source: bytes
    binary: bytes

    def members(self, card: Card) -> dict[str, bytes]:
        where = Manifest(FORMAT, SCHEMA, LICENCE, "", card, "", False, "", ())
        return {where.source_name(self.code): self.source, where.binary_name(self.code): self.binary}


def _compiled(choice: Choice, target: Target) -> _Made | str:
    """The code of a choice, or why the stock kernel serves instead."""
    if choice.why:
        return choice.why
    try:
        unit = plan_source(replay(choice.op.program(), choice.schedule, target), target)
        if choice.evidence and source_mark(choice.evidence.source) != source_mark(unit.digest):
            return "its schedule makes another source now than the one that was timed: tune again"
        binary = _binary(unit, target)
    except (PlanError, CompileError) as e:
        return f"it cannot be built: {str(e).splitlines()[0]}"
    return _Made(code_of(unit, target, binary), unit.text.encode(), binary)


def code_of(unit: SourceUnit, target: Target, binary: bytes) -> Code:
    """What a manifest says of a plan's kernels, of which the binary is."""
    lines = () if target.is_cpu else plan_lines(unit.plan, tuple(k for k in unit.kernels if isinstance(k, GpuKernel)))
    n_bytes = len(unit.text.encode())
    return Code(
        unit.digest,
        archive.sha256(binary),
        n_bytes,
        len(binary),
        lines,
        _workspace_bytes(unit),
        accumulation(unit.plan),
    )


def _binary(unit: SourceUnit, target: Target) -> bytes:
    if target.is_cpu:
        return gcc.build(unit, target).path.read_bytes()
    cubin = compile_cubin(unit.text, target.arch)
    if cubin.refusal:
        raise CompileError(f"ptxas: {cubin.refusal}")
    return cubin.data


def _workspace_bytes(unit: SourceUnit) -> int:
    """What launches leave for one another, at the largest sizes."""
    most = {f"len_{s.name}": s.hi for s in unit.plan.guard}
    own = (b for b in buffers(unit.plan) if not b.is_argument)
    return sum(size_bytes(b.dtype) * evaluated(b.elements, most) for b in own)
