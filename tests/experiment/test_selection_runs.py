"""What selection picks in whole runs: all rules from the same models, models trained for `cross_domain`, trials."""

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_runs import document, load, recipe, results, results_of

from xdm_ft.algorithms import Setup
from xdm_ft.algorithms.erm import ERM
from xdm_ft.cli.library import run
from xdm_ft.core import Criteria, ModelKey, Task
from xdm_ft.experiment.plan import describe, make_plan, read_data
from xdm_ft.experiment.prepare import build_encoders, prepare
from xdm_ft.experiment.results import RECORDS
from xdm_ft.experiment.work import start
from xdm_ft.export.expected import expected_performance
from xdm_ft.protocol.splits import LEFT_OUT, mean_course, splits, without
from xdm_ft.results.model import Pick, Record
from xdm_ft.results.run import read_run
from xdm_ft.results.trials import pick_trials, selection_value
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage.run_directory import RunDirectory
from xdm_ft.training import Job
from xdm_ft.training.bank.train import train_chunk

VIT = {"encoder": "vit", "trainable": False}  # of a record

pytestmark = pytest.mark.usefixtures("small_pacs")
RUN = Path("output/small")
CROSS, ONLY_ERM = "protocol.selection=cross_domain", "methods=[erm]"
SPLIT_OF = {"train_val": "train_val", "oracle": "test_val"}


def chosen(content, rule):
    return {
        (record["method"], *record["test_domains"]): (
            record["selected"][rule]["step"],
            record["selected"][rule]["metrics"],
        )
        for record in content["runs"]
    }


def naive_value(record, rule):
    """The mean over the domains of their accuracies, as recorded beside what the rule saw."""
    domains = record["selected"][rule]["metrics"][SPLIT_OF[rule]]["per_domain"].values()
    value = sum(domain["accuracy"] for domain in domains) / len(domains)
    assert record["selected"][rule]["value"] == pytest.approx(value)
    return record["selected"][rule]["value"]


@pytest.mark.slow
def test_each_rule_picks_as_if_alone_and_keeps_its_own_weights_and_the_value_that_it_saw():
    both, oracle = results(ONLY_ERM), results(ONLY_ERM, "protocol.selection=oracle", "output.dir=other")
    for content, rules in ((both, ["train_val", "oracle"]), (oracle, ["oracle", "train_val"])):
        assert all(list(record["selected"]) == rules for record in content["runs"])
        assert [row["selection"] for row in content["summary"]] == rules
    for rule in ("train_val", "oracle"):
        assert chosen(both, rule) == chosen(oracle, rule)
    marked = ["oracle: picked on the test domain" in row["protocol"] for row in both["summary"]]
    assert marked == [False, True]
    apart = 0
    for record in both["runs"]:
        for rule in ("train_val", "oracle"):
            naive_value(record, rule)  # also where both rules picked one step
        picks = [record["selected"][rule] for rule in ("train_val", "oracle")]
        if picks[0]["step"] != picks[1]["step"]:
            apart += 1
            heads = [load_file(RUN / pick["weights"])["head.weight"] for pick in picks]
            assert not torch.equal(*heads)
    assert apart, "the miniature must make the rules differ somewhere"


def test_cross_domain_picks_what_naive_leaving_out_picks():
    """Every ordered pair of held-out and left-out domain trained on its own, by splits made by hand."""
    content, made = results(CROSS, ONLY_ERM), recipe(CROSS, ONLY_ERM)
    dataset, accelerator = read_data(made), start(made)
    features = prepare(made, dataset, build_encoders(made)[1], accelerator).encoders[None].features
    plan = make_plan(made, dataset)
    assert len(plan.extra) == 6, "4 domains make 6 pairs, each trained once"

    def course(held_out, left_out):
        full = next(s for s in splits(dataset, made.protocol, 0) if s.test_domains == (held_out,))
        split = without(dataset, full, left_out)
        assert dataset.domain_names.index(left_out) not in dataset.domains[torch.cat(split.train)]
        setup = Setup(Task(dataset.class_names, split.train_domains), width=features.width, steps=10, seed=0)
        job = Job(ModelKey("erm", (held_out,), 0, 0), split, setup, ERM, None, made.training)
        criteria = Criteria(LEFT_OUT[:1], "accuracy")
        [trained] = train_chunk([job], features, plan.annotations, criteria, record=lambda *_: None)
        return trained.course[LEFT_OUT[0]]

    gains = []
    for record in content["runs"]:
        held_out = record["test_domains"][0]
        courses = [course(held_out, other) for other in dataset.domain_names if other != held_out]
        means = {step: np.mean([values[step] for values in courses]) for step in courses[0]}
        best = max(means, key=lambda step: means[step])
        assert record["selected"]["cross_domain"]["step"] == best
        assert set(record["selected"]) == {"cross_domain", "train_val", "oracle"}
        gains.append(record["selected"]["cross_domain"]["metrics"]["test"]["accuracy"] - means[best])
    finished = read_run(RUN)
    expected = expected_performance(finished, finished.runs_of("erm"), {})
    assert expected.one_more_domain == pytest.approx(np.mean(gains)) and len(gains) == 4
    assert "extra models" in content["summary"][0]["protocol"]


