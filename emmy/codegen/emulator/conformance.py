"""Does the emulator do what a GPU does? Probes' results from hardware are kept in a file, and compared with the emulator's.

python -m emmy.codegen.emulator.conformance --out FILE               on a machine with a GPU: run the probes there
python -m emmy.codegen.emulator.conformance --build DIR --arch A     anywhere: compile them, for a machine without NVRTC
python -m emmy.codegen.emulator.conformance --out FILE --cubins DIR  there: run those
python -m emmy.codegen.emulator.conformance --check FILE             anywhere: compare
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from emmy.codegen.emulator import probes_bulk, probes_warp
from emmy.codegen.emulator.gpu import Gpu
from emmy.codegen.emulator.probe import Probe, results
from emmy.codegen.emulator.run import emulate
from emmy.codegen.nvrtc import Cubin, compile_many, nvrtc_version
from emmy.codegen.ptx import ARCHS
from emmy.errors import DataError, EmmyError, EmuError

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = logging.getLogger("emmy.conformance")
# Those that could hang a GPU, were a barrier wrong, come last.
PROBES: tuple[Probe, ...] = (
    *probes_warp.memory(),
    *probes_warp.matrices(),
    *probes_warp.numbers(),
    *probes_bulk.wgmma(),
    *probes_bulk.barriers(),
    *probes_bulk.tma(),
)


@dataclass(frozen=True, slots=True)
class Golden:
    """Results of probes on one GPU. `digests`: probe -> what it was when it ran."""

    product: str
    driver: int
    arch: str
    nvrtc: str
    digests: dict[str, str]
    results: dict[str, list[NDArray[np.generic]]]

    def save(self, path: Path) -> None:
        """Writes one .npz file."""
        about = {
            "product": self.product,
            "driver": self.driver,
            "arch": self.arch,
            "nvrtc": self.nvrtc,
            "digests": self.digests,
        }
        arrays = {f"{name}.{i}": a for name, found in self.results.items() for i, a in enumerate(found)}
        np.savez_compressed(path, about=np.array(json.dumps(about)), **arrays)  # type: ignore[arg-type] # keys are names

    @classmethod
    def load(cls, path: Path) -> Golden:
        """Raises DataError when the file is no such file."""
        try:
            with np.load(path, allow_pickle=False) as data:
                about = json.loads(str(data["about"]))
                found: dict[str, list[NDArray[np.generic]]] = {name: [] for name in about["digests"]}
                for key in sorted((k for k in data.files if k != "about"), key=lambda k: int(k.rsplit(".", 1)[1])):
                    found[key.rsplit(".", 1)[0]].append(data[key])
        except (OSError, KeyError, ValueError) as e:
            raise DataError(f"{path} is no file of conformance results: {e}") from None
        return cls(about["product"], about["driver"], about["arch"], about["nvrtc"], about["digests"], found)


def on_emulator(probe: Probe, arch: str, seed: int = 0, *, eager: bool = False) -> list[NDArray[np.generic]]:
    """What the emulator makes of a probe. Raises EmuError when it finds it at fault."""
    args = probe.make()
    emulate(
        probe.source(arch), probe.entry, (probe.grid,), (probe.block,), probe.smem_bytes, args,
        cluster=(probe.cluster,), seed=seed, eager=eager,
    )  # fmt: skip
    return results(args)


def disagreement(probe: Probe, emulated: list[NDArray[np.generic]], measured: list[NDArray[np.generic]]) -> str | None:
    """Where the two differ by more than the probe's tolerance, relative to the largest value; None when they agree."""
    for i, (a, b) in enumerate(zip(emulated, measured, strict=True)):
        if probe.tolerance:
            wide, truth = a.astype(np.float64), b.astype(np.float64)
            worst = float(np.abs(wide - truth).max() / np.abs(truth).max())
            if not worst <= probe.tolerance:
                return f"{probe.name}: result {i} differs by {worst:.2g} of its largest value, allowed {probe.tolerance:.2g}"
        elif a.tobytes() != b.tobytes():
            got, want = a.ravel(), b.ravel()
            wrong = np.flatnonzero(got != want)
            at = int(wrong[0]) if wrong.size else 0
            return (
                f"{probe.name}: result {i} differs in {wrong.size} of {got.size} elements, "
                f"first [{at}]: {got[at]!r} emulated, {want[at]!r} measured"
            )
    return None


