"""Costs and encoders in every table and file: numbers by hand, and nothing of them where there are none."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest
from example_runs import encoder_about, model, results_of, run_of
from test_more_tables import two_sets
from test_results_schema import validate

from xdm_ft.report.costs import bytes_text, costs, count_text, seconds_text
from xdm_ft.report.csv_rows import csv_rows, csv_text
from xdm_ft.report.encoders import encoder_table, trainable_of, trained_words
from xdm_ft.report.latex import latex
from xdm_ft.report.markdown import markdown, tables_of
from xdm_ft.report.table_rows import ResultTable

ENCODERS = ("small", "large")
SHARED = "trained together and share their memory"


def costly(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same runs with costs: model number i has i seconds and i MB; of xdomainmix the memory is not known."""
    for i, run in enumerate(runs):
        run |= {"train_seconds": float(i), "trained_parameters": 1000}
        if not run["method"].startswith("xdomainmix"):
            run["peak_memory"] = i * 10**6
    return runs


def of_two_encoders() -> dict[str, Any]:
    """ERM and XDomainMix under both encoders; the larger one has 0.05 more in each model."""
    runs = [
        model(f"{run['method']} @ {one}", tuple(run["test_domains"]), run["seed"], accuracy=accuracy(run) + gain)
        for one, gain in zip(ENCODERS, (0.0, 0.05), strict=True)
        for run in two_sets()
    ]
    return results_of(costly(runs), encoders=ENCODERS)


def accuracy(run: dict[str, Any]) -> float:
    return float(run["selected"]["train_val"]["metrics"]["test"]["accuracy"])


def table(results: dict[str, Any], heading: str) -> ResultTable:
    [found] = [one for one in tables_of(run_of(results)) if one.heading == heading]
    return found


def test_costs_are_means_over_models() -> None:
    run = run_of(results_of(costly(two_sets())))
    found = costs(run.records)
    assert found["erm"]._asdict() == {"trained_parameters": 1000, "train_seconds": 1.5, "peak_memory": 1.5e6}
    assert found["xdomainmix"].peak_memory is None
    shown = table(run.results, "Cost")
    assert shown.header == ("method", "selection value", "trained parameters", "seconds", "peak memory")
    values = {m: [r["selected"]["train_val"]["value"] for r in two_sets() if r["method"] == m] for m in found}
    erm, mixed = (f"{100 * sum(of) / len(of):.1f}" for of in values.values())
    assert shown.rows == (("erm", erm, "1,000", "1.50", "1.5 MB"), ("xdomainmix", mixed, "1,000", "5.50", "–"))
    [(methods, note)] = shown.notes
    assert methods == "xdomainmix" and SHARED in note
    assert f"| erm | {erm} | 1,000 | 1.50 | 1.5 MB |" in markdown(run)
    assert r"5.50 & \textendash{}" in latex(tables_of(run))


def test_results_of_earlier_versions_have_seconds_alone() -> None:
    run = run_of(results_of(two_sets()))
    assert [row[2:] for row in table(run.results, "Cost").rows] == [("–", "1.00", "–")] * 2
    assert SHARED not in markdown(run) and "@" not in markdown(run) and "ncoders" not in markdown(run)
    assert not [one for one in tables_of(run_of(results_of([]))) if one.heading == "Cost"]


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (count_text(5130), "5,130"), (count_text(85_799_936.0), "85.8 million"), (count_text(None), "–"),
        (seconds_text(0.034), "0.03"), (seconds_text(45.67), "45.7"), (seconds_text(4567.8), "4,568"),
        (bytes_text(9_870), "9.9 kB"), (bytes_text(12_340_000), "12.3 MB"), (bytes_text(4.5e9), "4.5 GB"),
        (trained_words(True), "end to end"), (trained_words(False), "frozen"),
        (trained_words({"blocks": 1}), "last block"), (trained_words({"blocks": 4}), "last 4 blocks"),
        (trained_words({"lora": {"rank": 8, "blocks": None}}), "LoRA of rank 8"),
        (trained_words({"lora": {"rank": 2, "blocks": 1}}), "LoRA of rank 2 in the last block"),
    ],
)  # fmt: skip
def test_numbers_and_cuts_in_words(made: str, text: str) -> None:
    assert made == text


