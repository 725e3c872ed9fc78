"""`xdm-ft report`, on run directories that hold results alone."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from example_runs import results_of, two_sets
from filelock import FileLock

from xdm_ft.cli.parser import main
from xdm_ft.report import Section, written
from xdm_ft.report.csv import COLUMNS
from xdm_ft.report.sections import brief_sections
from xdm_ft.results.run import Run
from xdm_ft.storage.run_directory import RunDirectory

NAME = "a|<script>[31m=1 $x_1$"


def made(path: Path, **recipe: Any) -> None:
    runs = [run | {"method": NAME if run["method"] != "erm" else "erm"} for run in two_sets()]
    RunDirectory(path).write_results(results_of(runs, **{"name": path.name} | recipe))


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch, in_folder: Path) -> list[bool]:
    """Two runs in the current folder, `one` and `two`; the settings of the pages that were drawn."""
    for name in ("one", "two"):
        made(Path(name))
    settings: list[bool] = []

    def draw(run: Run) -> list[Section]:
        (run.path / "report.html").write_text("page")
        settings.append(run.recipe.report.images)
        return list(brief_sections(run))

    monkeypatch.setattr(written, "write_page", draw)
    return settings


def test_one_run(pages: list[bool], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "one"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(
        "On a new domain expect about 65.0%; 2 held-out domains give no interval. Method: a|<script>[31m=1 $x_1$"
    )
    ranks = (
        "A new site like these lies below the worst of the 2 held-out ones (50.0%) with probability 1 in 3, between "
    )
    assert f"{ranks}worst and best with 1 in 3. a|<script>" in out and "is chosen by its results on domains held" in out
    assert all(word in out for word in ("selection: train_val", "65.0 ± 0.0", "All metrics", "worst domain"))
    assert all(line.isprintable() for line in f"{out}{err}".splitlines())
    assert err == "wrote one/results.md, one/results.csv, one/report.html\n" and pages == [False]
    before = {path: path.stat().st_mtime_ns for path in Path("one").iterdir()}
    assert main(["report", "one", "--images", "--quiet"]) == 0
    assert capsys.readouterr().err == "" and pages[1]
    assert all(path.stat().st_mtime_ns > before[path] for path in map(Path, ("one/results.md", "one/report.html")))
    assert Path("one/results.json").stat().st_mtime_ns == before[Path("one/results.json")]


@pytest.mark.usefixtures("pages")
def test_each_format(capsys: pytest.CaptureFixture[str]) -> None:
    printed = {}
    for name in ("text", "markdown", "latex", "csv"):
        assert main(["report", "one", "--format", name, "--quiet"]) == 0
        printed[name] = capsys.readouterr().out
    assert printed["markdown"] == Path("one/results.md").read_text()
    assert printed["csv"] == Path("one/results.csv").read_bytes().decode()
    rows = list(csv.DictReader(io.StringIO(printed["csv"], newline="")))
    assert [row["method"] for row in rows] == ["erm"] * 3 + [NAME] * 3, "a name is what it is in the data"
    assert r"a\textbar{}\textless{}script\textgreater{}" in printed["latex"] and "\\toprule" in printed["latex"]
    for suffix, name in (("md", "markdown"), ("tex", "latex"), ("CSV", "csv")):
        assert main(["report", "one", "--out", f"out.{suffix}", "--quiet"]) == 0
        assert capsys.readouterr().out.startswith(f"wrote out.{suffix}: ")
        assert Path(f"out.{suffix}").read_bytes().decode() == printed[name]
    assert main(["report", "one", "--format", "latex", "--out", "out.txt"]) == 0
    assert Path("out.txt").read_text() == printed["latex"]
    assert main(["report", "one", "--out", "out.txt"]) == 0
    assert Path("out.txt").read_text() in printed["text"]  # without the sentence above the tables


@pytest.mark.usefixtures("pages")
def test_what_oracle_selects_is_in_latex_and_csv_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*arguments: str) -> str:
        assert main(["report", *arguments, "--quiet"]) == 0
        return capsys.readouterr().out

    for name, own in (("both", "train_val"), ("cheating", "oracle")):
        results = results_of(two_sets(), name=name)
        results["recipe"]["protocol"]["selection"] = own
        for run in results["runs"]:
            run["selected"]["oracle"] = run["selected"]["train_val"]
        results["summary"] += [row | {"selection": "oracle"} for row in results["summary"]]
        RunDirectory(Path(name)).write_results(results)
    assert printed("one", "--format", "latex") == printed("one", "--format", "latex", "--oracle"), "it has no oracle"
    for name in ("text", "markdown"):
        assert "CHEATING" in printed("both", "--format", name)
    tex, asked = printed("both", "--format", "latex"), printed("both", "--format", "latex", "--oracle")
    assert "CHEATING" not in tex and "oracle" not in tex and asked.startswith(tex) and "CHEATING" in asked
    table, asked = (
        csv.DictReader(printed("both", "--format", "csv", *more).splitlines()) for more in ([], ["--oracle"])
    )
    assert [row["selection"] for row in table] == ["train_val"] * 6
    assert [row["selection"] for row in asked] == ["train_val"] * 6 + ["oracle"] * 6
    with Path("both/results.csv").open(newline="") as file:
        assert [row["selection"] for row in csv.DictReader(file)] == ["train_val"] * 6
    assert len(list(csv.DictReader(printed("both", "one", "--format", "csv").splitlines()))) == 12 + 2
    assert len(json.loads(printed("both", "--json"))["rows"]) == 12
    for name in ("latex", "csv"):
        assert "oracle" in printed("cheating", "--format", name), "the recipe's own rule is always there"


def test_several_runs(pages: list[bool], capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(Path().rglob("*"))
    assert main(["report", "one", "two"]) == 0
    out, err = capsys.readouterr()
    assert "2 runs side by side" in out and out.count("65.0 ± 0.0") == 2 * 2 and err == ""
    assert all(line.isprintable() for line in out.splitlines())
    assert main(["report", "one", "two", "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out, newline="")))
    assert [row["run"] for row in rows[:-2]] == ["one"] * 6 + ["two"] * 6
    assert [(row["of"], row["method"], row["compared_with"]) for row in rows[-2:]] == [
        ("runs", f"two: {method}", f"one: {method}") for method in ("erm", NAME)
    ]
    assert {(float(row["difference"]), row["here"]) for row in rows[-2:]} == {(0, "no verdict")}
    assert sorted(Path().rglob("*")) == before and pages == [], "their own reports stay as they are"


@pytest.mark.usefixtures("pages")
def test_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "one", "--json", "--out", "t.tex"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["runs"] == ["one"] and document["out"] == "t.tex"
    assert document["written"] == ["one/results.md", "one/results.csv", "one/report.html"]
    assert all(tuple(row) == COLUMNS for row in document["rows"]) and len(document["rows"]) == 6
    mean = document["rows"][3]
    assert mean["method"] == NAME and mean["mean"] == pytest.approx(0.65) and mean["here"] == "no verdict"
    assert main(["report", "one", "two", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["runs"] == ["one", "two"] and document["written"] == [] and document["out"] is None


@pytest.mark.usefixtures("pages")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["none"], "none: does not exist; name a run directory"),
        (["one", "metric"], "one and metric: their protocols differ in protocol.metric (accuracy and nll)"),
        (["one", "two", "./one"], "one: is named twice"),
        (["one", "two", "--images"], "--images: is about the page of one run"),
        (["one", "--out", "one/results.json"], "--out one/results.json: its name must end in .txt, .md, .tex, .csv"),
        (["one", "--out", "one/results.json/x.md"], "x.md: cannot be written"),
        (["unfinished"], "unfinished: has no table, as its run is not finished; run the same command to finish it"),
        (["one", "unfinished"], "unfinished: has no table"),
        (["damaged"], "damaged/results.json: cannot be read as the results of a run"),
    ],
)
def test_faults_are_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    protocol = results_of(two_sets())["recipe"]["protocol"] | {"metric": "nll"}
    made(Path("metric"), protocol=protocol)
    RunDirectory(Path("unfinished")).write_results(results_of(two_sets()) | {"summary": []})
    made(Path("damaged"))
    text = Path("damaged/results.json").read_text()
    Path("damaged/results.json").write_text(text.replace("0.95", "0.96", 1))
    assert main(["report", *arguments, "--quiet"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("xdm-ft: ") and err.count("\n") == 1 and said in err
    assert not Path("none").exists()


@pytest.mark.usefixtures("pages")
def test_a_run_that_is_being_written(capsys: pytest.CaptureFixture[str]) -> None:
    with FileLock("one/run.lock"):
        assert main(["report", "one"]) == 2
        assert (
            "one: another process (xdm-ft run, analyse, audit or report) is writing here; wait until it ends"
            in capsys.readouterr().err
        )
        assert main(["report", "one", "two"]) == 0, "which writes nothing"


def test_a_folder_that_may_not_be_written(
    pages: list[bool], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert main(["report", "one"]) == 0
    out, err = capsys.readouterr()
    assert "65.0 ± 0.0" in out and err == "one: is read-only, so its reports stay as they are\n" and pages == []
