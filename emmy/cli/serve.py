"""`emmy serve`: vLLM's server with a kernel pack. What it does not know is vLLM's, and passed on word by word."""

from __future__ import annotations

import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from emmy.cli.verb import Verb
from emmy.errors import UsageError
from emmy.report import Screen

if TYPE_CHECKING:
    from emmy.serving.command import Using
    from emmy.serving.installed import Vllm

POINT = "256/128@8"


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("model", help="what `vllm serve` takes: a name on Hugging Face, or a folder. It comes first")
    add_pack(parser)
    parser.add_argument("--bench", nargs="?", const=POINT, metavar="POINT", help="start, measure one point of work, print it, stop; "
                        f"INPUT/OUTPUT@CONCURRENCY[xREQUESTS] (default: {POINT})")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="print the command that would run")


def add_pack(parser: ArgumentParser) -> None:
    """The options that say what the plugin is told."""
    parser.add_argument("--pack", type=Path, metavar="FILE", help="the kernel pack of this card: `emmy pack build`")
    parser.add_argument("--stock", action="store_true", help="without a pack: vLLM as it is")
    add_modes(parser)


def add_modes(parser: ArgumentParser) -> None:
    """How a pack is used."""
    parser.add_argument("--deterministic", action="store_true",
                        help="a request's tokens do not depend on what it is batched with")  # fmt: skip
    parser.add_argument("--unmeasured", action="store_true", help="also kernels that were never measured on this card")
    parser.add_argument("--parts", type=words, default=(), metavar="A,B",
                        help="only these of what the plugin replaces: linear, lm_head, fusion, attention (default: all)")  # fmt: skip


def words(text: str) -> tuple[str, ...]:
    return tuple(w for w in text.split(",") if w)


def modes_asked(args: Namespace) -> bool:
    """Whether an option of `add_modes` is given."""
    return bool(args.deterministic or args.unmeasured or args.parts)


def used_as_asked(pack: Path, args: Namespace) -> Using:
    """The pack, used as the options of `add_modes` say."""
    from emmy.serving.command import using

    return using(pack, deterministic=args.deterministic, unmeasured=args.unmeasured, parts=args.parts)


def run(args: Namespace, screen: Screen) -> int:
    from emmy.serving.installed import find_vllm

    use = used(args)
    return start(find_vllm(plugin=use is not None), args.model, args.rest, use, args, screen)


def used(args: Namespace) -> Using | None:
    """What the options of `add_pack` ask for; None for stock. Raises UsageError when they say neither, or both."""
    if args.stock:
        if args.pack or modes_asked(args):
            raise UsageError("--stock is vLLM as it is: without --pack, --deterministic, --unmeasured and --parts")
        return None
    if args.pack is None:
        raise UsageError(
            "no pack is named: --pack FILE. `emmy pack build --gpu NAME OP... --out FILE` builds one of what was tuned; `--stock` serves "
            "without one"
        )
    return used_as_asked(args.pack, args)


def start(
    vllm: Vllm, model: str, flags: Sequence[str], use: Using | None, args: Namespace, screen: Screen
) -> int:  # fmt: skip
    """Becomes the server; or, as the options say, shows its command, or measures one point of it."""
    import os

    from emmy import config
    from emmy.serving.command import refuse_card, serve_words

    if use is not None and config.disabled():
        screen.say(
            "EMMY_DISABLE is set: the plugin does nothing, so vLLM serves without the pack, and knows no emmy_random"
        )
    command = vllm.command(*serve_words(model, flags, use))
    pack = use and {"pack": use.pack, "digest": use.digest}
    screen.record("serve", {"command": command, "vllm": vllm.version, **(pack or {"pack": None, "digest": None})})
    if args.dry_run:
        screen.show(shlex.join(command))
        return 0
    if use is not None:
        refuse_card(use)
    if args.bench is not None:
        return _bench(vllm, model, flags, use, args.bench, screen)
    screen.say(f"vLLM {vllm.version}, {f'pack {use.digest[:12]}' if use else 'stock'}: {shlex.join(command)}")
    return os.execv(command[0], command)  # never returns: signals and the exit code are the server's from here on


def _bench(
    vllm: Vllm, model: str, flags: Sequence[str], use: Using | None, point_text: str, screen: Screen
) -> int:  # fmt: skip
    from emmy.serving.client import COLUMNS, client
    from emmy.serving.experiment import parse_point
    from emmy.serving.process import kept_when_it_fails
    from emmy.serving.server import serving

    point = parse_point(point_text)
    with kept_when_it_fails("emmy-serve-") as folder:
        screen.say(f"starting the server; its log is {folder / 'server.log'}, deleted when all went well")
        with (
            client(vllm, folder / "client.log") as asks,
            serving(vllm, model, flags, use, folder / "server.log", "the server") as ready,
        ):
            for line in (*ready.choices, *ready.coverage):
                screen.say(f"  {line}")
            screen.say(f"ready after {ready.startup_s:.0f} s; measuring {point.name}, {point.prompts} requests")
            found = asks.measure(model, ready.flags, ready.url, point, folder)
            startup_s = ready.startup_s
    lane = "emmy" if use else "stock"
    screen.rows("point", [{"lane": lane, "point": point.name, "startup_s": startup_s, **found}], COLUMNS)
    return 0


VERB = Verb(
    "serve",
    "starts vLLM's server with a kernel pack, and takes any flag of `vllm serve`",
    (
        "serve google/gemma-4-12B-it --pack gemma4-12b-h200.emmypack --max-model-len 16384",
        "serve google/gemma-4-12B-it --stock --bench 4096/256@4",
    ),
    configure,
    run,
    passes_on=True,
)
