"""What the Tab key offers (by argcomplete) besides verbs and options. Nothing heavy is imported: a reader waits."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def complete(parser: argparse.ArgumentParser) -> None:
    """Answers the shell, and ends the process: called when the shell has set `_ARGCOMPLETE`."""
    import argcomplete

    argcomplete.autocomplete(parser, always_complete_options="long")


def recipes(prefix: str, **_: Any) -> Iterable[str]:
    """Returns the packaged recipes, and the folders and YAML files that begin with the prefix."""
    from argcomplete.completers import FilesCompleter

    from xdm_ft.recipe.text import recipe_folder

    return [*(path.stem for path in recipe_folder().glob("*.yaml")), *FilesCompleter(["yaml", "yml"])(prefix)]


def overrides(parsed_args: argparse.Namespace, **_: Any) -> Iterable[str]:
    """Returns `key.sub=` for all keys of the recipe before."""
    from xdm_ft.recipe.check import known_keys
    from xdm_ft.recipe.text import read_recipe, recipe_keys
    from xdm_ft.runtime.errors import UserError

    try:
        return [f"{key}=" for key in recipe_keys(read_recipe(parsed_args.recipe, []).values, known_keys())]
    except UserError:  # the verb itself says what is wrong
        return []


def models(action: argparse.Action, parsed_args: argparse.Namespace, **_: Any) -> Iterable[str]:
    """Returns the methods, test domains, seeds or trials in results.json that fit the words before."""
    try:
        runs = json.loads(Path(parsed_args.run_dir, "results.json").read_bytes())["runs"]
        found = [run | {"test_domain": ",".join(run["test_domains"])} for run in runs if run["status"] == "ok"]
    except (OSError, ValueError, KeyError, TypeError):  # `retrain` itself says what is wrong
        return []
    for before in ("method", "test_domain", "seed"):
        if before == action.dest:
            break
        found = [run for run in found if run[before] == getattr(parsed_args, before)]
    return dict.fromkeys(str(run[action.dest]) for run in found)
