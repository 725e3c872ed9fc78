"""Whether domain and class can be told apart: how much the shares of the classes differ between the domains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.sparse.csgraph import connected_components
from scipy.special import chndtr, ndtri

from xdm_ft.core import ALPHA, Interval
from xdm_ft.evaluation.predictions import effective_number
from xdm_ft.images import ImageDataset
from xdm_ft.images.decode import NAMED_AT_MOST
from xdm_ft.runtime.errors import join_names

OVER_CLASSES = ("balanced_accuracy", "macro_f1", "auroc")  # metrics in which each class weighs the same
FEW = 5  # images of a class in a domain: below, one of them moves such a metric much
RARE = 1 / 3  # of the mean number of images of the other classes: below, accuracy says little of a class


@dataclass(frozen=True)
class SiteClass:
    """The classes of D domains. V is None for a single domain or class, and its interval for a single group too."""

    domains: tuple[str, ...]  # D
    classes: tuple[str, ...]  # C
    counts: np.ndarray  # int64 [D,C], images
    cramers_v: float | None  # 0: all domains have the same shares of classes; 1: one determines the other
    interval: Interval | None
    lacking: tuple[tuple[str, str], ...]  # (domain, class) without an image
    confounded: tuple[str, ...]  # sentences on domains and classes of which one determines the other

    @property
    def line(self) -> str:
        """V with its interval, in words; "" for a single domain or class."""
        if self.cramers_v is None:
            return ""
        ends = "" if self.interval is None else f" ({self.interval.low:.2f} to {self.interval.high:.2f})"
        return f"Cramér's V {self.cramers_v:.2f}{ends}"

    @property
    def sentences(self) -> list[str]:
        """What a reader should know, V first."""
        if self.cramers_v is None:
            return ["With a single domain or class there is no association between domain and class."]
        scale = "0: every domain has the same shares of classes, 1: one determines the other"
        images = self.counts.sum()
        guess, informed = self.counts.sum(0).max() / images, self.counts.max(1).sum() / images
        texts = [
            f"{self.line} between domain and class ({scale}).",
            f"Naming each domain's most frequent class is right for {100 * informed:.0f}% of the images, the most "
            f"frequent class of all for {100 * guess:.0f}%.",
        ]
        if self.lacking:
            pairs = [f'no image of "{name}" in {domain}' for domain, name in self.lacking[:NAMED_AT_MOST]]
            more = len(self.lacking) - len(pairs)
            texts.append(f"There is {', '.join(pairs)}{f' and {more} more' if more else ''}.")
        return [*texts, *(f"{text}: site and class cannot be told apart there." for text in self.confounded)]

    def to_json(self) -> dict[str, Any]:
        """Returns the block `site_class` of audit.json."""
        return {
            "domains": list(self.domains),
            "classes": list(self.classes),
            "counts": self.counts.tolist(),
            "cramers_v": self.cramers_v,
            "interval": None if self.interval is None else list(self.interval),
            "lacking": [{"domain": domain, "class": name} for domain, name in self.lacking],
            "confounded": list(self.confounded),
            "sentences": self.sentences,
        }


def images_per_class(dataset: ImageDataset, rows: np.ndarray | None = None) -> np.ndarray:
    """Returns the number of images of every class in every domain, of these rows or of all: int64 [D,C]."""
    num_domains, num_classes = len(dataset.domain_names), len(dataset.class_names)
    stratum = dataset.domains * num_classes + dataset.labels
    stratum = stratum if rows is None else stratum[rows]
    return np.bincount(stratum, minlength=num_domains * num_classes).reshape(num_domains, num_classes)


def imbalance(
    counts: np.ndarray, domains: Sequence[str], classes: Sequence[str], metric: str, weighted: bool
) -> Iterator[str]:
    """Yields sentences on what a metric hides, or rests on, of classes with few images or none in a domain.

    counts: images of each class in each domain, int64 [D,C]. `weighted`: whether a row has class weights.
    """
    if metric not in OVER_CLASSES:
        if text := _hidden(counts.sum(0), classes, metric, weighted):
            yield text
        return
    has_value = (counts > 0).sum(1, keepdims=True) > 1  # a domain of one class has none
    few = np.argwhere((counts > 0) & (counts < FEW) & has_value).tolist()
    if few:
        named = [f'"{classes[c]}" in {domains[d]} ({counts[d, c]})' for d, c in few]
        yield f"{metric} rests on few images of {join_names(named, NAMED_AT_MOST)}: each class weighs the same"
    lacking = [(d, n) for d, n in enumerate((counts > 0).sum(1).tolist()) if 1 < n < len(classes)]
    if metric != "auroc" and lacking:
        where = join_names([f"{domains[d]} has {n}" for d, n in lacking], NAMED_AT_MOST)
        yield f"{metric} is the mean over a domain's classes, so values differ by them: {where} of {len(classes)}"


def _hidden(counts: np.ndarray, classes: Sequence[str], metric: str, weighted: bool) -> str:
    """Returns a sentence on the rarest class with images, of C with `counts` int64 [C]; "" if it is not rare."""
    present = np.flatnonzero(counts)
    if len(present) < 2:
        return ""
    rarest = present[counts[present].argmin()]
    share = counts[rarest] / (counts.sum() - counts[rarest]) * (len(present) - 1)
    if share >= RARE:
        return ""
    has = f'"{classes[rarest]}" has {100 * share:.{0 if share >= 0.01 else 1}f}% of the images that other classes have'
    remedy = "set protocol.metric: balanced_accuracy" + " and training.class_weights: balanced" * (not weighted)
    return f"{has} on average, and {metric} hides it: {remedy}"


def site_class_of(dataset: ImageDataset, rows: np.ndarray | None = None) -> SiteClass:
    """Returns the association of domain and class in a data set, or in these rows of it."""
    groups = dataset.groups if rows is None or dataset.groups is None else dataset.groups[rows]
    counts = images_per_class(dataset, rows)
    number = None if groups is None or not len(groups) else effective_number(np.unique(groups, return_counts=True)[1])
    return site_class(counts, dataset.domain_names, dataset.class_names, number)


def site_class(
    counts: np.ndarray, domains: Sequence[str], classes: Sequence[str], independent: float | None = None
) -> SiteClass:
    """Returns the association of domain and class.

    Args:
        counts: images of each class in each domain, int64 [D,C].
        domains: D names.
        classes: C names.
        independent: effective number of groups, if images of a group (a patient) are not independent. All images of a
            group then count as one, which is careful: the interval is right where they are all alike.
    """
    value, interval = cramers_v(counts, counts.sum() if independent is None else independent)
    lacking = tuple((domains[d], classes[c]) for d, c in np.argwhere(counts == 0).tolist())
    return SiteClass(
        tuple(domains), tuple(classes), counts, value, interval, lacking, tuple(_confounded(counts, domains, classes))
    )


def cramers_v(counts: np.ndarray, n: float) -> tuple[float | None, Interval | None]:
    """Returns Cramér's V of a table int [D,C], corrected for its bias, with its 95% interval.

    φ² = χ²/N of the shares, of which n are independent. By chance alone φ² is (D−1)(C−1)/(n−1) on average, which
    Bergsma (2013, J. Korean Stat. Soc. 42, 323) subtracts. The interval is that of the noncentrality λ of χ² = n·φ²
    (Smithson 2003, Confidence Intervals, ch. 4), with V² = λ/(n·min(D−1, C−1)). It holds 0 in 95% of tables without
    association; a bootstrap's percentiles do not, as every resample adds the bias of chance once more. λ holds for weak
    association; a strong one varies by var φ² = Σ p h²/n too (delta method, h the derivative of φ² by the share p), so
    that an end lies where the wider of both puts it. Domains and classes without images do not count.
    """
    table = counts[counts.sum(1) > 0][:, counts.sum(0) > 0].astype(np.float64)
    rows, columns = table.shape
    if min(rows, columns) < 2:
        return None, None
    shares = table / table.sum()
    expected = np.outer(shares.sum(1), shares.sum(0))
    phi2 = float((np.square(shares - expected) / expected).sum())
    least = min(rows, columns) - 1
    if n < 2:
        return min(1.0, (phi2 / least) ** 0.5), None
    freedom = (rows - 1) * (columns - 1)
    corrected = max(0.0, phi2 - freedom / (n - 1))
    sides = min(side - (side - 1) ** 2 / (n - 1) for side in (rows, columns)) - 1
    value = min(1.0, (corrected / sides) ** 0.5) if sides > 0 else 0.0
    # a table that is more even than chance makes it does not narrow the interval
    of_ends = (n * phi2, 1 - ALPHA / 2), (max(n * phi2, freedom), ALPHA / 2)
    ends = [_noncentrality(chi2, freedom, share) / n for chi2, share in of_ends]
    ratio = shares / expected
    by_row = (shares * ratio).sum(1) / shares.sum(1)
    slope = 2 * ratio - by_row[:, None] - (shares * ratio).sum(0) / shares.sum(0)
    half = float(ndtri(1 - ALPHA / 2)) * float((shares * np.square(slope)).sum() / n) ** 0.5
    low, high = min(ends[0], corrected - half), max(ends[1], corrected + half)
    low, high = (min(1.0, (max(0.0, end) / least) ** 0.5) for end in (low, high))
    return value, Interval(min(low, value), max(high, value))  # with few images the corrected V can lie outside


def _noncentrality(chi2: float, freedom: int, share: float) -> float:
    """Returns the λ ≥ 0 at which a noncentral χ² lies below `chi2` with probability `share`; 0 if there is none."""

    def excess(noncentrality: float) -> float:
        return float(chndtr(chi2, freedom, noncentrality)) - share

    if excess(0.0) <= 0:
        return 0.0
    high = chi2 + 1.0
    while excess(high) > 0:
        high *= 2
    return float(brentq(excess, 0.0, high))


def _confounded(counts: np.ndarray, domains: Sequence[str], classes: Sequence[str]) -> list[str]:
    """Returns a sentence per set of domains and classes that the others share nothing with, per domain of one class,
    and per class of one domain; none for a single domain or class.
    """
    has = counts > 0  # [D,C]
    if min(has.any(0).sum(), has.any(1).sum()) < 2:
        return []
    size = len(domains)
    graph = np.zeros((size + len(classes),) * 2, bool)  # of domains, then classes
    graph[:size, size:] = has
    _, component = connected_components(graph, directed=False)
    parts = [component == number for number in np.unique(component[:size][has.any(1)])]

    def named(numbers: np.ndarray, names: Sequence[str], mark: str = "") -> str:
        texts = [f"{mark}{names[i]}{mark}" for i in numbers[:NAMED_AT_MOST]]
        more = len(numbers) - len(texts)
        return ", ".join(texts) + (f" and {more} more" if more else "")

    texts = []
    for part in parts:
        ds, cs = np.flatnonzero(part[:size]), np.flatnonzero(part[size:])
        if len(parts) > 1:
            only, lie = named(cs, classes, '"'), named(ds, domains)
            texts.append(f"all images in {lie} are of {only}, and no other domain has such images")
        if len(cs) > 1:
            texts += [
                f'all images in {domains[d]} are of "{classes[np.flatnonzero(has[d])[0]]}"'
                for d in ds[has[ds].sum(1) == 1]
            ]
        if len(ds) > 1:
            texts += [
                f'all images of "{classes[c]}" are in {domains[np.flatnonzero(has[:, c])[0]]}'
                for c in cs[has[:, cs].sum(0) == 1]
            ]
    return texts
