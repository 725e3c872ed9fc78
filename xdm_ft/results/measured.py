"""What reports compute of the models of a run: means over seeds, costs, and counts over their predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from xdm_ft.core import DomainSet, Interval, Score
from xdm_ft.evaluation.estimates import Spread, mean_of
from xdm_ft.evaluation.intervals import HeldOutValues, interval_of, over_seeds_and_groups
from xdm_ft.evaluation.metrics import ECE_BINS, confidence_bin
from xdm_ft.evaluation.predictions import Prediction, effective_number, jackknife_variance, without_each_group
from xdm_ft.results import SPLIT, grouped
from xdm_ft.results.model import Record
from xdm_ft.results.trials import picked_trials


class Measure(NamedTuple):
    """A column of tables: its name in results.csv, that in `Score`, and how a seed's sets become one value."""

    name: str
    score: str
    worst: bool = False  # the lowest of the held-out sets, instead of their mean


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

    def __init__(self, records: Sequence[Record], rule: str, metric: str) -> None:
        self.records = picked_trials(records, rule, metric)
        self.held_out = tuple(dict.fromkeys(record.test_domains for record in self.records))
        self._scores: dict[tuple[str, DomainSet], dict[int, Score]] = {}  # by seed; of the test images
        for record in self.records:
            if record.status == "ok" and rule in record.selected:
                of_seeds = self._scores.setdefault((record.method, record.test_domains), {})
                of_seeds[record.seed] = record.selected[rule].metrics[SPLIT]

    def mean(self, method: str, measure: Measure) -> Spread:
        """Returns the measure over all held-out sets: mean and spread over the seeds that have a value for each."""
        by_set = [self._values(method, held, measure) for held in self.held_out]
        seeds = sorted(set(by_set[0]).intersection(*by_set[1:])) if by_set else []
        by_seed = [[values[seed] for values in by_set] for seed in seeds]
        return Spread.of([min(values) if measure.worst else float(np.mean(values)) for values in by_seed])

    def on(self, method: str, held: DomainSet, measure: Measure) -> Spread:
        """Returns the measure on one held-out set: mean and spread over the seeds that have a value."""
        values = self._values(method, held, measure)
        return Spread.of([values[seed] for seed in sorted(values)])

    def accuracies(self, method: str, held: DomainSet) -> Mapping[str, Spread]:
        """Returns {domain: accuracy} of one held-out set."""
        of_domains: dict[str, list[float]] = {}
        for score in self._scores.get((method, held), {}).values():
            for domain, entry in score.per_domain.items():
                of_domains.setdefault(domain, []).append(entry["accuracy"])
        return {domain: Spread.of(values) for domain, values in of_domains.items()}

    def images(self, method: str, held: DomainSet) -> int | None:
        """Returns the number of test images; None without a model."""
        return next((score.n for score in self._scores.get((method, held), {}).values()), None)

    def _values(self, method: str, held: DomainSet, measure: Measure) -> dict[int, float]:
        scores = self._scores.get((method, held), {})
        values = {seed: getattr(score, measure.score) for seed, score in scores.items()}
        return {seed: float(value) for seed, value in values.items() if value is not None}


class TrainingCost(NamedTuple):
    """The mean cost of training one model; None where no model has the number."""

    trained_parameters: float | None
    train_seconds: float | None
    peak_memory: float | None  # bytes


def costs(records: Sequence[Record]) -> dict[str, TrainingCost]:
    """Returns {method: mean cost of its trained models}, of all seeds, held-out sets and trials."""
    trained = grouped((record for record in records if record.status == "ok"), lambda record: record.method)
    return {
        method: TrainingCost(*(mean_of(getattr(record, name) for record in of_method) for name in TrainingCost._fields))
        for method, of_method in trained.items()
    }


# ----------------------------------------------------------------------------------------------- counts of predictions

LEVELS = 16000  # steps of confidence that risk and coverage distinguish
LOGITS = (-9.0, 95.0)
"""log(p/(1 − p)) of the first and the last step: 1 − p, of the other classes, is told apart in float32 down to e⁻⁹⁵."""
MAX_BYTES = 2_000_000_000  # of predictions that are read: some seconds; of more, whole seeds are left out


