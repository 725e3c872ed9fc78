"""What a run has found, typed from disk to reader. Here: the models of one method under one selection rule."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from scipy.special import logit

from xdm_ft.core import DomainSet, Score
from xdm_ft.evaluation.intervals import NewSite, new_site, smooth_share
from xdm_ft.results.model import TEST, Record, group_by, held_out_of
from xdm_ft.results.trials import selection_value


@dataclass(frozen=True)
class Runs:
    """The records of one method; values are those of one selection rule and metric."""

    method: str
    rule: str
    metric: str
    held_out: tuple[DomainSet, ...]  # all held-out sets of the experiment where the metric is defined, in order
    records: tuple[Record, ...]
    deterministic: bool = False  # whether all seeds would give the same model

    def value(self, record: Record) -> float | None:
        score = self.score(record)
        return None if score is None else getattr(score, self.metric)

    def score(self, record: Record) -> Score | None:
        """The picked weights' metrics on the test images; None if the rule picked none."""
        pick = record.selected.get(self.rule)
        return pick.metrics[TEST] if record.status == "ok" and pick is not None else None

    @property
    def planned_seeds(self) -> list[int]:
        return sorted({record.seed for record in self.records})

    @property
    def values(self) -> dict[tuple[DomainSet, int], float]:
        """{(held-out domains, seed): metric} of the records that have a value."""
        return {(r.test_domains, r.seed): value for r in self.records if (value := self.value(r)) is not None}

    @property
    def complete_seeds(self) -> list[int]:
        """The seeds that have a value for every held-out set; only they enter means."""
        values = self.values
        # a mean over the sets that are there would gain from a model that failed on the hardest one
        seeds = self.planned_seeds if self.held_out else []
        return [seed for seed in seeds if all((held, seed) in values for held in self.held_out)]

    @property
    def folds(self) -> list[list[int]] | None:
        """The positions in `held_out` of the domains of each fold; None if every set has models of its own."""
        fold_of = {record.test_domains: record.fold for record in self.records if record.fold is not None}
        positions = group_by(range(len(self.held_out)), lambda i: fold_of.get(self.held_out[i]))
        return [*positions.values()] if fold_of else None


def runs_by_method(
    records: Sequence[Record], methods: Sequence[str], rule: str, metric: str, deterministic: Collection[str] = ()
) -> dict[str, Runs]:
    """Returns {method: its records}, in the order of `methods`; methods without a record are left out.

    `records`: as `by_site` returns them.
    """
    held_out = defined_sets(records, rule, metric)
    by_method = {method: tuple(record for record in records if record.method == method) for method in methods}
    return {m: Runs(m, rule, metric, held_out, of_m, m in deterministic) for m, of_m in by_method.items() if of_m}


def defined_sets(records: Sequence[Record], rule: str, metric: str) -> tuple[DomainSet, ...]:
    """Returns the held-out sets on which the metric is defined, which the labels of their images alone decide."""
    undefined = set[DomainSet]()
    for record in records:
        pick = record.selected.get(rule) if record.status == "ok" else None
        if pick is not None and getattr(pick.metrics[TEST], metric) is None:
            undefined.add(record.test_domains)
    return tuple(held for held in held_out_of(records) if held not in undefined)


def new_site_of(runs: Runs) -> NewSite | None:
    """Returns the distribution of a method's metric at a new site; None for fewer than three held-out sets."""
    by_set, folds = values_by_set(runs), runs.folds
    if runs.metric != "accuracy":
        return new_site([*by_set.values()], folds=folds)
    images = {record.test_domains: score.n for record in runs.records if (score := runs.score(record)) is not None}
    logits = [logit(smooth_share(values, images[held])) for held, values in by_set.items()]
    return new_site(logits, "logit", folds)


def one_more_domain(runs: Runs, domains: Collection[str]) -> float | None:
    """Returns the mean test value minus that of models that trained on one domain less; None if it is not known.

    The selection value of `cross_domain` is the mean over models that leave out one more domain and are measured on it,
    on all of its images but the validation part, a stratified sample. If each of the `domains` of the data is held out
    once, every domain counts the same in both means. A selection value is the best of the steps, so the difference is
    rather too small.
    """
    if runs.rule != "cross_domain" or runs.folds is not None or {*runs.held_out} != {(name,) for name in domains}:
        return None
    selected = {r.key[1:3]: value for r in runs.records if (value := selection_value(r, runs.rule)) is not None}
    values = runs.values
    pairs = [(held, seed) for held in runs.held_out for seed in runs.complete_seeds]
    if not pairs or not selected.keys() >= {*pairs}:
        return None
    return float(np.mean([values[pair] - selected[pair] for pair in pairs]))


def values_by_set(runs: Runs) -> dict[DomainSet, np.ndarray]:
    """{held-out set: the values [S] that count}."""
    values = runs.values
    return {held: np.array([values[held, s] for s in seeds]) for held, seeds in seeds_by_set(runs).items()}


def selected_by_set(runs: Runs) -> dict[DomainSet, float | None]:
    """{held-out set: the mean selection value of the models whose values count}; None where one of them has none."""
    values = {(record.test_domains, record.seed): selection_value(record, runs.rule) for record in runs.records}
    of_sets = {held: [values[held, seed] for seed in seeds] for held, seeds in seeds_by_set(runs).items()}
    known = {held: [value for value in of if value is not None] for held, of in of_sets.items()}
    return {held: fmean(known[held]) if of and len(known[held]) == len(of) else None for held, of in of_sets.items()}


def seeds_by_set(runs: Runs) -> dict[DomainSet, list[int]]:
    """{held-out set: the seeds whose values count}: those that have every set; if there is none, all that it has."""
    seeds, values = runs.complete_seeds, runs.values
    return {held: [s for s in seeds or runs.planned_seeds if (held, s) in values] for held in runs.held_out}
