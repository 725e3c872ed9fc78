"""results.schema.json accepts what the code makes, and refuses what is wrong."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.resources import files
from typing import Any

import jsonschema
import pytest
import torch
from canned_runs import label_curve
from example_runs import comparison

from xdm_ft.evaluation.metrics import score
from xdm_ft.results.model import Record
from xdm_ft.results.summary import summarise
from xdm_ft.results.table import InterimLook

SCHEMA = json.loads(files("xdm_ft.report").joinpath("results.schema.json").read_text(encoding="utf-8"))
LOOK = InterimLook([0, 1, 2], ["erm"], {"erm": [1]}, 0.05, [["sam|wide", "erm"]])


def validate(document: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(document | {"checksum": ""})


def test_what_the_code_makes_is_valid(results: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    validate(results)
    validate(results | {"label_curve": label_curve()})
    logits = torch.tensor([[2.0, 0.0, 1.0], [0.0, 1.0, 0.5], [0.3, 0.2, 0.1]])
    made = score(logits, torch.tensor([0, 1, 1]), torch.tensor([0, 0, 2]), ["cat", "dog", "elk"], ["a", "b", "c"])
    for entry in results["runs"]:
        for pick in entry.get("selected", {}).values():
            pick |= {"metrics": {"test": asdict(made)}, "weights": ""}
    methods = list(dict.fromkeys(entry["method"] for entry in results["runs"]))
    records = [Record.from_json(entry) for entry in results["runs"]]
    references = {method: "erm" for method in methods if method != "erm"}
    rules = {rule: rule for rule in ("train_val", "oracle")}
    made_of = summarise(records, lambda _: [], methods=methods, rules=rules, metric="accuracy", references=references)
    rows = [*made_of.comparisons]
    rows.append(comparison("sam|wide", here="better", elsewhere="better"))
    look = LOOK.with_found(rows)
    results["summary"] = [row.to_json() for row in made_of.rows]
    results |= {"comparisons": [row.to_json() for row in rows], "looks": [look.to_json()]}
    assert len(results["summary"]) == len(methods) * 2 and len(rows) == 2 * 2 + 1 and len(look.found) == 1
    validate(results)


@pytest.mark.parametrize(
    ("path", "value"),  # None: the key is missing
    [
        (("runs", 0, "selected"), None),
        (("runs", -1, "reason"), None),
        (("runs", 0, "selected", "train_val", "metrics", "test", "accuracy"), 61.0),
        (("runs", 0, "selected", "train_val", "flags"), [["last step picked"]]),
        (("summary", 0, "medain"), 0.5),
        (("summary", 0, "interval"), 0.5),
        (("summary", 0, "protocol"), None),
        (("comparisons",), [comparison("sam|wide").to_json() | {"here": "equal"}]),
        (("looks",), [LOOK.to_json() | {"alpha": 0.1}]),
    ],
)
def test_what_is_wrong_is_refused(results: dict[str, Any], path: tuple[str | int, ...], value: Any) -> None:
    results["runs"].sort(key=lambda entry: entry["status"] == "failed")  # the last one has failed
    validate(results)
    block: Any = results
    for key in path[:-1]:
        block = block[key]
    block[path[-1]] = value
    if value is None:
        del block[path[-1]]
    with pytest.raises(jsonschema.ValidationError):
        validate(results)
