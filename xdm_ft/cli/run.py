"""`xdm-ft run`: runs a recipe and prints what it found to standard output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from xdm_ft.cli.answer import Answer
from xdm_ft.experiment import run
from xdm_ft.experiment.results import Results
from xdm_ft.recipe.settings import Recipe
from xdm_ft.report.headline import show_headline


@dataclass(frozen=True)
class Ran(Answer):
    results: Results

    @property
    def status(self) -> int:
        """1 if a model failed, else 0."""
        return 1 if self.results.failed else 0

    def show(self) -> None:
        show_headline(self.results.as_read)

    def to_json(self) -> dict[str, Any]:
        """Returns the run directory and what stands in its results.json, but for the recipe and the single models."""
        found = self.results
        rows = [row.to_json() for row in found.rows]
        compared = [row.to_json() for row in found.comparisons]
        about = {"final_fit": found.final_fit, "failed": found.failed}
        return {"path": found.path, "summary": rows, "comparisons": compared, **about}


def run_recipe(recipe: Recipe) -> Ran:
    return Ran(run(recipe))
