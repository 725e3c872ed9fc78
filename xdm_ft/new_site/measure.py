"""What labels show of a model at a site: its metrics beside what its card promises, a threshold for a wanted risk, and
the accuracy with the help of images without labels.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field, ValidationError
from torch import Tensor

from xdm_ft.core import ORACLE, sets_noun
from xdm_ft.evaluation.estimates import Estimate
from xdm_ft.evaluation.expected_site import WITHIN, AtSite, Versus, judge_value, site_metrics
from xdm_ft.evaluation.few_labels import DELTA, difference_estimate, fewest_answered, shorter, threshold_for
from xdm_ft.evaluation.intervals import MAX_WIDTH, Bounds, within_bounds
from xdm_ft.evaluation.metrics import IN_PERCENT, at_one_site
from xdm_ft.evaluation.predictions import effective_number
from xdm_ft.export import Count, ExpectedPerformance, ModelConfig, ModelPrecision, first_fault, probabilities
from xdm_ft.export.directory import CONFIG, THRESHOLD, refuse_changed
from xdm_ft.export.predict import decimals
from xdm_ft.export.predictor import Model
from xdm_ft.export.sources import Site, Sources
from xdm_ft.new_site.images import readable, unlabelled_images
from xdm_ft.results.run import is_run
from xdm_ft.runtime.errors import UserError, plural
from xdm_ft.runtime.settings import Block
from xdm_ft.storage.atomic import replace_text
from xdm_ft.storage.lines import Damaged, one_line, read_object, with_checksum
from xdm_ft.version import __version__

FEWEST_LABELS = 50  # for the difference estimate: of so many its interval covers 94 to 96%


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


def at_site(
    images: Labelled, class_names: Sequence[str], expected: ExpectedPerformance | None = None, temperature: float = 1.0
) -> AtSite:
    """Returns the metrics of labelled images, beside a promise.

    `expected` is given for one domain: a promise is about one site. `temperature` is that of the logits.
    """
    site = images.site
    measured, estimates = site_metrics(
        images.logits, site.labels, site.domains, site.groups, class_names, site.domain_names
    )
    if expected is None:
        return measured
    name = at_one_site(expected.metric)
    if name not in estimates:  # the metric is not defined on these images
        return measured
    versus = _versus(expected, measured.metrics[name].value, estimates[name], images, temperature)
    return replace(measured, versus=versus)


def _versus(
    expected: ExpectedPerformance, value: float, estimate: Estimate | None, images: Labelled, temperature: float
) -> Versus:
    interval, reason, promised, sets = None, "", expected.at_new_site, len(expected.held_out)
    trained = 0 if images.trained is None else int(images.trained.sum())
    if expected.selection == ORACLE:
        reason = "picked by labels of the held-out domains"
    elif trained:
        reason = f"{trained} of these images trained the model"
    elif len(np.unique(images.site.labels)) == 1:
        reason = "all images are of one class"
    elif promised is None:
        reason = "one held-out set" if sets == 1 else f"{sets} held-out sets"
    elif temperature != 1 and expected.metric in ("nll", "ece"):
        reason = "the promise is for probabilities without a temperature"
    elif estimate is None:
        reason = "too few images or groups"
    else:
        interval, verdict = judge_value(expected.metric, value, estimate, len(images.logits), promised)
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


@dataclass(frozen=True)
class AtRisk:
    """The lowest threshold for a wanted risk, or why there is none."""

    risk: float
    threshold: float | None
    answered: int | None  # of the labelled images
    wrong: int | None
    labels: int
    refused: str | None
    shown: float | None = None  # a shorter number than `threshold`, above which the same labelled images are answered


@dataclass(frozen=True)
class WithImages:
    """The accuracy by the difference estimate, or why there is none."""

    value: float | None
    interval: Bounds | None  # 95%
    images: int | None  # of the site, with and without labels
    unreadable: int  # images that were left out
    refused: str | None


def _trained(images: Labelled) -> str | None:
    """Returns why these images measure nothing at a new site; None: they do."""
    trained = 0 if images.trained is None else int(images.trained.sum())
    return f"{trained} of these images trained the model" if trained else None


def at_risk(images: Labelled, risk: float) -> AtRisk:
    """Returns the threshold of the probability, as `predict` prints it, from a random sample of a site."""
    right = images.logits.argmax(1).numpy() == images.site.labels
    confidence = np.array(decimals(probabilities(images.logits).numpy().max(1)))
    groups, n, fewest = images.site.groups, len(right), fewest_answered(risk)
    effective = n if groups is None else effective_number(np.unique(groups, return_counts=True)[1])
    refused = _trained(images)
    if refused is None and len(np.unique(images.site.labels)) == 1:
        refused = "all labels are of one class and say nothing about the others"
    threshold = None if refused else threshold_for(risk, confidence, right, weight=effective / n)
    if threshold is None and refused is None:
        if effective < fewest:
            here, more = plural(n, "label"), f"can show it (label --budget {4 * fewest})"
            if groups is not None:
                here, more = f"{here} in {len(np.unique(groups))} groups", "groups can show it"
            refused = f"too few labels: {here}; {fewest} or more {more}"
        else:
            most = confidence >= np.sort(confidence)[-int(np.ceil(fewest * n / effective))]  # with those that tie
            among = f"{(~right[most]).sum()} of the {most.sum()} most certain answers wrong"
            refused = f"no threshold passes with {among}; label more images, adapt the model, or allow a larger risk"
    value, answered, wrong = (
        (None, None, None) if threshold is None else (threshold.value, threshold.answered, threshold.wrong)
    )
    return AtRisk(risk, value, answered, wrong, n, refused, None if value is None else shorter(value, confidence))


def with_images(model: Model, name: str, sources: Sources, images: Labelled, batch_size: int | None) -> WithImages:
    """Estimates the accuracy at a site from labelled images and all images of `sources`.

    Raises `UserError` for images that cannot be listed.
    """
    n, refused = len(images.logits), _trained(images)
    if refused is None and n < FEWEST_LABELS:
        refused = f"too few labels: {n}; {FEWEST_LABELS} are needed (label --budget {4 * FEWEST_LABELS})"
    if refused is not None:
        return WithImages(None, None, None, 0, refused)
    listed, confidence = unlabelled_images(model, name, sources), list[np.ndarray]()
    unreadable = dict[str, str]()
    path = sources.paths[0]
    for batch in readable(model, name, path, listed.items, unreadable, what="predict", batch_size=batch_size):
        confidence.append(_calibrated(batch.logits, model.config))
    right, of_all = images.logits.argmax(1).numpy() == images.site.labels, np.concatenate(confidence)
    estimate = difference_estimate(of_all, _calibrated(images.logits, model.config), right, images.site.groups)
    if estimate is None:
        return WithImages(None, None, len(of_all), len(unreadable), "a single group or image has no spread")
    return WithImages(
        estimate.value, within_bounds("accuracy", *estimate.interval()), len(of_all), len(unreadable), None
    )


def _calibrated(logits: Tensor, config: ModelConfig) -> np.ndarray:
    """Returns the largest probability of each row, float64 [n], at the temperature that was fitted for the model."""
    scale = config.temperature / (config.fitted_temperature or config.temperature)
    largest: np.ndarray = (logits.double() * scale).softmax(1).max(1).values.numpy()
    return largest


HOW = "xdm-ft evaluate {} SITE --risk 0.1 --save"


class StoredThreshold(Block):
    """A threshold with its record."""

    format: Literal[1] = 1
    xdm_ft: str = __version__  # version that wrote it
    model: str  # checksum of its config.json
    precision: ModelPrecision  # in which the probabilities were computed
    threshold: Annotated[float, Field(gt=0, le=1)]
    risk: Annotated[float, Field(gt=0, lt=1)]
    delta: Annotated[float, Field(gt=0, lt=1)] = DELTA  # probability that the risk is larger
    labels: Count
    groups: Count | None  # None: images assumed independent
    answered: Count  # of the labelled images
    wrong: Count


def refuse_other_directories(folder: Path) -> None:
    """Raises `UserError` unless a threshold can be stored here: in a model directory."""
    if is_run(folder):
        raise UserError(f"--save: {folder} is a run directory; export a model of it first: xdm-ft export {folder} DIR")
    if not (folder / CONFIG).is_file():
        raise UserError(f"--save: {folder} is not a model directory on this machine; give one")


def store(model: Model, shown: AtRisk, groups: int | None) -> Path:
    """Writes the file, atomically, and returns its path.

    Raises `UserError` if it cannot be written, or if the directory holds another model than was read.
    """
    refuse_changed(model.folder, model.checksum)
    record = {name: getattr(shown, name) for name in ("threshold", "risk", "labels", "answered", "wrong")}
    stored = StoredThreshold(model=model.checksum, precision=model.module.precision, groups=groups, **record)
    document = with_checksum(stored.model_dump(mode="json"))
    replace_text(model.folder / THRESHOLD, json.dumps(document, indent=1, allow_nan=False) + "\n")
    return model.folder / THRESHOLD


def read_threshold(model: Model) -> StoredThreshold:
    """Reads the file of a model directory. Raises `UserError` if there is none for this model in its precision."""
    folder, precision = model.folder, model.module.precision
    path, again = folder / THRESHOLD, f"store one: {HOW.format(folder)}"
    if not path.is_file():
        raise UserError(f"--abstain-below: {folder} has no stored threshold; {again}")
    try:
        stored = StoredThreshold.model_validate(read_object(path))
    except (Damaged, ValidationError) as error:
        reason = first_fault(error) if isinstance(error, ValidationError) else one_line(error)
        raise UserError(f"--abstain-below: {path} is damaged ({reason[:200]}); {again}") from error
    if stored.model != model.checksum:
        raise UserError(f"--abstain-below: {path} is of another model; {again}")
    if stored.precision != precision:
        problem = f"is of probabilities in {stored.precision}, and these are in {precision}"
        raise UserError(f"--abstain-below: {path} {problem}; add --precision {stored.precision}")
    return stored
