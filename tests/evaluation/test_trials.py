"""What selection picks among trials, methods and models; test results have no say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from xdm_ft.evaluation.records import Pick, Record, Status, SummaryRow
from xdm_ft.evaluation.trials import best, picked_model, picked_trials, selection_values


def record(
    method: str, seed: int, value: float | None, status: Status = "ok", held: str = "a", trial: int = 0
) -> Record:
    picked = {"train_val": Pick(step=1, weights="", metrics={}, value=value)} if status == "ok" else {}
    return Record(method, (held,), seed, trial, {}, status, selected=picked)


def summary(**means: float | None) -> list[SummaryRow]:
    about: dict[str, Any] = {"selection": "train_val", "metric": "accuracy", "split": "test", "protocol": "", "n": 1}
    rest: dict[str, Any] = dict.fromkeys(("std", "stderr", "spread_as_published", "versus_erm"))
    return [SummaryRow(name, mean=mean, per_test_domain={}, budget={}, **about, **rest) for name, mean in means.items()]


def test_test_means_have_no_say() -> None:
    runs = [record("erm", 0, 0.9), record("erm", 1, 0.7), record("irm", 0, 0.75), record("irm", 1, 0.75)]
    values = selection_values(runs, summary(irm=0.99, erm=0.2), "train_val", "accuracy")
    assert values == {"irm": 0.75, "erm": pytest.approx(0.8)}
    assert best(values, "accuracy") == "erm" and best(values, "nll") == "irm"
    assert best({"b": 0.5, "a": 0.5}, "accuracy") == "b", "the first of equals"


def test_only_methods_with_a_value_in_every_run_can_be_chosen() -> None:
    runs = [record("erm", 0, 0.5), record("irm", 0, 0.9), record("irm", 1, 0.9, "failed"), record("rsc", 0, None)]
    rows = summary(erm=0.1, irm=0.1, rsc=0.1)
    assert selection_values(runs, rows, "train_val", "accuracy") == {"erm": 0.5}
    runs = [record("erm", 0, 0.5, trial=1), record("erm", 0, 0.5, "failed", trial=0)]
    assert selection_values(runs, rows, "train_val", "accuracy") == {"erm": 0.5}
    assert selection_values(runs, summary(erm=None), "train_val", "accuracy") == {}
    troubled = [replace(row, reason="auroc is not defined") for row in summary(erm=0.5)]
    assert selection_values(runs, troubled, "train_val", "accuracy") == {}


def test_the_best_model_of_a_method() -> None:
    runs = [record("erm", 0, 0.7), record("erm", 1, 0.9), record("erm", 0, 0.9, held="b"), record("erm", 1, None)]
    assert picked_model(runs, "train_val", "accuracy") is runs[1], "the first of equals"
    assert picked_model(runs, "train_val", "nll") is runs[0]
    assert picked_model([record("erm", 0, 0.9, "failed"), runs[0]], "train_val", "accuracy") is runs[0]
    for none in ([], runs[3:], [record("erm", 0, 0.9, "failed")]):
        assert picked_model(none, "train_val", "accuracy") is None
    tested = replace(runs[0], selected={"oracle": runs[0].selected["train_val"]})
    assert picked_model([tested], "oracle", "accuracy") is None, "its values are test results"


def test_the_trial_of_the_best_value_or_the_first() -> None:
    trials = [record("erm", 0, None), record("erm", 0, 0.6, trial=1), record("erm", 0, 0.8, trial=2)]
    assert picked_trials(trials, "train_val", "accuracy") == [trials[2]]
    assert picked_trials(trials, "train_val", "nll") == [trials[1]]
    assert picked_trials(trials[:1], "train_val", "accuracy") == trials[:1]
