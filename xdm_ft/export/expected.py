"""What to expect of a run's method at a new site, from the run's test results; and whether a site keeps that promise.

All numbers of the promise are of the trials that the selection rule picked by validation. Which method is quoted for a
held-out set is chosen by the other sets, so that no test value chooses its own. They are of models that were trained
and tested in the run, not of the final fit, an ensemble or interpolated weights. `evaluation.intervals` derives the
interval for a new site.

The promise is the distribution m + spread · t(D − 1) of a metric at one more site, over D held-out sets. At the site it
is measured on some images, with standard error SE (jackknife over their groups; on the logit scale SE/(p(1 − p)), the
delta method with p = (x + ½)/(n + 1)). Sampling is independent of which site it is, so the value lies in
m ± t(D − 1)·√(spread² + SE²) for 95% of sites that are like the held-out ones. SE has its own degrees of freedom, Welch
and Satterthwaite's number for the sum is never smaller than the smaller of the two: t(min(D, G) − 1) is used, G being
the effective number of groups. spread² already holds the sampling error of the held-out images, so "within" is said in
somewhat more than 95% where images vary as much as sites do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
import xxhash
from torch import Tensor

from xdm_ft.core import ORACLE, DomainSet, sets_noun
from xdm_ft.evaluation.estimates import FEWEST_SETS, Estimate
from xdm_ft.evaluation.few_labels import FEWEST_EXACT, clopper_pearson
from xdm_ft.evaluation.intervals import (
    MAX_WIDTH,
    Bounds,
    HeldOutValues,
    NewSite,
    interval_of,
    over_seeds_and_groups,
    smoothed,
    within_bounds,
)
from xdm_ft.evaluation.metrics import (
    HIGHER_IS_BETTER,
    IN_PERCENT,
    Bin,
    per_image,
    reliability,
    score,
)
from xdm_ft.evaluation.predictions import (
    HeldOutImages,
    Prediction,
    effective_number,
    jackknife_variance,
    without_each_group,
)
from xdm_ft.export import AtHeldOut, ExpectedPerformance
from xdm_ft.export.sources import Item, Site
from xdm_ft.features.hashes import READER_THREADS, hash_file, regular_file
from xdm_ft.results import Runs, new_site_of, one_more_domain, seeds_by_set, values_by_set
from xdm_ft.results.measured import Pool, RunMeasures, interval
from xdm_ft.results.run import Run
from xdm_ft.results.verdicts import OverImages
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.progress import progress

WITHIN = "within what the card promises"


def expected_performance(run: Run, runs: Runs, chosen_at: Mapping[DomainSet, str]) -> ExpectedPerformance | None:
    """Returns what to expect of a method at a new site; None if no model of it has a test result.

    Args:
        run: whose stored predictions give the intervals over images.
        runs: `Run.quoted`, or the models of a method that was named.
        chosen_at: {held-out set: the method that the other sets choose, of which its models are}.
    """
    metric, planned = runs.metric, tuple(dict.fromkeys(record.test_domains for record in run.every))
    tested = {held for held, _ in runs.values}
    if not tested:
        return None
    runs = replace(runs, held_out=tuple(held for held in planned if held in tested))
    seeds, values, by_set = runs.complete_seeds, runs.values, values_by_set(runs)
    means = [float(np.mean([values[held, s] for held in runs.held_out])) for s in seeds]
    std = float(np.std(means, ddof=1)) if len(means) > 1 else None
    at_new_site = new_site_of(runs)
    quoted = {record.test_domains: record.method for record in runs.records}  # {held-out set: method}
    measured = _run_measures(run)
    over = {held: measured.over_images.get((runs.rule, quoted[held], held)) for held in by_set}
    at = [_at_held_out(runs, held, by_set[held], over[held], chosen_at.get(held)) for held in by_set]
    if len(at) == 1 and len(at[0].domains) > 1:  # of several domains in one set only accuracies are known
        worst = min(at[0].accuracies.items(), key=lambda item: item[1])
    else:
        sign = 1 if HIGHER_IS_BETTER[metric] else -1
        worst = min(((", ".join(site.domains), site.value) for site in at), key=lambda item: sign * item[1])

    notes = list[str]()  # what limits the numbers
    if lacking := [", ".join(held) for held in planned if held not in tested]:
        notes.append(f"no result with {'; '.join(lacking)} held out")
    if not all(over.values()):
        notes.append("stored predictions are missing, damaged or of another run, so that some intervals are unknown")
    if any(site.groups is None for site in at):
        notes.append("images assumed independent: patients, slides or sequences are unknown")
    if divided := run.results["data"].get("divided"):
        notes.append(f"the split divides groups (patients, slides or sequences): {', '.join(divided)}")
    if any(site.seeds == 1 for site in at):
        notes.append("one seed: intervals are over images alone")
    if len(at) == 1:
        notes.append("one held-out set: how much sites differ is unknown, so there is no interval for a new site")
    elif len(at) < FEWEST_SETS:
        notes.append(
            f"{len(at)} {sets_noun(runs.held_out)}: too few to know how much sites differ, so there is no interval"
        )

    return ExpectedPerformance(
        source="official test" if run.recipe.protocol.name == "official" else "leave one domain out",
        data=run.recipe.data.name,
        method=runs.method,
        selection=runs.rule,
        metric=metric,
        mean=float(np.mean([values.mean() for values in by_set.values()])),
        std=std,
        stderr=None if std is None else std / len(means) ** 0.5,
        seeds=len(means),
        held_out=tuple(at),
        worst=worst,
        others=_others(runs),
        calibrated=_calibrated(
            [measured.pools.get((quoted[held], held)) for held in by_set] if runs.rule == run.recipe_rule else [None]
        ),
        new_site=None if at_new_site is None else at_new_site.between(metric),
        one_more_domain=one_more_domain(runs, run.results["data"]["images"]),
        **({} if at_new_site is None else at_new_site._asdict()),
        notes=tuple(notes),
    )


def _run_measures(run: Run) -> RunMeasures:
    """Returns what predictions come to; nothing where they cannot be read, which the notes say."""
    try:
        return run.measured
    except UserError:
        return RunMeasures("", {}, {})


def _at_held_out(
    runs: Runs, held: DomainSet, by_seed: np.ndarray, over: OverImages | None, method: str | None
) -> AtHeldOut:
    records = (record for record in runs.records if record.test_domains == held)
    scores = [score for record in records if (score := runs.score(record)) is not None]
    accuracies = {
        name: float(np.mean([score.per_domain[name]["accuracy"] for score in scores])) for name in scores[0].per_domain
    }
    return AtHeldOut(
        domains=held,
        method=method,
        value=float(by_seed.mean()),
        interval=interval(runs.metric, [by_seed], [over]),
        seeds=len(by_seed),
        images=scores[0].n,
        groups=over and over.groups,
        accuracies=accuracies,
    )


def error_at(metric: str, by_seed: np.ndarray, predictions: Sequence[Prediction], groups: float) -> Estimate | None:
    """The mean over seeds on one held-out set, with its error; None if that cannot be estimated.

    `groups` is the effective number of groups of images.
    """
    if groups < 2 or (metric == "auroc" and any(prediction.per_image is None for prediction in predictions)):
        return None
    without = np.stack([without_each_group(metric, prediction) for prediction in predictions])  # [S,groups]
    return over_seeds_and_groups([HeldOutValues(by_seed, jackknife_variance(without.mean(0)), groups)])


def _others(runs: Runs) -> dict[str, float]:
    """{other metric: mean over held-out sets of the means over seeds}; left out where it is not defined."""
    scores = {(record.test_domains, record.seed): runs.score(record) for record in runs.records}
    means = {}
    for name in HIGHER_IS_BETTER:
        if name == runs.metric or (name == "worst_domain_accuracy" and all(len(held) == 1 for held in runs.held_out)):
            continue
        by_set = [[getattr(scores[held, s], name) for s in seeds] for held, seeds in seeds_by_set(runs).items()]
        if all(value is not None for values in by_set for value in values):
            means[name] = float(np.mean([np.mean(values) for values in by_set]))
    return means


def _calibrated(pools: Sequence[Pool | None]) -> dict[str, float] | None:
    """Means of NLL and ECE after the logits of every model are divided by its own temperature; None if not known."""
    known = [(pool.nll, pool.ece) for pool in pools if pool and pool.nll is not None and pool.ece is not None]
    if len(known) < len(pools):
        return None
    return dict(zip(("nll", "ece"), np.mean(known, axis=0).tolist(), strict=True))


# ------------------------------------------------------------------------------------------------------ at a new site


@dataclass(frozen=True)
class Labelled:
    """The images of a site that can be read, with the model's answers."""

    site: Site
    logits: Tensor  # float32 [n,C]
    trained: np.ndarray | None = None  # bool [n], whether the image trained the model; None: unknown

    def of_domain(self, number: int) -> Labelled:
        rows = np.flatnonzero(self.site.domains == number)
        trained = None if self.trained is None else self.trained[rows]
        return Labelled(self.site.rows(rows), self.logits[torch.from_numpy(rows)], trained)


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
    versus: Versus | None  # None: all of several domains, or a model without a promise


