"""Every section's numbers are those of results.json, the event files and analysis.json, or worked out by hand."""

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
from analysis_example import analysis
from example_runs import encoder_about, model, results_of, run_of, two_sets
from made_up_runs import Named, write_run
from PIL import Image
from runs_in_memory import DOMAINS, HELD, HOSTILE, curves, run, selection_value, summarised, test_value

from xdm_ft.data import rows_by_name
from xdm_ft.data.folder import Folder
from xdm_ft.report import analysed as analysed_models
from xdm_ft.report.charts import Figure
from xdm_ft.report.finished import Run, trainable_of
from xdm_ft.report.frame import MEASURES, Picked, costs, frame
from xdm_ft.report.section import Section, Table
from xdm_ft.report.sections import (
    calibration,
    cost,
    differences,
    divergence,
    embeddings,
    importance,
    invariance,
    metrics,
    mistakes,
    search,
    wise_ft,
)  # fmt: skip
from xdm_ft.report.sections import curves as curve_sections
from xdm_ft.report.words import bytes_text, count_text, seconds_text, significant, trained_words
from xdm_ft.runtime.errors import UserError

MODULES = (invariance, divergence, importance, embeddings, calibration)
SCHEMA = json.loads(files("xdm_ft.report").joinpath("analysis.schema.json").read_text(encoding="utf-8"))
KEPT = ("method", "test_domains", "seed", "trial", "inputs", "role", "n", "shares", "images", "points", "kind")
METHODS = ("erm", "xdomainmix")
ALPHAS = (0.0, 0.1, 0.5, 1.0)


def shown(section: Section | None) -> Section:
    """What every section keeps to."""
    assert section is not None and section.about
    names = [figure.name for figure in section.figures]
    assert len(set(names)) == len(names) and all(re.fullmatch(r"[a-z][a-z0-9_-]*", name) for name in names)
    assert all(figure.alt for figure in section.figures)
    for table in section.tables:
        assert table.rows and {len(row) for row in table.rows} == {len(table.header)}
    return section


def texts(table: Table) -> list[list[str]]:
    return [[cell.text for cell in row] for row in table.rows]


def column(section: Section, title: str, table: int = 0) -> list[float | None]:
    place = list(section.tables[table].header).index(title)
    return [row[place].value for row in section.tables[table].rows]


def cell(table: Table, title: str, *names: str) -> float | None:
    """The value in the column `title` of the row that begins with `names`."""
    (row,) = [row for row in table.rows if [one.text for one in row[: len(names)]] == list(names)]
    return row[list(table.header).index(title)].value


# ------------------------------------------------------------------------------------------ metrics, settings and costs


def test_the_frame_has_a_row_per_model_rule_and_split() -> None:
    made = run(trials=2, methods=["erm"])
    table = frame(made.records)
    assert len(table) == 2 * 2 * 2 * 2 and set(table["split"]) == {"train_val", "test"}
    for record in made.records:
        rows = table[(table["held_out"] == record.test_domains[0]) & (table["seed"] == record.seed)]
        [value] = rows[(rows["trial"] == record.trial) & (rows["split"] == "test")]["accuracy"]
        assert value == test_value(*record.key)


def test_means_are_those_of_a_loop_over_results_json() -> None:
    results = results_of(two_sets())
    picked, entries = Picked(run_of(results), "train_val"), results["runs"]
    tests = {(one["method"], *one["test_domains"], one["seed"]): one["selected"]["train_val"]["metrics"]["test"]
             for one in entries}  # fmt: skip
    assert len(MEASURES) == 8
    for measure in MEASURES:
        for method in METHODS:
            per_seed = []
            for seed in (0, 1):
                recalls = [min(r for r in tests[method, held, seed]["per_class_recall"].values() if r is not None)
                           for held in "ab"]  # fmt: skip
                values = [tests[method, held, seed].get(measure.score) for held in "ab"]
                values = recalls if measure.name == "worst_class" else values
                per_seed.append(min(values) if measure.name == "worst_domain" else mean(values))
            found = picked.mean(method, measure)
            assert found.mean == pytest.approx(mean(per_seed)) and found.n == 2
            assert found.stderr == pytest.approx(stdev(per_seed) / 2**0.5)


