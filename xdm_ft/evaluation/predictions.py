"""The predictions of one trained model on the test images, as far as comparisons need them, and the variance of a
metric over these images, estimated by the jackknife over groups of images.

A group is a patient, slide or sequence; where groups are unknown, each image is one. Let θ_(g) be the metric without
group g of G, and θ_(·) the mean of all θ_(g). The variance of the metric is estimated by (G − 1)/G Σ_g (θ_(g) − θ_(·))²
(Efron & Tibshirani 1993, eq. 11.5). For a mean over independent images this is exactly s²/n.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from xdm_ft.core import DomainSet, ModelKey
from xdm_ft.evaluation.metrics import ECE_BINS, confidence_bin
from xdm_ft.images import ImageDataset
from xdm_ft.runtime.randomness import Stream, permutation

MEANS = ("accuracy", "nll", "auroc")  # metrics that are a mean of one value per image
BLOCKS = 1000
"""Largest number of groups for metrics that are not a mean over images. Such a metric needs sums per class, domain or
bin for every group, which is too much for 100,000 groups. More groups than this are merged at random into this many
blocks of (nearly) equally many groups. Leaving out blocks estimates the same variance, with a relative error of about
√(2/1000) = 4%."""


@dataclass(frozen=True, eq=False)
class HeldOutImages:
    """The test images of one held-out set. All models that were tested on them share this object."""

    rows: np.ndarray  # int [n], rows of the data set
    labels: np.ndarray  # int [n]
    worst_of: np.ndarray  # int [n]: the domain or other group whose worst accuracy is reported; −1: in no group
    groups: np.ndarray | None = None  # int [n]: patient, slide, sequence; None where unknown
    domains: np.ndarray | None = None  # int [n]: position of its domain among the test domains
    positions: np.ndarray | None = None  # int [n], of one domain: where its images are among those of all

    @classmethod
    def of(cls, dataset: ImageDataset, rows: np.ndarray) -> HeldOutImages:
        """Returns the test images `rows` of a data set."""
        worst_of = (dataset.domains if dataset.worst_of is None else dataset.worst_of)[rows]
        return cls(rows, dataset.labels[rows], worst_of, None if dataset.groups is None else dataset.groups[rows])

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> HeldOutImages:
        """Returns them without the data set, from the arrays that `test_images` made."""
        groups, domains = arrays.get("groups"), arrays.get("domains")
        return cls(
            rows=arrays["rows"],
            labels=arrays["labels"].astype(np.int64),
            worst_of=arrays["worst_of"].astype(np.int64),
            groups=None if groups is None else groups.astype(np.int64),
            domains=domains,
        )

    def by_site(self, held: DomainSet) -> dict[DomainSet, HeldOutImages]:
        """Returns the images of each of these test domains."""
        assert self.domains is not None, "of a fold"
        sites = dict[DomainSet, HeldOutImages]()
        for number, name in enumerate(held):
            of = np.flatnonzero(self.domains == number)
            groups = None if self.groups is None else self.groups[of]
            sites[(name,)] = HeldOutImages(self.rows[of], self.labels[of], self.worst_of[of], groups, positions=of)
        return sites

    @cached_property
    def members(self) -> np.ndarray | None:
        """The group of each image, int64 [n], numbered from 0 without gaps; None: each image is a group."""
        return None if self.groups is None else np.unique(self.groups, return_inverse=True)[1]

    @cached_property
    def sizes(self) -> np.ndarray:
        """Number of images of each group, int64 [groups]; ones if groups are unknown."""
        return np.ones(len(self.rows), np.int64) if self.members is None else np.bincount(self.members)

    @cached_property
    def blocks(self) -> np.ndarray:
        """The block of each image, int64 [n]: the groups, merged at random into at most BLOCKS of equal numbers."""
        members = np.arange(len(self.rows)) if self.members is None else self.members
        if len(self.sizes) <= BLOCKS:
            return members
        return (permutation(0, 0, Stream.BLOCKS, len(self.sizes)).numpy() % BLOCKS)[members]


@dataclass(frozen=True)
class Prediction:
    """One model's predictions at the step that one rule picked. Models with the same test domains have equal images."""

    method: str
    test_domains: tuple[str, ...]
    seed: int
    rule: str  # selection rule that picked the step
    images: HeldOutImages
    predicted: np.ndarray  # int [n], predicted classes
    per_image: np.ndarray | None = None  # float64 [n], from `metrics.per_image`; None for metrics without
    probabilities: np.ndarray | None = None
    """float32 [n,C], or [n] of the predicted classes; only written. None for rules that are not the recipe's own."""
    fold: DomainSet | None = None  # the test domains of the model, if these are one of its fold

    @property
    def models_of(self) -> DomainSet:
        """The test domains of the model."""
        return self.fold or self.test_domains

    def at(self, held: DomainSet, images: HeldOutImages) -> Prediction:
        """Returns the predictions on one domain of the fold. `images`: those of `HeldOutImages.by_site`."""
        of = images.positions
        arrays = {name: getattr(self, name) for name in ("predicted", "per_image", "probabilities")}
        chosen: dict[str, Any] = {name: None if array is None else array[of] for name, array in arrays.items()}
        if chosen["per_image"] is not None and np.isnan(chosen["per_image"]).any():  # an AUROC that is not defined
            chosen["per_image"] = None
        return replace(self, test_domains=held, images=images, fold=self.test_domains, **chosen)

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, np.ndarray], images: HeldOutImages, key: ModelKey, rule: str
    ) -> Prediction:
        """Returns the predictions under `rule` on the test images, from the arrays that `arrays_of` made."""
        return cls(
            *key[:3],
            rule,
            images,
            arrays[f"{rule}.predicted"],
            arrays.get(f"{rule}.per_image"),
            arrays.get(f"{rule}.probabilities"),
        )


