"""results.csv: its rows against results.json, and names that a spreadsheet would compute."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest
from example_runs import comparison, model, results_of, run_of, with_comparisons
from test_more_tables import two_sets

from xdm_ft.report.csv_rows import COLUMNS, csv_rows, csv_text, properties
from xdm_ft.storage.csv_cells import read_cell


def rows_of(results: dict[str, Any]) -> list[dict[str, str]]:
    """What a reader of the file finds."""
    return list(csv.DictReader(io.StringIO(csv_text(csv_rows(run_of(results))))))


def test_a_row_per_held_out_set_and_one_for_their_mean() -> None:
    rows = rows_of(results_of(two_sets()))
    assert [(row["method"], row["of"], row["held_out"]) for row in rows] == [
        (method, of, held)
        for method in ("erm", "xdomainmix")
        for of, held in (("mean", ""), ("held_out", "a"), ("held_out", "b"))
    ]
    assert all(tuple(row) == COLUMNS for row in rows)
    mean, a, b = rows[:3]
    assert float(a["mean"]) == pytest.approx(0.7) and float(a["std"]) == pytest.approx(0.02**0.5)  # 0.6 and 0.8
    assert float(b["accuracy"]) == pytest.approx(0.4) and float(b["accuracy_stderr"]) == pytest.approx(0.1)
    assert float(mean["mean"]) == pytest.approx(0.55) and mean["worst_domain"] == "0.4" and mean["seeds"] == "2"
    assert (mean["images"], a["images"]) == ("", "20")
    assert {row["protocol"] for row in rows} == {"pets, 40 images; picked by train_val"}
    assert (a["run"], a["encoder"], a["encoder_trained"], a["augmentation"]) == ("made", "tiny", "frozen", "none")


def test_the_comparison_is_that_of_the_summary() -> None:
    results = results_of(two_sets())
    pair = comparison("xdomainmix", here="better", equal_within=0.2, look=2)
    declared = comparison("xdomainmix", "sam", here="no verdict", error=None)
    erm, *_, mean, a, _, other = rows_of(with_comparisons(results, pair, declared))
    assert erm["difference"] == erm["p_here"] == a["difference"] == a["p_here"] == "" and mean["of"] == "mean"
    text = {
        name: mean[name] for name in ("p_here", "p_here_holm", "p_elsewhere", "p_elsewhere_holm", "elsewhere", "note")
    }
    assert [*text.values()] == ["0.01", "0.02", "0.15", "0.3", "unknown", "images assumed independent"]
    assert (mean["here"], mean["equal_within"], mean["look"], mean["compared_with"]) == ("better", "0.2", "2", "erm")
    ends = [
        (f"{what}_low", f"{what}_high", half)
        for what, half in (("here", 0.02 * 2.570582), ("elsewhere", 0.05 * 12.706205))
    ]
    for low, high, half in ends:
        assert (float(mean[low]), float(mean[high])) == pytest.approx((0.1 - half, 0.1 + half), abs=1e-6)
    assert (mean["difference"], mean["error"], mean["freedom"], mean["share_seeds"]) == ("0.1", "0.02", "5.0", "0.75")
    assert (other["of"], other["method"], other["compared_with"]) == ("compared", "xdomainmix", "sam")
    assert (other["here"], other["here_low"], other["p_here"], other["mean"]) == ("no verdict", "", "", "")


def test_domains_of_one_held_out_set_have_rows_of_accuracy() -> None:
    runs = [model("erm", ("a", "b"), seed, accuracies={"a": 0.9, "b": 0.2 + 0.2 * seed}) for seed in (0, 1)]
    rows = rows_of(results_of(runs))
    assert [(row["of"], row["held_out"]) for row in rows] == [
        ("mean", ""), ("held_out", "a + b"), ("domain", "a"), ("domain", "b"),
    ]  # fmt: skip
    assert float(rows[3]["accuracy"]) == float(rows[3]["mean"]) == pytest.approx(0.3) and rows[3]["nll"] == ""


def test_failed_methods_and_missing_values_are_empty_cells() -> None:
    runs = two_sets()
    runs[0]["selected"]["train_val"]["metrics"]["test"]["auroc"] = None
    bad = {"method": "irm", "test_domains": ["a"], "seed": 0, "trial": 0, "hparams": {}, "selected": {}}
    rows = rows_of(results_of([*runs, bad | {"status": "failed", "reason": "the loss is nan"}]))
    assert rows[1]["auroc"] == "0.8" and rows[1]["auroc_stderr"] == ""  # of one seed
    failed = [row for row in rows if row["method"] == "irm"]
    assert len(failed) == 3 and failed[0]["failed"] == "1" and "the loss is nan" in failed[0]["reason"]
    assert all(row["mean"] == row["nll"] == row["images"] == "" and row["seeds"] == "0" for row in failed)


@pytest.mark.parametrize("sign", ["=", "+", "-", "@", "\t", "\r", "\n"])
def test_no_name_is_a_formula(sign: str) -> None:
    name = f'{sign}HYPERLINK("http://x","y"),;\n|'
    results = results_of([model(name, (name,), seed, accuracy=0.4 - seed) for seed in (0, 1)], name=name)
    results["summary"][0] |= {"protocol": name, "flags": [name]}
    text = csv_text(csv_rows(run_of(results)))
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    assert len(rows) == 2
    for row in rows:
        assert row["run"] == row["method"] == row["protocol"] == f"'{name}"
        assert read_cell("method", row["method"]) == name
        assert all(not cell.startswith(("=", "+", "@", "\t", "\r", "\n")) for cell in row.values() if cell)
        assert row["std"] == rows[0]["std"] and float(row["mean"]) == pytest.approx(-0.1)  # numbers stay numbers
    assert rows[1]["held_out"] == f"'{name}" and rows[0]["flags"] == f"'{name}"


def test_an_empty_summary_is_a_header() -> None:
    assert csv_text(csv_rows(run_of(results_of([])))) == ",".join(COLUMNS) + "\n"


def test_properties_tell_two_encoders_apart() -> None:
    def of(**recipe: Any) -> dict[str, Any]:
        return properties(run_of(results_of(two_sets(), **recipe)), "erm")

    assert of(encoder={"name": "timm", "model": "vit", "weights": "/private/home/big.bin", "trainable": True}) == {
        "run": "made", "encoder": "vit (big.bin)", "encoder_trained": "end to end", "augmentation": "none",
    }  # fmt: skip
    views = of(encoder={"name": "own"}, data={"train_augmentation": "crop"}, features={"views": 4})
    assert views["encoder"] == "own" and views["augmentation"] == "crop, 4 cached views"
    assert of(features=None, data={"train_augmentation": None})["augmentation"] == "none"
