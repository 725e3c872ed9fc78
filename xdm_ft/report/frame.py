"""The models of a run as a table, and what reports compute of it: means over seeds, and costs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from xdm_ft.evaluation.records import SPLIT, Held, Record, set_name
from xdm_ft.evaluation.summary import Spread
from xdm_ft.evaluation.trials import picked_trials
from xdm_ft.report.finished import Run
from xdm_ft.report.section import mean_of
from xdm_ft.report.words import metric_words

if TYPE_CHECKING:
    import pandas

SCORES = (
    "accuracy", "balanced_accuracy", "macro_f1", "auroc", "worst_domain_accuracy", "worst_class_recall", "ece", "nll",
    "n", "per_domain",
)  # fmt: skip


def frame(
    records: Iterable[Record], rules: Collection[str] | None = None, splits: Collection[str] | None = None
) -> pandas.DataFrame:
    """Returns a row per model × selection rule × split, of these rules and splits (None: of all).

    Columns: method, held_out (name of the set), seed, trial, rule, split, step, value (by which the rule picked), and
    those of `SCORES`, whose numbers are fractions and None where they are not defined. Models that failed have no row.
    """
    import pandas

    rows = [
        (
            *(record.method, set_name(record.test_domains), record.seed, record.trial, rule, split),
            *(pick.step, pick.value),
            *(getattr(score, name) for name in SCORES),
        )
        for record in records
        if record.status == "ok"
        for rule, pick in record.selected.items()
        if rules is None or rule in rules
        for split, score in pick.metrics.items()
        if splits is None or split in splits
    ]
    columns = ["method", "held_out", "seed", "trial", "rule", "split", "step", "value", *SCORES]
    return pandas.DataFrame(rows, columns=columns)


class Measure(NamedTuple):
    """A column of tables: its name in results.csv, that in `SCORES`, and how a seed's sets become one value."""

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
        by_seed = self._by_seed(method, self.held_out, measure)
        return Spread.of([float(values.min() if measure.worst else np.mean(values)) for values in by_seed])

    def on(self, method: str, held: Held, measure: Measure) -> Spread:
        """Returns the measure on one held-out set: mean and spread over the seeds that have a value."""
        return Spread.of([float(values[0]) for values in self._by_seed(method, (held,), measure)])

    def accuracies(self, method: str, held: Held) -> Mapping[str, Spread]:
        """Returns {domain: accuracy} of one held-out set."""
        of_domains: dict[str, list[float]] = {}
        for per_domain in self._on_set(method, held)["per_domain"]:
            for domain, entry in per_domain.items():
                of_domains.setdefault(domain, []).append(entry["accuracy"])
        return {domain: Spread.of(values) for domain, values in of_domains.items()}

    def images(self, method: str, held: Held) -> int | None:
        """Returns the number of test images; None without a model."""
        return next((int(n) for n in self._on_set(method, held)["n"]), None)

    def _on_set(self, method: str, held: Held) -> pandas.DataFrame:
        rows = self._rows(method)
        return rows[rows["held_out"] == set_name(held)]

    @cached_property
    def _by_method(self) -> dict[str, pandas.DataFrame]:
        tested = frame(self.records, [self.rule], [SPLIT])
        return {str(method): rows for method, rows in tested.groupby("method", sort=False)}

    def _rows(self, method: str) -> pandas.DataFrame:
        return self._by_method[method] if method in self._by_method else frame([])

    def _by_seed(self, method: str, sets: Sequence[Held], measure: Measure) -> np.ndarray:
        """Returns the values of the seeds, in order, that have one for every set: [seeds,sets]."""
        table = self._rows(method).pivot(index="seed", columns="held_out", values=measure.score)
        complete = table.reindex(columns=[set_name(held) for held in sets]).dropna()
        return np.asarray(complete, dtype=float)


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