def metrics_of(results: dict[str, Any]) -> dict[str, dict[str, str]]:
    [table] = shown(metrics.section(run_of(results), "train_val")).tables
    return {row[0]: dict(zip(table.header, row, strict=True)) for row in texts(table)}


def test_metrics_by_hand() -> None:
    found = metrics_of(results_of(two_sets()))
    assert found["erm"]["worst domain"] == "40.0 ± 10.0"  # 0.5 and 0.3: the lower set of each seed
    assert found["erm"]["worst class"] == "45.0 ± 0.0"  # (0.5 + 0.4) / 2, (0.7 + 0.2) / 2
    assert found["erm"]["NLL"] == "1.500 ± 0.500" and found["xdomainmix"]["accuracy"] == "65.0 ± 0.0"


def test_a_seed_without_a_value_for_every_set_does_not_count() -> None:
    runs = two_sets()
    runs[1]["selected"]["train_val"]["metrics"]["test"]["auroc"] = None  # seed 1 of a
    runs[0]["selected"]["train_val"]["metrics"]["test"]["auroc"] = 0.6
    bad = [{"method": "irm", "test_domains": [held], "seed": seed, "trial": 0, "hparams": {}, "status": "failed",
            "selected": {}, "reason": "because"} for held in "ab" for seed in (0, 1)]  # fmt: skip
    found = metrics_of(results_of([*runs, *bad]))
    assert found["erm"]["AUROC"] == "70.0" and found["erm"]["ECE"] == "10.0 ± 0.0"  # (0.6 + 0.8) / 2, one seed
    assert {*found["irm"].values()} == {"irm", "–"}


def selected(runs: list[dict[str, Any]]) -> list[list[str]]:
    section = search.selected_section(run_of(results_of(runs)), "train_val")
    return [] if section is None else texts(section.tables[0])


def test_selected_hyper_parameters() -> None:
    """The first trial is picked for a, the second for b, but of seed 1 always the first."""
    runs = []
    for method in METHODS:
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
    for one in runs:
        if one["method"] == "erm" and one["seed"] == 1:
            one |= {"status": "failed", "reason": "nan", "selected": {}}
    assert selected(runs)[0] == ["erm", "lr", "0.001", "0.0123"] and selected(two_sets()) == []
    many = [model("erm", ("a",), s, trial=t, hparams={"lr": (s + 1) / 1000 + t}) for s in range(5) for t in (0, 1)]
    assert selected(many) == [["erm", "lr", "0.001 to 0.005"]]
    solver = [model("linear_probe", (held,), seed, hparams={"steps": {"a": 1, "b": 2}[held]},
                    picked={"strength": 0.1 * (seed + 1)}) for held in "ab" for seed in (0, 1)]  # fmt: skip
    assert selected(solver) == [["linear_probe", "strength", "0.1, 0.2", "0.1, 0.2"]], "steps of epochs are no search"


def test_costs_are_means_over_models() -> None:
    runs = [one | {"train_seconds": float(i), "trained_parameters": 1000} for i, one in enumerate(two_sets())]
    for i, one in enumerate(runs[:4]):
        one["peak_memory"] = i * 10**6
    results = results_of(runs)
    results["environment"]["encoders"] = {"tiny": encoder_about("tiny"), "x": encoder_about("x", ms_per_image=None)}
    assert costs(run_of(results).records)["erm"] == (1000, 1.5, 1.5e6)
    section = shown(cost.section(run_of(results)))
    assert texts(section.tables[0]) == [
        ["erm", "50.0", "1,000", "1.50", "1.5 MB"], ["xdomainmix", "50.0", "1,000", "5.50", "–"]
    ]  # fmt: skip
    assert section.notes == [f"xdomainmix: {cost.SHARED}"] and "test images are not in it" in section.about
    assert texts(section.tables[1])[0] == [
        "tiny",
        "timm vit_tiny",
        "tiny corpus",
        "64",
        "5.7 million",
        "12.3",
        "2.6 MB",
    ]
    assert texts(section.tables[1])[1][5] == "–"
    results["recipe"]["protocol"]["selection"] = "oracle"
    for one in results["runs"]:
        one["selected"] = {"oracle": one["selected"]["train_val"] | {"value": 0.9}}
    results["summary"] = [row | {"selection": "oracle"} for row in results["summary"]]
    cheating = shown(cost.section(run_of(results)))
    assert column(cheating, "selection value") == [0.9, 0.9] and "a part of the test images" in cheating.about
    assert cost.section(run_of(results_of([]))) is None


