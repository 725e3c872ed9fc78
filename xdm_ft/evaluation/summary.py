"""From one record per trained model to one row per method: the `summary` of results.json.

R, a record: {"method", "test_domains", "seed", "status", "reason"?, "selected": {rule: {"metrics": {split: …}}}, …}.
S, a row: {"method", "selection", "metric", "split", "mean", "std", "stderr", "n", "spread_as_published"?,
"per_test_domain", "versus_erm", "protocol", "budget"}, and where something did not go as planned "failed", "skipped"
(how many records) and "reason".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np

from xdm_ft.evaluation.conventions import Convention
from xdm_ft.evaluation.intervals import (
    Interval,
    bootstrap,
    number_of_groups,
    percentile_interval,
    t_interval,
    verdict,
)
from xdm_ft.evaluation.predictions import Prediction

SPLIT = "test"
FEW_GROUPS = 10  # below, percentile intervals are known to be too narrow
ORACLE = "(oracle: picked on the test domain)"
_PICKED_ON = {
    "train_val": "on validation images of the training domains",
    "val_domain": "on the validation domain",
    "cross_domain": "as best on training domains that extra models left out, their mean",
    "oracle": ORACLE,
}

Held = tuple[str, ...]  # the test domains of one model: one (leave one domain out) or several (an official split)
Record = Mapping[str, Any]


@dataclass(frozen=True)
class _Runs:
    """The records of one method, read under one selection rule."""

    method: str
    rule: str
    metric: str
    held_out: tuple[Held, ...]  # all that the experiment holds out, in order
    records: tuple[Record, ...]

    def value(self, record: Record) -> float | None:
        return self.metrics(record).get(self.metric)

    def metrics(self, record: Record) -> Mapping[str, Any]:
        selected = record.get("selected", {}).get(self.rule)
        return selected["metrics"][SPLIT] if record["status"] == "ok" and selected else {}

    @property
    def planned_seeds(self) -> list[int]:
        return sorted({record["seed"] for record in self.records})

    @property
    def values(self) -> dict[tuple[Held, int], float]:
        """(Held-out domains, seed) → the metric, for the records that have it."""
        pairs = ((_held(r), r["seed"], self.value(r)) for r in self.records)
        return {(held, seed): value for held, seed, value in pairs if value is not None}

    @property
    def complete_seeds(self) -> list[int]:
        """The seeds that count: those with a value for every held-out domain."""
        values = self.values
        return [seed for seed in self.planned_seeds if all((held, seed) in values for held in self.held_out)]


def protocol_line(
    *,
    data: str,
    split: str,
    notes: Iterable[str],
    selection: str,
    metric: str,
    augmentation: str,
    draws: int,
) -> str:
    """The one line that says what numbers mean; numbers under different lines are not comparable.

    `data`: what and how much; `split`: how test and validation images came about; `notes`: grouping and whatever else
    the splits must say; `selection`: rule; `augmentation`: of the training images ("none", …); `draws`: of
    hyper-parameters per method, held-out domain and seed.
    """
    words = metric.replace("_", " ")
    parts = [
        data,
        split,
        *dict.fromkeys(notes),
        f"step picked by {words} {_PICKED_ON[selection]}",
        f"test {words}",
        "no augmentation" if augmentation == "none" else f"augmentation {augmentation}",
        f"{draws} hyper-parameter draw{'s' if draws != 1 else ''}",
        "± is the standard error over seeds (ddof 1), held-out domains averaged within a seed",
    ]
    return " ".join("; ".join(parts).split())


def summarise(
    runs: Sequence[Record],
    predictions: Sequence[Prediction],
    *,
    methods: Sequence[str],
    rules: Sequence[str],
    metric: str,
    protocol_line: Callable[[str], str],
    reference: str = "erm",
    convention: Convention | None = None,
) -> list[dict[str, Any]]:
    """One S per rule and method, in the order of `rules` and `methods`; methods without a record are left out.

    A seed counts only if all its held-out domains are there. `predictions` may lack runs (those of an earlier code, for
    example): the interval over images is then missing and the note says so. `reference` is the label of plain ERM,
    `convention` how tables of the data set's benchmark are printed, where there is one.
    """
    _refuse_doubles(runs)
    held_out = tuple(dict.fromkeys(_held(r) for r in runs))
    by_method = {m: tuple(r for r in runs if r["method"] == m) for m in methods}
    resampled = _Resampled(metric, held_out, predictions)
    rows = []
    for rule in rules:
        views = {m: _Runs(m, rule, metric, held_out, records) for m, records in by_method.items() if records}
        for view in views.values():
            row: dict[str, Any] = {"method": view.method, "selection": rule, "metric": metric, "split": SPLIT}
            row |= _spread(view, convention)
            row |= {"per_test_domain": _per_test_domain(view), "versus_erm": None, "protocol": protocol_line(rule)}
            if reference in views and view.method != reference:
                row["versus_erm"] = _versus(view, views[reference], resampled)
            rows.append(row | {"budget": _budget(view)} | _troubles(view))
    return rows


def _held(record: Record) -> Held:
    return tuple(record["test_domains"])


def _refuse_doubles(runs: Sequence[Record]) -> None:
    seen: set[tuple[str, Held, int]] = set()
    for r in runs:
        key = (r["method"], _held(r), r["seed"])
        if key in seen:
            raise ValueError(f"two records of {key}: a summary needs one per method, held-out domains and seed")
        seen.add(key)


def _spread(view: _Runs, convention: Convention | None) -> dict[str, Any]:
    """Average the held-out domains within a seed, then spread over seeds."""
    values = view.values
    means = [float(np.mean([values[held, seed] for held in view.held_out])) for seed in view.complete_seeds]
    std = float(np.std(means, ddof=1)) if len(means) > 1 else None
    spread: dict[str, Any] = {
        "mean": float(np.mean(means)) if means else None,
        "std": std,
        "stderr": None if std is None else float(std / np.sqrt(len(means))),
        "n": len(means),
    }
    if convention is not None:
        spread["spread_as_published"] = {"kind": convention.kind, "value": convention.value(means)}
    return spread


def _budget(view: _Runs) -> dict[str, Any]:
    """What its models cost: hyper-parameter draws, and gradient evaluations of one model, which may differ between."""
    counts = [r["gradient_evaluations"] for r in view.records if "gradient_evaluations" in r]
    return {
        "draws": len({r["trial"] for r in view.records}),
        "gradient_evaluations": {"low": min(counts), "high": max(counts)} if counts else None,
    }


def _per_test_domain(view: _Runs) -> dict[str, dict[str, float | None]]:
    """Mean and std over all seeds that have the domain.

    Where one model is tested on several domains at once, the accuracies are told per domain; other metrics are known
    for the test images as a whole only.
    """
    found: dict[str, list[float]] = {}
    for record in sorted(view.records, key=lambda r: view.held_out.index(_held(r))):
        value, held = view.value(record), _held(record)
        if value is None:
            continue
        if len(held) > 1 and view.metric in ("accuracy", "worst_domain_accuracy"):
            columns = {d: entry["accuracy"] for d, entry in view.metrics(record)["per_domain"].items()}
        else:
            columns = {" + ".join(held): value}
        for domain, share in columns.items():
            found.setdefault(domain, []).append(share)
    return {
        domain: {"mean": float(np.mean(v)), "std": float(np.std(v, ddof=1)) if len(v) > 1 else None}
        for domain, v in found.items()
    }


def _troubles(view: _Runs) -> dict[str, Any]:
    """What did not go as planned: counts and one line of reasons; empty where all went well."""
    failed = [r for r in view.records if r["status"] == "failed"]
    skipped = [r for r in view.records if r["status"] == "skipped"]
    planned, done = len(view.held_out) * len(view.planned_seeds), len(view.values)
    found: dict[str, Any] = {"failed": len(failed)} if failed else {}
    if skipped:
        found["skipped"] = len(skipped)
    reasons = [
        f"{len(records)} of {planned} runs {status}: " + "; ".join(dict.fromkeys(r["reason"] for r in records))
        for status, records in (("failed", failed), ("skipped", skipped))
        if records
    ]
    undefined = sum(view.value(r) is None and bool(view.metrics(r)) for r in view.records)
    if undefined:
        reasons.append(f"{view.metric} is not defined on the test images of {undefined} of {planned} runs")
    unpicked = sum(r["status"] == "ok" and view.rule not in r["selected"] for r in view.records)
    if unpicked:
        reasons.append(f"{view.rule} could pick no step of {unpicked} of {planned} runs: {view.metric} is not defined")
    missing = planned - done - len(failed) - len(skipped) - undefined - unpicked
    if missing:
        reasons.append(f"{missing} of {planned} runs are missing")
    seeds = len(view.complete_seeds)
    if reasons and done:
        reasons.append(
            f"the mean counts the {seeds} of {len(view.planned_seeds)} seeds that have every held-out domain"
        )
    return found | ({"reason": "; ".join(reasons)} if reasons else {})


class _Resampled:
    """Bootstrap draws of the metric for every prediction, computed once per set of test domains."""

    def __init__(self, metric: str, held_out: Sequence[Held], predictions: Sequence[Prediction]) -> None:
        self.draws: dict[tuple[str, str, Held, int], np.ndarray] = {}
        self.groups: dict[Held, int] = {}
        self.independent: set[Held] = set()  # held-out domains whose groups are unknown
        for held in held_out:
            runs = [p for p in predictions if tuple(p.test_domains) == held]
            if metric == "auroc":
                runs = [p for p in runs if p.per_image is not None]  # None where it is not defined
            if not runs:
                continue
            self.groups[held] = number_of_groups(runs[0])
            if runs[0].groups is None:
                self.independent.add(held)
            key = crc32("\n".join(held).encode())  # by name: other held-out domains must not change the draws
            for p, draws in zip(runs, bootstrap(metric, runs, key).T, strict=True):
                self.draws[p.rule, p.method, held, p.seed] = draws

    def mean(self, view: _Runs, held: Held, seeds: Sequence[int]) -> np.ndarray | None:
        """Draws [DRAWS] of the mean over seeds; None where a prediction is missing."""
        draws = [self.draws.get((view.rule, view.method, held, seed)) for seed in seeds]
        known = [d for d in draws if d is not None]
        return np.mean(known, axis=0) if len(known) == len(draws) else None


def _paired_seeds(view: _Runs, erm: _Runs) -> tuple[list[int], list[int]]:
    """The seeds to compare on either side: those that both completed.

    A method with one seed where the other has several is a deterministic one: it is paired by domain, each side
    averaging its own seeds.
    """
    own, theirs = view.complete_seeds, erm.complete_seeds
    planned = len(view.planned_seeds), len(erm.planned_seeds)
    if min(planned) == 1 < max(planned):
        return own, theirs
    common = [seed for seed in own if seed in theirs]
    return common, common


def _versus(view: _Runs, erm: _Runs, resampled: _Resampled) -> dict[str, Any] | None:
    """The difference to ERM, paired by held-out domain and seed; None where there is nothing to pair."""
    own, theirs = _paired_seeds(view, erm)
    if not own or not theirs:
        return None
    ours, base = view.values, erm.values
    differences = [
        float(np.mean([ours[held, s] for s in own]) - np.mean([base[held, s] for s in theirs]))
        for held in view.held_out
    ]
    domains = t_interval(differences)
    images, notes = _image_interval(view, erm, own, theirs, resampled)
    if domains is None:
        notes.insert(0, "variation between domains not estimated")
    if own != theirs:
        notes.append("paired by domain, seeds averaged on each side")
    return {
        "difference": float(np.mean(differences)),
        "domains": domains._asdict() if domains else None,
        "images": images._asdict() if images else None,
        "verdict": verdict(view.metric, [domains, images]),
        "note": "; ".join(notes),
    }


def _image_interval(
    view: _Runs, erm: _Runs, own: Sequence[int], theirs: Sequence[int], resampled: _Resampled
) -> tuple[Interval | None, list[str]]:
    """The test images of every held-out domain resampled, the domains themselves kept; and what to know about it."""
    draws = []
    for held in view.held_out:
        left, right = resampled.mean(view, held, own), resampled.mean(erm, held, theirs)
        if left is None or right is None:
            return None, ["variation between images not estimated: predictions are missing"]
        draws.append(left - right)
    fewest = min(resampled.groups[held] for held in view.held_out)
    if fewest < 2:
        return None, ["variation between images not estimated: all test images of a domain are one group"]
    notes = []
    if resampled.independent:
        notes.append("images assumed independent")
    if fewest < FEW_GROUPS:
        notes.append(f"only {fewest} groups in a test domain: the interval over images is too narrow")
    return percentile_interval(np.mean(draws, axis=0)), notes
