"""Whether a pack is sound: digests, sources that give the same binaries again, and kernels that give the right answers.

On the pack's card every kernel runs, between red zones, against float64. Where the card is not, a schedule's exact text runs on
the emulator, at a reduced size. A kernel that kills the process kills the check: run it in one of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from emmy import config, hostcc
from emmy.codegen import gcc
from emmy.codegen.build import source
from emmy.codegen.nvrtc import compile_cubin, nvrtc_version
from emmy.errors import CompileError, EmmyError, NoSuchDevice, PackError, WrongCard
from emmy.ir.ops import parse_op
from emmy.ir.target import load_target
from emmy.measure.check import Checker
from emmy.measure.device import Device
from emmy.measure.references import References
from emmy.pack import Code, Pack, Served
from emmy.pack.archive import sha256
from emmy.pack.machine import cpu_target, machine_for, refuse_card

Depth = Literal["digests", "rebuild", "run"]
DEPTHS: tuple[Depth, ...] = ("digests", "rebuild", "run")  # each after those before it


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of one range. Each of the three: "ok", "not done: why", or what is wrong.

    ran:   "on NVIDIA H200", "on the emulator, as OP", or ""
    error: the largest, in units of what is allowed
    """

    op: str
    sizes: str
    digests: str
    rebuild: str
    answers: str
    ran: str
    error: float | None

    @property
    def faults(self) -> tuple[str, ...]:
        said = (self.digests, self.rebuild, self.answers)
        return tuple(x for x in said if x != "ok" and not x.startswith("not done"))


def verify(pack: Pack, depth: Depth = "run", only: str = "*", emulate: bool = True) -> Iterator[Finding]:
    """What is found of each range that has code, one after another, those of one source once.

    only:    ops whose text matches
    emulate: where the card is not, run on the emulator, which may take a minute a kernel
    """
    chosen = [(r.op, r, r.code) for c in pack.cases if fnmatchcase(c.op, only) for r in c.ranges if r.code]
    once = {code.source: (op, r, code) for op, r, code in chosen}
    run = _runner(pack, emulate) if depth == "run" else _not_asked
    rebuild = _rebuilder(pack) if depth != "digests" else lambda code: "not done: not asked for"
    for op, r, code in once.values():
        answers, ran, error = run(r, code)
        yield Finding(op, r.sizes, _digests(pack, code), rebuild(code), answers, ran, error)


def count(pack: Pack, only: str = "*") -> int:
    """How many findings there will be."""
    return len({r.code.source for c in pack.cases if fnmatchcase(c.op, only) for r in c.ranges if r.code})


def _digests(pack: Pack, code: Code) -> str:
    try:
        pack.source(code)
        pack.binary(code)
    except (PackError, CompileError) as e:
        return str(e)
    return "ok"


# ---------------------------------------------------------------- the same binary again
def _rebuilder(pack: Pack) -> Callable[[Code], str]:
    """Compiles a source anew and compares; only the same compiler must give the same bytes."""
    card, made_with = pack.manifest.card, pack.manifest.toolkit
    try:
        toolkit = hostcc.version(config.c_compiler()) if card.is_cpu else f"nvrtc {nvrtc_version()}"
        target = cpu_target(card, machine_for(card)) if card.is_cpu else load_target(card.target)
    except EmmyError as e:
        why = f"not done: {str(e).splitlines()[0]}"
        return lambda code: why
    if (other := target.isa) and other != card.isa:
        return lambda code: f"not done: this CPU has {other}, the pack needs {card.isa}"

    def rebuild(code: Code) -> str:
        try:
            text = pack.source(code)
            if card.is_cpu:
                data = gcc.compile_text(text, target, fresh=True).path.read_bytes()
            else:
                data = compile_cubin(text, card.arch, fresh=True).data
        except EmmyError as e:
            return str(e)
        if sha256(data) == code.binary:
            return "ok"
        if toolkit != made_with:
            return f"not done: built with {made_with}, here is {toolkit}, which gives another binary"
        return f"{toolkit} gives another binary: sha256 {sha256(data)[:16]}..., the pack has {code.binary[:16]}..."

    return rebuild


# ---------------------------------------------------------------- answers
Answer = tuple[str, str, float | None]


def _not_asked(r: Served, code: Code) -> Answer:
    return "not done: not asked for", "", None


def _runner(pack: Pack, emulate: bool) -> Callable[[Served, Code], Answer]:
    try:
        device = _device(pack)
    except (NoSuchDevice, WrongCard) as e:
        if emulate and not pack.manifest.card.is_cpu:
            return lambda r, code: _emulated(pack, r, code)
        why = f"not done: {e}"
        return lambda r, code: (why, "", None)
    checkers, ran = dict[str, Checker](), f"on {pack.here.product}"

    def run(r: Served, code: Code) -> Answer:
        op = parse_op(r.op)
        if r.op not in checkers:
            checkers.clear()  # operands of one op may fill half of the card
            checkers[r.op] = Checker(device, device.answers(op), op)
        try:
            plan = device.load(str(pack.library(code)))
            found = checkers[r.op].check(plan, lambda what, risky: None, code.accumulate)
        except EmmyError as e:
            return str(e), ran, None
        return found.wrong or "ok", ran, found.error_norm

    return run


def _device(pack: Pack) -> Device:
    """The pack's own card, or a CPU. Raises NoSuchDevice or WrongCard."""
    card = pack.manifest.card
    here, references = pack.here, References(config.cache_dir() / "references")
    if not card.is_cpu:
        refuse_card(pack.manifest, here)
    if card.is_cpu:
        from emmy.measure.cpu_device import CpuDevice

        return CpuDevice(cpu_target(card, here), 1, references)
    from emmy.measure.cuda_device import CudaDevice

    return CudaDevice(references, os.getpid())


def _emulated(pack: Pack, r: Served, code: Code) -> Answer:
    from emmy.search.emulator_check import check

    op, target = parse_op(r.op), load_target(pack.manifest.card.target)
    try:
        if source(op, r.schedule, target).digest != code.source:
            return "not done: this Emmy generates another source", "", None
        found = check(op, r.schedule, target)
    except EmmyError as e:
        return str(e), "on the emulator", None
    if not found.op:
        return f"not done: {found.wrong}", "", None
    return found.wrong or "ok", f"on the emulator, as {found.op}", None
