"""Metrics of predictions, and their calibration. Logits are float [n,C], labels and domains int64 [n]; results are
plain floats.

Metrics over classes (`balanced_accuracy`, `macro_f1`, `auroc`) average over the classes that have images in the split.
Confusion counts are int64 [C,C], true class by predicted class.

Temperature scaling is the one number T by which logits are divided before the softmax so that probabilities fit (Guo et
al. 2017, "On Calibration of Modern Neural Networks", section 4.2): T minimises the negative log-likelihood of
validation images. It changes no predicted class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xdm_ft.core import Score
from xdm_ft.runtime.randomness import Stream, permutation

HIGHER_IS_BETTER: dict[str, bool] = {
    "accuracy": True,
    "balanced_accuracy": True,
    "macro_f1": True,
    "auroc": True,
    "worst_domain_accuracy": True,
    "nll": False,
    "ece": False,
}
ECE_BINS = 15
_ROWS_AT_ONCE = 16384  # rows that are converted to float64 at a time, to limit memory


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """Share of correct predictions: logits [...,n,C], labels [...,n] → float64 [...] on the CPU; also of many heads."""
    right = (logits.argmax(-1) == labels).sum(-1)  # [...]
    return right.cpu().double() / logits.shape[-2]


def confusion(predicted: Tensor, labels: Tensor, num_classes: int) -> np.ndarray:
    """Counts int64 [C,C] of (true class, predicted class)."""
    cells = torch.bincount(labels * num_classes + predicted, minlength=num_classes**2)
    return cells.view(num_classes, num_classes).cpu().numpy()


def recalls(counts: np.ndarray) -> np.ndarray:
    """Share of each class's images that are predicted correctly, [C]; nan for a class without images."""
    support = counts.sum(1)
    return np.where(support > 0, np.diag(counts) / np.maximum(support, 1), np.nan)


def balanced_accuracy(counts: np.ndarray) -> float:
    """Mean recall over the classes that have images; nan for fewer than two, whose recall is an accuracy."""
    recall = recalls(counts)
    return float(np.nanmean(recall)) if np.isfinite(recall).sum() > 1 else math.nan


def macro_f1(counts: np.ndarray) -> float:
    """Mean of F1 = 2 tp / (true + predicted) over the classes that have images."""
    support, predicted = counts.sum(1), counts.sum(0)
    f1 = 2 * np.diag(counts) / np.maximum(support + predicted, 1)
    return float(f1[support > 0].mean())


def domain_accuracies(predicted: Tensor, labels: Tensor, domains: Tensor) -> dict[int, tuple[float, int]]:
    """{domain number: (accuracy, number of images)} of the domains that have images; a negative number is no domain."""
    inside = domains >= 0
    predicted, labels, domains = predicted[inside], labels[inside], domains[inside]
    images = torch.bincount(domains).cpu().numpy()
    right = torch.bincount(domains[predicted == labels], minlength=len(images)).cpu().numpy()
    return {int(d): (float(right[d] / images[d]), int(images[d])) for d in np.flatnonzero(images)}


def log_normalizer(logits: Tensor) -> Tensor:
    """log Σ_c exp(logit_c) as float64 [n] on the CPU."""
    return torch.cat([rows.double().logsumexp(1) for rows in logits.cpu().split(_ROWS_AT_ONCE)])


def per_image_nll(logits: Tensor, labels: Tensor, normalizer: Tensor | None = None) -> np.ndarray:
    """−log p(true class) of each image, float64 [n]. `normalizer`: `log_normalizer(logits)`, if it is known."""
    true = logits.cpu().gather(1, labels.cpu()[:, None])[:, 0].double()
    return ((log_normalizer(logits) if normalizer is None else normalizer) - true).numpy()


def confidences(logits: Tensor, normalizer: Tensor | None = None) -> np.ndarray:
    """Probability of the predicted class, float64 [n]. `normalizer`: as in `per_image_nll`."""
    normalizer = log_normalizer(logits) if normalizer is None else normalizer
    return (logits.cpu().amax(1).double() - normalizer).exp().numpy()


def confidence_bin(confidence: np.ndarray) -> np.ndarray:
    """The number of each confidence's bin among (0, 1/15], …, (14/15, 1], int64 [n]."""
    return np.clip(np.ceil(confidence * ECE_BINS).astype(np.int64) - 1, 0, ECE_BINS - 1)


