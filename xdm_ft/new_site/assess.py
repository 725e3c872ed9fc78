"""How good a model is expected to be at a site without labels: `evaluation/expected_site.py` on the site's images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xdm_ft.core import ORACLE
from xdm_ft.evaluation.expected_site import ExpectedAccuracy, Unknown, UnknownShare, card_mean
from xdm_ft.evaluation.predictions import effective_number
from xdm_ft.export.predictor import Model
from xdm_ft.export.sources import Item, Sources
from xdm_ft.new_site.images import group_numbers, readable, unlabelled_images
from xdm_ft.new_site.stored import FAILS, AtDomain, Bought, SeenByHeads, Stored, read_stored

AGREE = "the heads agree everywhere"


@dataclass(frozen=True)
class WorstThreshold:
    """The largest of the held-out domains' thresholds for a risk. It is not a threshold of this site."""

    domain: str  # where it was needed, or where none was enough
    threshold: float | None
    broken: int  # domains where the largest threshold of the others had a larger risk
    sites: int  # domains where that threshold left answers


def worst_thresholds(stored: Stored) -> dict[str, WorstThreshold]:
    """Returns {risk: the threshold of the worst held-out domain, with its record}."""
    domains = stored.about.domains
    worst = dict[str, WorstThreshold]()
    for risk in next(iter(domains.values())).risks if domains else ():
        at = {name: of.risks[risk] for name, of in domains.items()}
        values = {name: math.inf if of.threshold is None else of.threshold for name, of in at.items()}
        name = max(values, key=values.__getitem__)
        tried = [of.risk for of in at.values() if of.risk is not None]
        broken = sum(value > float(risk) for value in tried)
        worst[risk] = WorstThreshold(name, at[name].threshold, broken, len(tried))
    return worst


@dataclass(frozen=True)
class Assessment:
    model: str
    estimate: float | None  # of the accuracy at the site; None: refused
    low: float | None  # 95% interval
    high: float | None
    estimate_all: float | None  # of all images; `estimate` is without flagged ones where some belong to no class
    unknown_share: dict[str, float] | None  # of images of no class: value, low, high (95%); None: cannot be said
    verdict: str  # below, as_promised or unknown
    heads: str  # what the reference head is, whose accuracy this is: the model's own method, or what stands for it
    card: float | None  # mean accuracy of the reference heads at the held-out domains; None: there are none
    parts: dict[str, float] | None  # the three estimates: cot, aline, atc
    past_errors: dict[str, float]  # {held-out domain: the same estimate there minus the accuracy}
    domains: dict[str, AtDomain]
    refused: str | None  # why there is no number
    warnings: tuple[str, ...]  # why to trust the number less
    prevalence: dict[str, float] | None  # class shares that were given; None: those of the training images
    images: int
    groups: int | None
    copies: int  # of other images here: left out
    training_images: int | None  # images here that trained the model: left out; None: unknown
    unreadable: dict[str, str]
    distance: float | None  # median distance of the images from the training images; None: unknown
    is_far: bool  # farther than every held-out domain
    budgets: tuple[Bought, ...]  # what labels buy at the held-out domains
    risks: dict[str, WorstThreshold]  # {risk: threshold of the worst held-out domain}


def assess(
    model: Model,
    name: str,
    paths: Sequence[str],
    prevalence: np.ndarray | None,
    group: str | None,
    batch_size: int | None,
) -> Assessment:
    """Estimates the accuracy of the model on the images of `paths`, see `Sources`.

    `prevalence`: class shares of the site, [C]; None: those of the training images. Images count once, and those that
    trained the model do not count. Raises `UserError` for a model without `site.safetensors`, and without images.
    """
    stored = read_stored(model.folder, model.config)
    listed = unlabelled_images(model, name, Sources(paths, group, option="--group", column="group"))
    unreadable = dict[str, str]()
    p, predicted, distances, items = list[np.ndarray](), list[np.ndarray](), list[np.ndarray](), list[Item]()
    flagged = list[np.ndarray]()
    for batch in readable(model, name, paths[0], listed.items, unreadable, what="assess", batch_size=batch_size):
        z = model.module.head_input(batch.encoded)
        seen = stored.seen(z)
        flagged.append(stored.is_unknown(z))
        p.append(seen.p)
        predicted.append(seen.predicted)
        if model.reference is not None:
            distances.append(model.reference.distance(batch.encoded.numpy()))
        items += batch.items
    groups = group_numbers(items)
    sizes = np.ones(len(items), np.int64) if groups is None else np.bincount(groups)
    shares = stored.shares if prevalence is None else prevalence
    seen, of_class = SeenByHeads(np.concatenate(p), np.concatenate(predicted, 1)), ~np.concatenate(flagged)
    every, unknown = _expect(stored, seen, shares, groups), stored.unknown_share(~of_class, sizes)
    if unknown is None or unknown.low <= 0:
        of_class[:] = True
    expected = _expect(stored, seen.only(of_class), shares, None if groups is None else groups[of_class])
    refused = AGREE if expected is None else expected.refused
    if not of_class.any():
        refused = "all of them are flagged as images of no class"
    if model.config.expected is not None and model.config.expected.selection == ORACLE:
        refused = "labels of the held-out domains picked the model (selection: oracle)"
    far = [of.distance for of in stored.about.domains.values()]
    distance = float(np.median(np.concatenate(distances))) if distances else None
    known = expected if refused is None else None
    return Assessment(
        model=name,
        estimate=None if known is None else known.estimate,
        low=None if known is None else known.low,
        high=None if known is None else known.high,
        estimate_all=None if known is None or every is None else every.estimate,
        unknown_share=None if unknown is None else unknown._asdict(),
        verdict="unknown" if known is None else known.verdict,
        heads=stored.about.heads,
        card=card_mean(stored.past_values) if stored.past_values else None,
        parts=None if expected is None else expected.parts._asdict(),
        past_errors=stored.past_errors,
        domains=stored.about.domains,
        refused=refused,
        warnings=(*_unknown_warnings(stored.unknown, unknown), *(() if known is None else known.warnings)),
        prevalence=None if prevalence is None else dict(zip(model.class_names, map(float, prevalence), strict=True)),
        images=len(items),
        groups=None if groups is None else len(sizes),
        copies=listed.copies,
        training_images=listed.training_images,
        unreadable=unreadable,
        distance=distance,
        is_far=distance is not None and bool(far) and distance > max(far),
        budgets=stored.about.budgets,
        risks=worst_thresholds(stored),
    )


def _expect(
    stored: Stored, seen: SeenByHeads, shares: np.ndarray, groups: np.ndarray | None
) -> ExpectedAccuracy | None:
    """Returns the expected accuracy on some images; None if there are none, or if the heads agree everywhere."""
    n = len(seen.p)
    parts = stored.parts(seen, shares) if n else None
    sizes = np.ones(n, np.int64) if groups is None else np.unique_counts(groups).counts
    return None if parts is None else stored.expect(parts, effective_number(sizes), n)


def _unknown_warnings(unknown: Unknown | None, share: UnknownShare | None) -> Sequence[str]:
    if unknown is None or share is not None:
        return ()
    if not unknown.works:
        return (f"the model {FAILS.format(unknown.auroc)}",)
    return ("the share of images of no class cannot be said: sites differ too much in how many are flagged",)
