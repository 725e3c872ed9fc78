"""The measures of a run's models: their values, the images they are of, and an analysis that goes on."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import miniature
import numpy as np
import pytest
import torch
from analysed import analysis

from xdm_ft.analysis.invariance import Invariance
from xdm_ft.cli.parser import main
from xdm_ft.experiment import analyse
from xdm_ft.experiment.analyse import FROZEN, Encoded, Limits, TrainedModel, calibration, read_model, split_images
from xdm_ft.experiment.machine import launched
from xdm_ft.experiment.plan import make_plan, read_data
from xdm_ft.experiment.prepare import build_encoders, prepare
from xdm_ft.recipe.check import load
from xdm_ft.report.finished import read_run
from xdm_ft.storage.run_directory import RunDirectory

RECIPE = """\
name: small
data: {{name: {data}, root: {folder}/data{more}}}
protocol: {{{protocol}}}
encoder: {{name: timm, model: {model}, preprocessing: {{size: 32}}, kwargs: {kwargs}}}
features: {{dir: {folder}/cache, workers: 0}}
methods: {methods}
training: {{steps: 10, batch_size: 4, evaluate_every: 2, optimizer: sgd, lr: 0.05}}
report: {{page: false}}
output: {{dir: {folder}/out}}
analyse: true
"""
METHODS = """[erm, {name: xdomainmix, warmup_steps: 2}, {name: erm, head: mlp, label: mlp, mlp.hidden_width: 8},
  {name: erm, head: cosine, label: cosine}, mixup, linear_probe, {name: erm, normalize: true, label: unit}]"""
PROTOCOL = "test_domains: [sketch], seeds: 2, val_fraction: 0.4"
MODELS = 7 * 2


def write(folder: Path, methods: str = METHODS, protocol: str = PROTOCOL, data: str = "pacs", **more: str) -> Path:
    values = {"model": "test_vit", "kwargs": "{img_size: 32}", "more": ", counts: any"} | more
    path = folder / "small.yaml"
    path.write_text(RECIPE.format(folder=folder, methods=methods, protocol=protocol, data=data, **values))
    return path


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """The learned maps of embeddings take a few steps: their quality is tested where they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("xdm_ft.analysis.embedding.STEPS", 5)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was analysed at its end."""
    folder = tmp_path_factory.mktemp("analysed")
    miniature.domainbed(folder / "data", "pacs", per_class=8)
    assert main(["run", str(write(folder))]) == 0
    return folder


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[tuple, TrainedModel]:
    """Its models."""
    recipe, run = load(str(folder / "small.yaml")), read_run(folder / "out/small")
    with launched(recipe) as accelerator:
        dataset = read_data(recipe)
        plan = make_plan(recipe, dataset)
        prepared = prepare(recipe, dataset, build_encoders(recipe), accelerator)
        planned = {model.key: model for model in plan.models}
        directory = RunDirectory(run.path)
        return {
            record.key: (
                read_model(plan, prepared, planned[record.key], record, directory, accelerator),
                split_images(plan, planned[record.key], FROZEN),
            )
            for record in run.picked
        }


def rows(images, part):
    one = getattr(images, part)
    return one.rows, one.y.numpy(), images.domain_of[one.domain].numpy() if part != "test" else one.domain.numpy()


@pytest.mark.slow
def test_every_picked_model_is_measured_and_the_state_is_gone(folder):
    found, run = analysis(folder / "out/small"), read_run(folder / "out/small")
    keys = [(m["method"], tuple(m["test_domains"]), m["seed"], m["trial"]) for m in found["models"]]
    assert keys == [record.key for record in run.picked] and len(keys) == MODELS
    assert not (folder / "out/small/state").exists() and run.analysis == found
    assert found["images"]["sketch"] == {
        "training": 105, "used": 105, "validation": 63, "validation_used": 63, "test": 56, "test_used": 56,
    }  # fmt: skip
    for model in found["models"]:
        assert (model["importance"] is not None) == (model["embedding"] is not None) == (model["seed"] == 0)
        own = model["method"] == "xdomainmix"
        assert model["domain_head"] == (None if model["seed"] else "own" if own else "fitted")
        assert (model["divergence"] is not None) == (own or model["method"] == "mixup")
        pairs = {"class_specific_vs_generic", "domain_specific_vs_generic"}
        if model["divergence"]:
            pairs.add("original_vs_augmented")
            levels = [0.9, 0.8, 0.7, 0.6, 0.5] if own else [None]
            assert [level["quantile"] for level in model["divergence"]] == levels
            assert {level["n"] for level in model["divergence"]} == {len_half(found, model)}
        assert model["embedding"] is None or set(model["embedding"]["pairs"]) == pairs


def len_half(found, model):
    return found["images"][model["test_domains"][0]]["training"] // 2


@pytest.mark.slow
@pytest.mark.parametrize("method", ["erm", "xdomainmix", "mlp", "cosine", "linear_probe", "unit"])
def test_values_are_those_of_a_naive_loop(method, folder, models):
    results = json.loads((folder / "out/small/results.json").read_text())
    for seed in (0, 1):
        model, images = models[method, ("sketch",), seed, 0]
        [entry] = [
            one
            for one in analysis(folder / "out/small")["models"]
            if (one["method"], one["test_domains"], one["seed"]) == (method, ["sketch"], seed)
        ]
        index, y, domain = rows(images, "validation")
        z = model.features(index)
        assert torch.allclose(z.norm(dim=1), torch.ones(len(z))) == (method == "unit")
        logits = model.logits(z).double().numpy()
        z = z.double().numpy()

        paper, code = [], []
        for c in range(7):
            covariances = [np.cov(z[(y == c) & (domain == d)].T) for d in range(3)]
            means = [z[(y == c) & (domain == d)].mean(0) for d in range(3)]
            pairs = [(a, b) for a in range(3) for b in range(3)]
            paper.append(sum(((covariances[a] - covariances[b]) ** 2).sum() for a, b in pairs))
            unordered = [(a, b) for a, b in pairs if a < b]
            code.append(
                np.mean(
                    [
                        ((means[a] - means[b]) ** 2).mean() + ((covariances[a] - covariances[b]) ** 2).mean()
                        for a, b in unordered
                    ]
                )
            )
        invariance = entry["representation_invariance"]
        assert invariance["paper"] == pytest.approx(sum(paper) / (7 * 3), rel=1e-4)
        assert invariance["published_code"] == pytest.approx(np.mean(code), rel=1e-4)
        assert (invariance["classes"], invariance["domains"]) == (7, 3)

        losses = [np.log(np.exp(row).sum()) - row[label] for row, label in zip(logits, y, strict=True)]
        risks = [np.mean([loss for loss, d in zip(losses, domain, strict=True) if d == number]) for number in range(3)]
        prediction = entry["prediction_invariance"]
        assert list(prediction["risk"].values()) == pytest.approx(risks, rel=1e-4)
        assert prediction["risk_variance"] == pytest.approx(np.var(risks, ddof=1), rel=1e-3)

        [record] = [
            run
            for run in results["runs"]
            if (run["method"], run["test_domains"], run["seed"]) == (method, ["sketch"], seed)
        ]
        pick = record["selected"]["train_val"]
        tested = entry["calibration"]["domains"]["sketch"]
        temperature = pick.get("temperature")
        expected = None if temperature is None else pytest.approx(temperature, rel=1e-5)
        assert entry["calibration"]["temperature"] == expected
        assert (tested["role"], tested["n"]) == ("test", 56)
        for name in ("ece", "nll"):  # what the run has measured on the same images
            assert tested[name] == pytest.approx(pick["metrics"]["test"][name], rel=1e-4, abs=1e-6)
        probability = np.exp(logits / (temperature or 1))
        probability /= probability.sum(1, keepdims=True)
        for number, name in enumerate(("art_painting", "cartoon", "photo")):
            of_domain = entry["calibration"]["domains"][name]
            own = probability[domain == number]
            confidence, right = own.max(1), own.argmax(1) == y[domain == number]
            gap, counts = 0.0, []
            for k in range(15):
                inside = (confidence > k / 15) & (confidence <= (k + 1) / 15)
                counts.append(int(inside.sum()))
                gap += abs(right[inside].sum() - confidence[inside].sum()) / len(own)
            assert of_domain["role"] == "validation" and of_domain["n"] == len(own)
            after = "" if temperature is None else "_scaled"
            assert of_domain[f"ece{after}"] == pytest.approx(gap, rel=1e-4)
            assert [one["n"] for one in of_domain[f"reliability{after}"]] == counts
            assert of_domain["nll"] == pytest.approx(risks[number], rel=1e-4)
        if seed == 0:
            accuracy = {order: curve[0] for order, curve in entry["importance"]["class"].items()}
            expected = pytest.approx(np.mean(logits.argmax(1) == y), abs=1e-6)
            assert accuracy == {"score": expected, "gradient_norm": expected, "random": expected}


@pytest.mark.slow
def test_a_second_analysis_measures_nothing_and_a_grown_run_the_new_models_only(folder, tmp_path, monkeypatch, capsys):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    before, measured = (tmp_path / "out/small/analysis.json").read_bytes(), []
    write(tmp_path, f"{METHODS[:-1]}, rsc]")
    inner = analyse.entry

    def counted(model, *rest):
        measured.append(model.record.method)
        return inner(model, *rest)

    monkeypatch.setattr(analyse, "entry", counted)
    monkeypatch.setattr(analyse, "own_cores", lambda: 1)
    assert main(["analyse", str(tmp_path / "out/small")]) == 0
    assert not measured and (tmp_path / "out/small/analysis.json").read_bytes() == before
    recipe = (tmp_path / "small.yaml").read_text().replace(str(tmp_path / "data"), str(folder / "data"))
    (tmp_path / "small.yaml").write_text(recipe)
    assert main(["run", str(tmp_path / "small.yaml")]) == 0
    assert measured == ["rsc"] * 2
    grown = analysis(tmp_path / "out/small")["models"]
    assert [one for one in grown if one["method"] != "rsc"] == json.loads(before)["models"]


@pytest.mark.slow
def test_an_interrupted_analysis_goes_on_and_ends_the_same(folder, tmp_path, monkeypatch, capsys):
    shutil.copytree(folder / "out/small", tmp_path / "small")
    run, measured, inner = tmp_path / "small", [], analyse.entry
    expected = (run / "analysis.json").read_bytes()
    (run / "analysis.json").write_bytes(expected.replace(b'"seed": 0', b'"seed": 7', 1))

    def interrupted(model, *rest):
        measured.append(model.record.key)
        if len(measured) == MODELS // 2:
            raise MemoryError("in the middle")
        return inner(model, *rest)

    monkeypatch.setattr(analyse, "entry", interrupted)
    monkeypatch.setattr(analyse, "own_cores", lambda: 1)
    assert main(["analyse", str(run)]) == 1
    assert "analysis.json: is damaged (its checksum differs); it is written again" in capsys.readouterr().err
    assert (run / "state/analysis").is_dir()
    assert main(["analyse", str(run)]) == 0
    assert len(measured) == MODELS + 1 and len(set(measured)) == MODELS
    assert (run / "analysis.json").read_bytes() == expected and not (run / "state").exists()


@pytest.mark.slow
def test_the_analysis_does_not_depend_on_the_number_of_processes(folder, tmp_path, monkeypatch):
    shutil.copytree(folder / "out/small", tmp_path / "small")
    (tmp_path / "small/analysis.json").unlink()
    monkeypatch.setattr(analyse, "own_cores", lambda: 3)
    assert main(["analyse", str(tmp_path / "small")]) == 0
    assert (tmp_path / "small/analysis.json").read_bytes() == (folder / "out/small/analysis.json").read_bytes()


class Stub:
    """What `calibration` reads of images seen."""

    def __init__(self, held, test, own_validation=True):
        self.validation, self.test = held, test
        self.images = type("Images", (), {"own_validation": own_validation, "train_domains": ("a", "b")})


def encoded(n, classes, domain):
    y = torch.arange(n) % classes
    z = torch.nn.functional.one_hot(y, 3).float() + torch.arange(n)[:, None] % 2
    return Encoded(z, y, torch.full((n,), domain), torch.arange(n))


def test_calibration_without_validation_images_of_one_class_and_of_a_domain_that_also_trains():
    model = type("Model", (), {"logits": staticmethod(lambda z: z * torch.tensor([1.0, 2.0, -1.0]))})
    names = ("a", "b", "c")
    found = calibration(model, Stub(encoded(0, 2, 0), encoded(6, 1, 2)), names, None)
    assert found["temperature"] is None and list(found["domains"]) == ["c"]
    assert found["domains"]["c"]["reliability_scaled"] is found["domains"]["c"]["ece_scaled"] is None
    found = calibration(model, Stub(encoded(12, 3, 0), encoded(6, 1, 0)), names, 2.0)
    assert {name: one["role"] for name, one in found["domains"].items()} == {
        "a (validation)": "validation",
        "a": "test",
    }
    assert found["temperature"] == 2.0
    trained_on = calibration(model, Stub(encoded(12, 3, 0), encoded(6, 1, 2), own_validation=False), names, None)
    assert list(trained_on["domains"]) == ["c"] and trained_on["temperature"] is None


@pytest.mark.slow
def test_a_sample_has_as_many_images_of_every_domain_and_depends_on_their_number_alone(folder, models):
    recipe = load(str(folder / "small.yaml"))
    plan = make_plan(recipe, read_data(recipe))
    limits = Limits(training=30, validation=12, test=9, augmented=10)
    found = split_images(plan, plan.models[0], limits)
    assert found.training.domain.bincount().tolist()[:3] == [10, 10, 10] and len(found.test.rows) == 9
    assert found.counts()["training"] == 105 and found.counts()["used"] == 30
    again = split_images(plan, dataclasses.replace(plan.models[0]), limits)
    assert torch.equal(again.training.rows, found.training.rows)
    assert not set(found.training.rows.tolist()) & set(found.validation.rows.tolist())


@pytest.mark.slow
def test_one_training_domain_gives_nulls(tmp_path):
    for domain in ("art_painting", "cartoon"):
        for c, name in enumerate(("dog", "horse")):
            for i in range(8 if (domain, name) != ("cartoon", "horse") else 1):  # almost a missing class
                miniature.save(tmp_path / f"data/{domain}/{name}/{i}.png", c, len(domain), i)
    path = write(tmp_path, "[erm, linear_probe]", "seeds: 1, val_fraction: 0.4", "folder", more="")
    assert main(["run", str(path)]) == 0
    found = analysis(tmp_path / "out/small")
    assert len(found["models"]) == 4
    for model in found["models"]:
        assert model["representation_invariance"] == Invariance(None, None, 0, 0, None, None)._asdict()
        assert model["prediction_invariance"]["risk_variance"] is None
        assert len(model["prediction_invariance"]["risk"]) == 1
        assert model["domain_head"] is None
        if model["importance"] is not None:
            assert model["importance"]["domain"] is model["importance"]["area"]["domain"] is None


@pytest.mark.slow
def test_the_official_split_with_a_validation_domain(tmp_path):
    miniature.camelyon17(tmp_path / "data", per_slide=4)
    protocol = "name: official, selection: val_domain, seeds: 1"
    path = write(tmp_path, "[erm, {name: xdomainmix, warmup_steps: 2}]", protocol, "camelyon17", more="")
    assert main(["run", str(path)]) == 0
    found = analysis(tmp_path / "out/small")
    assert found["selection"] == "val_domain" and len(found["models"]) == 2
    roles = {one["role"] for model in found["models"] for one in model["calibration"]["domains"].values()}
    assert roles == {"validation", "test"}


@pytest.mark.slow
def test_models_that_train_their_encoder(tmp_path):
    miniature.domainbed(tmp_path / "data", "pacs", per_class=8)
    methods = "[erm, {name: xdomainmix, warmup_steps: 2}, mixstyle, dsu, lisa, linear_probe]"
    protocol = "test_domains: [sketch], seeds: 1, val_fraction: 0.4"
    path = write(tmp_path, methods, protocol, model="test_resnet", kwargs="{}, trainable: true")
    assert main(["run", str(path), "training.steps=4"]) == 0
    found = {model["method"]: model for model in analysis(tmp_path / "out/small")["models"]}
    augmenting = {name for name, model in found.items() if model["divergence"]}
    assert augmenting == {"xdomainmix", "mixstyle", "dsu", "lisa"} and len(found) == 6
    assert len({model["representation_invariance"]["paper"] for model in found.values()}) == 6
    results = json.loads((tmp_path / "out/small/results.json").read_text())
    for record in results["runs"]:
        tested = found[record["method"]]["calibration"]["domains"]["sketch"]
        expected = record["selected"]["train_val"]["metrics"]["test"]
        assert (tested["n"], tested["nll"]) == (expected["n"], pytest.approx(expected["nll"], rel=1e-3))
    assert main(["analyse", str(tmp_path / "out/small")]) == 0
