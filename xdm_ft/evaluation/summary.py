"""From one record per trained model to one row per method: the `summary` of results.json."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from xdm_ft.evaluation.conventions import Convention
from xdm_ft.evaluation.predictions import Prediction
from xdm_ft.evaluation.records import Point, Record, SummaryRow
from xdm_ft.evaluation.runs import SPLIT, Held, Runs
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
) -> list[SummaryRow]:
    """One row per rule and method, in the order of `rules` and `methods`; methods without a record are left out.

    A seed counts only if all its held-out domains are there. `predictions` may lack runs (those of an earlier code, for
    example): the interval over seeds and images is then missing, there is no verdict, and the note says so.
    `references`: method → the one that it is compared with, for methods that have one. `convention` is how tables of
    the data set's benchmark are printed, where there is one.
    """
    _refuse_doubles(runs)
    held_out = tuple(dict.fromkeys(record.test_domains for record in runs))
    by_method = {m: tuple(r for r in runs if r.method == m) for m in methods}
    without = WithoutGroups(metric, held_out, predictions)
    rows = []
    for rule in rules:
        views = {m: Runs(m, rule, metric, held_out, records) for m, records in by_method.items() if records}
        pairs = {m: views[references[m]] for m in views if references.get(m) in views}
        compared = versus(views, pairs, without)
        for view in views.values():
            row = SummaryRow(
                method=view.method,
                selection=rule,
                metric=metric,
                split=SPLIT,
                **_spread(view, convention),
                per_test_domain=_per_test_domain(view),
                versus_erm=compared.get(view.method),
                protocol=protocol_line(rule),
                budget=_budget(view),
                **_troubles(view),
            )
            rows.append(row)
    return rows


def _refuse_doubles(runs: Sequence[Record]) -> None:
    seen: set[tuple[str, Held, int]] = set()
    for r in runs:
        key = r.key[:3]
        if key in seen:
            raise ValueError(f"two records of {key}: a summary needs one per method, held-out domains and seed")
        seen.add(key)


def _spread(view: Runs, convention: Convention | None) -> dict[str, Any]:
    """Average the held-out domains within a seed, then spread over seeds."""
    values = view.values
    means = [float(np.mean([values[held, seed] for held in view.held_out])) for seed in view.complete_seeds]
    std = float(np.std(means, ddof=1)) if len(means) > 1 else None
    published = None if convention is None else {"kind": convention.kind, "value": convention.value(means)}
    return {
        "mean": float(np.mean(means)) if means else None,
        "std": std,
        "stderr": None if std is None else float(std / np.sqrt(len(means))),
        "n": len(means),
        "spread_as_published": published,
    }


def _budget(view: Runs) -> dict[str, Any]:
    """What its models cost: hyper-parameter draws, and gradient evaluations of one model, which may differ between."""
    counts = [r.gradient_evaluations for r in view.records if r.gradient_evaluations is not None]
    return {
        "draws": len({r.trial for r in view.records}),
        "gradient_evaluations": {"low": min(counts), "high": max(counts)} if counts else None,
    }


def _per_test_domain(view: Runs) -> dict[str, Point]:
    """Mean and std over all seeds that have the domain.

    Where one model is tested on several domains at once, accuracies are given per domain; other metrics are known for
    the test images as a whole only.
    """
    found: dict[str, list[float]] = {}
    for record in sorted(view.records, key=lambda r: view.held_out.index(r.test_domains)):
        score, value, held = view.score(record), view.value(record), record.test_domains
        if score is None or value is None:
            continue
        if len(held) > 1 and view.metric in ("accuracy", "worst_domain_accuracy"):
            columns = {domain: entry["accuracy"] for domain, entry in score.per_domain.items()}
        else:
            columns = {" + ".join(held): value}
        for domain, of_domain in columns.items():
            found.setdefault(domain, []).append(of_domain)
    return {
        domain: {"mean": float(np.mean(v)), "std": float(np.std(v, ddof=1)) if len(v) > 1 else None}
        for domain, v in found.items()
    }


def _troubles(view: Runs) -> dict[str, Any]:
    """What did not go as planned: counts and one line of reasons; empty where all went well."""
    failed = [r for r in view.records if r.status == "failed"]
    skipped = [r for r in view.records if r.status == "skipped"]
    planned, done = len(view.held_out) * len(view.planned_seeds), len(view.values)
    found: dict[str, Any] = {"failed": len(failed)} if failed else {}
    if skipped:
        found["skipped"] = len(skipped)
    reasons = [
        f"{len(records)} of {planned} runs {status}: " + "; ".join(dict.fromkeys(str(r.reason) for r in records))
        for status, records in (("failed", failed), ("skipped", skipped))
        if records
    ]
    undefined = sum(view.value(r) is None and view.score(r) is not None for r in view.records)
    if undefined:
        reasons.append(f"{view.metric} is not defined on the test images of {undefined} of {planned} runs")
    unpicked = sum(r.status == "ok" and view.rule not in r.selected for r in view.records)
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
