"""The panels of analysis.json: every number of their tables is one of the file, or its mean over seeds."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import jsonschema
import pytest
from analysis_example import analysis
from runs_in_memory import DOMAINS, HELD, HOSTILE, run

from xdm_ft.report.finished import Run
from xdm_ft.report.page import calibration, divergence, embeddings, importance, invariance
from xdm_ft.report.page.analysed import significant
from xdm_ft.report.page.bars import Bar, bars
from xdm_ft.report.page.panel import Panel, Table
from xdm_ft.runtime.errors import UserError

MODULES = (invariance, divergence, importance, embeddings, calibration)
SCHEMA = files("xdm_ft.report").joinpath("analysis.schema.json")
ALWAYS = ("method", "test_domains", "seed", "trial", "inputs", "role", "n", "shares", "images", "points", "kind")
METHODS = ("erm", "xdomainmix")
PACS = {"name": "pacs", "root": "data"}


def analysed(seeds: tuple[int, ...] = (0, 1), methods: tuple[str, ...] = METHODS, **recipe: Any) -> Run:
    found = analysis(methods, HELD, DOMAINS, seeds)
    return run(methods=methods, seeds=seeds, analysis=found, recipe=recipe)


def models(made: Run, method: str = "erm", where: str = "art") -> list[dict[str, Any]]:
    assert made.analysis is not None
    return [m for m in made.analysis["models"] if (m["method"], m["test_domains"]) == (method, [where])]


def shown(panel: Panel | None) -> Panel:
    assert panel is not None and panel.about
    assert all(figure.alt and re.fullmatch(r"[a-z][a-z0-9_-]*", figure.name) for figure in panel.figures)
    assert len({figure.name for figure in panel.figures}) == len(panel.figures)
    for table in panel.tables:
        assert table.rows and {len(row) for row in table.rows} == {len(table.header)}
    return panel


def cell(table: Table, title: str, *names: str) -> float | None:
    """The value in the column `title` of the row that begins with `names`."""
    (row,) = [row for row in table.rows if [one.text for one in row[: len(names)]] == list(names)]
    return row[list(table.header).index(title)].value


def mean(values: list[float]) -> Any:
    return pytest.approx(sum(values) / len(values))


def test_no_analysis_no_panels() -> None:
    empty = {"schema": 1, "notes": [], "models": []}
    for made in (run(), run(analysis=empty), run(methods=[], analysis=empty)):
        assert [module.panel(made) for module in MODULES] == [None] * 5


@pytest.mark.skipif(not SCHEMA.is_file(), reason="this version writes no analysis.json")
def test_the_example_is_one_that_the_analysis_could_write() -> None:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(schema).validate(analysis(METHODS, HELD, DOMAINS, (0, 1)))


@pytest.mark.slow
def test_models_that_the_run_does_not_pick_are_left_out() -> None:
    made = analysed()
    assert made.analysis is not None
    whole = shown(calibration.panel(made))
    other = copy.deepcopy(made.analysis["models"])
    for model in other:
        model["trial"] = 7  # picked before the search has grown
    made.analysis["models"] = [*made.analysis["models"][2:], *other, {**other[0], "method": "of another run"}]
    panel = shown(calibration.panel(made))
    assert len(made.picked) == 8 and "2 of 8 models are not measured yet: `xdm-ft analyse` measures them" in panel.notes
    assert list(panel.tables[0].rows) == [row for row in whole.tables[0].rows if row in panel.tables[0].rows]
    for module in MODULES:
        shown(module.panel(made))


def test_another_schema_is_refused() -> None:
    with pytest.raises(UserError, match="has schema 2, and this version reads 1; run `xdm-ft analyse`"):
        invariance.panel(run(analysis={"schema": 2, "models": []}))


def nulled(tree: Any) -> Iterator[Any]:
    """Copies of a model in each of which one more value is null, from the leaves to whole parts."""
    for key in [key for key, value in tree.items() if value is not None]:
        if key in ALWAYS:
            continue
        if isinstance(tree[key], dict):
            for inner in nulled(tree[key]):
                yield {**tree, key: inner}
        if key not in (*DOMAINS, "domains", "risk", "class", "pairs", "label") or not isinstance(tree[key], dict):
            yield {**tree, key: None}


def test_every_value_may_be_null() -> None:
    made = analysed(seeds=(0,), methods=("xdomainmix",))
    assert made.analysis is not None
    whole = made.analysis["models"][0]
    copies = list(nulled(whole))
    assert len(copies) > 60
    made.analysis["models"] = []
    for model in copies:  # together, so that means over models meet every null
        made.analysis["models"].append(model)
    for part in ("importance", "embedding", "divergence"):  # one figure each is enough
        seen = [m for m in copies if m[part] and m[part] != whole[part]]
        made.analysis["models"] = [m for m in made.analysis["models"] if m not in seen[3:]]
    for module in MODULES:
        shown(module.panel(made))
    nothing = copy.deepcopy(whole)
    for key in nothing.keys() - {"method", "test_domains", "seed", "trial", "inputs"}:
        nothing[key] = None
    made.analysis["models"] = [nothing]
    assert [module.panel(made) for module in MODULES] == [None] * 5


def test_invariance() -> None:
    made = analysed()
    panel = shown(invariance.panel(made))
    assert [figure.name.removeprefix("invariance-") for figure in panel.figures] == [
        "representation", "representation-code", "prediction",
    ]  # fmt: skip
    (table,) = panel.tables  # no published numbers: another data set
    for method in METHODS:
        for (where,) in HELD:
            own = models(made, method, where)
            assert len(own) == 2
            representation = [m["representation_invariance"] for m in own]
            assert cell(table, "representation (paper's formula)", method, where) == mean(
                [m["paper"] for m in representation]
            )
            assert cell(table, "representation (published code)", method, where) == mean(
                [m["published_code"] for m in representation]
            )
            assert cell(table, "prediction (variance of the risk)", method, where) == mean(
                [m["prediction_invariance"]["risk_variance"] for m in own]
            )
    assert table.rows[0][-1].text == "sketch 0.350; photo 0.450; cartoon 0.550"  # over the seeds
    assert panel.notes[-1:] == made.analysis["notes"]  # type: ignore[index]
    noises = {"paper's formula": "paper_noise", "published code": "published_code_noise"}
    for title, key in noises.items():
        by_chance = cell(table, f"by chance: representation ({title})", "erm", "art")
        assert by_chance == mean([m["representation_invariance"][key] for m in models(made)])
    assert "erm 1.78, xdomainmix 1.79" in panel.figures[0].alt


def test_equal_features_are_one_bar() -> None:
    made = analysed(seeds=(0,))
    assert made.analysis is not None
    for model in made.analysis["models"]:
        model["representation_invariance"] = {"paper": 2.5, "published_code": 0.1}
    first, second, third = (figure.alt for figure in shown(invariance.panel(made)).figures)
    assert "all methods 2.50." in first and "all methods 0.100." in second and "all methods" not in third


def test_published_numbers_of_the_same_data_set() -> None:
    made = analysed(seeds=(0,), data=PACS, encoder={"model": "mobilenetv2_100", "trainable": False})
    _, theirs = shown(invariance.panel(made)).tables
    assert list(theirs.header) == ["method", "covariance distance", "risk variance (1e-3)"] and theirs.folded
    assert cell(theirs, "covariance distance", "xdomainmix") == 0.02
    assert cell(theirs, "risk variance (1e-3)", "groupdro") == 398
    assert "Not comparable with this run, whose encoder is mobilenetv2_100, frozen" in theirs.caption
    _, theirs = shown(divergence.panel(made)).tables
    assert [row[1].text for row in theirs.rows] == ["3.11 ± 0.34", "6.97 ± 0.03", "14.82 ± 0.11"]
    alike = analysed(seeds=(0,), data=PACS, encoder={"model": "resnet50.tv_in1k", "trainable": True})
    _, theirs = shown(invariance.panel(alike)).tables
    assert not theirs.folded and "Not comparable" not in theirs.caption


def test_divergence() -> None:
    made = analysed()
    panel = shown(divergence.panel(made))
    (table,) = panel.tables
    assert "each batch of 32" in panel.notes[0] and "(0.438)" in panel.notes[0]
    for (where,) in HELD:
        for level, share in enumerate(("50%", "90%")):
            entries = [model["divergence"][level] for model in models(made, "xdomainmix", where)]
            columns = {"published MMD": "published_mmd", "unbiased MMD²": "unbiased_mmd2", "± error": "stderr"}
            for title, key in columns.items():
                assert cell(table, title, "xdomainmix", where, share) == mean([entry[key] for entry in entries])
    assert len(table.rows) == 4 and "xdomainmix 50%" in panel.figures[0].alt


def test_an_augmentation_without_levels() -> None:
    made = analysed(seeds=(0,))
    for where in ("art", "sketch"):
        (model,) = models(made, "erm", where)
        (other,) = models(made, "xdomainmix", where)
        model["divergence"] = [{**other["divergence"][0], "quantile": None}]
    panel = shown(divergence.panel(made))
    assert [row[2].text for row in panel.tables[0].rows[:2]] == ["none", "none"] and "erm 0" in panel.figures[0].alt


def test_importance() -> None:
    made = analysed()
    panel = shown(importance.panel(made))
    assert [figure.name.partition("-")[2] for figure in panel.figures] == ["0-class", "1-class", "2-domain"]
    for method in METHODS:
        for (where,) in HELD:
            area = models(made, method, where)[0]["importance"]["area"]  # of the first seed, as the others have none
            for kind in ("class", "domain"):
                words_of = {"score": "importance score", "gradient_norm": "gradient norm", "random": "random"}
                for order, words in words_of.items():
                    found = cell(panel.tables[0], f"{kind}: {words}", method, where)
                    assert found == (area[kind] or {}).get(order)
    assert "importance score from 100.0% to 21.3% with 50% removed" in panel.figures[0].alt
    assert "get a linear one" in panel.notes[-1]


def test_equal_measures_share_a_figure() -> None:
    """With a frozen encoder all fitted domain heads are equal, and so is what they measure."""
    made = analysed(seeds=(0,), methods=("erm", "sam", "xdomainmix"))
    for where in ("art", "sketch"):
        first, second = (models(made, method, where)[0] for method in ("erm", "sam"))
        second["importance"]["class"] = first["importance"]["class"]
        first["importance"]["domain"] = second["importance"]["domain"] = first["importance"]["class"]
        pairs = first["embedding"]["pairs"]
        second["embedding"]["pairs"]["domain_specific_vs_generic"] = pairs["domain_specific_vs_generic"]
    captions = [figure.caption.partition(": ")[0] for figure in shown(importance.panel(made)).figures]
    assert captions == ["erm, sam", "erm, sam", "xdomainmix", "xdomainmix"]
    captions = [figure.caption.partition(": ")[0] for figure in shown(embeddings.panel(made)).figures]
    assert captions[:3] == ["erm, held out art", "erm, sam, held out art", "sam, held out art"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(10933.4, "10933"), (0.0123456, "0.01235"), (2.5, "2.500"), (-3e-9, "-3e-09"), (0, "0"), (999.96, "1000.0")],
)
def test_significant_digits(value: float, text: str) -> None:
    assert significant(value, 4) == text


def test_embeddings() -> None:
    made = analysed()
    panel = shown(embeddings.panel(made))
    assert panel.folded and len(panel.figures) == 2 * (2 + 3)  # xdomainmix has augmented features too
    pairs = models(made, "xdomainmix", "sketch")[0]["embedding"]["pairs"]
    row = "xdomainmix", "sketch"
    for kind in ("class", "domain"):
        for key, title in (("map", "learned map"), ("pca", "PCA")):
            silhouettes = pairs[f"{kind}_specific_vs_generic"][key]["silhouette_of_labels"]
            for part, value in zip(("specific", "generic"), silhouettes, strict=True):
                assert cell(panel.tables[0], f"{kind}-{part}, {title}", *row) == value
    augmented = pairs["original_vs_augmented"]["pca"]["silhouette"]
    assert cell(panel.tables[0], "original against augmented, PCA", *row) == augmented
    assert all(name in panel.figures[0].svg for name in ("dog", "cat", "house"))
    assert all(name in panel.figures[1].svg for name in ("sketch", "photo", "cartoon"))
    size = sum(len(figure.svg) for figure in panel.figures)
    assert size < 1_500_000


def test_calibration() -> None:
    made = analysed()
    panel = shown(calibration.panel(made))
    (table,) = panel.tables
    assert [figure.name for figure in panel.figures] == ["calibration-ece", "calibration-0", "calibration-1"]
    for method in METHODS:
        for (where,) in HELD:
            own = [model["calibration"] for model in models(made, method, where)]
            for domain in DOMAINS:
                measured = [one["domains"][domain] for one in own]
                names = method, where, domain, "test" if domain == where else "validation"
                for title, key, scale in (
                    ("ECE before (%)", "ece", 100), ("ECE after (%)", "ece_scaled", 100),
                    ("NLL before", "nll", 1), ("NLL after", "nll_scaled", 1),
                ):  # fmt: skip
                    assert cell(table, title, *names) == mean([scale * one[key] for one in measured])
                assert cell(table, "temperature", *names) == mean([one["temperature"] for one in own])


def test_reliability_over_seeds_counts_images() -> None:
    first = [{"confidence": 0.9, "accuracy": 0.8, "n": 30}, {"confidence": 0.5, "accuracy": 0.5, "n": 9}]
    second = [{"confidence": 0.8, "accuracy": 0.5, "n": 10}, {"confidence": None, "accuracy": None, "n": 0}]
    seeds = [{"role": "test", "r": bins} for bins in (first, second)]
    found = calibration.OnDomain("erm", "art", "art", [1.0, 1.0], seeds).bins("r")
    assert found == [(pytest.approx(87.5), pytest.approx(72.5))]  # the second bin has too few images


def test_bars_without_values_or_with_many() -> None:
    assert "not defined" in bars("empty", [Bar("erm", "#000000", {})], "axis")
    values = {f"d{j}": 0.1 * j - 1.0 for j in range(30)}
    many = bars("many", [Bar(f"m{i}", "#000000", values) for i in range(50)], "axis")
    assert "m23" in many and "m24" not in many and "d0" not in many and len(many) < 200_000


def test_hostile_names() -> None:
    script, pipe, override, escape, letters, formula, long, comment = HOSTILE
    domains = (script, pipe + escape, override, letters)
    method = f"xdomainmix{formula}{comment}{script}"
    held = [(script,), (pipe + escape, long)]
    made = run(methods=(method,), held=held, analysis=analysis((method,), held, domains, (0,)))
    made.__dict__["class_names"] = [script, override, escape]
    for module in MODULES:
        for figure in shown(module.panel(made)).figures:
            assert "<script" not in figure.svg and "-->" not in figure.svg
            assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", figure.svg)


@pytest.mark.slow
def test_a_large_analysis_stays_small() -> None:
    methods = tuple(f"xdomainmix{i}" for i in range(12))
    domains = tuple(f"domain{i}" for i in range(12))
    held = [(domain,) for domain in domains]
    found = analysis(methods, held, domains, (0, 1), classes=65)
    made = run(methods=methods, held=held, analysis=found)
    panels = [shown(module.panel(made)) for module in MODULES]
    assert sum(len(figure.svg) for panel in panels for figure in panel.figures) < 2_000_000
    assert all(len(table.rows) <= 240 for panel in panels for table in panel.tables)
