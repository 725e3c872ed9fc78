"""The seven data sets of the paper, in miniature and in their real layouts: loaded, split, trained on and evaluated."""

import json

import miniature
import numpy as np
import pytest
from safetensors.numpy import load_file

from xdm_ft.data.fmow import Fmow
from xdm_ft.experiment import run
from xdm_ft.recipe.check import check
from xdm_ft.recipe.text import parse

RECIPE = """\
name: small
data: {{name: {name}, root: data{more}}}
protocol: {protocol}
encoder: {{name: timm, model: test_vit, preprocessing: {{size: 32}}, kwargs: {{img_size: 32}}}}
features: {{dir: cache, workers: 0}}
methods: [erm, xdomainmix]
training: {{steps: 10, batch_size: 4}}
report: {{page: false}}
"""


def results(tmp_path, name, protocol, more=""):
    assert not run(check(parse(RECIPE.format(name=name, protocol=protocol, more=more), "small.yaml"))).failed
    return json.loads((tmp_path / "output" / "small" / "results.json").read_text())


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "pacs" else pytest.mark.slow) for n in sorted(miniature.CLASSES)],
)
def test_domainbeds_five(name, tmp_path):
    miniature.domainbed(tmp_path / "data", name)
    protocol = "{name: leave_one_domain_out, split_rule: domainbed, seeds: 1}"
    found = results(tmp_path, name, protocol, ", counts: any")
    domains = 6 if name == "domainnet" else 4
    assert [record["status"] for record in found["runs"]] == ["ok"] * 2 * domains
    assert len({tuple(record["test_domains"]) for record in found["runs"]}) == domains
    images = 4 * len(miniature.CLASSES[name])
    for record in found["runs"]:
        metrics = record["selected"]["train_val"]["metrics"]
        assert metrics["test"]["n"] == images
        assert metrics["train_val"]["n"] == (domains - 1) * int(0.2 * images)
    assert all("validation parts as DomainBed draws them" in row["protocol"] for row in found["summary"])


@pytest.mark.parametrize(
    ("name", "metric", "test_domains", "images"),
    [
        ("camelyon17", "accuracy", ["hospital 2"], {"train_val": 30, "val_domain": 20, "test": 20}),
        pytest.param(
            *("fmow", "worst_domain_accuracy", None, {"train_val": 18, "val_domain": 18, "test": 36}),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_wilds_two(name, metric, test_domains, images, tmp_path):
    getattr(miniature, name)(tmp_path / "data")
    protocol = f"{{name: official, selection: val_domain, metric: {metric}, seeds: 1}}"
    found = results(tmp_path, name, protocol)
    assert [record["status"] for record in found["runs"]] == ["ok", "ok"]
    for record in found["runs"]:
        assert test_domains in (None, record["test_domains"])
        metrics = record["selected"]["val_domain"]["metrics"]
        assert {part: metrics[part]["n"] for part in images} == images
    assert all("official split" in row["protocol"] for row in found["summary"])


@pytest.mark.slow
def test_each_hospital_of_camelyon17_in_turn(tmp_path):
    miniature.camelyon17(tmp_path / "data")
    found = results(tmp_path, "camelyon17", "{name: leave_one_domain_out, seeds: 1}")
    assert [record["status"] for record in found["runs"]] == ["ok"] * 10
    assert list(found["summary"][0]["per_test_domain"]) == [f"hospital {number}" for number in range(5)]
    for record in found["runs"]:
        metrics = record["selected"]["train_val"]["metrics"]
        assert (metrics["train_val"]["n"], metrics["test"]["n"]) == (16, 20)
    for words in ("tested on domains never trained on", "groups kept together", "all labelled images take part"):
        assert words in found["summary"][0]["protocol"]


@pytest.mark.slow
@pytest.mark.parametrize("domains", ["region", "year"])
def test_the_worst_region_of_fmow_leaves_other_out_whatever_the_domains_are(domains, tmp_path):
    miniature.fmow(tmp_path / "data")
    protocol = "{name: official, selection: val_domain, metric: worst_domain_accuracy, seeds: 1}"
    found = results(tmp_path, "fmow", protocol, f", domains: {domains}")
    dataset = Fmow(root=tmp_path / "data", domains=domains)
    record = found["runs"][0]
    predictions = load_file(tmp_path / "output" / "small" / "models" / "erm" / ",".join(record["test_domains"])
                            / "seed0-trial0" / "predictions.safetensors")  # fmt: skip
    images = load_file(tmp_path / "output/small/test_images" / f"{','.join(record['test_domains'])}.safetensors")
    rows = images["rows"]
    right = predictions["val_domain.predicted"] == dataset.labels[rows]
    region = dataset.worst_of[rows]
    assert (region == -1).any(), "the miniature has images of 'Other'"
    worst = min(right[region == number].mean() for number in np.unique(region) if number >= 0)
    assert record["selected"]["val_domain"]["metrics"]["test"]["worst_domain_accuracy"] == pytest.approx(worst)
