"""What `xdm_ft.run` and `xdm_ft.open` return, and how a run ends with its reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xdm_ft import experiment
from xdm_ft.experiment.final_fit import FitRequest
from xdm_ft.recipe.settings import Recipe
from xdm_ft.report.csv import COMPARED, comparison_row
from xdm_ft.report.headline import sentence
from xdm_ft.report.markup import notebook_html
from xdm_ft.report.sections.results import results
from xdm_ft.report.words import short
from xdm_ft.report.written import refresh_reports
from xdm_ft.results.model import Record
from xdm_ft.results.run import Run, read_run
from xdm_ft.results.table import Comparison, SummaryRow
from xdm_ft.runtime.errors import UserError, did_you_mean, join_names, plural, printable


@dataclass(frozen=True, repr=False)
class Results:
    """The results of a run, as in its results.json. Accuracies are fractions."""

    run: Run  # as it is read from the run directory

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.run.path

    @property
    def records(self) -> list[Record]:
        """One per model, in the recipe's order."""
        return self.run.every

    @property
    def rows(self) -> list[SummaryRow]:
        """One per selection rule and method, the recipe's own rule first."""
        return self.run.rows

    @property
    def document(self) -> dict[str, Any]:
        """All of results.json."""
        return {key: value for key, value in self.run.results.items() if key != "checksum"} | {
            "runs": [*self.run.results["runs"]]
        }

    @property
    def final_fit(self) -> dict[str, Any] | None:
        """The method that held-out domains prefer, trained on all images."""
        return self.run.final_fit

    @property
    def final_fits(self) -> dict[str, dict[str, Any]]:
        """{method: its final fit}"""
        return self.run.final_fits

    @property
    def failed(self) -> bool:
        """Whether the training of a model failed."""
        return self.run.failed

    @property
    def comparisons(self) -> list[Comparison]:
        """The comparisons between the rows, with both verdicts."""
        return self.run.comparisons

    def __repr__(self) -> str:
        methods = join_names([short(row.method) for row in self.run.recipe_rows])
        models = f"{plural(len(self.records), 'model')}{', some failed' * self.failed} of {methods or 'no method'}"
        return f"<Results of {printable(self.path)}: {models}; selection: {self.run.recipe_rule}>"

    def _repr_html_(self) -> str:
        """The finding and the table, as a notebook shows them."""
        return notebook_html(sentence(self.run), results(self.run, self.run.recipe_rule).tables)

    def table(self, selection: str | None = None) -> list[dict[str, Any]]:
        """Returns the rows of one selection rule as flat dicts: `pandas.DataFrame(results.table())`.

        `mean_low` and `mean_high` are the mean's 95% interval over seeds and test images.
        The difference to `compared_with`, its intervals and the verdicts `here` and `elsewhere` are named as in
        results.csv. What is not known is None.

        `selection`: by default the recipe's own rule; "oracle", which reads test labels, and the run's other rules on
        request. Raises `UserError` for a rule that the run does not have.

        >>> results = xdm_ft.open("output/demo")
        >>> [(row["method"], row["selection"], row["n"]) for row in results.table()]
        [('zero_shot', 'train_val', 1), ('linear_probe', 'train_val', 10)]
        """
        rules = list(dict.fromkeys([self.run.recipe_rule, *self.run.rules]))
        rule = rules[0] if selection is None else selection
        if rule not in rules:
            raise UserError(f'{self.path}: selection: the run has no rule "{rule}"{did_you_mean(rule, rules)}')
        rows = [row for row in self.rows if row.selection == rule]
        beside = self.run.beside_rows(rule)
        versus = {method: comparison_row(compared, self.run.metric) for method, compared in beside.items()}
        return [row.flat() | dict.fromkeys(COMPARED) | versus.get(row.method, {}) for row in rows]


def run(recipe: Recipe, fits: Sequence[FitRequest] = ()) -> Results:
    """Runs a recipe to its reports, see `experiment.run`."""
    return Results(experiment.run(recipe, refresh_reports, fits))


def read_results(path: Path) -> Results:
    """Returns the results of a finished run. Raises `UserError` if the folder holds none, or damaged ones."""
    run = read_run(path)
    run.refuse_unfinished()
    return Results(run)
