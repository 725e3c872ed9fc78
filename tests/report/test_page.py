"""report.html: its structure, and its numbers read back or counted by loops over the predictions."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from html.parser import HTMLParser
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from canned_runs import DOMAINS, HOSTILE, METHODS, Named, write_run
from example_runs import set_recipe
from scipy import stats

from xdm_ft.evaluation.metrics import ECE_BINS
from xdm_ft.evaluation.predictions import HeldOutImages, Prediction
from xdm_ft.report import Section, cells
from xdm_ft.report import Table as ReportTable
from xdm_ft.report.charts import SERIES, VARIABLES
from xdm_ft.report.headline import details, sentence
from xdm_ft.report.markup import markdown_lines
from xdm_ft.report.sections import sections
from xdm_ft.report.sections.results import UNEQUAL, domain_interval, on_the_page
from xdm_ft.report.written import fall_of, write_page, write_reports
from xdm_ft.results import selected_by_set
from xdm_ft.results.measured import LEVELS, confidence_and_rest, confidence_level
from xdm_ft.results.run import MAX_SETS, Run, read_run
from xdm_ft.runtime.errors import UserError, printable
from xdm_ft.storage.run_directory import MEASURED, RunDirectory

VOID = {"meta", "link", "img", "br"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    text: str = ""


@dataclass
class Table:
    caption: str = ""
    rows: list[list[str]] = field(default_factory=list)  # the first one is the header

    def by_first(self) -> dict[str, dict[str, str]]:
        """{first cell: {title of a column: cell}}"""
        return {row[0]: dict(zip(self.rows[0], row, strict=True)) for row in self.rows[1:]}


class Page(HTMLParser):
    """Elements in their order. Fails where an end tag does not fit."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[Element] = []
        self.tables: list[Table] = []
        self._open: list[Element] = []
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)
        self.close()
        assert not self._open, f"{self._open[-1].tag} is not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"{tag} has an attribute twice: {names}"
        self.elements.append(Element(tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append(self.elements[-1])
        if tag == "table":
            self.tables.append(Table())
        elif tag == "tr":
            self.tables[-1].rows.append([])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        element = self._open.pop()
        assert element.tag == tag, f"{element.tag} ends with {tag}"
        if tag == "caption":
            self.tables[-1].caption = element.text.strip()
        elif tag in ("th", "td"):
            self.tables[-1].rows[-1].append(element.text.strip())

    def handle_data(self, data: str) -> None:
        note = any(element.attributes.get("class") == "note" for element in self._open)
        for element in self._open:
            if not (note and element.tag in ("th", "td")):  # cells without their second line
                element.text += data

    def all(self, tag: str) -> list[Element]:
        return [element for element in self.elements if element.tag == tag]

    def table(self, begin: str) -> Table:
        return next(table for table in self.tables if table.caption.startswith(begin))


@pytest.fixture(scope="session")
def page(run: Run) -> Page:
    return Page(run.path / "report.html")


def check_structure(page: Page) -> None:
    """What every page has to keep to."""
    ids = [element.attributes["id"] for element in page.elements if "id" in element.attributes]
    assert len(ids) > 5 and len(ids) == len(set(ids))
    for element in page.elements:
        for name in ("src", "href", "xlink:href", "action", "data", "poster", "srcset"):
            if name in element.attributes:
                value = element.attributes[name]
                assert value.startswith("data:") or value.removeprefix("#") in ids, f"{element.tag} {name}={value}"
        assert not [name for name in element.attributes if name.startswith("on")], element
        for reference in ("aria-labelledby", "aria-describedby"):
            assert element.attributes.get(reference, ids[0]) in ids, element
    for inside in re.findall(r"url\(([^)]*)\)", page.text):
        assert inside.removeprefix("#") in ids
    for image in (*page.all("img"), *(e for e in page.all("svg"))):
        name = image.attributes.get("alt") or image.attributes.get("aria-label")
        assert name and image.attributes.get("role", "img") == "img"
    levels = [int(e.tag[1]) for e in page.elements if re.fullmatch("h[1-6]", e.tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(later <= before + 1 for before, later in pairwise(levels))
    assert [len(page.all(tag)) for tag in ("main", "nav", "html", "title", "script", "h1")] == [1] * 6
    assert page.all("a")[0].attributes == {"class": "skip", "href": "#report"}
    for table in page.tables:
        assert table.caption and len({len(row) for row in table.rows}) == 1
    assert all(e.attributes.get("scope") in ("col", "row") for e in page.all("th"))
    scrolled = [e for e in page.elements if "scroll" in e.attributes.get("class", "").split()]
    assert scrolled and all(e.attributes["tabindex"] == "0" for e in scrolled)
    script = page.all("script")[0].text
    [policy] = [e.attributes["content"] for e in page.all("meta") if "http-equiv" in e.attributes]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert "default-src 'none'" in policy and f"script-src 'sha256-{digest}'" in policy and "http" not in policy
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202a-\u202e]", page.text)


def test_structure_and_headline(run: Run, page: Page) -> None:
    check_structure(page)
    assert page.all("svg") and not page.all("img")
    svg = page.text[page.text.index("<svg") :]
    assert "figure_1" not in page.text and "axes_1" not in page.text and "DejaVu" not in svg and "#0101" not in svg
    assert "var(--ink)" in svg and "var(--rule)" in svg
    main = page.all("main")[0].text
    assert sentence(run) in main and details(run) in main
    commands = [element.text for element in page.all("code") if element.attributes.get("class") == "command"]
    assert commands[0] == f"xdm-ft export {run.path.name} my_model"
    assert str(run.path.parent) not in page.text, "who gets the page learns it"
    assert [command.split()[1] for command in commands] == [
        "export",
        "predict",
        "assess",
        "evaluate",
        "audit",
        "analyse",
    ]
    rows = page.table("Protocol: made up; step picked by train_val").by_first()
    assert list(rows) == list(METHODS)
    for row in run.recipe_rows:
        error = "" if row.stderr is None else f" ± {100 * row.stderr:.1f}"
        assert rows[row.method]["mean ± stderr"] == f"{100 * (row.mean or 0):.1f}{error}"
    whole = json.loads((run.path / "results.json").read_text(encoding="utf-8"))
    assert whole == run.results | {"runs": [*run.results["runs"]]}, "results.json is not touched"


def test_six_parts_are_open_and_all_else_is_below_diagnostics(run: Run, page: Page) -> None:
    before, after = page.text.split('<section id="diagnostics"')
    opened = re.findall(r'<section id="([\w-]+)"', before)
    mistakes = ["part-mistakes", "confusion", "mistakes-off"]
    confidence = ["part-confidence", "reliability", "risk-coverage"]
    assert opened == ["results", "differences", *mistakes, *confidence, "data"]
    folded = re.findall(r'<section id="([\w-]+)"[^>]*>\n<details class="folded">', after)
    assert {"metrics", "intervals", "cost", "results-oracle", "environment", "recipe"} <= {*folded}
    assert len(folded) == after.count("<section id="), "each has a line that opens it"
    assert "differences-oracle" not in after and "differences-oracle" in {section.id for section in sections(run)}


def test_the_fall_from_validation_is_said_first(tmp_path: Path) -> None:
    """As a loop over the models has it: the mean over held-out domains, then each of them."""
    made = write_run(tmp_path, rules=["train_val"], seeds=range(2))
    for i, record in enumerate(made.records):
        pick = record.selected["train_val"]
        record.selected["train_val"] = dataclasses.replace(pick, value=(pick.value or 0) + 0.01 * i)
    write_page(made)
    page = Page(tmp_path / "report.html")
    assert made.choice is not None and {*made.choice.at.values()} == {made.chosen}
    pairs = {"erm": [], made.chosen: []}
    for method, held in [(method, (name,)) for method in pairs for name in DOMAINS]:
        picks = [record.selected["train_val"] for record in made.records if record.key[:2] == (method, held)]
        tested = np.mean([pick.metrics["test"].accuracy for pick in picks])
        pairs[method].append((np.mean([pick.value for pick in picks]), tested))
    own = pairs[made.chosen]
    shown = [f"{100 * before:.1f} → {100 * after:.1f}" for before, after in [np.mean(own, 0), *own]]
    values = [element.text for element in page.all("dd") if element.attributes["class"] == "value"]
    assert values == [f"{shown[0]}%", *shown[1:]]
    lowest = min(after for _, after in own)
    worst = [name + (" (worst)" if after == lowest else "") for name, (_, after) in zip(DOMAINS, own, strict=True)]
    lead = f"accuracy of {made.chosen}, from validation to held-out images, the mean over 3 held-out domains"
    assert [element.text for element in page.all("dt")] == [lead, *worst], "and no number of models"
    before, after = np.mean(own, 0)
    note = next(element.text for element in page.all("dd") if element.attributes["class"] == "note")
    assert note.startswith(f"{100 * (before - after):.1f} points lower than on validation images; zero_shot: ")
    places = [
        page.text.index(words) for words in (f"{lead}</dt>", "What to do next", 'id="results"', 'id="differences"')
    ]
    assert places == sorted(places)


def test_what_training_took_is_in_diagnostics_and_in_the_other_files(run: Run, page: Page) -> None:
    before, after = page.text.split('<section id="diagnostics"')
    written = "\n".join(markdown_lines(sections(run)))
    assert "draws × gradients" not in before and "draws × gradients" in after and "draws × gradients" in written
    assert "the recipe's rule" not in before and "Selection: train_val, the recipe&#39;s rule" in after
    assert "## Results, selection: train_val (the recipe's rule)" in written
    assert "step picked by train_val" in before, "the protocol of the table"
    assert str(run.choice) in page.all("main")[0].text and str(run.choice) not in before
    table = ReportTable("Protocol", ["method", "mean", "mixed steps"], [cells("erm", "61.0", 16)])
    results, training = on_the_page(run, Section("results", "", "", tables=[table], notes=[f"{UNEQUAL}: …", "other"]))
    assert [[*of.header] for of in (*results.tables, *training.tables)] == [
        ["method", "mean"],
        ["method", "mixed steps"],
    ]
    assert [cell.text for cell in training.tables[0].rows[0]] == ["erm", "16"]
    assert (results.notes, training.notes) == (["other"], [f"{UNEQUAL}: …"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "lead", "sites"),
    [
        ({"methods": ["erm"]}, r"accuracy of erm, from validation to held-out images, the mean over 2 .*", 2),
        ({"metric": "nll"}, r"nll of .*|NLL of .*", 2),
        ({"together": True}, r"accuracy of sam, from validation to held-out images, on a \+ b", 0),
        ({"rules": ["oracle"], "selection": "oracle"}, None, 0),
    ],
)
def test_the_fall_of_other_runs(tmp_path: Path, changes: dict, lead: str | None, sites: int) -> None:
    data = Named(("a", "b"), ("x", "y"), each=20)
    made = write_run(tmp_path, data, **{"methods": ("erm", "sam")} | changes)
    write_page(made)
    labels = [element.text for element in Page(tmp_path / "report.html").all("dt")]
    assert len(labels) == (0 if lead is None else 1 + sites)
    assert lead is None or re.fullmatch(lead, labels[0]), labels


def test_where_validation_has_no_value_the_held_out_one_stands_alone(run: Run) -> None:
    runs = run.quoted
    without = dataclasses.replace(runs.records[0].selected["train_val"], value=None)
    first = dataclasses.replace(runs.records[0], selected={"train_val": without})
    quoted = dataclasses.replace(runs, records=(first, *runs.records[1:]))
    before = selected_by_set(quoted)
    assert before.pop(first.test_domains) is None and None not in before.values() and len(before) == 2
    mean, falls = fall_of(quoted)
    assert (
        mean.validation is None
        and "→" not in mean.text("accuracy")
        and "→" not in falls[first.test_domains].text("nll")
    )


@pytest.mark.slow
def test_many_domains_are_a_ring_each_and_their_mean_stands_first(tmp_path: Path) -> None:
    names = tuple(f"site{i:02}" for i in range(MAX_SETS + 1))
    made = write_run(tmp_path, Named(names, ("x", "y"), each=4), ("erm", "sam"), range(2))
    written = {section.id: section for section in write_page(made)}
    page = Page(tmp_path / "report.html")
    assert page.table("Protocol").rows[0][:4] == ["method", "mean ± stderr", "seeds", "site00"]
    assert written["results"].tables[0].header[1] == "site00", "in results.md it is as ever"
    assert "One ring per held-out domain" in written["results"].figures[0].caption
    assert len(page.all("dt")) == 1 + len(names)


def test_the_pointer_finds_the_values_of_a_curve(page: Page) -> None:
    svg, _ = (e for e in page.all("svg") if e.attributes["aria-label"].startswith("Accuracy of the answers"))
    series = json.loads(svg.attributes["data-points"])
    assert {name for name, *_ in series} == {button for _, button, _ in series} == {*METHODS}
    _, _, width, height = map(float, svg.attributes["viewbox"].split())
    for _, _, points in series:
        xs, ys = [x for x, *_ in points], [y for _, y, _ in points]
        assert len(points) > 10 and xs == sorted(xs) and min(xs) >= 0 and max(xs) <= width
        assert min(ys) >= 0 and max(ys) <= height
        values = [float(text.rpartition(" ")[2]) for *_, text in points]
        highest, lowest = int(np.argmax(values)), int(np.argmin(values))
        assert ys[highest] == min(ys) and ys[lowest] == max(ys), "y of SVG points downwards"


def test_coverage_as_a_loop_over_thresholds_finds_it(run: Run, page: Page) -> None:
    rows = page.table("Share of the images").by_first()
    for row in run.recipe_rows:
        assert float(rows[row.method]["accuracy if all are answered"]) == pytest.approx(
            100 * (row.mean or 0), abs=0.051
        )
        read = [run.prediction(one) for one in run.records if one.method == row.method]
        sure = np.concatenate([p.probabilities.max(1) for p in read if p.probabilities is not None])
        right = np.concatenate([p.predicted == p.images.labels for p in read])
        best = 0.0
        for threshold in np.unique(sure):  # all domains have equally many images here
            answered = sure >= threshold
            if right[answered].mean() >= 0.9:
                best = max(best, answered.mean())
        shown = rows[row.method]["90% right"]
        assert (0.0 if shown == "none" else float(shown)) == pytest.approx(100 * best, abs=1.0)


@pytest.mark.slow
def test_hostile_names_stay_text(tmp_path: Path) -> None:
    data = Named(HOSTILE[:3], HOSTILE[3:], each=6)
    faults = ["images: folder/secret.png is twice in the data", "methods: coral is skipped: the encoder is frozen"]
    made = write_run(tmp_path, data, ("erm", HOSTILE[0], HOSTILE[4], HOSTILE[7]), range(2), findings=faults)
    set_recipe(made, name=HOSTILE[0])
    write_page(made)
    page = Page(tmp_path / "report.html")
    check_structure(page)
    assert page.all("h1")[0].text == HOSTILE[0] and not page.all("img")
    rows = page.table("Protocol: made up; step picked by train_val").by_first()
    assert list(rows) == ["erm", HOSTILE[0], HOSTILE[4], HOSTILE[7]]
    assert page.table("Images per domain and class").rows[0][2:] == [printable(name) for name in HOSTILE[3:]]
    assert "secret" not in page.text and ".png" not in page.text, "names of images"
    assert "1 fault of files" in page.text and "coral is skipped: the encoder is frozen" in page.text
    plots = sorted((tmp_path / "plots").glob("*.svg"))
    phones = [element for element in page.elements if element.attributes.get("class") == "phone"]
    assert len(plots) == len(page.all("svg")) - len(phones) > 5 and phones
    for plot in plots:
        tree = ElementTree.parse(plot)  # fails if it is not XML
        assert not [e for e in tree.iter() if e.tag.rpartition("}")[2] in ("script", "img", "style", "metadata")]
        assert "var(" not in plot.read_text(encoding="utf-8") and tree.getroot()[0].tag.endswith("title")
    text = "".join(ElementTree.parse(tmp_path / "plots" / "results.svg").getroot().itertext())
    assert "<script>" in text

    before = {path: path.read_bytes() for path in (tmp_path / "report.html", *plots)}
    (tmp_path / "plots" / "of-an-earlier-page.svg").write_text("<svg/>")
    (tmp_path / "plots" / "notes.txt").write_text("mine")
    write_page(made)
    assert {path: path.read_bytes() for path in before} == before, "the same run gives the same page"
    assert {*(tmp_path / "plots").iterdir()} == {*plots, tmp_path / "plots" / "notes.txt"}


@pytest.mark.parametrize(
    ("changes", "panels", "lacking"),
    [
        ({"metric": "nll"}, {"confusion", "differences", "reliability", "risk-coverage"}, set()),
        ({"probabilities": "predicted", "together": True}, {"confusion", "reliability", "risk-coverage"}, set()),
        ({"methods": ["xdomainmix"], "seeds": [0]}, {"results", "confusion"}, {"differences"}),
        ({"rules": ["oracle", "train_val"], "selection": "oracle"}, {"results", "confusion"}, set()),
    ],
)
def test_panels_follow_from_what_the_run_has(tmp_path: Path, changes: dict, panels: set, lacking: set) -> None:
    write_page(write_run(tmp_path, Named(("a", "b"), ("x", "y"), each=10), **{"methods": ("erm", "sam")} | changes))
    page = Page(tmp_path / "report.html")
    check_structure(page)
    shown = {element.attributes["id"] for element in page.all("section") if "id" in element.attributes}
    assert panels <= shown and not lacking & shown
    assert {f"#{name}" for name in shown} <= {element.attributes["href"] for element in page.all("a")}


def test_runs_without_models_unfinished_and_failed_have_a_page(tmp_path: Path) -> None:
    made = write_run(tmp_path, Named(("a", "b"), ("x", "y"), each=5), ("erm", "sam"), range(2), rules=["train_val"])

    def page_of(run: Run) -> Page:
        write_page(run)
        page = Page(tmp_path / "report.html")
        check_structure(page)
        return page

    nothing = page_of(Run(tmp_path, made.recipe, made.results | {"runs": [], "summary": []}, [], []))
    assert "No model has been trained yet." in nothing.text and not nothing.all("svg")
    assert not (tmp_path / "plots").exists() or not list((tmp_path / "plots").iterdir())
    begun = page_of(Run(tmp_path, made.recipe, made.results | {"summary": []}, made.records[:3], []))
    assert not begun.all("svg") and "3 trained models" in begun.text
    lost = {"status": "failed", "selected": {}, "reason": "the loss is nan at step 7"}
    failed = [entry | (lost if entry["method"] == "sam" else {}) for entry in made.results["runs"]]
    erm, sam = made.rows
    reason = "4 of 4 runs failed: the loss is nan at step 7"
    empty = {"mean": None, "std": None, "stderr": None, "n": 0, "per_test_domain": {}, "interval": None}
    rows = [erm, dataclasses.replace(sam, **empty, failed=4, reason=reason)]
    records = [record for record in made.records if record.method == "erm"]
    page = page_of(Run(tmp_path, made.recipe, made.results | {"runs": failed}, records, rows))
    assert page.table("Protocol: made up; step picked by train_val").by_first()["sam"]["mean ± stderr"] == "failed"
    assert f"sam: {reason}" in page.all("main")[0].text and "4 failed" in page.all("main")[0].text
    (tmp_path / MEASURED).unlink()
    [file, *_] = sorted(tmp_path.rglob("predictions.safetensors"))
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(UserError, match="is damaged"):
        write_page(read_run(tmp_path))


def test_text_can_be_read_in_both_modes() -> None:
    """WCAG 2's contrast ratio of text and background is at least 4.5."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(one: str, other: str) -> float:
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    style = files("xdm_ft.report").joinpath("page.css").read_text(encoding="utf-8")
    modes = re.findall(r":root \{[^}]*--ink[^}]*\}", style)
    assert len(modes) == 3  # light, dark, print
    for mode in modes[:2]:
        colours = dict(re.findall(r"(--\w+): (#[0-9a-f]{6});", mode))
        for text in ("--ink", "--muted", "--accent"):
            assert contrast(colours[text], colours["--paper"]) >= 4.5 <= contrast(colours[text], colours["--raised"])
    dark = dict(re.findall(r"(--\w+): (#[0-9a-f]{6});", modes[1]))
    for colour in SERIES:  # parts of figures: 3 is enough
        drawn = dark[VARIABLES[colour]] if colour in VARIABLES else colour
        assert contrast(drawn, dark["--paper"]) >= 3, colour


# ------------------------------------------------------------------------------------------- counts over predictions


def test_counts_are_those_of_a_loop(run: Run) -> None:
    pool = run.measured.pools["sam", ("art",)]
    counts, bins = np.zeros((3, 3), int), np.zeros((ECE_BINS, 3))
    for record in run.records:
        if record.key[:2] == ("sam", ("art",)):
            read = run.prediction(record)
            assert read.probabilities is not None
            for label, predicted, row in zip(read.images.labels, read.predicted, read.probabilities, strict=True):
                counts[label, predicted] += 1
                place = min(int(np.ceil(float(row.max()) * ECE_BINS)) - 1, ECE_BINS - 1)
                bins[place] += 1, row.max(), label == predicted
    np.testing.assert_array_equal(pool.counts(3), counts)
    np.testing.assert_allclose(pool.bins, bins, rtol=1e-6)
    assert pool.by_level.sum(0).tolist() == [counts.sum(), np.trace(counts)] and pool.models == 3


@pytest.mark.parametrize("size", [1, 3])
def test_intervals_are_over_seeds_and_groups(size: int, run: Run, tmp_path: Path) -> None:
    """Groups of one size: by hand as images are, from the groups' means. Of a domain, and of the mean over domains."""
    if size > 1:
        dataset = Named()
        dataset.groups = np.arange(len(dataset.labels)) // size
        run = write_run(tmp_path / "run", dataset)
    erm = next(row for row in run.recipe_rows if row.method == "erm")
    means, over = [], []
    for held in DOMAINS:
        own = [record for record in run.records if record.key[:2] == ("erm", (held,))]
        right = np.array([p.predicted == p.images.labels for p in map(run.prediction, own)], float)  # [seeds, images]
        by_group = right.mean(0).reshape(-1, size).mean(1)
        means.append(right.mean(1))
        over.append((by_group.var(ddof=1) / len(by_group), len(by_group) - 1))
    for sets, found in ([1], domain_interval(erm, "photo")), (range(3), (erm.interval.low, erm.interval.high)):
        by_seed = np.mean([means[i] for i in sets], 0)
        of_seeds, parts = by_seed.var(ddof=1) / 3, [(over[i][0] / len(sets) ** 2, over[i][1]) for i in sets]
        variance = of_seeds + sum(v for v, _ in parts)
        freedom = variance**2 / (of_seeds**2 / 2 + sum(v**2 / f for v, f in parts))  # Satterthwaite
        half = stats.t.ppf(0.975, freedom) * variance**0.5
        assert found == pytest.approx((max(by_seed.mean() - half, 0), min(by_seed.mean() + half, 1)), abs=1e-9)


def test_intervals_of_what_has_no_seeds_are_over_images(run: Run) -> None:
    rows = {row.method: row for row in run.recipe_rows}
    [record] = [record for record in run.records if record.key[:2] == ("zero_shot", ("art",))]  # over images alone
    read = run.prediction(record)
    right = (read.predicted == read.images.labels).astype(float)
    half = stats.t.ppf(0.975, len(right) - 1) * right.std(ddof=1) / len(right) ** 0.5
    ends = right.mean() - half, right.mean() + half
    assert domain_interval(rows["zero_shot"], "art") == pytest.approx(ends, abs=1e-9)

    sam = rows["sam"]
    assert sam.interval is not None and sam.mean is not None and sam.interval.low < sam.mean < sam.interval.high


def test_what_is_measured_is_kept_and_made_again(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = shutil.copytree(run.path, tmp_path / "copy")
    kept = (path / MEASURED).read_bytes()
    for damage in (lambda: (path / MEASURED).unlink(), lambda: (path / MEASURED).write_bytes(kept[:-1])):
        damage()
        again = read_run(path)
        assert again.measured.over_images == run.measured.over_images
        again.measured.write(RunDirectory(path))
        assert (path / MEASURED).read_bytes() == kept
    monkeypatch.setattr(RunDirectory, "predictions", None)  # the page opens none
    write_reports(RunDirectory(path), read_run(path))


def test_levels_of_confidence_rise_and_tell_apart_what_is_nearly_sure() -> None:
    near = 1 - 2.0 ** -np.arange(1, 24)
    p = np.array([0.0, 0.001, *near, 1.0])
    levels = confidence_level(p, 1 - p)
    assert levels[0] == 0 and levels[-1] == LEVELS - 1
    assert (np.diff(levels) > 0).all()


@pytest.mark.parametrize("scale", [1, 20])
def test_answers_that_round_to_1_are_ranked_by_the_other_classes(scale: int) -> None:
    margins = torch.linspace(0.1, 4, 40) * scale
    logits = torch.stack([margins, torch.zeros(40), torch.zeros(40)], 1)
    images = HeldOutImages(np.arange(40), np.zeros(40, int), np.zeros(40, int))
    made = Prediction("erm", ("a",), 0, "train_val", images, np.zeros(40, int), None, logits.softmax(1).numpy())
    confidence, others = confidence_and_rest(made.probabilities)
    assert (np.diff(confidence_level(confidence, others)) > 0).all() and (confidence == 1).any() == (scale == 20)
    np.testing.assert_allclose(np.log(others), logits[:, 1:].logsumexp(1) - logits.logsumexp(1), atol=1e-4)


@pytest.mark.slow
def test_captions_name_only_what_is_drawn(tmp_path: Path) -> None:
    alone = {section.id: section for section in write_page(write_run(tmp_path / "alone", methods=("erm",)))}
    assert "grey" not in alone["reliability"].about
    made = write_run(tmp_path / "one-seed", methods=("erm", "sam"), seeds=[0])
    [figure] = next(section for section in write_page(made) if section.id == "differences").figures
    assert "blue" not in figure.caption and "Thin orange line" in figure.caption
    several = {section.id: section for section in write_page(write_run(tmp_path / "several", methods=("erm", "sam")))}
    assert "grey lines are the other methods" in several["reliability"].about
    assert "Thick blue line" in several["differences"].figures[0].caption
