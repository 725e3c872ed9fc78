"""Near copies: images that are much closer to each other than to their other neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from xdm_ft.evaluation.neighbours import NEAREST, Neighbours

SURE = 0.05  # pairs as close as this one that chance is expected to make among all images, at most
LISTED = 2.0  # least score of a pair that is listed though the two are not mutual nearest neighbours
FEWEST = 50  # images of a domain whose dimension is estimated; other domains have that of all images
INNER = 5  # neighbours that an estimate of the dimension does not look at: they may be copies
ROUNDING = 1e-6  # of a cosine in float32, whose 1 − cos may be 0 or below


@dataclass(frozen=True)
class NearCopies:
    """Two images that may be copies of each other, by their rows in the data set."""

    first: int
    second: int
    cosine: float
    score: float
    sure: bool  # chance makes fewer than `SURE` pairs as close


def near_copies(neighbours: Neighbours, domains: np.ndarray, contents: np.ndarray | None = None) -> list[NearCopies]:
    """Returns pairs that may be copies, the highest score first: mutual nearest neighbours, and all of high scores.

    With r_i the mean cosine of image i to its ten nearest images, the score of i and j is

        √((1 − r_i)(1 − r_j)) / (1 − cos(i, j)):

    how many times as far as the other image the neighbours of both are. It has the ingredients of
    2 cos(i, j) − r_i − r_j, but as a ratio: where images lie densely, as sketches do, r is near 1, so that the
    difference of even exact copies is small. A threshold on the cosine alone fails for the same reason.

    Which score is sure depends on the features: the fewer dimensions they have, the more pairs are close by chance.
    Where images lie evenly in m dimensions, each of the nine images that are nearer than the tenth is within x of its
    distance with probability xᵐ. A pair is sure if n · 9 · xᵐ < 0.05, x being its distance divided by the geometric
    mean of both tenth distances, m the smaller dimension of the two domains (`_dimensions`).

    Of three and more copies of an image some are not mutual nearest neighbours; their scores are high. Of more than ten
    copies, an image's ten nearest may all be copies: of their pairs only those of equal files are sure then.

    Args:
        neighbours: of n images.
        domains: int64 [n].
        contents: int64 [n], equal numbers for equal files, whose pairs are sure; −1: no other image has this file.
    """
    n, k = neighbours.nearest.shape
    if not k:  # fewer than two images
        return []
    exists = neighbours.nearest >= 0  # [n,k]
    gaps = np.maximum(1 - neighbours.cosines.astype(np.float64), ROUNDING)  # half the squared distances
    spread = np.sum(gaps, axis=1, where=exists) / np.maximum(exists.sum(1), 1)  # 1 − r, [n]
    first, rank = np.nonzero(exists)
    second, cosine, gap = (table[exists] for table in (neighbours.nearest, neighbours.cosines, gaps))
    score = np.sqrt(spread[first] * spread[second]) / gap
    sure = np.zeros(len(first), bool)
    complete = exists.all(1) & (k == NEAREST)
    if complete.any():
        dimension, last = _dimensions(gaps, complete, domains), gaps[:, -1]  # [n]
        x = np.minimum(np.sqrt(gap / np.sqrt(last[first] * last[second])), 1.0)
        by_chance = n * (k - 1) * x ** np.minimum(dimension[first], dimension[second])
        sure = (by_chance < SURE) & complete[first] & complete[second]
    if contents is not None:
        sure |= (contents[first] >= 0) & (contents[first] == contents[second])
    # the second image is the first one's nearest, and the other way round
    mutual = (rank == 0) & (neighbours.nearest[second, 0] == first)
    listed = np.flatnonzero(mutual | sure | (score >= LISTED))
    # a pair may be among the ten nearest of both
    pairs = np.sort(np.stack([first[listed], second[listed]], axis=1), axis=1)
    pairs, once = np.unique(pairs, axis=0, return_index=True)
    listed = listed[once]
    order = np.argsort(-score[listed], kind="stable")
    rows = neighbours.rows[pairs[order]]
    return [
        NearCopies(int(i), int(j), float(cosine[at]), float(score[at]), bool(sure[at]))
        for (i, j), at in zip(rows, listed[order], strict=True)
    ]


def _dimensions(gaps: np.ndarray, complete: np.ndarray, domains: np.ndarray) -> np.ndarray:
    """Returns the dimension of the features around each image, that of its domain, float64 [n].

    log(d_10 / d_5), of the distances to the tenth and fifth neighbour, is Σ_{i=5}^{9} 1/i divided by the dimension, on
    average (Levina & Bickel 2005, Maximum Likelihood Estimation of Intrinsic Dimension, without the nearest four). What
    exceeds three times the median counts as that much, so that images with many copies change the mean little.
    """
    growth = np.log(np.maximum(gaps[:, -1] / gaps[:, INNER - 1], 1.0)) / 2  # of squared distances
    expected = sum(1 / i for i in range(INNER, NEAREST))

    def dimension(of: np.ndarray) -> float:
        mean = np.minimum(growth[of], 3 * np.median(growth[of])).mean()
        return float(expected / max(mean, 1e-9))

    everywhere = dimension(complete)
    dimensions = np.full(len(gaps), everywhere)
    for domain in np.unique(domains):
        of_domain = complete & (domains == domain)
        if of_domain.sum() >= FEWEST:
            dimensions[domains == domain] = min(everywhere, dimension(of_domain))
    return dimensions


def straddling(pairs: Sequence[NearCopies], roles: Iterable[Mapping[str, np.ndarray]], images: int) -> list[bool]:
    """Returns of each pair whether one image trains a model that is tested on the other, for some held-out set.

    Args:
        roles: of every held-out set {role: rows}, as `experiment.faults.roles` returns them.
        images: N, of the data set.
    """
    first, second = (np.array([getattr(pair, end) for pair in pairs], np.int64) for end in ("first", "second"))
    straddles = np.zeros(len(pairs), bool)
    for of_split in roles:
        trains, tests = np.zeros((2, images), bool)
        trains[of_split["training"]] = tests[of_split["test"]] = True
        straddles |= (trains[first] & tests[second]) | (trains[second] & tests[first])
    return straddles.tolist()
