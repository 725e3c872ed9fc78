"""Numbers of sections, worked out by hand or by a loop; what is missing, and names that others chose."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import pytest
from canned_runs import (
    ALPHAS,
    CLASSES,
    DOMAINS,
    HELD,
    HOSTILE,
    PARTS,
    RULE,
    Named,
    curves_of,
    label_curve,
    run_in_memory,
    write_run,
)  # fmt: skip
from example_runs import OF_MODELS, results_of, run_of, set_recipe, two_sets
from PIL import Image

from xdm_ft.data import rows_by_name
from xdm_ft.data.folder import Folder
from xdm_ft.evaluation.intervals import gain_words
from xdm_ft.report import Section, Table
from xdm_ft.report.charts import VARIABLES, looks
from xdm_ft.report.comparisons import differences, further_comparisons
from xdm_ft.report.sections import analysis, predictions, sections, selection
from xdm_ft.report.sections import results as tables_of
from xdm_ft.report.sections.results import luck_of_the_best
from xdm_ft.report.words import between, bytes_text, count_text, scale, seconds_text, significant, trained_words
from xdm_ft.results.measured import MEASURES, MISTAKES, Picked
from xdm_ft.results.run import Run
from xdm_ft.runtime.errors import UserError, plural, signed

PANELS = (analysis.invariance, analysis.divergence, analysis.importance, analysis.embeddings, analysis.calibration)
SCHEMA = json.loads(files("xdm_ft.report").joinpath("analysis.schema.json").read_text(encoding="utf-8"))
KEPT = ("method", "test_domains", "seed", "trial", "inputs", "role", "n", "shares", "images", "points", "kind")


def shown(section: Section | None) -> Section:
    assert section is not None
    return section


def texts(table: Table) -> list[list[str]]:
    return [[cell.text for cell in row] for row in table.rows]


def by_title(table: Table) -> list[dict[str, str]]:
    return [dict(zip(table.header, row, strict=True)) for row in texts(table)]


def column(section: Section | None, title: str) -> list[float | None]:
    [table, *_] = shown(section).tables
    return [row[list(table.header).index(title)].value for row in table.rows]


# ------------------------------------------------------------------------------------------ metrics, settings and costs


def test_means_are_those_of_a_loop_over_results_json() -> None:
    results = results_of(two_sets())
    tests = {(entry["method"], *entry["test_domains"], entry["seed"]): entry["selected"]["train_val"]["metrics"]["test"]
             for entry in results["runs"]}  # fmt: skip
    picked = Picked(run_of(results).every, "train_val", "accuracy")
    assert len(MEASURES) == 8
    for measure in MEASURES:
        for method in ("erm", "xdomainmix"):
            per_seed = []
            for seed in (0, 1):
                of_sets = [tests[method, held, seed] for held in "ab"]
                values = [one.get(measure.score) for one in of_sets]
                if measure.name == "worst_class":
                    values = [min(r for r in one["per_class_recall"].values() if r is not None) for one in of_sets]
                per_seed.append(min(values) if measure.name == "worst_domain" else mean(values))
            spread = picked.mean(method, measure)
            assert spread.mean == pytest.approx(mean(per_seed)) and spread.n == 2
            assert spread.stderr == pytest.approx(stdev(per_seed) / 2**0.5)


def test_seeds_without_a_value_for_every_set_do_not_count() -> None:
    runs = two_sets()
    runs[1]["selected"]["train_val"]["metrics"]["test"]["auroc"] = None  # seed 1 of a
    runs[0]["selected"]["train_val"]["metrics"]["test"]["auroc"] = 0.6
    bad = [{**OF_MODELS, "method": "irm", "test_domains": [held], "seed": seed, "trial": 0, "hparams": {},
            "status": "failed", "selected": {}, "reason": "because"} for held in "ab" for seed in (0, 1)]  # fmt: skip
    section = shown(tables_of.all_metrics(run_of(results_of([*runs, *bad])), "train_val"))
    erm, mix, irm = by_title(section.tables[0])
    assert erm["worst domain"] == "40.0 ± 10.0"  # 0.5 and 0.3: the lower set of each seed
    assert erm["worst class"] == "45.0 ± 0.0"  # (0.5 + 0.4) / 2, (0.7 + 0.2) / 2
    assert erm["NLL"] == "1.500 ± 0.500" and mix["accuracy"] == "65.0 ± 0.0"
    assert erm["AUROC"] == "70.0" and erm["ECE"] == "10.0 ± 0.0"  # (0.6 + 0.8) / 2, one seed
    assert {*irm.values()} == {"irm", "–"}


def test_a_run_of_one_encoder_has_no_further_comparisons() -> None:
    assert further_comparisons(run_of(results_of(two_sets())), "train_val") is None


def test_numbers_in_words() -> None:
    assert [count_text(5130), count_text(85_799_936.0), count_text(None)] == ["5,130", "85.8 million", "–"]
    assert [seconds_text(0.034), seconds_text(45.67), seconds_text(4567.8)] == ["0.03", "45.7", "4,568"]
    assert [bytes_text(9_870), bytes_text(12_340_000), bytes_text(4.5e9)] == ["9.9 kB", "12.3 MB", "4.5 GB"]
    lora = {"lora": {"rank": 2, "blocks": 1}}
    trained = [trained_words(value) for value in (True, {"blocks": 1}, lora)]
    assert trained == ["end to end", "last block", "LoRA of rank 2 in the last block"]
    numbers = [significant(value, 4) for value in (10933.4, 0.0123456, -3e-9, 999.96, 0)]
    assert numbers == ["10933", "0.01235", "-3e-09", "1000.0", "0"]


def test_a_difference_that_rounds_to_zero_has_no_sign() -> None:
    values = (0.0, -0.0, 0.00035, -0.00035, 0.0006, -0.0006)
    assert [scale(value, "accuracy", signed=True) for value in values] == ["0.0"] * 4 + ["+0.1", "-0.1"]
    assert between("nll", [-0.0004, 0.0006], signed=True) == "0.000 to +0.001" and signed(-0.3, 0) == "0"
    assert significant(-0.0) == "0" and gain_words("accuracy", -0.0004).endswith("brought 0.0 points")


def test_how_much_too_good_the_best_row_is() -> None:
    drawn = np.random.default_rng(0).normal(size=(100_000, 3)) * [0.01, 0.02, 0.005]
    assert luck_of_the_best([0.01, 0.02, 0.005]) == pytest.approx(drawn.max(1).mean(), rel=0.02)
    assert luck_of_the_best([2.0, 2.0]) == pytest.approx(2 / math.sqrt(math.pi), rel=1e-3)
    assert luck_of_the_best([0.01]) == luck_of_the_best([]) == 0


def test_figures_show_the_declared_rows_first_and_a_method_keeps_its_colour(tmp_path: Path) -> None:
    """Of more methods than a figure has lines, those that the recipe compares are drawn."""
    methods = ["erm", *(f"method{number}" for number in range(10)), "sam"]
    made = write_run(tmp_path / "run", methods=methods, seeds=[0, 1])
    set_recipe(made, report={"compare": (("method9", "erm"),)})
    assert (
        made.drawn_methods[:3] == ["method9", "erm", "method0"] and [row.method for row in made.recipe_rows] == methods
    )
    drawn = re.findall(r"(?:\. |; )(\w+) from", shown(predictions.risk_coverage(made)).figures[0].alt)
    assert drawn[:3] == [made.shown_method, "method9", "erm"] and len(drawn) == predictions.MAX_LINES
    [forest] = shown(differences(made, "train_val")).figures
    dots, others = tables_of.results(made, "train_val").figures[0], shown(predictions.other_confusions(made)).figures
    for figure in (forest, dots, others[0]):
        assert re.findall(r"method\d+", figure.alt)[0] == "method9", figure.alt
    colour = looks(made.drawn_methods)[made.shown_method or ""].colour
    assert colour in VARIABLES or colour in shown(predictions.reliability(made)).figures[0].svg()
    pairs = [tuple(map(int, row[-1].text.split(" of "))) for row in shown(predictions.confusion(made)).tables[0].rows
             if "." not in row[-1].text]  # fmt: skip
    assert {of for _, of in pairs} == {12}, "a class has 12 images, whatever the number of seeds"


def test_what_was_not_measured_has_no_section() -> None:
    without = run_in_memory()
    without.__dict__.update({"scalars": {}, "analysis": None})
    for made in (run_in_memory(methods=[]), without):
        assert [section.id for section in sections(made)] == ["data", "environment", "recipe"]


def test_correlations() -> None:
    [record] = run_in_memory(["erm"], HELD[:1], [0]).records
    for pairs, words in (
        ([(1, 3), (2, 5), (3, 4)], "value: +0.50 (mean"),
        ([(1, 1), (1, 2), (2, 2), (3, 9)], "value: +0.83 (mean"),  # ties share a rank
        ([(1, 1), (2, 2)], "not defined"),
        ([(1, 1), (1, 2), (1, 3)], "not defined"),
    ):
        assert words in selection.agreement([selection.Trial(record, *pair, False) for pair in pairs])


# ------------------------------------------------------------------------------------------------ labels of a new site


def test_gains_of_labels_are_shown_with_those_of_every_domain() -> None:
    made = run_in_memory(["mlp", "erm"])
    assert tables_of.label_curve(made) is None
    made.results["label_curve"] = label_curve()
    section = shown(tables_of.label_curve(made))
    table = {(row["images chosen"], row["labels"]): row for row in by_title(section.tables[0])}
    assert len(table) == 7 and table["none", "0"]["gain"] == "0.0"
    assert [*table["as xdm-ft label does", "20"].values()][2:] == [
        "66.7", "+6.7", "+1.7 to +11.7", "+3.3", "+6.7", "+10.0",
    ]  # fmt: skip
    fifty = table["at random", "50"]
    assert [fifty[name] for name in ("95% interval", "sketch", "photo")] == ["–", "–", "+15.7"]
    assert "a mean without some domains is of those whose half has enough images" in section.notes
    [figure] = section.figures
    assert "as xdm-ft label does from 0 at 0 to 12.5 at 50; at random from 0 at 0 to 11.5 at 50" in figure.alt
    assert "<svg" in figure.svg()


# -------------------------------------------------------------------------------------------------------- analysis.json


def test_models_that_the_run_does_not_pick_are_left_out() -> None:
    made = run_in_memory()
    assert made.analysis is not None
    other = [one | {"trial": 7} for one in made.analysis["models"]]  # picked before the search has grown
    made.analysis["models"] = [*made.analysis["models"][2:], *other, other[0] | {"method": "of another run"}]
    notes = shown(analysis.calibration(made)).notes
    assert "2 of 8 models are not measured yet: `xdm-ft analyse` measures them" in notes and len(made.analysed()) == 6
    made.analysis["schema"] = 2
    made.__dict__.pop("_measured")  # it is read once
    with pytest.raises(UserError, match="has schema 2, and this version reads 1; run `xdm-ft analyse`"):
        analysis.invariance(made)


def test_a_distance_of_normalised_features_has_no_bar_among_those_of_raw_ones() -> None:
    made = run_in_memory(["erm", "prototypes"])
    assert made.analysis is not None

    def alts(*normalized: str) -> list[str]:
        for model in made.analysis["models"]:
            model["normalized"] = model["method"] in normalized
        return [figure.alt + figure.caption for figure in shown(analysis.invariance(made)).figures]

    paper, code, risk = alts("prototypes")
    assert all("prototypes: " not in alt and "No bar: prototypes" in alt for alt in (paper, code))
    assert "prototypes: " in risk and "No bar" not in risk, "a variance of losses has no such scale"
    assert all(
        "prototypes: " in alt and "No bar" not in alt
        for alts_of in (alts(), alts("erm", "prototypes"))
        for alt in alts_of
    )


def nulled(tree: Any) -> Iterator[Any]:
    """Copies of a model in each of which one more value is null, from the leaves to whole parts."""
    for key in [key for key, value in tree.items() if value is not None and key not in KEPT]:
        if isinstance(tree[key], dict):
            yield from ({**tree, key: inner} for inner in nulled(tree[key]))
        if key not in (*PARTS, "domains", "risk", "class", "pairs", "label") or not isinstance(tree[key], dict):
            yield {**tree, key: None}


def test_every_value_may_be_null() -> None:
    made = run_in_memory(["xdomainmix"], HELD[:1], (0,))
    assert made.analysis is not None
    whole = made.analysis["models"][0]
    copies = list(nulled(whole))
    assert len(copies) > 60
    made.analysis["models"] = copies  # together, so that means over models meet every null
    for panel in PANELS:
        for figure in shown(panel(made)).figures[:2]:
            figure.svg()
    keys = whole.keys() - {"method", "test_domains", "seed", "trial", "inputs"}
    made.analysis["models"] = [whole | dict.fromkeys(keys)]
    made.__dict__.pop("_measured")
    assert [panel(made) for panel in PANELS] == [None] * 5


def test_reliability_over_seeds_counts_images() -> None:
    first = [{"confidence": 0.9, "accuracy": 0.8, "n": 30}, {"confidence": 0.5, "accuracy": 0.5, "n": 9}]
    second = [{"confidence": 0.8, "accuracy": 0.5, "n": 10}, {"confidence": None, "accuracy": None, "n": 0}]
    bins = analysis.pooled_bins([{"bins": first}, {"bins": None}, {"bins": second}], "bins")  # one has no temperature
    assert bins == [(pytest.approx(87.5), pytest.approx(72.5))]  # the second bin has too few images


# ----------------------------------------------------------------------------------------- from zero-shot to fine-tuned


def with_road(made: Run, method: str, varies: str, picked: float | None, settings: tuple[float | None, ...]) -> None:
    """Gives the models of a method a curve over these settings, on which the test metric rises by 10 points each."""
    for record in (record for record in made.every if record.method == method):
        points = [{varies: value, "test": 0.5 + i / 10} for i, value in enumerate(settings)]
        pick = dataclasses.replace(record.selected[RULE], curve=points, hparams={varies: picked})
        record.selected[RULE] = pick


def test_every_road_begins_at_zero_shot_and_has_a_ring_where_it_was_picked(tmp_path: Path) -> None:
    made = write_run(tmp_path, methods=("zero_shot", "erm", "xdomainmix", "sam", "prototypes"), rules=[RULE])
    assert selection.road(made) is None
    with_road(made, "erm", "l2", None, (None, 10.0, 0.001))
    with_road(made, "xdomainmix", "alpha", 0.5, (0.0, 0.5, 1.0))
    with_road(made, "sam", "gda_alpha", 0.01, (0.0, 0.01, 100.0, 200.0))
    with_road(made, "prototypes", "l2", 1.0, (1.0, 0.1))  # from zero: not from zero-shot
    section = shown(selection.road(made))
    versus, models = section.tables
    assert {row["method"] for row in by_title(versus)} == {"erm", "xdomainmix", "sam"} and len(versus.rows) == 9
    assert [row["held out"] for row in by_title(versus)][:3] == list(DOMAINS)
    first = {row["method"]: [*row.values()][1:] for row in reversed(by_title(models))}
    assert first == {
        "erm": ["art", "0", "zero-shot", "50.0", "–", "70.0", "50.0", "70.0"],
        "xdomainmix": ["art", "0", "0.5", "50.0", "60.0", "70.0", "60.0", "70.0"],
        "sam": ["art", "0", "0.01", "50.0", "–", "80.0", "60.0", "80.0"],
    }
    for figure, end in zip(section.figures, ("0.001", "1", "200"), strict=True):
        assert f"art from 50 at zero-shot to {70 + 10 * (end == '200')} at {end}" in figure.alt
        assert "Vertical lines: 95% intervals of zero_shot." in figure.caption and ">zero-shot<" in figure.svg()
    assert len(section.notes) == 3 and all("not clearly better than zero-shot" in note for note in section.notes)
    alone = write_run(tmp_path / "alone", methods=("erm", "sam"), seeds=[0], rules=[RULE])
    with_road(alone, "erm", "l2", 10.0, (None, 10.0))
    [table], notes = shown(selection.road(alone)).tables, shown(selection.road(alone)).notes
    assert len(table.rows) == 3 and notes == [selection.LACKS]
    few = write_run(tmp_path / "few", seeds=[0], rules=[RULE])
    with_road(few, "erm", "l2", 10.0, (None, 10.0))
    assert "no verdict: it needs 3 seeds, and 1 is complete" in shown(selection.road(few)).notes


# ------------------------------------------------------------------------------------------------ figures, names, sizes


@pytest.mark.slow
def test_hostile_names_in_figures() -> None:
    script, pipe, override, escape, letters, formula, long, comment = HOSTILE
    label = f"wise_ft xdomainmix{formula}{comment}{script}"
    made = run_in_memory(
        [{"name": "erm", "label": label}], [(script,), (pipe + escape, long)], [0], 2, ALPHAS,
        (script, pipe + escape, override, letters),
    )  # fmt: skip
    for record in made.records:
        record.hparams["kind"] = (long, comment)[record.trial]
    made.__dict__["class_names"] = [script, override, escape]
    figures = [figure for section in sections(made) for figure in section.figures]
    assert len(figures) > 15
    for figure in figures:
        svg = figure.svg()
        assert "<script" not in svg and "-->" not in svg and not re.search("[\x00-\x09\x0b-\x1f\u202e]", svg)


@pytest.mark.slow
def test_figures_and_tables_of_a_large_run_stay_small() -> None:
    held = [(f"domain{i}",) for i in range(8)]
    methods = tuple(f"xdomainmix{i}" for i in range(6))
    made = run_in_memory(methods, held, range(6), trials=20, domains=[name for (name,) in held])
    made.__dict__["scalars"] = curves_of(made, range(10, 10_010, 10))
    every = list(sections(made))
    assert sum(len(figure.svg()) for section in every for figure in section.figures) < 6_000_000
    [table] = next(section for section in every if section.id == "curves").tables
    assert len(table.rows) == 240 and "The first 240 of 288 rows" in table.caption


def test_the_images_of_which_models_were_wrong_with_most_confidence(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for folder in (tmp_path / "data" / domain / label for domain in ("art", "photo") for label in CLASSES[:2]):
        folder.mkdir(parents=True)
        for number in range(8):
            pixels = generator.integers(0, 255, (40, 200, 3), np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
    data = Folder(root=str(tmp_path / "data"), group=None)
    made = write_run(tmp_path / "run", data, ("erm", "sam"), range(2))
    set_recipe(made, data={"root": str(tmp_path / "data")})
    off = shown(predictions.mistakes(made))
    assert not off.thumbnails and off.part == "mistakes", "neither pixels nor names unless the recipe asks for them"
    assert off.code == "xdm-ft report run --images" and "report.images: true" in off.about
    set_recipe(made, report={"images": True})
    section = shown(predictions.mistakes(made))
    assert section.notes == []
    for domain in ("art", "photo"):
        records = [record for record in made.picked if record.key[:2] == (made.chosen, (domain,))]
        read = [made.prediction(record) for record in records]
        wrong = [np.where(p.predicted != p.images.labels, np.max(p.probabilities, axis=1), 0) for p in read]
        order = np.argsort(-sum(wrong), kind="stable")
        names = [made.image_names(records[0])[i] for i in order[:MISTAKES] if sum(wrong)[i] > 0]
        of_domain = section.thumbnails[f"{domain}: {plural(len(names), 'image')}"]
        assert names and [one.caption[-1] for one in of_domain] == names
    images = [one for of in section.thumbnails.values() for one in of]
    gone, broken = (one.caption[-1] for one in images[:2])
    (tmp_path / "data" / gone).unlink()
    (tmp_path / "data" / broken).write_bytes(b"no image")
    rest = shown(predictions.mistakes(made))
    assert rest.notes == ["2 images cannot be read now."]
    assert [one for of in rest.thumbnails.values() for one in of] == images[2:], "rows have moved, names have not"
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    none = shown(predictions.mistakes(made))
    assert not none.thumbnails
    assert none.notes[0].startswith("No image can be shown, because the data cannot be read now: ")
    names_of = Named(("a", "b"), ("x", "y"), each=6)
    assert rows_by_name(names_of, {names_of.name(20): 3, "gone": 4}) == {names_of.name(20): 20}
