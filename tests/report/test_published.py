"""Published numbers stand only beside ours of the same data, test set and metric."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from example_runs import model, recipe_of, run_of

from xdm_ft.report import Table
from xdm_ft.report.published import COMPARABLE, METRICS, published_name, read_published
from xdm_ft.report.sections import table_sections
from xdm_ft.results.model import Record
from xdm_ft.results.summary import BENCHMARKS, DOMAINBED, WILDS, benchmark_of, images_tested

SHARED = Path(__file__).resolve().parents[3] / "shared" / "published_results.csv"
PACS = {"art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929}
IN_TABLE = "64.3 ± 1.2", "64.6 ± 1.2", "65.3 ± 1.2"
TITLE = "additional domain generalization results"


def run(method: str, domain: str, images: int) -> dict[str, Any]:
    return model(method, (domain,), 0, per_domain={domain: {"accuracy": 0.5, "n": images}})


def row(method: str, mean: float | None, rule: str = "train_val", **changes: Any) -> dict[str, Any]:
    protocol = f"pacs, 9991 images; encoder an ImageNet one, frozen; picked by {rule}; ± is the standard error"
    spread = {"kind": DOMAINBED.kind, "value": None if mean is None else 0.012}
    found = {"method": method, "selection": rule, "metric": "accuracy", "split": "test", "mean": mean, "std": 0.02}
    found |= {"stderr": 0.0151, "n": 3, "spread_as_published": spread, "interval": None, "protocol": protocol}
    return found | {"per_test_domain": {d: {"mean": 0.6, "std": None} for d in PACS}} | changes


@pytest.fixture
def results() -> dict[str, Any]:
    """PACS with a frozen MobileNetV2, under two rules."""
    methods = ["linear_probe", "erm", {"name": "sam", "label": None}, {"name": "xdomainmix", "label": "ours|best"}]
    recipe = {
        "name": "mobile",
        "data": {"name": "pacs", "root": "data"},
        "protocol": {"name": "leave_one_domain_out", "selection": "train_val"},
        "encoder": {"name": "timm", "model": "mobilenetv2_100", "trainable": False},
        "methods": methods,
    }
    labels = {"linear_probe": 0.638, "erm": 0.643, "sam": 0.646, "ours|best": 0.653}
    summary = [row(method, mean + 0.1 * (rule == "oracle"), rule) for rule in ("oracle", "train_val")
               for method, mean in labels.items()]  # fmt: skip
    runs = [run(method, domain, n) for method in labels for domain, n in PACS.items()]
    return {"recipe": recipe, "environment": {}, "runs": runs, "summary": summary}


def beside(results: dict[str, Any]) -> list[Table]:
    """The tables of published numbers, of all rules."""
    run = run_of(results)
    return [
        table for section in table_sections(run, run.rules) if section.id == "published" for table in section.tables
    ]


def cells(table: Table) -> list[list[str]]:
    return [list(table.header), *([cell.text for cell in row] for row in table.rows)]


@pytest.mark.skipif(not SHARED.exists(), reason="the published numbers are not beside the repository")
def test_the_packaged_numbers_are_the_published_ones() -> None:
    with SHARED.open(newline="") as file:
        assert [line._asdict() for line in read_published()] == list(csv.DictReader(file))


def test_every_published_table_is_accounted_for() -> None:
    tables = Counter(line.table for line in read_published())
    assert len(read_published()) == 202
    others = {"representation invariance", "prediction invariance", "divergence of augmented features"}
    assert set(tables) == {*COMPARABLE, *others, "partner selection"}
    compared = [line for line in read_published() if line.table in COMPARABLE]
    assert len(compared) == 103 and {line.metric for line in compared} == set(METRICS)
    assert {line.dataset for line in read_published()} == set(BENCHMARKS)
    assert not {line.metric for line in read_published() if line.table not in COMPARABLE} & set(METRICS)
    keys = Counter((line.dataset, line.method, line.encoder, line.metric) for line in compared)
    assert set(keys.values()) == {1}  # no method has two numbers in one column


def test_a_method_of_ones_own_stands_beside_the_published(results: dict[str, Any]) -> None:
    """In the recipe's order; one that is measured in another way, such as by another metric, does not."""
    results["recipe"]["methods"].insert(2, "my_method")
    results["summary"][6:6] = [row("my_method", 0.7), row("my_method", 0.9, metric="macro_f1")]
    (text,) = beside(results)
    assert [line[0] for line in cells(text)[1:4]] == ["linear_probe", "erm", "my_method"]
    assert cells(text)[3] == ["my_method", "–", "70.0 ± 1.2", "–"]