def test_the_tables_of_two_encoders() -> None:
    results = of_two_encoders()
    validate(results)
    assert [row["method"] for row in results["summary"]] == [
        "erm @ small", "xdomainmix @ small", "erm @ large", "xdomainmix @ large"
    ]  # fmt: skip
    assert [row[0] for row in table(results, "Cost").rows] == [row["method"] for row in results["summary"]]
    pairs = table(results, "Further comparisons")
    assert [row[:3] for row in pairs.rows] == [
        ("erm @ small", "erm @ large", "-5.0"), ("xdomainmix @ small", "xdomainmix @ large", "-5.0")
    ]  # fmt: skip
    assert {row[pairs.header.index("here")] for row in pairs.rows} == {"no verdict"}
    assert "2 are complete" in pairs.notes[0][1]
    small, _ = table(results, "Encoders").rows
    assert small == ("small", "timm vit_small", "small corpus", "64", "5.7 million", "12.3", "2.6 MB")
    text = markdown(run_of(results))
    assert text.count("vit_small") == 1, "the table has it, and the line on the environment does not repeat it"
    assert "- **first − second**: " in text and "| versus erm |" in text


def test_the_selection_values_are_those_of_the_rule_that_is_named() -> None:
    results = results_of(costly(two_sets()))
    results["recipe"]["protocol"]["selection"] = "oracle"
    for run in results["runs"]:
        run["selected"] = {"oracle": run["selected"]["train_val"] | {"value": 0.9}, **run["selected"]}
    results["summary"] = [row | {"selection": rule} for rule in ("oracle", "train_val") for row in results["summary"]]
    honest = table(results, "Cost")
    assert "by which train_val picked; test images are not in it" in dict(honest.about)["Selection value"]
    for run in results["runs"]:
        del run["selected"]["train_val"]
    results["summary"] = [row for row in results["summary"] if row["selection"] == "oracle"]
    cheating = table(results, "Cost")
    assert "by which oracle picked; they are a part of the test images" in dict(cheating.about)["Selection value"]
    assert [row[1] for row in cheating.rows] == ["90.0"] * 2 and [row[1] for row in honest.rows] != ["90.0"] * 2


def test_what_is_not_known_of_an_encoder() -> None:
    results = results_of(two_sets())
    assert encoder_table(results) is None
    about = encoder_about("x", model=None, ms_per_image=None, feature_bytes=None)
    results["environment"]["encoders"] = {"encoder": about}
    validate(results)
    shown = encoder_table(results)
    assert shown is not None and shown.rows[0][-2:] == ("–", "–") and shown.rows[0][1] == "timm"
    assert table(results, "selection: train_val (the recipe's rule)").rows[0][0] == "erm", "one encoder is in no label"


def test_a_solver_trains_nothing_of_an_encoder_that_others_train() -> None:
    results = results_of(two_sets())
    results["recipe"]["encoder"]["trainable"] = {"blocks": 2}
    assert trained_words(trainable_of("erm", results)) == "last 2 blocks"
    for run in results["runs"]:
        run["gradient_evaluations"] = 0
    assert trained_words(trainable_of("erm", results)) == "frozen"


def test_results_csv_has_costs_and_pairs() -> None:
    results = of_two_encoders()
    results["recipe"]["methods"] = ["erm", {"name": "xdomainmix", "trainable": {"blocks": 2}}]
    pair = next(one for one in results["comparisons"] if one["second"] == "xdomainmix @ large")
    pair |= {"p_here": {"plain": 0.01, "holm": 0.03}, "here": "worse", "error_elsewhere": 0.01}
    rows = list(csv.DictReader(io.StringIO(csv_text(csv_rows(run_of(results))))))
    erm = next(row for row in rows if (row["method"], row["of"]) == ("erm @ large", "mean"))
    assert (erm["encoder"], erm["encoder_trained"], erm["compared_with"]) == ("vit_large", "frozen", "")
    assert [float(erm[name]) for name in ("trained_parameters", "train_seconds", "peak_memory")] == [1000, 9.5, 9.5e6]
    mix = next(row for row in rows if (row["method"], row["of"]) == ("xdomainmix @ small", "mean"))
    assert (mix["encoder_trained"], mix["compared_with"]) == ("last 2 blocks", "erm @ small")
    assert mix["peak_memory"] == ""
    pairs = [row for row in rows if row["of"] == "encoders"]
    assert [(row["method"], row["compared_with"]) for row in pairs] == [
        ("erm @ small", "erm @ large"), ("xdomainmix @ small", "xdomainmix @ large")
    ]  # fmt: skip
    last = pairs[1]
    assert float(last["difference"]) == pytest.approx(-0.05) and last["mean"] == last["train_seconds"] == ""
    assert (last["p_here_holm"], last["here"], last["elsewhere"]) == ("0.03", "worse", "unknown")
    assert float(last["elsewhere_low"]) == pytest.approx(-0.05 - 0.01 * 12.7062, abs=1e-6)
