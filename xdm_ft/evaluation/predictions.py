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

    @classmethod
    def on(
        cls,
        dataset: ImageDataset,
        key: Identity,
        rule: str,
        rows: np.ndarray,
        predicted: np.ndarray,
        per_image: np.ndarray | None,
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
        )

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, np.ndarray], dataset: ImageDataset, key: Identity, rule: str
    ) -> Prediction:
        """Returns the predictions under `rule` from the arrays that `arrays_of` made."""
        rows, predicted = arrays[f"{rule}.rows"], arrays[f"{rule}.predicted"]
        return cls.on(dataset, key, rule, rows, predicted, arrays.get(f"{rule}.per_image"))


def arrays_of(predictions: Iterable[Prediction]) -> dict[str, np.ndarray]:
    """Returns the arrays to store of one model: `<rule>.rows`, `<rule>.predicted`, and `<rule>.per_image` if any."""
    return {
        f"{one.rule}.{name}": array
        for one in predictions
        for name in ("rows", "predicted", "per_image")
        if (array := getattr(one, name)) is not None
    }
