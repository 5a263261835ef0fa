"""A pack, opened: its cases, and those that run here as callables. Runs nothing whose digest does not match; searches nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from emmy.codegen import gcc
from emmy.codegen.cubin import cubin_arch
from emmy.codegen.gpu_build import kept
from emmy.codegen.gpu_plan import plan_file
from emmy.codegen.nvrtc import compile_cubin
from emmy.errors import CompileError, PackError
from emmy.ir.dtype import storage
from emmy.ir.ops import Op
from emmy.ir.target import Target
from emmy.pack import building, machine
from emmy.pack.archive import Archive
from emmy.pack.building import Built, Offer, Progress
from emmy.pack.machine import Machine
from emmy.pack.schema import Argument, Case, Code, Evidence, Manifest, Served, read_manifest
from emmy.pack.sound import refuse_kernels, refuse_lies
from emmy.runtime.arguments import Buffer, Form
from emmy.runtime.launcher import BoundPlan, LoadedPlan
from emmy.runtime.table import LoadedTable, PlanRange

log = logging.getLogger("emmy.pack")


def _form(a: Argument) -> Form:
    note = "bits of bf16: emmy.ir.dtype.encode" if a.dtype == "bf16" else ""
    return Form(storage(a.dtype), a.shape, a.is_output, note)


class PackedPlan:
    """A case that runs here, used like a loaded plan: calling it with arrays computes the op. `loaded` is the launcher's own.

    Sizes left to stock are refused with UsageError: ask `serves` first, in C++ `emmy_choose`, which gives -1.
    """

    def __init__(self, case: Case, loaded: LoadedPlan) -> None:
        self.case, self.loaded = case, loaded

    def __repr__(self) -> str:
        mine = sum(r.code is not None for r in self.case.ranges)
        return f"PackedPlan({self.case.op!r}, {mine} of {len(self.case.ranges)} ranges)"

    def range(self, size: int = 0) -> Served | None:
        """Who serves a size of the symbol; None for one that the op does not have."""
        sized = self.case.symbol
        return next((r for r in self.case.ranges if not sized or r.lo <= size <= r.hi), None)

    def serves(self, size: int = 0) -> bool:
        """Whether a size of the symbol is Emmy's; of an op without one, whether the op is, whatever the size."""
        found = self.range(size)
        return found is not None and found.code is not None

    def evidence(self, size: int = 0) -> Evidence | None:
        found = self.range(size)
        return found.evidence if found else None

    def __call__(
        self,
        buffers: Sequence[Buffer] | Mapping[str, Buffer],
        syms: Sequence[int] | Mapping[str, int] = (),
        threads: int = 1,
        stream: int = 0,
    ) -> None:
        """Runs it: see `LoadedPlan.run`."""
        self.loaded.run(buffers, syms, threads, stream)

    def bind(
        self,
        buffers: Sequence[Buffer] | Mapping[str, Buffer],
        syms: Sequence[int] | Mapping[str, int] = (),
        threads: int = 1,
        stream: int = 0,
    ) -> BoundPlan:
        return self.loaded.bind(buffers, syms, threads, stream)

    def close(self) -> None:
        self.loaded.close()


