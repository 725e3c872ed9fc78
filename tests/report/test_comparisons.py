"""Comparisons as reports show them, and what the table could have found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from canned_runs import DOMAINS, METHODS, RULE, write_run
from example_runs import (
    assert_golden,
    beside_zero_shot,
    comparison,
    made_run,
    results_of,
    run_of,
    set_recipe,
    two_sets,
    under_both,
    with_comparisons,
)
from scipy import stats

from xdm_ft.evaluation.estimates import holm
from xdm_ft.report.comparisons import (
    from_zero_shot_words,
    further,
    here_words,
    power_lines,
    verdict_cells,
)
from xdm_ft.report.csv import csv_rows, csv_text
from xdm_ft.report.headline import details, sentence
from xdm_ft.report.markup import markdown_lines
from xdm_ft.report.sections import table_sections
from xdm_ft.report.side_by_side import side_by_side
from xdm_ft.results.run import read_run
from xdm_ft.results.table import NO_VERDICT, Comparison, InterimLook, PValue
from xdm_ft.storage.run_directory import MEASURED


def table_of(*rows: Comparison, looks: list[InterimLook] | None = None, **recipe: Any) -> dict[str, Any]:
    results = with_comparisons(results_of(two_sets(), **recipe), *rows)
    return results | {"looks": [look.to_json() for look in looks or []]}


def test_the_first_comparison_under_its_own_encoder_stands_beside_a_row() -> None:
    rows = [
        comparison("erm @ small", "erm @ large"), comparison("xdomainmix @ small", "erm @ small", 0.2),
        comparison("xdomainmix @ small", "erm @ small"), comparison("erm @ small", "erm @ large", selection="oracle"),
    ]  # fmt: skip
    run = run_of(with_comparisons(under_both(), *rows))
    assert run.comparisons_of("train_val") == rows[:3]
    assert run.beside_rows("train_val") == {"xdomainmix @ small": rows[1]}
    assert further(run, "train_val") == [rows[0], rows[2]] and further(run, "oracle") == rows[3:]


def test_cells() -> None:
    for row, metric, words in (
        (comparison("m", here="better"), "accuracy", "better"),
        (comparison("m", here="worse", sets=1, domains=1), "accuracy", "worse on this domain"),
        (comparison("m", here="better", sets=1, domains=2), "accuracy", "better on these domains"),
        (comparison("m", sets=1), "accuracy", "no clear difference"),
        (comparison("m", equal_within=0.01), "accuracy", "no clear difference, equal within 1 point"),
        (comparison("m", equal_within=0.025), "accuracy", "no clear difference, equal within 2.5 points"),
        (comparison("m", equal_within=0.1), "nll", "no clear difference, equal within 0.1"),
    ):
        assert here_words(row, metric) == words
    row = comparison("m", "erm", 0.1, "better", p_here=PValue(0.0001, 0.0003))
    half, wide = stats.t.ppf(0.975, 5) * 2, stats.t.ppf(0.975, 1) * 5
    _, [cells] = verdict_cells([row], "accuracy")
    assert [cell.text for cell in cells] == [
        f"{10 - half:+.1f} to {10 + half:+.1f}", "<0.001", "better", f"{10 - wide:+.1f} to {10 + wide:+.1f}", "0.300",
        "unknown",
    ]  # fmt: skip
    header, [first, second] = verdict_cells([comparison("m", sets=1, here="no verdict", error=None), None], "accuracy")
    assert header == ("95% here (unadjusted)", "p here (Holm)", "here")
    assert [cell.text for cell in first] == ["not estimated", "–", "no verdict"]
    assert [cell.text for cell in second] == ["–"] * 3


# -------------------------------------------------------------------------------------------------- what a table finds

SEEDS = {"share_seeds": 0.9, "share_images": 0.1}
IMAGES = {"share_seeds": 0.05, "share_images": 0.95}
FIXED = {"seeds": None, "share_seeds": 0.0, "share_images": 1.0, "freedom_seeds": None}
OTHER = {"other_error": 0.01, "other_freedom": 9.0}
FOUR = {"sets": 4, "domains": 4}
FEW = {"here": "no verdict", "note": "no verdict: it needs 3 seeds, and 2 are complete; images assumed independent"}
ROWS: dict[str, list[dict[str, Any]]] = {
    "seeds": [SEEDS],
    "two comparisons": [SEEDS, SEEDS],
    "nine seeds, not paired": [{"seeds": 9, **OTHER}],
    "ten seeds, paired": [{"seeds": 10, "paired": True, **OTHER}],
    "eleven seeds": [{"seeds": 11}],
    "more seeds are useless": [{"freedom": 45.0, **IMAGES}],
    "images limit most": [{"share_seeds": 0.45, "share_images": 0.55}],
    "test images alone": [{"freedom": 50.0, **FIXED}],
    "four domains": [FOUR],
    "four domains, two comparisons": [FOUR, FOUR],
    "four domains, one set": [{"sets": 1, "domains": 4, "error_elsewhere": None}],
    "nothing to test": [FEW, {"here": "no verdict", "note": "no verdict: other"}],
    "no comparison": [],
}


def lines_of(*rows: Comparison, metric: str = "accuracy", **rest: Any) -> list[str]:
    protocol = {"protocol": {"metric": metric}} if metric != "accuracy" else {}
    return power_lines(run_of(table_of(*rows, **rest, **protocol)), "train_val")


def finds(freedom: float, error: float = 0.02, comparisons: int = 1, alpha: float = 0.05) -> str:
    quantiles = stats.t.ppf(1 - alpha / (2 * comparisons), freedom) + stats.t.ppf(0.8, freedom)
    return f"{100 * quantiles * error:.1f} points"


def test_what_a_table_finds() -> None:
    """The smallest difference, what limits it, what more seeds would cost, and what can be shown for new domains."""
    lines = []
    for name, rows in ROWS.items():
        made = [comparison(f"m{i}", **row) for i, row in enumerate(rows)]
        lines += [f"{name}:", *(f"  {line}" for line in lines_of(*made))]
    lines += ["nll:", *(f"  {line}" for line in lines_of(comparison("m", **FOUR), metric="nll"))]
    results = table_of(comparison("m", **SEEDS))
    for seconds in (10, 0):  # each model trains for a second above: four for each seed
        for entry in results["runs"]:
            entry["train_seconds"] = seconds
        lines += [f"{seconds} seconds:", *(f"  {line}" for line in power_lines(run_of(results), "train_val"))]
    assert_golden("finds.txt", "\n".join(lines) + "\n")
    row = comparison("m", **SEEDS)
    assert f"found: {finds(5)} (in four of five runs, 3 seeds, 1 comparison)" in lines_of(row)[0]
    assert f"found: {finds(5, comparisons=2)} (in four of five runs, 3 seeds, 2 comparisons)" in lines_of(row, row)[0]
    assert f"no difference below {finds(3, 0.05, 2)}; if" in lines_of(*[comparison("m", **FOUR)] * 2)[1]


def test_looks_and_declarations() -> None:
    def look(declared: list[list[str]] | None = None, alpha: float = 0.05) -> InterimLook:
        return InterimLook([0, 1, 2], [], {}, alpha, declared or [])

    row = comparison("m")
    line, second = lines_of(row, looks=[look(), look(alpha=0.0125)])
    assert second == "look 2 at this run, at α = 0.0125; 0.0625 is spent in all"
    assert f"found: {finds(5, alpha=0.0125)} (in" in line and len(lines_of(row, looks=[look()])) == 1
    changed, pair = (
        "the recipe's report.compare was changed after the first look, which declared ",
        [["xdomainmix", "erm"]],
    )
    assert lines_of(row, looks=[look()], report={"compare": pair})[-1] == f"{changed}nothing"
    two = [*pair, ["n", "erm"]]
    assert lines_of(row, looks=[look(two)], report={"compare": pair})[-1] == f"{changed}xdomainmix − erm, n − erm"
    for same in ([], pair):
        assert "changed" not in lines_of(row, looks=[look(same)], report={"compare": same})[-1]
    pairs = [[f"xdomainmix @ {encoder}", f"erm @ {encoder}"] for encoder in ("small", "large")]
    for declared, same in (([["xdomainmix", "erm"]], True), (pairs, True), (pairs[:1], False)):
        results = with_comparisons(under_both(report={"compare": declared}), comparison(*pairs[0]))
        lines = power_lines(run_of(results | {"looks": [look(pairs).to_json()]}), "train_val")
        assert any("report.compare was changed" in line for line in lines) != same, declared


def test_every_report_of_several_encoders() -> None:
    """Rows versus ERM, and a pair of encoders."""
    better = comparison("xdomainmix @ small", "erm @ small", 0.1, "better", "better")
    run = run_of(with_comparisons(under_both(), better, comparison("erm @ small", "erm @ large", -0.05)))
    sections = [*table_sections(run, run.rules), *side_by_side([run, run], [])]
    assert_golden("encoders.md", "\n".join([sentence(run), details(run), *markdown_lines(sections)]) + "\n")
    assert_golden("encoders.csv", csv_text(csv_rows(run)))


def test_each_held_out_set_has_its_own_comparison_with_zero_shot(tmp_path: Path) -> None:
    made = write_run(tmp_path)
    kept, judged = made.measured.from_zero_shot, made.from_zero_shot(RULE)
    assert {*kept} == {(RULE, m, (d,)) for m in METHODS[1:] for d in DOMAINS} and made.from_zero_shot("oracle") == {}
    for row in made.comparisons_of(RULE):
        of_sets = [kept[RULE, row.first, (domain,)] for domain in DOMAINS]
        assert {(of.second, of.sets) for of in of_sets} == {("zero_shot", 1)}
        assert sum(of.difference for of in of_sets) / 3 == pytest.approx(row.difference)
    tested = [row.p_here for row in judged.values()]
    assert all(tested) and [p.holm for p in tested if p] == holm([p.plain for p in tested if p])
    (tmp_path / MEASURED).unlink()
    assert read_run(tmp_path).measured.from_zero_shot == kept, "it is made again"
    set_recipe(made, report={"compare": (("erm", "sam"),)})
    assert {row.here for row in made.from_zero_shot(RULE).values()} == {NO_VERDICT}
    set_recipe(made, report={"compare": (("zero_shot", "sam"),)})
    assert {method for (method, _), row in made.from_zero_shot(RULE).items() if row.here != NO_VERDICT} == {"sam"}


def test_the_verdict_on_one_held_out_set_is_that_of_results_json(tmp_path: Path) -> None:
    made = write_run(tmp_path, together=True)
    for row in made.comparisons_of(RULE):
        again = made.measured.from_zero_shot[RULE, row.first, DOMAINS]
        assert again.p_here and row.p_here and again.p_here.plain == row.p_here.plain and again.error == row.error
        assert made.from_zero_shot(RULE)[row.first, DOMAINS] is row


@pytest.mark.parametrize(
    ("differences", "metric", "verdict", "words"),
    [
        ({"a": 0.1, "b": 0.2}, "accuracy", "", "helps on a, b"),
        ({"a": -0.1, "b": 0.2, "c": 0.2, "d": 0.2, "e": 0.2, "f": 0.2}, "accuracy", "",
         "helps on b, c, d and 2 more, but harms on a"),
        ({"a": -0.1, "b": 0.0}, "accuracy", "", "harms on a; not clear on 1 more"),
        ({"a": -0.1, "b": 0.0}, "nll", "", "helps on a; not clear on 1 more"),
        ({"a": 0.01, "b": -0.01}, "accuracy", "", "is not clearly better than zero-shot (a +1.0, b -1.0)"),
        ({"a": 0.01, "b": 0.0}, "accuracy", "better",
         "is better than zero-shot on the mean, clearly on no single domain (a +1.0, b 0.0)"),
        ({name: 0.0 for name in "abcdef"}, "accuracy", "",
         "is not clearly better than zero-shot (a 0.0, b 0.0, c 0.0 and 3 more)"),
    ],
)  # fmt: skip
def test_where_fine_tuning_helps_and_harms(
    differences: dict[str, float], metric: str, verdict: str, words: str
) -> None:
    made = beside_zero_shot(made_run({"erm": dict.fromkeys(differences, 0.5)}, metric=metric), "erm", differences)
    if verdict:
        made.results["comparisons"] = [comparison("erm", "zero_shot", here=verdict).swapped().to_json()]
    versus = made.from_zero_shot("train_val")
    assert from_zero_shot_words(made, "erm", versus) == f"fine-tuning {words}"
    assert from_zero_shot_words(made, "sam", versus) == "" and made.from_zero_shot("oracle") == {}
