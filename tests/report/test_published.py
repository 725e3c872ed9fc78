"""Published numbers stand only beside ours of the same data, test set and metric."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from example_runs import assert_golden, model, run_of

from xdm_ft.evaluation.summary import DOMAINBED, WILDS
from xdm_ft.report.markup import markdown_lines
from xdm_ft.report.published import (
    BENCHMARKS,
    COMPARABLE,
    METRICS,
    benchmark_of,
    images_tested,
    published,
    published_name,
    published_section,
)

SHARED = Path(__file__).resolve().parents[3] / "shared" / "published_results.csv"
PACS = {"art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929}
MEANS = {"linear_probe": 0.638, "erm": 0.643, "sam": 0.646, "ours|best": 0.653}
CLIP = {"name": "open_clip", "model": "ViT-B-16-quickgelu", "trainable": False}
OF_WILDS = {"kind": WILDS.kind, "value": 0.002}


def run(method: str, domain: str, images: int) -> dict[str, Any]:
    return model(method, (domain,), 0, per_domain={domain: {"accuracy": 0.5, "n": images}})


def row(method: str, mean: float | None, **changes: Any) -> dict[str, Any]:
    protocol = "pacs, 9991 images; encoder an ImageNet one, frozen; picked by train_val; ± is the standard error"
    spread = {"kind": DOMAINBED.kind, "value": None if mean is None else 0.012}
    made = {"method": method, "selection": "train_val", "metric": "accuracy", "split": "test", "mean": mean}
    made |= {"std": 0.02, "stderr": 0.0151, "n": 3, "spread_as_published": spread, "versus_erm": None}
    made |= {"protocol": protocol, "per_test_domain": {d: {"mean": 0.6, "std": None} for d in PACS}}
    return made | changes


def pacs(*rows: dict[str, Any], runs: list[dict[str, Any]] | None = None, **changes: Any) -> dict[str, Any]:
    """PACS with a frozen MobileNetV2. `changes`: of the recipe or its protocol."""
    methods = ["linear_probe", "erm", {"name": "sam", "label": None}, {"name": "xdomainmix", "label": "ours|best"}]
    protocol = {"name": "leave_one_domain_out", "selection": "train_val", "metric": "accuracy"}
    protocol |= {key: changes.pop(key) for key in protocol if key in changes}
    encoder = {"name": "timm", "model": "mobilenetv2_100", "trainable": False}
    recipe = {"name": "mobile", "data": {"name": "pacs", "root": "data"}, "encoder": encoder, "methods": methods}
    runs = [run(method, *domain) for method in MEANS for domain in PACS.items()] if runs is None else runs
    summary = rows or [row(*item) for item in MEANS.items()]
    return {"recipe": recipe | {"protocol": protocol} | changes, "environment": {}, "runs": runs, "summary": [*summary]}


def of_wilds(name: str, metric: str = "accuracy", protocol: str = "official") -> dict[str, Any]:
    pairs = ("zero_shot", 0.68), ("erm", 0.864)
    rows = [row(*pair, spread_as_published=OF_WILDS, metric=metric) for pair in pairs]
    changes = {"data": {"name": name}, "methods": ["zero_shot", "erm"], "encoder": CLIP}
    return pacs(*rows, name=protocol, metric=metric, **changes)


@pytest.mark.skipif(not SHARED.exists(), reason="the published numbers are not beside the repository")
def test_the_packaged_numbers_are_the_published_ones() -> None:
    with SHARED.open(newline="") as file:
        assert [line._asdict() for line in published()] == list(csv.DictReader(file))


def test_every_published_table_is_accounted_for() -> None:
    tables = Counter(line.table for line in published())
    assert len(published()) == 202
    others = {"representation invariance", "prediction invariance", "divergence of augmented features"}
    assert set(tables) == {*COMPARABLE, *others, "partner selection"}
    compared = [line for line in published() if line.table in COMPARABLE]
    assert len(compared) == 103 and {line.metric for line in compared} == set(METRICS)
    assert {line.dataset for line in published()} == set(BENCHMARKS)
    assert not {line.metric for line in published() if line.table not in COMPARABLE} & set(METRICS)
    keys = Counter((line.dataset, line.method, line.encoder, line.metric) for line in compared)
    assert set(keys.values()) == {1}  # no method has two numbers in one column


def test_the_tables_beside_ours() -> None:
    """Each protocol, kind of ±, published encoder and metric has a table of its own."""
    means = [row(*item) for item in MEANS.items()]
    another = row("erm", 0.333, protocol="another protocol; ± is the standard error")
    results = {
        "pacs": pacs(),
        "two protocols and kinds of ±": pacs(*means, another, row("sam", 0.444, spread_as_published=OF_WILDS)),
        "failed": pacs(row("erm", None, failed=3)),
        "camelyon17": of_wilds("camelyon17"),
        "fmow": of_wilds("fmow", "worst_domain_accuracy"),
    }
    lines = []
    for name, of in results.items():
        section = published_section(run_of(of), "train_val")
        assert section is not None
        lines += [f"# {name}", *markdown_lines([section])]
    assert_golden("published.md", "\n".join(lines))


def test_where_no_published_number_stands_beside_ours() -> None:
    whole = pacs()["runs"]
    three = [entry for entry in whole if entry["test_domains"] != ["sketch"]]
    assert benchmark_of({"name": "folder"}, images_tested(three)) == "pacs"  # still known to be PACS
    for why, results in {
        "oracle": pacs(selection="oracle"),
        "each hospital held out in turn is another test set": of_wilds("camelyon17", protocol="leave_one_domain_out"),
        "only the published metric": of_wilds("camelyon17", "worst_domain_accuracy"),
        "one model tested on all": pacs(runs=[entry | {"test_domains": list(PACS)} for entry in whole]),
        "not all domains": pacs(runs=three),
        "other methods": pacs(methods=["linear_probe", "vrex", "erm+swad"]),
        "other data": pacs(row("erm", 0.6), runs=[run("erm", "photo", 1000)], data={"name": "folder"}, methods=["erm"]),
    }.items():
        rule = results["recipe"]["protocol"]["selection"]
        assert published_section(run_of(results), rule) is None, why


@pytest.mark.parametrize(
    ("data", "tested", "expected"),
    [
        ({"name": "hub", "repository": "pacs"}, {}, "pacs"),
        ({"name": "hub", "repository": "flwrlabs/office-home"}, {}, "officehome"),
        ({"name": "hub", "repository": "somebody/pets"}, {}, None),
        ({"name": "hub", "repository": "somebody/pacs"}, PACS, "pacs"),
        ({"name": "table"}, {"Sketch": 3929}, "pacs"),
        ({"name": "folder"}, {"sketch": 69128}, "domainnet"),
        ({"name": "folder"}, {"L38": 9736}, "terraincognita"),
        ({"name": "folder"}, {"L38": 9736, "L46": 6122}, None),  # of two editions
        ({"name": "folder"}, {**PACS, "photo": 1669}, None),
        ({}, {}, None),
    ],
)
def test_which_data_set_it_is(data: dict[str, Any], tested: dict[str, int], expected: str | None) -> None:
    assert benchmark_of(data, set(tested.items())) == expected


ABLATION = {"name": "xdomainmix", "p_discard": 0}


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ({"name": "erm"}, "erm"),
        ({"name": "erm+sam"}, "sam"),
        ({"name": "xdomainmix", "p_discard": 0.3, "label": "x"}, "xdomainmix"),
        ({"name": "xdomainmix+sam"}, "xdomainmix+sam"),
        (ABLATION | {"mix_class_generic": False}, "mix csds"),
        (ABLATION | {"mix_class_specific": False}, "mix cgds"),
        (ABLATION, "mix csds + mix cgds"),
        (ABLATION | {"domain_head_augmented": True}, "domain head trained with augmented features"),
        ({"name": "xdomainmix", "mix_class_generic": False}, None),
        ({"name": "xdomainmix", "domain_head_augmented": True}, None),
        ({"name": "xdomainmix", "other_partner": "same_as_first"}, None),
        (ABLATION | {"name": "xdomainmix+sam"}, None),
    ],
)
def test_what_the_paper_calls_a_method(item: dict[str, Any], expected: str | None) -> None:
    assert published_name(item) == expected
    assert expected in {None} | {line.method for line in published()}
