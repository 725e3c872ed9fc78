"""The predictions of one trained model on the test images, as far as comparisons need them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from xdm_ft.evaluation.records import ModelKey
from xdm_ft.images.dataset import ImageDataset
from xdm_ft.runtime.randomness import Stream, permutation

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

    @classmethod
    def of(cls, dataset: ImageDataset, rows: np.ndarray) -> HeldOutImages:
        """Returns the test images `rows` of a data set."""
        worst_of = (dataset.domains if dataset.worst_of is None else dataset.worst_of)[rows]
        return cls(rows, dataset.labels[rows], worst_of, None if dataset.groups is None else dataset.groups[rows])

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> HeldOutImages:
        """Returns them without the data set, from the arrays that `test_images` made.

        Runs of earlier versions wrote no `groups` and `worst_of`: then groups are unknown, and no image is in one of
        `worst_of`.
        """
        labels, groups, worst_of = arrays["labels"].astype(np.int64), arrays.get("groups"), arrays.get("worst_of")
        return cls(
            rows=arrays["rows"],
            labels=labels,
            worst_of=np.full(len(labels), -1) if worst_of is None else worst_of.astype(np.int64),
            groups=None if groups is None else groups.astype(np.int64),
        )

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


def test_images(dataset: ImageDataset, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the arrays to store of the test images `rows`.

    `rows` int64 [n]; `labels` and `worst_of` int32 [n]; `groups` int32 [n] if the data set knows them; and `names`,
    uint8: the UTF-8 text of one name per line.
    """
    images = HeldOutImages.of(dataset, rows)
    arrays = {"rows": rows, "labels": images.labels.astype(np.int32), "worst_of": images.worst_of.astype(np.int32)}
    if images.groups is not None:
        arrays["groups"] = images.groups.astype(np.int32)
    names = "\n".join(dataset.name_in_data(int(row)) for row in rows)
    return arrays | {"names": np.frombuffer(names.encode(), np.uint8)}