def test_a_solver_trains_nothing_of_an_encoder_that_others_train() -> None:
    results = results_of(two_sets())
    results["recipe"]["encoder"]["trainable"] = {"blocks": 2}
    assert trained_words(trainable_of("erm", results)) == "last 2 blocks"
    for one in results["runs"]:
        one["gradient_evaluations"] = 0
    assert trained_words(trainable_of("erm", results)) == "frozen"


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
    empty = {"schema": 1, "notes": [], "models": []}
    for made in (run(), run(methods=[]), run(seeds=[]), run(analysis=empty)):
        assert [module.section(made) for module in (curve_sections, search, wise_ft, *MODULES)] == [None] * 8


def test_learning_curves() -> None:
    made = run()
    made.__dict__["scalars"] = curves(made)
    section = shown(curve_sections.section(made))
    names = [f"curve-{i}-{kind}" for i in range(2) for kind in ("loss", "selection")]
    assert [figure.name for figure in section.figures] == [*names, "curve-part-0"]  # no lr, and no zeros
    # models 0 and 1 are erm's on art, 4 and 5 xdomainmix's
    assert "held out: art. Mean at the last step: erm 0.015, xdomainmix 0.055." in section.figures[0].alt
    assert "Mean at the last step: erm 80.1, xdomainmix 80.5." in section.figures[1].alt
    assert column(section, "picked step") == [100.0] * 8
    assert column(section, "selection value") == [record.selected["train_val"].value for record in made.picked]
    heads = run(methods=["erm"], trials=3)
    heads.__dict__["scalars"] = summarised(heads)
    section = shown(curve_sections.section(heads))
    assert "Mean at the last step: erm 1.25." in section.figures[0].alt  # (3 · 1 + 1 · 2) / 4
    assert "summarised" in section.about and "ring" not in section.about


def test_a_model_that_stopped_early_does_not_bend_the_mean() -> None:
    made = run(methods=["erm"], held=[("art",)])
    first, second = made.picked
    own = curve_sections.Recorded("erm", "art", [
        (first, {"t": [(100, 0.0), (200, 0.0)]}), (second, {"t": [(100, 1.0), (200, 1.0), (300, 9.0)]})
    ], [])  # fmt: skip
    line = curve_sections._line([own], "t", 2.0, analysed_models.method_looks(made)["erm"], "train_val")
    assert line is not None and line.points == [(100, 1.0), (200, 1.0)] and line.rings == [(100, 0.0), (100, 2.0)]


def test_a_search_shows_its_picks() -> None:
    made = run(trials=8)
    section = shown(search.section(made))
    assert len(section.tables) == 2 and len(section.figures) == 2 + 2 * 3  # lr, weight_decay, kind; not `same`
    for table, method in enumerate(METHODS):
        picked = [record for record in made.picked if record.method == method]
        best = [max(range(8), key=lambda trial: trial * 7 % 11)] * 4
        assert [record.trial for record in picked] == column(section, "trial", table) == best
        assert column(section, "selection value", table) == [selection_value(*record.key) for record in picked]
        assert column(section, "test value", table) == [test_value(*record.key) for record in picked]
        assert column(section, "lr", table) == [record.hparams["lr"] for record in picked]
    assert all("Rank correlation of selection and test value: -1.00" in figure.alt for figure in section.figures[:2])
    captions = {figure.caption.partition(": ")[2] for figure in section.figures[2:]}
    assert captions == {"lr (logarithmic axis).", "weight_decay (logarithmic axis).", "kind."}
    assert all("$" not in figure.svg() and "mathdefault" not in figure.svg() for figure in section.figures[:4])


