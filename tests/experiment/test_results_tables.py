"""What a real run writes about its budgets, its spread and the published numbers."""

import json
from importlib.resources import files

import jsonschema
import miniature
import pytest

from xdm_ft.cli.run import run_recipe
from xdm_ft.evaluation.summary import DOMAINBED, WILDS
from xdm_ft.recipe.check import check
from xdm_ft.recipe.text import parse

SCHEMA = json.loads(files("xdm_ft.report").joinpath("results.schema.json").read_text(encoding="utf-8"))
RECIPE = """\
name: small
data: {{name: {name}, root: data{more}}}
protocol: {protocol}
encoder: {{name: timm, model: test_vit, preprocessing: {{size: 32}}, kwargs: {{img_size: 32}}}}
features: {{dir: cache, workers: 0}}
methods: [linear_probe, erm, sam, {{name: fish, label: peixe}}]
training: {{steps: 10, batch_size: 4}}
report: {{page: false}}
"""


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Runs the recipe on miniature data: results.json, checked, and results.md."""

    def make(name, protocol, more=""):
        monkeypatch.chdir(tmp_path)
        recipe = check(parse(RECIPE.format(name=name, protocol=protocol, more=more), "small.yaml"))
        ran = run_recipe(recipe)
        ran.show()
        assert ran.exit_status == 0
        found = json.loads((tmp_path / "output" / "small" / "results.json").read_text())
        jsonschema.Draft202012Validator(SCHEMA).validate(found)
        return found, (tmp_path / "output" / "small" / "results.md").read_text()

    return make


@pytest.mark.slow
def test_pacs(made, tmp_path, capsys):
    miniature.domainbed(tmp_path / "data", "pacs")
    found, text = made("pacs", "{name: leave_one_domain_out, seeds: 2}", ", counts: any")
    evaluations = {row["method"]: row["budget"]["gradient_evaluations"] for row in found["summary"]}
    counts = {"linear_probe": 0, "erm": 10, "sam": 20, "peixe": 30}  # fish: a step for each of 3 training domains
    assert evaluations == {method: {"low": n, "high": n} for method, n in counts.items()}
    assert {row["spread_as_published"]["kind"] for row in found["summary"]} == {DOMAINBED.kind}
    for row in found["summary"]:
        assert row["spread_as_published"]["value"] == pytest.approx(row["stderr"] / 2**0.5)  # ddof 0 of two seeds
    assert "published: resnet50 (imagenet), fine-tuned" in text and "ours: test_vit, frozen" in text
    assert "accuracy over art_painting, cartoon, photo, sketch; ± is here" in " ".join(text.split())
    numbers = {"erm": "85.5 ± 0.2", "sam": "85.8 ± 0.2", "peixe (published: fish)": "85.5 ± 0.3"}
    for method, number in numbers.items():
        line = next(line for line in text.splitlines() if method in line and number in line)
        assert line.count("±") == 2
    assert "unequal budgets" in text
    tables = text.split("## How to read")[0]
    assert tables.count("beside ours") == tables.count("the recipe's rule") == tables.count("CHEATING") == 1
    printed = capsys.readouterr().out
    assert "A new site like these lies below" in printed and "published" not in printed and "CHEATING" not in printed


@pytest.mark.slow
def test_camelyon17(made, tmp_path):
    miniature.camelyon17(tmp_path / "data")
    found, text = made("camelyon17", "{name: official, selection: val_domain, seeds: 2}")
    for row in found["summary"]:
        assert "; training loss averaged by domain; " in row["protocol"]
        assert row["spread_as_published"] == {"kind": WILDS.kind, "value": pytest.approx(row["std"])}
    assert "published: densenet121 (scratch), fine-tuned" in text and "published: clip vit-b/16, frozen" in text


@pytest.mark.slow
def test_own_images_are_beside_nothing(made, tmp_path):
    miniature.domainbed(tmp_path / "data", "pacs")
    found, text = made("folder", "{name: leave_one_domain_out, test_domains: [photo], seeds: 1}", "/PACS")
    assert "published" not in text.lower() and "spread_as_published" not in found["summary"][0]
