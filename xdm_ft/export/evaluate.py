"""The metrics of a model at a new site, and whether they keep what its card promises.

The promise (export/expected.py) is the distribution m + spread · t(D − 1) of a metric at one more site, over D held-out
sets. At the site it is measured on some images, with standard error SE (jackknife over their groups; on the logit scale
SE/(p(1 − p)), the delta method with p = (x + ½)/(n + 1)). Sampling is independent of which site it is, so the value
lies in m ± t(D − 1)·√(spread² + SE²) for 95% of sites that are like the held-out ones. SE has its own degrees of
freedom, Welch and Satterthwaite's number for the sum is never smaller than the smaller of the two: t(min(D, G) − 1) is
used, G being the effective number of groups. spread² already holds the sampling error of the held-out images, so
"within" is said in somewhat more than 95% where images vary as much as sites do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from torch import Tensor

from xdm_ft.evaluation.calibration import Bin, reliability
from xdm_ft.evaluation.intervals import Bounds, NewSite, interval_of, smoothed, within_bounds
from xdm_ft.evaluation.jackknife import effective_number
from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER, per_image, score
from xdm_ft.evaluation.predictions import HeldOutImages, Prediction
from xdm_ft.evaluation.verdicts import Estimate
from xdm_ft.export.config import Expected
from xdm_ft.export.expected import error_at
from xdm_ft.export.sources import Item, Site
from xdm_ft.features.hashes import READER_THREADS, hash_file, regular_file
from xdm_ft.runtime.progress import progress


@dataclass(frozen=True)
class Labelled:
    """The images of a site that can be read, with the model's answers."""

    site: Site
    logits: Tensor  # float32 [n,C]
    trained: np.ndarray | None = None  # bool [n], whether the image trained the model; None: unknown

    def of_domain(self, number: int) -> Labelled:
        rows = np.flatnonzero(self.site.domains == number)
        trained = None if self.trained is None else self.trained[rows]
        return Labelled(self.site.rows(rows), self.logits[torch.from_numpy(rows)], trained)


@dataclass(frozen=True)
class Measured:
    value: float
    interval: tuple[float, float] | None  # 95%, over groups of images; None: too few groups, or all alike


@dataclass(frozen=True)
class OfClass:
    images: int
    recall: float | None  # None without images


@dataclass(frozen=True)
class Versus:
    """A metric at a site beside what the model's card promises."""

    metric: str
    value: float
    promised: float  # the mean over held-out domains
    interval: tuple[float, float] | None  # 95%, for a value that is measured on this many images; None: unknown
    worst: tuple[str, float]  # the held-out domain with the worst value, and that value
    verdict: str  # within what the card promises | below | above | can not be said (why)


@dataclass(frozen=True)
class AtSite:
    """What was measured on the images of one domain, or of all."""

    images: int
    groups: int | None  # None: images assumed independent
    metrics: dict[str, Measured]
    classes: dict[str, OfClass]
    reliability: list[Bin]
    versus: Versus | None  # None: all of several domains, or a model without a promise


def at_site(
    images: Labelled, class_names: Sequence[str], expected: Expected | None = None, temperature: float = 1.0
) -> AtSite:
    """Returns the metrics of labelled images, with intervals over their groups.

    `expected` is given for one domain: a promise is about one site. `temperature` is that of the logits.
    """
    site, logits = images.site, images.logits
    labels, domains = torch.from_numpy(site.labels), torch.from_numpy(site.domains)
    scores = score(logits, labels, domains, class_names, site.domain_names)
    tested = HeldOutImages(np.arange(len(labels)), site.labels, site.domains, site.groups)
    effective = effective_number(tested.sizes)
    estimates, metrics = dict[str, Estimate | None](), dict[str, Measured]()
    for name in HIGHER_IS_BETTER:
        value = getattr(scores, name)
        if value is None or (name == "worst_domain_accuracy" and len(scores.per_domain) == 1):
            continue
        predicted, values = logits.argmax(1).numpy(), per_image(name, logits, labels)
        prediction = Prediction("", (), 0, "", tested, predicted, values)
        estimates[name] = error_at(name, np.array([value]), [prediction], effective)
        metrics[name] = Measured(value, interval_of(name, estimates[name], effective))
    counts, recalls, versus = np.bincount(site.labels, minlength=len(class_names)), scores.per_class_recall, None
    if expected is not None:
        # of a single domain the worst accuracy is its accuracy
        name = "accuracy" if expected.metric == "worst_domain_accuracy" else expected.metric
        if name in metrics:  # the metric is defined on these images
            versus = _versus(expected, metrics[name].value, estimates[name], images, temperature)
    return AtSite(
        images=scores.n,
        groups=None if site.groups is None else len(np.unique(site.groups)),
        metrics=metrics,
        classes={name: OfClass(int(n), recalls[name]) for name, n in zip(class_names, counts, strict=True)},
        reliability=reliability(logits, site.labels),
        versus=versus,
    )


