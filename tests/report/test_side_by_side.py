"""Several runs in one table: only of one protocol, and without differences between runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from example_runs import model, results_of, run_of
from test_more_tables import two_sets

from xdm_ft.errors import UserError
from xdm_ft.report.finished import Run
from xdm_ft.report.markdown import markdown_table
from xdm_ft.report.side_by_side import check_same_protocol, run_names, side_by_side


def other(name: str = "other", path: str = "out/other", **recipe: Any) -> Run:
    """A run of ERM alone, 10 points below the first run."""
    runs = [run for run in two_sets() if run["method"] == "erm"]
    for run in runs:
        run["selected"]["train_val"]["metrics"]["test"]["accuracy"] -= 0.1
    encoder = {"encoder": {"model": "large", "trainable": True}, "data": {"train_augmentation": "crop"}}
    return run_of(results_of(runs, name=name, **encoder | recipe), Path(path))


@pytest.fixture
def first() -> Run:
    return run_of(results_of(two_sets()), Path("out/made"))


def test_the_rows_of_all_runs(first: Run) -> None:
    runs = [first, other()]
    check_same_protocol(runs)
    table, metrics = side_by_side(runs)
    rows = [dict(zip(table.header, row, strict=True)) for row in table.rows]
    assert [(row["run"], row["method"]) for row in rows] == [("made", "erm"), ("made", "xdomainmix"), ("other", "erm")]
    assert [(row["encoder"], row["encoder is"], row["augmentation"]) for row in rows[1:]] == [
        ("tiny", "frozen", "none"),
        ("large", "end to end", "crop"),
    ]
    assert [row["mean ± stderr"] for row in rows] == ["55.0 ± 0.0", "65.0 ± 0.0", "45.0 ± 0.0"]
    assert (rows[2]["a"], rows[2]["b"], rows[2]["seeds"]) == ("60.0", "30.0", "2")
    assert [row["versus erm of its run"] for row in rows] == ["–", "+10.0", "–"]
    assert [row["verdict"] for row in rows] == ["–", "no verdict", "–"]
    assert [row[:2] for row in metrics.rows] == [row[:2] for row in table.rows] and metrics.level == 3
    assert "accuracy in %" in table.heading
    assert [what for what, _ in table.about] == ["Compared", "Protocol"], "one line if it is the same"
    assert any(where == "made, xdomainmix" and "no verdict" in note for where, note in table.notes)


def test_each_run_has_its_own_protocol_line(first: Run) -> None:
    second = other()
    second.rows[0] = second.own_rows[0].__class__(**{**vars(second.own_rows[0]), "protocol": "pets; encoder trained"})
    second.__dict__.pop("own_rows")
    table, _ = side_by_side([first, second])
    assert table.about[1:] == (
        ("Protocol", "made: pets, 40 images; picked by train_val"),
        ("Protocol", "other: pets; encoder trained"),
    )


def test_equal_names_become_paths(first: Run) -> None:
    runs = [first, other("made", "elsewhere/made"), other("third")]
    assert [*run_names(runs).values()] == ["out/made", "elsewhere/made", "third"]
    assert [row[0] for row in side_by_side(runs)[0].rows] == ["out/made", "out/made", "elsewhere/made", "third"]


def change(block: str, key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(results: dict[str, Any]) -> None:
        place = results
        for name in block.split("."):
            place = place[name]
        place[key] = value

    return apply


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (change("environment.data", "images", 41), "data: images (40 and 41)"),
        (change("environment.data", "content", "d"), "data: content of images, classes, domains or groups"),
        (change("environment.data", "annotations", "b"), "data: content of images, classes, domains or groups"),
        (change("recipe.protocol", "val_fraction", 0.3), 'split (["leave_one_domain_out", "stratified", 0.2] and '),
        (change("recipe.protocol", "seeds", [0, 2]), "protocol.seeds ([0, 1] and [0, 2])"),
        (change("recipe.protocol", "metric", "nll"), "protocol.metric (accuracy and nll)"),
        (lambda results: results.update(tested_on="domains\x1b[31m"), "tested on (domains never trained on and "),
    ],
)
def test_other_protocols_are_refused(first: Run, damage: Callable[[dict[str, Any]], None], said: str) -> None:
    results = results_of(two_sets(), name="other")
    damage(results)
    with pytest.raises(UserError) as error:
        check_same_protocol([first, run_of(results, Path("out/other"))])
    text = str(error.value)
    assert text.startswith("out/made and out/other: their protocols differ in ") and said in text
    assert text.count("; ") == 1 and text.isprintable(), "one thing differs, and one line says so"


def test_other_held_out_domains_and_rules_are_refused(first: Run) -> None:
    runs = [
        run | {"test_domains": ["c" if held == "b" else held for held in run["test_domains"]]} for run in two_sets()
    ]
    with pytest.raises(UserError, match=r'held-out domains \(\["a", "b"\] and \["a", "c"\]\)'):
        check_same_protocol([first, run_of(results_of(runs))])
    results = results_of(two_sets())
    results["recipe"]["protocol"]["selection"] = "val_domain"
    results["summary"] = [row | {"selection": "val_domain"} for row in results["summary"]]
    with pytest.raises(UserError, match=r"protocol.selection \(train_val and val_domain\)"):
        check_same_protocol([first, run_of(results)])


def test_long_values_are_cut(first: Run) -> None:
    many = [model("erm", (f"domain {i}",), seed) for i in range(30) for seed in (0, 1)]
    with pytest.raises(UserError) as error:
        check_same_protocol([first, run_of(results_of(many))])
    assert "…" in str(error.value) and len(str(error.value)) < 400


def test_a_run_without_a_table_is_refused(first: Run) -> None:
    with pytest.raises(UserError, match=r"^example: has no table, as the run is not finished; run the same command"):
        check_same_protocol([first, run_of(results_of([]))])


def test_names_are_text(first: Run) -> None:
    table, _ = side_by_side([first, other("<script>|\n\x1b[31m")])
    lines = markdown_table(table)
    assert any("| \\<script\\>\\| \\\\x1b\\[31m | erm |" in line for line in lines)
    assert all(line.isprintable() for line in lines)
