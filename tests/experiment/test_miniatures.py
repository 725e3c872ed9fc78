"""The seven data sets of the paper, in miniature and in their real layouts: loaded, split, trained on and evaluated."""

import json

import miniature
import pytest

from xdm_ft.errors import UserError
from xdm_ft.experiment import run
from xdm_ft.recipe import check
from xdm_ft.recipe_text import parse

RECIPE = """\
name: small
data: {{name: {name}, root: data{more}}}
protocol: {protocol}
encoder: {{name: timm, model: test_vit, preprocessing: {{size: 32}}, kwargs: {{img_size: 32}}}}
features: {{dir: cache, workers: 0}}
methods: [erm, xdomainmix]
training: {{steps: 10, batch_size: 4}}
"""


def results(tmp_path, name, protocol, more=""):
    assert run(check(parse(RECIPE.format(name=name, protocol=protocol, more=more), "small.yaml"))) == 0
    return json.loads((tmp_path / "output" / "small" / "results.json").read_text())


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", sorted(miniature.CLASSES))
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
        ("fmow", "accuracy", None, {"train_val": 18, "val_domain": 18, "test": 36}),
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


def test_the_worst_region_of_fmow_is_not_the_worst_domain(tmp_path):
    miniature.fmow(tmp_path / "data")
    protocol = "{name: official, selection: val_domain, metric: worst_domain_accuracy, seeds: 1}"
    with pytest.raises(UserError, match="the worst group of fmow is not one of its domains"):
        results(tmp_path, "fmow", protocol)
