"""A recipe on miniature PACS, for tests that run it with changes."""

import json
from importlib.resources import files
from pathlib import Path

import jsonschema

from xdm_ft.experiment import run
from xdm_ft.recipe.check import load

RECIPE = """\
name: small
data: {name: pacs, root: data, counts: any}
protocol: {name: leave_one_domain_out, selection: train_val, seeds: 1, val_fraction: 0.4}
encoder: {name: timm, model: test_vit, preprocessing: {size: 32}, kwargs: {img_size: 32}}
features: {dir: cache, workers: 0}
methods: [erm, {name: xdomainmix, warmup_steps: 2}]
training: {steps: 10, batch_size: 4, evaluate_every: 2, optimizer: sgd, lr: 0.05}
report: {page: false}
"""


def recipe(*overrides):
    Path("small.yaml").write_text(RECIPE)
    return load("small.yaml", list(overrides))


def results(*overrides):
    """results.json of a run in which no model fails, as its schema says."""
    made = recipe(*overrides)
    assert not run(made).failed
    found = json.loads((Path(made.output.dir) / made.name / "results.json").read_text())
    schema = json.loads(files("xdm_ft.report").joinpath("results.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(schema).validate(found)
    return found
