"""`emmy deploy local`: a recipe carried out on this machine: looks whether all is there, finds or builds the pack, serves."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from emmy.cli import serve
from emmy.cli.verb import Verb, VerbParser, add_home, add_tasks
from emmy.errors import UsageError
from emmy.report import Screen, counted

if TYPE_CHECKING:
    from emmy.serving.recipe import Card, Recipe

EXAMPLES = {"local": "deploy local --recipe recipes/gemma-4-12B-it.toml"}


def configure(parser: ArgumentParser) -> None:
    sub = add_tasks(parser, EXAMPLES)("local", _local, "serve a recipe's model with its pack on this machine")
    assert isinstance(sub, VerbParser)
    sub.pass_on()
    sub.add_argument(
        "--recipe", type=Path, required=True, metavar="FILE", help="a .toml file, such as those in recipes/"
    )
    sub.add_argument("--model", default="", help="instead of the recipe's: a folder with its weights")
    serve.add_pack(sub)
    sub.add_argument("--rebuild", action="store_true", help="build the pack anew from the rows that are stored now")
    sub.add_argument(
        "--bench", nargs="?", const=serve.POINT, metavar="POINT", help="measure one point of work instead of serving on"
    )
    sub.add_argument("--dry-run", action="store_true", help="look, find or build the pack, and print the command")
    add_home(sub)


def run(args: Namespace, screen: Screen) -> int:
    done: int = args.task(args, screen)
    return done


def _local(args: Namespace, screen: Screen) -> int:
    from dataclasses import replace

    from emmy.serving.installed import find_vllm
    from emmy.serving.recipe import card_here, model_state, read_recipe

    recipe = read_recipe(args.recipe)
    recipe = replace(recipe, model=args.model or recipe.model)
    vllm = find_vllm(plugin=not args.stock)
    card = card_here(recipe)
    screen.say(f"card:  {card.product}, {card.memory_gib:.0f} GiB are needed")
    screen.say(f"vLLM:  {vllm.version}")
    screen.say(f"model: {model_state(recipe)}")
    if not args.stock:
        args.pack = args.pack or _pack(args, recipe, card, screen)
        screen.say(f"pack:  {args.pack}")
    use = serve.used(args)
    return serve.start(vllm, recipe.model, (*recipe.flags_on(card), *args.rest), use, args, screen)


def _pack(args: Namespace, recipe: Recipe, card: Card, screen: Screen) -> Path:
    """The card's pack: found, or built of what is stored."""
    from emmy import config
    from emmy.serving.recipe import built_pack, find_pack

    cache = config.cache_dir()
    if not args.rebuild and (found := find_pack(card, args.recipe, cache)):
        return found
    from emmy import api
    from emmy.report import Bar

    path = built_pack(card, cache)
    screen.say(f"building {path} of {', '.join(recipe.ops)}")
    with Bar(screen) as bar:
        made = api.build_pack(recipe.ops, path, gpu=card.target, home=args.home, on_progress=bar)
    served = sum(r.use == "emmy" for c in made.manifest.cases for r in c.ranges)
    if made.manifest.predicted or not served:
        raise UsageError(
            f"nothing was measured on {card.product} that wins: {path} would leave all to stock. Tune first: `emmy tune --gpu "
            f"{card.target} {' '.join(recipe.ops)}`; or serve without a pack: --stock"
        )
    screen.say(f"{counted(len(made.manifest.codes), 'kernel')}, {counted(served, 'range')} of sizes served by Emmy")
    return path


VERB = Verb(
    "deploy", "serves a recipe's model on this machine", tuple(EXAMPLES.values()), configure, run, has_tasks=True
)
