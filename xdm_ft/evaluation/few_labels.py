"""Few labelled images of a new site: which images to label, what the labels show, and a threshold for a wanted risk."""

from __future__ import annotations

import math
from itertools import count
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import brentq
from scipy.special import betaincinv, stdtrit
from torch import Tensor

from xdm_ft.core import ALPHA, Interval
from xdm_ft.evaluation.estimates import Estimate

ROUNDS = 8  # of k-means
ROWS_AT_ONCE = 2048  # that are float32 in memory
CENTRES_AT_ONCE = 64  # whose similarities to all images are in memory
FEWEST_GROUPS = 5  # in each part, where the site has twice as many
SMALL_BUDGET = 20  # images for adapting; all of so few cover the site
MARGIN_POOL = 3  # times as many images of small margins as are chosen among them
FEWEST_EXACT = 200  # labels; an accuracy of fewer has Clopper and Pearson's interval
QUANTILES = 20  # of the confidence, that are thresholds to try
DELTA = 0.1  # probability that a threshold breaks its risk


class Chosen(NamedTuple):
    """Rows of the images to label, each part in random order: who stops early has labelled a random part of it."""

    evaluate: np.ndarray  # int64; drawn at random: what measures a model must be a random sample of the site
    adapt: np.ndarray


def choose_images(
    z: np.ndarray,
    p: np.ndarray,
    budget: int,
    rng: np.random.Generator,
    groups: np.ndarray | None = None,
    measures: float = 0.25,
    unknown: np.ndarray | None = None,
) -> Chosen:
    """Returns at most `budget` images to label: a share at random that `measures` the model, the others to adapt it.

    z: features [n,K]; p: probabilities [n,C], or the two largest of each image. At most `SMALL_BUDGET` images to adapt
    are spread over all images by k-means on L2-normalised features; of more, a third so, and the others over those with
    the smallest margins.

    groups: int64 [n] from 0; None: every image is a group. No group is in both parts, and each part has images of
    m = min(⌊G/2⌋, `FEWEST_GROUPS`) or more of the G groups: of none more than its budget / m, of each a random sample.

    unknown: bool [n], which images seem to belong to no class: at most a tenth of those to adapt, drawn at random.
    """
    groups, budget = np.arange(len(z)) if groups is None else groups, min(budget, len(z))
    rank, sizes = _places(groups, rng), np.bincount(groups)
    fewest = fewest_groups(len(sizes))
    number = math.ceil(budget * measures)
    drawn = images_of_groups(sizes, number, fewest, budget - number, rng)
    evaluate = rng.permutation(np.flatnonzero(rank < drawn[groups]))
    left = max(0, budget - len(evaluate))
    rows = np.flatnonzero((drawn[groups] == 0) & (rank < max(1, left // fewest)))
    drawn = rows[:0]
    if unknown is not None:
        drawn, rows = rng.permutation(rows[unknown[rows]])[: left // 10], rows[~unknown[rows]]
    number = min(left - len(drawn), len(rows))
    first = number if number <= SMALL_BUDGET else math.ceil(number / 3)
    chosen = _spread_and_near(z, p, rows, first, number, rng)
    return Chosen(evaluate, rng.permutation(np.concatenate([chosen, drawn])))


def fewest_groups(groups: int) -> int:
    """Returns of how many groups each part has images at least; a part has too few of one with a larger share."""
    return max(1, min(groups // 2, FEWEST_GROUPS))


def _places(groups: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns the place of each image in a random order of its group, int64 [n] from 0."""
    order = rng.permutation(len(groups))
    order, sizes = order[np.argsort(groups[order], kind="stable")], np.bincount(groups)
    places = np.empty(len(groups), np.int64)
    places[order] = np.arange(len(groups)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return places


def images_of_groups(sizes: np.ndarray, number: int, fewest: int, others: int, rng: np.random.Generator) -> np.ndarray:
    """Returns how many images to draw from each group, int64 [G], so that each image has the same probability.

    About `number` in all, from at least `fewest` groups and at most half of them: from as many as leave `others` images
    in other groups. A group of more than 1/`fewest` of all images gives too few, that share of `number`.
    """
    drawn, images, top = np.zeros(len(sizes), np.int64), sizes.sum(), min(number, max(1, len(sizes) // 2))
    if number == 0:
        return drawn
    limit = max(1.0, number / fewest)
    needed = math.ceil(number * np.maximum(sizes, limit).sum() / (limit * images))
    for k in range(top, min(top, max(fewest, needed)) - 1, -1):
        means, probability = _sampling(sizes, number / images, k, limit)
        drawn_on_average = probability @ np.minimum(means, sizes)
        if drawn_on_average < number + 1e-6 and probability @ sizes <= images - others:
            break
    order = np.lexsort((rng.random(len(sizes)), sizes))
    hit = order[np.searchsorted(np.cumsum(probability[order])[:-1], rng.random() + np.arange(k), side="right")]
    drawn[hit] = np.diff(np.floor(np.cumsum([0, *means[hit]]) + rng.random()))
    return np.minimum(drawn, sizes)


def _sampling(sizes: np.ndarray, rate: float, k: int, limit: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean number of images that each group gives if it is drawn, and its probability, whose sum is k.

    A group of N_g images gives min(t, N_g) with probability K s_g / Σ s, s_g = max(N_g, t), so that each image has
    K t / Σ s, and t makes this the `rate`. Groups whose probability would exceed 1 are drawn for certain, give
    rate · N_g, and leave K and the sum. All means are from 1 to `limit`.
    """
    certain = np.zeros(len(sizes), bool)
    while True:
        rest, left = sizes[~certain], int(k - certain.sum())

        def lacking(t: float, rest: np.ndarray = rest, left: int = left) -> float:
            return float(rate * np.maximum(rest, t).sum() - left * t)

        t = 1.0 if lacking(1) <= 0 else limit if lacking(limit) >= 0 else float(brentq(lacking, 1, limit))
        probability = np.where(certain, 1.0, left * np.maximum(sizes, t) / np.maximum(rest, t).sum())
        if not (over := probability > 1 + 1e-9).any():
            return np.where(certain, (rate * sizes).clip(1, limit), t), probability
        certain |= over


def _spread_and_near(
    z: np.ndarray, p: np.ndarray, rows: np.ndarray, first: int, number: int, rng: np.random.Generator
) -> np.ndarray:
    """Returns `number` rows: `first` spread over all of them, the others over those with the smallest margins."""
    spread = rows[spread_rows(z, rows, first, rng)]
    if number == first:
        return spread
    others = np.setdiff1d(rows, spread)
    second, most = np.concatenate([np.partition(p[part], -2, axis=1)[:, -2:] for part in _parts(others)]).T
    # of margins that are rounded to 1, the larger second probability is less sure
    near = others[np.lexsort((-second, most - second))[: MARGIN_POOL * (number - first)]]
    return np.concatenate([spread, near[spread_rows(z, near, number - first, rng)]])


def _parts(rows: np.ndarray) -> list[np.ndarray]:
    return [rows[first : first + ROWS_AT_ONCE] for first in range(0, len(rows), ROWS_AT_ONCE)]


def spread_rows(z: np.ndarray, rows: np.ndarray, number: int, rng: np.random.Generator) -> np.ndarray:
    """Returns the positions in `rows` of the images that are nearest to the centres of k-means, each of them once.

    The centres begin as k-means++ (Arthur & Vassilvitskii 2007) draws them. All is read in blocks.
    """
    if number in (0, len(rows)):
        return np.arange(number)

    def unit(part: np.ndarray) -> Tensor:
        return F.normalize(torch.from_numpy(z[part]).float(), dim=1, eps=1e-12)

    def similarities(centres: Tensor) -> np.ndarray:
        """Cosines of all rows and these centres, [n,centres]."""
        values = np.empty((len(rows), len(centres)), np.float32)  # at once: pieces would divide the freed blocks
        for target, part in zip(_parts(values), parts, strict=True):
            target[:] = unit(part) @ centres.T
        return values

    parts = _parts(rows)
    centres = unit(rows[[rng.integers(len(rows))]])
    nearest = np.full(len(rows), np.inf, np.float32)  # squared distance to the nearest centre
    while len(centres) < number:
        nearest = np.minimum(nearest, (2 - 2 * similarities(centres[-1:])[:, 0]).clip(0))
        total = nearest.sum(dtype=np.float64)
        share = nearest / total if total > 0 else None  # None: all images are alike
        centres = torch.cat([centres, unit(rows[[rng.choice(len(rows), p=share)]])])
    for _ in range(ROUNDS):
        sums = torch.zeros_like(centres)
        for part in parts:
            block = unit(part)
            sums.index_add_(0, (block @ centres.T).argmax(1), block)
        # the mean's direction is that of the sum; a centre without images stays
        centres = torch.where(sums.any(1, keepdim=True), F.normalize(sums, dim=1, eps=1e-12), centres)
    chosen = list[int]()
    for some in (centres[first : first + CENTRES_AT_ONCE] for first in range(0, number, CENTRES_AT_ONCE)):
        # one centre at a time, as the nearest image of two may be the same
        for similarity in similarities(some).T:
            similarity[chosen] = -np.inf
            chosen.append(int(similarity.argmax()))
    return np.sort(chosen)


def clopper_pearson(right: int, n: int, level: float = 1 - ALPHA) -> tuple[float, float]:
    """Returns the exact interval of a share of which `right` of n were seen (Clopper & Pearson 1934)."""
    tail = (1 - level) / 2
    low = float(betaincinv(right, n - right + 1, tail)) if right else 0.0
    high = float(betaincinv(right + 1, n - right, 1 - tail)) if right < n else 1.0
    return low, high


def expected_half_width(accuracy: float, n: int) -> float:
    """Returns half of the width that Clopper and Pearson's interval of n labels is expected to have."""
    low, high = clopper_pearson(round(accuracy * n), n)
    return (high - low) / 2


def widest_half_width(number: float, grouped: bool = False) -> float:
    """Returns half of the 95% interval of an accuracy of 50%, the widest, from this many images or groups.

    It is that of `expected_site.site_metrics`: Clopper and Pearson's of few images, else the jackknife's with its t
    distribution, whose variance is ¼/(n − 1) if the images of a group are all right or all wrong. At most ½.
    """
    if not grouped and number < FEWEST_EXACT:
        return expected_half_width(0.5, int(number))
    if number < 2:
        return 0.5
    return min(0.5, float(stdtrit(number - 1, 1 - ALPHA / 2)) * 0.5 / (number - 1) ** 0.5)


def enough_for(half_width: float, grouped: bool = False) -> int:
    """Returns the smallest number of images or groups whose widest half of an interval is at most this."""
    return next(n for n in count(2) if widest_half_width(n, grouped) <= half_width)


def mean_estimate(values: np.ndarray, groups: np.ndarray | None = None) -> Estimate | None:
    """Returns the mean of values [n] of random images; None for a single group.

    groups: int64 [n]; None: images are independent. The variance is Σ_g (Σ_{i in g} (v_i − v̄))² · G/(G − 1) / n², which
    is s²/n for groups of one image.
    """
    groups = np.arange(len(values)) if groups is None else np.unique(groups, return_inverse=True)[1]
    sums = np.bincount(groups, values - values.mean())
    if len(sums) < 2:
        return None
    variance = np.square(sums).sum() * len(sums) / (len(sums) - 1) / len(values) ** 2
    return Estimate(float(values.mean()), float(variance) ** 0.5, len(sums) - 1)


def difference_estimate(
    confidence: np.ndarray, labelled: np.ndarray, right: np.ndarray, groups: np.ndarray | None = None
) -> Estimate | None:
    """Returns the accuracy at a site from its N images and n labelled ones: the mean of c over all images, and that of
    correct − c over the labelled; None for a single group.

    confidence: c = max p of the site's images, float64 [N]; labelled: that of the labelled ones, [n]; right: bool [n];
    groups: int64 [n], of the labelled images; None: they are independent.
    """
    errors = mean_estimate(right - labelled, groups)
    if errors is None or len(confidence) < 2:
        return None
    variance = confidence.var(ddof=1) / len(confidence) + errors.error**2
    return Estimate(float(confidence.mean() + errors.value), float(variance) ** 0.5, errors.freedom)


def paired_interval(
    change: np.ndarray, groups: np.ndarray | None = None, classes: np.ndarray | None = None
) -> Interval:
    """Returns the 95% interval of the mean of values −1, 0 and 1, [n]: what two classifiers differ by on random images.

    Bonett & Price 2012 (Adjusted Wald Confidence Interval for a Difference of Binomial Proportions Based on Paired
    Data): as with one more image that becomes right, and one that becomes wrong. `groups` as `mean_estimate`.
    `classes`, int64 [n]: of the mean of the classes' means instead, with two more images in each class.
    """
    groups = np.arange(len(change)) if groups is None else np.unique(groups, return_inverse=True)[1]
    stratum = np.zeros(len(change), int) if classes is None else np.unique(classes, return_inverse=True)[1]
    strata = np.arange(stratum.max() + 1)
    change, stratum = np.append(change, np.tile([1, -1], len(strata))), np.append(stratum, np.repeat(strata, 2))
    size = np.bincount(stratum)
    means = np.bincount(stratum, change) / size
    # the mean of the means, and each image's influence on it
    values = means.mean() + (change - means[stratum]) * len(change) / (len(strata) * size[stratum])
    more = mean_estimate(values, np.append(groups, groups.max() + 1 + np.arange(2 * len(strata))))
    assert more is not None, "two groups at least"
    low, high = more.interval()
    return Interval(max(-1.0, low), min(1.0, high))


class Threshold(NamedTuple):
    """Answers of at least this confidence are wrong with at most this risk."""

    value: float
    risk: float
    answered: int  # of the labelled images
    wrong: int
    labels: int


def fewest_answered(risk: float, delta: float = DELTA) -> int:
    """Returns the number of answers of which none may be wrong to show the risk: ln δ / ln(1 − α), rounded up."""
    return math.ceil(math.log(delta) / math.log(1 - risk))


def threshold_for(
    risk: float, confidence: np.ndarray, right: np.ndarray, delta: float = DELTA, weight: float = 1.0
) -> Threshold | None:
    """Returns the lowest threshold whose answers are shown to have at most this risk; None if there is none.

    confidence float64 [n] and right bool [n] are those of a random sample of the site. The thresholds are quantiles of
    the confidence, tried from the strictest with enough answers on, each with a one-sided test of level δ: the first
    one that fails ends the sequence, so that all that passed hold together. `weight`: the part of an independent image
    that one of a group counts, their effective number of groups divided by n.
    """
    passed = None
    for value in np.unique(np.quantile(confidence, np.linspace(0, 1, QUANTILES)))[::-1]:
        answered = confidence >= value
        n, wrong = int(answered.sum()), int((~right[answered]).sum())
        if n * weight < fewest_answered(risk, delta):
            continue
        upper = float(betaincinv(wrong * weight + 1, (n - wrong) * weight, 1 - delta)) if wrong < n else 1.0
        if upper > risk:
            break
        passed = Threshold(float(value), risk, n, wrong, len(right))
    return passed


def shorter(threshold: float, confidence: np.ndarray) -> float:
    """Returns the threshold cut to the fewest decimals, three at least, that answer the same of confidence [n]."""
    below = float(confidence[confidence < threshold].max(initial=0.0))
    cut = (math.floor(threshold * 10**digits) / 10**digits for digits in range(3, 16))
    return next((value for value in cut if below < value <= threshold), threshold)
