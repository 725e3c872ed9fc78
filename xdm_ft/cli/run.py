"""`xdm-ft run`: runs a recipe and prints its results."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from xdm_ft.cli.answer import Answer
from xdm_ft.cli.arguments import add_recipe, load_recipe

if TYPE_CHECKING:
    from xdm_ft.recipe.settings import Recipe

HELP = "train and compare all methods of a recipe; resume or grow the run of an earlier start"
EXAMPLES = (
    "xdm-ft run demo",
    "xdm-ft run demo name=long 'methods=[erm,xdomainmix]' training.steps=300 xdomainmix.warmup_steps=100",
)
add_arguments = add_recipe


def main(arguments: argparse.Namespace) -> Answer:
    from xdm_ft.recipe.text import read_recipe, say_if_finished

    say_if_finished(read_recipe(arguments.recipe, arguments.overrides))
    return run_recipe(load_recipe(arguments))


def run_recipe(recipe: Recipe) -> Answer:
    """Returns what stands in results.json, but for the recipe and the single models. Status 1: a model failed."""
    from xdm_ft.experiment import run
    from xdm_ft.report.text import show_headline

    results = run(recipe)
    document = {
        "path": results.path,
        "summary": [row.to_json() for row in results.rows],
        "comparisons": [row.to_json() for row in results.comparisons],
        "final_fit": results.final_fit,
        "failed": results.failed,
    }
    return Answer(document, lambda: show_headline(results.as_read), status=1 if results.failed else 0)
