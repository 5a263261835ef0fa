"""A plan, or plans by ranges of a size, as source that stands alone: kernels, a launcher, a header. Compiles and writes nothing.

The kernels' text is what Emmy measures, but for their names, which begin with the exported name, so that several exports
can be linked together.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from emmy.codegen import c, cuda, export_c, export_cuda, gcc
from emmy.codegen.build import plan_source
from emmy.codegen.gpu_plan import plan_lines
from emmy.codegen.kernel import Kernel
from emmy.codegen.kernel_gpu import GpuKernel
from emmy.codegen.plan_head import read_head
from emmy.codegen.ptx import prelude, used
from emmy.errors import UsageError
from emmy.ir.gathers import gathers
from emmy.ir.plan import Plan
from emmy.ir.program import Program
from emmy.ir.target import Target

_NAME = re.compile(r"[A-Za-z]\w{0,100}", re.ASCII)
_TAKEN = ("emmy_", "plan_")
# Words of C and C++ that a function may not be called by, the check's own function, and functions of the C library.
_WORDS = """
    alignas alignof and asm auto bool break case catch char class compl concept const constexpr continue decltype default
    delete do double else enum explicit export extern false float for friend goto if inline int long main mutable
    namespace new noexcept not nullptr operator or private protected public register requires restrict return short signed
    sizeof static struct switch template this throw true try typedef typeid typename union unsigned using virtual void
    volatile wchar_t while xor
    abort abs acos asin atan atof atoi atol calloc ceil cos div erf exit exp exp2 fabs floor fma fmax fmin fmod free gamma
    getenv hypot index j0 j1 ldexp log log2 malloc memcmp memcpy memset pow printf puts qsort rand realloc remainder remove
    rename rint round scanf sin sqrt strlen system tan tanh tgamma trunc y0 y1 yn
