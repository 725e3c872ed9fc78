"""The predictions of one trained model on the test images, as far as comparisons need them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from xdm_ft.data import ImageDataset
from xdm_ft.evaluation.records import Identity


@dataclass(frozen=True)
class Prediction:
    """One model's predictions at the step that one rule picked. Models with the same test domains have equal rows."""

    method: str
    test_domains: tuple[str, ...]
    seed: int
    rule: str  # selection rule that picked the step
    rows: np.ndarray  # int [n], rows of the data set
    labels: np.ndarray  # int [n]
    predicted: np.ndarray  # int [n], predicted classes
    worst_of: np.ndarray  # int [n]: the domain or other group whose worst accuracy is reported; −1: in no group
    groups: np.ndarray | None = None  # int [n]: patient, slide, sequence; None where unknown
    per_image: np.ndarray | None = None  # float64 [n], from `metrics.per_image`; None for metrics without
    probabilities: np.ndarray | None = None
    """float32 [n,C], or [n] of the predicted classes; only written. None for rules that are not the recipe's own."""

    @classmethod
    def on(
        cls,
        dataset: ImageDataset,
        key: Identity,
        rule: str,
        rows: np.ndarray,
        predicted: np.ndarray,
        per_image: np.ndarray | None,
        probabilities: np.ndarray | None = None,
    ) -> Prediction:
        """Returns the predictions on the test images `rows`, with their labels and groups from the data set."""
        return cls(
            method=key[0],
            test_domains=key[1],
            seed=key[2],
            rule=rule,
            rows=rows,
            labels=dataset.labels[rows],
            predicted=predicted,
            worst_of=(dataset.domains if dataset.worst_of is None else dataset.worst_of)[rows],
            groups=None if dataset.groups is None else dataset.groups[rows],
            per_image=per_image,
            probabilities=probabilities,
        )

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, np.ndarray], rows: np.ndarray, dataset: ImageDataset, key: Identity, rule: str
    ) -> Prediction:
        """Returns the predictions under `rule` on the test images `rows`, from the arrays that `arrays_of` made.

        Their probabilities are left out: those of all models would fill the memory, and comparisons do not read them.
        """
        predicted = arrays[f"{rule}.predicted"].astype(np.int64)
        return cls.on(dataset, key, rule, rows, predicted, arrays.get(f"{rule}.per_image"))

    @classmethod
    def from_files(
        cls, arrays: Mapping[str, np.ndarray], images: Mapping[str, np.ndarray], key: Identity, rule: str
    ) -> Prediction:
        """Returns the predictions under `rule` without the data set: `images` are the arrays that `test_images` made.

        Runs of earlier versions wrote no `groups` and `worst_of`: then groups are unknown, and no image is in one of
        `worst_of`.
        """
        labels, groups, worst_of = images["labels"].astype(np.int64), images.get("groups"), images.get("worst_of")
        return cls(
            method=key[0],
            test_domains=key[1],
            seed=key[2],
            rule=rule,
            rows=images["rows"],
            labels=labels,
            predicted=arrays[f"{rule}.predicted"].astype(np.int64),
            worst_of=np.full(len(labels), -1) if worst_of is None else worst_of.astype(np.int64),
            groups=None if groups is None else groups.astype(np.int64),
            per_image=arrays.get(f"{rule}.per_image"),
            probabilities=arrays.get(f"{rule}.probabilities"),
        )


def arrays_of(predictions: Iterable[Prediction]) -> dict[str, np.ndarray]:
    """Returns the arrays to store of one model: `<rule>.predicted`, int32 [n], and for some rules `<rule>.per_image`
    and `<rule>.probabilities`. `test_images` returns the images, which models with the same test domains share."""
    arrays = {}
    for one in predictions:
        arrays[f"{one.rule}.predicted"] = one.predicted.astype(np.int32)
        for name in ("per_image", "probabilities"):
            if (array := getattr(one, name)) is not None:
                arrays[f"{one.rule}.{name}"] = array
    return arrays


def test_images(dataset: ImageDataset, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the arrays to store of the test images `rows`.

    `rows` int64 [n]; `labels` and `worst_of` int32 [n]; `groups` int32 [n] if the data set knows them; and `names`,
    uint8: the UTF-8 text of one name per line.
    """
    names = "\n".join(dataset.name_in_data(int(row)) for row in rows)
    worst_of = dataset.domains if dataset.worst_of is None else dataset.worst_of
    groups = {} if dataset.groups is None else {"groups": dataset.groups[rows].astype(np.int32)}
    return {
        "rows": rows,
        "labels": dataset.labels[rows].astype(np.int32),
        "worst_of": worst_of[rows].astype(np.int32),
        **groups,
        "names": np.frombuffer(names.encode(), np.uint8),
    }
