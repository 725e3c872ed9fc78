"""From one record per trained model to one row per method: the `summary` of results.json.

R, a record: {"method", "test_domains", "seed", "status", "reason"?, "selected": {rule: {"metrics": {split: …}}}, …}.
S, a row: {"method", "selection", "metric", "split", "mean", "std", "stderr", "n", "spread_as_published"?,
"per_test_domain", "versus_erm", "protocol", "budget"}, and where something did not go as planned "failed", "skipped"
(how many records) and "reason".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from xdm_ft.evaluation.conventions import Convention
from xdm_ft.evaluation.predictions import Prediction
from xdm_ft.evaluation.runs import SPLIT, Held, Record, Runs, held_out_of
from xdm_ft.evaluation.versus import WithoutGroups, versus

ORACLE = "(oracle: picked on the test domain)"
_PICKED_ON = {
    "train_val": "on the validation images of the training domains, the mean over these",
    "val_domain": "on the validation domain",
    "cross_domain": "as best on training domains that extra models left out, their mean",
    "oracle": ORACLE,
}


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
    references: Mapping[str, str],
    convention: Convention | None = None,
) -> list[dict[str, Any]]:
    """One S per rule and method, in the order of `rules` and `methods`; methods without a record are left out.

    A seed counts only if all its held-out domains are there. `predictions` may lack runs (those of an earlier code, for
    example): the interval over seeds and images is then missing, there is no verdict, and the note says so.
    `references`: method → the one that it is compared with, for methods that have one. `convention` is how tables of
    the data set's benchmark are printed, where there is one.
    """
    _refuse_doubles(runs)
    held_out = tuple(dict.fromkeys(held_out_of(r) for r in runs))
    by_method = {m: tuple(r for r in runs if r["method"] == m) for m in methods}
    without = WithoutGroups(metric, held_out, predictions)
    rows = []
    for rule in rules:
        views = {m: Runs(m, rule, metric, held_out, records) for m, records in by_method.items() if records}
        pairs = {m: views[references[m]] for m in views if references.get(m) in views}
        compared = versus(views, pairs, without)
        for view in views.values():
            row: dict[str, Any] = {"method": view.method, "selection": rule, "metric": metric, "split": SPLIT}
            row |= _spread(view, convention)
            row |= {"per_test_domain": _per_test_domain(view), "versus_erm": compared.get(view.method)}
            row["protocol"] = protocol_line(rule)
            rows.append(row | {"budget": _budget(view)} | _troubles(view))
    return rows


def _refuse_doubles(runs: Sequence[Record]) -> None:
    seen: set[tuple[str, Held, int]] = set()
    for r in runs:
        key = (r["method"], held_out_of(r), r["seed"])
        if key in seen:
            raise ValueError(f"two records of {key}: a summary needs one per method, held-out domains and seed")
        seen.add(key)


def _spread(view: Runs, convention: Convention | None) -> dict[str, Any]:
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


def _budget(view: Runs) -> dict[str, Any]:
    """What its models cost: hyper-parameter draws, and gradient evaluations of one model, which may differ between."""
    counts = [r["gradient_evaluations"] for r in view.records if "gradient_evaluations" in r]
    return {
        "draws": len({r["trial"] for r in view.records}),
        "gradient_evaluations": {"low": min(counts), "high": max(counts)} if counts else None,
    }


def _per_test_domain(view: Runs) -> dict[str, dict[str, float | None]]:
    """Mean and std over all seeds that have the domain.

    Where one model is tested on several domains at once, the accuracies are told per domain; other metrics are known
    for the test images as a whole only.
    """
    found: dict[str, list[float]] = {}
    for record in sorted(view.records, key=lambda r: view.held_out.index(held_out_of(r))):
        value, held = view.value(record), held_out_of(record)
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


def _troubles(view: Runs) -> dict[str, Any]:
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
