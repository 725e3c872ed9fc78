"""Summarises one record per trained model to one row per method and selection rule: `summary` of results.json."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from xdm_ft.evaluation.conventions import Convention
from xdm_ft.evaluation.encoders import EncoderPair, encoder_pairs
from xdm_ft.evaluation.predictions import Prediction
from xdm_ft.evaluation.records import Point, Record, SummaryRow
from xdm_ft.evaluation.runs import SPLIT, Held, Runs, set_name
from xdm_ft.evaluation.versus import WithoutGroups, versus

ORACLE = "(oracle: picked on the test domain)"
_PICKED_ON = {
    "train_val": "on the validation images of the training domains, the mean over these",
    "val_domain": "on the validation domain",
    "cross_domain": "of extra models on the further training domain that each holds out, the mean over these",
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
    """Returns the line above a table. Numbers under different lines are not comparable.

    Args:
        data: name and size of the data set.
        split: how test and validation images were split off.
        notes: sentences on groups, encoder and loss; duplicates are dropped.
        selection: the selection rule.
        metric: the metric of selection and of the table.
        augmentation: of the training images; "none" for none.
        draws: draws of hyper-parameters per method, held-out domain and seed.
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


class Summary(NamedTuple):
    """What results.json says of all models of a run."""

    rows: list[SummaryRow]  # `summary`
    encoder_pairs: list[dict[str, Any]]  # `encoder_pairs`; empty in a run of one encoder


def summarise(
    records: Sequence[Record],
    predictions: Iterable[Prediction],
    *,
    methods: Sequence[str],
    rules: Sequence[str],
    metric: str,
    protocol_line: Callable[[str], str],
    references: Mapping[str, str],
    encoders: Sequence[str] = (),
    convention: Convention | None = None,
) -> Summary:
    """Returns one row per rule and method, in the order of `rules` and `methods`; methods without a record have none.

    Under one rule, the rows' differences to their references and those between encoders are one family of verdicts.

    A seed counts only if it has every held-out domain.

    Args:
        records: one per method, held-out domains and seed. Raises `ValueError` if there are two.
        predictions: of these models, those of a method and held-out set in the order of the seeds; they are read once
            and not kept. If some are missing, the row has no interval over seeds and images and no verdict, and its
            note says so.
        methods: labels of the recipe's methods.
        rules: selection rules.
        metric: the metric to summarise.
        protocol_line: selection rule → protocol line.
        references: method → the method that it is compared with, for methods that are compared.
        encoders: labels of several encoders, which each method is compared between; none for one encoder.
        convention: how the data set's benchmark measures spread; None if it has no convention.
    """
    _refuse_duplicates(records)
    held_out = tuple(dict.fromkeys(record.test_domains for record in records))
    by_method = {m: tuple(r for r in records if r.method == m) for m in methods}
    runs_by_rule = {
        rule: {m: Runs(m, rule, metric, held_out, own) for m, own in by_method.items() if own} for rule in rules
    }
    pairs = encoder_pairs([m for m, own in by_method.items() if own], encoders)
    comparisons = {rule: _comparisons(runs_of, references, pairs) for rule, runs_of in runs_by_rule.items()}
    without = WithoutGroups(metric, (pair for found in comparisons.values() for pair in found.values()), predictions)
    found = Summary([], [])
    for rule, runs_of in runs_by_rule.items():
        compared = versus(comparisons[rule], without)
        for method, reference in references.items():
            if method in compared:
                compared[method]["reference"] = reference
        between = {pair: compared[pair] for pair in pairs if pair in compared}
        found.encoder_pairs.extend({"selection": rule, **pair._asdict(), **of} for pair, of in between.items())
        for runs in runs_of.values():
            row = SummaryRow(
                method=runs.method,
                selection=rule,
                metric=metric,
                split=SPLIT,
                **_mean(runs, convention),
                per_test_domain=_per_test_domain(runs),
                versus_erm=compared.get(runs.method),
                protocol=protocol_line(rule),
                budget=_budget(runs),
                **_failures_and_gaps(runs),
            )
            found.rows.append(row)
    return found


def _comparisons(
    runs_of: Mapping[str, Runs], references: Mapping[str, str], pairs: Iterable[EncoderPair]
) -> dict[str | EncoderPair, tuple[Runs, Runs]]:
    """Returns both sides of every comparison: methods with their references, then pairs of encoders."""
    with_erm = {m: references[m] for m in runs_of if references.get(m, m) in runs_of.keys() - {m}}
    found: dict[str | EncoderPair, tuple[Runs, Runs]] = {m: (runs_of[m], runs_of[r]) for m, r in with_erm.items()}
    return found | {pair: (runs_of[pair.rows[0]], runs_of[pair.rows[1]]) for pair in pairs}