def at_site(
    images: Labelled, class_names: Sequence[str], expected: ExpectedPerformance | None = None, temperature: float = 1.0
) -> AtSite:
    """Returns the metrics of labelled images, with intervals over their groups; of few images without groups, the
    accuracy has Clopper and Pearson's, as the jackknife's covers 83 to 89% at 25 to 50 images.

    `expected` is given for one domain: a promise is about one site. `temperature` is that of the logits.
    """
    site, logits = images.site, images.logits
    labels, domains = torch.from_numpy(site.labels), torch.from_numpy(site.domains)
    scores = score(logits, labels, domains, class_names, site.domain_names)
    tested = HeldOutImages(np.arange(len(labels)), site.labels, site.domains, site.groups)
    effective = effective_number(tested.sizes)
    estimates, metrics = dict[str, Estimate | None](), dict[str, Measured]()
    for name in HIGHER_IS_BETTER:
        value = getattr(scores, name)
        if value is None or (name == "worst_domain_accuracy" and len(scores.per_domain) == 1):
            continue
        predicted, values = logits.argmax(1).numpy(), per_image(name, logits, labels)
        prediction = Prediction("", (), 0, "", tested, predicted, values)
        estimates[name] = error_at(name, np.array([value]), [prediction], effective)
        metrics[name] = Measured(value, interval_of(name, estimates[name], effective))
    if site.groups is None and scores.n < FEWEST_EXACT:
        right = int((logits.argmax(1) == labels).sum())
        metrics["accuracy"] = Measured(right / scores.n, clopper_pearson(right, scores.n))
    counts, recalls, versus = np.bincount(site.labels, minlength=len(class_names)), scores.per_class_recall, None
    if expected is not None:
        # of a single domain the worst accuracy is its accuracy
        name = "accuracy" if expected.metric == "worst_domain_accuracy" else expected.metric
        if name in metrics:  # the metric is defined on these images
            versus = _versus(expected, metrics[name].value, estimates[name], images, temperature)
    return AtSite(
        images=scores.n,
        groups=None if site.groups is None else len(np.unique(site.groups)),
        metrics=metrics,
        classes={name: OfClass(int(n), recalls[name]) for name, n in zip(class_names, counts, strict=True)},
        reliability=reliability(logits, site.labels),
        versus=versus,
    )


