"""One computation at every level, from what is asked to what the processor runs, as text to read down the page.

Only describes: it builds what a level needs and says what stands in the way where a level cannot be had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from emmy.errors import CompileError, PlanError, UsageError
from emmy.ir.dtype import size_bytes
from emmy.ir.ops import Op
from emmy.ir.plan import Plan
from emmy.ir.program import Program
from emmy.ir.roofline import roofline_us
from emmy.ir.schedule import replay
from emmy.ir.target import Target, load_target
from emmy.testing.five_plans import FIVE_PLANS, Example

if TYPE_CHECKING:
    from emmy.codegen.build import SourceUnit
    from emmy.hostcc import Library

LevelName = Literal["op", "loop", "tile", "steps", "kernel", "source", "static", "asm"]
Origin = Literal["measured", "predicted", "near", "default", "given"]  # of a schedule
LEVELS: tuple[LevelName, ...] = get_args(LevelName)

HEADINGS: dict[LevelName, str] = {
    "op": "what to compute, and the least work in it",
    "loop": "Loop IR: the computation as stages over named axes; no device in sight",
    "tile": "Tile IR: which loops run where and which values are kept near, as the schedule's moves placed them",
    "steps": "steps: what a block does in order; copies, waits and barriers are derived, not written",
    "kernel": "Kernel IR: every address and every vector spelled out, one kernel a launch",
    "source": "source: the Kernel IR printed as C (CUDA C++ for a GPU), statement by statement",
    "static": "the binary: what the compiler made of the source",
    "asm": "assembly: the loop that does most of the arithmetic",
}
GPU_FACTS = {
    "registers": "registers a thread",
    "stack_bytes": "bytes of stack a thread",
    "spill_bytes": "bytes of registers spilled to memory",
    "smem_bytes": "bytes of shared memory a block",
    "threads": "threads a block",
    "code_bytes": "bytes of code, all launches",
    "instructions": "instructions, all launches",
    "loop_instructions": "instructions in the main loop",
    "loop_issue_cycles": "cycles to issue the main loop once, at least",
}
GPU_COUNTS = {  # of the launch with the most instructions (sass_) and of its main loop (loop_)
    "mma": "matrix instructions",
    "fma": "fused multiply-adds",
    "load_global": "loads from global memory, copies to shared memory included",
    "load_shared": "loads from shared memory",
    "store_shared": "stores to shared memory",
    "barrier": "barriers",
}
SUFFIXES: dict[LevelName, str] = {"source": "c", "asm": "s"}  # of the files of a dump; the others are txt


@dataclass(frozen=True, slots=True)
class Level:
    """One level as text. `missing`: the text says in a sentence why there is nothing to show."""

    name: LevelName
    heading: str
    text: str
    missing: bool = False
    suffix: str = "txt"

    @property
    def file_name(self) -> str:
        """Numbered, so that a folder of levels reads in order: 03-tile.txt."""
        return f"{LEVELS.index(self.name) + 1:02d}-{self.name}.{self.suffix}"


@dataclass(frozen=True, slots=True)
class Subject:
    """A program under a schedule on a target, and the op it comes from, where it comes from one."""

    title: str
    program: Program
    schedule: str
    target: Target
    op: Op | None = None
    note: str = ""  # where the schedule comes from
    threads: int = 0  # of a CPU, that its roofline is for; 0: all cores
    origin: Origin = "given"

    @property
    def plan(self) -> Plan:
        return replay(self.program, self.schedule, self.target)


def example(name: str) -> Subject:
    """One of the five worked plans. Raises UsageError for any other name."""
    found = next((e for e in FIVE_PLANS if e.name == name), None)
    if found is None:
        raise UsageError(f"no plan is named {name!r}. Plans: {', '.join(e.name for e in FIVE_PLANS)}, all")
    return _subject(found)


def examples() -> tuple[Subject, ...]:
    """The five worked plans."""
    return tuple(_subject(e) for e in FIVE_PLANS)


def _subject(e: Example) -> Subject:
    return Subject(f"plan:{e.name}", e.program, e.schedule, load_target(e.target), note=e.title)


def describe(subject: Subject, names: Sequence[LevelName] = LEVELS) -> tuple[Level, ...]:
    """The named levels, in the order of LEVELS. Raises IllegalMove when the schedule does not replay."""
    subject.plan  # noqa: B018  # refused here, once, rather than in every level
    return tuple(_level(subject, name) for name in LEVELS if name in names)


def _level(subject: Subject, name: LevelName) -> Level:
    suffix = SUFFIXES.get(name, "txt") if subject.target.is_cpu or name != "source" else "cu"
    try:
        return Level(name, HEADINGS[name], _TEXTS[name](subject), suffix=suffix)
    except (PlanError, CompileError) as e:  # the schedule replays: what is missing is a code generator or a compiler
        return Level(name, HEADINGS[name], f"not available: {e}", missing=True, suffix=suffix)


def _op(s: Subject) -> str:
    if s.op is None:
        return f"{s.note}\nA program of its own: no op text names it."
    work, dtype = s.op.work(), s.program.dtype
    roof = roofline_us(work, s.target, dtype, s.threads)
    at = "".join(f", at {name} = {size}" for name, size in s.op.typical_sizes().items())
    moved = [f"{v.name}[{','.join(v.axes)}] {size_bytes(v.dtype)} B an element" for v in s.program.inputs]
    bounds = {name: s.op.tolerance(output=name) for name in s.program.outputs}
    allowed = [f"{absolute:.2g} + {relative:.2g} x |reference|" for absolute, relative in bounds.values()]
    others = "".join(f", {name} {x}" for name, x in zip(s.program.outputs[1:], allowed[1:], strict=True))
    us = f"{roof.time_us:.0f}" if roof.time_us >= 1000 else f"{roof.time_us:.4g}"
    return "\n".join(
        (
            s.op.key,
            f"arithmetic  {_scaled(work.flops, 1000, ('FLOP', 'kFLOP', 'MFLOP', 'GFLOP', 'TFLOP'))}{at}",
            f"data        {_scaled(work.bytes, 1024, ('B', 'KiB', 'MiB', 'GiB'))} at least, each array moved once: {'; '.join(moved)}",
            f"intensity   {work.intensity:.4g} FLOP a byte",
            f"roofline    {us} us on {s.target.product}, {_share(s)}, bound by {roof.binding}",
            f"tolerance   {allowed[0]}{others}, the reference being numpy in float64",
        )
    )


def _scaled(x: float, base: int, units: Sequence[str]) -> str:
    """`x` in the largest unit of which it is at least one."""
    at = 0
    while x >= base and at < len(units) - 1:
        x, at = x / base, at + 1
    return f"{x:.4g} {units[at]}"


def _share(s: Subject) -> str:
    """The part of the target that the roofline is for."""
    if not s.target.is_cpu:
        return f"all {s.target.n_sms} SMs"
    return f"{s.threads} of its {s.target.cores} cores" if s.threads else f"all {s.target.cores} cores"


def _steps(s: Subject) -> str:
    from emmy.codegen.lower import lower

    return "\n".join(str(outline) for outline in lower(s.plan))


def _tile(s: Subject) -> str:
    return f"{s.plan}\n\nschedule: {s.schedule or '(no moves: the naive program)'}"


def _unit(s: Subject) -> SourceUnit:
    from emmy.codegen.build import plan_source

    return plan_source(s.plan, s.target)


def _library(s: Subject) -> Library:
    from emmy.codegen import gcc

    return gcc.build(_unit(s), s.target)


def _static(s: Subject) -> str:
    from emmy import config, hostcc
    from emmy.codegen import gcc

    if not s.target.is_cpu:
        return _gpu_static(s)
    library = _library(s)
    known = {
        "asm_instructions": "instructions",
        "asm_fma": "fused multiply-adds",
        "asm_vector_moves": "vector loads, stores and moves",
    }
    known |= {
        "asm_spills": "of them on the stack: sums that did not fit the registers",
        "library_bytes": "bytes of the library",
    }
    lines = [f"{value:10.0f}  {known.get(name, name)}" for name, value in library.static.items()]
    command = f"{hostcc.version(config.c_compiler())} {' '.join(gcc.flags(s.target))}"
    return "\n".join([command, *lines, *library.diagnostics.splitlines()])


def _gpu_static(s: Subject) -> str:
    from emmy.codegen import gpu_build, nvrtc

    facts = gpu_build.build(_unit(s), s.target).static
    words = {f"sass_{name}": f"{what}, main launch" for name, what in GPU_COUNTS.items()}
    words |= {f"loop_{name}": f"{what}, main loop" for name, what in GPU_COUNTS.items()} | GPU_FACTS
    lines = [f"{value:10.0f}  {words.get(name, name)}" for name, value in facts.items()]
    return "\n".join([f"NVRTC {nvrtc.nvrtc_version()} for {s.target.arch}", *lines])


def _asm(s: Subject) -> str:
    from emmy.hot_loop import hot_loop

    if not s.target.is_cpu:
        raise PlanError(f"{s.target.name}: Emmy counts a GPU's instructions (level static) and does not print them")
    loop = hot_loop(_library(s).path)
    if loop is None:
        return "(the compiler left no loop)"
    head = f"{loop.function}: {len(loop.lines)} instructions an iteration, {loop.arithmetic} of them arithmetic"
    return "\n".join([head, *(f"    {line}" for line in loop.lines)])


_TEXTS: dict[LevelName, Callable[[Subject], str]] = {
    "op": _op,
    "loop": lambda s: str(s.program),
    "tile": _tile,
    "steps": _steps,
    "kernel": lambda s: "\n\n".join(map(str, _unit(s).kernels)),
    "source": lambda s: _unit(s).text,
    "static": _static,
    "asm": _asm,
}


def level_names(text: str) -> tuple[LevelName, ...]:
    """The levels that `--ir` names: one, several with commas, or all. Raises UsageError for an unknown one."""
    words = [w.strip() for w in text.split(",")]
    if words == ["all"]:
        return LEVELS
    unknown = [w for w in words if w not in LEVELS]
    if unknown:
        raise UsageError(f"no level is named {unknown[0]!r}. Levels: {', '.join(LEVELS)}, all")
    return tuple(name for name in LEVELS if name in words)
