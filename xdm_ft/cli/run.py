"""`xdm-ft run`: runs a recipe and prints its results."""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from typing import TYPE_CHECKING

from xdm_ft.cli import CommandResult
from xdm_ft.cli.arguments import KEYS
from xdm_ft.recipe.text import read_recipe, say_if_finished
from xdm_ft.runtime.errors import UserError

if TYPE_CHECKING:
    from xdm_ft.recipe.settings import Recipe


def load_recipe(arguments: argparse.Namespace) -> Recipe:
    """Returns the checked recipe, and leaves its keys for the Tab key. Raises `UserError`."""
    from xdm_ft.recipe import check
    from xdm_ft.storage.atomic import replace_text
    from xdm_ft.storage.cache_root import cache_root

    recipe = check.load(arguments.recipe, arguments.overrides)
    with suppress(UserError, OSError):  # without a cache folder that can be written, Tab offers no keys
        path, text = cache_root() / KEYS, json.dumps(check.known_keys())
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_text(path, text)
    return recipe


def main(arguments: argparse.Namespace) -> CommandResult:
    say_if_finished(read_recipe(arguments.recipe, arguments.overrides))  # before the imports that take seconds
    return run_recipe(load_recipe(arguments))


def run_recipe(recipe: Recipe) -> CommandResult:
    """Returns what stands in results.json, but for the recipe and the single models. Status 1: a model failed."""
    from xdm_ft.cli.library import run
    from xdm_ft.report.headline import show_headline

    results = run(recipe)
    document = {
        "path": results.path,
        "summary": [row.to_json() for row in results.rows],
        "comparisons": [row.to_json() for row in results.comparisons],
        "final_fit": results.final_fit,
        "failed": results.failed,
    }
    return CommandResult(document, lambda: show_headline(results.run), status=1 if results.failed else 0)
