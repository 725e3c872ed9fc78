"""Arguments that several verbs have, and what the Tab key offers for them. It imports nothing heavy: a user waits."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xdm_ft.runtime.errors import UserError

if TYPE_CHECKING:
    from xdm_ft.export.choose import Choice
    from xdm_ft.export.predictor import Model
    from xdm_ft.recipe.settings import Recipe
KEYS = "keys.json"  # the keys of recipes, in the cache folder


def complete_with(argument: argparse.Action, values: Callable[..., Iterable[str]]) -> None:
    """Sets the function that returns what the Tab key offers for an argument."""
    argument.completer = values  # type: ignore[attr-defined]  # where argcomplete looks for it


def add_recipe(verb: argparse.ArgumentParser, nargs: str | None = None) -> None:
    text = "a file, or the name of a packaged recipe"
    complete_with(verb.add_argument("recipe", metavar="RECIPE", nargs=nargs, help=text), recipe_names)
    text = "changes to the recipe, values as YAML; METHOD.KEY=value sets a key of a method"
    changes = verb.add_argument("overrides", metavar="key.sub=value", nargs="*", default=[], help=text)
    complete_with(changes, override_keys)


def load_recipe(arguments: argparse.Namespace) -> Recipe:
    """Returns the checked recipe, and leaves its keys for the Tab key. Raises `UserError`."""
    from xdm_ft.recipe.check import known_keys, load
    from xdm_ft.storage.atomic import replace_text
    from xdm_ft.storage.cache_root import cache_root

    recipe = load(arguments.recipe, arguments.overrides)
    with suppress(UserError, OSError):  # without a cache folder that can be written, Tab offers no keys
        path, text = cache_root() / KEYS, json.dumps(known_keys())
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_text(path, text)
    return recipe


def recipe_names(prefix: str, **_: Any) -> Iterable[str]:
    """Returns the packaged recipes, and the folders and YAML files that begin with the prefix."""
    from argcomplete.completers import FilesCompleter

    from xdm_ft.recipe.text import recipe_folder

    return [*(path.stem for path in recipe_folder().glob("*.yaml")), *FilesCompleter(["yaml", "yml"])(prefix)]


def override_keys(parsed_args: argparse.Namespace, **_: Any) -> Iterable[str]:
    """Returns `key.sub=` for all keys of the recipe before, once a first verb has left them in the cache folder."""
    from xdm_ft.recipe.text import read_recipe, recipe_keys

    folder = os.environ.get("XDM_FT_CACHE") or "~/.cache/xdm_ft/features"  # `cache_root`, whose import takes seconds
    try:
        keys = json.loads((Path(folder).expanduser() / KEYS).read_text(encoding="utf-8"))
        return [f"{key}=" for key in recipe_keys(read_recipe(parsed_args.recipe, []).values, keys)]
    except (OSError, ValueError, RuntimeError, UserError):  # the verb itself says what is wrong with the recipe
        return []


def recorded_values(action: argparse.Action, parsed_args: argparse.Namespace, **_: Any) -> Iterable[str]:
    """Returns the methods, test domains, seeds or trials in results.json that fit the words before."""
    try:
        runs = json.loads(Path(parsed_args.run_dir, "results.json").read_bytes())["runs"]
        trained = [run | {"test_domain": ",".join(run["test_domains"])} for run in runs if run["status"] == "ok"]
    except (OSError, ValueError, KeyError, TypeError):  # `retrain` itself says what is wrong
        return []
    for before in ("method", "test_domain", "seed"):
        if before == action.dest:
            break
        trained = [run for run in trained if run[before] == getattr(parsed_args, before)]
    return dict.fromkeys(str(run[action.dest]) for run in trained)


def add_choice(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--method", help="name of the method in results.json (default: the one that validation prefers)")
    held_out = "a model that was trained without this domain, instead of the final fit; several joined by commas"
    verb.add_argument("--held-out", metavar="DOMAIN", help=held_out)
    verb.add_argument("--seed", type=int, help="with --held-out: the seed (default: the first)")
    verb.add_argument("--trial", type=int, help="with --held-out: the trial of a search (default: the one picked)")


def choice_of(arguments: argparse.Namespace) -> Choice:
    from xdm_ft.export.choose import Choice

    held_out = None if arguments.held_out is None else tuple(arguments.held_out.split(","))
    return Choice(arguments.method, held_out, arguments.seed, arguments.trial)


def add_model_options(verb: argparse.ArgumentParser) -> None:
    """Adds the options of a verb that computes a model's predictions."""
    verb.add_argument("--encoder-weights", metavar="FILE", help="the encoder's weights, if the model lacks them")
    verb.add_argument("--device", help="as in torch; default: a GPU if there is one")
    verb.add_argument("--precision", choices=["fp32", "bf16", "fp16"], help="default: that of the run")
    size = "images per forward pass (default: 16 on a CPU, 64 on a GPU), which takes as long for fewer"
    verb.add_argument("--batch-size", type=int, metavar="N", help=size)
    add_choice(verb)


def load_model(arguments: argparse.Namespace) -> Model:
    """Returns the model of the options of `add_model_options`. Raises `UserError`."""
    from xdm_ft.export.predictor import load

    if arguments.batch_size is not None and arguments.batch_size < 1:
        raise UserError(f"--batch-size: {arguments.batch_size} is not positive")
    where = {"device": arguments.device, "precision": arguments.precision}
    return load(arguments.model, **where, encoder_weights=arguments.encoder_weights, choice=choice_of(arguments))
