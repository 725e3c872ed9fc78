"""The model to use: chosen by what selection saw, trained on all images, under one seed or all, nothing measured."""

import json
import shutil
from functools import partial
from pathlib import Path

import miniature
import numpy as np
import pytest
import small_runs
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from xdm_ft.algorithms import Setup
from xdm_ft.cli.library import run
from xdm_ft.core import Criteria, ModelKey, Task
from xdm_ft.experiment.final_fit import combine, fit_of_runs, median, mode
from xdm_ft.experiment.plan import make_plan, read_data
from xdm_ft.experiment.prepare import build_encoders, prepare
from xdm_ft.experiment.work import start
from xdm_ft.protocol.splits import all_domains
from xdm_ft.results.model import Record
from xdm_ft.runtime.errors import UserError
from xdm_ft.training import Job
from xdm_ft.training.bank import train as bank_module
from xdm_ft.training.bank.data import BankValidation
from xdm_ft.training.bank.train import train_chunk
from xdm_ft.training.end_to_end import train as end_to_end_module
from xdm_ft.training.end_to_end.prediction import EndToEndValidation
from xdm_ft.training.selection import FINAL_FIT

RUN = Path("output/small")
ERM = "methods=[erm]"
ALL, FIRST = "protocol.final_fit=all_seeds", "protocol.final_fit=true"
recipe, results = partial(small_runs.recipe, FIRST), partial(small_runs.results, FIRST)
small_pacs = pytest.mark.usefixtures("small_pacs")


def metadata(file):
    with safe_open(RUN / file, framework="pt") as opened:
        return {key: json.loads(value) for key, value in opened.metadata().items() if key not in ("file", "xxh3")}


def picks_of(content, method):
    return [r["selected"]["train_val"] for r in content["runs"] if r["method"] == method]


def naive_head(made, item, step, seed=0):
    """The head after a step of the bank on all images of all domains, by hand."""
    dataset, accelerator = read_data(made), start(made)
    features = prepare(made, dataset, build_encoders(made)[1], accelerator).encoders[None].features
    plan, split = make_plan(made, dataset), all_domains(dataset)
    setup = Setup(
        Task(dataset.class_names, split.train_domains), width=features.width, steps=made.training.steps, seed=seed
    )
    known = {"r": {step: 1.0}}
    job = Job(
        ModelKey("x", (), seed, 0), split, setup, item.algorithm.build, None, made.training, external_values=known
    )
    [trained] = train_chunk([job], features, plan.annotations, Criteria(("r",), "accuracy"), record=lambda *_: None)
    return trained.selected["r"].state["head.weight"]


def preferred(content, means):
    """The method with the lowest test NLL of those within one standard error of the best at held-out domains."""
    best = max(means, key=means.get)

    def values(method, key):
        return np.array([pick["metrics"]["test"][key] for pick in picks_of(content, method)])

    within = []
    for method in means:
        differences = values(best, "accuracy") - values(method, "accuracy")
        if differences.mean() <= differences.std(ddof=1) / np.sqrt(len(differences)):
            within.append(method)
    return min(within, key=lambda method: values(method, "nll").mean())


@pytest.mark.slow
@small_pacs
def test_the_method_that_held_out_domains_prefer_on_every_image():
    content = results()
    final = content["final_fit"]
    means = {
        method: np.mean([pick["metrics"]["test"]["accuracy"] for pick in picks_of(content, method)])
        for method in ("erm", "xdomainmix")
    }
    assert final["chosen_by"]["values"] == pytest.approx(means)
    assert final["method"] == preferred(content, means)
    assert content["final_fits"] == {final["method"]: final}
    assert final["weights"] == f"models/final_fit/{final['method']}/model.safetensors"
    (row,) = (r for r in content["summary"] if (r["selection"], r["method"]) == ("train_val", final["method"]))
    assert final["estimate"]["mean"] == row["mean"] and final["estimate"]["of"] == "leave_one_domain_out"
    picks = picks_of(content, final["method"])
    assert final["step"] == sorted(pick["step"] for pick in picks)[1], "the median, the lower one of two"
    assert final["temperature"] == median(pick["temperature"] for pick in picks)
    assert metadata(final["weights"])["temperature"] == final["temperature"] and "temperature" in final["how"]
    made = recipe()
    dataset = read_data(made)
    assert final["images"] == dict(zip(dataset.domain_names, np.bincount(dataset.domains).tolist(), strict=True))
    assert "metrics" not in final and f"all {len(dataset)} labelled images of 4 domains" in final["how"]
    [item] = [item for item in made.methods if item.label == final["method"]]
    expected = naive_head(made, item, final["step"])
    torch.testing.assert_close(load_file(RUN / final["weights"])["head.weight"], expected)

    assert results()["final_fit"] == final

    # the temperature of each model is that of the weights of the recipe's rule
    selected = [record["selected"] for record in content["runs"]]
    for by_rule in selected:
        pick = by_rule["train_val"]
        assert metadata(pick["weights"])["temperature"] == pick["temperature"] > 0
        for other in by_rule.values():
            assert ("temperature" in other) == (other["weights"] == pick["weights"])
    others = [by_rule["oracle"] for by_rule in selected if "temperature" not in by_rule["oracle"]]
    assert others, "the miniature must pick other steps"
    assert metadata(others[0]["weights"])["temperature"] is None