""".split()  # noqa: SIM905  so many words are read as text


@dataclass(frozen=True, slots=True)
class Part:
    """A plan and the schedule it comes from. `served`: the sizes lo..hi that it serves where several serve an op together."""

    plan: Plan
    schedule: str
    served: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Exported:
    """Source that stands alone. `source` goes with `header`; `compiled_with` is a command that makes an object of it.

    syms: sizes that the function is given, behind the arrays
    """

    name: str
    source: str
    header: str
    suffix: str  # of the source: cu, c
    compiled_with: str
    syms: tuple[str, ...]


def c_name(key: str) -> str:
    """A C identifier for an op: matmul_512x4096x3840_f16_nk."""
    return re.sub(r"\W+", "_", key, flags=re.ASCII).strip("_")


def export_plans(title: str, parts: Sequence[Part], target: Target, name: str, symbol: str = "") -> Exported:
    """The source of the plans of one op; with a `symbol` each run takes the plan that serves its size.

    Raises PlanError when no code is generated for a plan, UsageError for a name that a function may not have.
    """
    if not _NAME.fullmatch(name) or name.startswith(_TAKEN) or name in _WORDS:
        wanted = f"a C identifier that begins with a letter, not with {' or '.join(_TAKEN)}, and no word of C or C++"
        raise UsageError(f"the exported name {name!r}: needed is {wanted}")
    comment = [f"{title} for {target.name}. Made by Emmy, of which it needs nothing."]
    kernels: list[tuple[Kernel, ...]] = []
    gpu_kernels: list[tuple[GpuKernel, ...]] = []
    for i, part in enumerate(parts):
        unit = plan_source(part.plan, target)
        where = f" of {symbol} {part.served[0]}..{part.served[1]}" if symbol else ""
        comment.append(f"schedule{where}: {part.schedule or '(none)'}")
        comment.append(f"         its source's digest before names were changed: {unit.digest}")
        prefix = f"{name}_r{i}" if symbol else name
        kernels.append(tuple(replace(k, name=f"{prefix}_{k.name}") for k in unit.kernels if isinstance(k, Kernel)))
        gpu_kernels.append(
            tuple(replace(k, name=f"{prefix}_{k.name}") for k in unit.kernels if isinstance(k, GpuKernel))
        )
    export = _Export(name, tuple(parts), symbol, tuple(comment), target)
    made = export.c(kernels) if target.is_cpu else export.cuda(gpu_kernels)
    refuse_second(name, made.source, 1)
    return made


def refuse_second(name: str, source: str, times: int) -> None:
    """Raises UsageError when a source names anything else so, too: its code has the name more than so many times."""
    code = re.sub(r"//.*|/\*.*?\*/|#include.*", "", source)
    if len(re.findall(rf"\b{name}\b", code)) > times:
        raise UsageError(
            f"the exported name {name!r} is that of something in the exported code already: choose another"
        )


@dataclass(frozen=True, slots=True)
class _Export:
    name: str
    parts: tuple[Part, ...]
    symbol: str
    comment: tuple[str, ...]
    target: Target

    @property
    def program(self) -> Program:
        return self.parts[0].plan.program

    @property
    def syms(self) -> tuple[str, ...]:
        return (self.symbol,) if self.symbol else tuple(s.name for s in self.program.syms)

    @property
    def arguments(self) -> tuple[tuple[str, bool], ...]:
        """Names of what the caller passes, and whether it is only read."""
        return (*((v.name, True) for v in self.program.inputs), *((o, False) for o in self.program.outputs))

    def cuda(self, kernels: Sequence[tuple[GpuKernel, ...]]) -> Exported:
        heads = [read_head(plan_lines(p.plan, ks)) for p, ks in zip(self.parts, kernels, strict=True)]
        text = cuda.emit(tuple(k for ks in kernels for k in ks))
        n_bytes = export_cuda.workspace_bytes(heads)
        compiled_with = f"nvcc -std=c++17 -O3 {export_cuda.architecture(self.target.arch)} -c {self.name}.cu"
        source = (
            _comment([*self.comment, f"Compile: {compiled_with}"]),
            f'#include "{self.name}.h"\n\n{export_cuda.INCLUDES}',
            prelude(used(text), self.target.arch) + text,
            export_cuda.host(heads),
            self._entry("cudaErrorInvalidValue", export_cuda.entry(n_bytes), "memory, (cudaStream_t)stream"),
            f"int64_t {self.name}_workspace_bytes(void) {{ return {n_bytes}; }}\n",
        )
        notes = export_cuda.notes(self.name, n_bytes, heads)
        return Exported(self.name, "\n".join(source), self._header(notes), "cu", compiled_with, self.syms)

    def c(self, kernels: Sequence[tuple[Kernel, ...]]) -> Exported:
        tables = tuple(f"{self.name}_plan_{i}" for i in range(len(self.parts)))
        compiled_with = f"gcc {' '.join(gcc.flags(self.target))} -fopenmp -c {self.name}.c"
        largest = [[s.hi for s in p.plan.guard] or [0] for p in self.parts]
        source = (
            _comment([*self.comment, f"Compile: {compiled_with}"]),
            f'#include "{self.name}.h"\n\n{export_c.INCLUDES}',
            c.emit_several(kernels, tables),
            export_c.host(tables),
            self._entry("BAD_SIZE", export_c.ENTRY, "workspace"),
            export_c.workspace_function(self.name, tables, largest),
        )
        return Exported(
            self.name, "\n".join(source), self._header(export_c.notes(self.name)), "c", compiled_with, self.syms
        )

    def _signature(self) -> str:
        given = [f"{'const ' if reads else ''}void *{a}" for a, reads in self.arguments]
        given += [f"int64_t {s}" for s in self.syms]
        return f"int {self.name}({', '.join([*given, 'void *workspace', 'void *stream'])})"

    def _entry(self, bad_size: str, before: str, rest: str) -> str:
        """The function of the header: it chooses the plan."""
        given = ", ".join(f"(void *){a}" for a, _ in self.arguments)
        lines = [f"{self._signature()} {{", f"  void *const arguments[] = {{{given}}};"]
        lines += [f"  const int64_t syms[] = {{{', '.join(self.syms) or '0'}}};", before.rstrip("\n")]
        for i, part in enumerate(self.parts):
            ends = [(self.symbol, *part.served)] if self.symbol else [(s.name, s.lo, s.hi) for s in part.plan.guard]
            inside = " && ".join(f"{s} >= {lo} && {s} <= {hi}" for s, lo, hi in ends)
            lines.append(f"  {f'if ({inside}) ' if ends else ''}return plan_{i}(arguments, syms, {rest});")
        lines += [f"  return {bad_size};"] * bool(self.syms)
        return "\n".join([*lines, "}", ""])

    def _header(self, notes: Sequence[str]) -> str:
        p, open_sizes = self.program, dict[str, str]()
        for s in self.parts[0].plan.guard:
            open_sizes[s.name] = f"{s.lo}..{s.hi}"
        if self.symbol:
            open_sizes[self.symbol] = f"{self.parts[0].served[0]}..{self.parts[-1].served[1]}"
        sizes = ", ".join(f"{axis} {open_sizes.get(axis, dim)}" for axis, dim in p.dims)
        arrays = [(v.name, v) for v in p.inputs] + [(o, p.value(o)) for o in p.outputs]
        shapes = "; ".join(f"{name}[{','.join(v.axes)}] {v.dtype}" for name, v in arrays)
        told = [
            f"{' and '.join(g.told_by)}: positions of {g.table} along {g.axis}, which are not checked"
            for g in gathers(p)
        ]
        lines = [*self.comment, f"arrays, row-major: {shapes}", f"sizes: {sizes}", *told, *notes]
        guard = f"{self.name.upper()}_H"
        return "\n".join(
            (
                _comment(lines),
                f"#ifndef {guard}\n#define {guard}\n#include <stdint.h>\n",
                '#ifdef __cplusplus\nextern "C" {\n#endif',
                f"{self._signature()};\nint64_t {self.name}_workspace_bytes(void);",
                "#ifdef __cplusplus\n}\n#endif\n#endif\n",
            )
        )


def _comment(lines: Sequence[str]) -> str:
    return "\n".join(f"// {line}" for line in lines) + "\n"