def _versus(
    expected: ExpectedPerformance, value: float, estimate: Estimate | None, images: Labelled, temperature: float
) -> Versus:
    interval, reason, promised, sets = None, "", expected.at_new_site, len(expected.held_out)
    trained = 0 if images.trained is None else int(images.trained.sum())
    if expected.selection == ORACLE:
        reason = "picked by labels of the held-out domains"
    elif trained:
        reason = f"{trained} of these images trained the model"
    elif promised is None:
        reason = "one held-out set" if sets == 1 else f"{sets} held-out sets"
    elif temperature != 1 and expected.metric in ("nll", "ece"):
        reason = "the promise is for probabilities without a temperature"
    elif estimate is None:
        reason = "too few images or groups"
    else:
        interval, verdict = judged(expected.metric, value, estimate, len(images.logits), promised)
        if interval == within_bounds(expected.metric, -math.inf, math.inf):
            reason = "the held-out domains differ so much that any value is possible"
        elif verdict == WITHIN and expected.metric in IN_PERCENT and interval[1] - interval[0] > MAX_WIDTH:
            ends = " to ".join(f"{100 * end:.1f}%" for end in interval)
            reason = f"of such a sample it expects {ends}, which hardly any site would miss"
    if reason:
        verdict = f"cannot be said ({reason})"
    return Versus(expected.metric, value, expected.mean, interval, expected.worst, verdict, _among(value, expected))


