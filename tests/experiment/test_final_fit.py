"""The model that is shipped: chosen by what selection saw, trained on all images, nothing chosen in the fit."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import small_runs
import torch
from safetensors.torch import load_file

from xdm_ft.algorithms import Setup
from xdm_ft.averaging import Interval, Segment
from xdm_ft.evaluation.records import ModelKey, Record
from xdm_ft.experiment import run
from xdm_ft.experiment.final_fit import combined, fit_of_runs, median, mode
from xdm_ft.experiment.machine import start
from xdm_ft.experiment.plan import make_plan, read_data
from xdm_ft.experiment.prepare import build_encoders, prepare
from xdm_ft.protocol.splits import all_domains
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.tensors import Criteria, Task
from xdm_ft.training import Job
from xdm_ft.training.bank.train import train_chunk

pytestmark = pytest.mark.usefixtures("small_pacs")
SHIPS = "name=final", "protocol.final_fit=true"
recipe, results = partial(small_runs.recipe, *SHIPS), partial(small_runs.results, *SHIPS)


def weights_of(found):
    return load_file(f"output/final/{found['final_fit']['weights']}")


def naive_training(made, item, known, rules=("r",), steps=10):
    """The bank on all images of all domains, by hand."""
    dataset, accelerator = read_data(made), start(made)
    prepared = prepare(made, dataset, build_encoders(made), accelerator)
    plan, split = make_plan(made, dataset), all_domains(dataset)
    setup = Setup(
        Task(dataset.class_names, split.train_domains),
        width=prepared.encoders[None].features.width,
        steps=steps,
        seed=0,
    )
    job = Job(ModelKey("x", (), 0, 0), split, setup, item.algorithm.build, None, made.training, external_values=known)
    arguments = (plan.annotations, Criteria(rules, "accuracy"))
    [trained] = train_chunk([job], prepared.encoders[None].features, *arguments, record=lambda *_: None)
    return trained


def preferred(runs, means):
    """The method with the lowest validation NLL of those within one standard error of the best, by numpy."""
    best = max(means, key=lambda method: means[method])

    def of(method, key):
        return np.array([run["selected"]["train_val"][key] for run in runs if run["method"] == method])

    differences = {method: of(best, "value") - of(method, "value") for method in means}
    error = {method: values.std(ddof=1) / np.sqrt(len(values)) for method, values in differences.items()}
    within = [method for method in means if differences[method].mean() <= error[method]]
    return min(within, key=lambda method: of(method, "validation_nll").mean())


@pytest.mark.slow
def test_the_method_that_validation_prefers_on_every_image():
    found = results()
    final, runs = found["final_fit"], found["runs"]
    means = {
        method: np.mean([run["selected"]["train_val"]["value"] for run in runs if run["method"] == method])
        for method in ("erm", "xdomainmix")
    }
    assert final["chosen_by"]["values"] == pytest.approx(means)
    assert final["method"] == preferred(runs, means)
    assert found["final_fits"] == {final["method"]: final}
    folder = final["method"]
    assert final["weights"] == f"models/final_fit/{folder}/model.safetensors"
    (row,) = (r for r in found["summary"] if (r["selection"], r["method"]) == ("train_val", final["method"]))
    assert final["estimate"]["mean"] == row["mean"] and final["estimate"]["of"] == "leave_one_domain_out"
    picked = sorted(run["selected"]["train_val"]["step"] for run in runs if run["method"] == final["method"])
    assert final["step"] == picked[1], "the median, the lower one of two"
    dataset = read_data(recipe())
    assert final["images"] == dict(zip(dataset.domain_names, np.bincount(dataset.domains).tolist(), strict=True))
    assert "metrics" not in final and f"all {len(dataset)} labelled images of 4 domains" in final["how"]

    made = recipe()
    item = next(item for item in made.methods if item.label == final["method"])
    trained = naive_training(made, item, known={"r": {final["step"]: 1.0}})
    torch.testing.assert_close(weights_of(found)["head.weight"], trained.selected["r"].state["head.weight"])

    assert results()["final_fit"] == final


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


def official(path, names=("a", "b", "c")):
    """The miniature as a table with an official split: `a` trains, `b` validates, `c` tests."""
    part = dict(zip(names, ("train", "val", "test"), strict=True))
    lines = ["path,label,domain,split"]
    for image in sorted(Path("data").rglob("*.png")):
        domain = dict(zip(("photo", "sketch", "cartoon"), names, strict=True)).get(image.parts[-3])
        if domain is not None:
            lines.append(f"{image},{image.parts[-2]},{domain},{part[domain]}")
    path.write_text("\n".join(lines) + "\n")


OFFICIAL = (
    "data={name: table, file: table.csv}",
    "protocol={name: official, selection: val_domain, seeds: 3, final_fit: true}",
)


def test_an_official_split_trains_on_its_validation_and_test_domains_too(tmp_path):
    official(tmp_path / "table.csv")
    final = results(*OFFICIAL, "methods=[erm]")["final_fit"]
    assert final["domains"] == ["a", "b", "c"] and final["estimate"]["of"] == "official"
    assert "including the official split's validation and test images" in final["how"]
    assert sum(final["images"].values()) == len((tmp_path / "table.csv").read_text().splitlines()) - 1


def test_a_domain_that_would_tell_the_class_is_refused_before_any_training(tmp_path):
    official(tmp_path / "table.csv")
    lines = (tmp_path / "table.csv").read_text().splitlines()
    tested = [line for line in lines if line.endswith(",c,test")]
    one_class = [line for line in tested if line.split(",")[1] == tested[0].split(",")[1]]
    (tmp_path / "table.csv").write_text("\n".join([*(line for line in lines if line not in tested), *one_class]) + "\n")
    made = recipe(*OFFICIAL, "methods=[erm]")
    with pytest.raises(UserError, match=r'domain "c" has images of one class only .*protocol\.final_fit'):
        make_plan(made, read_data(made))


def test_patience_and_steps_that_differ_end_no_fit_early():
    """Runs that stopped at different steps: the fit goes to their median and is evaluated there."""
    found = results("methods=[erm]", "training.patience=1", "training.evaluate_every=1", "training.steps=30")
    final = found["final_fit"]
    assert final["status"] == "ok" and "patience" not in final["hparams"]
    made = recipe("methods=[erm]")
    trained = naive_training(made, made.methods[0], steps=30, known={"r": {final["step"]: 1.0}})
    if final["step"] % 2 == 0 or final["step"] == 30:
        torch.testing.assert_close(weights_of(found)["head.weight"], trained.selected["r"].state["head.weight"])


@pytest.mark.slow
def test_swads_interval_is_the_median_one_and_no_loss_is_read():
    found = results("methods=[{name: erm+swad, swad.n_converge: 2, swad.n_tolerance: 1, swad.tolerance_ratio: 0.0}]")
    final = found["final_fit"]
    picked = [run["selected"]["train_val"] for run in found["runs"]]
    assert final["averaged_from"] == median(one["averaged_from"] for one in picked)
    assert final["step"] == median(one["step"] for one in picked)
    made = recipe("methods=[erm]", "training.evaluate_every=1")
    states = [
        naive_training(made, made.methods[0], known={"r": {step: 1.0}}).selected["r"].state["head.weight"]
        for step in range(final["averaged_from"], final["step"] + 1)
    ]
    torch.testing.assert_close(weights_of(found)["head.weight"], torch.stack(states).mean(0), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_linear_probe_is_the_median_strength():
    found = results("methods=[linear_probe]")
    final = found["final_fit"]
    picked = [run["selected"]["train_val"] for run in found["runs"]]
    assert final["step"] == median(one["step"] for one in picked)
    assert final["strength"] in {one["strength"] for one in picked}
    assert weights_of(found).keys() == {"head.weight", "head.bias"}
    assert results("methods=[linear_probe]")["final_fit"] == final


@pytest.mark.slow
def test_nothing_is_measured_while_it_trains(monkeypatch):
    """Neither a metric nor a loss: the validation of the fit has no images."""
    from xdm_ft.training.bank import train as bank
    from xdm_ft.training.bank.data import BankValidation

    made = []

    class Watched(BankValidation):
        def __init__(self, jobs, *arguments):
            super().__init__(jobs, *arguments)
            made.append((jobs[0].test_domains, len(self.rows)))

    monkeypatch.setattr(bank, "BankValidation", Watched)
    results("methods=[{name: erm+swad, swad.n_converge: 1}]")
    assert [rows for held_out, rows in made if not held_out] == [0]
    assert all(rows for held_out, rows in made if held_out) and any(held_out for held_out, _ in made)


def test_where_no_method_can_be_chosen_nothing_is_fitted(caplog):
    # with one learning rate every loss overflows
    made = recipe("methods=[erm]", "training.lr=1.0e+38", "training.steps=60")
    assert run(made).failed
    assert "final_fit" not in json.loads(Path("output/final/results.json").read_text())


def test_medians_and_modes():
    assert [median([3, 1, 2]), median([4, 1, 2, 3]), median([0.5])] == [2, 2, 0.5]
    assert [mode(["b", "a", "a", "b"]), mode([None, None, 3])] == ["b", None]


SEARCH = (
    "search={trials: 4, space: {lr: {log_uniform: [0.01, 1]}, batch_size: {uniform: [2, 9]}, "
    "sam.rho: {choice: [0.05, 0.1]}, patience: {choice: [2, 3]}, xdomainmix.discard_per: {choice: [sample, batch]}}}"
)


def test_each_searched_key_on_its_own():
    made = recipe(SEARCH, "methods=[xdomainmix+sam, {name: sam, sam.rho: 0.2}, linear_probe]")
    mixed, sam, probe = made.methods
    picks = [
        {"lr": 0.3, "batch_size": 9, "sam.rho": 0.1, "discard_per": "batch", "p_discard": 0.2},
        {"lr": 0.1, "batch_size": 2, "sam.rho": 0.05, "discard_per": "sample", "p_discard": 0.2},
        {"lr": 0.2, "batch_size": 4, "sam.rho": 0.1, "discard_per": "sample", "patience": 3, "p_discard": 0.2},
    ]
    assert combined(made, mixed, picks) == {
        "lr": 0.2,
        "batch_size": 4,
        "sam.rho": 0.1,
        "xdomainmix.discard_per": "sample",
    }
    assert combined(made, sam, picks) == {"lr": 0.2, "batch_size": 4}, "a setting of the item's own is not searched"
    assert combined(made, probe, [{"strengths": [1.0]}]) == {}


@pytest.mark.slow
def test_trials_that_differ_between_runs_are_combined_and_said():
    made = recipe(SEARCH, "methods=[xdomainmix+sam]", "protocol.seeds=2")
    found = results(SEARCH, "methods=[xdomainmix+sam]", "protocol.seeds=2")
    plan, final = make_plan(made, read_data(made)), found["final_fit"]
    picked = []
    for held_out in ("art_painting", "cartoon", "photo", "sketch"):
        for seed in (0, 1):
            own = [r for r in found["runs"] if (r["test_domains"], r["seed"]) == ([held_out], seed)]
            picked.append(max(own, key=lambda r: r["selected"]["train_val"]["value"]))
    assert final["hparams"]["lr"] == sorted(r["hparams"]["lr"] for r in picked)[3]
    assert final["hparams"]["batch_size"] == sorted(r["hparams"]["batch_size"] for r in picked)[3]
    assert final["hparams"]["sam.rho"] == mode(r["hparams"]["sam.rho"] for r in sorted(picked, key=lambda r: r["seed"]))
    assert len({r["trial"] for r in picked}) > 1, "the miniature must pick different trials"
    assert "lr, batch_size: the median over the trials picked" in final["how"]
    picked = [Record.from_json(one) for one in picked]
    fit = fit_of_runs(plan, picked)
    assert fit.model.training.lr == final["hparams"]["lr"] and fit.model.training.patience is None
    assert "lr" not in fit_of_runs(plan, picked[:1]).how, "one run: nothing to combine"


def test_bma_averages_the_whole_fit_and_reads_no_loss():
    found = results("methods=[{name: erm+bma, bma.beta: 2}]")
    final = found["final_fit"]
    assert final["status"] == "ok" and (final["averaged_from"], final["step"]) == (0, 10)
    assert "weights averaged over all 10 steps by +bma" in final["how"]
    assert all(run["selected"]["train_val"]["averaged_from"] == 0 for run in found["runs"])


def test_an_interval_averages_exactly_its_steps():
    average, again = Interval(3, 6).begin(), Interval(3, 6).begin()
    for first, last in ((1, 2), (3, 4), (5, 6), (7, 8)):
        average.add(Segment(first, last, {"w": torch.tensor((first + last) / 2)}, last - first + 1), float("nan"))
        again.load_state(average.state())
    for one in (average, again):
        assert one.result().mean["w"] == 4.5 and one.result()[:2] == (3, 6)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["erm", "{name: erm+swad, swad.n_converge: 1}"])
def test_end_to_end_nothing_is_measured_either(method, monkeypatch):
    from xdm_ft.training.end_to_end import train as loop
    from xdm_ft.training.end_to_end.prediction import EndToEndValidation

    made = []

    class Watched(EndToEndValidation):
        def __init__(self, job, *arguments, **more):
            super().__init__(job, *arguments, **more)
            made.append((job.test_domains, list(self.images)))

    monkeypatch.setattr(loop, "EndToEndValidation", Watched)
    overrides = ("encoder.trainable=true", f"methods=[{method}]", "training.steps=4", "protocol.test_domains=[photo]")
    final = results(*overrides)["final_fit"]
    assert final["status"] == "ok" and ("averaged_from" in final) == ("swad" in method)
    assert made[-1] == ((), []) and made[0][1], "the runs were measured, the fit was not"


def test_no_model_is_shipped_on_an_estimate_of_oracle():
    with pytest.raises(UserError, match=r"protocol\.final_fit: needs an unbiased estimate"):
        recipe("protocol.selection=oracle")
