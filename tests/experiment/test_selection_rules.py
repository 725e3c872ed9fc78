"""All selection rules from the same models, and models trained for `cross_domain`."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_runs import recipe, results

from xdm_ft.algorithms import Setup
from xdm_ft.algorithms.erm import ERM
from xdm_ft.evaluation.records import ModelKey
from xdm_ft.experiment import models, pieces, run
from xdm_ft.experiment.machine import start
from xdm_ft.experiment.plan import make_plan, read_data
from xdm_ft.experiment.prepare import build_encoders, prepare
from xdm_ft.experiment.results import RECORDS
from xdm_ft.export.expected import expected_performance
from xdm_ft.protocol.splits import LEFT_OUT, mean_course, splits, without
from xdm_ft.report.finished import read_run
from xdm_ft.runtime.tensors import Criteria, Task
from xdm_ft.training import Job
from xdm_ft.training.bank.train import train_chunk

pytestmark = pytest.mark.usefixtures("small_pacs")


def made_path(made):
    return Path(made.output.dir) / made.name


def chosen(found, rule):
    return {
        (run["method"], *run["test_domains"]): (run["selected"][rule]["step"], run["selected"][rule]["metrics"])
        for run in found["runs"]
    }


@pytest.mark.slow
def test_each_rule_picks_as_if_alone_and_keeps_its_own_weights_and_the_value_that_it_saw():
    both, oracle = results(), results("protocol.selection=oracle", "output.dir=other")
    assert all(list(run["selected"]) == ["train_val", "oracle"] for run in both["runs"])
    assert all(list(run["selected"]) == ["oracle", "train_val"] for run in oracle["runs"])
    for rule in ("train_val", "oracle"):
        assert chosen(both, rule) == chosen(oracle, rule)
    assert [row["selection"] for row in both["summary"]] == ["train_val", "train_val", "oracle", "oracle"]
    assert [row["selection"] for row in oracle["summary"]] == ["oracle", "oracle", "train_val", "train_val"]
    marked = ["oracle: picked on the test domain" in row["protocol"] for row in both["summary"]]
    assert marked == [False, False, True, True]
    apart = 0
    for selected in (record["selected"] for record in both["runs"]):
        for rule, split in (("train_val", "train_val"), ("oracle", "test_val")):
            domains = selected[rule]["metrics"][split]["per_domain"].values()
            mean = sum(domain["accuracy"] for domain in domains) / len(domains)
            assert selected[rule]["value"] == pytest.approx(mean), "also where both rules picked one step"
        if selected["train_val"]["step"] != selected["oracle"]["step"]:
            apart += 1
            own, other = (load_file(f"output/small/{selected[rule]['weights']}") for rule in ("train_val", "oracle"))
            assert not torch.equal(own["head.weight"], other["head.weight"])
    assert apart, "the miniature must make the rules differ somewhere"


def test_cross_domain_picks_what_naive_leaving_out_picks():
    """Every ordered pair of held-out and left-out domain trained on its own, by splits made by hand."""
    made = recipe("protocol.selection=cross_domain", "methods=[erm]")
    assert not run(made).failed
    found = json.loads((made_path(made) / "results.json").read_text())
    dataset, accelerator = read_data(made), start(made)
    prepared = prepare(made, dataset, build_encoders(made), accelerator)
    plan = make_plan(made, dataset)
    assert len(plan.extra) == 6, "4 domains make 6 pairs, each trained once"

    def course(held_out, left_out):
        full = next(s for s in splits(dataset, made.protocol, 0) if s.test_domains == (held_out,))
        split = without(dataset, full, left_out)
        assert dataset.domain_names.index(left_out) not in dataset.domains[torch.cat(split.train)]
        task = Task(dataset.class_names, split.train_domains)
        setup = Setup(task, width=prepared.encoders[None].features.width, steps=10, seed=0)
        job = Job(ModelKey("erm", (held_out,), 0, 0), split, setup, ERM, None, made.training)
        arguments = (plan.annotations, Criteria(LEFT_OUT[:1], "accuracy"))
        [trained] = train_chunk([job], prepared.encoders[None].features, *arguments, record=lambda *_: None)
        return trained.course[LEFT_OUT[0]]

    gains = []
    for record in found["runs"]:
        held_out = record["test_domains"][0]
        courses = [course(held_out, other) for other in dataset.domain_names if other != held_out]
        means = {step: np.mean([of[step] for of in courses]) for step in courses[0]}
        best = max(means, key=lambda step: means[step])
        assert record["selected"]["cross_domain"]["step"] == best
        assert set(record["selected"]) == {"cross_domain", "train_val", "oracle"}
        gains.append(record["selected"]["cross_domain"]["metrics"]["test"]["accuracy"] - means[best])
    of_run = read_run(made_path(made))
    expected = expected_performance(of_run.path, of_run.results, of_run.records, "cross_domain", "erm")
    assert expected.one_more_domain == pytest.approx(np.mean(gains)) and len(gains) == 4
    assert "extra models" in found["summary"][0]["protocol"]


@pytest.mark.slow
def test_an_interrupted_cross_domain_measures_nothing_twice(monkeypatch):
    overrides = ("protocol.selection=cross_domain", "methods=[erm]")
    whole = results(*overrides)
    assert not list(made_path(recipe()).glob("state/**/*.jsonl")), "a complete run has nothing to resume"

    save = pieces.save

    def killed(outcomes, directory, writes):
        found = list(outcomes)
        if found[0].kind == RECORDS:
            raise KeyboardInterrupt
        return save(found, directory, writes)

    again = (*overrides, "output.dir=again")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pieces, "save", killed)
        run(recipe(*again))
    files = made_path(recipe(*again)).glob("state/cross_domain/*.jsonl")
    assert sum(len(file.read_text().splitlines()) for file in files) == 6
    asked = []
    with monkeypatch.context() as patch:
        do_pieces = models.do_pieces

        def watched(context, pieces, *rest, **settings):
            asked.extend(piece.criteria.rules[0] for piece in pieces)
            do_pieces(context, pieces, *rest, **settings)

        patch.setattr(models, "do_pieces", watched)
        resumed = results(*again)
    assert not asked, "the extra models were not trained again"
    assert chosen(resumed, "cross_domain") == chosen(whole, "cross_domain")


@pytest.mark.slow
def test_cross_domain_needs_domains_to_spare():
    shutil.rmtree(next(Path("data").rglob("sketch")))
    found = results("protocol.selection=cross_domain")
    assert {run["status"] for run in found["runs"] if run["method"] == "erm"} == {"ok"}
    reasons = {run["reason"] for run in found["runs"] if run["method"] == "xdomainmix"}
    assert len(reasons) == 3 and all("one more for cross_domain held out there is 1" in why for why in reasons)


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


@pytest.mark.slow
def test_a_domain_where_the_metric_is_not_defined_is_left_out_and_named():
    """Validation images of `sketch` are of one class: an AUROC needs two."""
    lines = ["path,label,domain,split"]
    for domain in ("photo", "sketch", "cartoon"):
        for label in ("dog", "horse"):
            images = sorted(Path("data").rglob(f"{domain}/{label}/*"))
            validates = domain != "sketch" or label == "dog"
            parts = ["val" if validates and place % 2 else "train" for place in range(len(images))]
            lines += [f"{image},{label},{domain},{part}" for image, part in zip(images, parts, strict=True)]
    Path("table.csv").write_text("\n".join(lines) + "\n")
    table = ("data={name: table, file: table.csv}", "methods=[erm]", "protocol.metric=auroc")
    found = results(*table)
    protocol = found["summary"][0]["protocol"]
    assert "train_val leaves out sketch, where auroc is not defined, in 2 of 3 splits" in protocol
    (run_on_photo,) = (r for r in found["runs"] if r["test_domains"] == ["cartoon"])
    assert run_on_photo["status"] == "ok" and 0 <= run_on_photo["selected"]["train_val"]["value"] <= 1
    plain = make_plan(recipe(*table[:2]), read_data(recipe(*table[:2])))
    assert not any("leaves out" in note for note in plain.notes), "accuracy is defined everywhere"
