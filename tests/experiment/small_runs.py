"""Recipes on miniature PACS, and the documents that their runs write."""

import json
from importlib.resources import files
from pathlib import Path

import jsonschema

from xdm_ft.cli.library import run
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
BANK = (
    "protocol={name: leave_one_domain_out, test_domains: [sketch], seeds: [4, 0], val_fraction: 0.4}",
    "methods=[erm, {name: xdomainmix, warmup_steps: 2}, {name: erm, head: cosine, cosine.scale: 3.0, label: cosine}, "
    "{name: erm, head: mlp, mlp.hidden_width: 8, mlp.activation: relu, label: mlp}, mixup, linear_probe, "
    "{name: erm, normalize: true, label: unit}]",
    "analyse=true",
)
END_TO_END = (
    "protocol={name: leave_one_domain_out, test_domains: [sketch], seeds: 1, val_fraction: 0.4}",
    "encoder={name: timm, model: test_resnet, preprocessing: {size: 32}, trainable: true}",
    "methods=[erm, {name: xdomainmix, warmup_steps: 1}, mixstyle, lisa, linear_probe, "
    "{name: erm, head: cosine, cosine.scale: 3.0, label: cosine}]",
    "training.steps=2",
    "analyse=true",
)


def recipe(*overrides):
    Path("small.yaml").write_text(RECIPE)
    return load("small.yaml", list(overrides))


def document(run_directory, name="results"):
    """results.json or analysis.json of a run, as its schema says."""
    content = json.loads((Path(run_directory) / f"{name}.json").read_text(encoding="utf-8"))
    schema = json.loads(files("xdm_ft.report").joinpath(f"{name}.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(schema).validate(content)
    return content


def results_of(made):
    """results.json of a run in which no model fails."""
    assert not run(made).failed
    return document(Path(made.output.dir) / made.name)


def results(*overrides):
    return results_of(recipe(*overrides))


def wait_for(ranks):
    """Waits until all processes of a run have ended well."""
    try:
        for rank in ranks:
            _, printed = rank.communicate(timeout=180)
            assert rank.returncode == 0, printed
    finally:
        for rank in ranks:
            rank.kill()
