"""What one trained model said of the test images: what comparing it with others needs, and no more."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Prediction:
    """The test images of one model at the step that one rule picked. Models of the same test domains share rows."""

    method: str
    test_domains: tuple[str, ...]
    seed: int
    rule: str  # selection rule that picked the step
    rows: np.ndarray  # int [n], rows of the data set
    labels: np.ndarray  # int [n]
    predicted: np.ndarray  # int [n], predicted classes
    worst_of: np.ndarray  # int [n]: domain, or other group, that the worst accuracy is told of; −1: in none
    groups: np.ndarray | None = None  # int [n]: patient, slide, sequence; None where unknown
    per_image: np.ndarray | None = None  # float64 [n], `metrics.per_image` for the metrics that need it
