"""Whether facts of the image files alone, such as size and format, predict the domain or the class.

Within a domain nothing but the content should tell the class. Where size, format, compression, camera or the lightest
colour (white paper, a lamp) do, a model can learn these instead. Mean colours and bytes per pixel depend on what an
image shows as well: they predict the class in honest data too (colour on PACS: 26 to 47%, chance 14%) and are a
description, as is everything that predicts the domain.

Marks and tints: pixels that tell the class at one site without showing it, such as a watermark or a lamp.

Low-level features are predictive in honest data too: white paper behind products, grass behind horses. A mark differs
in that it picks out many images of one class at a rate of false alarms near zero, and that the same head picks out none
of this class at other sites. On PACS and six sites of mitoses, with nothing planted, the heads here pick out at most
41% of a class, and where all of it is marked usually 75 to 100%. A mark at changing places, or along a whole edge, is
not found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image
from scipy.ndimage import uniform_filter
from scipy.special import stdtr

from xdm_ft.core import ALPHA, Interval
from xdm_ft.evaluation.estimates import holm
from xdm_ft.evaluation.few_labels import clopper_pearson
from xdm_ft.images import ImageDataset
from xdm_ft.images.decode import UnreadableImage, memory_of
from xdm_ft.images.facts import CONTENT, FACTS, ImageFacts
from xdm_ft.runtime.machine import own_cores
from xdm_ft.runtime.progress import progress
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
SIDE = 128  # px to which images are squashed: a mark at one place stays at one place
CLIPPED = 20  # of 255: a strong edge of the content says no more than a weak one
FALSE_ALARMS = 0.01  # of the images of other classes
FEWEST_MARKED = 30  # images of a class
LEAST = 0.3  # lower end of the share of a class that is picked out
MOVED, STAYS = 4, 0.6  # px, and the share of a filter's answer that stays at most if it is moved so far
CUT = 4.0  # standard errors: pixels of 16,384 that differ less between classes do not count
PENALTY = 0.003  # of the mean variance
LOCAL, TINT = "local mark", "tint"
_Linear = tuple[np.ndarray, np.ndarray]
"""Weights float64 [K,C] and offsets [C]."""


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


# ---- Marks and tints


class LowLevel(NamedTuple):
    """Low-level features of n images, whose content is mostly averaged out."""

    rows: np.ndarray  # int64 [n], of the data set
    detail: np.ndarray  # int8 [n,SIDE²]: luminance less the mean of the 3 × 3 pixels around it
    colour: np.ndarray  # float64 [n,15]: of edges, of the lightest pixels and of all pixels, with squares and products


@dataclass(frozen=True)
class ImageMark:
    """A class that low-level features pick out at one site: one of `marks` in audit.json."""

    kind: str  # "local mark" or "tint"
    domain: str
    label: str
    share: float  # of the images of the class, picked out in cross-validation with 1% of false alarms
    low: float  # 95%, one-sided
    elsewhere: float | None  # the largest share that this head picks out of the class in another domain
    found: bool  # the head picks out less than half as much elsewhere, and a local mark is in one place

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        return {("class" if key == "label" else key): value for key, value in fields.items()}


def low_level(dataset: ImageDataset, rows: np.ndarray) -> LowLevel:
    """Returns the features of these rows; an image that cannot be read is skipped."""
    detail, colour = np.zeros((len(rows), SIDE * SIDE), np.int8), np.zeros((len(rows), 15))

    def read(number: int) -> bool:
        row = int(rows[number])
        try:
            with memory_of(dataset.name(row)):
                image = dataset.draft(row, SIDE).convert("RGB").resize((SIDE, SIDE), Image.Resampling.BOX)
        except UnreadableImage:
            return False
        detail[number], colour[number] = of_pixels(np.asarray(image, np.float32))
        return True

    kept = np.zeros(len(rows), bool)
    with ThreadPoolExecutor(own_cores()) as pool, progress("marks", len(rows), "images") as bar:
        for number, is_read in enumerate(pool.map(read, range(len(rows)))):
            kept[number] = is_read
            bar.advance()
    return LowLevel(rows[kept], detail[kept], colour[kept])


def of_pixels(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the detail int8 [SIDE²] and the colour [15] of an image, float32 [SIDE,SIDE,3] of 0…255.

    Colours are log(R/G) and log(B/G). That of edges is the light's: most edges are between shades of one colour (van de
    Weijer et al. 2007, Edge-Based Color Constancy).
    """
    detail = pixels - uniform_filter(pixels, (3, 3, 0))
    lightest = np.quantile(pixels, 0.98, axis=(0, 1))
    levels = np.log(np.stack([np.abs(detail).mean((0, 1)) + 0.2, lightest + 4, pixels.mean((0, 1)) + 4]))  # [3,3]
    ratios = levels[:, [0, 2]] - levels[:, [1]]
    products = np.concatenate([np.square(ratios).ravel(), ratios.prod(1)])
    luminance = np.clip(detail.mean(2), -CLIPPED, CLIPPED).round().astype(np.int8)
    return luminance.ravel(), np.concatenate([ratios.ravel(), products])


def marks(
    features: LowLevel,
    labels: np.ndarray,
    domains: np.ndarray,
    domain_names: Sequence[str],
    class_names: Sequence[str],
    groups: np.ndarray | None = None,
) -> list[ImageMark]:
    """Returns what picks out a class in a domain, the largest share first. `labels`, `domains`, `groups`: int64 [n].

    A class is judged by its images in this domain, or its groups: `FEWEST_MARKED` images or more.
    """
    made = [
        _mark(kind, fit, z, labels, domains, domain, label, share, number, (domain_names, class_names))
        for kind, z, fit in ((LOCAL, features.detail, template), (TINT, features.colour, ridge))
        for domain in np.unique(domains).tolist()
        for label, share, number in _shares(z, labels, groups, np.flatnonzero(domains == domain), fit)
        if clopper_pearson(round(share * number), number, 0.9)[0] >= LEAST
    ]
    return sorted(made, key=lambda mark: (not mark.found, -mark.share))