def arrays_of(predictions: Iterable[Prediction]) -> dict[str, np.ndarray]:
    """Returns the arrays to store of one model: `<rule>.predicted`, int32 [n], and for some rules `<rule>.per_image`
    and `<rule>.probabilities`. `test_images` returns the images, which models with the same test domains share."""
    arrays = {}
    for prediction in predictions:
        arrays[f"{prediction.rule}.predicted"] = prediction.predicted.astype(np.int32)
        for name in ("per_image", "probabilities"):
            if (array := getattr(prediction, name)) is not None:
                arrays[f"{prediction.rule}.{name}"] = array
    return arrays


def test_images(dataset: ImageDataset, rows: np.ndarray, is_fold: bool = False) -> dict[str, np.ndarray]:
    """Returns the arrays to store of the test images `rows`, of which the domains of a fold are measured one by one.

    `rows` int64 [n]; `labels` and `worst_of` int32 [n]; `groups` int32 [n] if the data set knows them; `domains` int32
    [n] of a fold, numbered from 0 in the order of the data; and `names`, uint8: the UTF-8 text of one name per line.
    """
    images = HeldOutImages.of(dataset, rows)
    domains = np.unique(dataset.domains[rows], return_inverse=True)[1].astype(np.int32)
    arrays = {"rows": rows, "labels": images.labels.astype(np.int32), "worst_of": images.worst_of.astype(np.int32)}
    if images.groups is not None:
        arrays["groups"] = images.groups.astype(np.int32)
    names = "\n".join(dataset.name_in_data(int(row)) for row in rows)
    return arrays | {"names": np.frombuffer(names.encode(), np.uint8)} | ({"domains": domains} if is_fold else {})


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
        # ∞: a domain that is left without images is never the worst
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
    """Raises `ValueError` if one of them was tested on other images than the other: they cannot be paired."""
    if other.images is not first.images and not np.array_equal(other.images.rows, first.images.rows):
        raise ValueError(
            f"{other.method} and {first.method} were not tested on the same images of {other.test_domains}"
        )