def _among(value: float, expected: ExpectedPerformance) -> str:
    sites = sorted(expected.held_out, key=lambda of: of.value)
    n, lower, higher = len(sites), sum(of.value < value for of in sites), sum(of.value > value for of in sites)
    if n in (lower, higher):
        every = f"all {n} {sets_noun([of.domains for of in sites])}" if n > 1 else "the held-out one"
        return f"{'above' if lower else 'below'} {every}"
    first, last = (", ".join(of.domains) for of in (sites[max(0, lower - 1)], sites[min(n - 1, n - higher)]))
    return f"as at the held-out {first}" if first == last else f"between the held-out {first} and {last}"


def judged(metric: str, value: float, estimate: Estimate, images: int, promised: NewSite) -> tuple[Bounds, str]:
    """Returns the 95% interval of the values that a site would have if it is like the held-out ones, and the verdict.

    `estimate` has the standard error of `value` over these `images` and its degrees of freedom.
    """
    error = estimate.error
    if promised.scale == "logit":
        p = smoothed(value, images)
        error /= p * (1 - p)
    ends = promised.between(metric, error=error, freedom=estimate.freedom, images=images)
    if value < ends[0]:
        return ends, "below"
    return ends, "above" if value > ends[1] else WITHIN


def checksums(items: Sequence[Item]) -> np.ndarray:
    """Returns the xxh3 (128 bits) of each image's bytes, uint8 [n,16]; zeros where they cannot be read."""

    def checksum(item: Item) -> bytes:
        if isinstance(item.content, bytes):
            return xxhash.xxh3_128_digest(item.content)
        try:
            regular_file(item.content)
            return hash_file(item.content)[1]
        except (OSError, ValueError):  # prediction says why
            return bytes(16)

    digests = np.zeros((len(items), 16), np.uint8)
    with ThreadPoolExecutor(READER_THREADS) as pool, progress("hashing", len(items), "images") as done:
        for row, content in zip(digests, pool.map(checksum, items), strict=True):
            row[:] = np.frombuffer(content, np.uint8)
            done.advance()
    return digests


def first_of_each(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first of the images with each checksum, int64 [m], and for each image its first one, int64 [n].

    Images without checksum are different ones.
    """
    keys = [bytes(row) if row.any() else number for number, row in enumerate(images)]
    first = dict[bytes | int, int]()
    firsts = np.array([first.setdefault(key, number) for number, key in enumerate(keys)], np.int64)
    return np.fromiter(first.values(), np.int64, len(first)), firsts


def are_among(images: np.ndarray, training_images: np.ndarray) -> np.ndarray:
    """Returns whether each checksum is one of the training images': bool [n]."""
    training = {bytes(row) for row in training_images}
    return np.array([bytes(row) in training for row in images], bool)
