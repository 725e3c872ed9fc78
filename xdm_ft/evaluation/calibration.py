"""Temperature scaling, the one number T by which logits are divided before the softmax so that probabilities fit, and
the reliability diagram.

Guo et al. 2017, "On Calibration of Modern Neural Networks", section 4.2: T minimises the negative log-likelihood of
validation images. It changes no predicted class.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from xdm_ft.evaluation.metrics import ECE_BINS, confidence_bin, confidences, per_image_nll
from xdm_ft.runtime.randomness import Stream, permutation

LOWEST, HIGHEST = 0.01, 100.0
"""There is no T outside: logits that separate all images perfectly would get T → 0, and certainty everywhere; logits
that are wrong more often than chance would get T → ∞."""
MAX_LOGITS = 1_000_000  # n·C; of more images a sample is taken, which bounds the time for each model


def temperature(logits: Tensor, labels: Tensor) -> float | None:
    """Returns the T in [LOWEST, HIGHEST] that minimises the mean of −log softmax(logits / T)[label] over the images.

    `logits` are finite, float [n,C]; `labels` int64 [n], which need not hold every class. All images weigh the same.
    Returns None without images, if the logits of each image are equal, as every T then gives equal probabilities, and
    if the minimum is not inside. Of more than MAX_LOGITS / C images, a sample that depends on n and C only is used.
    """
    logits, labels = _sample(logits, labels)
    # [C,n], as numpy is ten times as fast along the first axis
    columns = logits.double().T.numpy(force=True).copy()
    margins = columns - np.take_along_axis(columns, labels.numpy(force=True)[None], 0)  # 0 at the label
    if not margins.any():
        return None
    columns -= columns.max(0)  # no exp overflows

    # scikit-learn's temperature scaling (CalibratedClassifierCV) finds the same minimum, but it refuses labels that
    # lack classes, and takes logits that look like probabilities for such.
    from scipy.optimize import brentq

    def slope(log_t: float) -> float:
        # With β = 1/T the loss is convex, and its derivative in β is the mean over images of Σ_c p_c · margin_c.
        powers = np.exp(columns * math.exp(-log_t))
        return float(((powers * margins).sum(0) / powers.sum(0)).mean())

    low, high = math.log(LOWEST), math.log(HIGHEST)
    if slope(low) <= 0 or slope(high) >= 0:  # the loss still falls at the largest β, or at the smallest
        return None
    return math.exp(brentq(slope, low, high, xtol=1e-9))


def validation_nll(logits: Tensor, labels: Tensor, temperature: float | None) -> float:
    """Returns the mean of −log softmax(logits / T)[label] over the images that `temperature` reads; T = 1 for None."""
    logits, labels = _sample(logits, labels)
    return float(per_image_nll(logits.double() / (temperature or 1.0), labels).mean())


def _sample(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    n, classes = logits.shape
    if n <= (most := max(1, MAX_LOGITS // classes)):
        return logits, labels
    sample = permutation(0, 0, Stream.TEMPERATURE, n)[:most]
    return logits[sample], labels[sample]


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
    bins, diagram = confidence_bin(confidence), list[Bin]()
    for number in range(ECE_BINS):
        inside = bins == number
        means = (float(confidence[inside].mean()), float(right[inside].mean())) if inside.any() else (None, None)
        diagram.append(Bin(number / ECE_BINS, (number + 1) / ECE_BINS, int(inside.sum()), *means))
    return diagram
