"""Comparisons as reports show them, what the table could have found, and results of earlier versions."""

from __future__ import annotations

from typing import Any

import pytest
from example_runs import comparison, earlier, results_of, run_of, two_sets, with_comparisons
from scipy import stats

from xdm_ft.evaluation.looks import Look
from xdm_ft.evaluation.verdicts import Comparison, PValue
from xdm_ft.report.comparisons import (
    beside_rows,
    comparisons_of,
    further,
    here_words,
    tested_columns,
    what_it_finds,
)
from xdm_ft.report.csv import csv_rows
from xdm_ft.report.headline import sentence, show_headline
from xdm_ft.report.sections import table_sections
from xdm_ft.report.side_by_side import side_by_side

BOTH = ("small", "large")


def under_both(**recipe: Any) -> dict[str, Any]:
    runs = [run | {"method": f"{run['method']} @ {one}"} for one in BOTH for run in two_sets()]
    return results_of(runs, encoders=BOTH, **recipe)


def table_of(*rows: Comparison, looks: list[Look] | None = None, **recipe: Any) -> dict[str, Any]:
    results = with_comparisons(results_of(two_sets(), **recipe), *rows)
    return results | {"looks": [look.to_json() for look in looks or []]}


# --------------------------------------------------------------------------------------------------- rows and columns


def test_the_first_comparison_under_its_own_encoder_stands_beside_a_row() -> None:
    rows = [
        comparison("erm @ small", "erm @ large"), comparison("xdomainmix @ small", "sam @ small"),
        comparison("xdomainmix @ small", "erm @ small"), comparison("erm @ small", "erm @ large", selection="oracle"),
    ]  # fmt: skip
    results = with_comparisons(under_both(), *rows)
    assert comparisons_of(results, "train_val") == rows[:3]
    assert beside_rows(results, "train_val") == {"xdomainmix @ small": rows[1]}
    assert further(results, "train_val") == [rows[0], rows[2]] and further(results, "oracle") == rows[3:]


@pytest.mark.parametrize(
    ("row", "metric", "words"),
    [
        (comparison("m", here="better"), "accuracy", "better"),
        (comparison("m", here="worse", sets=1, domains=1), "accuracy", "worse on this domain"),
        (comparison("m", here="better", sets=1, domains=2), "accuracy", "better on these domains"),
        (comparison("m", sets=1), "accuracy", "no clear difference"),
        (comparison("m", equal_within=0.01), "accuracy", "no clear difference, equal within 1 point"),
        (comparison("m", equal_within=0.025), "accuracy", "no clear difference, equal within 2.5 points"),
        (comparison("m", equal_within=0.1), "nll", "no clear difference, equal within 0.1"),
    ],
)
def test_the_words_of_a_cell(row: Comparison, metric: str, words: str) -> None:
    assert here_words(row, metric) == words


def test_cells() -> None:
    row = comparison("m", "erm", 0.1, "better", p_here=PValue(0.0001, 0.0003))
    half, wide = stats.t.ppf(0.975, 5) * 2, stats.t.ppf(0.975, 1) * 5
    _, [cells] = tested_columns([row], "accuracy")
    assert [cell.text for cell in cells] == [
        f"{10 - half:+.1f} to {10 + half:+.1f}", "<0.001", "better", f"{10 - wide:+.1f} to {10 + wide:+.1f}", "0.300",
        "unknown",
    ]  # fmt: skip
    header, [first, second] = tested_columns([comparison("m", sets=1, here="no verdict", error=None), None], "accuracy")
    assert header == ("95% here (unadjusted)", "p here (Holm)", "here")
    assert [cell.text for cell in first] == ["not estimated", "–", "no verdict"]
    assert [cell.text for cell in second] == ["–"] * 3


# -------------------------------------------------------------------------------------------------- what a table finds

SEEDS = {"share_seeds": 0.9, "share_images": 0.1}
IMAGES = {"share_seeds": 0.05, "share_images": 0.95}
FIXED = {"seeds": None, "share_seeds": 0.0, "share_images": 1.0, "freedom_seeds": None}
OTHER = {"other_error": 0.01, "other_freedom": 9.0}
FOUR = {"sets": 4, "domains": 4}


def lines_of(*rows: Comparison, metric: str = "accuracy", **rest: Any) -> list[str]:
    return what_it_finds(table_of(*rows, **rest), "train_val", metric)


def finds(freedom: float, error: float = 0.02, comparisons: int = 1, alpha: float = 0.05) -> str:
    quantiles = stats.t.ppf(1 - alpha / (2 * comparisons), freedom) + stats.t.ppf(0.8, freedom)
    return f"{100 * quantiles * error:.1f} points"