def _versus(
    expected: Expected, value: float, estimate: Estimate | None, images: Labelled, temperature: float
) -> Versus:
    interval, reason, promised, sets = None, "", expected.at_new_site, len(expected.held_out)
    trained = 0 if images.trained is None else int(images.trained.sum())
    if expected.selection == "oracle":
        reason = "picked by labels of the held-out domains"
    elif trained:
        reason = f"{trained} of these images trained the model"
    elif promised is None:
        reason = "one held-out set" if sets == 1 else f"{sets} held-out sets"
    elif temperature != 1 and expected.metric in ("nll", "ece"):
        reason = "the promise is for probabilities without a temperature"
    elif estimate is None:
        reason = "too few images or groups"
    else:
        interval, verdict = judged(expected.metric, value, estimate, len(images.logits), promised)
        if interval == within_bounds(expected.metric, -math.inf, math.inf):
            reason = "the held-out domains differ so much that any value is possible"
    if reason:
        verdict = f"can not be said ({reason})"
    return Versus(expected.metric, value, expected.mean, interval, expected.worst, verdict)


def judged(metric: str, value: float, estimate: Estimate, images: int, promised: NewSite) -> tuple[Bounds, str]:
    """Returns the 95% interval of the values that a site would have if it is like the held-out ones, and the verdict.

    `estimate` has the standard error of `value` over these `images` and its degrees of freedom.
    """
    error = estimate.error
    if promised.scale == "logit":
        p = smoothed(value, images)
        error /= p * (1 - p)
    ends = promised.between(metric, error=error, freedom=estimate.freedom, images=images)
    if value < ends[0]:
        return ends, "below"
    return ends, "above" if value > ends[1] else "within what the card promises"


def checksums(items: Sequence[Item]) -> np.ndarray:
    """Returns the xxh3 (128 bits) of each image's bytes, uint8 [n,16]; zeros where they can not be read."""

    def checksum(item: Item) -> bytes:
        if isinstance(item.content, bytes):
            return xxhash.xxh3_128_digest(item.content)
        try:
            regular_file(item.content)
            return hash_file(item.content)[1]
        except (OSError, ValueError):  # prediction says why
            return bytes(16)

    digests = np.zeros((len(items), 16), np.uint8)
    with ThreadPoolExecutor(READER_THREADS) as pool, progress("hashing", len(items), "images") as done:
        for row, content in zip(digests, pool.map(checksum, items), strict=True):
            row[:] = np.frombuffer(content, np.uint8)
            done.advance()
    return digests


def first_of_each(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first of the images with each checksum, int64 [m], and for each image its first one, int64 [n].

    Images without checksum are different ones.
    """
    keys = [bytes(row) if row.any() else number for number, row in enumerate(images)]
    first = dict[bytes | int, int]()
    firsts = np.array([first.setdefault(key, number) for number, key in enumerate(keys)], np.int64)
    return np.fromiter(first.values(), np.int64, len(first)), firsts


def are_among(images: np.ndarray, training_images: np.ndarray) -> np.ndarray:
    """Returns whether each checksum is one of the training images': bool [n]."""
    training = {bytes(row) for row in training_images}
    return np.array([bytes(row) in training for row in images], bool)