def _shares(
    z: np.ndarray,
    labels: np.ndarray,
    groups: np.ndarray | None,
    rows: np.ndarray,
    fit: Callable[[np.ndarray, np.ndarray], _Linear],
) -> Iterator[tuple[int, float, int]]:
    """Yields each class of a domain, the share of it that is picked out, and its images (or groups)."""
    names, targets, count = np.unique(labels[rows], return_inverse=True, return_counts=True)
    units = rows if groups is None else groups[rows]
    fold_of = folds(targets, None if groups is None else units, FOLDS)
    if fold_of is None or len(names) < 2 or count.max() < FEWEST_MARKED:
        return
    scores = np.zeros((len(rows), len(names)))
    for fold in range(FOLDS):
        train, test = fold_of != fold, fold_of == fold
        if len(np.unique(targets[train])) == len(names):
            weights, offsets = fit(z[rows[train]].astype(np.float32), targets[train])
            scores[test] = z[rows[test]].astype(np.float32) @ weights + offsets
    for c in np.flatnonzero((count >= FEWEST_MARKED) & (len(rows) - count >= FEWEST_MARKED)).tolist():
        of_class = targets == c
        yield int(names[c]), pick_out(scores[:, c], of_class), len(np.unique(units[of_class]))


def _mark(
    kind: str,
    fit: Callable[[np.ndarray, np.ndarray], _Linear],
    z: np.ndarray,
    labels: np.ndarray,
    domains: np.ndarray,
    domain: int,
    label: int,
    share: float,
    number: int,
    names: tuple[Sequence[str], Sequence[str]],
) -> ImageMark:
    """Applies the head of all images of the domain to the others."""
    here = np.flatnonzero(domains == domain)
    weights, _ = fit(z[here].astype(np.float32), (labels[here] == label).astype(np.int64))
    elsewhere = list[float]()
    for other in np.unique(domains[domains != domain]).tolist():
        there = np.flatnonzero(domains == other)
        of_class = labels[there] == label
        if min(of_class.sum(), (~of_class).sum()) >= FEWEST_MARKED // 3:
            elsewhere.append(pick_out(z[there].astype(np.float32) @ weights[:, 1], of_class))
    most, low = max(elsewhere, default=None), clopper_pearson(round(share * number), number, 0.9)[0]
    found = (most is None or most < share / 2) and (kind == TINT or _is_in_place(z[here], labels[here] == label))
    return ImageMark(kind, names[0][domain], names[1][label], share, low, most, found)


def _is_in_place(z: np.ndarray, of_class: np.ndarray) -> bool:
    """Whether the filter of every second image finds little in the others once it is moved, as it does of a mark.

    The drawings of guitars in PACS are cropped to their outline, so that their edges are at the same rows: moved by 4
    px sideways the filter finds 74% of it, of a text 9% and of a plain rectangle 25 to 56%. z [n,K], of_class bool [n].
    """
    square = template(z[::2].astype(np.float32), of_class[::2].astype(np.int64))[0][:, 1].reshape(SIDE, SIDE)
    moved = [np.roll(square, shift, axis) for shift in (-MOVED, MOVED) for axis in (0, 1)]
    score = z[1::2].astype(np.float32) @ np.stack([square, *moved]).reshape(5, -1).T
    gap = score[of_class[1::2]].mean(0) - score[~of_class[1::2]].mean(0)  # [5]
    return bool(gap[1:].max() < STAYS * gap[0])


def pick_out(score: np.ndarray, of_class: np.ndarray) -> float:
    """Returns the share of a class, bool [n], whose score is above those of all but 1% of the other images."""
    others = np.sort(score[~of_class])[::-1]
    return float((score[of_class] > others[int(FALSE_ALARMS * len(others))]).mean())


def template(z: np.ndarray, targets: np.ndarray) -> _Linear:
    """Returns a matched filter of each class against the others: pixels that differ by less than `CUT` errors are 0.

    As in nearest shrunken centroids (Tibshirani et al. 2002). Content is at another place in every image, so that the
    mean of many images has no detail; a mark stays. z float32 [n,K], targets int64 [n].
    """
    count = np.bincount(targets).astype(np.float64)[:, None]
    sums = np.eye(len(count), dtype=np.float32)[targets].T @ z  # [C,K]
    spread = z.std(0) + 0.5
    t = (sums / count - (sums.sum(0) - sums) / (len(z) - count)) / spread / np.sqrt(1 / count + 1 / (len(z) - count))
    weights = np.sign(t) * np.maximum(np.abs(t) - CUT, 0) * np.sqrt(1 / count + 1 / (len(z) - count)) / spread
    return weights.T, -(weights @ z.mean(0))


def ridge(z: np.ndarray, targets: np.ndarray) -> _Linear:
    """Returns a ridge regression of one-hot classes of the same weight each. z float32 [n,K], targets int64 [n]."""
    count = np.bincount(targets)
    weight = (1 / count[targets])[:, None] / len(count)  # [n,1], with sum 1
    mean, spread = z.mean(0), z.std(0) + 1e-3
    x, one_hot = (z - mean) / spread, np.eye(len(count))[targets]
    gram = (x * weight).T @ x
    gram[np.diag_indices(len(gram))] += PENALTY * np.trace(gram) / len(gram) + 1e-9  # grey images have no colour
    weights = np.linalg.solve(gram, (x * weight).T @ (one_hot - (one_hot * weight).sum(0))) / spread[:, None]
    return weights, -(mean @ weights)