def test_pacs_beside_the_published(results: dict[str, Any]) -> None:
    (text,) = beside(results)
    header = ["method", "published: resnet50 (imagenet), fine-tuned", "ours: mobilenetv2_100, frozen"]
    assert cells(text) == [
        [*header, "table of the paper"],
        ["linear_probe", "–", "63.8 ± 1.2", "–"],
        ["erm", "85.5 ± 0.2", "64.3 ± 1.2", TITLE],
        ["sam", "85.8 ± 0.2", "64.6 ± 1.2", "sharpness-aware methods"],
        ["ours|best (published: xdomainmix)", "86.4 ± 0.4", "65.3 ± 1.2", TITLE],
    ]
    theirs, ours = text.caption.split(" Ours: ")
    for words in ("Liu et al. 2024", "pacs", "resnet50 (imagenet), fine-tuned", "mean held-out-domain accuracy %"):
        assert words in theirs
    assert f"the paper does not say what its ± is; its benchmark prints the {DOMAINBED.kind}" in theirs
    assert "accuracy over art_painting, cartoon, photo, sketch" in ours and "picked by train_val" in ours
    assert f"± is here the {DOMAINBED.kind}" in ours and ours.count("± is") == 1
    results["recipe"]["protocol"]["selection"] = "oracle"
    assert not beside(results)


def test_no_column_mixes_two_protocols(results: dict[str, Any]) -> None:
    """Two protocol lines and two kinds of ±: every number stands with its own kind only."""
    results["summary"] += [
        row("erm", 0.333, protocol="another protocol; ± is the standard error"),
        row("sam", 0.444, spread_as_published={"kind": WILDS.kind, "value": 0.05}),
    ]
    ours = [{line[2] for line in cells(table)[1:]} for table in beside(results)]
    assert sorted(ours, key=len) == [{"33.3 ± 1.2"}, {"44.4 ± 5.0"}, {"63.8 ± 1.2", *IN_TABLE}]
    for table, numbers in zip(beside(results), ours, strict=True):
        assert (f"± is here the {WILDS.kind}" in table.caption) == ("44.4 ± 5.0" in numbers)
        assert ("another protocol" in table.caption) == ("33.3 ± 1.2" in numbers)


def test_published_encoders_and_metrics_have_tables_of_their_own(results: dict[str, Any]) -> None:
    results["recipe"] |= {"data": {"name": "camelyon17"}, "methods": ["zero_shot", "erm"]}
    results["summary"] = [one for one in results["summary"] if one["method"] == "erm"]
    assert not beside(results), "each hospital held out in turn is another test set"
    results["recipe"]["protocol"]["name"] = "official"
    results["recipe"]["encoder"] = {
        "name": "open_clip",
        "model": "ViT-B-16-quickgelu",
        "weights": "openai",
        "trainable": False,
    }
    spread = {"kind": WILDS.kind, "value": 0.002}
    results["summary"] = [row(*pair, spread_as_published=spread) for pair in (("zero_shot", 0.68), ("erm", 0.864))]
    clip, densenet = beside(results)
    assert cells(clip)[0][1] == "published: clip vit-b/16, frozen"
    numbers = [["zero_shot", "68.2", "68.0 ± 0.2"], ["erm", "86.4 ± 0.3", "86.4 ± 0.2"]]
    assert [line[:3] for line in cells(clip)[1:]] == numbers
    assert cells(densenet)[0][1] == "published: densenet121 (scratch), fine-tuned"
    assert [line[:2] for line in cells(densenet)[1:]] == [["erm", "70.3 ± 6.4"]]
    assert f"its benchmark prints the {WILDS.kind}" in clip.caption and "official split" in clip.caption
    results["recipe"]["protocol"]["metric"] = "worst_domain_accuracy"
    for one in results["summary"]:
        one["metric"] = "worst_domain_accuracy"
    assert not beside(results), "only the published metric"
    results["recipe"]["data"] = {"name": "fmow"}
    clip, densenet = beside(results)
    assert cells(densenet)[1][:2] == ["erm", "32.3 ± 1.3"] and "worst-region test accuracy %" in densenet.caption
    assert [line[:2] for line in cells(clip)[1:]] == [["zero_shot", "12.9"], ["erm", "26.6 ± 0.4"]]