IN_ONE = "in one comparison with 80% probability"
PAIRED = "by seed; from 10 common seeds on rows are paired); the seeds are the limit"


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ([{"seeds": 3, **SEEDS}], f"3 seeds find {finds(5)} {IN_ONE}; the seeds are the limit; 10 seeds: "),
        (
            [SEEDS, SEEDS],
            f"3 seeds find {finds(5, comparisons=2)} among 2 comparisons with 80% probability; the seeds ",
        ),
        ([{"seeds": 9, **OTHER}], f"9 seeds find {finds(5)} {IN_ONE} ({finds(9, 0.01)} if paired {PAIRED}; 10 seeds: "),
        (
            [{"seeds": 10, "paired": True, **OTHER}],
            f"10 seeds find {finds(5)} {IN_ONE} ({finds(9, 0.01)} if not paired {PAIRED}; 20 seeds: ",
        ),
        ([{"seeds": 11}], "probability; the seeds are the limit; 22 seeds: "),
        (
            [{"freedom": 45.0, **IMAGES}],
            f"3 seeds find {finds(45)} {IN_ONE}; the test images, or their groups, are the limit: more seeds are "
            "useless",
        ),
        ([{"share_seeds": 0.45, "share_images": 0.55}], "; the test images, or their groups, limit most; 10 seeds: "),
        ([{"freedom": 50.0, **FIXED}], f"test images alone find {finds(50)} {IN_ONE}; more test images would help"),
    ],
)
def test_the_smallest_difference_and_what_limits_it(rows: list[dict[str, Any]], line: str) -> None:
    [shown] = lines_of(*(comparison(f"m{i}", **row) for i, row in enumerate(rows)))
    assert line in shown and ("useless" in line or "help" in line) == (shown.endswith(line))


def test_what_more_seeds_would_cost() -> None:
    """Every model of the example trains for a second: four for each seed."""
    results = table_of(comparison("m", **SEEDS))
    for seconds, end in ((1, " points (28 s of training more)"), (10, "(5 min of training more)"), (None, " points")):
        for entry in results["runs"]:
            entry["train_seconds"] = seconds
        assert what_it_finds(results, "train_val", "accuracy")[0].endswith(end)


def test_what_can_be_shown_for_new_domains() -> None:
    wide, row = finds(3, 0.05), comparison("m", **FOUR)
    assert lines_of(row)[1] == f"with 4 domains nothing below {wide} can be shown for new ones"
    assert lines_of(row, comparison("n", **FOUR))[1] == (
        f"with 4 domains nothing below {finds(3, 0.05, 2)} can be shown for new ones; declare one comparison "
        f"(report.compare): {wide}"
    )
    for sets in (1, 2):
        error = None if sets == 1 else 0.05
        assert len(lines_of(comparison("m", sets=sets, domains=4, error_elsewhere=error))) == 1
    loss = lines_of(row, metric="nll")[1]
    assert "nothing below 0." in loss and "points" not in loss


def test_looks_and_declarations() -> None:
    def look(declared: list[list[str]] | None = None, alpha: float = 0.05) -> Look:
        return Look([0, 1, 2], [], {}, alpha, declared or [])

    row = comparison("m")
    line, second = lines_of(row, looks=[look(), look(alpha=0.0125)])
    assert second == "look 2 at this run, at α = 0.0125; 0.0625 is spent in all"
    assert f"find {finds(5, alpha=0.0125)} in" in line and len(lines_of(row, looks=[look()])) == 1
    changed, pair = "report.compare was changed after the first look, which declared ", [["m", "erm"]]
    assert lines_of(row, looks=[look()], report={"compare": pair})[-1] == f"{changed}nothing"
    two = [*pair, ["n", "erm"]]
    assert lines_of(row, looks=[look(two)], report={"compare": pair})[-1] == f"{changed}m − erm, n − erm"
    for same in ([], pair):
        assert "changed" not in lines_of(row, looks=[look(same)], report={"compare": same})[-1]
    pairs = [[f"xdomainmix @ {encoder}", f"erm @ {encoder}"] for encoder in BOTH]
    for declared, same in (([["xdomainmix", "erm"]], True), (pairs, True), (pairs[:1], False)):
        results = with_comparisons(under_both(report={"compare": declared}), comparison(*pairs[0]))
        lines = what_it_finds(results | {"looks": [look(pairs).to_json()]}, "train_val", "accuracy")
        assert any("report.compare was changed" in line for line in lines) != same, declared


def test_nothing_could_be_tested() -> None:
    few = "no verdict: it needs 3 seeds, and 2 are complete; images assumed independent"
    rows = [comparison("m", here="no verdict", note=few), comparison("n", here="no verdict", note="no verdict: other")]
    assert lines_of(*rows) == ["no difference can be found; no verdict: it needs 3 seeds, and 2 are complete"]
    assert lines_of() == []


