"""A real run of two encoders at two cuts: references, pairs and costs in its results, and the reports made of them."""

from __future__ import annotations

import csv
import json
from importlib.resources import files
from pathlib import Path

import jsonschema
import miniature
import pytest

from xdm_ft.cli.run import run_recipe
from xdm_ft.recipe.check import check
from xdm_ft.recipe.text import parse

SCHEMA = json.loads(files("xdm_ft.report").joinpath("results.schema.json").read_text(encoding="utf-8"))
RECIPE = """\
name: small
data: {name: pacs, root: data, counts: any}
protocol: {name: leave_one_domain_out, test_domains: [sketch], seeds: 2}
encoders:
  - {name: timm, label: vit, model: test_vit, preprocessing: {size: 32}, kwargs: {img_size: 32}}
  - {name: timm, model: test_resnet, preprocessing: {size: 32}}
features: {dir: cache, workers: 0}
methods: [erm, {name: erm, label: last, trainable: {blocks: 1}}, {name: sam, trainable: {blocks: 1}}]
training: {steps: 3, batch_size: 4}
report: {page: false}
"""


@pytest.mark.slow
def test_two_encoders_at_two_cuts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    miniature.domainbed(tmp_path / "data", "pacs")
    assert run_recipe(check(parse(RECIPE, "small.yaml"))).exit_status == 0
    found = json.loads(Path("output/small/results.json").read_text())
    jsonschema.Draft202012Validator(SCHEMA).validate(found)
    own = [row for row in found["summary"] if row["selection"] == "train_val"]
    references = {row["method"]: (row["versus_erm"] or {}).get("reference") for row in own}
    assert references == {
        f"{method} @ {encoder}": f"{erm} @ {encoder}" if erm else None
        for encoder in ("vit", "test_resnet")
        for method, erm in (("erm", ""), ("last", "erm"), ("sam", "last"))
    }
    compared = [pair for pair in found["comparisons"] if pair["selection"] == "train_val"]
    assert [(pair["first"], pair["second"]) for pair in compared if pair["second"].endswith(" @ test_resnet")][-3:] == [
        (f"{method} @ vit", f"{method} @ test_resnet") for method in ("erm", "last", "sam")
    ]
    means = {row["method"]: row["mean"] for row in own}
    for pair in compared:
        assert pair["difference"] == pytest.approx(means[pair["first"]] - means[pair["second"]])
    of_rows = {(row["encoder"], str(row["trainable"])) for row in own}
    assert of_rows == {(encoder, cut) for encoder in ("vit", "test_resnet") for cut in ("False", "{'blocks': 1}")}
    trained = {run["method"]: run["trained_parameters"] for run in found["runs"]}
    assert trained["erm @ vit"] == 7 * (64 + 1) < trained["last @ vit"] == trained["sam @ vit"]
    with Path("output/small/results.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["selection"] == "train_val"]
    assert {(row["encoder"], row["encoder_trained"]) for row in rows if row["method"] == "last @ test_resnet"} == {
        ("test_resnet", "last block")
    }
    assert sum(row["of"] == "encoders" for row in rows) == 3
    text = Path("output/small/results.md").read_text()
    assert "## Further comparisons" in text and "## Cost" in text
