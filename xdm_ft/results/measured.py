"""What is measured of the models of a run: means over seeds, costs, and what their predictions come to.

The predictions of the picked models are read once, when the summary is made. What table, page and card show of them
stands in measured.safetensors: the variance over test images of each mean, counts, and the most confident mistakes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch

from xdm_ft.core import ORACLE, DomainSet, Interval, ModelKey, Score
from xdm_ft.evaluation.estimates import Spread, mean_of
from xdm_ft.evaluation.intervals import HeldOutValues, interval_of, over_seeds_and_groups
from xdm_ft.evaluation.metrics import (
    ECE_BINS,
    confidence_bin,
    confidences,
    expected_calibration_error,
    metric,
    per_image_nll,
)
from xdm_ft.evaluation.predictions import HeldOutImages, Prediction
from xdm_ft.results import Runs, runs_by_method, seeds_by_set, values_by_set
from xdm_ft.results.model import TEST, Record, by_site, group_by, held_out_of
from xdm_ft.results.table import Comparison
from xdm_ft.results.trials import pick_trials
from xdm_ft.results.verdicts import OverImages, Pair, WithoutGroups, compared
from xdm_ft.storage import json_digest
from xdm_ft.storage.lines import Damaged
from xdm_ft.storage.names import predictions_in
from xdm_ft.storage.run_directory import MEASURED, RunDirectory


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
        self.records = by_site(pick_trials(records, rule, metric))
        self.held_out = held_out_of(self.records)
        self._scores: dict[tuple[str, DomainSet], dict[int, Score]] = {}  # by seed; of the test images
        for record in self.records:
            if record.status == "ok" and rule in record.selected:
                of_seeds = self._scores.setdefault((record.method, record.test_domains), {})
                of_seeds[record.seed] = record.selected[rule].metrics[TEST]

    def mean(self, method: str, measure: Measure) -> Spread:
        """Returns the measure over all held-out sets: mean and spread over the seeds that have a value for each."""
        # a set with models and without a value is one where the measure is not defined
        by_set = [
            values
            for held in self.held_out
            if (values := self._values(method, held, measure)) or not self._scores.get((method, held))
        ]
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
    trained = group_by((record for record in records if record.status == "ok"), lambda record: record.method)
    return {
        method: TrainingCost(*(mean_of(getattr(record, name) for record in of_method) for name in TrainingCost._fields))
        for method, of_method in trained.items()
    }


# ------------------------------------------------------------------------------------------- what predictions come to

LEVELS = 16000  # steps of confidence that risk and coverage distinguish
LOGITS = (-9.0, 95.0)
"""log(p/(1 − p)) of the first and the last step: 1 − p, of the other classes, is told apart in float32 down to e⁻⁹⁵."""
MISTAKES = 6  # most confident ones that are kept
MISTAKEN = 5  # models, of the first seeds, whose mistakes are looked at
MAX_VALUES = 1 << 22  # probabilities that are worked on together


class Number(NamedTuple):
    """A number that the predictions of a model come to: a column of tables and results.csv, and a line of the card."""

    words: str
    unit: str  # the metric whose unit it has


NUMBERS = {
    "nll_with_temperature": Number("NLL with a temperature", "nll"),
    "ece_with_temperature": Number("ECE with a temperature", "ece"),
}


class Mistake(NamedTuple):
    """A test image and the wrong class that the models were most sure of."""

    position: int  # among the test images
    label: int
    predicted: int
    wrong: int  # models that were wrong
    models: int
    confidence: float  # the mean over the models that were wrong


@dataclass
class Pool:
    """One method on one held-out set: the predictions of the seeds that count."""

    pairs: np.ndarray = field(default_factory=lambda: np.zeros((2, 0), np.int64))
    """(true class · 2³² + predicted class, images) of the pairs that occur: with a thousand classes few do."""
    levels: np.ndarray = field(default_factory=lambda: np.zeros((3, 0), np.int64))  # level, images, right ones
    bins: np.ndarray = field(default_factory=lambda: np.zeros((ECE_BINS, 3)))  # images, Σ confidence, right ones
    models: int = 0
    every_class: bool = True  # whether the probabilities of all classes were kept
    averaged: float | None = None  # metric of the mean logits over seeds; None: undefined, or not asked for
    numbers: dict[str, float] = field(default_factory=dict)  # those of `NUMBERS` that all models have, means over them
    mistakes: list[Mistake] = field(default_factory=list)

    def counts(self, classes: int) -> np.ndarray:
        """Returns the images by true and predicted class, int64 [C,C]; an image counts once per seed."""
        counts = np.zeros((classes, classes), np.int64)
        counts[self.pairs[0] >> 32, self.pairs[0] & 0xFFFFFFFF] = self.pairs[1]
        return counts

    @property
    def by_level(self) -> np.ndarray:
        """Images and right ones by level of confidence, int64 [LEVELS,2]."""
        dense = np.zeros((LEVELS, 2), np.int64)
        dense[self.levels[0]] = self.levels[1:].T
        return dense


def interval(metric: str, values: Sequence[np.ndarray], over: Sequence[OverImages | None]) -> Interval | None:
    """Returns the 95% interval of the mean over held-out sets; None if it is not known.

    `values` [S] of each set are of the same seeds; `over`: how their means vary with the test images.
    """
    known = [
        HeldOutValues(of_set, of.variance, of.effective)
        for of_set, of in zip(values, over, strict=True)
        if of is not None and len(of_set)
    ]
    estimate = over_seeds_and_groups(known) if len(known) == len(values) else None
    return interval_of(metric, estimate, sum(of.groups for of in known))


def means_of(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the means of those of `NUMBERS` that all have."""
    return {name: float(np.mean([of[name] for of in values])) for name in NUMBERS if all(name in of for of in values)}


