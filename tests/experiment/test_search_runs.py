"""A search from the recipe to the table."""

import json
import os
import subprocess
import sys
from collections import Counter
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest

from xdm_ft.cli.parser import main
from xdm_ft.evaluation.records import ModelKey, Pick, Record
from xdm_ft.evaluation.trials import picked_trials, selection_value
from xdm_ft.experiment import run
from xdm_ft.experiment.plan import hparams, make_plan, read_data
from xdm_ft.recipe.check import load
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage.results_file import COSTS

pytestmark = pytest.mark.usefixtures("small_pacs")
RECIPE = """\
name: search
data: {name: pacs, root: data, counts: any}
protocol: {name: leave_one_domain_out, test_domains: [photo, sketch], selection: train_val, seeds: 2, final_fit: true}
encoder: {name: timm, model: test_vit, preprocessing: {size: 32}, kwargs: {img_size: 32}}
features: {dir: cache, workers: 0}
methods: [linear_probe, erm, rsc, {name: xdomainmix+sam, warmup_steps: 2, p_discard: 0.25}]
search: {trials: 3, preset: frozen}
training: {steps: 6, batch_size: 4, evaluate_every: 2, weight_decay: 0.001}
report: {page: false}
"""


def naive_value(record, rule):
    """The mean over the domains of their accuracies, as recorded beside what the rule saw."""
    score = record["selected"][rule]["metrics"][{"train_val": "train_val", "oracle": "test_val"}[rule]]
    value = sum(domain["accuracy"] for domain in score["per_domain"].values()) / len(score["per_domain"])
    assert record["selected"][rule]["value"] == pytest.approx(value)
    return record["selected"][rule]["value"]


def recipe(*overrides):
    Path("search.yaml").write_text(RECIPE)
    return load("search.yaml", list(overrides))


