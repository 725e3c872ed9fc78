"""What is shown of audit.json: on the page, as Markdown and in a terminal."""

from __future__ import annotations

import copy
import json
import re
import shlex
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import jsonschema
import pytest
import yaml
from audit_examples import clean, cost, fact, rich, undefined, unknown, wide
from canned_runs import HOSTILE, write_run
from example_runs import set_recipe
from PIL import Image
from test_page import Page, check_structure

from xdm_ft.report import Section, Table
from xdm_ft.report.sections import audit as panels
from xdm_ft.report.sections.audit import (
    NOTHING,
    PROMISE,
    audit_lines,
    audit_markdown,
    audit_sections,
    cost_words,
    findings,
    headline,
)
from xdm_ft.report.written import copies_sheet, html, refresh_reports
from xdm_ft.results.run import Run, read_run
from xdm_ft.storage.lines import with_checksum
from xdm_ft.storage.run_directory import RunDirectory

SCHEMA = json.loads(files("xdm_ft.report").joinpath("audit.schema.json").read_text(encoding="utf-8"))
EXAMPLES = [rich, clean, unknown, undefined, lambda: wide(50, 1000)]
PARTS = ("copies", "domain_pairs", "labels", "site_class", "encoder")


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run directory without an audit; tests write their own."""
    return write_run(tmp_path_factory.mktemp("audited") / "run", methods=("erm",), seeds=range(2))


def with_audit(run: Run, audit: Any) -> Run:
    path = run.path / "audit" / "audit.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(with_checksum(audit)), encoding="utf-8")
    return read_run(run.path)


def page_of(run: Run) -> str:
    """The page with the sections of the audit alone: the others take seconds to draw."""
    sections = panels.audit(run)
    return html(run, sections, {figure.name: figure.svg() for section in sections for figure in section.figures})


def table(sections: list[Section], id_: str, caption: str) -> Table:
    [section] = [section for section in sections if section.id == id_]
    return next(table for table in section.tables if table.caption.startswith(caption))


def texts(table: Table) -> list[list[str]]:
    return [[cell.text for cell in row] for row in table.rows]


def test_the_schema_accepts_the_examples_and_refuses_what_is_wrong() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    for make in (*EXAMPLES[:4], lambda: wide(3, 5)):
        jsonschema.validate(make(), SCHEMA)
    for change in ({"version": 1}, {"copies": {}}, {"twins": [["a"]]}, {"labels": 1}, {"more": 1}, {"images": -1}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(rich() | change, SCHEMA)


def test_findings_of_every_kind_are_told_with_their_costs_and_what_to_do() -> None:
    lines = audit_lines(rich())
    assert lines[0] == (
        "office: 2,533 images, 4 domains, 3 classes. Found: twin domains, copies, label errors, site × class."
    )
    text = "\n".join(lines)
    assert (
        "Copies: 14 pairs of images are copies of each other; 14 of them lie in two domains, 14 in training and test; "
        "26 more candidates, 5 across domains: copies.csv"
    ) in text
    assert (
        "  cost: 28 images left out of training: accuracy 93.1% → 90.2%; without as many random ones 93.1% (95%: -4.0 "
        "to -2.0 points), worse on"
    ) in text
    assert (
        "With webcam left out of training too, dslr falls from 99.9% to 84.3%; with as many other images left out, it "
        "has 98.1%"
    ) in text, "the worse one of the two directions"
    assert "  → if they show the same objects" in text
    assert "or scanner, hold them out together: 'protocol.together=[[dslr, webcam]]'" in text
    assert "Label errors: the heads contradict 61 labels (2.4%), most often bike instead of mug (44 images)" in text
    assert "the class is predicted with 93.0% by size and format alone (chance: 25.0%), at no cost that shows" in text
    assert "Cramér's V 0.31 (95%: 0.28 to 0.34)" in text and "a description, no verdict" in text
    assert lines[-1] == "Note: costs are of heads on frozen features" and len(lines) <= 18
    kinds = [finding.kind for finding in findings(rich())]
    assert kinds == ["domain_pairs", "copies", "labels", "site_class", "encoder"], (
        "by cost: 13.8, 2.9, 1.1 points, none"
    )


def test_facts_that_cost_nothing_are_no_finding_and_a_mark_is_one() -> None:
    audit = rich()
    audit["site_class"] |= {"lacking": [], "facts": [fact("lightest colour", "class", 0.28, True, "dslr")]}
    [found] = [finding for finding in findings(audit) if finding.kind == "site_class"]
    assert found.rank == NOTHING and found.remedy == "" and "at no cost that shows" in found.what
    harm = cost("dslr left out of training", 157, 0.9, 0.95, 0.001)
    audit["site_class"]["costs"] = [harm]
    [found] = [finding for finding in findings(audit) if finding.kind == "site_class"]
    assert found.rank == PROMISE and "make all files alike" in found.remedy
    mark = {"kind": "tint", "domain": "webcam", "class": "mug", "share": 0.97, "low": 0.9, "elsewhere": 0.01}
    for is_found, rank in ((True, PROMISE), (False, NOTHING)):
        audit["site_class"] |= {"costs": [], "marks": [{**mark, "found": is_found}]}
        jsonschema.validate(audit, SCHEMA)
        [found] = [finding for finding in findings(audit) if finding.kind == "site_class"]
        assert found.rank == rank and ("a tint gives away 97.0% of mug in webcam" in found.what) == is_found
        assert texts(table(list(audit_sections(audit, files=True)), "audit-site-class", "Images of a class"))[0][
            :3
        ] == ["tint", "webcam", "mug"]


def test_what_is_not_wrong_and_what_could_not_be_looked_for_is_said() -> None:
    assert headline(findings(clean())) == "Nothing was found."
    assert "Copies: none; 40 more candidates, 7 across domains: copies.csv" in audit_lines(clean())
    lines = audit_lines(unknown())
    assert lines[0].endswith("Nothing was found. Not decided: copies, twin domains, label errors, site × class.")
    assert "Note: no image decodes" in lines
    lines = audit_lines(undefined())
    assert lines[0].endswith("Found: copies. Not decided: twin domains.")
    assert "Twin domains: needs three domains" in lines
    assert "  cost: 3 images left out of training: fewer than two domains" in lines
    assert cost_words(cost("left out of training", 1, 0.5, 0.6, None)).endswith("+10.9 points), no verdict")


def nulled(tree: Any) -> Iterator[Any]:
    """Copies of a document in each of which one more value is null."""
    for key in tree if isinstance(tree, dict) else range(len(tree)):
        changed = copy.copy(tree)
        if isinstance(tree[key], dict | list):
            for inner in nulled(tree[key]):
                changed[key] = inner
                yield {**changed} if isinstance(changed, dict) else [*changed]
        changed[key] = None
        yield changed


def test_every_value_may_be_null_that_the_schema_lets_be_null() -> None:
    audit = rich()
    for part, key in (("copies", "pairs"), ("domain_pairs", "left_out"), ("labels", "images"), ("site_class", "facts")):
        audit[part][key] = audit[part][key][:1]
    valid = jsonschema.Draft202012Validator(SCHEMA).is_valid
    copies = [changed for changed in nulled(audit) if valid(changed)]
    assert len(copies) > 60
    for changed in copies:
        assert audit_markdown(changed) and audit_lines(changed)


def test_twins_that_share_a_domain_are_held_out_as_one() -> None:
    audit = rich() | {"twins": [["a b", "1"], ["x", "y"], ["1", "it's"]]}
    [remedy] = [finding.remedy for finding in findings(audit) if finding.kind == "domain_pairs"]
    [word] = shlex.split(remedy.rpartition(": ")[2])
    key, _, value = word.partition("=")
    assert key == "protocol.together" and yaml.safe_load(value) == [["x", "y"], ["a b", "1", "it's"]]


def test_numbers_of_the_tables() -> None:
    sections = list(audit_sections(rich(), files=True))
    assert [section.id for section in sections] == [
        "audit", "audit-copies", "audit-twins", "audit-labels", "audit-site-class", "audit-encoder",
    ]  # fmt: skip
    copies = table(sections, "audit-copies", "The most similar")
    assert "The first 10 of 40 pairs; all: copies.csv." in copies.caption and len(copies.rows) == 10
    assert texts(copies)[0] == [
        "dslr/mug/0.jpg", "webcam/mug/0.jpg", "dslr / webcam", "mug", "yes", "yes", "0.610", "0.906",
    ]  # fmt: skip
    nearest = texts(table(sections, "audit-twins", "Of the images"))
    assert nearest[2] == ["dslr", "2.0", "1.0", "–", "97.0"]
    left_out = table(sections, "audit-twins", "Accuracy")
    assert texts(left_out)[0] == ["dslr", "webcam", "99.9", "84.3", "98.1", "15.6", "13.8", "<0.001", "worse"]
    assert left_out.rows[0][6].note == "(11.8 to 15.8)" and len(left_out.rows) == 12
    shares = texts(table(sections, "audit-site-class", "Share"))
    assert shares[2] == ["dslr", "157", "0.0", "63.7", "36.3"]
    facts = texts(table(sections, "audit-site-class", "What facts"))
    assert facts[1] == ["size and format", "class", "all domains", "93.0", "25.0", "0.004", "yes"]
    costs = texts(table(sections, "audit", "What the findings cost: accuracy on"))
    assert costs[0][3:] == ["93.1", "90.2", "93.1", "-2.9", "0.001", "worse on these domains"]
    unclear = [cost | {"verdict": "no verdict", "note": "no verdict: one seed"} for cost in rich()["copies"]["costs"]]
    noted = rich() | {"copies": rich()["copies"] | {"costs": unclear}}
    rows = texts(table([*audit_sections(noted, files=True)], "audit", "What the findings cost: accuracy on"))
    assert [row[-1] for row in rows].count("no verdict: one seed") == len(unclear)
    unknown, balanced = rich()["copies"]["costs"][0] | {"before": None}, {"metric": "balanced_accuracy"}
    mixed = rich() | {"copies": rich()["copies"] | {"costs": [unknown]}}
    mixed["labels"] = mixed["labels"] | {"costs": [cost | balanced for cost in mixed["labels"]["costs"]]}
    mixed["site_class"] = mixed["site_class"] | {"costs": []}
    assert table([*audit_sections(mixed, files=True)], "audit", "What the findings cost: balanced accuracy on").rows
    assert "1,270 images" in texts(table(sections, "audit-encoder", "Features"))[3][2]
    [figure] = [figure for section in sections for figure in section.figures]
    assert "of dslr 97.0% in webcam" in figure.alt and "97" in figure.svg() and "lies in" in figure.svg()


def test_names_of_files_are_on_the_page_only_if_the_recipe_says_so(audited: Run) -> None:
    run = with_audit(audited, rich())
    page = page_of(run)
    assert "Is the data what it says?" in page and "15.6" in page
    assert "dslr/mug/0.jpg" not in page and "amazon/bike/0.jpg" not in page and "names of files are in" in page
    assert "dslr/mug/0.jpg" in audit_markdown(rich())
    set_recipe(run, report={"images": True})
    assert "dslr/mug/0.jpg" in page_of(run)


@pytest.mark.parametrize("make", EXAMPLES)
def test_every_example_has_a_small_page_and_tables_in_form(audited: Run, make: Any) -> None:
    sections = list(audit_sections(make(), files=True))
    tables = [table for section in sections for table in section.tables]
    assert tables and all(len(row) == len(table.header) for table in tables for row in table.rows)
    assert all(len(table.rows) <= 16 and len(table.header) <= 13 for table in tables)
    # a shell's command with 25 pairs of long names is the longest text
    assert len(audit_markdown(make())) < 30_000 and sum(map(len, audit_lines(make()))) < 8_000
    run = with_audit(audited, make())
    text = page_of(run)
    (run.path / "audit.html").write_text(text, encoding="utf-8")
    check_structure(Page(run.path / "audit.html"))
    assert len(text) < 120_000


@pytest.mark.slow
def test_the_reports_follow_the_audit(audited: Run) -> None:
    run = with_audit(audited, rich())
    set_recipe(run, report={"page": True})
    directory = RunDirectory(run.path)
    refresh_reports(directory, run)
    assert "## Is the data what it says?" in (run.path / "results.md").read_text(encoding="utf-8")
    assert "14 pairs of images are copies" in (run.path / "report.html").read_text(encoding="utf-8")
    again = with_audit(audited, clean())
    set_recipe(again, report={"page": True})
    refresh_reports(directory, again)
    assert "Nothing was found." in (run.path / "report.html").read_text(encoding="utf-8")


def test_an_audit_that_cannot_be_read_is_a_warning_of_one_line(audited: Run, caplog: pytest.LogCaptureFixture) -> None:
    run = with_audit(audited, rich())
    path = run.path / "audit" / "audit.json"
    path.write_text(path.read_text(encoding="utf-8").replace("0.999", "0.998", 1), encoding="utf-8")
    for content in (path.read_bytes(), b"{", b"[]", b'{"version": 7}', b"{}"):
        path.write_bytes(content)
        caplog.clear()
        assert read_run(run.path).audit is None
        [record] = caplog.records
        assert "run `xdm-ft audit` again" in record.message and "\n" not in record.message
    path.unlink()
    assert read_run(run.path).audit is None


def renamed(tree: Any, names: dict[str, str]) -> Any:
    if isinstance(tree, dict):
        return {names.get(key, key): renamed(value, names) for key, value in tree.items()}
    if isinstance(tree, list):
        return [renamed(value, names) for value in tree]
    return names.get(tree, tree) if isinstance(tree, str) else tree


def test_hostile_names_stay_text(audited: Run) -> None:
    script, pipe, override, escape, letters, formula, _, comment = HOSTILE
    names = {"amazon": script, "caltech": pipe, "dslr": override, "webcam": escape, "bike": comment, "mouse": letters}
    names |= {"dslr/mug/0.jpg": script + ".jpg", "amazon/bike/0.jpg": formula, "office": pipe}
    audit = renamed(copy.deepcopy(rich()), names)
    run = with_audit(audited, audit)
    set_recipe(run, report={"images": True})
    (run.path / "audit.html").write_text(page_of(run), encoding="utf-8")
    page = Page(run.path / "audit.html")
    check_structure(page)
    assert "<script>alert" not in page.text and "<img src=x" not in page.text
    markdown = audit_markdown(audit)
    assert not re.search(r"(?<!\\)<script|(?<!\\)<img", markdown) and "\x1b" not in markdown
    assert "a\\|b c" in markdown and "\u202e" not in markdown


def test_copies_are_shown_side_by_side() -> None:
    pairs = rich()["copies"]["pairs"][:2]
    pairs[1] |= {"sure": False, "straddles": False, "first": "<b>.jpg"}
    images = [(Image.new("RGB", (400, 300), "red"), Image.new("RGB", (30, 90), "blue")) for _ in pairs]
    page = copies_sheet(((pair, *both) for pair, both in zip(pairs, images, strict=True)), "Copies of office")
    assert page.count("<img") == 2 and "Copies of office" in page and "&lt;b&gt;.jpg" in page
    assert "1: copy, score 0.61, in training and test" in page and "2: similar, score 0.60<" in page
    assert "dslr/mug/0.jpg" in page and len(page) < 20_000
