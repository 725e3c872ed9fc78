"""The variance of a metric over test images, estimated by the jackknife over groups of images.

A group is a patient, slide or sequence; where groups are unknown, each image is one. Let θ_(g) be the metric without
group g of G, and θ_(·) the mean of all θ_(g). The variance of the metric is estimated by (G − 1)/G Σ_g (θ_(g) − θ_(·))²
(Efron & Tibshirani 1993, eq. 11.5). For a mean over independent images this is exactly s²/n.
"""

from __future__ import annotations

import numpy as np

from xdm_ft.evaluation.metrics import ECE_BINS, confidence_bin
from xdm_ft.evaluation.predictions import Prediction

MEANS = ("accuracy", "nll", "auroc")  # metrics that are a mean of one value per image


def without_each_group(metric: str, prediction: Prediction) -> np.ndarray:
    """Returns the metric of one model without each group of its test images in turn: float64 [groups], or [BLOCKS].

    Models that were tested on the same images leave out the same groups, so their values are paired. `auroc` is
    linearised (see `metrics.auroc_contributions`); the other metrics are exact. A value is not finite where the metric
    is not defined without that group.
    """
    images, predicted, labels = prediction.images, prediction.predicted, prediction.images.labels
    members = images.members if metric in MEANS else images.blocks  # None: each image is a group
    groups = len(images.sizes) if metric in MEANS else int(images.blocks.max()) + 1

    def sums(values: np.ndarray | int, codes: np.ndarray | int = 0, num_codes: int = 1) -> np.ndarray:
        """The sum of the values of each code without each group, [groups, codes].

        Values are [n], or one number for all images. Codes are int [n]: class, domain or bin; negative: none.
        """
        if members is None:  # of a mean: one code
            of_groups: np.ndarray = np.broadcast_to(np.asarray(values, np.float64), groups)[:, None]
        else:
            cells = members * num_codes + codes
            if np.min(codes) < 0:
                inside = np.asarray(codes) >= 0
                cells, values = cells[inside], values if np.ndim(values) == 0 else np.asarray(values)[inside]
            weights = np.broadcast_to(np.asarray(values, np.float64), cells.shape)
            of_groups = np.bincount(cells, weights, minlength=groups * num_codes).reshape(groups, num_codes)
        return of_groups.sum(0) - of_groups

    def ratio(total: np.ndarray, number: np.ndarray, empty: float) -> np.ndarray:
        return np.where(number > 0, total / np.maximum(number, 1), empty)

    right = (predicted == labels).astype(np.float64)  # [n]
    per_image = prediction.per_image if metric in ("nll", "auroc", "ece") else right
    if per_image is None:
        raise ValueError(f"{prediction.method}: its predictions have no values per image, which the metric needs")
    if metric in MEANS:
        return ratio(sums(per_image), sums(1), np.nan)[:, 0]
    if metric == "ece":
        gaps = sums(right - per_image, confidence_bin(per_image), ECE_BINS)
        return np.abs(gaps).sum(1) / np.maximum(sums(1)[:, 0], 1)
    if metric == "worst_domain_accuracy":
        domains = images.worst_of
        count = max(1, int(domains.max()) + 1)  # 1 even if every image is in no domain (−1)
        return ratio(sums(right, domains, count), sums(1, domains, count), np.inf).min(1)
    if metric == "balanced_accuracy":
        classes = int(labels.max()) + 1
        support = sums(1, labels, classes)  # [groups, C]
        recalls = ratio(sums(right, labels, classes), support, 0.0)
        return recalls.sum(1) / np.maximum((support > 0).sum(1), 1)
    if metric == "macro_f1":
        classes = int(max(labels.max(), predicted.max())) + 1
        support, claims = sums(1, labels, classes), sums(1, predicted, classes)  # [groups, C]
        f1 = 2 * sums(right, labels, classes) / np.maximum(support + claims, 1)
        return f1.sum(1) / np.maximum((support > 0).sum(1), 1)  # a class without images has no hits
    raise KeyError(metric)


def jackknife_variance(without: np.ndarray) -> float | None:
    """Variance of a statistic from its values without each group, [G]; None for one group or values not finite."""
    if len(without) < 2 or not np.isfinite(without).all():
        return None
    return float((len(without) - 1) * np.var(without))  # np.var holds the 1/G


def effective_number(sizes: np.ndarray) -> float:
    """(Σ_g n_g)² / Σ_g n_g², Kish's (1965) effective number: this many groups of equal size are as informative."""
    counts = sizes.astype(np.float64)
    return float(counts.sum() ** 2 / np.square(counts).sum())


def check_same_images(first: Prediction, other: Prediction) -> None:
    """Raises `ValueError` if one of them was tested on other images than the other: they can not be paired."""
    if other.images is not first.images and not np.array_equal(other.images.rows, first.images.rows):
        raise ValueError(
            f"{other.method} and {first.method} were not tested on the same images of {other.test_domains}"
        )