@pytest.mark.slow
def test_an_interrupted_cross_domain_measures_nothing_twice(monkeypatch, one_core):
    complete = results(CROSS, ONLY_ERM)
    assert not list(RUN.glob("state/**/*.jsonl")), "a complete run has nothing to resume"
    append, kinds = RunDirectory.append, []

    def killed(directory, kind, *values):
        if kind == RECORDS:
            raise KeyboardInterrupt
        append(directory, kind, *values)

    def noted(directory, kind, *values):
        kinds.append(kind)
        append(directory, kind, *values)

    again = CROSS, ONLY_ERM, "output.dir=again"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunDirectory, "append", killed)
        run(recipe(*again))
    files = Path("again/small").glob("state/cross_domain/*.jsonl")
    assert sum(len(file.read_text().splitlines()) for file in files) == 6
    monkeypatch.setattr(RunDirectory, "append", noted)
    resumed = results(*again)
    assert {*kinds} == {RECORDS}, "the extra models were not trained again"
    assert chosen(resumed, "cross_domain") == chosen(complete, "cross_domain")


@pytest.mark.slow
def test_cross_domain_needs_domains_to_spare():
    shutil.rmtree("data/PACS/sketch")
    content = results(CROSS)
    assert {record["status"] for record in content["runs"] if record["method"] == "erm"} == {"ok"}
    reasons = {record["reason"] for record in content["runs"] if record["method"] == "xdomainmix"}
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
        left_out = dataset.domain_names.index(domain)
        assert split.domain_of[left_out] == -1
        groups = dataset.groups[dataset.domains == left_out]
        assert not np.isin(dataset.groups[torch.cat(split.train)], groups).any()
    assert mean_course([{1: 0.2, 2: 0.4}, {1: 0.4, 2: 0.8, 3: 1.0}]) == pytest.approx({1: 0.3, 2: 0.6})
    assert mean_course([{1: 0.2}, {}]) == {}, "steps that some model lacks are left out"


@pytest.mark.slow
def test_a_domain_where_the_metric_is_not_defined_is_left_out_and_named():
    """Validation images of `sketch` are of one class: an AUROC needs two."""
    lines = ["path,label,domain,split"]
    for domain in ("photo", "sketch", "cartoon"):
        for label in ("dog", "horse"):
            validates = domain != "sketch" or label == "dog"
            for number, image in enumerate(sorted(Path("data").rglob(f"{domain}/{label}/*"))):
                lines.append(f"{image},{label},{domain},{'val' if validates and number % 2 else 'train'}")
    Path("table.csv").write_text("\n".join(lines) + "\n")
    table = ("data={name: table, file: table.csv}", ONLY_ERM)
    content = results(*table, "protocol.metric=auroc")
    protocol = content["summary"][0]["protocol"]
    assert "train_val leaves out sketch, where auroc is not defined, in 2 of 3 splits" in protocol
    (on_cartoon,) = (r for r in content["runs"] if r["test_domains"] == ["cartoon"])
    assert on_cartoon["status"] == "ok" and 0 <= on_cartoon["selected"]["train_val"]["value"] <= 1
    plain = make_plan(recipe(*table), read_data(recipe(*table)))
    assert not any("leaves out" in note for note in plain.notes), "accuracy is defined everywhere"
    Path("table.csv").write_text("\n".join(line for line in lines if "horse,photo,val" not in line) + "\n")
    made = recipe(*table, "protocol.metric=auroc")
    with pytest.raises(UserError, match=r"auroc is not defined with cartoon held out \(seed 0\): every part"):
        make_plan(made, read_data(made))