@small_pacs
def test_all_domains_holds_every_labelled_image_once_and_nothing_to_validate():
    dataset = read_data(recipe())
    dataset.splits = np.array(["train", "val", "test", "train_val", "val_domain"] * len(dataset))[: len(dataset)]
    dataset.splits[7] = ""  # in no part of the official split, and labelled all the same
    whole = all_domains(dataset, unreadable=[3])
    assert whole.evaluation == {} and whole.test_domains == () and whole.train_domains == dataset.domain_names
    expected = torch.tensor([row for row in range(len(dataset)) if row != 3])
    assert torch.equal(torch.cat(whole.train).sort().values, expected)
    for number, rows in enumerate(whole.train):
        assert set(dataset.domains[rows]) == {number}


@small_pacs
def test_an_official_split_trains_on_its_validation_and_test_domains_too():
    """`a` trains, `b` validates, `c` tests: without validation images of training domains there is no temperature."""
    parts = {"photo": "a,train", "sketch": "b,val", "cartoon": "c,test"}
    lines = ["path,label,domain,split"]
    for image in sorted(Path("data").rglob("*.png")):
        if image.parts[-3] in parts:
            lines.append(f"{image},{image.parts[-2]},{parts[image.parts[-3]]}")
    Path("table.csv").write_text("\n".join(lines) + "\n")
    official = "protocol={name: official, selection: val_domain, final_fit: true}"
    overrides = "data={name: table, file: table.csv}", official, ERM
    content = results(*overrides)
    final, pick = content["final_fit"], content["runs"][0]["selected"]["val_domain"]
    assert final["domains"] == ["a", "b", "c"] and final["estimate"]["of"] == "official"
    assert "including the official split's validation and test images" in final["how"]
    assert sum(final["images"].values()) == len(lines) - 1
    assert "temperature" not in pick and "temperature" not in final
    assert metadata(pick["weights"])["temperature"] is metadata(final["weights"])["temperature"] is None

    # a domain that tells the class trains too, and the protocol line says so
    dogs = [line for line in lines if not line.endswith(",c,test") or ",dog," in line]
    Path("table.csv").write_text("\n".join(dogs) + "\n")
    made = recipe(*overrides)
    assert "images of one class only in c" in make_plan(made, read_data(made)).notes


@small_pacs
def test_patience_and_steps_that_differ_end_no_fit_early():
    """Runs that stopped at different steps: the fit goes to their median and is evaluated there."""
    overrides = ERM, "training.patience=1", "training.evaluate_every=1", "training.steps=30"
    final = results(*overrides)["final_fit"]
    assert final["status"] == "ok" and "patience" not in final["hparams"]
    made = recipe(ERM, "training.steps=30", "training.evaluate_every=1")
    expected = naive_head(made, made.methods[0], final["step"])
    torch.testing.assert_close(load_file(RUN / final["weights"])["head.weight"], expected)


@pytest.mark.slow
@small_pacs
def test_averages_of_a_fit():
    """SWAD's interval is the median one, and no loss is read; BMA averages the whole fit."""
    swad = "{name: erm+swad, swad.n_converge: 2, swad.n_tolerance: 1, swad.tolerance_ratio: 0.0}"
    content = results(f"methods=[{swad}]", "protocol.test_domains=[photo, sketch]")
    final, picks = content["final_fit"], picks_of(content, "erm+swad")
    assert final["averaged_from"] == median(pick["averaged_from"] for pick in picks)
    assert final["step"] == median(pick["step"] for pick in picks)
    made = recipe(ERM, "training.evaluate_every=1")
    heads = [naive_head(made, made.methods[0], step) for step in range(final["averaged_from"], final["step"] + 1)]
    weights = load_file(RUN / final["weights"])
    torch.testing.assert_close(weights["head.weight"], torch.stack(heads).mean(0), rtol=1e-5, atol=1e-6)

    content = results("methods=[{name: erm+bma, bma.beta: 2}]", "name=bma", "protocol.test_domains=[photo]")
    final = content["final_fit"]
    assert final["status"] == "ok" and (final["averaged_from"], final["step"]) == (0, 10)
    assert "weights averaged over all 10 steps by +bma" in final["how"]
    assert {pick["averaged_from"] for pick in picks_of(content, "erm+bma")} == {0}


