"""Twin domains: what leaving one out of training costs the other, beyond what fewer images cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from xdm_ft.audit.costs import Answered, difference, judge_costs, prediction
from xdm_ft.audit.heads import HeadRequest, Study
from xdm_ft.core import Interval, set_name
from xdm_ft.evaluation.predictions import Prediction
from xdm_ft.protocol.splits import Split, in_domains, with_groups
from xdm_ft.results.table import NO_VERDICT, WORSE

FEWEST_UNITS = 3  # with two, nothing is left to train on
ALL_PAIRS = 12  # of more domains, only pairs that may be twins are left out together
OF_ALL = 0.18  # share of the images of one of two twins whose nearest image of all lies in the other
NEAREST = 0.9  # share of the images of each of two twins whose nearest foreign image lies in the other, without a cost


@dataclass(frozen=True)
class LeftOut:
    """Held-out accuracy on one unit with another one left out of training too. Accuracies are means over seeds."""

    domain: str
    without: str
    accuracy: float
    accuracy_without: float
    accuracy_matched: float  # a random part of the training images, of the same size, left out
    loss: float  # accuracy − accuracy_without
    loss_interval: Interval | None  # 95%
    expected_loss: float  # accuracy − accuracy_matched
    excess: float  # loss − expected_loss
    interval: Interval | None  # of the excess, 95%
    p: float | None
    p_holm: float | None
    verdict: str
    note: str


@dataclass(frozen=True)
class DomainPairs:
    names: list[str]  # U units: domains, or those that are held out together
    nearest: list[list[float | None]]
    """Share of the images of a row's unit whose nearest image of another unit lies in the column's, [U,U]."""
    nearest_of_all: list[list[float]]
    """Share of the images of a row's unit whose nearest image of all lies in the column's, [U,U]."""
    left_out: list[LeftOut]
    undecided: list[list[str]]  # nearest for many images, but neither cost nor shares show whether they are twins
    note: str
    twins: list[list[str]]


def units_of(study: Study) -> list[tuple[str, ...]]:
    """Returns the domains that are measured as one, and every other domain alone."""
    held_out = [split for _, split in study.heads if not set(split.test_domains) & set(split.train_domains)]
    units = list(dict.fromkeys(held for split in held_out for held in split.sites(study.dataset)))
    in_set = {name for unit in units for name in unit}
    present = np.unique(study.dataset.domains[study.readable])
    names = [study.dataset.domain_names[number] for number in present.tolist()]
    units += [(name,) for name in names if name not in in_set]
    return sorted(units, key=lambda unit: names.index(unit[0]))


def domain_pairs(
    study: Study, units: Sequence[tuple[str, ...]], nearest: np.ndarray, of_all: np.ndarray
) -> DomainPairs:
    """Leaves two units out at a time.

    `nearest`, `of_all` float64 [U,U]: the shares of `DomainPairs`. Two units may be twins if 18% of the images of one
    have their nearest image of all in the other. They are if the loss of one of the two, less that of as many random
    images, is shown (D = 1, Holm's correction over the pairs that may be twins), or if each holds the nearest foreign
    image of 90% of the other's.
    """
    names = [set_name(unit) for unit in units]
    shares = [[None if i == j else float(nearest[i, j]) for j in range(len(units))] for i in range(len(units))]
    everywhere = of_all.tolist()
    if len(units) < FEWEST_UNITS:
        return DomainPairs(
            names, shares, everywhere, [], [], f"leaving two out needs {FEWEST_UNITS} domains or more", []
        )
    near = np.maximum(of_all, of_all.T) >= OF_ALL
    np.fill_diagonal(near, False)
    cells = list[_Cell]()
    for seed, split in study.heads:
        for held, test in split.sites(study.dataset).items():
            i = list(units).index(held) if held in units else -1
            for j, unit in enumerate(units if i >= 0 else ()):
                if j != i and set(unit) <= set(split.train_domains) and (near[i, j] or len(units) <= ALL_PAIRS):
                    cells += _cells(study, split, seed, i, j, unit, test)
    predicted = study.predictions([head for cell in cells for head in cell.heads], "two domains left out")
    answers: dict[tuple[int, int], tuple[list[Prediction], list[Prediction], list[Prediction]]] = {}
    for number, cell in enumerate(cells):
        of_cell = answers.setdefault((cell.domain, cell.without), ([], [], []))
        for kept, head, classes in zip(of_cell, cell.heads, predicted[3 * number : 3 * number + 3], strict=True):
            kept.append(prediction(study, head, classes))
    runs = {pair: [Answered.of(of) for of in kept] for pair, kept in answers.items()}
    excess = {pair: difference(without, matched) for pair, (_, without, matched) in runs.items()}
    candidates = [pair for pair in runs if near[pair]]
    verdicts = dict(zip(candidates, judge_costs([excess[pair] for pair in candidates]), strict=True))
    rows = list[LeftOut]()
    for pair, (everything, without, matched) in runs.items():
        row, loss = verdicts.get(pair, excess[pair]), difference(everything, without)
        rows.append(
            LeftOut(
                domain=names[pair[0]],
                without=names[pair[1]],
                accuracy=everything.mean,
                accuracy_without=without.mean,
                accuracy_matched=matched.mean,
                loss=loss.difference,
                loss_interval=loss.on_these and loss.on_these.interval(),
                expected_loss=everything.mean - matched.mean,
                excess=-row.difference,
                interval=None if row.on_these is None else Interval(*(-end for end in row.on_these.interval()[::-1])),
                p=row.p_here and row.p_here.plain,
                p_holm=row.p_here and row.p_here.holm,
                verdict=row.here if pair in verdicts else NO_VERDICT,
                note=row.note if pair in verdicts else "few images are nearest to one of the other domain, so no twins",
            )
        )
    shown = {frozenset(pair) for pair, row in verdicts.items() if row.here == WORSE}
    pairs = {frozenset(pair) for pair in np.argwhere(near).tolist()}
    shown |= pairs & {frozenset(pair) for pair in np.argwhere((nearest > NEAREST) & (nearest.T > NEAREST)).tolist()}
    note = "" if len(units) <= ALL_PAIRS else f"of {len(units)} domains, only pairs that may be twins are left out"
    twins, undecided = ([[names[i] for i in p] for p in sorted(map(sorted, of))] for of in (shown, pairs - shown))
    return DomainPairs(names, shares, everywhere, rows, undecided, note, twins)


class _Cell(NamedTuple):
    domain: int  # of the units
    without: int
    heads: tuple[
        HeadRequest, HeadRequest, HeadRequest
    ]  # with all images; without the other unit; without as many random ones


def _cells(study: Study, split: Split, seed: int, i: int, j: int, unit: Sequence[str], test: Tensor) -> list[_Cell]:
    """Returns the heads of a cell under one seed; none if too few images are left to train on."""
    dataset = study.dataset
    left_out = with_groups(dataset, in_domains(dataset, unit))
    rows = np.flatnonzero(left_out)
    without, matched = study.without(split, rows), study.matched(split, rows, [seed, i, j])
    if without is None or matched is None:
        return []
    return [
        _Cell(
            i, j, (HeadRequest(split, test, seed), HeadRequest(without, test, seed), HeadRequest(matched, test, seed))
        )
    ]
