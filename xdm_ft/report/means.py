"""What reports compute of the models of a run: means over seeds, and costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from xdm_ft.evaluation.records import SPLIT, Held, Record
from xdm_ft.evaluation.summary import Spread
from xdm_ft.evaluation.trials import picked_trials
from xdm_ft.report.finished import Run
from xdm_ft.report.section import mean_of
from xdm_ft.report.words import metric_words
from xdm_ft.runtime.tensors import Score


class Measure(NamedTuple):
    """A column of tables: its name in results.csv, that in `Score`, and how a seed's sets become one value."""

    name: str
    score: str
    worst: bool = False  # the lowest of the held-out sets, instead of their mean

    @property
    def label(self) -> str:
        """Its name in tables."""
        return metric_words(self.name)


ECE = Measure("ece", "ece")
MEASURES = (
    *(Measure(name, name) for name in ("accuracy", "balanced_accuracy", "macro_f1", "auroc")),
    Measure("worst_domain", "worst_domain_accuracy", worst=True),
    Measure("worst_class", "worst_class_recall"),
    ECE,
    Measure("nll", "nll"),
)


class Picked:
    """The models of a run that one selection rule picked: of each method, held-out set and seed one trial.

    `records` are also those of failed and skipped models, as in the summary.
    """

    def __init__(self, run: Run, rule: str) -> None:
        self.run, self.rule = run, rule

    @cached_property
    def records(self) -> list[Record]:
        return picked_trials(self.run.every, self.rule, self.run.metric)

    @cached_property
    def held_out(self) -> tuple[Held, ...]:
        return tuple(dict.fromkeys(record.test_domains for record in self.records))

    def mean(self, method: str, measure: Measure) -> Spread:
        """Returns the measure over all held-out sets: mean and spread over the seeds that have a value for each."""
        by_set = [self._values(method, held, measure) for held in self.held_out]
        seeds = sorted(set(by_set[0]).intersection(*by_set[1:])) if by_set else []
        by_seed = [[values[seed] for values in by_set] for seed in seeds]
        return Spread.of([min(values) if measure.worst else float(np.mean(values)) for values in by_seed])

    def on(self, method: str, held: Held, measure: Measure) -> Spread:
        """Returns the measure on one held-out set: mean and spread over the seeds that have a value."""
        values = self._values(method, held, measure)
        return Spread.of([values[seed] for seed in sorted(values)])

    def accuracies(self, method: str, held: Held) -> Mapping[str, Spread]:
        """Returns {domain: accuracy} of one held-out set."""
        of_domains: dict[str, list[float]] = {}
        for score in self._scores.get((method, held), {}).values():
            for domain, entry in score.per_domain.items():
                of_domains.setdefault(domain, []).append(entry["accuracy"])
        return {domain: Spread.of(values) for domain, values in of_domains.items()}

    def images(self, method: str, held: Held) -> int | None:
        """Returns the number of test images; None without a model."""
        return next((score.n for score in self._scores.get((method, held), {}).values()), None)

    def _values(self, method: str, held: Held, measure: Measure) -> dict[int, float]:
        scores = self._scores.get((method, held), {})
        values = {seed: getattr(score, measure.score) for seed, score in scores.items()}
        return {seed: float(value) for seed, value in values.items() if value is not None}

    @cached_property
    def _scores(self) -> dict[tuple[str, Held], dict[int, Score]]:
        """{(method, held-out set): {seed: its metrics on the test images}}"""
        scores: dict[tuple[str, Held], dict[int, Score]] = {}
        for record in self.records:
            if record.status == "ok" and self.rule in record.selected:
                of_seeds = scores.setdefault((record.method, record.test_domains), {})
                of_seeds[record.seed] = record.selected[self.rule].metrics[SPLIT]
        return scores


class Cost(NamedTuple):
    """The mean cost of training one model; None where no model has the number."""

    trained_parameters: float | None
    train_seconds: float | None
    peak_memory: float | None  # bytes


def costs(records: Sequence[Record]) -> dict[str, Cost]:
    """Returns {method: mean cost of its trained models}, of all seeds, held-out sets and trials."""
    by_method: dict[str, list[Record]] = {}
    for record in records:
        if record.status == "ok":
            by_method.setdefault(record.method, []).append(record)
    return {
        method: Cost(*(mean_of(getattr(record, name) for record in trained) for name in Cost._fields))
        for method, trained in by_method.items()
    }