def test_axes_of_a_search() -> None:
    space = {"lr": {"log_uniform": [1e-3, 2e-3]}, "xdomainmix.weight_decay": {"uniform": [0, 1]}}
    made = run(methods=["xdomainmix+sam"], trials=20, recipe={"search": {"trials": 3, "space": space}}, seeds=[0],
               held=[("art",)])  # fmt: skip
    for record in made.records:
        record.hparams["lr"] = 1e-3 * (1 + record.trial / 10)
        record.hparams["kind"] = f"kind{record.trial:02d}"
    figures = shown(search.section(made)).figures
    assert "xdomainmix+sam: lr (logarithmic axis)." in [figure.caption for figure in figures]
    svg = figures[-1].svg()
    assert "kind06" in svg and "kind07" not in svg and "others" in svg


def test_correlations() -> None:
    assert search._rank_correlation([(1, 3), (2, 5), (3, 4)]) == pytest.approx(0.5)
    assert search._rank_correlation([(1, 1), (1, 2), (2, 2), (3, 9)]) == pytest.approx(0.8333333)  # ties share a rank
    assert search._rank_correlation([(1, 1), (2, 2)]) is None
    assert search._rank_correlation([(1, 1), (1, 2), (1, 3)]) is None


def test_wise_ft() -> None:
    made = run(methods=["erm", "wise_ft"], alphas=ALPHAS)
    section = shown(wise_ft.section(made))
    assert len(section.figures) == 2 and len(section.tables[0].rows) == 4
    test = [test_value("wise_ft", (where,), seed, 0) for where in ("art", "sketch") for seed in (0, 1)]
    for title, off in (("test at α = 0", 0.36), ("test at α = 0.5", 0.01), ("test at α = 1", 0.16)):
        assert column(section, title) == pytest.approx([value - off for value in test])
    assert column(section, "best on test") == pytest.approx([value - 0.01 for value in test])
    assert column(section, "picked α") == [0.3] * 4 and column(section, "test at the picked α") == [None] * 4
    mean_value = 100 * sum(test[:2]) / 2
    assert f"{mean_value - 36:.4g} at α = 0, {mean_value - 1:.4g} at α = 0.5" in section.figures[0].alt
    losses = shown(wise_ft.section(run(methods=["wise_ft"], alphas=ALPHAS, metric="nll", seeds=[0])))
    assert column(losses, "best on test") == pytest.approx(
        [test_value("wise_ft", (where,), 0, 0) - 0.36 for where in ("art", "sketch")]
    )


# -------------------------------------------------------------------------------------------------------- analysis.json


def analysed(seeds: tuple[int, ...] = (0, 1), methods: tuple[str, ...] = METHODS, **recipe: Any) -> Run:
    return run(methods=methods, seeds=seeds, analysis=analysis(methods, HELD, DOMAINS, seeds), recipe=recipe)


def models(made: Run, method: str = "erm", where: str = "art") -> list[dict[str, Any]]:
    assert made.analysis is not None
    return [one for one in made.analysis["models"] if (one["method"], one["test_domains"]) == (method, [where])]


def test_the_example_is_one_that_the_analysis_could_write() -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(analysis(METHODS, HELD, DOMAINS, (0, 1)))


