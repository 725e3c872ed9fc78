"""Looks at a growing run: which summary is one, its significance level, and verdicts that stay."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import jsonschema
from example_runs import comparison
from test_results_schema import SCHEMA
from test_summary import grid, record, trouble

from xdm_ft.results import runs_by_method
from xdm_ft.results.summary import look_at, place_of, with_earlier_verdicts
from xdm_ft.results.table import InterimLook

TWO = ("erm", "sam")


def look(seeds: int, methods: Sequence[str] = TWO, lacks: dict[str, list[int]] | None = None) -> InterimLook:
    """The look at methods of so many seeds, from their records."""
    made = [
        record(m, (d,), s, 20) for m in methods for d in "ab" for s in range(seeds) if s not in (lacks or {}).get(m, ())
    ]
    return look_at(runs_by_method(made, methods, "train_val", "accuracy").values())


def alphas(*seen: InterimLook) -> list[float]:
    """The α of the looks after these summaries."""
    looks: list[InterimLook] = []
    for now in seen:
        number, placed = place_of(now, looks)
        looks = [*looks[: number - 1], placed]
    return [each.alpha for each in looks]


def test_what_a_look_sees() -> None:
    now = look(3, lacks={"sam": [1]})
    assert (now.seeds, now.methods, now.missing, now.alpha) == ([0, 1, 2], ["erm", "sam"], {"sam": [1]}, 0.05)
    failed = [record(*one) for one in grid() if one[0] == "erm"] + [trouble("sam", ("a",), 0, "failed", "nan")]
    runs = runs_by_method(failed, ["erm", "sam"], "train_val", "accuracy")
    assert look_at(runs.values()).methods == ["erm"], "without a complete seed it is not seen"
    text = [record("zero_shot", (d,), 7, 20) for d in "ab"]
    runs = runs_by_method([*failed, *text], ["zero_shot", "erm"], "train_val", "accuracy", ["zero_shot"])
    seen = look_at(runs.values(), [("erm", "zero_shot")])
    assert (seen.seeds, seen.missing, seen.compare) == ([0, 1, 2], {}, [["erm", "zero_shot"]]), "no seed of its own"


def test_looks_spend_a_part_each() -> None:
    more_seeds, more_methods = look(5), look(5, ("erm", "sam", "mix"))
    assert alphas(look(3)) == [0.05]
    assert alphas(look(3), more_seeds, more_methods) == [0.05, 0.0125, 0.00625]
    assert alphas(look(3), look(3), more_seeds, more_seeds) == [0.05, 0.0125], "the same summary is the same look"
    assert math.fsum(alphas(*(look(seeds) for seeds in range(3, 40)))) <= 0.075
    repaired = look(3, lacks={"sam": [2]})
    assert alphas(repaired, look(3)) == alphas(repaired, look(3, lacks={"sam": [1]})) == [0.05, 0.0125]


def test_verdicts_that_were_found_stay() -> None:
    first = [
        comparison("sam", here="better"), comparison("mix", here="worse", elsewhere="worse"), comparison("irm"),
    ]  # fmt: skip
    second = [comparison("irm", here="better", look=2), comparison("mix", here="worse", elsewhere="worse", look=1)]
    before = [
        InterimLook([0, 1, 2], [], {}, 0.05).with_found(first),
        InterimLook([*range(5)], [], {}, 0.0125).with_found(second),
    ]
    assert before[0].found == [
        ["train_val", "sam", "erm", "better", "unknown"], ["train_val", "mix", "erm", "worse", "worse"]
    ]  # fmt: skip
    lost = "no verdict: predictions are missing"
    now = [
        comparison("sam", look=3), comparison("mix", here="no verdict", look=3, note=f"{lost}; other"),
        comparison("irm", elsewhere="better", look=3), comparison("sam", "mix", look=3, here="better"),
        comparison("sam", selection="val_domain", look=3),
    ]  # fmt: skip
    kept = with_earlier_verdicts(now, before)
    assert [(row.here, row.elsewhere, row.look) for row in kept] == [
        ("better", "unknown", 1), ("worse", "worse", 1), ("better", "better", 2), ("better", "unknown", 3),
        ("no clear difference", "unknown", 3),
    ]  # fmt: skip
    assert kept[1].note == "other", "a verdict has no reason for none"
    assert with_earlier_verdicts(now, []) == now


def test_looks_are_read_as_they_were_written() -> None:
    look_0 = InterimLook([0, 1], ["erm", "sam"], {"sam": [1]}, 0.0125, [["sam", "erm"]])
    entry = json.loads(json.dumps(look_0.with_found([comparison("sam", here="worse")]).to_json(), allow_nan=False))
    assert entry["found"] == [["train_val", "sam", "erm", "worse", "unknown"]]
    assert InterimLook(**entry) == replace(look_0, found=entry["found"])
    jsonschema.Draft202012Validator({"$defs": SCHEMA["$defs"], **SCHEMA["$defs"]["look"]}).validate(entry)


def test_a_look_lists_what_no_earlier_one_has_found() -> None:
    here, there = comparison("sam", here="better"), comparison("sam", here="better", elsewhere="better")
    first = InterimLook([0], ["erm", "sam"], {}, 0.05).with_found([here])
    second = first.with_found([here, comparison("irm", here="worse")], [first])
    assert second.found == [["train_val", "irm", "erm", "worse", "unknown"]]
    assert first.with_found([there], [first]).found == [["train_val", "sam", "erm", "better", "better"]]
