"""The variance of a metric over test images, estimated by the jackknife over groups of images.

A group is a patient, slide or sequence; where groups are unknown, each image is one. Let θ_(g) be the metric without
group g of G, and θ_(·) the mean of all θ_(g). The variance of the metric is estimated by (G − 1)/G Σ_g (θ_(g) − θ_(·))²
(Efron & Tibshirani 1993, eq. 11.5). For a mean over independent images this is exactly s²/n.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from xdm_ft.evaluation.metrics import ECE_BINS, confidence_bin
from xdm_ft.evaluation.predictions import Prediction

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
    images = prediction.images
    members = images.members if metric in MEANS else images.blocks  # None: each image is a group
    groups = len(images.sizes) if metric in MEANS else int(images.blocks.max()) + 1

    def sums(values: np.ndarray | int, codes: np.ndarray | int, num_codes: int) -> np.ndarray:
        if members is None:  # of a mean: one code
            of_groups = np.broadcast_to(np.asarray(values, np.float64), groups)[:, None]
        else:
            of_groups = _of_groups(members * num_codes + codes, values, codes, groups * num_codes)
            of_groups = of_groups.reshape(groups, num_codes)
        return of_groups.sum(0) - of_groups  # without each group, [groups, codes]

    return _METRICS[metric](prediction, sums)


def _of_groups(cells: np.ndarray, values: np.ndarray | int, codes: np.ndarray | int, count: int) -> np.ndarray:
    """Returns the sum of the values in each of `count` cells, float64; those of images with a negative code in none."""
    if np.min(codes) < 0:
        inside = np.asarray(codes) >= 0
        cells, values = cells[inside], values if np.ndim(values) == 0 else np.asarray(values)[inside]
    if np.ndim(values) == 0:
        return values * np.bincount(cells, minlength=count).astype(np.float64)
    return np.bincount(cells, values, minlength=count)


def jackknife_variance(without: np.ndarray) -> float | None:
    """Variance of a statistic from its values without each group, [G]; None for one group or values not finite."""
    if len(without) < 2 or not np.isfinite(without).all():
        return None
    return float((len(without) - 1) * np.var(without))  # np.var holds the 1/G


def effective_number(sizes: np.ndarray) -> float:
    """(Σ_g n_g)² / Σ_g n_g², Kish's (1965) effective number: this many groups of equal size are as informative."""
    counts = sizes.astype(np.float64)
    return float(counts.sum() ** 2 / np.square(counts).sum())


def _right(prediction: Prediction) -> np.ndarray:
    return (prediction.predicted == prediction.images.labels).astype(np.float64)  # [n]


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
    labels = prediction.images.labels
    classes = int(labels.max()) + 1
    images = sums(1, labels, classes)  # [groups, C]
    recalls = _per_image_means(sums(_right(prediction), labels, classes), images, 0.0)
    return recalls.sum(1) / np.maximum((images > 0).sum(1), 1)


def _worst_domain_accuracy(prediction: Prediction, sums: Sums) -> np.ndarray:
    domains = prediction.images.worst_of
    count = max(1, int(domains.max()) + 1)  # 1 even if every image is in no domain (−1)
    return _per_image_means(sums(_right(prediction), domains, count), sums(1, domains, count), np.inf).min(1)


def _macro_f1(prediction: Prediction, sums: Sums) -> np.ndarray:
    labels, predicted = prediction.images.labels, prediction.predicted
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


def check_same_images(first: Prediction, other: Prediction) -> None:
    """Raises `ValueError` if one of them was tested on other images than the other: they can not be paired."""
    if other.images is not first.images and not np.array_equal(other.images.rows, first.images.rows):
        raise ValueError(
            f"{other.method} and {first.method} were not tested on the same images of {other.test_domains}"
        )