def test_each_number_is_the_mean_over_seeds() -> None:
    made = analysed()
    tables = {module: shown(module.section(made)).tables[0] for module in MODULES}
    values = {
        invariance: {
            "representation (paper's formula)": lambda one: one["representation_invariance"]["paper"],
            "by chance: representation (published code)":
                lambda one: one["representation_invariance"]["published_code_noise"],
            "prediction (variance of the risk)": lambda one: one["prediction_invariance"]["risk_variance"],
        },
        importance: {"domain: random": lambda one: ((one["importance"] or {}).get("area") or {}).get("domain")
                     and one["importance"]["area"]["domain"]["random"],
                     "class: importance score": lambda one: one["importance"] and one["importance"]["area"]["class"][
                         "score"]},
        embeddings: {"domain-generic, PCA": lambda one: one["embedding"] and one["embedding"]["pairs"][
            "domain_specific_vs_generic"]["pca"]["silhouette_of_labels"][1]},
    }  # fmt: skip
    for module, by_title in values.items():
        for title, value in by_title.items():
            for method in METHODS:
                for (where,) in HELD:
                    known = [number for one in models(made, method, where) if (number := value(one)) is not None]
                    expected = None if not known else pytest.approx(mean(known))
                    assert cell(tables[module], title, method, where) == expected, title
    for (where,) in HELD:
        for level, share in enumerate(("50%", "90%")):
            entries = [one["divergence"][level] for one in models(made, "xdomainmix", where)]
            for title, key in {"published MMD": "published_mmd", "unbiased MMD²": "unbiased_mmd2"}.items():
                expected = pytest.approx(mean([entry[key] for entry in entries]))
                assert cell(tables[divergence], title, "xdomainmix", where, share) == expected
        for domain in DOMAINS:
            own = [one["calibration"]["domains"][domain] for one in models(made, "erm", where)]
            names = "erm", where, domain, "test" if domain == where else "validation"
            for title, key, scale in (("ECE before (%)", "ece", 100), ("NLL after", "nll_scaled", 1)):
                expected = pytest.approx(mean([scale * one[key] for one in own]))
                assert cell(tables[calibration], title, *names) == expected


def test_what_figures_of_an_analysis_say() -> None:
    made = analysed()
    figures = {figure.name: figure for module in MODULES for figure in shown(module.section(made)).figures}
    assert "erm 1.78, xdomainmix 1.79" in figures["invariance-representation"].alt
    assert "importance score from 100.0% to 21.3% with 50% removed" in figures["importance-0-class"].alt
    assert "xdomainmix 50%" in figures["divergence-published-mmd"].alt
    assert len([name for name in figures if name.startswith("embedding-")]) == 2 * (2 + 3)
    assert all(name in figures["embedding-0"].svg() for name in ("dog", "cat", "house"))
    assert {"calibration-ece", "calibration-0", "calibration-1"} <= set(figures)
    assert "(0.438)" in shown(divergence.section(made)).notes[0]


def test_equal_measures_share_a_bar_and_a_figure() -> None:
    """With a frozen encoder all methods have the same features, and fitted domain heads are equal."""
    made = analysed(seeds=(0,), methods=("erm", "sam", "xdomainmix"))
    assert made.analysis is not None
    for one in made.analysis["models"]:
        one["representation_invariance"] = {"paper": 2.5, "published_code": 0.1}
    for where in ("art", "sketch"):
        first, second = (models(made, method, where)[0] for method in ("erm", "sam"))
        second["importance"]["class"] = first["importance"]["class"]
        first["importance"]["domain"] = second["importance"]["domain"] = first["importance"]["class"]
    first_alt, second_alt, third_alt = (figure.alt for figure in shown(invariance.section(made)).figures)
    assert "all methods 2.50." in first_alt and "0.100." in second_alt and "all methods" not in third_alt
    captions = [figure.caption.partition(": ")[0] for figure in shown(importance.section(made)).figures]
    assert captions == ["erm, sam", "erm, sam", "xdomainmix", "xdomainmix"]


