from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from example_runs import comparison, run_of

from xdm_ft.evaluation.looks import Look
from xdm_ft.evaluation.metrics import score
from xdm_ft.evaluation.records import Record
from xdm_ft.evaluation.summary import summarise
from xdm_ft.report.markdown import markdown
from xdm_ft.report.sections import brief_sections

EXAMPLE = Path(__file__).parent / "results_example.json"
SCHEMA = json.loads(files("xdm_ft.report").joinpath("results.schema.json").read_text(encoding="utf-8"))


@pytest.fixture
def results() -> dict[str, Any]:
    return json.loads(EXAMPLE.read_text(encoding="utf-8"))


def validate(document: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(document)


def test_the_schema_itself_and_the_example(results: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    validate(results)


def test_what_the_code_makes_is_valid(results: dict[str, Any]) -> None:
    logits = torch.tensor([[2.0, 0.0, 1.0], [0.0, 1.0, 0.5], [0.3, 0.2, 0.1]])
    made = score(logits, torch.tensor([0, 1, 1]), torch.tensor([0, 0, 2]), ["cat", "dog", "elk"], ["a", "b", "c"])
    for run in results["runs"]:
        for selected in run.get("selected", {}).values():
            selected["metrics"] = {"test": asdict(made)}
            selected.setdefault("weights", "")
    methods = list(dict.fromkeys(run["method"] for run in results["runs"]))
    records = [Record.from_json({"hparams": {}, "selected": {}, "trial": 0} | run) for run in results["runs"]]
    found = [
        summarise(
            records,
            [],
            methods=methods,
            rule=rule,
            metric="accuracy",
            protocol=f"by {rule}",
            references={method: "erm" for method in methods if method != "erm"},
        )
        for rule in ("train_val", "oracle")
    ]
    results["summary"] = [row.to_json() for one in found for row in one.rows]
    rows = [row for one in found for row in one.comparisons] + [
        comparison("sam|wide", here="better", elsewhere="better")
    ]
    results["comparisons"] = [row.to_json() for row in rows]
    looks = [Look([0, 1, 2], methods, {"erm": [1]}, 0.05, [["sam|wide", "erm"]]).with_found(rows)]
    results["looks"] = [look.to_json() for look in looks]
    assert len(results["summary"]) == len(methods) * 2 and len(rows) == 2 * 2 + 1 and len(looks[0].found) == 1
    validate(results)
    run = run_of(results)
    assert (
        markdown(run, brief_sections(run)).count("| 66.7 ± 0.0 | 2 |") == 2 * 2
    )  # two methods with two seeds, under two rules


def forget_the_reason(results: dict[str, Any]) -> None:
    del next(run for run in results["runs"] if run["status"] == "failed")["reason"]


def forget_the_metrics(results: dict[str, Any]) -> None:
    del results["runs"][0]["selected"]


def score_in_percent(results: dict[str, Any]) -> None:
    results["runs"][0]["selected"]["train_val"]["metrics"]["test"]["accuracy"] = 61.0


def invent_a_key(results: dict[str, Any]) -> None:
    results["summary"][0]["medain"] = 0.5


def invent_a_verdict(results: dict[str, Any]) -> None:
    results["summary"][0]["versus_erm"]["verdict"] = "significant"


def invent_a_verdict_here(results: dict[str, Any]) -> None:
    results["comparisons"] = [comparison("sam|wide").to_json() | {"here": "not distinguishable"}]


def invent_a_look(results: dict[str, Any]) -> None:
    results["looks"] = [Look([0], ["erm"], {}, 0.05).to_json() | {"alpha": 0.1}]


def drop_the_protocol(results: dict[str, Any]) -> None:
    del results["summary"][0]["protocol"]


@pytest.mark.parametrize(
    "damage",
    [
        forget_the_reason, forget_the_metrics, score_in_percent, invent_a_key, invent_a_verdict, invent_a_verdict_here,
        invent_a_look, drop_the_protocol,
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused(results: dict[str, Any], damage: Callable[[dict[str, Any]], None]) -> None:
    damage(results)
    with pytest.raises(jsonschema.ValidationError):
        validate(results)
