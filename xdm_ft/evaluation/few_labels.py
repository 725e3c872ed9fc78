"""Few labelled images of a new site: which images to label, what the labels show, and a threshold for a wanted risk."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy.special import stdtrit
from scipy.stats import beta
from torch import Tensor

from xdm_ft.evaluation.verdicts import ALPHA, Estimate

ROUNDS = 8  # of k-means
ROWS_AT_ONCE = 2048  # that are float32 in memory
CENTRES_AT_ONCE = 64  # whose similarities to all images are in memory
SMALL_BUDGET = 20  # images for adapting; all of so few cover the site
MARGIN_POOL = 3  # times as many images of small margins as are chosen among them
FEWEST_EXACT = 200  # labels; an accuracy of fewer has Clopper and Pearson's interval
QUANTILES = 20  # of the confidence, that are thresholds to try
DELTA = 0.1  # probability that a threshold breaks its risk


class Chosen(NamedTuple):
    """Rows of the images to label, each part in random order: who stops early has labelled a random part of it."""

    evaluate: np.ndarray  # int64; groups drawn at random: what measures a model must be a random sample of the site
    adapt: np.ndarray


def choose_images(
    z: np.ndarray,
    p: np.ndarray,
    budget: int,
    rng: np.random.Generator,
    groups: np.ndarray | None = None,
    measures: float = 0.25,
) -> Chosen:
    """Returns at most `budget` images to label: a share at random that `measures` the model, the others to adapt it.

    z: features [n,K]; p: probabilities [n,C], or the two largest of each image. At most `SMALL_BUDGET` images to adapt
    are spread over all images by k-means on L2-normalised features; of more, a third so, and the others over those with
    the smallest margins.

    groups: int64 [n] from 0, chosen whole; None: every image is a group. Those of more than `budget` images are left
    out. To evaluate, their number is fixed before they are drawn, the share of images on average: drawing until the
    images suffice would prefer some sizes. To adapt, the rule chooses among one image of each group, drawn at random,
    and groups that are drawn fill what is left.
    """
    groups = np.arange(len(z)) if groups is None else groups
    sizes, budget = np.bincount(groups), min(budget, len(z))
    order = rng.permutation(np.flatnonzero(sizes <= budget))
    if not len(order):
        return Chosen(order, order)
    evaluate = order[: math.ceil(math.ceil(budget * measures) / sizes[order].mean())]
    evaluate = evaluate[np.cumsum(sizes[evaluate]) <= budget]
    rest, left = np.sort(order[len(evaluate) :]), budget - int(sizes[evaluate].sum())

    drawn, shuffled = np.empty(len(sizes), np.int64), rng.permutation(len(z))
    drawn[groups[shuffled]] = shuffled  # the last one of each group stays
    wanted = min(left, int(sizes[rest].sum()))
    number = int(wanted / sizes[rest].mean()) if wanted else 0
    first = number if wanted <= SMALL_BUDGET else math.ceil(number / 3)
    chosen = groups[_spread_and_near(z, p, drawn[rest], first, number, rng)]
    adapt = list[int]()
    for group in np.concatenate([rng.permutation(chosen), rng.permutation(np.setdiff1d(rest, chosen))]):
        if sizes[group] <= left:
            adapt.append(group)
            left -= int(sizes[group])

    def members(of: Sequence[int] | np.ndarray) -> np.ndarray:
        """Returns the images of these groups, in their order."""
        rank = np.full(len(sizes), -1)
        rank[of] = np.arange(len(of))
        rows = np.flatnonzero(rank[groups] >= 0)
        return rows[np.argsort(rank[groups[rows]], kind="stable")]

    return Chosen(members(evaluate), members(np.array(adapt, np.int64)))


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
    low = float(beta.ppf(tail, right, n - right + 1)) if right else 0.0
    high = float(beta.ppf(1 - tail, right + 1, n - right)) if right < n else 1.0
    return low, high


def expected_half_width(accuracy: float, n: int) -> float:
    """Returns half of the width that Clopper and Pearson's interval of n labels is expected to have."""
    low, high = clopper_pearson(round(accuracy * n), n)
    return (high - low) / 2


def widest_half_width(number: float, grouped: bool = False) -> float:
    """Returns half of the 95% interval of an accuracy of 50%, the widest, from this many images or groups.

    It is that of `export.expected.at_site`: Clopper and Pearson's of few images, else the jackknife's with its t
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


def difference_estimate(
    confidence: np.ndarray, labelled: np.ndarray, right: np.ndarray, groups: np.ndarray | None = None
) -> Estimate | None:
    """Returns the accuracy at a site from its N images and n labelled ones: the mean of c over all images, and that of
    correct − c over the labelled; None for a single group.

    confidence: c = max p of the site's images, float64 [N]; labelled: that of the labelled ones, [n]; right: bool [n];
    groups: int64 [n], of the labelled images; None: they are independent. The variance is s²/n of the n values, and of
    groups Σ_g (Σ_{i in g} (v_i − v̄))² · G/(G − 1) / n², which is the same for groups of one image.
    """
    errors = right - labelled
    groups = np.arange(len(errors)) if groups is None else np.unique(groups, return_inverse=True)[1]
    sums = np.bincount(groups, errors - errors.mean())
    if len(sums) < 2 or len(confidence) < 2:
        return None
    of_labelled = np.square(sums).sum() * len(sums) / (len(sums) - 1) / len(errors) ** 2
    variance = confidence.var(ddof=1) / len(confidence) + of_labelled
    return Estimate(float(confidence.mean() + errors.mean()), float(variance) ** 0.5, len(sums) - 1)


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
        upper = float(beta.ppf(1 - delta, wrong * weight + 1, (n - wrong) * weight)) if wrong < n else 1.0
        if upper > risk:
            break
        passed = Threshold(float(value), risk, n, wrong, len(right))
    return passed


def shorter(threshold: float, confidence: np.ndarray) -> float:
    """Returns the threshold cut to the fewest decimals, three at least, that answer the same of confidence [n]."""
    below = float(confidence[confidence < threshold].max(initial=0.0))
    cut = (math.floor(threshold * 10**digits) / 10**digits for digits in range(3, 16))
    return next((value for value in cut if below < value <= threshold), threshold)
