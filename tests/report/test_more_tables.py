"""The other metrics and the selected hyper-parameters, against numbers worked out by hand."""

from __future__ import annotations

from statistics import mean, stdev
from typing import Any

import pytest
from example_runs import model, results_of, run_of

from xdm_ft.report.finished import Run
from xdm_ft.report.markdown import markdown
from xdm_ft.report.measures import MEASURES, Picked
from xdm_ft.report.more_tables import metric_table, searched_table
from xdm_ft.report.table_rows import groups


def two_sets() -> list[dict[str, Any]]:
    """Two methods, two held-out sets and two seeds; accuracy of ERM: a 0.6 and 0.8, b 0.5 and 0.3."""
    found = []
    for method, gain in (("erm", 0.0), ("xdomainmix", 0.1)):
        for held, accuracies in (("a", (0.6, 0.8)), ("b", (0.5, 0.3))):
            for seed, accuracy in enumerate(accuracies):
                recalls = {"cat": accuracy - 0.1, "dog": 0.95, "elk": None}
                found.append(
                    model(method, (held,), seed, accuracy=accuracy + gain, nll=1 + seed, per_class_recall=recalls)
                )
    return found


def metrics_of(run: Run, rule: str = "train_val") -> dict[str, dict[str, str]]:
    """{method: {column: cell}} of the other metrics."""
    [rows] = [rows for rows in groups(run.results) if rows[0]["selection"] == rule]
    table = metric_table(rows, Picked(run, rule))
    return {row[0]: dict(zip(table.header, row, strict=True)) for row in table.rows}


def test_means_are_those_of_the_summary() -> None:
    found = metrics_of(run_of(results_of(two_sets())))
    assert list(found) == ["erm", "xdomainmix"] and "accuracy" not in found["erm"]
    # the mean of a and b is 0.5 and 0.7 for the classes, 0.55 in both seeds for accuracy
    assert found["erm"]["worst domain"] == "40.0 ± 10.0"  # 0.5 and 0.3: the lower set of each seed
    assert found["xdomainmix"]["worst domain"] == "50.0 ± 10.0"
    assert found["erm"]["worst class"] == "45.0 ± 0.0"  # (0.5 + 0.4) / 2, (0.7 + 0.2) / 2
    assert found["erm"]["NLL"] == "1.500 ± 0.500"  # 1 and 2
    assert found["erm"]["AUROC"] == "80.0 ± 0.0" and found["erm"]["balanced accuracy"] == "40.0 ± 0.0"


def test_a_seed_without_a_value_for_every_set_does_not_count() -> None:
    runs = two_sets()
    runs[1]["selected"]["train_val"]["metrics"]["test"]["auroc"] = None  # seed 1 of a
    runs[0]["selected"]["train_val"]["metrics"]["test"]["auroc"] = 0.6
    found = metrics_of(run_of(results_of(runs)))
    assert found["erm"]["AUROC"] == "70.0"  # (0.6 + 0.8) / 2, one seed
    assert found["erm"]["ECE"] == "10.0 ± 0.0"


def test_failed_and_skipped_methods_have_no_numbers() -> None:
    bad: list[dict[str, Any]] = [
        {"method": method, "test_domains": [held], "seed": seed, "trial": 0, "hparams": {}, "status": status,
         "selected": {}, "reason": "because"}
        for method, status in (("irm", "failed"), ("groupdro", "skipped")) for held in "ab" for seed in (0, 1)
    ]  # fmt: skip
    run = run_of(results_of([*two_sets(), *bad]))
    found = metrics_of(run)
    assert {*found["irm"].values()} == {"irm", "–"} and {*found["groupdro"].values()} == {"groupdro", "–"}
    text = markdown(run)
    assert "| irm | – | – | failed |" in text and "| groupdro | – | – | skipped |" in text


def test_the_headline_metric_is_not_repeated() -> None:
    run = run_of(results_of(two_sets()))
    for row in run.results["summary"]:
        row["metric"] = "nll"
    columns = metrics_of(run)["erm"]
    assert "NLL" not in columns and columns["accuracy"] == "55.0 ± 0.0"


