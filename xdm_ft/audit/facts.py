"""Whether facts of the image files alone, such as size and format, predict the domain or the class.

Within a domain nothing but the content should tell the class. Where size, format, compression, camera or the lightest
colour (white paper, a lamp) do, a model can learn these instead. Mean colours and bytes per pixel depend on what an
image shows as well: they predict the class in honest data too (colour on PACS: 26 to 47%, chance 14%) and are a
description, as is everything that predicts the domain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from scipy.special import stdtr

from xdm_ft.evaluation.verdicts import ALPHA, Interval, holm
from xdm_ft.images.facts import CONTENT, FACTS, ImageFacts
from xdm_ft.runtime.machine import own_cores
from xdm_ft.runtime.randomness import folds

FOLDS = 5
TREES = 50
FEWEST = 10  # groups of a class that a forest and its test need; a class with fewer is left out
MARGIN = 0.03  # of the way from chance to certainty: facts that predict less do no harm
NORMAL_95 = 1.96
INFLATION = 1 + FOLDS / (FOLDS - 1)
"""Of the variance of a cross-validated accuracy: forests share training images, four fifths train and one fifth tests
(Nadeau & Bengio 2003, Inference for the Generalization Error). Without it, 11 of 100 data sets without association
had a finding."""
FAMILIES = {
    **{family: (family,) for family in FACTS.values()},
    "size and format": ("size", "format"),
    "all": tuple(dict.fromkeys(FACTS.values())),
}
"""What is asked: name → the families of facts that a classifier gets."""


@dataclass(frozen=True)
class FactRow:
    """How well some facts predict domain or class: one of `facts` in audit.json."""

    facts: str  # a key of FAMILIES
    predicts: Literal["class", "domain"]
    domain: str | None  # the class is predicted within this domain; None: over all domains
    accuracy: float  # mean over the classes (or domains) of the share that is right, in cross-validation
    chance: float  # 1 / number of classes (or domains)
    interval: Interval  # 95%
    p: float  # one-sided, of "no better than chance"
    p_holm: float = 1.0  # corrected for all rows that predict the same
    found: bool = False
    """Whether facts that no content explains predict the class: better than chance (Holm), by `MARGIN` at the lower end
    of the interval."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"interval": list(self.interval)}


def facts_findings(
    table: ImageFacts,
    labels: np.ndarray,
    domains: np.ndarray,
    domain_names: Sequence[str],
    groups: np.ndarray | None = None,
    seed: int = 0,
) -> list[FactRow]:
    """Returns a row per family of facts for the domain, and one per family and domain for the class.

    A row is left out where the facts are all equal, or fewer than two classes have enough images.

    Args:
        table: facts of n images.
        labels: int64 [n].
        domains: int64 [n].
        domain_names: D names.
        groups: int64 [n], images that are not independent; None: unknown.
        seed: of folds and forests.
    """
    units = np.arange(len(labels)) if groups is None else groups  # [n], the number of what is independent
    everywhere = np.ones(len(labels), bool)
    rows = [*_rows(table, "domain", None, domains, units, everywhere, seed)]
    of_class = [
        row
        for number, name in enumerate(domain_names)
        for row in _rows(table, "class", name, labels, units, domains == number, seed)
    ]
    adjusted = [*holm([row.p for row in rows]), *holm([row.p for row in of_class])]
    return [
        replace(row, p_holm=p, found=p < ALPHA and _matters(row))
        for row, p in zip([*rows, *of_class], adjusted, strict=True)
    ]


def _matters(row: FactRow) -> bool:
    by_content = row.predicts == "domain" or any(family in CONTENT for family in FAMILIES[row.facts])
    return not by_content and row.interval.low >= row.chance + MARGIN * (1 - row.chance)