def one_class_of(domain: str, part: str) -> tuple[str, ...]:
    """Overrides for a table in which one domain has dogs alone. `part`: of the official split, where they are."""
    images = [image for image in sorted(Path("data").rglob("*.png")) if image.parts[-2] in ("dog", "horse")]
    kept = [image for image in images if image.parts[-3:-1] != (domain, "horse")]
    parts = {domain: part, "photo": "train", "art_painting": "test"}
    lines = [f"{image},{image.parts[-2]},{image.parts[-3]},{parts.get(image.parts[-3], 'train')}" for image in kept]
    Path("table.csv").write_text("\n".join(["path,label,domain,split", *lines]) + "\n")
    return "data={name: table, file: table.csv}", ONLY_ERM


@pytest.mark.parametrize("domain", ["art_painting", "cartoon", "sketch"])
def test_cross_domain_measures_only_where_the_metric_is_defined(domain: str) -> None:
    made = recipe(*one_class_of(domain, "train"), "protocol={metric: auroc, selection: cross_domain}")
    dataset = read_data(made)
    plan = make_plan(made, dataset)
    assert {key for model in plan.extra for key in model.needed_by} == {model.key for model in plan.models}
    for model in plan.extra:
        assert model.split.evaluation
        for rows in model.split.evaluation.values():
            assert len(set(dataset.labels[rows])) == 2


def test_a_metric_that_the_official_validation_does_not_define_is_refused() -> None:
    made = recipe(*one_class_of("cartoon", "val"), "protocol={name: official, metric: auroc, selection: val_domain}")
    with pytest.raises(UserError, match=r"auroc is not defined with art_painting .* is of one class; use accuracy$"):
        make_plan(made, read_data(made))


# a search

SEARCH = """\
name: small
data: {name: pacs, root: data, counts: any}
protocol: {name: leave_one_domain_out, test_domains: [photo, sketch], selection: train_val, seeds: 2}
encoder: {name: timm, model: test_vit, preprocessing: {size: 32}, kwargs: {img_size: 32}}
features: {dir: cache, workers: 0}
methods: [linear_probe, erm, rsc, {name: xdomainmix+sam, warmup_steps: 2, p_discard: 0.25}]
search: {trials: 3, preset: frozen}
training: {steps: 6, batch_size: 4, evaluate_every: 2, weight_decay: 0.001}
report: {page: false}
"""


def search(*overrides):
    Path("search.yaml").write_text(SEARCH)
    return load("search.yaml", list(overrides))


@pytest.mark.slow
def test_every_trial_is_kept_and_selection_picks_one():
    content = results_of(search("protocol.final_fit=true", "training.steps=4"))
    counts = {"linear_probe": 4, "erm": 12, "rsc": 12, "xdomainmix+sam": 12}
    assert Counter(record["method"] for record in content["runs"]) == counts
    by_trial = {0: set(), 1: set(), 2: set()}
    for record in (record for record in content["runs"] if record["method"] != "linear_probe"):
        values = record["hparams"]
        by_trial[record["trial"]].add((values["lr"], values["weight_decay"]))
        if record["method"] == "xdomainmix+sam":
            assert values["p_discard"] == 0.25, "what an item sets itself is not searched"
            assert values["sam.rho"] in (0.05, 0.1)
    assert [len(values) for values in by_trial.values()] == [1, 1, 1], "common values are the same for all methods"
    assert by_trial[0] == {(0.001, 0.001)}, "the first trial is the recipe's own"
    assert len(set.union(*by_trial.values())) == 3

    for row in (row for row in content["summary"] if row["selection"] in SPLIT_OF):
        rule = row["selection"]
        for domain, score in row["per_test_domain"].items():
            picked = []
            for seed in (0, 1):
                key = row["method"], [domain], seed
                trials = [r for r in content["runs"] if (r["method"], r["test_domains"], r["seed"]) == key]
                best = max(trials, key=lambda r: naive_value(r, rule))
                picked.append(best["selected"][rule]["metrics"]["test"]["accuracy"])
            assert score["mean"] == pytest.approx(sum(picked) / 2)
        assert "3 hyper-parameter draws" in row["protocol"]
        assert "same hyper-parameter draws for every held-out domain and seed" in row["protocol"]
    assert content["final_fit"]["status"] == "ok"