def expected_calibration_error(confidence: np.ndarray, right: np.ndarray) -> float:
    """The ECE of Guo et al. 2017: Σ_bins |Σ_{i in bin} (right_i − confidence_i)| / n.

    Equal to their Σ_bins n_bin/n |accuracy − confidence| of the bin, as n_bin cancels.
    """
    # torchmetrics puts confidences of exactly 1 into a sixteenth bin, so it is not used here.
    gaps = np.bincount(confidence_bin(confidence), weights=right - confidence, minlength=ECE_BINS)
    return float(np.abs(gaps).sum() / len(confidence))


def _class_scores(logits: Tensor) -> Callable[[int], np.ndarray]:
    """Returns a function class → score float64 [n], which orders images as the probability of the class does.

    The scores are log odds, as log probabilities are all 0 from a margin of 37 on. With d_c = logit_c − the largest
    logit and r = log Σ exp(d) over all classes but the predicted one, they are −r of the predicted class, and
    d_c − log(1 + exp(r) − exp(d_c)) of another.
    """
    logits = logits.cpu()
    largest, best = logits.max(1)
    rest = [
        (rows.double() - top[:, None].double()).scatter(1, predicted[:, None], -math.inf).logsumexp(1)
        for rows, top, predicted in zip(*(t.split(_ROWS_AT_ONCE) for t in (logits, largest, best)), strict=True)
    ]
    columns, r = logits.T.contiguous(), torch.cat(rest)  # [C,n]
    others, of_best = r.exp(), largest.double()

    def log_odds(c: int) -> np.ndarray:
        d = columns[c].double() - of_best
        return torch.where(best == c, -r, d - (others - d.exp()).clamp(min=0).log1p()).numpy()

    return log_odds