def _rows(
    table: ImageFacts,
    predicts: Literal["class", "domain"],
    domain: str | None,
    targets: np.ndarray,
    units: np.ndarray,
    among: np.ndarray,
    seed: int,
) -> Iterator[FactRow]:
    """Yields a row per family that varies `among` these images, bool [n]."""
    pairs = np.unique(np.stack([targets[among], units[among]]), axis=1)  # of a class and a unit that has it
    classes, in_units = np.unique(pairs[0], return_counts=True)
    classes = classes[in_units >= FEWEST]
    kept = among & np.isin(targets, classes)
    if len(classes) < 2:
        return
    numbers = np.searchsorted(classes, targets[kept])
    predicted_from: dict[bytes, np.ndarray] = {}
    for name, families in FAMILIES.items():
        values = table.columns(families)[kept]
        values = values[:, (values != values[:1]).any(0)]
        if not values.shape[1]:
            continue
        key = values.tobytes()  # where only size varies, "size and format" is "size"
        if key not in predicted_from:
            predicted_from[key] = cross_validated(values, numbers, units[kept], seed)
        accuracy, interval, p = balanced_accuracy(numbers, predicted_from[key], units[kept], INFLATION)
        yield FactRow(name, predicts, domain, accuracy, 1 / len(classes), interval, p)


def balanced_accuracy(
    targets: np.ndarray, predicted: np.ndarray, units: np.ndarray, inflation: float = 1.0
) -> tuple[float, Interval, float]:
    """Returns the balanced accuracy A of predictions int [n] of K classes 0…K−1, its 95% interval, and p.

    A = Σ_i w_i s_i: s_i is 1 if image i is right, w_i = 1/(K n_c) for its class c. With predictions that do not depend
    on the targets, s_i is 1 with probability q_c, the share of images that are predicted as c, and A is 1/K on average.
    p is one-sided, of Student's t with G − 1 degrees of freedom for A − 1/K = Σ_i w_i (s_i − q_c), whose variance is
    the sum over the G units (groups) of their squared sums. The interval is Wilson's, with Kish's effective number of
    units, (Σ_g W_g)²/Σ_g W_g², W_g = Σ_{i∈g} w_i. `inflation` of the variance: 1 for predictions that are independent
    of each other.
    """
    count = np.bincount(targets)
    weights = 1 / (len(count) * count[targets])  # [n], with sum 1
    right = (predicted == targets).astype(np.float64)
    q = np.bincount(predicted, minlength=len(count)) / len(predicted)
    unit = np.unique(units, return_inverse=True)[1]
    excess = np.bincount(unit, weights * (right - q[targets]))  # [G]
    error = float((inflation * np.square(excess).sum()) ** 0.5)
    value, above = float((weights * right).sum()), float(excess.sum())
    p = float(stdtr(len(excess) - 1, -above / error)) if error > 0 else 1.0
    n, z = 1 / float(inflation * np.square(np.bincount(unit, weights)).sum()), NORMAL_95
    center = (value + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * (value * (1 - value) / n + z * z / (4 * n * n)) ** 0.5
    return value, Interval(max(0.0, center - half), min(1.0, center + half)), p


def cross_validated(values: np.ndarray, targets: np.ndarray, units: np.ndarray, seed: int) -> np.ndarray:
    """Returns the class that a forest of the other folds predicts for each image: int64 [n].

    A unit is in one fold. Classes count the same in training, whatever their number of images.
    """
    from sklearn.ensemble import ExtraTreesClassifier  # here, as it takes a second to import

    predicted, fold_of = np.empty(len(targets), np.int64), folds(targets, units, FOLDS, seed)
    assert fold_of is not None, "each class has `FEWEST` units"
    for fold in range(FOLDS):
        train, test = fold_of != fold, fold_of == fold
        # leaves of several images: a forest of single images is no better, and larger
        threads = own_cores() if train.sum() > 5000 else 1  # of few images, starting threads takes longer
        forest = ExtraTreesClassifier(
            TREES, min_samples_leaf=3, class_weight="balanced", random_state=seed, n_jobs=threads
        )
        predicted[test] = forest.fit(values[train], targets[train]).predict(values[test])
    return predicted
