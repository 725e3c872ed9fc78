"""How sure a difference between two methods is: a t interval over domains, a group bootstrap over test images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from xdm_ft.evaluation.metrics import ECE_BINS, HIGHER_IS_BETTER, confidence_bin
from xdm_ft.evaluation.predictions import Prediction
from xdm_ft.randomness import Stream

DRAWS = 2000
LEVEL = 0.95
_WEIGHTS_AT_ONCE = 1 << 22  # image weights that are held in memory at a time (16 MiB)

Statistic = Callable[[np.ndarray], np.ndarray]
"""Weights of n images under k draws, float32 [k,n] → the metric of R runs under each draw, float64 [k,R]."""


class Interval(NamedTuple):
    """95%, both ends in the unit of what it is around."""

    low: float
    high: float


def t_interval(values: Sequence[float]) -> Interval | None:
    """Mean ± t·s/√n of independent values, s with ddof 1; None for fewer than two."""
    if len(values) < 2:
        return None
    from scipy.stats import t

    half = t.ppf((1 + LEVEL) / 2, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values))
    return Interval(float(np.mean(values) - half), float(np.mean(values) + half))


def percentile_interval(draws: np.ndarray) -> Interval:
    """The middle 95% of bootstrap draws [k]."""
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(low), float(high))


def verdict(metric: str, intervals: Sequence[Interval | None]) -> str:
    """`better`, `worse` or `not distinguishable`: the last one where an interval holds 0, or where there is none."""
    known = [interval for interval in intervals if interval is not None]
    above, below = all(i.low > 0 for i in known), all(i.high < 0 for i in known)
    if not known or not (above or below):
        return "not distinguishable"
    return "better" if above == HIGHER_IS_BETTER[metric] else "worse"


def number_of_groups(prediction: Prediction) -> int:
    """How many units of resampling the test images have: groups, or images where groups are unknown."""
    return len(prediction.labels if prediction.groups is None else np.unique(prediction.groups))


def bootstrap(metric: str, runs: Sequence[Prediction], key: int) -> np.ndarray:
    """The metric of each run on the same resampled test images, float64 [DRAWS, runs].

    All runs have the same rows and share their draws, which pairs them. Whole groups are drawn with replacement, or
    images where groups are unknown. `key` sets the random stream: one per set of test domains. `auroc` is linearised
    (see `metrics.auroc_contributions`), all others are recomputed from weighted counts.
    """
    first = runs[0]
    for run in runs:
        if not np.array_equal(run.rows, first.rows):
            raise ValueError(
                f"{run.method} and {first.method} were not tested on the same images of {run.test_domains}"
            )
    statistic = _STATISTICS[metric](runs)
    return np.concatenate([statistic(weights) for weights in _image_weights(first.groups, len(first.rows), key)])


def _image_weights(groups: np.ndarray | None, n: int, key: int) -> Iterator[np.ndarray]:
    """How often each image is drawn, float32 [k,n] until DRAWS draws are made; exact, since counts are below 2^24."""
    members = np.arange(n) if groups is None else np.unique(groups, return_inverse=True)[1]
    size = int(members.max()) + 1
    generator = np.random.Generator(np.random.Philox(key=np.array([Stream.BOOTSTRAP, key], dtype=np.uint64)))
    at_once = max(1, _WEIGHTS_AT_ONCE // max(n, size))
    for start in range(0, DRAWS, at_once):
        k = min(at_once, DRAWS - start)
        drawn = generator.integers(size, size=(k, size)) + size * np.arange(k)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=k * size).reshape(k, size).astype(np.float32)
        yield counts if groups is None else counts[:, members]


def _right(runs: Sequence[Prediction]) -> np.ndarray:
    return np.stack([run.predicted == run.labels for run in runs], axis=1).astype(np.float32)  # [n,R]


def _per_image(runs: Sequence[Prediction]) -> np.ndarray:
    missing = [run.method for run in runs if run.per_image is None]
    if missing:
        raise ValueError(f"the predictions of {', '.join(missing)} lack what the metric needs of each image")
    return np.stack([run.per_image for run in runs if run.per_image is not None], axis=1)  # [n,R]


def _stratum_means(values: np.ndarray, strata: np.ndarray, reduce: Callable[..., np.ndarray]) -> Statistic:
    """Weighted means of values [n,R] within each stratum, reduced over the strata that were drawn.

    `strata` are codes int [n]; an image with a negative one is in none.
    """
    members = [np.flatnonzero(strata == s) for s in np.unique(strata) if s >= 0]

    def statistic(weights: np.ndarray) -> np.ndarray:
        means = np.full((len(members), len(weights), values.shape[1]), np.nan)  # [S,k,R]
        for s, images in enumerate(members):
            inside = weights if len(members) == 1 else weights[:, images]
            total = inside.sum(1, dtype=np.float64)
            drawn = total > 0
            means[s, drawn] = (inside[drawn] @ values[images]) / total[drawn, None]
        return reduce(means, axis=0)

    return statistic


def _sums(codes: np.ndarray, values: np.ndarray, num_codes: int) -> Statistic:
    """Weighted sums of values [n,R] within each run's own codes int [n,R]: weights [k,n] → [k,num_codes,R]."""
    from scipy.sparse import csr_array

    n, runs = codes.shape
    place = codes * runs + np.arange(runs)  # column of the sum that each image adds to
    matrix = csr_array((values.ravel(), place.ravel(), np.arange(0, n * runs + 1, runs)), (n, num_codes * runs))
    sums = matrix.T.tocsr()
    return lambda weights: (sums @ weights.T).T.reshape(len(weights), num_codes, runs)


def _macro_f1(runs: Sequence[Prediction]) -> Statistic:
    labels, predicted = runs[0].labels, np.stack([run.predicted for run in runs], axis=1).astype(np.int64)
    num_classes = int(max(labels.max(), predicted.max())) + 1
    right = _right(runs)
    of_truth = np.repeat(labels.astype(np.int64)[:, None], len(runs), axis=1)
    hits, claims = _sums(of_truth, right, num_classes), _sums(predicted, np.ones_like(right), num_classes)
    support = _sums(of_truth[:, :1], np.ones((len(labels), 1), np.float32), num_classes)

    def statistic(weights: np.ndarray) -> np.ndarray:
        true = support(weights).astype(np.float64)  # [k,C,1]
        f1 = 2 * hits(weights) / np.maximum(true + claims(weights), 1)  # [k,C,R]
        return f1.sum(1) / (true > 0).sum(1)  # a class that was not drawn has no hits

    return statistic


def _ece(runs: Sequence[Prediction]) -> Statistic:
    confidence = _per_image(runs)
    gaps = _sums(confidence_bin(confidence), _right(runs) - confidence, ECE_BINS)
    return lambda weights: np.abs(gaps(weights)).sum(1) / weights.sum(1, dtype=np.float64)[:, None]


def _mean(values: np.ndarray) -> Statistic:
    return _stratum_means(values, np.zeros(len(values), dtype=np.int64), np.nanmean)


_STATISTICS: dict[str, Callable[[Sequence[Prediction]], Statistic]] = {
    "accuracy": lambda runs: _mean(_right(runs)),
    "balanced_accuracy": lambda runs: _stratum_means(_right(runs), runs[0].labels, np.nanmean),
    "worst_domain_accuracy": lambda runs: _stratum_means(_right(runs), runs[0].worst_of, np.nanmin),
    "macro_f1": _macro_f1,
    "nll": lambda runs: _mean(_per_image(runs)),
    "auroc": lambda runs: _mean(_per_image(runs)),
    "ece": _ece,
}