def wins(scores: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """The share of negatives that have a lower score than each positive, ties counted half: [positives].

    Their mean is the area under the ROC curve (Hanley & McNeil 1982). Needs at least one positive and one negative.
    """
    # One sort of 170,000 negatives and two look-ups take an eighth of the time of building the ROC curve, which
    # matters with hundreds of classes.
    negatives, mine = np.sort(scores[~positive]), scores[positive]
    return (np.searchsorted(negatives, mine, "left") + np.searchsorted(negatives, mine, "right")) / (2 * len(negatives))


def _scored_classes(labels: np.ndarray, num_classes: int) -> np.ndarray:
    """The classes whose areas the AUROC averages: those with positives and negatives; of two classes, class 1 only."""
    support = np.bincount(labels, minlength=num_classes)
    scored = np.flatnonzero((support > 0) & (support < len(labels)))
    return scored[scored == 1] if num_classes == 2 else scored


def auroc(logits: Tensor, labels: Tensor) -> float | None:
    """Area under the ROC curve of class 1 (two classes), or the mean area of each class against the rest (more).

    The mean is over classes with positives and negatives; None if no class has both.
    """
    truth, score_of = labels.cpu().numpy(), _class_scores(logits)
    areas = [float(wins(score_of(c), truth == c).mean()) for c in _scored_classes(truth, logits.shape[1])]
    return float(np.mean(areas)) if areas else None


def auroc_contributions(logits: Tensor, labels: Tensor) -> np.ndarray | None:
    """Each image's contribution to the AUROC, float64 [n]; None where `auroc` is None.

    The mean of all is the AUROC; the mean over a subset is, to first order, the AUROC of the subset. A contribution
    follows from the image's placement among the images of the other kind (DeLong et al. 1988).
    """
    truth, score_of = labels.cpu().numpy(), _class_scores(logits)
    classes = _scored_classes(truth, logits.shape[1])
    if not len(classes):
        return None
    areas, influence = [], np.zeros(len(truth))
    for c in classes:
        positive, scores = truth == c, score_of(c)
        for kind, placement in ((positive, wins(scores, positive)), (~positive, wins(-scores, ~positive))):
            area = placement.mean()  # the same for both kinds
            # deviations sum to 0 within a kind, so they leave the mean of all contributions at the area
            influence[kind] += (placement - area) / len(placement)
        areas.append(area)
    return float(np.mean(areas)) + influence * len(truth) / len(classes)


def per_image(name: str, logits: Tensor, labels: Tensor) -> np.ndarray | None:
    """The values per image, float64 [n], that the jackknife of a metric needs beside the predicted classes.

    `nll`: loss; `ece`: confidence; `auroc`: contribution, None if the AUROC is not defined; other metrics: None.
    """
    if name == "nll":
        return per_image_nll(logits, labels)
    if name == "ece":
        return confidences(logits)
    return auroc_contributions(logits, labels) if name == "auroc" else None


def worst_accuracy(predicted: Tensor, labels: Tensor, worst_of: Tensor) -> float:
    """The lowest accuracy of the groups that `worst_of` numbers (−1: in no group); nan if there is no group."""
    return min((share for share, _ in domain_accuracies(predicted, labels, worst_of).values()), default=float("nan"))


def at_one_site(name: str) -> str:
    """Returns the metric as it is at a single site, which is its own worst domain."""
    return "accuracy" if name == "worst_domain_accuracy" else name


OF_TWO_CLASSES = ("balanced_accuracy", "auroc")  # metrics that are not defined on images of a single class


def is_defined(name: str, labels: Tensor) -> bool:
    """Whether a metric is defined on images with these labels [n]."""
    return len(labels.unique()) > (1 if name in OF_TWO_CLASSES else 0)


def metric(name: str, logits: Tensor, labels: Tensor, worst_of: Tensor) -> float:
    """Computes one metric, by its name; nan where it is not defined. n must not be 0.

    `worst_of` int64 [n] is the domain of each image, or its group where the worst group is reported (−1: in no group).
    """
    predicted = logits.argmax(1)
    match name:
        case "accuracy":
            return float(accuracy(logits, labels))
        case "nll":
            return float(per_image_nll(logits, labels).mean())
        case "auroc":
            area = auroc(logits, labels)
            return float("nan") if area is None else area
        case "ece":
            return expected_calibration_error(confidences(logits), (predicted == labels).cpu().numpy())
        case "worst_domain_accuracy":
            return worst_accuracy(predicted, labels, worst_of)
    by_confusion = {"balanced_accuracy": balanced_accuracy, "macro_f1": macro_f1}
    return by_confusion[name](confusion(predicted, labels, logits.shape[1]))


def score(
    logits: Tensor,
    labels: Tensor,
    domains: Tensor,
    class_names: Sequence[str],
    domain_names: Sequence[str],
    worst_of: Tensor | None = None,
    by_domain: Collection[str] = (),
) -> Score:
    """Returns all metrics of one split, as results.json has them. `domains` are indices into `domain_names`.

    Args:
        worst_of: int64 [n], the group of each image (−1: in no group), for data sets whose worst group is not a domain.
        by_domain: fields of `Score` that each domain has beside its accuracy and number of images.

    Raises `ValueError` for a split without images and `FloatingPointError` for logits that are not finite.
    """
    n = len(labels)
    if n == 0:
        raise ValueError("a split without images has no score")
    if not torch.isfinite(logits).all():
        raise FloatingPointError(
            f"the logits of {int((~torch.isfinite(logits)).any(1).sum())} of {n} images are not finite"
        )
    predicted, normalizer = logits.argmax(1), log_normalizer(logits)
    counts = confusion(predicted, labels, logits.shape[1])
    worst_of = domains if worst_of is None else worst_of
    per_domain: dict[str, dict[str, Any]] = {}
    for domain, (share, images) in domain_accuracies(predicted, labels, domains).items():
        of_domain: dict[str, Any] = {"accuracy": share, "n": images}
        if by_domain:
            inside = domains == domain
            of = logits[inside], labels[inside], domains[inside]
            alone = score(of[0], of[1], of[2], class_names, domain_names, worst_of[inside])
            of_domain |= {name: getattr(alone, name) for name in vars(alone) if name in by_domain}
        per_domain[domain_names[domain]] = of_domain
    recall = recalls(counts)
    worst, balanced = worst_accuracy(predicted, labels, worst_of), balanced_accuracy(counts)
    return Score(
        accuracy=float(np.trace(counts) / n),
        balanced_accuracy=None if math.isnan(balanced) else balanced,
        macro_f1=macro_f1(counts),
        auroc=auroc(logits, labels),
        worst_domain_accuracy=None if math.isnan(worst) else worst,
        nll=float(per_image_nll(logits, labels, normalizer).mean()),
        ece=expected_calibration_error(confidences(logits, normalizer), (predicted == labels).cpu().numpy()),
        n=n,
        per_class_recall={c: None if np.isnan(r) else float(r) for c, r in zip(class_names, recall, strict=True)},
        per_domain=per_domain,
    )


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

    # in log T, as the range spans four powers of ten
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


IN_PERCENT = (
    "accuracy", "balanced_accuracy", "macro_f1", "auroc", "worst_domain_accuracy", "worst_class_recall", "ece",
)  # fmt: skip