def measure(gpu: Gpu, cubins: Path | None) -> tuple[Golden, list[str]]:
    """Runs every probe that the GPU can run, and the reasons of those that failed."""
    arch = next((a for a in ARCHS if a.removeprefix("sm_").rstrip("a") == str(gpu.capability)), "")
    probes = [p for p in PROBES if arch in p.archs]
    if not probes:
        raise DataError(
            f"{gpu.product} has compute capability {gpu.capability / 10}; probes exist for {', '.join(ARCHS)}"
        )
    if cubins is None:
        compiled = [r.data if isinstance(r, Cubin) else r for r in compile_many((p.source(arch), arch) for p in probes)]
    else:
        compiled = [(cubins / f"{p.name}.cubin").read_bytes() for p in probes]
    golden = Golden(gpu.product, gpu.driver, arch, nvrtc_version() if cubins is None else "", {}, {})
    failures = []
    for probe, data in zip(probes, compiled, strict=True):
        log.info("running %s", probe.name)
        args = probe.make()
        try:
            if not isinstance(data, bytes):
                raise data
            gpu.launch(data, probe.entry, probe.grid, probe.block, probe.smem_bytes, args)
        except EmmyError as e:
            failures.append(f"{probe.name}: {e}")
            if isinstance(e, EmuError):  # of the GPU, not of the compiler
                failures.append("after a fault the process cannot use the GPU; later probes did not run")
                break
            continue
        golden.digests[probe.name] = probe.digest()
        golden.results[probe.name] = results(args)
    return golden, failures


def check(golden: Golden) -> list[str]:
    """Every probe whose emulation differs from the file, or that the file does not have as it is now."""
    out = []
    for probe in PROBES:
        if golden.arch not in probe.archs:
            continue
        if golden.digests.get(probe.name) != probe.digest():
            out.append(
                f"{probe.name}: changed since it ran on {golden.product}, or never ran there. Run --out again on a GPU."
            )
        elif (found := disagreement(probe, on_emulator(probe, golden.arch), golden.results[probe.name])) is not None:
            out.append(found)
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """The command line above; 0 when all went well and agreed."""
    parser = argparse.ArgumentParser(
        prog="python -m emmy.codegen.emulator.conformance", description=__doc__.splitlines()[0]
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--out", type=Path, metavar="FILE", help="run the probes on this machine's GPU and keep their results"
    )
    what.add_argument("--check", type=Path, metavar="FILE", help="compare the emulator with kept results")
    what.add_argument("--build", type=Path, metavar="DIR", help="compile the probes")
    parser.add_argument("--arch", choices=ARCHS, default="sm_90a", help="for --build")
    parser.add_argument("--cubins", type=Path, metavar="DIR", help="with --out: run what --build made")
    args = parser.parse_args(argv)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    if args.build:
        failures = build(args.build, args.arch)
    elif args.check:
        failures = check(Golden.load(args.check))
    else:
        golden, failures = measure(Gpu(), args.cubins)
        golden.save(args.out)
        failures += check(golden)
    for line in failures:
        log.error("%s", line)
    log.info("%d of the probes failed" if failures else "all probes agree", *([len(failures)] if failures else []))
    return 1 if failures else 0


def build(folder: Path, arch: str) -> list[str]:
    """Compiles the probes into a folder; the reasons of those that do not compile."""
    folder.mkdir(parents=True, exist_ok=True)
    probes = [p for p in PROBES if arch in p.archs]
    failures = []
    for probe, made in zip(probes, compile_many((p.source(arch), arch) for p in probes), strict=True):
        if isinstance(made, Cubin):
            (folder / f"{probe.name}.cubin").write_bytes(made.data)
        else:
            failures.append(f"{probe.name}: {made}")
    return failures


if __name__ == "__main__":
    sys.exit(main())
