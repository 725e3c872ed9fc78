"""`xdm-ft run`: runs a recipe and prints its table to standard output."""

from __future__ import annotations

import logging

from xdm_ft.experiment import run
from xdm_ft.recipe.read import Recipe
from xdm_ft.report.tables import print_table

logger = logging.getLogger("xdm_ft")


def run_recipe(recipe: Recipe, show: bool) -> int:
    """Returns the exit status: 1 if a model failed, else 0. `show`: whether this process prints the table."""
    results = run(recipe)
    if show:
        print_table(results.document)
        logger.info("results in %s", results.path)
    return 1 if results.failed else 0