@pytest.mark.slow
@small_pacs
def test_a_solver_has_the_median_strength_and_one_model_under_every_seed():
    overrides = "methods=[linear_probe]", "protocol.seeds=2", "protocol.test_domains=[photo]", ALL
    content = results(*overrides)
    final, picks = content["final_fit"], picks_of(content, "linear_probe")
    assert final["step"] == median(pick["step"] for pick in picks)
    assert final["strength"] in {pick["strength"] for pick in picks} and final["temperature"] > 0
    assert load_file(RUN / final["weights"]).keys() == {"head.weight", "head.bias"}
    file = "models/final_fit/linear_probe/model.safetensors"
    assert final["seeds"] == {"0": file} and [*(RUN / "models/final_fit").rglob("*.safetensors")] == [RUN / file]
    assert results(*overrides)["final_fit"] == final


@pytest.mark.slow
@small_pacs
@pytest.mark.parametrize(
    ("method", "trainable"),
    [
        ("{name: erm+swad, swad.n_converge: 1}", False),
        pytest.param("{name: erm+swad, swad.n_converge: 1}", True, marks=pytest.mark.soak),
        ("erm", True),
    ],
)
def test_nothing_is_measured_while_it_trains(method, trainable, monkeypatch):
    """Neither a metric nor a loss: the validation of the fit has no images."""
    measured = []

    class WatchedBank(BankValidation):
        def __init__(self, jobs, *arguments):
            super().__init__(jobs, *arguments)
            measured.append((jobs[0].test_domains, len(self.rows)))

    class WatchedModel(EndToEndValidation):
        def __init__(self, job, *arguments, **more):
            super().__init__(job, *arguments, **more)
            measured.append((job.test_domains, len(self.images)))

    monkeypatch.setattr(bank_module, "BankValidation", WatchedBank)
    monkeypatch.setattr(end_to_end_module, "EndToEndValidation", WatchedModel)
    how = ("encoder.trainable=true", "training={steps: 2, batch_size: 2}", "protocol.seeds=2", ALL) if trainable else ()
    final = results(f"methods=[{method}]", "protocol.test_domains=[photo]", *how)["final_fit"]
    assert final["status"] == "ok" and ("averaged_from" in final) == ("swad" in method)
    assert measured[-1] == ((), 0) and measured[0][0] == ("photo",) and measured[0][1] > 0
    files = final.get("seeds", {"0": final["weights"]}).values()
    assert len(files) == 1 + trainable
    for file in files:
        assert any(name.startswith("encoder.") for name in load_file(RUN / file)) == trainable


@small_pacs
def test_where_no_method_can_be_chosen_nothing_is_fitted():
    made = recipe(ERM, "training.lr=1.0e+38", "training.steps=60")  # every loss overflows
    assert run(made).failed
    assert "final_fit" not in json.loads((RUN / "results.json").read_text())
    with pytest.raises(UserError, match=r"protocol\.final_fit: needs an unbiased estimate"):
        recipe("protocol.selection=oracle")


SEARCH = (
    "search={trials: 3, space: {lr: {log_uniform: [0.01, 1]}, batch_size: {uniform: [2, 9]}, "
    "sam.rho: {choice: [0.05, 0.1]}, patience: {choice: [2, 3]}, xdomainmix.discard_per: {choice: [sample, batch]}}}"
)


@small_pacs
def test_each_searched_key_is_combined_by_itself():
    made = recipe(SEARCH, "methods=[xdomainmix+sam, {name: sam, sam.rho: 0.2}, linear_probe]")
    mixed, sam, probe = made.methods
    picks = [
        {"lr": 0.3, "batch_size": 9, "sam.rho": 0.1, "discard_per": "batch", "p_discard": 0.2},
        {"lr": 0.1, "batch_size": 2, "sam.rho": 0.05, "discard_per": "sample", "p_discard": 0.2},
        {"lr": 0.2, "batch_size": 4, "sam.rho": 0.1, "discard_per": "sample", "patience": 3, "p_discard": 0.2},
    ]
    common = {"lr": 0.2, "batch_size": 4}
    assert combine(made, mixed, picks) == common | {"sam.rho": 0.1, "xdomainmix.discard_per": "sample"}
    assert combine(made, sam, picks) == common, "a setting of the item's own is not searched"
    assert combine(made, probe, [{"strengths": [1.0]}]) == {}