# ----------------------------------------------------------------------------------------------------- earlier versions


def test_an_earlier_version_is_read() -> None:
    """Its word was about new domains too, where there were several; the intervals stay what they were."""
    row = comparison("xdomainmix", here="better", elsewhere="better")
    results = earlier(table_of(row, comparison("erm", "xdomainmix", -0.1)))
    [erm, mix] = comparisons_of(results, "train_val")
    assert (erm.first, erm.second, erm.here, erm.elsewhere) == ("erm", "xdomainmix", "no clear difference", "unknown")
    assert (mix.first, mix.second, mix.difference, mix.here, mix.elsewhere) == (
        "xdomainmix", "erm", 0.1, "better", "better"
    )  # fmt: skip
    assert mix.p_here == mix.p_elsewhere == row.p_here
    for found, known in ((mix.on_these, row.on_these), (mix.on_others, row.on_others)):
        assert found is not None and known is not None
        assert found.interval() == pytest.approx(known.interval(), abs=1e-6)
    assert what_it_finds(results, "train_val", "accuracy") == [], "it kept no degrees of freedom"


@pytest.mark.parametrize(
    ("row", "here", "elsewhere"),
    [
        (comparison("xdomainmix", here="worse", sets=1), "worse", "unknown"),
        (comparison("xdomainmix", here="no verdict"), "no verdict", "unknown"),
        (comparison("xdomainmix"), "no clear difference", "unknown"),
        (comparison("xdomainmix", here="worse", elsewhere="worse"), "worse", "worse"),
    ],
)
def test_the_words_of_an_earlier_version(row: Comparison, here: str, elsewhere: str) -> None:
    results = earlier(table_of(row))
    [found] = comparisons_of(results, "train_val")
    assert (found.here, found.elsewhere) == (here, elsewhere)
    if row.sets == 1:
        assert results["summary"][1]["versus_erm"]["verdict"] == "worse on these domains"


def test_every_report_of_an_earlier_version(capsys: pytest.CaptureFixture[str]) -> None:
    """With several encoders: rows versus ERM, and a pair of encoders."""
    better = comparison("xdomainmix @ small", "erm @ small", 0.1, "better", "better")
    pair = comparison("erm @ small", "erm @ large", -0.05, "no clear difference")
    results = earlier(with_comparisons(under_both(), better, pair))
    assert [one["verdict"] for one in results["encoder_pairs"]] == ["not distinguishable"]
    run = run_of(results)
    shown = {section.id: section.tables[0] for section in table_sections(run, run.rules)}
    [beside] = [[cell.text for cell in row] for row in shown["differences"].rows]
    assert beside[:3] == ["xdomainmix @ small", "erm @ small", "+10.0"] and beside[5::3] == ["better", "better"]
    [pair_row] = [[cell.text for cell in row] for row in shown["further"].rows]
    assert pair_row[:3] == ["erm @ small", "erm @ large", "-5.0"] and "no clear difference" in pair_row
    rows = [row for row in csv_rows(run) if row.get("compared_with")]
    assert [(row["of"], row["here"], row["elsewhere"]) for row in rows] == [
        ("mean", "better", "better"), ("encoders", "no clear difference", "unknown")
    ]  # fmt: skip
    show_headline(run)
    [line, _] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("xdomainmix")]
    assert line.split()[-3:] == ["+10.0", "better", "better"]
    assert "under erm, small is -5.0 against large, no clear difference here" in sentence(run)
    [both, *_] = side_by_side([run, run], [])
    place = list(both.tables[0].header).index("here")
    assert [row[place].text for row in both.tables[0].rows].count("better") == 2


def test_the_earliest_versions_name_the_reference_in_the_note() -> None:
    rows = [comparison("xdomainmix", "last block"), comparison("last block", "erm")]
    runs = [*two_sets(), *(one | {"method": "last block"} for one in two_sets()[:4])]
    results = earlier(with_comparisons(results_of(runs), *rows))
    for row in results["summary"]:
        if row["versus_erm"]:
            row["versus_erm"]["note"] = (
                f"compared with {row['versus_erm'].pop('reference')}; images assumed independent"
            )
    assert {row.first: row.second for row in comparisons_of(results, "train_val")} == {
        "xdomainmix": "last block", "last block": "erm"
    }  # fmt: skip
    for row in results["summary"]:
        if row["versus_erm"]:
            row["versus_erm"]["note"] = "images assumed independent"
    results["recipe"]["methods"] = [{"name": "erm", "label": "plain"}, "xdomainmix", "last block"]
    results["summary"][0]["method"] = "plain"
    assert {row.second for row in comparisons_of(results, "train_val")} == {"plain"}, (
        "the ERM that is compared with none"
    )
