"""`xdm-ft run`: runs a recipe and prints its results."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from xdm_ft.cli.answer import Answer
from xdm_ft.recipe.text import read_recipe, say_if_finished

if TYPE_CHECKING:
    from xdm_ft.recipe.settings import Recipe


def main(arguments: argparse.Namespace) -> Answer:
    say_if_finished(read_recipe(arguments.recipe, arguments.overrides))  # before the imports that take seconds
    from xdm_ft.cli.recipe import load_recipe

    return run_recipe(load_recipe(arguments))


def run_recipe(recipe: Recipe) -> Answer:
    """Returns what stands in results.json, but for the recipe and the single models. Status 1: a model failed."""
    from xdm_ft.experiment import run
    from xdm_ft.report.headline import show_headline

    results = run(recipe)
    document = {
        "path": results.path,
        "summary": [row.to_json() for row in results.rows],
        "comparisons": [row.to_json() for row in results.comparisons],
        "final_fit": results.final_fit,
        "failed": results.failed,
    }
    return Answer(document, lambda: show_headline(results.as_read), status=1 if results.failed else 0)