@pytest.mark.slow
def test_a_search_end_to_end_trains_its_trials_one_after_another():
    small = "encoder.trainable=true", ONLY_ERM, "protocol.seeds=1", "training.steps=2", "training.batch_size=2"
    records = results_of(search(*small, "search={trials: 2, preset: domainbed}"))["runs"]
    rates = {(r["trial"], r["hparams"]["lr"], r["hparams"]["encoder_lr"]) for r in records}
    assert len(records) == 4 and len(rates) == 2
    (_, lr, encoder_lr) = next(rate for rate in rates if rate[0] == 1)
    assert lr == encoder_lr


@pytest.mark.slow
def test_doubtful_picks_and_failed_trials_are_flagged():
    content = results_of(search(ONLY_ERM, "training.lr=0.2", "training.evaluate_every=6", "search.space={}"))
    first = next(r for r in content["runs"] if r["trial"] == 0)
    assert first["selected"]["train_val"]["flags"] == ["last step picked", "lr at the edge of its range"]
    (row,) = (row for row in content["summary"] if row["selection"] == "train_val")
    assert "last step picked in 4 of 4 picks" in row["flags"]
    assert "last step picked in 4 of 4 picks" in (RUN / "results.md").read_text()

    space = "search={trials: 2, space: {lr: {choice: [1.0e+30]}}}"
    assert run(search(ONLY_ERM, space, "training.optimizer=sgd", "name=failing")).failed
    content = document("output/failing")
    assert {(r["trial"], r["status"]) for r in content["runs"]} == {(0, "ok"), (1, "failed")}
    for row in content["summary"]:
        assert row["mean"] is not None and "4 of 4 drawn trials failed, the first: the lo" in row["flags"][-1]
    assert "drawn trials failed" in Path("output/failing/results.md").read_text()


def test_a_method_without_a_range_has_one_trial():
    """Its trials would be equal. Ranges of `training` apply to every method with gradient steps."""
    for space, trials in (("{xdomainmix.p_discard: {uniform: [0, 0.5]}}", 1), ("{lr: {uniform: [0.1, 0.5]}}", 3)):
        changes = ["methods=[linear_probe, erm, xdomainmix]", f"search={{trials: 3, space: {space}}}"]
        recipe = load("demo", [*changes, "protocol.seeds=1"])
        plan = make_plan(recipe, read_data(recipe))
        assert Counter(model.key.method for model in plan.models) == {"linear_probe": 1, "erm": trials, "xdomainmix": 3}
        line = "search: has no range for erm, so one trial each trains; add a range, such as search.space.lr, to search"
        assert (f"\n{line} it too" in describe(plan)) == (trials == 1)


def test_settings_of_averaging_are_searched():
    """Trials of one chunk differ in nothing else, and each has the average of its own settings."""
    space = "search={trials: 4, space: {swad.n_converge: {choice: [1, 2, 3]}}}"
    short = "training.steps=8", "training.lr=0.3", "protocol.test_domains=[photo]"
    windows = {}
    for record in results_of(search("methods=[erm+swad]", space, *short))["runs"]:
        pick = record["selected"]["train_val"]
        windows[record["hparams"]["swad.n_converge"], record["seed"]] = pick["averaged_from"], pick["step"]
    assert any(windows[1, seed] != windows[3, seed] for seed in (0, 1))


def record(trial, value, status="ok"):
    selected = {"train_val": Pick(step=1, weights="", metrics={}, value=value)} if status == "ok" else {}
    return Record(ModelKey("m", ("a",), 0, trial), {}, status, selected=selected, **VIT)


def test_the_first_of_equals_is_picked_and_failures_only_where_nothing_else_is():
    trials = [record(0, 0, "failed"), record(1, 0.5), record(2, None), record(3, 0.7), record(4, 0.7)]
    assert [r.trial for r in pick_trials(trials, "train_val", "accuracy")] == [3]
    assert [r.trial for r in pick_trials(trials, "train_val", "nll")] == [1]
    assert [r.trial for r in pick_trials(trials[:1], "train_val", "accuracy")] == [0]
    assert selection_value(record(0, 0.5), "oracle") is None
    assert selection_value(record(0, 0.5), "train_val") == 0.5
