"""The variance of a metric over test images, estimated by the jackknife over groups of images.

A group is a patient, slide or sequence; where groups are unknown, each image is one. Let θ_(g) be the metric without
group g of G, and θ_(·) the mean of all θ_(g). The variance of the metric is estimated by (G − 1)/G Σ_g (θ_(g) − θ_(·))²
(Efron & Tibshirani 1993, eq. 11.5). For a mean over independent images this is exactly s²/n.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from xdm_ft.evaluation.metrics import ECE_BINS, confidence_bin
from xdm_ft.evaluation.predictions import Prediction
from xdm_ft.randomness import Stream, permutation

BLOCKS = 1000
"""Largest number of groups for metrics that are not a mean over images. Such a metric needs sums per class, domain or
bin for every group, which is too much for 100,000 groups. More groups than this are merged at random into this many
blocks of (nearly) equally many groups. Leaving out blocks estimates the same variance, with a relative error of about
√(2/1000) = 4%."""
MEANS = ("accuracy", "nll", "auroc")  # metrics that are a mean of one value per image

Sums = Callable[[np.ndarray | int, np.ndarray | int, int], np.ndarray]
"""(values, codes, number of codes) → the sum of the values of each code without each group in turn, [groups, codes].

Values are [n], or one number for all images. Codes are int [n]: class, domain or bin of each image; negative: none."""


def without_each_group(metric: str, prediction: Prediction) -> np.ndarray:
    """Returns the metric of one model without each group of its test images in turn: float64 [groups], or [BLOCKS].

    Models that were tested on the same images leave out the same groups, so their values are paired. `auroc` is
    linearised (see `metrics.auroc_contributions`); the other metrics are exact. A value is not finite where the metric
    is not defined without that group.
    """
    members = _members(prediction)
    if metric not in MEANS and members.max() >= BLOCKS:
        groups = int(members.max()) + 1
        members = (permutation(0, 0, Stream.BLOCKS, groups).numpy() % BLOCKS)[members]
    groups = int(members.max()) + 1

    def sums(values: np.ndarray | int, codes: np.ndarray | int, num_codes: int) -> np.ndarray:
        inside = np.broadcast_to(np.asarray(codes) >= 0, members.shape)
        cells = (members * num_codes + codes)[inside]
        summed = np.broadcast_to(values, members.shape)[inside]
        of_groups = np.bincount(cells, summed, minlength=groups * num_codes).reshape(groups, num_codes)
        return of_groups.sum(0) - of_groups  # without each group, [groups, codes]

    return _METRICS[metric](prediction, sums)


def jackknife_variance(without: np.ndarray) -> float | None:
    """Variance of a statistic from its values without each group, [G]; None for one group or values not finite."""
    if len(without) < 2 or not np.isfinite(without).all():
        return None
    return float((len(without) - 1) * np.var(without))  # np.var holds the 1/G


def group_sizes(prediction: Prediction) -> np.ndarray:
    """Number of test images of each group, int64 [groups]; ones if groups are unknown."""
    return np.bincount(_members(prediction))


def effective_number(sizes: np.ndarray) -> float:
    """(Σ_g n_g)² / Σ_g n_g², Kish's (1965) effective number: this many groups of equal size are as informative."""
    counts = sizes.astype(np.float64)
    return float(counts.sum() ** 2 / np.square(counts).sum())


def _members(prediction: Prediction) -> np.ndarray:
    """The group of each image, int64 [n], numbered from 0 without gaps."""
    if prediction.groups is None:
        return np.arange(len(prediction.labels))
    return np.unique(prediction.groups, return_inverse=True)[1]


def _right(prediction: Prediction) -> np.ndarray:
    return (prediction.predicted == prediction.labels).astype(np.float64)  # [n]


def _per_image(prediction: Prediction) -> np.ndarray:
    if prediction.per_image is None:
        raise ValueError(f"{prediction.method}: its predictions have no values per image, which the metric needs")
    return prediction.per_image


def _per_image_means(total: np.ndarray, images: np.ndarray, empty: float) -> np.ndarray:
    """total / images, element by element; `empty` where there are no images."""
    return np.where(images > 0, total / np.maximum(images, 1), empty)


def _mean(values: np.ndarray, sums: Sums) -> np.ndarray:
    return _per_image_means(sums(values, 0, 1), sums(1, 0, 1), np.nan)[:, 0]


def _balanced_accuracy(prediction: Prediction, sums: Sums) -> np.ndarray:
    labels = prediction.labels
    classes = int(labels.max()) + 1
    images = sums(1, labels, classes)  # [groups, C]
    recalls = _per_image_means(sums(_right(prediction), labels, classes), images, 0.0)
    return recalls.sum(1) / np.maximum((images > 0).sum(1), 1)


def _worst_domain_accuracy(prediction: Prediction, sums: Sums) -> np.ndarray:
    domains = prediction.worst_of
    count = max(1, int(domains.max()) + 1)  # 1 even if every image is in no domain (−1)
    return _per_image_means(sums(_right(prediction), domains, count), sums(1, domains, count), np.inf).min(1)


def _macro_f1(prediction: Prediction, sums: Sums) -> np.ndarray:
    labels, predicted = prediction.labels, prediction.predicted
    classes = int(max(labels.max(), predicted.max())) + 1
    support, claims = sums(1, labels, classes), sums(1, predicted, classes)  # [groups, C]
    f1 = 2 * sums(_right(prediction), labels, classes) / np.maximum(support + claims, 1)
    return f1.sum(1) / np.maximum((support > 0).sum(1), 1)  # a class without images has no hits


def _ece(prediction: Prediction, sums: Sums) -> np.ndarray:
    confidence = _per_image(prediction)
    gaps = sums(_right(prediction) - confidence, confidence_bin(confidence), ECE_BINS)
    return np.abs(gaps).sum(1) / np.maximum(sums(1, 0, 1)[:, 0], 1)


_METRICS: dict[str, Callable[[Prediction, Sums], np.ndarray]] = {
    "accuracy": lambda prediction, sums: _mean(_right(prediction), sums),
    "balanced_accuracy": _balanced_accuracy,
    "worst_domain_accuracy": _worst_domain_accuracy,
    "macro_f1": _macro_f1,
    "nll": lambda prediction, sums: _mean(_per_image(prediction), sums),
    "auroc": lambda prediction, sums: _mean(_per_image(prediction), sums),
    "ece": _ece,
}


def check_same_images(runs: Sequence[Prediction]) -> None:
    """Raises `ValueError` if one of the runs was tested on other images than the first: they can not be paired."""
    for run in runs:
        if not np.array_equal(run.rows, runs[0].rows):
            raise ValueError(
                f"{run.method} and {runs[0].method} were not tested on the same images of {run.test_domains}"
            )