@pytest.mark.slow
def test_every_trial_is_kept_and_selection_picks_one():
    made = recipe()
    assert not run(made).failed
    found = json.loads(Path("output/search/results.json").read_text())
    schema = json.loads(files("xdm_ft.report").joinpath("results.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(schema).validate(found)
    assert Counter(r["method"] for r in found["runs"]) == {
        "linear_probe": 4, "erm": 12, "rsc": 12, "xdomainmix+sam": 12,
    }  # fmt: skip

    by_trial: dict[int, set[str]] = {}
    for record in found["runs"]:
        if record["method"] == "linear_probe":
            continue
        values = record["hparams"]
        by_trial.setdefault(record["trial"], set()).add(f"{values['lr']} {values['weight_decay']}")
        if record["method"] == "xdomainmix+sam":
            assert values["p_discard"] == 0.25, "what an item sets itself is not searched"
            assert values["sam.rho"] in (0.05, 0.1)
    assert [len(by_trial[trial]) for trial in range(3)] == [1, 1, 1], "common values are the same for all methods"
    assert by_trial[0] == {"0.001 0.001"}, "the first trial is the recipe's own"
    assert len(set.union(*by_trial.values())) == 3

    for rule in ("train_val", "oracle"):
        for row in (row for row in found["summary"] if row["selection"] == rule):
            own = [r for r in found["runs"] if r["method"] == row["method"]]
            for domain, told in row["per_test_domain"].items():
                picked = []
                for seed in (0, 1):
                    trials = [r for r in own if r["test_domains"] == [domain] and r["seed"] == seed]
                    best = max(trials, key=lambda r: naive_value(r, rule))
                    picked.append(best["selected"][rule]["metrics"]["test"]["accuracy"])
                assert told["mean"] == pytest.approx(sum(picked) / 2)
            assert "3 hyper-parameter draws" in row["protocol"]
            assert "same hyper-parameter draws for every held-out domain and seed" in row["protocol"]
    final = found["final_fit"]
    assert final["status"] == "ok"
    if final["method"] != "linear_probe":
        assert final["hparams"] == next(
            r["hparams"] for r in found["runs"] if (r["method"], r["trial"]) == (final["method"], final["trial"])
        )


@pytest.mark.slow
def test_a_search_end_to_end_trains_its_trials_one_after_another():
    made = recipe(
        "encoder.trainable=true", "methods=[erm]", "search={trials: 2, preset: domainbed}", "protocol.seeds=1",
        "protocol.final_fit=false", "training.steps=2", "training.batch_size=2",
    )  # fmt: skip
    assert not run(made).failed
    found = json.loads(Path("output/search/results.json").read_text())
    rates = {(r["trial"], r["hparams"]["lr"], r["hparams"]["encoder_lr"]) for r in found["runs"]}
    assert len(found["runs"]) == 4 and len(rates) == 2
    (_, lr, encoder_lr) = next(rate for rate in rates if rate[0] == 1)
    assert lr == encoder_lr


@pytest.mark.slow
def test_doubtful_picks_are_flagged():
    assert not run(recipe("methods=[erm]", "training.lr=0.2", "training.evaluate_every=6", "search.space={}")).failed
    found = json.loads(Path("output/search/results.json").read_text())
    own = next(r for r in found["runs"] if r["trial"] == 0)
    assert own["selected"]["train_val"]["flags"] == ["last step picked", "lr at the edge of its range"]
    (row,) = (row for row in found["summary"] if row["selection"] == "train_val")
    assert "last step picked in 4 of 4 picks" in row["flags"]
    assert "last step picked in 4 of 4 picks" in Path("output/search/results.md").read_text()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["search.space={xdomainmixx.p_discard: {uniform: [0, 1]}}"],
            r"search\.space\.xdomainmixx\.p_discard: is no searchable hyper",
        ),
        (["search.space={encoder_lr: {uniform: [0.1, 1]}}"], "encoder_lr: has no effect with a frozen encoder"),
        (["search.trials=1"], r"search\.trials: 1 uses no value of the preset frozen"),
        (
            ["search.preset=none"],
            r"search\.trials: 3 would train each model 3 times with the same settings",
        ),
        (["search.space={lr: {uniform: [-2, -1]}}"], r"trial 1 draws lr = -"),
        (["search.space={lr: {uniform: [0.1, 1], choice: [1]}}"], "give exactly one of"),
        (
            ["methods=[erm, erm+swad]", "search.space={patience: {choice: [1, 2]}}"],
            r"search\.space\.patience: \+swad decides itself which steps it averages; leave it out",
        ),
        (["search.space={rsc.feature_drop: {uniform: [0.9, 1.5]}}"], "draws feature_drop = 1"),
    ],
)
def test_a_faulty_search_is_refused_before_any_data_is_read(overrides, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        recipe(*overrides)


def test_the_resolved_recipe_draws_the_same():
    made = recipe()
    Path("resolved.yaml").write_text(made.as_yaml())
    again = load("resolved.yaml", [])
    dataset = read_data(made)
    plans = [make_plan(one, dataset).models for one in (made, again)]
    first, second = ([hparams(m.item, m.training) for m in models] for models in plans)
    assert first == second
    assert len({m.item.block for m in plans[0] if m.item.label == "rsc"}) == 3


def test_settings_of_averaging_are_searched():
    """Trials of one chunk differ in nothing else, and each has the average of its own settings."""
    space = "search={trials: 4, space: {swad.n_converge: {choice: [1, 2, 3]}}}"
    short = "training.steps=8", "training.lr=0.3", "protocol.test_domains=[photo]", "protocol.final_fit=false"
    assert not run(recipe("methods=[erm+swad]", space, *short)).failed
    windows = {}
    for r in json.loads(Path("output/search/results.json").read_text())["runs"]:
        picked = r["selected"]["train_val"]
        windows[r["hparams"]["swad.n_converge"], r["seed"]] = picked["averaged_from"], picked["step"]
    assert any(windows[1, seed] != windows[3, seed] for seed in (0, 1))


@pytest.mark.slow
def test_processes_share_the_heads_and_give_the_very_same_results():
    assert not run(recipe("protocol.selection=cross_domain")).failed
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [files("xdm_ft").joinpath("run.py"), "search.yaml", "protocol.selection=cross_domain", "output.dir=two"]
    subprocess.run(command, check=True, env=os.environ | {"ACCELERATE_USE_CPU": "1"}, capture_output=True)
    one, two = (json.loads(Path(f"{folder}/search/results.json").read_text()) for folder in ("output", "two"))
    assert two["environment"]["processes"] == 2
    assert [without_times(one[key]) for key in ("runs", "summary", "final_fit")] == [
        without_times(two[key]) for key in ("runs", "summary", "final_fit")
    ]
    for path in Path("output/search/models").rglob("*.safetensors"):
        assert path.read_bytes() == Path("two", *path.parts[1:]).read_bytes()


def without_times(value):
    if isinstance(value, dict):
        return {key: without_times(inner) for key, inner in value.items() if key not in COSTS}
    return [without_times(inner) for inner in value] if isinstance(value, list) else value


@pytest.mark.slow
def test_any_model_of_a_search_can_be_trained_again(capsys):
    assert not run(recipe("protocol.selection=cross_domain", "methods=[erm, rsc]", "protocol.final_fit=false")).failed
    capsys.readouterr()
    for method, trial in (("erm", "2"), ("rsc", "1")):
        assert main(["retrain", "output/search", method, "photo", "0", trial]) == 0
        assert capsys.readouterr().out.count("weights the same bits") == 3
    assert main(["retrain", "output/search", "erm", "sketch", "1", "2"]) == 0
    told = capsys.readouterr().out
    assert told.count("weights the same bits") == 3 and "differ" not in told
    assert main(["retrain", "output/search", "erm", "sketch", "1", "2", "--alone"]) == 0
    assert capsys.readouterr().out.count("weights the same bits") == 3
    assert main(["retrain", "output/search", "erm", "sketch", "1", "7"]) == 2
    assert 'no model "erm sketch 1 7"; did you mean "erm sketch 1' in capsys.readouterr().err
    assert main(["retrain", "output", "erm", "sketch", "1"]) == 2


def test_failed_trials_are_told_beside_the_ones_that_were_picked():
    overrides = ("methods=[erm]", "search={trials: 2, space: {lr: {choice: [1.0e+30]}}}", "training.optimizer=sgd")
    assert run(recipe(*overrides)).failed
    found = json.loads(Path("output/search/results.json").read_text())
    assert {(r["trial"], r["status"]) for r in found["runs"]} == {(0, "ok"), (1, "failed")}
    for row in found["summary"]:
        assert row["mean"] is not None and "4 of 4 drawn trials failed, the first: the lo" in row["flags"][-1]
    assert "drawn trials failed" in Path("output/search/results.md").read_text()


def record(trial, value, status="ok"):
    selected = {"train_val": Pick(step=1, weights="", metrics={}, value=value)} if status == "ok" else {}
    return Record(ModelKey("m", ("a",), 0, trial), {}, status, selected=selected)


def test_the_first_of_equals_is_picked_and_failures_only_where_nothing_else_is():
    trials = [record(0, 0, "failed"), record(1, 0.5), record(2, None), record(3, 0.7), record(4, 0.7)]
    assert [r.trial for r in picked_trials(trials, "train_val", "accuracy")] == [3]
    assert [r.trial for r in picked_trials(trials, "train_val", "nll")] == [1]
    assert [r.trial for r in picked_trials(trials[:1], "train_val", "accuracy")] == [0]
    assert selection_value(record(0, 0.5), "oracle") is None
    assert selection_value(record(0, 0.5), "train_val") == 0.5
