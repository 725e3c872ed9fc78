"""Several runs in one table: only of one protocol, and comparisons between them."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from canned_runs import Named, write_run
from example_runs import comparison, model, results_of, run_of, set_recipe, two_sets

from xdm_ft.evaluation.estimates import holm
from xdm_ft.report.markup import as_text, markdown_lines
from xdm_ft.report.side_by_side import check_same_protocol, compare_runs, run_names, side_by_side
from xdm_ft.results.run import Run
from xdm_ft.results.table import Comparison
from xdm_ft.runtime.errors import UserError


def other(name: str = "other", path: str = "out/other", **recipe: Any) -> Run:
    """A run of ERM alone, 10 points below the first run."""
    runs = [run for run in two_sets() if run["method"] == "erm"]
    for run in runs:
        run["selected"]["train_val"]["metrics"]["test"]["accuracy"] -= 0.1
    encoder = {"encoder": {"model": "large", "trainable": True}}
    return run_of(results_of(runs, name=name, **encoder | recipe), Path(path))


@pytest.fixture
def first() -> Run:
    return run_of(results_of(two_sets()), Path("out/made"))


def test_the_rows_of_all_runs(first: Run) -> None:
    runs = [first, other()]
    check_same_protocol(runs)
    section, metrics = side_by_side(runs, [])
    [table] = section.tables
    rows = [dict(zip(table.header, (cell.text for cell in row), strict=True)) for row in table.rows]
    assert [(row["run"], row["method"]) for row in rows] == [("made", "erm"), ("made", "xdomainmix"), ("other", "erm")]
    assert [(row["encoder"], row["encoder is"], row["augmentation"]) for row in rows[1:]] == [
        ("tiny", "frozen", "none"),
        ("large", "end to end", "none"),
    ]
    assert [row["mean ± stderr"] for row in rows] == ["55.0 ± 0.0", "65.0 ± 0.0", "45.0 ± 0.0"]
    assert (rows[2]["a"], rows[2]["b"], rows[2]["seeds"]) == ("60.0", "30.0", "2")
    assert [row["versus erm of its run"] for row in rows] == ["–", "+10.0", "–"]
    assert [(row["here"], row["elsewhere"]) for row in rows] == [("–", "–"), ("no verdict", "unknown"), ("–", "–")]
    assert [row[:2] for row in metrics.tables[0].rows] == [row[:2] for row in table.rows]
    assert "accuracy in %" in section.title and metrics.tables[0].rows[0][2].text == "55.0 ± 0.0"
    assert table.caption == "Protocol: pets, 40 images; picked by train_val", "one line if it is the same"
    assert any(note.startswith("made, xdomainmix") and "no verdict" in note for note in section.notes)


def test_a_wide_table_stands_in_blocks_of_120_columns(first: Run) -> None:
    """Also in a file or pipe; each block names the rows again, and no column is lost."""
    sections = side_by_side([first, other()], [])
    lines = as_text(sections, io.StringIO()).splitlines()
    headers = [line for line in lines if line.startswith("┃ run")]
    assert max(map(len, lines)) <= 120 and len(headers) > len(sections)
    titles = [title.strip() for line in headers for title in line.strip("┃").split("┃")]
    assert set(titles) == {name for section in sections for table in section.tables for name in table.header}
    assert all(line.split("┃")[2].strip() == "method" for line in headers)


def test_each_run_has_its_own_protocol_line(first: Run) -> None:
    second = other()
    second.rows[0] = second.recipe_rows[0].__class__(
        **{**vars(second.recipe_rows[0]), "protocol": "pets; encoder trained"}
    )
    second.__dict__.pop("recipe_rows")
    [section, _] = side_by_side([first, second], [])
    assert section.tables[0].caption == (
        "Protocol: made: pets, 40 images; picked by train_val; other: pets; encoder trained"
    )


def test_equal_names_become_paths(first: Run) -> None:
    runs = [first, other("made", "elsewhere/made"), other("third")]
    assert [*run_names(runs).values()] == ["out/made", "elsewhere/made", "third"]
    assert [row[0].text for row in side_by_side(runs, [])[0].tables[0].rows] == [
        "out/made",
        "out/made",
        "elsewhere/made",
        "third",
    ]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("environment.data.images", 41, "data: images (40 and 41)"),
        ("environment.data.content", "d", "data: content of images, classes, domains or groups"),
        ("environment.data.annotations", "b", "data: content of images, classes, domains or groups"),
        ("recipe.protocol.val_fraction", 0.3, 'split (["leave_one_domain_out", "stratified", 0.2] and '),
        ("recipe.protocol.together", [["a", "b"]], 'protocol.together ([] and [["a", "b"]])'),
        ("recipe.protocol.metric", "nll", "protocol.metric (accuracy and nll)"),
        ("tested_on", "domains\x1b[31m", "tested on (domains never trained on and "),
    ],
)
def test_other_protocols_are_refused(first: Run, key: str, value: Any, said: str) -> None:
    results = results_of(two_sets(), name="other")
    *path, last = key.split(".")
    block = results
    for name in path:
        block = block[name]
    block[last] = value
    with pytest.raises(UserError) as error:
        check_same_protocol([first, run_of(results, Path("out/other"))])
    text = str(error.value)
    assert text.startswith("out/made and out/other: their protocols differ in ") and said in text
    assert text.count("; ") == 1 and text.isprintable(), "one thing differs, and one line says so"


def test_runs_that_differ_in_soft_labels_alone_are_compared(first: Run) -> None:
    results = results_of(two_sets(), name="other")
    data = results["environment"]["data"]
    data |= {"annotations": "with votes", "without_soft_labels": data["annotations"]}
    check_same_protocol([first, run_of(results, Path("out/other"))])


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
    many = [model("erm", (f"domain {i}",), seed) for i in range(30) for seed in (0, 1)]
    with pytest.raises(UserError) as error:
        check_same_protocol([first, run_of(results_of(many))])
    assert "…" in str(error.value) and len(str(error.value)) < 400, "long values are cut"


def test_a_run_without_a_table_is_refused(first: Run) -> None:
    with pytest.raises(UserError, match=r"^example: has no table, as the run is not finished; run the same command"):
        check_same_protocol([first, run_of(results_of([]))])


def test_names_are_text(first: Run) -> None:
    lines = [*markdown_lines(side_by_side([first, other("<script>|\n\x1b[31m")], []))]
    assert any("| \\<script\\>\\| \\\\x1b\\[31m | erm |" in line for line in lines)
    assert all(line.isprintable() for line in lines)


# -------------------------------------------------------------------------------------- comparisons between the runs


def between(*runs: Run) -> list[Comparison]:
    check_same_protocol(runs)
    found = compare_runs(runs, run_names(runs))
    tables = side_by_side(runs, found)
    headings = [section.title for section in tables]
    assert ("Runs compared with the first one" in headings) == bool(found) and len(tables) == 2 + bool(found)
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    def write(name: str, *methods: str, seeds: Sequence[int], **changes: Any) -> Run:
        found = write_run(
            tmp_path_factory.mktemp(name), Named(each=4), methods, seeds, rules=["train_val", "oracle"], **changes
        )
        set_recipe(found, name=name)
        return found

    return write


def test_runs_of_other_seeds_are_compared(directory: Callable[..., Run]) -> None:
    first = directory("first", "zero_shot", "erm", "sam", seeds=range(4))
    later = directory("later", "zero_shot", "sam", "mix", seeds=range(2, 7))
    zero, sam, mix = between(first, later)
    assert (zero.first, zero.second) == ("later: zero_shot", "first: zero_shot")
    assert (zero.difference, zero.p_here, zero.here) == (0, (1, 1), "no clear difference"), "the same model"
    assert (sam.second, sam.seeds, sam.paired) == ("first: sam", 4, False)
    a, b = (next(row for row in run.recipe_rows if row.method == "sam") for run in (first, later))
    assert a.mean is not None and b.mean is not None and sam.difference == pytest.approx(b.mean - a.mean)
    assert (mix.second, mix.seeds) == ("first: zero_shot", 5), "the first row that has no reference"
    assert sam.p_here is not None and sam.p_here.holm is not None and mix.p_here is not None
    known = [one.p_here.plain for one in (zero, sam, mix) if one.p_here]
    assert [one.p_here and one.p_here.holm for one in (zero, sam, mix)] == pytest.approx(holm(known)), "one family"


def test_ten_common_seeds_are_paired(directory: Callable[..., Run]) -> None:
    first = directory("first", "erm", "sam", seeds=range(11))
    later = directory("later", "mix", "sam", seeds=range(1, 12))
    _, sam = between(first, later)
    assert (sam.seeds, sam.paired) == (10, True)
    common = [[one for one in run.picked if one.method == "sam" and 1 <= one.seed < 11] for run in (first, later)]
    means = [np.mean([one.selected["train_val"].metrics["test"].accuracy for one in own]) for own in common]
    assert sam.difference == pytest.approx(means[1] - means[0])


def test_runs_that_can_not_be_compared(directory: Callable[..., Run]) -> None:
    """The oracle, a first run that compares every row, and results without predictions."""
    cheating = [directory(name, "erm", "sam", seeds=[0, 1, 2], selection="oracle") for name in ("one", "two")]
    assert between(*cheating) == []
    one, two = directory("one", "erm", seeds=[0, 1, 2]), directory("two", "sam", seeds=[0, 1, 2])
    one.results["comparisons"] = [comparison("erm", "erm").to_json()]
    assert between(one, two) == []
    [row] = between(run_of(results_of(two_sets()[:4]), Path("out/a")), other("b"))
    assert row.here == "no verdict" and "predictions are missing" in row.note
    assert row.difference == pytest.approx(-0.1)
