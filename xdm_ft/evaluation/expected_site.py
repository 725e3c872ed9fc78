"""The accuracy of a model at a new site whose images have no labels; and the metrics of labelled ones.

Three estimates, each of which fails somewhere, and their median:

* COT (Lu et al. 2023, "Characterizing Out-of-Distribution Error via Optimal Transport"): the most confidence that an
  assignment of the images to classes with the class shares q can have, less what confidence is above accuracy on
  validation images. Needs the class shares of the site.
* ALine-D (Baek et al. 2022, "Agreement-on-the-Line"): on the probit scale, the agreement of two heads at the site
  depends linearly on their agreement on validation images, and accuracy has the same slope.
* ATC (Garg et al. 2022, "Leveraging Unlabeled Data to Predict Out-of-Distribution Performance"): the share of images
  above the confidence that as many held-out images reach as are right.

How far the same estimate was off at each held-out domain, by heads that never saw it, gives the interval.

Images that belong to no class of the model have a score, a threshold, and a share at the site. A class is left out
together with a domain; at that domain the images of this class are unknown, the others are known. Validation images of
known domains would promise too few false alarms, so the threshold comes from held-out domains. With f the rate of false
alarms and t that of detections, a share π of unknown images gives flagged = π t + (1 − π) f.

Of labelled images, a metric is judged by what the model's card promises: the distribution m + spread · t(D − 1) of the
metric at one more site, over D held-out sets. At the site it is measured on some images, with standard error SE
(jackknife over their groups; on the logit scale SE/(p(1 − p)), the delta method with p = (x + ½)/(n + 1)). Sampling is
independent of which site it is, so the value lies in m ± t(D − 1)·√(spread² + SE²) for 95% of sites that are like the
held-out ones. SE has its own degrees of freedom, Welch and Satterthwaite's number for the sum is never smaller than the
smaller of the two: t(min(D, G) − 1) is used, G being the effective number of groups. spread² already holds the sampling
error of the held-out images, so "within" is said in somewhat more than 95% where images vary as much as sites do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, NamedTuple

import numpy as np
import torch
from pydantic import Field
from scipy.optimize import minimize
from scipy.special import logsumexp, ndtr, ndtri, softmax, stdtrit
from torch import Tensor

from xdm_ft.core import ALPHA
from xdm_ft.evaluation.estimates import Estimate
from xdm_ft.evaluation.few_labels import FEWEST_EXACT, clopper_pearson
from xdm_ft.evaluation.intervals import Bounds, HeldOutValues, NewSite, interval_of, over_seeds_and_groups, smooth_share
from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER, Bin, per_image, reliability, score, wins
from xdm_ft.evaluation.predictions import (
    HeldOutImages,
    Prediction,
    effective_number,
    jackknife_variance,
    without_each_group,
)
from xdm_ft.runtime.errors import plural
from xdm_ft.runtime.settings import Block

SMOOTHING = 0.01  # ε of COT's dual, in units of probability
BELOW, NEARLY = 0.10, 0.05  # less than the card's mean: surely worse, and still as promised
MAX_SPREAD = 0.20  # of the three estimates: a warning where they are farther apart
MIN_DOMAINS, MIN_IMAGES = 3, 50
MAX_VALUES = 20_000_000  # probabilities of a transport plan; of more images, a sample that depends on n and C only
FALSE_ALARMS = 0.05  # of the known images at held-out domains, on average
LEAST_AUROC = 0.7  # mean over held-out domains; below, nothing is said about unknown images
FEWEST_CLASSES = 3  # of two, a head without one has a single class
WITHIN = "within what the card promises"
Rate = Annotated[float, Field(ge=0, le=1)]
Pairs = Sequence[tuple[np.ndarray, np.ndarray]]
"""Of each class that was left out with a domain: scores there of the known images [n] and of the unknown ones [m]."""


def transported_confidence(p: np.ndarray, shares: np.ndarray) -> float:
    """Returns the largest mean probability of the class that each image is assigned, if the classes get these shares.

    p: probabilities, float64 [n,C]; shares: q, float64 [C], of sum 1. By duality it is the minimum over v [C] of
    q·v + mean_i max_y(p_iy − v_y). L-BFGS finds v for a smooth maximum; the value is that of the maximum itself.
    """

    def smooth(v: np.ndarray) -> tuple[float, np.ndarray]:
        scaled = (p - v) / SMOOTHING
        value = shares @ v + SMOOTHING * logsumexp(scaled, axis=1).mean()
        return float(value), shares - softmax(scaled, axis=1).mean(0)

    minimum = minimize(smooth, np.zeros(p.shape[1]), jac=True, method="L-BFGS-B")
    return float(shares @ minimum.x + (p - minimum.x).max(1).mean())


def agreement(predicted: np.ndarray) -> np.ndarray:
    """Returns the share of images on which each pair of heads agrees: predicted int64 [M,n] → [M(M−1)/2], in order."""
    first, second = np.triu_indices(len(predicted), 1)
    return np.array([(predicted[i] == predicted[j]).mean() for i, j in zip(first, second, strict=True)])


def on_the_line(
    accuracy: np.ndarray, agreement_there: np.ndarray, agreement_here: np.ndarray, images: tuple[int, int]
) -> float | None:
    """Returns ALine-D's accuracy of the last of M heads at the site; None if the heads agree everywhere.

    accuracy: [M], on validation images. Agreements of all pairs, [M(M−1)/2], there (validation) and here (the site), in
    the order of `agreement`. `images`: their numbers there and here. Rates are clipped to [1/2n, 1 − 1/2n], as Φ⁻¹ of 0
    and 1 is infinite.
    """

    def probit(rate: np.ndarray, n: int) -> np.ndarray:
        return ndtri(rate.clip(1 / (2 * n), 1 - 1 / (2 * n)))

    there, here = probit(agreement_there, images[0]), probit(agreement_here, images[1])
    if np.ptp(there) == 0 or np.ptp(here) == 0:
        return None
    slope = float(np.polyfit(there, here, 1)[0])
    of_head = probit(accuracy, images[0])
    first, second = np.triu_indices(len(accuracy), 1)
    design = np.zeros((len(first), len(accuracy)))
    pairs = np.arange(len(first))
    design[pairs, first] = design[pairs, second] = 0.5
    target = here + slope * ((of_head[first] + of_head[second]) / 2 - there)
    return float(ndtr(np.linalg.lstsq(design, target, rcond=None)[0][-1]))


def confidence_threshold(confidence: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> float:
    """Returns ATC's threshold: as many held-out images lie below it as are wrong.

    For each held-out domain the confidence max p of its images [n_d], and whether the head is right on them; each
    domain has the same weight.
    """
    s, weight = np.concatenate(confidence), np.concatenate([np.full(len(c), 1 / len(c)) for c in confidence])
    wrong = sum(1 - float(np.mean(of_domain)) for of_domain in right)
    order = np.argsort(s, kind="stable")
    below = np.cumsum(weight[order])
    number = int(np.searchsorted(below, wrong + 1e-9, side="right"))  # of images below the threshold
    return float(s[order[number]]) if number < len(s) else math.inf


class AccuracyEstimates(NamedTuple):
    """The three estimates, each within [0, 1]."""

    cot: float
    aline: float
    atc: float

    @property
    def estimate(self) -> float:
        return sorted(self)[1]

    @property
    def spread(self) -> float:
        return max(self) - min(self)


class Validated(NamedTuple):
    """What M heads show on their validation images; the last of them is the one whose accuracy is estimated."""

    accuracies: np.ndarray  # [M]
    agreements: np.ndarray  # [M(M−1)/2], as `agreement` returns them
    images: int
    offset: float  # COT: mean confidence of the last head less its accuracy


def parts_at(
    p: np.ndarray, predicted: np.ndarray, known: Validated, shares: np.ndarray, threshold: float
) -> AccuracyEstimates | None:
    """Returns the three estimates at a site; None if the heads agree everywhere.

    p: calibrated probabilities of the last head, float64 [n,C]. predicted: classes by all heads, int64 [M,n]. `shares`:
    of the classes there, [C]. `threshold`: ATC's.
    """
    line = on_the_line(known.accuracies, known.agreements, agreement(predicted), (known.images, predicted.shape[1]))
    if line is None:
        return None
    most = max(1, MAX_VALUES // p.shape[1])
    drawn = p if len(p) <= most else p[np.random.default_rng(0).choice(len(p), most, replace=False)]
    transport = transported_confidence(drawn, shares) - known.offset
    estimates = (transport, line, float((p.max(1) >= threshold).mean()))
    return AccuracyEstimates(*(min(1.0, max(0.0, estimate)) for estimate in estimates))


class ExpectedAccuracy(NamedTuple):
    """What to expect at the site, or why it cannot be said."""

    estimate: float
    low: float  # nan: no past error is known
    high: float
    parts: AccuracyEstimates
    verdict: str  # below, as_promised or unknown
    refused: str | None  # the reason why no number should be shown
    warnings: tuple[str, ...]  # why to trust the estimate less


def expect(
    parts: AccuracyEstimates,
    past_errors: Mapping[str, float],
    past_values: Mapping[str, float],
    images: float,
    *,
    n: int,
) -> ExpectedAccuracy:
    """Returns the expected accuracy at a site with its 95% interval.

    `past_errors`: {held-out domain: the same estimate there minus the truth}; `past_values`: {domain: accuracy there of
    the head without it}, also of domains without an estimate. `images`: their effective number at the site; `n`: their
    number.
    """
    errors = np.array([*past_errors.values()], np.float64)
    values = np.array([past_values[domain] for domain in past_errors], np.float64)
    estimate, card, low, high = parts.estimate, card_mean(past_values), math.nan, math.nan
    if len(errors):
        variance = float(np.mean(errors**2)) + estimate * (1 - estimate) / images
        half = float(stdtrit(len(errors), 1 - ALPHA / 2)) * variance**0.5
        low, high = max(0.0, estimate - half), min(1.0, estimate + half)
    verdict = "below" if estimate < card - BELOW else "as_promised" if low >= card - NEARLY else "unknown"
    return ExpectedAccuracy(
        estimate, low, high, parts, verdict, _refusal(len(errors), n), _warnings(parts, errors, values)
    )


def card_mean(past_values: Mapping[str, float]) -> float:
    """Returns the mean accuracy over held-out domains; nan without one."""
    return float(np.mean([*past_values.values()])) if past_values else math.nan


def past_skill(errors: np.ndarray, values: np.ndarray) -> float:
    """Returns 1 − MAE / MAE of the mean of the other domains, of the estimates at the D held-out domains."""
    others = (values.sum() - values) / (len(values) - 1)
    naive = float(np.abs(others - values).mean())
    return 1 - float(np.abs(errors).mean()) / naive if naive > 0 else -math.inf


def _refusal(domains: int, n: int) -> str | None:
    if domains < MIN_DOMAINS:
        return f"past errors are known of {plural(domains, 'held-out domain')}; {MIN_DOMAINS} are needed"
    return f"{n} images are too few; {MIN_IMAGES} are needed" if n < MIN_IMAGES else None


def _warnings(parts: AccuracyEstimates, errors: np.ndarray, values: np.ndarray) -> tuple[str, ...]:
    warnings = []
    if parts.spread > MAX_SPREAD:
        differ = f"the three estimates differ by {100 * parts.spread:.0f} points"
        warnings.append(f"{differ}, more than {100 * MAX_SPREAD:.0f}: trust this less")
    if len(errors) > 1 and past_skill(errors, values) <= 0:
        warnings.append("at the held-out domains, the mean of the other domains was as good an estimate")
    return tuple(warnings)


class Rates(Block):
    """At one held-out domain, by a threshold from the others: means over the classes that were left out."""

    auroc: Rate
    false_alarms: Rate
    detections: Rate


class UnknownShare(NamedTuple):
    value: float
    low: float  # 95%
    high: float


class Unknown(Block):
    """What tells unknown images."""

    threshold: float  # of the energy, above which an image is unknown
    domains: Annotated[dict[str, Rates], Field(min_length=1)]

    @property
    def auroc(self) -> float:
        return fmean(at.auroc for at in self.domains.values())

    @property
    def works(self) -> bool:
        return self.auroc >= LEAST_AUROC

    def share(self, flagged: float, images: float) -> UnknownShare | None:
        """Returns the share of unknown images at a site where the share `flagged` lies above the threshold.

        `images`: their effective number. The ends come from Clopper and Pearson's interval of `flagged`, the lower one
        with the largest rates of the domains, the upper one with the smallest; all are within 0…1. None: some domain
        has no more detections than some domain has false alarms, or the site has surely fewer than every domain has, so
        that its energies are not like theirs.
        """
        f, t = ([getattr(at, name) for at in self.domains.values()] for name in ("false_alarms", "detections"))
        n = max(1, int(images))
        low, high = clopper_pearson(round(flagged * n), n)
        if min(t) <= max(f) or high < min(f):
            return None
        of = ((flagged, fmean(f), fmean(t)), (low, max(f), max(t)), (high, min(f), min(t)))
        return UnknownShare(*(min(1.0, max(0.0, (seen - alarm) / (found - alarm))) for seen, alarm, found in of))


def energy(logits: np.ndarray) -> np.ndarray:
    """Returns the score −log Σ exp logit of images, higher for unknown ones: logits [..., C] → [...].

    Liu et al. 2020, "Energy-based Out-of-distribution Detection". On PACS it tells more than max logit and the distance
    to the nearest means of a class in a domain (benchmarks/results.md).
    """
    score: np.ndarray = -logsumexp(logits, axis=-1)
    return score


def threshold(known: Sequence[Pairs]) -> float:
    """Returns the lowest score above which at most `FALSE_ALARMS` of the known images of several domains lie.

    Each domain has the same weight, and so has each class of a domain.
    """
    parts = [(scores, 1 / (len(known) * len(of) * len(scores))) for of in known for scores, _ in of]
    scores = np.concatenate([of for of, _ in parts])
    order = np.argsort(-scores, kind="stable")
    above = np.cumsum(np.concatenate([np.full(len(of), weight) for of, weight in parts])[order])  # with itself
    return float(scores[order[np.searchsorted(above, FALSE_ALARMS + 1e-9, side="right")]])


def unknown_of(scores: Mapping[str, Pairs]) -> Unknown:
    """Returns the threshold of two or more held-out domains, and what it shows at each of them.

    A domain's rates are those by the threshold of the others: by its own, too, false alarms would be 5% by
    construction, and more at a new site.
    """
    domains = dict[str, Rates]()
    for name, pairs in scores.items():
        tau = threshold([of for other, of in scores.items() if other != name])
        domains[name] = Rates(
            auroc=fmean(_auroc(known, unknown) for known, unknown in pairs),
            false_alarms=fmean(float((known > tau).mean()) for known, _ in pairs),
            detections=fmean(float((unknown > tau).mean()) for _, unknown in pairs),
        )
    return Unknown(threshold=threshold([*scores.values()]), domains=domains)


def _auroc(known: np.ndarray, unknown: np.ndarray) -> float:
    return float(wins(np.concatenate([known, unknown]), np.arange(len(known) + len(unknown)) >= len(known)).mean())


# ---- Labelled images of a site


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
    verdict: str  # `WITHIN` | below | above | cannot be said (why)
    among: str  # where the value lies among those of the held-out domains, in words


@dataclass(frozen=True)
class AtSite:
    """What was measured on the images of one domain, or of all."""

    images: int
    groups: int | None  # None: images assumed independent
    metrics: dict[str, Measured]
    classes: dict[str, OfClass]
    reliability: list[Bin]
    versus: Versus | None = None  # None: all of several domains, or a model without a promise


def site_metrics(
    logits: Tensor,
    labels: np.ndarray,
    domains: np.ndarray,
    groups: np.ndarray | None,
    class_names: Sequence[str],
    domain_names: Sequence[str],
) -> tuple[AtSite, dict[str, Estimate | None]]:
    """Returns the metrics of labelled images, with intervals over their groups, and the metrics' errors.

    The accuracy of few images without groups has Clopper and Pearson's interval, as the jackknife's covers 83 to 89% at
    25 to 50 images. logits: [n,C]; labels, domains, groups: int64 [n].
    """
    answers = torch.from_numpy(labels)
    scores = score(logits, answers, torch.from_numpy(domains), class_names, domain_names)
    tested = HeldOutImages(np.arange(len(labels)), labels, domains, groups)
    effective = effective_number(tested.sizes)
    estimates, metrics = dict[str, Estimate | None](), dict[str, Measured]()
    for name in HIGHER_IS_BETTER:
        value = getattr(scores, name)
        if value is None or (name == "worst_domain_accuracy" and len(scores.per_domain) == 1):
            continue
        prediction = Prediction("", (), 0, "", tested, logits.argmax(1).numpy(), per_image(name, logits, answers))
        estimates[name] = error_at(name, value, prediction, effective)
        metrics[name] = Measured(value, interval_of(name, estimates[name], effective))
    if groups is None and scores.n < FEWEST_EXACT:
        right = int((logits.argmax(1) == answers).sum())
        metrics["accuracy"] = Measured(right / scores.n, clopper_pearson(right, scores.n))
    counts, recalls = np.bincount(labels, minlength=len(class_names)), scores.per_class_recall
    classes = {name: OfClass(int(n), recalls[name]) for name, n in zip(class_names, counts, strict=True)}
    number = None if groups is None else len(np.unique(groups))
    return AtSite(scores.n, number, metrics, classes, reliability(logits, labels)), estimates


def error_at(metric: str, value: float, prediction: Prediction, groups: float) -> Estimate | None:
    """Returns a model's value with its error over the effective number of groups; None if that cannot be estimated."""
    if groups < 2 or (metric == "auroc" and prediction.per_image is None):
        return None
    variance = jackknife_variance(without_each_group(metric, prediction))
    return over_seeds_and_groups([HeldOutValues(np.array([value]), variance, groups)])


def judge_value(metric: str, value: float, estimate: Estimate, images: int, promised: NewSite) -> tuple[Bounds, str]:
    """Returns the 95% interval of the values that a site would have if it is like the held-out ones, and the verdict.

    `estimate` has the standard error of `value` over these `images` and its degrees of freedom.
    """
    error = estimate.error
    if promised.scale == "logit":
        p = smooth_share(value, images)
        error /= p * (1 - p)
    ends = promised.between(metric, error=error, freedom=estimate.freedom, images=images)
    if value < ends[0]:
        return ends, "below"
    return ends, "above" if value > ends[1] else WITHIN