def test_an_official_split_has_its_worst_domain() -> None:
    runs = [model("erm", ("a", "b"), seed, accuracies={"a": 0.9, "b": 0.2 + 0.2 * seed}) for seed in (0, 1)]
    assert metrics_of(run_of(results_of(runs)))["erm"]["worst domain"] == "30.0 ± 10.0"


def searched(run: Run) -> list[tuple[str, ...]]:
    [rows] = groups(run.results)
    table = searched_table(rows, Picked(run, "train_val"))
    return [] if table is None else [table.header, *table.rows]


def search() -> list[dict[str, Any]]:
    """A search of two trials: the first is picked for a, the second for b, but of seed 1 always the first."""
    found = []
    for method in ("erm", "xdomainmix"):
        for held, best in (("a", 0), ("b", 1)):
            for seed in (0, 1):
                for trial, lr in enumerate((0.001, 0.0123456)):
                    hparams = {"lr": lr, "batch_size": 32, "p_discard": 0.1 if method == "erm" else [0.1, trial]}
                    value = 0.9 if trial == (best if seed == 0 else 0) else 0.5
                    found.append(model(method, (held,), seed, trial=trial, hparams=hparams, value=value))
    return found


def test_a_search_shows_what_it_selected() -> None:
    assert searched(run_of(results_of(search()))) == [
        ("method", "hyper-parameter", "a", "b"),
        ("erm", "lr", "0.001", "0.0123, 0.001"),
        ("xdomainmix", "lr", "0.001", "0.0123, 0.001"),
        ("xdomainmix", "p_discard", "[0.1, 0]", "[0.1, 1], [0.1, 0]"),
    ]


def test_many_seeds_are_a_range() -> None:
    runs = [
        model("erm", ("a",), seed, trial=trial, hparams={"lr": (seed + 1) / 1000 + trial})
        for seed in range(5)
        for trial in (0, 1)
    ]
    assert searched(run_of(results_of(runs)))[1:] == [("erm", "lr", "0.001 to 0.005")]


def test_what_a_solver_selects_is_shown_and_what_differs_between_domains_is_not() -> None:
    steps = {"a": 100, "b": 200}  # of epochs: no search made them
    runs = [
        model("linear_probe", (held,), seed, hparams={"steps": steps[held]}, picked={"strength": 0.1 * (seed + 1)})
        for held in "ab"
        for seed in (0, 1)
    ]
    assert searched(run_of(results_of(runs)))[1:] == [("linear_probe", "strength", "0.1, 0.2", "0.1, 0.2")]


def test_without_a_search_there_is_no_table() -> None:
    run = run_of(results_of(two_sets()))
    assert searched(run) == [] and "Selected hyper-parameters" not in markdown(run)


def test_a_trial_that_failed_selected_nothing() -> None:
    runs = search()
    for run in runs:
        if run["method"] == "erm" and run["seed"] == 1:
            run |= {"status": "failed", "reason": "nan", "selected": {}}
    assert searched(run_of(results_of(runs)))[1] == ("erm", "lr", "0.001", "0.0123")


def test_the_first_line_of_each_measure_is_what_it_says() -> None:
    """Every measure of a run, by a naive loop over results.json."""
    results = results_of(two_sets())
    picked = Picked(run_of(results), "train_val")
    tests = {
        (run["method"], *run["test_domains"], run["seed"]): run["selected"]["train_val"]["metrics"]["test"]
        for run in results["runs"]
    }
    assert len(MEASURES) == 8
    for measure in MEASURES:
        for method in ("erm", "xdomainmix"):
            per_seed = []
            for seed in (0, 1):
                values = []
                for held in "ab":
                    test = tests[method, held, seed]
                    recalls = [recall for recall in test["per_class_recall"].values() if recall is not None]
                    own = min(recalls) if measure.name == "worst_class" else test.get(measure.attribute)
                    values.append(own)
                per_seed.append(min(values) if measure.name == "worst_domain" else mean(values))
            found = picked.mean(method, measure)
            assert found.mean == pytest.approx(mean(per_seed)) and found.n == 2
            assert found.stderr == pytest.approx(stdev(per_seed) / 2**0.5)