@pytest.mark.slow
@small_pacs
def test_trials_that_differ_between_runs_are_combined_and_named():
    overrides = SEARCH, "methods=[xdomainmix+sam]", "protocol.seeds=2"
    content, made = results(*overrides), recipe(*overrides)
    final, picked = content["final_fit"], []
    for held_out in ("art_painting", "cartoon", "photo", "sketch"):
        for seed in (0, 1):
            trials = [r for r in content["runs"] if (r["test_domains"], r["seed"]) == ([held_out], seed)]
            picked.append(max(trials, key=lambda r: r["selected"]["train_val"]["value"]))
    for key in ("lr", "batch_size"):
        assert final["hparams"][key] == sorted(r["hparams"][key] for r in picked)[3]
    assert final["hparams"]["sam.rho"] == mode(r["hparams"]["sam.rho"] for r in sorted(picked, key=lambda r: r["seed"]))
    assert len({r["trial"] for r in picked}) > 1, "the miniature must pick different trials"
    assert "lr, batch_size: the median over the trials picked" in final["how"]
    plan, picked = make_plan(made, read_data(made)), [Record.from_json(record) for record in picked]
    fit = fit_of_runs(plan, picked)
    assert fit.model.training.lr == final["hparams"]["lr"] and fit.model.training.patience is None
    assert "lr" not in fit_of_runs(plan, picked[:1]).how, "one run: nothing to combine"


# a fit of every seed

SEEDS = "protocol.seeds=[4, 0, 1]", ERM, "protocol.test_domains=[photo]", "training.steps=6"
FILES = {
    "4": "models/final_fit/erm/model.safetensors",
    "0": "models/final_fit/erm/seed0.safetensors",
    "1": "models/final_fit/erm/seed1.safetensors",
}
seeds_recipe, seeds_results = partial(small_runs.recipe, *SEEDS), partial(small_runs.results, *SEEDS)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run with a fit of the first seed, and of the same run grown to a fit of every seed."""
    folder = tmp_path_factory.mktemp("finished")
    miniature.domainbed(folder / "data", "pacs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        seeds_results(FIRST)
        shutil.copytree("output", "alone")
        seeds_results(ALL)
    return folder


@pytest.fixture
def final(finished, in_folder):
    """Copies the folder here. Returns the final fit of all seeds."""
    shutil.copytree(finished, ".", dirs_exist_ok=True)
    return json.loads((RUN / "results.json").read_text())["final_fit"]


def written():
    """The time at which the file of each seed was written."""
    return {seed: (RUN / file).stat().st_mtime_ns for seed, file in FILES.items() if (RUN / file).exists()}


def changed(before):
    return [seed for seed, time in written().items() if before.get(seed) != time]


@pytest.mark.slow
def test_one_model_for_each_seed_of_the_recipe_is_added_to_a_fit_of_one(final):
    alone = json.loads(Path("alone/small/results.json").read_text())["final_fit"]
    files = final.pop("files")
    assert alone.pop("files").items() <= files.items() and {*FILES.values()} <= files.keys()
    assert final.pop("seeds") == FILES and final == alone and "seeds" not in alone
    assert (RUN / FILES["4"]).read_bytes() == (Path("alone/small") / FILES["4"]).read_bytes()
    weights = {seed: load_file(RUN / file)["head.weight"] for seed, file in FILES.items()}
    assert not torch.allclose(weights["0"], weights["1"])
    made = seeds_recipe(ALL)
    for seed, file in FILES.items():
        torch.testing.assert_close(weights[seed], naive_head(made, made.methods[0], final["step"], int(seed)))
        described = metadata(file)
        assert described["method"]["seed"] == int(seed)
        assert described["method"]["hparams"].items() >= final["hparams"].items()
        assert (described["step"], described["temperature"]) == (final["step"], final["temperature"])


@pytest.mark.slow
@small_pacs
def test_a_seed_that_fails_fails_the_fit_and_keeps_the_others(monkeypatch):
    from xdm_ft.experiment import pieces

    def failing(*arguments, **settings):
        """The training of a chunk, after which the model of seed 0 has weights that are not finite."""
        trained = list(bank_module.train_chunk(*arguments, **settings))
        for model in trained:
            if model.job.seed == 0 and FINAL_FIT in model.selected:
                model.selected[FINAL_FIT].state["head.weight"].fill_(float("nan"))
        return trained

    with monkeypatch.context() as patch:
        patch.setattr(pieces, "train_chunk", failing)
        made = run(seeds_recipe(ALL))
    final = made.final_fit
    assert made.failed and final["status"] == "failed"
    assert final["reason"] == f"seed 0: the weights are not finite after step {final['step']}"
    assert final["weights"] == FILES["4"] and final["seeds"] == {"4": FILES["4"], "1": FILES["1"]}
    before = written()
    assert seeds_results(ALL)["final_fit"]["seeds"] == FILES and changed(before) == ["0"], "only that one again"
