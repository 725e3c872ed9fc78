"""Numbers of sections, worked out by hand or by a loop; what is missing, and names that others chose."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import jsonschema
import numpy as np
import pytest
from canned_runs import ALPHAS, CLASSES, HELD, HOSTILE, PARTS, Named, curves_of, run_in_memory, value_on_test, write_run
from example_runs import encoder_about, model, results_of, run_of, two_sets
from PIL import Image

from xdm_ft.data import rows_by_name
from xdm_ft.data.folder import Folder
from xdm_ft.report.finished import Run, trainable_of
from xdm_ft.report.means import MEASURES, Picked, costs
from xdm_ft.report.section import Section, Table
from xdm_ft.report.sections import analysis, differences, predictions, sections, selection
from xdm_ft.report.sections import results as tables_of
from xdm_ft.report.words import bytes_text, count_text, seconds_text, significant, trained_words
from xdm_ft.runtime.errors import UserError

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


def column(section: Section | None, title: str, table: int = 0) -> list[float | None]:
    position = list(shown(section).tables[table].header).index(title)
    return [row[position].value for row in shown(section).tables[table].rows]


def test_what_every_section_keeps_to(run: Run, searched: Run) -> None:
    for made in (run, searched):
        every = list(sections(made))
        assert len(every) >= 10 and len({section.id for section in every}) == len(every)
        figures = [figure for section in every for figure in section.figures]
        assert all(re.fullmatch(r"[a-z][a-z0-9_-]*", figure.name) and figure.alt for figure in figures)
        for section in every:
            assert section.about
            assert all({len(row) for row in table.rows} == {len(table.header)} for table in section.tables)


# ------------------------------------------------------------------------------------------ metrics, settings and costs


def test_means_are_those_of_a_loop_over_results_json() -> None:
    results = results_of(two_sets())
    tests = {(entry["method"], *entry["test_domains"], entry["seed"]): entry["selected"]["train_val"]["metrics"]["test"]
             for entry in results["runs"]}  # fmt: skip
    picked = Picked(run_of(results), "train_val")
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
    bad = [{"method": "irm", "test_domains": [held], "seed": seed, "trial": 0, "hparams": {}, "status": "failed",
            "selected": {}, "reason": "because"} for held in "ab" for seed in (0, 1)]  # fmt: skip
    section = shown(tables_of.all_metrics(run_of(results_of([*runs, *bad])), "train_val"))
    erm, mix, irm = by_title(section.tables[0])
    assert erm["worst domain"] == "40.0 ± 10.0"  # 0.5 and 0.3: the lower set of each seed
    assert erm["worst class"] == "45.0 ± 0.0"  # (0.5 + 0.4) / 2, (0.7 + 0.2) / 2
    assert erm["NLL"] == "1.500 ± 0.500" and mix["accuracy"] == "65.0 ± 0.0"
    assert erm["AUROC"] == "70.0" and erm["ECE"] == "10.0 ± 0.0"  # (0.6 + 0.8) / 2, one seed
    assert {*irm.values()} == {"irm", "–"}


def test_selected_hyper_parameters() -> None:
    """The first trial is picked for a, the second for b, but of seed 1 always the first."""

    def selected(runs: list[dict[str, Any]]) -> list[list[str]]:
        section = selection.selected(run_of(results_of(runs)), "train_val")
        return [] if section is None else texts(section.tables[0])

    runs = []
    for method in ("erm", "xdomainmix"):
        for held, best in (("a", 0), ("b", 1)):
            for seed in (0, 1):
                for trial, lr in enumerate((0.001, 0.0123456)):
                    hparams = {"lr": lr, "batch_size": 32, "p_discard": 0.1 if method == "erm" else [0.1, trial]}
                    value = 0.9 if trial == (best if seed == 0 else 0) else 0.5
                    runs.append(model(method, (held,), seed, trial=trial, hparams=hparams, value=value))
    assert selected(runs) == [
        ["erm", "lr", "0.001", "0.0123, 0.001"],
        ["xdomainmix", "lr", "0.001", "0.0123, 0.001"],
        ["xdomainmix", "p_discard", "[0.1, 0]", "[0.1, 1], [0.1, 0]"],
    ]
    for entry in runs:
        if entry["method"] == "erm" and entry["seed"] == 1:
            entry |= {"status": "failed", "reason": "nan", "selected": {}}
    assert selected(runs)[0] == ["erm", "lr", "0.001", "0.0123"] and selected(two_sets()) == []
    many = [model("erm", ("a",), s, trial=t, hparams={"lr": (s + 1) / 1000 + t}) for s in range(5) for t in (0, 1)]
    assert selected(many) == [["erm", "lr", "0.001 to 0.005"]]
    solver = [model("linear_probe", (held,), seed, hparams={"steps": {"a": 1, "b": 2}[held]},
                    picked={"strength": 0.1 * (seed + 1)}) for held in "ab" for seed in (0, 1)]  # fmt: skip
    assert selected(solver) == [["linear_probe", "strength", "0.1, 0.2", "0.1, 0.2"]], "steps of epochs are no search"


def test_costs_are_means_over_models() -> None:
    runs = [entry | {"train_seconds": float(i), "trained_parameters": 1000} for i, entry in enumerate(two_sets())]
    for i, entry in enumerate(runs[:4]):
        entry["peak_memory"] = i * 10**6
    results = results_of(runs)
    results["environment"]["encoders"] = {"tiny": encoder_about("tiny"), "x": encoder_about("x", ms_per_image=None)}
    assert costs(run_of(results).records)["erm"] == (1000, 1.5, 1.5e6)
    section = shown(tables_of.cost(run_of(results)))
    assert texts(section.tables[0]) == [
        ["erm", "50.0", "1,000", "1.50", "1.5 MB"], ["xdomainmix", "50.0", "1,000", "5.50", "–"]
    ]  # fmt: skip
    assert section.notes[0].startswith("xdomainmix: their models trained together and share their memory")
    assert "test images are not in it" in section.about
    tiny = ["tiny", "timm vit_tiny", "tiny corpus", "64", "5.7 million", "12.3", "2.6 MB"]
    assert texts(section.tables[1])[0] == tiny and texts(section.tables[1])[1][5] == "–"
    results["recipe"]["protocol"]["selection"] = "oracle"
    for entry in results["runs"]:
        entry["selected"] = {"oracle": entry["selected"]["train_val"] | {"value": 0.9}}
    results["summary"] = [row | {"selection": "oracle"} for row in results["summary"]]
    cheating = tables_of.cost(run_of(results))
    assert column(cheating, "selection value") == [0.9, 0.9]
    assert "a part of the test images" in shown(cheating).about and tables_of.cost(run_of(results_of([]))) is None


def test_a_solver_trains_nothing_of_an_encoder_that_others_train() -> None:
    results = results_of(two_sets())
    results["recipe"]["encoder"]["trainable"] = {"blocks": 2}
    assert trained_words(trainable_of("erm", results)) == "last 2 blocks"
    for entry in results["runs"]:
        entry["gradient_evaluations"] = 0
    assert trained_words(trainable_of("erm", results)) == "frozen"
    assert differences.further_comparisons(run_of(results), "train_val") is None, "a run of one encoder has none"


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (count_text(5130), "5,130"), (count_text(85_799_936.0), "85.8 million"), (count_text(None), "–"),
        (seconds_text(0.034), "0.03"), (seconds_text(45.67), "45.7"), (seconds_text(4567.8), "4,568"),
        (bytes_text(9_870), "9.9 kB"), (bytes_text(12_340_000), "12.3 MB"), (bytes_text(4.5e9), "4.5 GB"),
        (trained_words(True), "end to end"), (trained_words({"blocks": 1}), "last block"),
        (trained_words({"lora": {"rank": 2, "blocks": 1}}), "LoRA of rank 2 in the last block"),
        (significant(10933.4, 4), "10933"), (significant(0.0123456, 4), "0.01235"), (significant(-3e-9, 4), "-3e-09"),
        (significant(999.96, 4), "1000.0"), (significant(0), "0"),
    ],
)  # fmt: skip
def test_numbers_in_words(made: str, text: str) -> None:
    assert made == text


# -------------------------------------------------------------------------------------------- curves, searches, WiSE-FT


def test_what_was_not_measured_has_no_section() -> None:
    nothing = run_in_memory(methods=[])
    assert [section.id for section in sections(nothing)] == ["environment", "recipe"]
    without = run_in_memory()
    without.__dict__.update({"scalars": {}, "analysis": None})
    assert [section.id for section in sections(without)] == ["environment", "recipe"]


def test_learning_curves() -> None:
    made = run_in_memory(["erm"], HELD[:1])
    first, second = (record.key for record in made.picked)
    scalars = iter(made.scalars)
    made.__dict__["scalars"] = {
        next(scalars): {"train/loss": [(50, 4.0)], "val/accuracy": [(100, 0.5), (200, 0.5)]},
        next(scalars): {"val/accuracy": [(100, 0.6), (200, 0.7), (300, 0.9)]},
    }
    assert first.seed == 0 and second.seed == 1
    loss, selected = shown(selection.learning_curves(made)).figures
    assert "erm from 4 at 50 to 4 at 50" in loss.alt
    assert "erm from 55 at 100 to 60 at 200" in selected.alt, "a model that stopped early does not bend the mean"
    made.__dict__["scalars"] = curves_of(made, heads=True)
    section = shown(selection.learning_curves(made))
    assert "erm from 1.25 at 10 to 1.25 at 200" in section.figures[0].alt  # (3 · 1 + 1 · 2) / 4
    assert "summarised" in section.about and "ring" not in section.about


def test_axes_of_a_search() -> None:
    space = {"lr": {"log_uniform": [1e-3, 2e-3]}, "xdomainmix.weight_decay": {"uniform": [0, 1]}}
    made = run_in_memory(["xdomainmix+sam"], HELD[:1], [0], trials=20, search={"trials": 3, "space": space})
    for record in made.records:
        record.hparams["lr"] = 1e-3 * (1 + record.trial / 10)
        record.hparams["kind"] = f"kind{record.trial:02d}"
    figures = shown(selection.search(made)).figures
    assert "xdomainmix+sam: lr (logarithmic axis)." in [figure.caption for figure in figures]
    svg = figures[-1].svg()
    assert "kind06" in svg and "kind07" not in svg and "others" in svg
    assert "$" not in figures[1].svg() and "mathdefault" not in figures[1].svg()


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ([(1, 3), (2, 5), (3, 4)], "value: +0.50 (mean"),
        ([(1, 1), (1, 2), (2, 2), (3, 9)], "value: +0.83 (mean"),  # ties share a rank
        ([(1, 1), (2, 2)], "not defined"),
        ([(1, 1), (1, 2), (1, 3)], "not defined"),
    ],
)
def test_correlations(pairs: list[tuple[float, float]], words: str) -> None:
    [record] = run_in_memory(["erm"], HELD[:1], [0]).records
    assert words in selection.agreement([selection.Trial(record, *pair, False) for pair in pairs])


@pytest.mark.parametrize(("metric", "seeds", "offset"), [("accuracy", (0, 1), -0.01), ("nll", (0,), -0.36)])
def test_wise_ft(metric: str, seeds: tuple[int, ...], offset: float) -> None:
    section = selection.wise_ft(run_in_memory(["erm", "wise_ft"], seeds=seeds, alphas=ALPHAS, metric=metric))
    assert len(shown(section).figures) == 2
    test = [value_on_test("wise_ft", where, seed, 0) for where in HELD for seed in seeds]
    for title, off in (("test at α = 0", -0.36), ("test at α = 0.5", -0.01), ("test at α = 1", -0.16)):
        assert column(section, title) == pytest.approx([value + off for value in test])
    assert column(section, "best on test") == pytest.approx([value + offset for value in test])
    assert column(section, "picked α") == [0.3] * len(test) and {*column(section, "test at the picked α")} == {None}


# -------------------------------------------------------------------------------------------------------- analysis.json


def test_each_number_is_the_mean_over_seeds(searched: Run) -> None:
    assert searched.analysis is not None
    jsonschema.Draft202012Validator(SCHEMA).validate(searched.analysis)
    values = {
        analysis.invariance: {
            "representation (paper's formula)": lambda m: m["representation_invariance"]["paper"],
            "by chance: representation (published code)": lambda m: m["representation_invariance"][
                "published_code_noise"],
            "prediction (variance of the risk)": lambda m: m["prediction_invariance"]["risk_variance"],
        },
        analysis.importance: {
            "domain: random": lambda m: m["importance"] and (m["importance"]["area"]["domain"] or {}).get("random"),
            "class: importance score": lambda m: m["importance"] and m["importance"]["area"]["class"]["score"],
        },
        analysis.embeddings: {"domain-generic, PCA": lambda m: m["embedding"] and m["embedding"]["pairs"][
            "domain_specific_vs_generic"]["pca"]["silhouette_of_labels"][1]},
        analysis.divergence: {"published MMD": lambda m: m["divergence"] and m["divergence"][0]["published_mmd"],
                              "unbiased MMD²": lambda m: m["divergence"] and m["divergence"][0]["unbiased_mmd2"]},
        analysis.calibration: {"ECE before (%)": lambda m: 100 * m["calibration"]["domains"]["photo"]["ece"],
                               "NLL after": lambda m: m["calibration"]["domains"]["photo"]["nll_scaled"]},
    }  # fmt: skip
    for panel, by_column in values.items():
        table = shown(panel(searched)).tables[0]
        for title, value in by_column.items():
            for row in table.rows:
                method, where, third = (cell.text for cell in row[:3])
                if (panel is analysis.calibration and third != "photo") or third == "90%":
                    continue
                models = [m for m in searched.analysed() if (m["method"], m["test_domains"]) == (method, [where])]
                defined = [number for m in models if (number := value(m)) is not None]
                expected = pytest.approx(mean(defined)) if defined else None
                assert models and row[list(table.header).index(title)].value == expected, title


def test_equal_measures_share_a_bar_and_a_figure() -> None:
    """With a frozen encoder all methods have the same features, and fitted domain heads are equal."""
    made = run_in_memory(("erm", "sam", "xdomainmix"), seeds=(0,))
    models = made.analysed()
    for one in models:
        one["representation_invariance"] = {"paper": 2.5, "published_code": 0.1}
    for first, second in zip(models[:2], models[2:4], strict=True):
        second["importance"]["class"] = first["importance"]["class"]
        first["importance"]["domain"] = second["importance"]["domain"] = first["importance"]["class"]
    first_alt, second_alt, third_alt = (figure.alt for figure in shown(analysis.invariance(made)).figures)
    assert "all methods: 2.5" in first_alt and ": 0.1" in second_alt and "all methods" not in third_alt
    captions = [figure.caption.partition(": ")[0] for figure in shown(analysis.importance(made)).figures]
    assert captions == ["erm, sam", "erm, sam", "xdomainmix", "xdomainmix"]


def test_published_measures_of_the_same_data_set() -> None:
    pacs = {"name": "pacs", "root": "data"}
    made = run_in_memory(seeds=(0,), data=pacs, encoder={"model": "mobilenetv2_100", "trainable": False})
    theirs = shown(analysis.invariance(made)).tables[1]
    values = {row["method"]: row for row in by_title(theirs)}
    assert values["xdomainmix"]["covariance distance"].startswith("0.02") and theirs.folded
    assert values["groupdro"]["risk variance (1e-3)"].startswith("398")
    assert "Not comparable with this run, whose encoder is mobilenetv2_100, frozen" in theirs.caption
    alike = run_in_memory(seeds=(0,), data=pacs, encoder={"model": "resnet50.tv_in1k", "trainable": True})
    theirs = shown(analysis.divergence(alike)).tables[1]
    assert [row[1] for row in texts(theirs)] == ["3.11 ± 0.34", "6.97 ± 0.03", "14.82 ± 0.11"]
    assert not theirs.folded and "Not comparable" not in theirs.caption


def test_models_that_the_run_does_not_pick_are_left_out() -> None:
    made = run_in_memory()
    assert made.analysis is not None
    other = [one | {"trial": 7} for one in made.analysis["models"]]  # picked before the search has grown
    made.analysis["models"] = [*made.analysis["models"][2:], *other, other[0] | {"method": "of another run"}]
    notes = shown(analysis.calibration(made)).notes
    assert "2 of 8 models are not measured yet: `xdm-ft analyse` measures them" in notes and len(made.analysed()) == 6
    made.analysis["schema"] = 2
    with pytest.raises(UserError, match="has schema 2, and this version reads 1; run `xdm-ft analyse`"):
        analysis.invariance(made)


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
    assert [panel(made) for panel in PANELS] == [None] * 5


def test_reliability_over_seeds_counts_images() -> None:
    first = [{"confidence": 0.9, "accuracy": 0.8, "n": 30}, {"confidence": 0.5, "accuracy": 0.5, "n": 9}]
    second = [{"confidence": 0.8, "accuracy": 0.5, "n": 10}, {"confidence": None, "accuracy": None, "n": 0}]
    bins = analysis.pooled_bins([{"bins": first}, {"bins": second}], "bins")
    assert bins == [(pytest.approx(87.5), pytest.approx(72.5))]  # the second bin has too few images


# ------------------------------------------------------------------------------------------------ figures, names, sizes


def test_hostile_names_in_figures() -> None:
    script, pipe, override, escape, letters, formula, long, comment = HOSTILE
    label = f"wise_ft xdomainmix{formula}{comment}{script}"
    made = run_in_memory(
        [{"name": "wise_ft", "label": label}], [(script,), (pipe + escape, long)], [0], 2, ALPHAS,
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
    assert sum(len(figure.svg()) for section in every for figure in section.figures) < 5_000_000
    [table] = next(section for section in every if section.id == "curves").tables
    assert len(table.rows) == 240 and "The first 240 of 288 rows" in table.caption


# ------------------------------------------------------------------------------------------ the most confident mistakes


def test_the_images_of_which_models_were_wrong_with_most_confidence(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for folder in (tmp_path / "data" / domain / label for domain in ("art", "photo") for label in CLASSES[:2]):
        folder.mkdir(parents=True)
        for number in range(8):
            pixels = generator.integers(0, 255, (40, 200, 3), np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
    data = Folder(root=str(tmp_path / "data"), group=None)
    made = write_run(tmp_path / "run", data, ("erm", "sam"), range(2))
    made.results["recipe"]["data"]["root"] = str(tmp_path / "data")
    assert predictions.mistakes(made) is None, "neither pixels nor names unless the recipe asks for them"
    made.results["recipe"]["report"] = {"images": True}
    section = shown(predictions.mistakes(made))
    assert section.notes == [] and len(section.thumbnails) > 2
    for domain in ("art", "photo"):
        records = [record for record in made.picked if record.key[:2] == (made.chosen, (domain,))]
        read = [made.prediction(record) for record in records]
        wrong = [np.where(p.predicted != p.images.labels, np.max(p.probabilities, axis=1), 0) for p in read]
        order = np.argsort(-sum(wrong), kind="stable")
        names = [made.image_names(records[0])[i] for i in order[: predictions.EACH] if sum(wrong)[i] > 0]
        assert [one.caption[-1] for one in section.thumbnails if one.caption[0] == domain] == names
    gone, broken = (one.caption[-1] for one in section.thumbnails[:2])
    (tmp_path / "data" / gone).unlink()
    (tmp_path / "data" / broken).write_bytes(b"no image")
    rest = shown(predictions.mistakes(made))
    assert rest.notes == ["2 images can not be read now."]
    assert rest.thumbnails == section.thumbnails[2:], "rows have moved, names have not"
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    none = shown(predictions.mistakes(made))
    assert not none.thumbnails
    assert none.notes[0].startswith("No image can be shown, because the data can not be read now: ")


def test_names_are_found_again_after_rows_have_moved() -> None:
    data = Named(("a", "b"), ("x", "y"), each=6)
    names = {data.name(row): row for row in (3, 20)}
    assert rows_by_name(data, names) == names
    assert rows_by_name(data, {data.name(20): 3, "gone": 4}) == {data.name(20): 20}
