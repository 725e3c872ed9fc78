"""The reliability diagram: the bins behind the expected calibration error."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from xdm_ft.evaluation.metrics import ECE_BINS, confidence_bin, confidences


@dataclass(frozen=True)
class Bin:
    """The images whose predicted class has a probability in (low, high]."""

    low: float
    high: float
    images: int
    confidence: float | None  # mean probability of the predicted class; None without images
    accuracy: float | None


def reliability(logits: Tensor, labels: np.ndarray) -> list[Bin]:
    """The bins behind the ECE: confidences (0, 1/15], …, (14/15, 1]."""
    confidence, right = confidences(logits), logits.argmax(1).numpy() == labels
    bins, found = confidence_bin(confidence), []
    for number in range(ECE_BINS):
        inside = bins == number
        images = int(inside.sum())
        found.append(
            Bin(
                low=number / ECE_BINS,
                high=(number + 1) / ECE_BINS,
                images=images,
                confidence=float(confidence[inside].mean()) if images else None,
                accuracy=float(right[inside].mean()) if images else None,
            )
        )
    return found