def test_published_measures_of_the_same_data_set() -> None:
    pacs = {"name": "pacs", "root": "data"}
    made = analysed(seeds=(0,), data=pacs, encoder={"model": "mobilenetv2_100", "trainable": False})
    theirs = shown(invariance.section(made)).tables[1]
    assert cell(theirs, "covariance distance", "xdomainmix") == 0.02 and theirs.folded
    assert cell(theirs, "risk variance (1e-3)", "groupdro") == 398
    assert "Not comparable with this run, whose encoder is mobilenetv2_100, frozen" in theirs.caption
    alike = analysed(seeds=(0,), data=pacs, encoder={"model": "resnet50.tv_in1k", "trainable": True})
    theirs = shown(divergence.section(alike)).tables[1]
    assert [row[1] for row in texts(theirs)] == ["3.11 ± 0.34", "6.97 ± 0.03", "14.82 ± 0.11"]
    assert not theirs.folded and "Not comparable" not in theirs.caption


def test_models_that_the_run_does_not_pick_are_left_out() -> None:
    made = analysed()
    assert made.analysis is not None
    other = [one | {"trial": 7} for one in made.analysis["models"]]  # picked before the search has grown
    made.analysis["models"] = [*made.analysis["models"][2:], *other, other[0] | {"method": "of another run"}]
    notes = shown(calibration.section(made)).notes
    assert "2 of 8 models are not measured yet: `xdm-ft analyse` measures them" in notes
    assert len(analysed_models.models(made)) == 6
    with pytest.raises(UserError, match="has schema 2, and this version reads 1; run `xdm-ft analyse`"):
        invariance.section(run(analysis={"schema": 2, "models": []}))


def nulled(tree: Any) -> Iterator[Any]:
    """Copies of a model in each of which one more value is null, from the leaves to whole parts."""
    for key in [key for key, value in tree.items() if value is not None and key not in KEPT]:
        if isinstance(tree[key], dict):
            yield from ({**tree, key: inner} for inner in nulled(tree[key]))
        if key not in (*DOMAINS, "domains", "risk", "class", "pairs", "label") or not isinstance(tree[key], dict):
            yield {**tree, key: None}


def test_every_value_may_be_null() -> None:
    made = analysed(seeds=(0,), methods=("xdomainmix",))
    assert made.analysis is not None
    whole = made.analysis["models"][0]
    copies = list(nulled(whole))
    assert len(copies) > 60
    made.analysis["models"] = copies  # together, so that means over models meet every null
    for module in MODULES:
        for figure in shown(module.section(made)).figures[:2]:
            figure.svg()
    keys = whole.keys() - {"method", "test_domains", "seed", "trial", "inputs"}
    made.analysis["models"] = [whole | dict.fromkeys(keys)]
    assert [module.section(made) for module in MODULES] == [None] * 5


def test_reliability_over_seeds_counts_images() -> None:
    first = [{"confidence": 0.9, "accuracy": 0.8, "n": 30}, {"confidence": 0.5, "accuracy": 0.5, "n": 9}]
    second = [{"confidence": 0.8, "accuracy": 0.5, "n": 10}, {"confidence": None, "accuracy": None, "n": 0}]
    seeds = [{"role": "test", "r": bins} for bins in (first, second)]
    found = calibration.OnDomain("erm", "art", "art", [1.0, 1.0], seeds).bins("r")
    assert found == [(pytest.approx(87.5), pytest.approx(72.5))]  # the second bin has too few images


# ------------------------------------------------------------------------------------------------ figures, names, sizes


def figures_of(made: Run) -> list[Figure]:
    sections = [module.section(made) for module in (curve_sections, search, wise_ft, *MODULES)]
    return [figure for section in sections if section is not None for figure in section.figures]


def test_hostile_names_in_figures() -> None:
    script, pipe, override, escape, letters, formula, long, comment = HOSTILE
    domains = (script, pipe + escape, override, letters)
    held = [(script,), (pipe + escape, long)]
    label = f"wise_ft xdomainmix{formula}{comment}{script}"
    made = run(methods=[{"name": "wise_ft", "label": label}], held=held, seeds=[0], trials=2, alphas=ALPHAS,
               analysis=analysis((label,), held, domains, (0,)))  # fmt: skip
    for record in made.records:
        record.hparams["kind"] = (long, comment)[record.trial]
    made.analysis["models"] = [one | {"trial": made.picked[0].trial} for one in made.analysis["models"]]  # type: ignore[index]
    made.__dict__.update({"scalars": curves(made), "class_names": [script, override, escape]})
    figures = figures_of(made)
    assert len(figures) > 15
    for figure in figures:
        svg = figure.svg()
        assert "<script" not in svg and "-->" not in svg and not re.search("[\x00-\x09\x0b-\x1f\u202e]", svg)


