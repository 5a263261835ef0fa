"""`emmy bench serving` and `quality`: stock vLLM beside a kernel pack, how fast, and whether it says the same."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from emmy import config
from emmy.cli.serve import add_modes, modes_asked, used_as_asked, words
from emmy.cli.verb import VerbParser, add_seed, count, folder, positive, seconds
from emmy.errors import UsageError, WrongAnswer
from emmy.report import Screen, counted

if TYPE_CHECKING:
    from emmy.serving.compare import Entry
    from emmy.serving.engine import Spec
    from emmy.serving.installed import Vllm
    from emmy.serving.results import Results

EXAMPLES = (
    "bench serving experiments/serving/gemma-4-12b.toml --out results/ --pack bf16.emmypack --lanes emmy",
    "bench quality google/gemma-4-12B-it --pack bf16.emmypack",
)
TASKS = tuple(example.split()[1] for example in EXAMPLES)
MOST_KL = 0.01


def add(parser: VerbParser) -> None:
    sub = parser.add_task("serving", serving, "measure a server with a pack and without, lanes in turns", EXAMPLES[0])
    sub.add_argument("experiment", type=Path, help="a .toml file: model, lanes, points of work")
    sub.add_argument("--out", type=folder, required=True, metavar="DIR",
                     help="folder of the results; what it holds is not measured again")  # fmt: skip
    sub.add_argument("--offline", action="store_true", help="prefill and decode in process, instead of the points")
    sub.add_argument("--logits", action="store_true",
                     help="offline: then also how far each lane's logits are from stock's, as `emmy bench quality` says it")  # fmt: skip
    sub.add_argument("--model", default="", help="instead of the experiment's")
    sub.add_argument("--pack", action="append", default=[], type=_pack, metavar="[LANE=]FILE",
                     help="the pack of a lane, or of all that have one")  # fmt: skip
    sub.add_argument(
        "--lanes", type=words, default=(), metavar="A,B", help="only these, and what they are compared with"
    )
    sub.add_argument("--points", type=words, default=(), metavar="P,Q", help="only these, such as 4096/4096@1")
    sub.add_argument("--waves", type=positive, default=0, metavar="N", help="how often each lane is started")
    sub.add_argument("--rounds", type=positive, default=0, metavar="N", help="offline: samples of each lane")
    sub.add_argument("--most-output", type=count, default=0, metavar="N",
                     help="tokens of a request at most; what was cut is said beside the number")  # fmt: skip
    sub.add_argument("--most-prompts", type=count, default=0, metavar="N", help="requests of a point at most")
    sub.add_argument("--seconds", type=seconds, metavar="N", help="start no server later than that")
    sub.add_argument("--together", action="store_true",
                     help="servers of lanes that are compared are loaded side by side, and take turns point by point")  # fmt: skip
    sub.add_argument("--ready-seconds", type=seconds, default=1800.0, metavar="N",
                     help="how long a server may take to start (default: 1800)")  # fmt: skip
    sub.pass_on()  # what is not known are flags of vLLM, for every lane

    sub = parser.add_task("quality", quality, "compare what a model says with a pack and without", EXAMPLES[1])
    sub.add_argument("model", help="a name on Hugging Face, or a folder")
    sub.add_argument("--pack", type=Path, metavar="FILE", help="the pack; without one stock is compared with itself")
    add_modes(sub)
    sub.add_argument("--load-format", default="auto", metavar="F",
                     help="emmy_random: seeded random weights, no checkpoint is needed (default: auto)")  # fmt: skip
    sub.add_argument(
        "--lengths", type=_counts, default=(7, 64, 512), metavar="N,N", help="prompts (default: 7,64,512 tokens)"
    )
    sub.add_argument(
        "--batches", type=_counts, default=(1, 8), metavar="N,N", help="sequences decoded at once (default: 1,8)"
    )
    sub.add_argument("--context", type=positive, default=32, metavar="N", help="tokens before a decode (default: 32)")
    sub.add_argument("--steps", type=positive, default=16, metavar="N", help="tokens decoded (default: 16)")
    sub.add_argument("--most-kl", type=seconds, default=MOST_KL, metavar="X",
                     help=f"mean KL in nats of a case from which the answer is wrong (default: {MOST_KL})")  # fmt: skip
    sub.add_argument("--gsm8k", type=count, metavar="N", help="also GSM8K by lm-eval, N questions, 0: all")
    sub.add_argument(
        "--out", type=folder, metavar="DIR", help="folder of the logs (default: one that is removed when all went well)"
    )
    add_seed(sub)
    sub.pass_on()  # what is not known are flags of vLLM, for every lane


def _counts(text: str) -> tuple[int, ...]:
    return tuple(positive(w) for w in text.split(","))


def _refuse_disabled(packs: bool) -> None:
    """Raises UsageError where a pack is to be compared and the plugin is switched off: stock would be compared with itself."""
    if packs and config.disabled():
        raise UsageError(
            "EMMY_DISABLE is set, so the lane with a pack would be stock too. Unset it, or leave the pack out"
        )


def _pack(text: str) -> tuple[str, Path]:
    lane, has_lane, path = text.rpartition("=")
    if not path or (has_lane and not lane):
        raise ArgumentTypeError(f"{text!r} names no pack: FILE, or LANE=FILE")
    return lane, Path(path)


# ---------------------------------------------------------------------------------------------------------- serving
def serving(args: Namespace, screen: Screen) -> int:
    from emmy.codegen.files import alone_in
    from emmy.serving.experiment import Changes, read_experiment
    from emmy.serving.installed import find_vllm
    from emmy.serving.offline import InProcess
    from emmy.serving.quality import Asked
    from emmy.serving.results import Results
    from emmy.serving.sitting import Sitting, device_name

    if args.logits and not args.offline:
        raise UsageError("--logits asks the engines that --offline loads: name both")
    changes = Changes(args.model, dict(args.pack), args.lanes, args.points, args.waves, args.most_output, args.most_prompts,
                      args.rounds, args.rest)  # fmt: skip
    experiment = read_experiment(args.experiment, changes)
    _refuse_disabled(any(lane.use for lane in experiment.lanes))
    vllm = find_vllm(plugin=args.offline or any(lane.use for lane in experiment.lanes))
    told = screen.say
    with alone_in(args.out):
        results = Results.open(args.out)
        try:
            if args.offline:
                left = InProcess(experiment, vllm, results, device_name(), told, Asked() if args.logits else None).run()
            else:
                left = Sitting(
                    experiment, vllm, results, device_name(), told, args.seconds, args.ready_seconds, args.together
                ).run()
        finally:
            _conclude(results, screen)
    if left:
        screen.say(f"{counted(left, 'measurement')} left or failed: the same command goes on")
    return int(bool(left))


def _conclude(results: Results, screen: Screen) -> None:
    """The tables, and the report beside the rows."""
    from emmy.serving.compare import entries
    from emmy.serving.page import KINDS, REPORT, page
    from emmy.serving.sitting import failures

    found = entries(results.rows)
    for kind in KINDS:
        _table([e for e in found if e.kind == kind], screen)
    for row in failures(results):
        screen.say(f"failed: lane {row.lane}, {row.point}, wave {row.wave}: {row.message}")
    if results.rows:
        (results.folder / REPORT).write_text(page(results, found), encoding="utf-8")
        screen.say(f"written: {results.folder / REPORT}")


def _table(found: Sequence[Entry], screen: Screen) -> None:
    from emmy.report import table
    from emmy.serving.page import cells, headings

    for e in found:
        screen.record("serving", e)
    rows = [cells(e) for e in found]
    shown = headings(rows)
    if rows:
        screen.show(table(tuple(shown.values()), ([r.get(k) for k in shown] for r in rows)))


# ---------------------------------------------------------------------------------------------------------- quality
def quality(args: Namespace, screen: Screen) -> int:
    from emmy.codegen.files import alone_in
    from emmy.serving.installed import find_vllm
    from emmy.serving.process import kept_when_it_fails

    _refuse_disabled(args.pack is not None)
    vllm = find_vllm(plugin=True)
    if args.out:
        with alone_in(args.out):
            return _quality(args, vllm, args.out, screen)
    with kept_when_it_fails("emmy-quality-") as where:
        return _quality(args, vllm, where, screen)


def _quality(args: Namespace, vllm: Vllm, where: Path, screen: Screen) -> int:
    from emmy.report import record_of, table
    from emmy.serving import quality as q
    from emmy.serving.engine import Spec

    if args.pack is None and modes_asked(args):
        raise UsageError("--deterministic, --unmeasured and --parts are ways to use a pack: name one, --pack FILE")
    use = used_as_asked(args.pack, args) if args.pack else None
    flags = ("--load-format", args.load_format, *args.rest)
    stock, other = (
        Spec(name, args.model, flags, u, {}) for name, u in ((q.STOCK, None), ("emmy" if use else "again", use))
    )
    asked = q.Asked(args.lengths, args.batches, args.context, args.steps, args.seed)
    found = q.agreements(vllm, stock, other, asked, where, screen.say)
    for a in found:
        screen.record("agreement", a)
    head = ("case", "positions", "largest difference", "mean", "KL mean", "KL max", "same top-1", "same sequences")
    screen.show(table(head, ([_brief(x) for x in record_of(a).values()] for a in found)))
    if args.gsm8k is not None:
        _gsm8k(args, vllm, (stock, other), where, screen)
    if (a := q.worst(found)).kl_mean > args.most_kl:
        screen.say(f"{a.case}: mean KL {a.kl_mean:.3g} is above {args.most_kl:g}: the lanes do not say the same")
        return WrongAnswer.exit_code
    return 0


def _brief(x: object) -> object:
    return f"{x:.3g}" if isinstance(x, float) else x


def _gsm8k(args: Namespace, vllm: Vllm, specs: Sequence[Spec], where: Path, screen: Screen) -> None:
    from emmy.serving import quality as q

    if why := q.why_no_gsm8k(vllm, args.load_format):
        screen.say(f"no GSM8K: {why}")
        screen.record("gsm8k", {"lane": "", "why": why})
        return
    for spec in specs:
        scores = q.gsm8k(vllm, spec, where, args.gsm8k, screen.say)
        screen.rows("gsm8k", [{"lane": spec.name, **scores}])