class Pack:
    """An opened pack. `digest` is its identity: what a cache of graphs that call its kernels must be keyed with.

    unmeasured: also serve what was never measured on this card: predictions, and the kernels of another card
    """

    def __init__(self, archive: Archive, manifest: Manifest, unmeasured: bool, here: Machine | None) -> None:
        self._archive, self.manifest, self.unmeasured, self._here = archive, manifest, unmeasured, here
        self._cases = {c.op: replace(c, ranges=tuple(map(self._served, c.ranges))) for c in manifest.cases}
        self.rebuilt: dict[str, str] = {}  # source -> why its binary was compiled here

    def __repr__(self) -> str:
        return f"Pack({str(self._archive.path)!r}, {len(self._cases)} ops for {self.manifest.card.product}, {self.digest[:16]})"

    @staticmethod
    def build(
        rows: Sequence[Offer],
        path: Path | str,
        target: Target,
        *,
        workers: int = 0,
        on_progress: Progress = lambda *_: None,
    ) -> Built:
        """Writes a pack of what the rows offer: see `emmy.pack.building.build`."""
        return building.build(rows, Path(path), target, workers, on_progress)

    @classmethod
    def open(cls, path: Path | str, *, unmeasured: bool = False, here: Machine | None = None) -> Pack:
        """The pack in a file, on any machine; nothing is loaded yet. `here`: instead of the device that is found.

        Raises PackError for a file that is no pack, is damaged, lacks a member, or has another schema.
        """
        archive = Archive(Path(path))
        try:
            manifest = read_manifest(archive.manifest)
            refuse_lies(manifest)
        except PackError as e:
            raise PackError(f"{path}: {e}") from None
        named = {n for c in manifest.codes for n in (manifest.source_name(c), manifest.binary_name(c))}
        if odd := sorted(named ^ archive.names):
            raise PackError(
                f"{path}: damaged: {odd[0]} is {'missing' if odd[0] in named else 'named by nothing'}. Build it again."
            )
        return cls(archive, manifest, unmeasured, here)

    @property
    def path(self) -> Path:
        return self._archive.path

    @property
    def digest(self) -> str:
        return self._archive.digest

    @property
    def cases(self) -> tuple[Case, ...]:
        return self.manifest.cases

    @cached_property
    def here(self) -> Machine:
        """The device that plans are for. Raises NoSuchDevice; WrongCard when it is another product, unless unmeasured."""
        here = self._here or machine.machine_for(self.manifest.card)
        if not self.unmeasured:
            machine.refuse_card(self.manifest, here)
        return here

    # ------------------------------------------------------------ what to run
    def why_stock(self, op: Op | str) -> str:
        """Why `plan` gives None, "" when it does not."""
        case = self._cases.get(str(op))
        if case is None:
            return f"the pack has no {op}"
        return "" if any(r.code for r in case.ranges) else case.ranges[-1].why

    def case(self, op: Op | str) -> Case | None:
        """The op and who serves which of its sizes here; None for one that the pack lacks."""
        return self._cases.get(str(op))

    def plan(self, op: Op | str, leave: Callable[[Served], str] = lambda _: "") -> PackedPlan | None:
        """The op ready to run; None where stock serves all of it: `why_stock` says why.

        leave: why a range is left to stock although the pack serves it, "" = it is not

        A binary whose digest does not match, or that this device does not run, is compiled from its source. Raises NoSuchDevice,
        WrongCard, or PackError when that fails; LaunchError when the driver refuses.
        """
        if self.why_stock(op):
            return None
        device = "cpu" if self.manifest.card.is_cpu else "cuda"
        case = self._cases[str(op)]
        case = replace(
            case,
            ranges=tuple(replace(r, code=None, why=why) if r.code and (why := leave(r)) else r for r in case.ranges),
        )
        if not any(r.code for r in case.ranges):
            return None
        forms = {a.name: _form(a) for a in case.arguments}
        paths = [self.library(r.code) if r.code else None for r in case.ranges]
        if case.symbol:
            ranges = [PlanRange(r.lo, r.hi, p) for r, p in zip(case.ranges, paths, strict=True)]
            loaded: LoadedPlan = LoadedTable(case.symbol, ranges, device, forms, name=case.op)
        else:
            assert paths[0] is not None
            loaded = LoadedPlan(paths[0], device, forms=forms, name=case.op)
        try:
            refuse_kernels(
                case.op, case.arguments, sorted({e for r in case.ranges if r.code for e in (r.lo, r.hi)}), loaded
            )
        except PackError as e:
            loaded.close()
            raise PackError(f"{self.path}: {e}") from None
        return PackedPlan(case, loaded)

    def _served(self, r: Served) -> Served:
        """The range as it is served here: stock has what was never measured, unless that is asked for."""
        if self.unmeasured or r.code is None or (r.evidence and r.evidence.origin == "measured"):
            return r
        return replace(
            r, code=None, why="predicted, never measured: open the pack with unmeasured=True, or --unmeasured"
        )

    # ------------------------------------------------------------ code
    def source(self, code: Code) -> str:
        """The source's text. Raises PackError when it is damaged."""
        return self._archive.read(self.manifest.source_name(code), code.source).decode()

    def binary(self, code: Code) -> bytes:
        """The binary as it was built. Raises PackError when it is damaged, or of another architecture than the pack's."""
        data = self._archive.read(self.manifest.binary_name(code), code.binary)
        arch = self.manifest.card.arch
        if not self.manifest.card.is_cpu and arch.rstrip("a") != f"sm_{cubin_arch(data)}":
            raise PackError(
                f"{self.path}: {self.manifest.binary_name(code)} is of sm_{cubin_arch(data)}, the pack of {arch}"
            )
        return data

    def library(self, code: Code) -> Path:
        """The file that the launcher opens here. Raises as `plan` does."""
        why, data = machine.why_rebuild(self.manifest, self.here), b""
        if not why:
            try:
                data = self.binary(code)
            except (PackError, CompileError) as e:
                why = str(e)
        if why:
            log.warning("%s is compiled from its source: %s", code.source[:16], why)
            data = self._rebuilt(code, why)
            self.rebuilt[code.source] = why
        return kept(data, ".so") if self.manifest.card.is_cpu else kept(plan_file(code.launch, data), ".plan")

    def _rebuilt(self, code: Code, why: str) -> bytes:
        text, card = self.source(code), self.manifest.card
        try:
            if card.is_cpu:
                return gcc.compile_text(text, machine.cpu_target(card, self.here)).path.read_bytes()
            machine.refuse_compiler(self.here)
            return compile_cubin(text, machine.arch_here(self.here)).data
        except CompileError as e:
            first = next((line for line in str(e).splitlines() if "error" in line), str(e).splitlines()[0])
            raise PackError(
                f"{self.path}: a kernel must be compiled from its source ({why}), and cannot be: {first}. Mend that, or build a "
                "pack for this device: `emmy pack build --gpu NAME`"
            ) from None