@pytest.mark.slow
def test_figures_and_tables_of_a_large_run_stay_small() -> None:
    methods = tuple(f"xdomainmix{i}" for i in range(6))
    domains = tuple(f"domain{i}" for i in range(8))
    held = [(domain,) for domain in domains]
    made = run(
        methods=methods, held=held, seeds=range(6), trials=20, analysis=analysis(methods, held, domains, (0,), 65)
    )
    made.__dict__["scalars"] = curves(made, range(10, 10_010, 10))
    assert sum(len(figure.svg()) for figure in figures_of(made)) < 5_000_000
    table = shown(curve_sections.section(made)).tables[0]
    assert len(table.rows) == 240 and "The first 240 of 288 rows" in table.caption


# ------------------------------------------------------------------------------------------ the most confident mistakes


@pytest.fixture
def with_images(tmp_path: Path) -> Run:
    generator = np.random.default_rng(0)
    for domain in ("art", "photo"):
        for label in ("cat", "dog"):
            folder = tmp_path / "data" / domain / label
            folder.mkdir(parents=True)
            for number in range(8):
                pixels = generator.integers(0, 255, (40, 200, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    data = Folder(root=str(tmp_path / "data"), group=None)
    made = write_run(tmp_path / "run", data, ("erm", "sam"), seeds=2, findings=["images: art/cat/0.png is a copy"])
    made.results["recipe"]["data"]["root"] = str(tmp_path / "data")
    made.results["recipe"]["report"] = {"images": True}
    return made


def test_the_images_of_which_models_were_wrong_with_most_confidence(with_images: Run, tmp_path: Path) -> None:
    made = with_images
    section = mistakes.section(made)
    assert section is not None and section.notes == [] and len(section.thumbnails) > 2
    for domain in ("art", "photo"):
        own = [one for one in made.picked if one.key[:2] == (made.chosen, (domain,))]
        read = [made.prediction(one) for one in own]
        wrong = [np.where(p.predicted != p.images.labels, p.probabilities.max(1), 0) for p in read]  # type: ignore[union-attr]
        order = np.argsort(-sum(wrong), kind="stable")
        expected = [made.image_names(own[0])[i] for i in order[: mistakes.EACH] if sum(wrong)[i] > 0]
        assert [one.caption[-1] for one in section.thumbnails if one.caption[0] == domain] == expected
    gone, broken = (one.caption[-1] for one in section.thumbnails[:2])
    (tmp_path / "data" / gone).unlink()
    (tmp_path / "data" / broken).write_bytes(b"no image")
    rest = mistakes.section(made)
    assert rest is not None and rest.notes == ["2 images can not be read now."]
    assert rest.thumbnails == section.thumbnails[2:], "rows have moved, names have not"
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    none = mistakes.section(made)
    assert none is not None and not none.thumbnails
    assert none.notes[0].startswith("No image can be shown, because the data can not be read now: ")
    made.results["recipe"]["report"] = {}
    assert mistakes.section(made) is None, "neither pixels nor names unless the recipe asks for them"


def test_names_are_found_again_after_rows_have_moved() -> None:
    data = Named(("a", "b"), ("x", "y"), each=6)
    names = {data.name(row): row for row in (3, 20)}
    assert rows_by_name(data, names) == names and rows_by_name(data, {data.name(20): 3, "gone": 4}) == {
        data.name(20): 20
    }


def test_a_run_of_one_encoder_has_no_further_comparisons() -> None:
    made = run_of(results_of(two_sets()))
    assert differences.further_section(made, "train_val") is None
