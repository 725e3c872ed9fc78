"""Every metric of the models that a selection rule picked: per held-out set, and averaged as the summary does."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np

from xdm_ft.evaluation.records import Held, Record, Runs
from xdm_ft.evaluation.summary import Spread
from xdm_ft.evaluation.trials import picked_trials
from xdm_ft.report.finished import Run
from xdm_ft.report.table_rows import metric_words
from xdm_ft.runtime.tensors import Score


class Measure(NamedTuple):
    """A column: its name in results.csv, the attribute of `Score`, and how a seed's held-out sets become one value."""

    name: str
    attribute: str
    worst: bool = False  # the lowest of the held-out sets, instead of their mean

    @property
    def label(self) -> str:
        """Its name in tables."""
        return metric_words(self.name)


MEASURES = (
    Measure("accuracy", "accuracy"),
    Measure("balanced_accuracy", "balanced_accuracy"),
    Measure("macro_f1", "macro_f1"),
    Measure("auroc", "auroc"),
    Measure("worst_domain", "worst_domain_accuracy", worst=True),
    Measure("worst_class", "worst_class_recall"),
    Measure("ece", "ece"),
    Measure("nll", "nll"),
)


def other_measures(metric: str) -> list[Measure]:
    """The columns of the table below the first one, which shows `metric`."""
    return [measure for measure in MEASURES if measure.name not in ("macro_f1", metric)]


class Picked:
    """The models of a run that one selection rule picked: of each method, held-out set and seed one trial."""

    def __init__(self, run: Run, rule: str) -> None:
        self.run, self.rule = run, rule

    @cached_property
    def records(self) -> list[Record]:
        """Those of failed and skipped models included, as in the summary."""
        return picked_trials(self.run.every, self.rule, self.run.metric)

    @cached_property
    def held_out(self) -> tuple[Held, ...]:
        return tuple(dict.fromkeys(record.test_domains for record in self.records))

    def of(self, method: str) -> list[Record]:
        return [record for record in self.records if record.method == method]

    def mean(self, method: str, measure: Measure) -> Spread:
        """The measure over all held-out sets: mean and spread over the seeds that have a value for every set."""
        by_seed = self._runs(method, measure, self.held_out).by_seed
        return Spread.of([float(min(values) if measure.worst else np.mean(values)) for values in by_seed])

    def on(self, method: str, held: Held, measure: Measure) -> Spread:
        """The measure on one held-out set: mean and spread over the seeds that have a value."""
        return Spread.of([values[0] for values in self._runs(method, measure, (held,)).by_seed])

    def headline(self, method: str, held: Held) -> Spread:
        """The metric of the recipe on one held-out set."""
        return self.on(method, held, Measure(self.run.metric, self.run.metric))

    def accuracies(self, method: str, held: Held) -> Mapping[str, Spread]:
        """{domain: accuracy} of one held-out set."""
        found: dict[str, list[float]] = {}
        for score in self.scores(method, held):
            for domain, entry in score.per_domain.items():
                found.setdefault(domain, []).append(entry["accuracy"])
        return {domain: Spread.of(values) for domain, values in found.items()}

    def scores(self, method: str, held: Held) -> list[Score]:
        """The metrics on the test images, one per seed that has them."""
        runs = self._runs(method, MEASURES[0], (held,))
        return [score for record in runs.records if (score := runs.score(record)) is not None]

    def _runs(self, method: str, measure: Measure, held_out: tuple[Held, ...]) -> Runs:
        records = tuple(record for record in self.of(method) if record.test_domains in held_out)
        return Runs(method, self.rule, measure.attribute, held_out, records)
