"""Runs with given values and verdicts, as `read_run` would return them, without a directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from example_runs import comparison, with_comparisons

from xdm_ft.evaluation.records import ModelKey, Pick, Record, SummaryRow, split_label
from xdm_ft.evaluation.verdicts import EQUAL, UNKNOWN, Comparison
from xdm_ft.report.finished import Run
from xdm_ft.runtime.tensors import Score

NOTE = "images assumed independent"
Values = Mapping[str, Mapping[str, float]]  # {method: {held-out domain: value of the metric}}


def record(method: str, held: tuple[str, ...], seed: int, value: float, chosen_by: float | None, rule: str) -> Record:
    names = ("accuracy", "balanced_accuracy", "macro_f1", "auroc", "worst_domain_accuracy", "nll", "ece")
    score = Score(
        **dict.fromkeys(names, value),
        n=10,
        per_class_recall={},
        per_domain={name: {"accuracy": value, "n": 10} for name in held},
    )
    return Record(
        ModelKey(method, held, seed, 0), {}, "ok", selected={rule: Pick(3, "w", {"test": score}, value=chosen_by)}
    )


def run(
    values: Values,
    *,
    verdicts: Mapping[str, str] | None = None,
    chosen_by: Mapping[str, float] | None = None,
    seeds: int = 3,
    rule: str = "train_val",
    metric: str = "accuracy",
    note: str = NOTE,
    failed: Sequence[str] = (),
    path: Path = Path("output/made"),
    sets: Sequence[tuple[str, ...]] | None = None,
    tested_on: str = "domains never trained on",
    encoders: Sequence[str] = (),
    further: Sequence[Comparison] = (),
) -> Run:
    """The first method is ERM. `chosen_by`: {method: selection value}, by default its mean test value.

    With several `encoders`, methods are called METHOD @ ENCODER, and the first one of each encoder is ERM. `verdicts`:
    here and elsewhere, as in "better, unknown"; by default there is no clear difference. `further`: comparisons that
    stand beside no row.
    """
    rows, records, runs, compared = [], list[Record](), list[dict[str, Any]](), list[Comparison]()
    first = {split_label(method, encoders)[1]: method for method in reversed(list(values))}
    for method, by_domain in values.items():
        reference = first[split_label(method, encoders)[1]]
        mean = float(np.mean([*by_domain.values()]))
        picked = (chosen_by or {}).get(method, mean)
        own = [
            record(method, held, seed, float(np.mean([by_domain[name] for name in held])), picked, rule)
            for held in (sets or [(name,) for name in by_domain])
            for seed in range(seeds)
        ]
        reason = f"1 of {len(own)} runs failed: the loss was not finite" if method in failed else None
        difference = mean - float(np.mean([*values[reference].values()]))
        here, _, elsewhere = (verdicts or {}).get(method, EQUAL).partition(", ")
        number = len(sets or by_domain)
        shape = {"sets": number, "domains": len(by_domain), "seeds": seeds, "selection": rule, "note": note}
        shape |= {} if number > 1 else {"error_elsewhere": None, "p_elsewhere": None}
        versus = comparison(method, reference, difference, here, elsewhere or UNKNOWN, **shape)
        compared += [versus] if method != reference else []
        rows.append(
            SummaryRow(
                method, rule, metric, "test",
                mean=None if reason else mean, std=0.01, stderr=None if seeds == 1 else 0.004, n=seeds,
                spread_as_published=None,
                per_test_domain={name: {"mean": value, "std": None} for name, value in by_domain.items()},
                versus_erm=None if method == reference else versus.versus_erm(),
                protocol="p", budget={"draws": 1, "gradient_evaluations": None},
                failed=1 if reason else None, reason=reason,
            )
        )  # fmt: skip
        records += own[1:] if reason else own
        runs += [{**one.to_json(), **({"status": "failed"} if reason and one is own[0] else {})} for one in own]
    recipe = {
        "name": "made",
        "protocol": {"selection": rule, "metric": metric},
        "methods": [
            {"name": "erm" if method in first.values() else "m", "label": split_label(method, encoders)[0]}
            for method in values
        ],
    }
    if encoders:
        recipe["encoders"] = [{"label": one} for one in encoders]
    results = {"recipe": recipe, "runs": runs, "summary": [row.to_json() for row in rows], "tested_on": tested_on}
    return Run(path, with_comparisons(results, *compared, *further), records, rows)
