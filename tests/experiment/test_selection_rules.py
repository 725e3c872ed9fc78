"""All selection rules from the same models, models trained for `cross_domain`, and the model that is shipped."""

import json
import shutil
from importlib.resources import files
from pathlib import Path

import jsonschema
import miniature
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from xdm_ft.algorithms import Setup
from xdm_ft.algorithms.erm import ERM
from xdm_ft.data.loading.derived_splits import LEFT_OUT, all_domains, mean_course, without
from xdm_ft.data.loading.splits import splits
from xdm_ft.errors import UserError
from xdm_ft.experiment import run
from xdm_ft.experiment.engines import Engines
from xdm_ft.experiment.final_fit import best_method, best_trial, median
from xdm_ft.experiment.machine import start
from xdm_ft.experiment.material import build_encoder, gather
from xdm_ft.experiment.plan import make_plan, read_data
from xdm_ft.experiment.run_directory import RunDirectory
from xdm_ft.recipe import load
from xdm_ft.tensors import Task
from xdm_ft.training import Job
from xdm_ft.training.bank import train_bank

RECIPE = """\
name: rules
data: {name: pacs, root: data, counts: any}
protocol: {name: leave_one_domain_out, selection: train_val, seeds: 1, val_fraction: 0.4}
encoder: {name: timm, model: test_vit, preprocessing: {size: 32}, kwargs: {img_size: 32}}
features: {dir: cache, workers: 0}
methods: [erm, {name: xdomainmix, warmup_steps: 2}]
training: {steps: 10, batch_size: 4, evaluate_every: 2, optimizer: sgd, lr: 0.05}
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    miniature.domainbed(tmp_path / "data", "pacs")


def recipe(*overrides):
    Path("rules.yaml").write_text(RECIPE)
    return load("rules.yaml", list(overrides))


def results(*overrides):
    made = recipe(*overrides)
    assert run(made) == 0
    return json.loads((made_path(made) / "results.json").read_text())


def made_path(made):
    return Path(made.output.dir) / made.name


def chosen(found, rule):
    return {
        (run["method"], *run["test_domains"]): (run["selected"][rule]["step"], run["selected"][rule]["metrics"])
        for run in found["runs"]
    }


def test_a_run_tells_what_each_rule_would_have_told_alone():
    both = results()
    assert all(list(run["selected"]) == ["train_val", "oracle"] for run in both["runs"])
    oracle = results("protocol.selection=oracle", "output.dir=other")
    assert all(list(run["selected"]) == ["oracle", "train_val"] for run in oracle["runs"])
    for rule in ("train_val", "oracle"):
        assert chosen(both, rule) == chosen(oracle, rule)
    assert [row["selection"] for row in both["summary"]] == ["train_val", "train_val", "oracle", "oracle"]
    assert [row["selection"] for row in oracle["summary"]] == ["oracle", "oracle", "train_val", "train_val"]
    marked = ["oracle: picked on the test domain" in row["protocol"] for row in both["summary"]]
    assert marked == [False, False, True, True]


def test_each_rule_keeps_its_own_weights():
    found = results()
    apart = [
        run["selected"] for run in found["runs"]
        if run["selected"]["train_val"]["step"] != run["selected"]["oracle"]["step"]
    ]  # fmt: skip
    assert apart, "the miniature must make the rules differ somewhere"
    for selected in apart:
        weights = [load_file(f"output/rules/{selected[rule]['weights']}") for rule in ("train_val", "oracle")]
        assert not torch.equal(weights[0]["head.weight"], weights[1]["head.weight"])


def test_cross_domain_picks_what_naive_leaving_out_picks():
    """Every ordered pair of held-out and left-out domain trained on its own, by splits made by hand."""
    made = recipe("protocol.selection=cross_domain", "methods=[erm]")
    assert run(made) == 0
    found = json.loads((made_path(made) / "results.json").read_text())
    dataset, accelerator = read_data(made), start(made)
    material = gather(made, dataset, build_encoder(made, 0), accelerator)
    plan = make_plan(made, dataset)
    assert len(plan.extra) == 6, "4 domains make 6 pairs, each trained once"

    def course(held_out, left_out):
        full = next(s for s in splits(dataset, made.protocol, 0) if s.test_domains == (held_out,))
        split = without(dataset, full, left_out)
        assert dataset.domain_names.index(left_out) not in dataset.domains[torch.cat(split.train)]
        task = Task(dataset.class_names, split.train_domains)
        setup = Setup(task, width=material.features.width, steps=10, seed=0)
        job = Job("erm", (held_out,), 0, 0, split, setup, ERM, None, lr=0.05, weight_decay=0.0)
        arguments = (plan.labels, plan.domains, made.training, LEFT_OUT[:1], "accuracy")
        (trained,) = train_bank([job], material.features, *arguments, record=lambda *_: None, show=False)
        return trained.course[LEFT_OUT[0]]

    for record in found["runs"]:
        held_out = record["test_domains"][0]
        courses = [course(held_out, other) for other in dataset.domain_names if other != held_out]
        means = {step: np.mean([of[step] for of in courses]) for step in courses[0]}
        best = max(means, key=lambda step: means[step])
        assert record["selected"]["cross_domain"]["step"] == best
        assert set(record["selected"]) == {"cross_domain", "train_val", "oracle"}
    assert "extra models left out" in found["summary"][0]["protocol"]


def test_an_interrupted_cross_domain_measures_nothing_twice(monkeypatch):
    overrides = ("protocol.selection=cross_domain", "methods=[erm]")
    whole = results(*overrides)
    assert not list(made_path(recipe()).glob("state/**/*.json")), "what is remembered goes when the run is complete"

    def killed(self, record, predictions):
        raise KeyboardInterrupt

    again = (*overrides, "output.dir=again")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunDirectory, "add", killed)
        run(recipe(*again))
    assert len(list(made_path(recipe(*again)).glob("state/**/*.json"))) == 6
    asked = []
    with monkeypatch.context() as patch:
        train = Engines.train

        def watched(self, requests):
            asked.extend(request.rules[0] for request in requests)
            return train(self, requests)

        patch.setattr(Engines, "train", watched)
        resumed = results(*again)
    assert asked == ["cross_domain"], "the extra models were not trained again"
    assert chosen(resumed, "cross_domain") == chosen(whole, "cross_domain")


def test_cross_domain_needs_domains_to_spare():
    shutil.rmtree(next(Path("data").rglob("sketch")))
    found = results("protocol.selection=cross_domain")
    assert {run["status"] for run in found["runs"] if run["method"] == "erm"} == {"ok"}
    reasons = {run["reason"] for run in found["runs"] if run["method"] == "xdomainmix"}
    assert len(reasons) == 3 and all("one more for cross_domain held out there is 1" in why for why in reasons)


def test_the_final_model_is_the_best_method_on_all_domains():
    found = results("protocol.final_fit=true", "training.steps=10")
    final = found["final_fit"]
    rows = {row["method"]: row for row in found["summary"] if row["selection"] == "train_val"}
    assert rows[final["method"]]["mean"] == max(row["mean"] for row in rows.values())
    assert final["estimate"]["mean"] == rows[final["method"]]["mean"]
    picked = sorted(run["selected"]["train_val"]["step"] for run in found["runs"] if run["method"] == final["method"])
    assert final["step"] == picked[1], "the median, the lower one of two"
    assert len(final["domains"]) == 4
    assert set(final["metrics"]) == {"train_val"}
    schema = json.loads(files("xdm_ft.report").joinpath("results.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(schema).validate(found)

    made = recipe()
    dataset, accelerator = read_data(made), start(made)
    material = gather(made, dataset, build_encoder(made, 0), accelerator)
    plan, split = make_plan(made, dataset), all_domains(dataset, made.protocol, 0)
    item = next(item for item in made.methods if item.label == final["method"])
    setup = Setup(Task(dataset.class_names, split.train_domains), width=material.features.width, steps=10, seed=0)
    job = Job("x", (), 0, 0, split, setup, item.algorithm.build, None, 0.05, 0.0, known={"r": {final["step"]: 1.0}})
    arguments = (plan.labels, plan.domains, made.training, ("r",), "accuracy")
    (trained,) = train_bank([job], material.features, *arguments, record=lambda *_: None, show=False)
    weights = load_file(f"output/rules/{final['weights']}")
    torch.testing.assert_close(weights["head.weight"], trained.selected["r"].state["head.weight"])

    again = results("protocol.final_fit=true", "training.steps=10")
    assert again["final_fit"] == final


def test_all_domains_keeps_the_validation_parts_of_leaving_one_out():
    made = recipe()
    dataset = read_data(made)
    whole = all_domains(dataset, made.protocol, 0)
    parts = dict(zip(whole.train_domains, whole.train, strict=True))
    for split in splits(dataset, made.protocol, 0):
        for name, rows in zip(split.train_domains, split.train, strict=True):
            assert torch.equal(rows, parts[name])
    everything = torch.cat([*whole.train, whole.evaluation["train_val"]]).sort().values
    assert torch.equal(everything, torch.arange(len(dataset)))


def test_without_renumbers_domains_and_divides_no_group():
    made = recipe()
    dataset = read_data(made)
    dataset.groups = np.arange(len(dataset)) // 3  # some groups span two domains
    full = splits(dataset, made.protocol, 0)[0]
    for domain in full.train_domains:
        split = without(dataset, full, domain)
        assert domain not in split.train_domains and split.test_domains == (*full.test_domains, domain)
        for number, name in enumerate(split.train_domains):
            assert split.domain_of[dataset.domain_names.index(name)] == number
            assert set(dataset.domains[split.train[number]]) == {dataset.domain_names.index(name)}
        assert split.domain_of[dataset.domain_names.index(domain)] == -1
        of_domain = dataset.groups[dataset.domains == dataset.domain_names.index(domain)]
        assert not np.isin(dataset.groups[torch.cat(split.train)], of_domain).any()


def test_mean_course_leaves_out_steps_that_some_model_lacks():
    assert mean_course([{1: 0.2, 2: 0.4}, {1: 0.4, 2: 0.8, 3: 1.0}]) == pytest.approx({1: 0.3, 2: 0.6})
    assert mean_course([{1: 0.2}, {}]) == {}


def test_the_best_method_has_all_its_models_and_lower_losses_are_better():
    def row(method, mean, metric="accuracy", selection="train_val", **more):
        return {"method": method, "mean": mean, "metric": metric, "selection": selection, **more}

    rows = [row("a", 0.5), row("b", 0.7, reason="1 of 2 runs failed"), row("c", 0.6), row("d", 0.9, selection="oracle")]
    assert best_method(rows, "train_val")["method"] == "c"
    assert best_method([row("a", 0.5, "nll"), row("b", 0.4, "nll")], "train_val")["method"] == "b"
    assert best_method([row("a", None)], "train_val") is None
    assert [median([3, 1, 2]), median([4, 1, 2, 3])] == [2, 2]


def test_the_best_trial_is_whole_where_one_is():
    def record(trial, value):
        selected = {} if value is None else {"train_val": {"metrics": {"train_val": {"accuracy": value}}}}
        return {"trial": trial, "status": "failed" if value is None else "ok", "selected": selected}

    records = [record(0, 0.5), record(0, 0.6), record(1, 0.9), record(1, None), record(2, 0.6), record(2, 0.6)]
    assert best_trial(records, "train_val", "accuracy") == 2
    assert best_trial([record(0, None), record(1, 0.2), record(1, None)], "train_val", "accuracy") == 1


def test_no_model_is_shipped_on_an_estimate_of_oracle():
    with pytest.raises(UserError, match=r"protocol\.final_fit: ships a model with its estimate"):
        recipe("protocol.final_fit=true", "protocol.selection=oracle")