ARRAYS = ("pairs", "levels", "bins")  # of a pool
VALUES = tuple(field.name for field in fields(Pool) if field.name not in ARRAYS)


@dataclass(frozen=True)
class RunMeasures:
    """What the predictions of a run's picked models come to. Of a method, the seeds of `seeds_by_set` count."""

    of: str  # `models_digest`
    over_images: Mapping[tuple[str, str, DomainSet], OverImages]  # by selection rule, method and held-out set
    pools: Mapping[tuple[str, DomainSet], Pool]  # by method and held-out set, under the recipe's own rule
    from_zero_shot: Mapping[tuple[str, str, DomainSet], Comparison] = field(default_factory=dict)
    """How methods compare with zero-shot under the same encoder on one held-out set alone, with plain p values. By
    selection rule, method and held-out set."""

    def interval(self, runs: Runs, held: DomainSet | None = None) -> Interval | None:
        """Returns the 95% interval over seeds and test images of the mean on one held-out set, or over all of them.

        None if it is not known, as that over all without a complete seed. With one seed it is over images alone.
        """
        values = values_by_set(runs)
        sets = [*values] if held is None else [held]
        if held is None and not runs.complete_seeds:
            return None
        over = [self.over_images.get((runs.rule, runs.method, held_set)) for held_set in sets]
        return interval(runs.metric, [values[held_set] for held_set in sets], over)

    def numbers(self, method: str, sets: Iterable[DomainSet]) -> dict[str, float]:
        """Returns the means over held-out sets of those of `NUMBERS` that are known of all."""
        return means_of([self.pools[method, held].numbers if (method, held) in self.pools else {} for held in sets])

    def tensors(self) -> tuple[dict[str, np.ndarray], dict[str, str]]:
        """Returns arrays and metadata of measured.safetensors."""
        pools = [[key, *(getattr(pool, name) for name in VALUES)] for key, pool in self.pools.items()]
        over = [[*key, *of] for key, of in self.over_images.items()]
        arrays = {f"{i}.{name}": getattr(pool, name) for i, pool in enumerate(self.pools.values()) for name in ARRAYS}
        versus = [[*key, row.to_json()] for key, row in self.from_zero_shot.items()]
        texts = {"over_images": over, "pools": pools, "from_zero_shot": versus}
        return arrays, {"of": self.of} | {name: json.dumps(rows) for name, rows in texts.items()}

    def write(self, directory: RunDirectory) -> None:
        """Writes measured.safetensors, unless it holds this already."""
        arrays, metadata = self.tensors()
        try:
            kept, kept_metadata = directory.arrays(MEASURED)
            same = metadata.items() <= kept_metadata.items() and arrays.keys() == kept.keys()
            if same and all(np.array_equal(arrays[name], kept[name]) for name in arrays):
                return
        except (Damaged, FileNotFoundError):
            pass
        directory.write_arrays(MEASURED, arrays, metadata)

    @classmethod
    def read(cls, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> RunMeasures:
        over, pools, versus = (json.loads(metadata[name]) for name in ("over_images", "pools", "from_zero_shot"))
        of_sets = {}
        for i, ((method, held), *numbers) in enumerate(pools):
            values = dict(zip(VALUES, numbers, strict=True)) | {name: arrays[f"{i}.{name}"] for name in ARRAYS}
            values["mistakes"] = [Mistake(*mistake) for mistake in values["mistakes"]]
            of_sets[method, tuple(held)] = Pool(**values)
        over_images = {(rule, method, tuple(held)): OverImages(*of) for rule, method, held, *of in over}
        from_zero_shot = {(rule, of, tuple(held)): Comparison.from_json(row) for rule, of, held, row in versus}
        return cls(metadata["of"], over_images, of_sets, from_zero_shot)


class Counter:
    """Counts the predictions of a method on a held-out set, model by model, in the order of the seeds."""

    def __init__(self, metric: str, average: bool) -> None:
        """`average`: whether the metric of the mean logits is wanted."""
        self.metric, self.average, self.pool = metric, average, Pool()
        self._log_p: np.ndarray | float = 0.0  # Σ over models, [n,C]
        self._numbers: list[dict[str, float]] = []  # of each model
        self._wrong: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # confidence, that of others, class

    def add(self, prediction: Prediction, temperature: float | None) -> None:
        """Counts one more model, with the temperature that was fitted for it."""
        p, pool, labels = prediction.probabilities, self.pool, prediction.images.labels
        assert p is not None
        right = prediction.predicted == labels  # [n]
        codes, images = np.unique(labels << 32 | prediction.predicted, return_counts=True)
        pool.pairs = _add_counts(pool.pairs, np.stack([codes, images]))
        confidence, others = _in_blocks(confidence_and_rest, p)
        bins = confidence_bin(confidence)
        pool.bins += np.stack([np.bincount(bins, w, ECE_BINS) for w in (None, confidence, right)], 1)
        levels, position = np.unique(confidence_level(confidence, others), return_inverse=True)
        by_level = [np.bincount(position, w).astype(np.int64) for w in (None, right)]
        pool.levels = _add_counts(pool.levels, np.stack([levels, *by_level]))
        pool.models += 1
        if len(self._wrong) < MISTAKEN:
            self._wrong.append((np.where(right, 0.0, confidence), np.where(right, 0.0, others), prediction.predicted))
        pool.every_class &= p.ndim == 2
        if self.average and pool.every_class:
            self._log_p = self._log_p + log_probabilities(p)
        numbers = dict[str, float]()
        if temperature is not None and p.ndim == 2:
            nll, sure = _in_blocks(partial(_divide, temperature), p, labels)
            numbers["nll_with_temperature"] = float(nll.mean())
            numbers["ece_with_temperature"] = expected_calibration_error(sure, right)
        self._numbers.append(numbers)

    def end(self, images: HeldOutImages) -> Pool:
        """Returns the pool, with what needs all models."""
        pool = self.pool
        pool.mistakes = _most_confident(self._wrong, images.labels)
        if self.average and pool.every_class:
            values = self._log_p / pool.models, images.labels, images.worst_of
            value = metric(self.metric, *(torch.from_numpy(of) for of in values))
            pool.averaged = None if np.isnan(value) else value
        pool.numbers = means_of(self._numbers)
        return pool


def pick_by_rule(
    records: Sequence[Record],
    rules: Iterable[str],
    metric: str,
    methods: Sequence[str],
    deterministic: Collection[str] = (),
) -> dict[str, dict[str, Runs]]:
    """Returns {selection rule: {method: the records that it picks}}."""
    return {
        rule: runs_by_method(by_site(pick_trials(records, rule, metric)), methods, rule, metric, deterministic)
        for rule in rules
    }


def measure(
    metric: str,
    runs: Sequence[Runs],
    predictions: Iterable[Prediction],
    average: bool = False,
    pairs: Iterable[Pair] = (),
) -> tuple[RunMeasures, WithoutGroups]:
    """Returns what predictions come to, and what the comparisons of `pairs` need of them.

    `runs`: of all methods and rules. `predictions`: of each method on a held-out set, or a fold of them, in a row, in
    the order of the seeds; those with probabilities are counted. `average`: see `Counter`.
    """
    count = {(of.rule, of.method, held): seeds for of in runs for held, seeds in seeds_by_set(of).items()}
    temperatures = {
        (of.rule, *record.key[:3]): record.selected[of.rule].temperature
        for of in runs
        for record in of.records
        if of.score(record) is not None
    }
    beside = against_zero_shot(runs)
    without = WithoutGroups(metric, [*pairs, *beside.values()], alone=runs)
    pools = dict[tuple[str, DomainSet], Pool]()
    for _, of_models in groupby(predictions, lambda prediction: (prediction.method, prediction.models_of)):
        counters = dict[tuple[str, DomainSet], Counter]()
        for prediction in of_models:
            without.add(prediction)
            key = prediction.method, prediction.test_domains
            if prediction.probabilities is not None and prediction.seed in count.get((prediction.rule, *key), ()):
                counter = counters.setdefault(key, Counter(metric, average))
                counter.add(prediction, temperatures[prediction.rule, *key, prediction.seed])
        pools |= {key: counter.end(without.images[key[1]]) for key, counter in counters.items()}
    over = {
        (of.rule, of.method, held): over_set
        for of in runs
        for held, seeds in seeds_by_set(of).items()
        if (over_set := without.over_images(of, held, seeds)) is not None
    }
    versus = {key: made for key, pair in beside.items() if (made := compared(pair, without)) is not None}
    return RunMeasures(models_digest(runs, average), over, pools, versus), without


def against_zero_shot(runs: Sequence[Runs]) -> dict[tuple[str, str, DomainSet], Pair]:
    """Returns {(selection rule, method, held-out set): the method on that set alone, and zero-shot of its encoder}.

    Nothing under the rule that reads test labels, which has no verdicts.
    """
    honest = [of for of in runs if of.rule != ORACLE]
    zero_shot, pairs = dict[tuple[str, str, DomainSet], Runs](), dict[tuple[str, str, DomainSet], Pair]()
    for of in sorted(honest, key=lambda of: not of.records[0].deterministic):  # zero-shot first
        for held, group in group_by(of.records, lambda record: record.test_domains).items():
            fixed, key = bool(group[0].deterministic), (of.rule, group[0].encoder, held)
            alone = replace(of, held_out=(held,), records=tuple(group), deterministic=fixed)
            if fixed:
                zero_shot.setdefault(key, alone)
            elif key in zero_shot:
                pairs[of.rule, of.method, held] = Pair(alone, zero_shot[key])
    return pairs


def predictions_of(directory: RunDirectory, runs: Sequence[Runs]) -> Iterator[Prediction]:
    """Yields the predictions of picked models as `measure` needs them; each file is read once.

    Raises `UserError` if one is damaged.
    """
    records, picked_by = dict[ModelKey, Record](), dict[ModelKey, dict[str, None]]()
    images = dict[DomainSet, tuple[HeldOutImages, dict[DomainSet, HeldOutImages]]]()
    for of in runs:
        for record in of.records:
            if of.score(record) is not None:
                key = record.model or record.key
                records[key] = record
                picked_by.setdefault(key, {})[of.rule] = None
    for (_, held), keys in group_by(records, lambda key: key[:2]).items():
        fold = records[keys[0]].fold
        if held not in images:
            every = HeldOutImages.from_arrays(directory.test_images(held, records[keys[0]].files))
            images[held] = every, {} if fold is None else every.by_site(held)
        every, sites = images[held]
        for key in sorted(keys):
            arrays = directory.predictions(records[key].folder, records[key].files)
            for rule in picked_by[key]:
                prediction = Prediction.from_arrays(arrays, every, key, rule)
                yield from [prediction] if fold is None else (prediction.at(*site) for site in sites.items())


def models_digest(runs: Sequence[Runs], average: bool) -> str:
    """Returns the checksum of the models that are measured, and of what is measured of them."""
    models = [
        [of.rule, of.metric, [[*r.key, r.files.get(predictions_in(r.folder))] for r in of.records if of.score(r)]]
        for of in runs
    ]
    return json_digest([average, models])


def _add_counts(counts: np.ndarray, more: np.ndarray) -> np.ndarray:
    """Returns sparse counts [1 + k, m], the first row holding codes, with others added."""
    codes, position = np.unique(np.concatenate([counts[0], more[0]]), return_inverse=True)
    both = np.concatenate([counts[1:], more[1:]], axis=1)
    return np.stack([codes, *(np.bincount(position, row, len(codes)).astype(np.int64) for row in both)])


def _in_blocks(function: Callable[..., Sequence[np.ndarray]], *arrays: np.ndarray) -> np.ndarray:
    """Returns float64 [2,n]: what a function returns for some images at a time."""
    step = max(1, MAX_VALUES // max(1, arrays[0][:1].size))
    starts = range(0, len(arrays[0]), step)
    return np.concatenate([np.stack(function(*(array[i : i + step] for array in arrays))) for i in starts], axis=1)


def _divide(temperature: float, p: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns −log p(true class) and confidence after logits are divided by the temperature."""
    logits = torch.from_numpy(log_probabilities(p)) / temperature
    return per_image_nll(logits, torch.from_numpy(labels)), confidences(logits)


def log_probabilities(p: np.ndarray) -> np.ndarray:
    """Returns log p, float64; a probability that float32 has rounded to 0 counts as the smallest normal number.

    It is the logits minus a constant of the image: the softmax of a mean over models is that of the mean logits.
    """
    logarithms: np.ndarray = np.log(np.maximum(p, np.finfo(np.float32).tiny), dtype=np.float64)
    return logarithms


def confidence_level(confidence: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Returns the number of each confidence's step, int64 [n], equal in log odds.

    Arguments as from `confidence_and_rest`.
    """
    # probabilities of 0 become ∓∞, which `clip` brings to the ends
    with np.errstate(divide="ignore"):
        logits = np.log(confidence) - np.log(others)
    steps = (np.clip(logits, *LOGITS) - LOGITS[0]) / (LOGITS[1] - LOGITS[0]) * LEVELS
    levels: np.ndarray = np.minimum(steps.astype(np.int64), LEVELS - 1)
    return levels


def confidence_and_rest(probabilities: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the probability of the predicted class, and of all others, float64 [n], from [n,C] or that class's [n].

    The second one orders images whose first is rounded to 1, unless the predicted class's alone was kept.
    """
    p = probabilities.astype(np.float64)
    if p.ndim == 1:
        return p, 1 - p
    predicted, every = p.argmax(1), np.arange(len(p))
    confidence = p[every, predicted]
    p[every, predicted] = 0
    return confidence, p.sum(1)


def _most_confident(wrong: Sequence[tuple[np.ndarray, ...]], labels: np.ndarray) -> list[Mistake]:
    """Returns the images that the models were most sure of and wrong. Values are 0 where a model was right."""
    sure, unsure, predicted = (np.stack(of) for of in zip(*wrong, strict=True))  # [models,n]
    total, counts, surest = sure.sum(0), np.count_nonzero(sure, axis=0), sure.argmax(0)
    # stable: of equally sure mistakes the first images, so that a page does not change when it is made again
    order = np.lexsort((unsure.sum(0), -total))[:MISTAKES]
    return [
        Mistake(
            int(i), int(labels[i]), int(predicted[surest[i], i]), int(counts[i]), len(sure), float(total[i] / counts[i])
        )
        for i in order
        if total[i] > 0
    ]
