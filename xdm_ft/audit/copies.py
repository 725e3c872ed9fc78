"""Near copies: images that are much closer to each other than to their other neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from xdm_ft.evaluation.neighbours import Neighbours

SURE = 2.0  # least score of a pair that is called a copy
ROUNDING = 1e-6  # of a cosine in float32, whose 1 − cos may be 0 or below


@dataclass(frozen=True)
class NearCopies:
    """Two images that may be copies of each other, by their rows in the data set."""

    first: int
    second: int
    cosine: float
    score: float
    sure: bool  # the score is at least `SURE`


def near_copies(neighbours: Neighbours) -> list[NearCopies]:
    """Returns pairs that may be copies, the highest score first: mutual nearest neighbours, and all sure pairs.

    With r_i the mean cosine of image i to its ten nearest images, the score of i and j is

        √((1 − r_i)(1 − r_j)) / (1 − cos(i, j)):

    how many times as far as the other image the neighbours of both are. It has the ingredients of
    2 cos(i, j) − r_i − r_j, but as a ratio: where images lie densely, as sketches do, r is near 1, so that the
    difference of even exact copies is small. A threshold on the cosine alone fails for the same reason.

    Of three and more copies of an image some are not mutual nearest neighbours; they are listed as sure pairs. Of more
    than ten copies, an image's ten nearest may all be copies: none of their pairs need be sure then.
    """
    if not neighbours.nearest.size:  # fewer than two images
        return []
    exists = neighbours.nearest >= 0  # [n,k]
    gaps = np.maximum(1 - neighbours.cosines.astype(np.float64), ROUNDING)
    spread = np.sum(gaps, axis=1, where=exists) / np.maximum(exists.sum(1), 1)  # 1 − r, [n]
    first, rank = np.nonzero(exists)
    second, cosine, gap = (table[exists] for table in (neighbours.nearest, neighbours.cosines, gaps))
    score = np.sqrt(spread[first] * spread[second]) / gap
    # the second image is the first one's nearest, and the other way round
    mutual = (rank == 0) & (neighbours.nearest[second, 0] == first)
    listed = np.flatnonzero(mutual | (score >= SURE))
    # a pair may be among the ten nearest of both
    pairs = np.sort(np.stack([first[listed], second[listed]], axis=1), axis=1)
    pairs, once = np.unique(pairs, axis=0, return_index=True)
    listed = listed[once]
    order = np.argsort(-score[listed], kind="stable")
    rows = neighbours.rows[pairs[order]]
    return [
        NearCopies(int(i), int(j), float(cosine[at]), float(score[at]), bool(score[at] >= SURE))
        for (i, j), at in zip(rows, listed[order], strict=True)
    ]


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