def test_a_published_mean_stands_only_beside_a_mean_over_all_its_domains(results: dict[str, Any]) -> None:
    assert len(beside(results)) == 1
    whole = results["runs"]
    results["runs"] = [one | {"test_domains": list(PACS)} for one in whole]
    assert not beside(results), "one model tested on all"
    results["runs"] = [one for one in whole if one["test_domains"] != ["sketch"]]
    for one in results["summary"]:
        del one["per_test_domain"]["sketch"]
    tested = images_tested(map(Record.from_json, results["runs"]))
    assert benchmark_of(run_of(results).recipe.data, tested) == "pacs"  # still known to be PACS
    assert not beside(results)


def test_an_edited_number_of_images_is_that_of_no_benchmark() -> None:
    edited = {"a": 5, "b": {}, "c": {"n": 3}}
    entry = model("erm", ("c",), 0)
    entry["selected"]["train_val"]["metrics"]["test"]["per_domain"] = edited
    assert images_tested([Record.from_json(entry)]) == {("c", 3)}


def test_other_data_and_methods_have_no_such_table(results: dict[str, Any]) -> None:
    results["summary"] = [row("erm", None, failed=3)]
    assert cells(beside(results)[0])[1][:3] == ["erm", "85.5 ± 0.2", "failed"]
    methods = ["linear_probe", "vrex", "erm+swad"]
    results["summary"], results["recipe"]["methods"] = [row(name, 0.6) for name in methods], methods
    assert not beside(results)
    results["recipe"] |= {"methods": ["erm"], "data": {"name": "folder", "root": "mine"}}
    results["runs"] = [run("erm", "photo", 1000)]
    results["summary"] = [row("erm", 0.6)]
    assert not beside(results)


@pytest.mark.parametrize(
    ("data", "tested", "expected"),
    [
        ({"name": "hub", "repository": "pacs"}, {}, "pacs"),
        ({"name": "hub", "repository": "flwrlabs/office-home"}, {}, "officehome"),
        ({"name": "hub", "repository": "somebody/pets"}, {}, None),
        ({"name": "hub", "repository": "somebody/pacs"}, PACS, "pacs"),
        ({"name": "folder"}, PACS, "pacs"),
        ({"name": "table"}, {"Sketch": 3929}, "pacs"),
        ({"name": "folder"}, {"sketch": 69128}, "domainnet"),
        ({"name": "folder"}, {"L38": 9736}, "terraincognita"),
        ({"name": "folder"}, {"L38": 9736, "L46": 6122}, None),  # of two editions
        ({"name": "folder"}, {**PACS, "photo": 1669}, None),
        ({"name": "digits"}, {"blurred": 300}, None),
        ({}, {}, None),
    ],
)
def test_which_data_set_it_is(data: dict[str, Any], tested: dict[str, int], expected: str | None) -> None:
    component = SimpleNamespace(name=data.get("name"), kwargs=lambda: data)
    assert benchmark_of(component, set(tested.items())) == expected


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ({"name": "sam"}, "sam"),
        ({"name": "erm+sam"}, "sam"),
        ({"name": "erm"}, "erm"),
        ({"name": "erm+swad"}, "swad"),
        ({"name": "xdomainmix", "p_discard": 0.3, "label": "x"}, "xdomainmix"),
        ({"name": "xdomainmix+sam"}, "xdomainmix+sam"),
        ({"name": "xdomainmix", "mix_class_generic": False, "p_discard": 0}, "mix csds"),
        ({"name": "xdomainmix", "mix_class_specific": False, "p_discard": 0}, "mix cgds"),
        ({"name": "xdomainmix", "p_discard": 0}, "mix csds + mix cgds"),
        (
            {"name": "xdomainmix", "p_discard": 0, "domain_head_augmented": True},
            "domain head trained with augmented features",
        ),
        ({"name": "xdomainmix", "mix_class_generic": False}, None),
        ({"name": "xdomainmix", "domain_head_augmented": True}, None),
        ({"name": "xdomainmix", "other_partner": "same_as_x_i"}, None),
        ({"name": "xdomainmix+sam", "p_discard": 0}, None),
    ],
)
def test_what_the_paper_calls_a_method(item: dict[str, Any], expected: str | None) -> None:
    assert published_name(recipe_of({"methods": [item]}).methods[0]) == expected
    assert expected in {None, "swad"} | {line.method for line in read_published()}