def _refuse_duplicates(records: Sequence[Record]) -> None:
    seen: set[tuple[str, Held, int]] = set()
    for record in records:
        key = record.key[:3]
        if key in seen:
            raise ValueError(f"two records of {key}: a summary needs one per method, held-out domains and seed")
        seen.add(key)


class Spread(NamedTuple):
    """Mean and spread of one value per seed."""

    mean: float | None  # None without a value
    std: float | None  # ddof 1; None for fewer than two
    stderr: float | None  # std / √n
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        std = float(np.std(values, ddof=1)) if len(values) > 1 else None
        stderr = None if std is None else float(std / np.sqrt(len(values)))
        return cls(float(np.mean(values)) if values else None, std, stderr, len(values))


def _mean(runs: Runs, convention: Convention | None) -> dict[str, Any]:
    """Averages the held-out domains within a seed, then takes mean and spread over seeds."""
    means = [float(np.mean(values)) for values in runs.by_seed]
    published = None if convention is None else {"kind": convention.kind, "value": convention.value(means)}
    return Spread.of(means)._asdict() | {"spread_as_published": published}


def _budget(runs: Runs) -> dict[str, Any]:
    """Draws of hyper-parameters, and the range of gradient evaluations per model."""
    counts = [r.gradient_evaluations for r in runs.records if r.gradient_evaluations is not None]
    return {
        "draws": len({r.trial for r in runs.records}),
        "gradient_evaluations": {"low": min(counts), "high": max(counts)} if counts else None,
    }


def _per_test_domain(runs: Runs) -> dict[str, Point]:
    """Mean and std of each held-out domain, over all seeds that have it.

    If one model is tested on several domains (official split), each domain has its accuracy. Other metrics are known
    only for all test images together.
    """
    found: dict[str, list[float]] = {}
    for record in sorted(runs.records, key=lambda r: runs.held_out.index(r.test_domains)):
        score, value, held = runs.score(record), runs.value(record), record.test_domains
        if score is None or value is None:
            continue
        if len(held) > 1 and runs.metric in ("accuracy", "worst_domain_accuracy"):
            # for worst_domain_accuracy the columns show the accuracies whose minimum it is
            columns = {domain: entry["accuracy"] for domain, entry in score.per_domain.items()}
        else:
            columns = {set_name(held): value}
        for domain, of_domain in columns.items():
            found.setdefault(domain, []).append(of_domain)
    return {
        domain: {"mean": float(np.mean(v)), "std": float(np.std(v, ddof=1)) if len(v) > 1 else None}
        for domain, v in found.items()
    }


def _failures_and_gaps(runs: Runs) -> dict[str, Any]:
    """Counts of failed and skipped models, and one line of reasons for missing values; empty if nothing is missing."""
    failed = [r for r in runs.records if r.status == "failed"]
    skipped = [r for r in runs.records if r.status == "skipped"]
    planned, done = len(runs.held_out) * len(runs.planned_seeds), len(runs.values)
    found: dict[str, Any] = {"failed": len(failed)} if failed else {}
    if skipped:
        found["skipped"] = len(skipped)
    reasons = [
        f"{len(records)} of {planned} runs {status}: " + "; ".join(dict.fromkeys(str(r.reason) for r in records))
        for status, records in (("failed", failed), ("skipped", skipped))
        if records
    ]
    undefined = sum(runs.value(r) is None and runs.score(r) is not None for r in runs.records)
    if undefined:
        reasons.append(f"{runs.metric} is not defined on the test images of {undefined} of {planned} runs")
    unpicked = sum(r.status == "ok" and runs.rule not in r.selected for r in runs.records)
    if unpicked:
        reasons.append(f"{runs.rule} could pick no step of {unpicked} of {planned} runs: {runs.metric} is not defined")
    # the rest has no record: runs of an interrupted experiment
    missing = planned - done - len(failed) - len(skipped) - undefined - unpicked
    if missing:
        reasons.append(f"{missing} of {planned} runs are missing")
    seeds = len(runs.complete_seeds)
    if reasons and done:
        reasons.append(
            f"the mean counts the {seeds} of {len(runs.planned_seeds)} seeds that have every held-out domain"
        )
    return found | ({"reason": "; ".join(reasons)} if reasons else {})
