"""`xdm-ft run`: the run, and its table on standard output."""

from __future__ import annotations

import logging
import sys

from xdm_ft.experiment import run
from xdm_ft.recipe.read import Recipe
from xdm_ft.report.tables import print_table

logger = logging.getLogger("xdm_ft")


def run_recipe(recipe: Recipe, show: bool) -> int:
    """Returns the exit status: 0, or 1 where a model failed. `show`: this process prints the table."""
    results = run(recipe)
    if show:
        print_table(results.document)
        sys.stdout.flush()
        logger.info("results in %s", results.path)
    return 1 if results.failed else 0