@dataclass
class Pool:
    """One method on one held-out set, its seeds pooled."""

    classes: int
    pairs: np.ndarray = field(default_factory=lambda: np.zeros((2, 0), np.int64))
    """(true class · C + predicted class, images) of the pairs that occur: with a thousand classes few do."""
    values: dict[int, float] = field(default_factory=dict)  # {seed: metric} where it is defined, of all seeds
    read: int = 0  # models whose predictions are counted
    bins: np.ndarray = field(default_factory=lambda: np.zeros((ECE_BINS, 3)))  # images, Σ confidence, right ones
    levels: np.ndarray = field(default_factory=lambda: np.zeros((LEVELS, 2), np.int64))  # images, right ones
    groups: float = 0.0  # effective number of groups of test images
    without: np.ndarray | None = None  # Σ over seeds of the metric without each group of test images in turn

    @property
    def counts(self) -> np.ndarray:
        """Images by true and predicted class, int64 [C,C]; an image counts once per seed."""
        counts = np.zeros(self.classes**2, np.int64)
        counts[self.pairs[0]] = self.pairs[1]
        return counts.reshape(self.classes, self.classes)

    def add(self, prediction: Prediction, metric: str) -> None:
        """Counts the predictions of one more model."""
        labels = prediction.images.labels
        right = prediction.predicted == labels  # [n]
        new = np.unique(labels * self.classes + prediction.predicted, return_counts=True)
        codes, position = np.unique(np.concatenate([self.pairs[0], new[0]]), return_inverse=True)
        images = np.bincount(position, np.concatenate([self.pairs[1], new[1]])).astype(np.int64)
        self.pairs = np.stack([codes, images])

        confidence, others = confidences(prediction)
        bins, levels = confidence_bin(confidence), confidence_level(confidence, others)
        self.bins += np.stack([np.bincount(bins, w, ECE_BINS) for w in (None, confidence, right)], 1)
        self.levels += np.stack([np.bincount(levels, w, LEVELS) for w in (None, right)], 1).astype(np.int64)

        # where the metric is defined
        has_values = metric != "auroc" or prediction.per_image is not None
        has_values &= metric != "worst_domain_accuracy" or bool((prediction.images.worst_of >= 0).any())
        without = without_each_group(metric, prediction) if has_values else None
        if self.read == 0:
            self.groups, self.without = effective_number(prediction.images.sizes), without
        else:
            self.without = None if without is None or self.without is None else self.without + without
        self.read += 1


@dataclass(frozen=True)
class Pools:
    """{(method, held-out domains): pool} of the models that a selection rule picked."""

    of: Mapping[tuple[str, DomainSet], Pool]
    read: int  # models
    left_out: int  # models that were not read, as their predictions exceed MAX_BYTES

    def about(self) -> str:
        """Returns a sentence on what the counts hold."""
        if self.left_out:
            return f"Counted over {self.read} of {self.read + self.left_out} models, those of the first seeds."
        return "All seeds are counted."


def pooled(
    records: Sequence[Record],
    size: Callable[[Record], int],
    read: Callable[[Record], Prediction],
    classes: int,
    rule: str,
    metric: str,
) -> Pools:
    """Returns the pools of the models that a rule picked, one per method and held-out domains.

    `size` returns the bytes of a model's predictions, and `read` these: one model's at a time are in memory. As many
    seeds are read as MAX_BYTES allows, and one at least.
    """
    total, seeds = 0, set[int]()
    for seed, of_seed in sorted(grouped(records, lambda record: record.seed).items()):
        total += sum(map(size, of_seed))
        # whole seeds: a part of one would count some domains more often than others
        if seeds and total > MAX_BYTES:
            break
        seeds.add(seed)

    pools: dict[tuple[str, DomainSet], Pool] = {}
    for record in records:
        pool = pools.setdefault(record.key[:2], Pool(classes))
        value = getattr(record.selected[rule].metrics[SPLIT], metric)
        if value is not None:
            pool.values[record.seed] = value
        if record.seed in seeds:
            pool.add(read(record), metric)
    counted = sum(pool.read for pool in pools.values())
    return Pools(pools, counted, len(records) - counted)


def confidence_level(confidence: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Returns the number of each confidence's step, int64 [n], equal in log odds; arguments as from `confidences`."""
    # probabilities of 0 become ∓∞, which `clip` brings to the ends
    with np.errstate(divide="ignore"):
        logits = np.log(confidence) - np.log(others)
    steps = (np.clip(logits, *LOGITS) - LOGITS[0]) / (LOGITS[1] - LOGITS[0]) * LEVELS
    return np.minimum(steps.astype(np.int64), LEVELS - 1)


def confidences(prediction: Prediction) -> tuple[np.ndarray, np.ndarray]:
    """Returns the probability of the predicted class, and of all others, float64 [n], under the recipe's own rule.

    The second one orders images whose first is rounded to 1, unless the predicted class's alone was kept.
    """
    assert prediction.probabilities is not None, "of the recipe's own rule they are kept"
    p = prediction.probabilities.astype(np.float64)
    if p.ndim == 1:
        return p, 1 - p
    predicted, every = p.argmax(1), np.arange(len(p))
    confidence = p[every, predicted]
    p[every, predicted] = 0
    return confidence, p.sum(1)


def interval(pools: Sequence[Pool], metric: str) -> Interval | None:
    """Returns the 95% interval over seeds and test images of a method's mean over held-out sets; None if not known.

    The sets need the same seeds. With one seed the interval is over test images alone.
    """
    if not pools or len({tuple(sorted(pool.values)) for pool in pools}) > 1:
        return None
    sets = []
    for pool in pools:
        variance = None
        if pool.without is not None and pool.groups >= 2:
            variance = jackknife_variance(pool.without / pool.read)
        sets.append(HeldOutValues(np.array([pool.values[seed] for seed in sorted(pool.values)]), variance, pool.groups))
    return interval_of(metric, over_seeds_and_groups(sets), sum(pool.groups for pool in pools))
