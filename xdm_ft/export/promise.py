"""What to expect of a run's method at a new site, from the run's test results.

All numbers are of the trials that the selection rule picked by validation; no test value chooses anything here. They
are of models that were trained and tested in the run, not of the final fit, an ensemble or interpolated weights.
`evaluation.intervals` derives the interval for a new site.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from xdm_ft.evaluation.intervals import (
    interval_of,
    new_site_of,
    one_more_domain,
    over_seeds_and_groups,
    seeds_by_set,
    values_by_set,
)
from xdm_ft.evaluation.jackknife import effective_number, jackknife_variance, without_each_group
from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER, confidences, expected_calibration_error, per_image_nll
from xdm_ft.evaluation.predictions import HeldOutImages, Prediction
from xdm_ft.evaluation.records import Held, Record, Runs
from xdm_ft.evaluation.trials import picked_trials
from xdm_ft.evaluation.verdicts import FEWEST_SETS, Estimate, HeldOut
from xdm_ft.export.config import AtHeldOut, Expected
from xdm_ft.runtime.errors import UserError, plural
from xdm_ft.storage.checksummed import Arrays
from xdm_ft.storage.run_directory import RunDirectory


def promise(
    path: Path, results: Mapping[str, Any], records: Sequence[Record], rule: str, method: str
) -> Expected | None:
    """Returns what to expect of a method at a new site; None if no model of it has a test result.

    Args:
        path: the run directory, whose stored predictions give the intervals over images.
        results: its results.json. `records`: of its trained models.
        rule: the selection rule whose picks count.
    """
    protocol = results["recipe"]["protocol"]
    metric = str(protocol["metric"])
    picked = [one for one in picked_trials(records, rule, metric) if one.method == method]
    planned = tuple(dict.fromkeys(tuple(one["test_domains"]) for one in results["runs"]))
    tested = {held for held, _ in Runs(method, rule, metric, planned, tuple(picked)).values}
    runs = Runs(method, rule, metric, tuple(held for held in planned if held in tested), tuple(picked))
    if not tested:
        return None
    seeds, values = runs.complete_seeds, runs.values
    of_seeds, by_set = seeds_by_set(runs), values_by_set(runs)
    means = [float(np.mean([values[held, s] for held in runs.held_out])) for s in seeds]
    std = float(np.std(means, ddof=1)) if len(means) > 1 else None
    stored = {held: _Stored.read(path, runs, held, own) for held, own in of_seeds.items()}
    at = [_at(metric, runs, held, by_set[held], stored[held]) for held in runs.held_out]
    site = new_site_of(runs)
    mean = float(np.mean(means or [values.mean() for values in by_set.values()]))
    return Expected(
        source="official test" if protocol["name"] == "official" else "leave one domain out",
        data=str(results["recipe"]["data"]["name"]),
        method=method,
        selection=rule,
        metric=metric,
        mean=mean,
        std=std,
        stderr=None if std is None else std / len(means) ** 0.5,
        seeds=len(means),
        held_out=tuple(at),
        worst=_worst(metric, at),
        others=_others(runs, of_seeds),
        calibrated=_calibrated(stored.values()),
        new_site=None if site is None else site.between(metric),
        one_more_domain=one_more_domain(runs, results.get("data", {}).get("images", ())),
        **({} if site is None else site._asdict()),
        notes=tuple(_notes(runs, planned, at, stored.values())),
    )


class _Stored(NamedTuple):
    """The stored test predictions of one held-out set."""

    predictions: list[Prediction]  # in the order of the seeds; empty if one can not be read
    temperatures: list[float | None]
    missing: bool
    of_earlier_version: bool  # groups were not stored yet

    @classmethod
    def read(cls, path: Path, runs: Runs, held: Held, seeds: Sequence[int]) -> _Stored:
        directory, found = RunDirectory(path), list[Prediction]()
        own = {one.seed: one for one in runs.records if one.test_domains == held}
        temperatures = [own[seed].selected[runs.rule].temperature for seed in seeds]
        stored: Arrays = {}
        try:
            stored = directory.test_images(held)
            images = HeldOutImages.from_arrays(stored)
            for seed in seeds:
                arrays = directory.predictions(own[seed].folder)
                found.append(Prediction.from_arrays(arrays, images, own[seed].key, runs.rule))
        except (UserError, KeyError):  # without them the estimate has no intervals, and its notes say so
            found = []
        return cls(found, temperatures, not found, bool(stored) and "worst_of" not in stored)


def _at(metric: str, runs: Runs, held: Held, by_seed: np.ndarray, stored: _Stored) -> AtHeldOut:
    scores = [score for one in runs.records if one.test_domains == held and (score := runs.score(one)) is not None]
    interval, groups = None, None
    if stored.predictions:
        images = stored.predictions[0].images
        sizes = images.sizes
        groups = None if images.groups is None else len(sizes)
        estimate = error_at(metric, by_seed, stored.predictions, effective_number(sizes))
        interval = interval_of(metric, estimate, effective_number(sizes))
    return AtHeldOut(
        domains=held,
        value=float(by_seed.mean()),
        interval=interval,
        seeds=len(by_seed),
        images=scores[0].n,
        groups=groups,
        accuracies={
            name: float(np.mean([score.per_domain[name]["accuracy"] for score in scores]))
            for name in scores[0].per_domain
        },
    )


def error_at(metric: str, by_seed: np.ndarray, predictions: Sequence[Prediction], groups: float) -> Estimate | None:
    """The mean over seeds on one held-out set, with its error; None if that can not be estimated.

    `groups` is the effective number of groups of images.
    """
    if groups < 2 or (metric == "auroc" and any(one.per_image is None for one in predictions)):
        return None
    without = np.stack([without_each_group(metric, one) for one in predictions])  # [S,groups]
    return over_seeds_and_groups([HeldOut(by_seed, jackknife_variance(without.mean(0)), groups)])


def _worst(metric: str, at: Sequence[AtHeldOut]) -> tuple[str, float]:
    if len(at) == 1 and len(at[0].domains) > 1:  # of several domains in one set only accuracies are known
        domain = min(at[0].accuracies, key=lambda name: at[0].accuracies[name])
        return domain, at[0].accuracies[domain]
    sign = 1 if HIGHER_IS_BETTER[metric] else -1
    worst = min(at, key=lambda one: sign * one.value)
    return ", ".join(worst.domains), worst.value


def _others(runs: Runs, of_seeds: Mapping[Held, Sequence[int]]) -> dict[str, float]:
    """{other metric: mean over held-out sets of the means over seeds}; left out where it is not defined."""
    found = {}
    for name in HIGHER_IS_BETTER:
        if name == runs.metric or (name == "worst_domain_accuracy" and all(len(held) == 1 for held in of_seeds)):
            continue
        scores = {(one.test_domains, one.seed): runs.score(one) for one in runs.records}
        by_set = [[getattr(scores[held, seed], name) for seed in seeds] for held, seeds in of_seeds.items()]
        if all(value is not None for values in by_set for value in values):
            found[name] = float(np.mean([np.mean(values) for values in by_set]))
    return found


def _calibrated(stored: Iterable[_Stored]) -> dict[str, float] | None:
    """Means of ECE and NLL after the logits of every model are divided by its own fitted temperature."""
    ece, nll = [], []
    for one in stored:
        own = [_tempered(p, t) for p, t in zip(one.predictions, one.temperatures, strict=False)]
        known = [pair for pair in own if pair is not None]
        if not own or len(known) < len(own):
            return None
        ece.append(np.mean([pair[0] for pair in known]))
        nll.append(np.mean([pair[1] for pair in known]))
    return {"nll": float(np.mean(nll)), "ece": float(np.mean(ece))}


def _tempered(prediction: Prediction, temperature: float | None) -> tuple[float, float] | None:
    """ECE and NLL of a model with its temperature; None if its temperature or some probabilities are unknown."""
    if temperature is None or prediction.probabilities is None or prediction.probabilities.ndim == 1:
        return None
    # probabilities are float32: the smallest of them are 0, and a logarithm must be finite
    stored = torch.from_numpy(prediction.probabilities).double().clamp_min(torch.finfo(torch.float32).tiny)
    logits = stored.log() / temperature
    labels = prediction.images.labels
    right = prediction.predicted == labels
    nll = float(per_image_nll(logits, torch.from_numpy(labels)).mean())
    return expected_calibration_error(confidences(logits), right), nll


def _notes(runs: Runs, planned: Sequence[Held], at: Sequence[AtHeldOut], stored: Iterable[_Stored]) -> Iterable[str]:
    """Yields what limits the numbers."""
    lacking = [", ".join(held) for held in planned if held not in runs.held_out]
    if lacking:
        yield f"no result with {'; '.join(lacking)} held out"
    if any(one.missing for one in stored):
        yield "stored predictions are missing or damaged, so that some intervals are unknown"
    if any(one.groups is None for one in at):
        yield "images assumed independent: patients, slides or sequences are unknown" + (
            " (the run is of an earlier version, which did not store them)"
            if any(one.of_earlier_version for one in stored)
            else ""
        )
    if any(one.seeds == 1 for one in at):
        yield "one seed: intervals are over images alone"
    if len(at) == 1:
        yield "one held-out set: how much sites differ is unknown, so there is no interval for a new site"
    elif len(at) < FEWEST_SETS:
        yield f"{plural(len(at), 'held-out domain')}: too few to know how much sites differ, so there is no interval"
