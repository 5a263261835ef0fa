"""Whether a pack is sound: digests, sources that give the same binaries again, and kernels that give the right answers.

On the pack's card every kernel runs, between red zones, against float64. Where the card is not, a schedule's exact text runs on
the emulator, at a reduced size. A kernel that kills the process kills the check: run it in one of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Literal

from emmy import config, hostcc
from emmy.codegen import gcc
from emmy.codegen.build import source
from emmy.codegen.nvrtc import compile_cubin, nvrtc_version
from emmy.errors import CompileError, EmmyError, NoSuchDevice, PackError, WrongCard
from emmy.ir.ops import parse_op
from emmy.ir.parts import symbol_of
from emmy.ir.target import Target, load_target
from emmy.measure.check import Checker
from emmy.measure.device import Device
from emmy.measure.references import References
from emmy.pack import Code, Pack, Served
from emmy.pack.archive import sha256
from emmy.pack.building import code_of
from emmy.pack.machine import cpu_target, machine_for, refuse_card
from emmy.pack.sound import arguments_of, refuse_kernels
from emmy.runtime.launcher import LoadedPlan

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
    """What is found of each range that has code, one after another, those of one op and code once.

    only:    ops whose text matches
    emulate: where the card is not, run on the emulator, which may take a minute a kernel
    """
    run = _runner(pack, emulate) if depth == "run" else _not_asked
    rebuild = _rebuilder(pack) if depth != "digests" else lambda r, code: "not done: not asked for"
    for r, code in _chosen(pack, only):
        answers, ran, error = run(r, code)
        yield Finding(r.op, r.sizes, _digests(pack, code), rebuild(r, code), answers, ran, error)


def count(pack: Pack, only: str = "*") -> int:
    """How many findings there will be."""
    return len(_chosen(pack, only))


def _chosen(pack: Pack, only: str) -> list[tuple[Served, Code]]:
    """A pack may say anything: that a source is right for one op says nothing of another op that it is named for."""
    chosen = [(r, r.code) for c in pack.cases if fnmatchcase(c.op, only) for r in c.ranges if r.code]
    return list({(r.op, code): (r, code) for r, code in chosen}.values())


def _digests(pack: Pack, code: Code) -> str:
    try:
        pack.source(code)
        pack.binary(code)
    except (PackError, CompileError) as e:
        return str(e)
    return "ok"


# ---------------------------------------------------------------- the same binary again
def _rebuilder(pack: Pack) -> Callable[[Served, Code], str]:
    """Compiles a source anew, once, and compares; only the same compiler must give the same bytes. What the manifest says of a
    kernel is compared too, where its schedule still makes its source."""
    card, made_with = pack.manifest.card, pack.manifest.toolkit
    try:
        toolkit = hostcc.version(config.c_compiler()) if card.is_cpu else f"nvrtc {nvrtc_version()}"
        target = cpu_target(card, machine_for(card)) if card.is_cpu else load_target(card.target)
    except EmmyError as e:
        why = f"not done: {str(e).splitlines()[0]}"
        return lambda r, code: why
    if (other := target.isa) and other != card.isa:
        return lambda r, code: f"not done: this CPU has {other}, the pack needs {card.isa}"

    @cache
    def binary(code: Code) -> str:
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

    return lambda r, code: _why_untrue(r, code, target) or binary(code)


def _why_untrue(r: Served, code: Code, target: Target) -> str:
    """What the manifest says of a kernel that is not so: launches, workspaces, sums. "" where its source is of another Emmy."""
    try:
        unit = source(parse_op(r.op), r.schedule, target)
        made = code_of(unit, target, b"")
    except EmmyError:
        return ""
    said = replace(code, binary=made.binary, binary_bytes=0)
    odd = [f.name for f in fields(Code) if getattr(said, f.name) != getattr(made, f.name)]
    return f"its {odd[0]} is not what its schedule gives" if odd and code.source == made.source else ""


# ---------------------------------------------------------------- answers
Answer = tuple[str, str, float | None]


def _not_asked(r: Served, code: Code) -> Answer:
    return "not done: not asked for", "", None


def _runner(pack: Pack, emulate: bool) -> Callable[[Served, Code], Answer]:
    try:
        device = _device(pack)
    except (NoSuchDevice, WrongCard) as e:
        if emulate and not pack.manifest.card.is_cpu:
            return _emulator(pack)
        why = f"not done: {e}"
        return lambda r, code: (why, "", None)
    checkers, ran = dict[str, Checker](), f"on {pack.here.product}"

    def run(r: Served, code: Code) -> Answer:
        op = parse_op(r.op)
        if r.op not in checkers:
            checkers.clear()  # operands of one op may fill half of the card
            checkers[r.op] = Checker(device, device.answers(op), op)
        try:
            library = pack.library(code)
            with LoadedPlan(library, "cpu" if pack.manifest.card.is_cpu else "cuda") as loaded:
                symbol = symbol_of(op)
                sizes = (symbol.lo, symbol.hi) if symbol else (0,)
                refuse_kernels(op.key, arguments_of(op.program()), sizes, loaded)
            plan = device.load(str(library))
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


def _emulator(pack: Pack) -> Callable[[Served, Code], Answer]:
    """Runs what an op and its schedule make, each source once."""
    from emmy.search.emulator_check import check

    target, known = load_target(pack.manifest.card.target), dict[str, Answer]()

    def run(r: Served, code: Code) -> Answer:
        op = parse_op(r.op)
        try:
            if source(op, r.schedule, target).digest != code.source:
                return "not done: this Emmy generates another source", "", None
            if code.source not in known:
                found = check(op, r.schedule, target)
                known[code.source] = (
                    (found.wrong or "ok", f"on the emulator, as {found.op}", None)
                    if found.op
                    else (f"not done: {found.wrong}", "", None)
                )
        except EmmyError as e:
            return str(e), "on the emulator", None
        return known[code.source]

    return run
