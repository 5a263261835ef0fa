"""`emmy pack`: kernel packs, built from what is stored, looked at, checked and opened."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from emmy.cli.verb import Verb, add_gpu, add_home, add_tasks, add_threads, file, positive
from emmy.errors import UsageError, WrongAnswer
from emmy.report import Bar, Screen, counted

if TYPE_CHECKING:
    from emmy.pack import Case, Pack, Served

EXAMPLES = {
    "build": "pack build --gpu h200 @gemma4-12b @gemma4-12b-server --out gemma4-12b-h200.emmypack",
    "inspect": "pack inspect gemma4-12b-h200.emmypack --of @gemma4-12b",
    "verify": "pack verify gemma4-12b-h200.emmypack --depth rebuild",
    "load": "pack load gemma4-12b-h200.emmypack",
}


def configure(parser: ArgumentParser) -> None:
    add_task = add_tasks(parser, EXAMPLES)
    sub = add_task("build", _build, "compile the stored winners of ops into a pack")
    sub.add_argument("ops", nargs="+", metavar="OP", help="ops, or sets: @gemma4-12b, @gemma4-12b-server, @config:PATH")
    add_gpu(sub)
    add_threads(sub)
    sub.add_argument("--out", type=file, required=True, metavar="FILE", help="the pack; by habit it ends in .emmypack")
    sub.add_argument("--jobs", type=positive, default=0, metavar="N", help="compilers at once (default: one a core)")
    add_home(sub)
    sub = add_task("inspect", _inspect, "list what a pack holds, and why stock serves the rest")
    _file(sub)
    sub.add_argument("--of", nargs="+", default=[], metavar="OP",
                     help="who serves each case of these ops or sets, at the size that it is timed at")  # fmt: skip
    sub = add_task("verify", _verify, "check digests, sources that give the same binaries again, and answers")
    _file(sub)
    sub.add_argument("--depth", choices=("digests", "rebuild", "run"), default="run",
                     help="how far to go (default: run: on the card, else on the emulator)")  # fmt: skip
    sub.add_argument("--op", default="*", metavar="PATTERN", help="only ops whose text matches, such as 'rms_norm*'")
    sub.add_argument("--no-emulator", action="store_true", help="where the card is not, run nothing")
    sub = add_task("load", _load, "make every plan of a pack ready on this device, and say how long it takes")
    _file(sub)
    sub.add_argument("--unmeasured", action="store_true", help="also what was never measured on this card")


def _file(sub: ArgumentParser) -> None:
    sub.add_argument("file", type=Path, help="the pack")


def run(args: Namespace, screen: Screen) -> int:
    done: int = args.task(args, screen)
    return done


def _build(args: Namespace, screen: Screen) -> int:
    from emmy import api

    began = time.monotonic()
    with Bar(screen) as bar:
        made = api.build_pack(
            args.ops, args.out, gpu=args.gpu, threads=args.threads, workers=args.jobs, home=args.home, on_progress=bar
        )
    served = [r for c in made.manifest.cases for r in c.ranges]
    codes = made.manifest.codes
    screen.record("pack", {"file": made.path, "digest": made.digest, "bytes": made.n_bytes, "ops": len(made.manifest.cases),
                           "kernels": len(codes), "predicted": made.manifest.predicted, "seconds": time.monotonic() - began})  # fmt: skip
    for r in made.unbuilt:
        screen.say(f"left to stock: {r.op}: {r.why}")
    mark = "PREDICTED, never measured: " if made.manifest.predicted else ""
    screen.say(
        f"{mark}{made.path}: {counted(len(made.manifest.cases), 'op')}, {counted(len(codes), 'kernel')}, "
        f"{sum(r.use == 'stock' for r in served)} of {counted(len(served), 'range')} left to stock; {made.n_bytes / 1e6:.2f} MB, "
        f"{time.monotonic() - began:.1f} s"
    )
    screen.show(made.digest)
    return 0


def _inspect(args: Namespace, screen: Screen) -> int:
    from emmy.pack import Pack

    pack = Pack.open(args.file)
    _introduce(pack, screen)
    if args.of:
        return _inspect_cases(pack, args.of, screen)
    columns = {"op": "op", "sizes": "sizes", "use": "use", "time_us": "us", "stock_us": "stock us", "ratio": "ratio", "basis": "basis",
               "kernel": "kernel", "why": "why"}  # fmt: skip
    screen.rows("range", (_range(c, r) for c in pack.cases for r in c.ranges), columns)
    return 0


def _inspect_cases(pack: Pack, names: Sequence[str], screen: Screen) -> int:
    """Who serves each case, and how many of each kind."""
    from emmy.benchmark.cases import bench_cases

    columns = {"case": "case", "kind": "kind", "sizes": "sizes", "use": "use", "time_us": "us", "stock_us": "stock us", "ratio": "ratio",
               "why": "why"}  # fmt: skip
    held, rows = {case.op: case for case in pack.cases}, list[dict[str, object]]()
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    for c in bench_cases(names):
        packed = held.get(c.op.key)
        serving = next((r for r in packed.ranges if r.lo <= (c.hint or 0) <= r.hi), None) if packed else None
        lacking = {**dict.fromkeys(columns), "op": c.op.key, "use": "stock", "why": f"the pack has no {c.op}"}
        about = _range(packed, serving) if packed and serving else lacking
        rows.append({**about, "case": c.id, "kind": c.kind, "size": c.hint})
        kinds[c.kind][str(about["use"])] += 1
    screen.rows("case", rows, columns)
    uses = {use: use for use in ("emmy", "predicted", "stock")}
    screen.rows(
        "served", ({"kind": kind, **{u: n[u] for u in uses}} for kind, n in kinds.items()), {"kind": "kind", **uses}
    )
    return 0


def _introduce(pack: Pack, screen: Screen) -> None:
    m = pack.manifest
    facts = {"file": pack.path, "digest": pack.digest, "schema": m.schema, "licence": m.licence, "emmy": m.emmy, "target": m.card.target,
             "product": m.card.product, "arch": m.card.arch, "toolkit": m.toolkit, "predicted": m.predicted, "as_of": m.as_of}  # fmt: skip
    screen.record("pack", facts)
    mark = "PREDICTED, never measured, " if m.predicted else ""
    screen.say(
        f"{pack.path}: {mark}for {m.card.product} ({m.card.arch}), by Emmy {m.emmy} with {m.toolkit}; sha256 {pack.digest}"
    )


def _range(case: Case, r: Served) -> dict[str, object]:
    e = r.evidence
    use = "predicted" if r.code and e and e.origin == "predicted" else r.use
    return {
        "op": case.op, "sizes": f"{case.symbol} {r.sizes}".strip(), "use": use, "why": r.why,
        "time_us": e and e.time_us, "stock_us": e and e.stock_us, "ratio": e and e.ratio, "ratio_low": e and e.ratio_low,
        "basis": e and e.origin, "error": e and e.error, "samples": e and len(e.samples_us), "product": e and e.product,
        "time_utc": e and e.time_utc, "kernel": r.code and r.code.source[:12], "schedule": r.schedule,
        "binary": r.code and r.code.binary, "launches": r.code and [x for x in r.code.launch if x.startswith("kernel ")],
        "layouts": [f"{a.name}[{','.join(a.axes)}] {a.dtype}" for a in case.arguments],
        "workspace_bytes": r.code and r.code.workspace_bytes,
    }  # fmt: skip


def _verify(args: Namespace, screen: Screen) -> int:
    from emmy import pack_check
    from emmy.pack import Pack

    pack = Pack.open(args.file, unmeasured=True)
    _introduce(pack, screen)
    n, found = pack_check.count(pack, args.op), []
    if args.op != "*" and not n:
        raise UsageError(
            f"no kernel of {args.file} is of an op that matches {args.op!r}: `emmy pack inspect` lists them"
        )
    with Bar(screen) as bar:
        for f in pack_check.verify(pack, args.depth, args.op, emulate=not args.no_emulator):
            found.append(f)
            bar("checking", len(found), n)
    columns = {k: k for k in ("op", "sizes", "digests", "rebuild", "answers", "error", "ran")}
    screen.rows("finding", ({k: getattr(f, k) for k in columns} for f in found), columns)
    for f in found:
        for fault in f.faults:
            screen.say(f"fault: {f.op}: {fault}")
    faulty = sum(bool(f.faults) for f in found)
    same, made, right = (sum(getattr(f, what) == "ok" for f in found) for what in ("digests", "rebuild", "answers"))
    screen.say(
        f"{counted(n, 'kernel')}: digests of {same} match, {made} rebuilt the same, answers of {right} right; {faulty} at fault"
    )
    wrong = any(f.answers in f.faults for f in found)
    return WrongAnswer.exit_code if wrong else int(bool(faulty))


def _load(args: Namespace, screen: Screen) -> int:
    from emmy.pack import Pack

    began = time.perf_counter()
    pack = Pack.open(args.file, unmeasured=args.unmeasured)
    opened = time.perf_counter()
    _introduce(pack, screen)
    screen.say(f"opened in {1e3 * (opened - began):.1f} ms")
    plans = list(_plans(pack))
    ready = time.perf_counter()
    counts = {"ready": len(plans), "stock": len(pack.cases) - len(plans), "rebuilt": len(pack.rebuilt)}
    screen.record("loaded", {"open_ms": 1e3 * (opened - began), "ready_ms": 1e3 * (ready - began), **counts})
    screen.show(
        f"{len(plans)} of {counted(len(pack.cases), 'op')} ready in {ready - began:.2f} s, {len(pack.rebuilt)} compiled from source"
    )
    for why, n in Counter(why for c in pack.cases if (why := pack.why_stock(c.op))).most_common():
        screen.say(f"left to stock: {counted(n, 'op')}: {why}")
    for why in sorted(set(pack.rebuilt.values())):
        screen.say(f"compiled from source: {why}")
    return 0


def _plans(pack: Pack) -> Iterator[object]:
    return (plan for case in pack.cases if (plan := pack.plan(case.op)) is not None)


VERB = Verb(
    "pack",
    "build, inspect, verify and load kernel packs",
    tuple(EXAMPLES.values()),
    configure,
    run,
    has_tasks=True,
)
