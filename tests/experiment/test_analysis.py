"""The measures of a run's models: their values, the images they are of, and an analysis that goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import miniature
import numpy as np
import pytest
import torch
from analysed import analysis
from numpy.testing import assert_allclose

from xdm_ft.analysis import Encoded
from xdm_ft.analysis.calibration import calibration
from xdm_ft.analysis.invariance import Invariance
from xdm_ft.cli.parser import main
from xdm_ft.evaluation.records import ModelKey
from xdm_ft.experiment import analyse
from xdm_ft.experiment.analyse import FROZEN, Limits, TrainedModel, read_model, split_images
from xdm_ft.experiment.machine import launched
from xdm_ft.experiment.pieces import RunContext
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
training: {{steps: {steps}, batch_size: 4, evaluate_every: 2, optimizer: sgd, lr: 0.05}}
report: {{page: false}}
output: {{dir: {folder}/out}}
analyse: true
"""
METHODS = """[erm, {name: xdomainmix, warmup_steps: 2}, {name: erm, head: cosine, label: cosine}, mixup, linear_probe,
  {name: erm, normalize: true, label: unit}]"""
PROTOCOL = "test_domains: [sketch], seeds: 2, val_fraction: 0.4"
TRAINING, VALIDATION, TEST, CLASSES = 105, 63, 56, 7


def write(folder: Path, methods: str = METHODS, protocol: str = PROTOCOL, data: str = "pacs", **more: str) -> Path:
    values = {"model": "test_vit", "kwargs": "{img_size: 32}", "more": ", counts: any", "steps": "10"} | more
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
def models(folder: Path) -> dict[ModelKey, TrainedModel]:
    recipe, run = load(str(folder / "small.yaml")), read_run(folder / "out/small")
    with launched(recipe) as accelerator:
        dataset = read_data(recipe)
        plan = make_plan(recipe, dataset)
        prepared = prepare(recipe, dataset, build_encoders(recipe), accelerator)
        planned = {model.key: model for model in plan.models}
        context = RunContext(plan, prepared, RunDirectory(run.path), accelerator)
        return {record.key: read_model(context, planned[record.key], record) for record in run.picked}


@pytest.mark.slow
def test_every_picked_model_is_measured_and_the_state_is_gone(folder: Path) -> None:
    found, run = analysis(folder / "out/small"), read_run(folder / "out/small")
    keys = [(m["method"], tuple(m["test_domains"]), m["seed"], m["trial"]) for m in found["models"]]
    assert keys == [record.key for record in run.picked] and len(keys) == 6 * 2
    assert not (folder / "out/small/state").exists() and run.analysis == found
    assert found["images"]["sketch"] == {
        "training": TRAINING, "used": TRAINING, "validation": VALIDATION, "validation_used": VALIDATION, "test": TEST,
        "test_used": TEST,
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
            assert {level["n"] for level in model["divergence"]} == {TRAINING // 2}
        assert model["embedding"] is None or set(model["embedding"]["pairs"]) == pairs


def naive_invariance(z: np.ndarray, y: np.ndarray, domain: np.ndarray) -> tuple[float, float]:
    paper, code = 0.0, []
    for c in range(CLASSES):
        cells = [z[(y == c) & (domain == d)] for d in range(3)]
        covariances = [np.cov(cell.T) for cell in cells]
        paper += sum(float(((a - b) ** 2).sum()) for a in covariances for b in covariances) / (CLASSES * 3)
        for a, b in ((0, 1), (0, 2), (1, 2)):
            of_means = ((cells[a].mean(0) - cells[b].mean(0)) ** 2).mean()
            code.append(of_means + ((covariances[a] - covariances[b]) ** 2).mean())
    return paper, float(np.mean(code))


def naive_ece(probability: np.ndarray, y: np.ndarray) -> tuple[float, list[int]]:
    confidence, right = probability.max(1), probability.argmax(1) == y
    gap, counts = 0.0, []
    for k in range(15):
        inside = (confidence > k / 15) & (confidence <= (k + 1) / 15)
        counts.append(int(inside.sum()))
        gap += abs(right[inside].sum() - confidence[inside].sum()) / len(y)
    return gap, counts


@pytest.mark.slow
@pytest.mark.parametrize("method", ["erm", "xdomainmix", "cosine", "linear_probe", "unit"])
def test_values_are_those_of_a_naive_loop(method: str, folder: Path, models: dict[ModelKey, TrainedModel]) -> None:
    model = models[ModelKey(method, ("sketch",), 1, 0)]
    [entry] = [m for m in analysis(folder / "out/small")["models"] if (m["method"], m["seed"]) == (method, 1)]
    recipe = load(str(folder / "small.yaml"))
    plan = make_plan(recipe, read_data(recipe))
    planned = next(one for one in plan.models if one.key == model.record.key)
    rows, y, domain, _ = split_images(plan, planned, FROZEN).validation
    features = model.features(rows)
    assert torch.allclose(features.norm(dim=1), torch.ones(len(rows))) == (method == "unit")
    logits, z, y, domain = (value.numpy() for value in (model.logits(features).double(), features.double(), y, domain))
    paper, code = naive_invariance(z, y, domain)
    invariance = entry["representation_invariance"]
    assert_allclose([invariance["paper"], invariance["published_code"]], [paper, code], rtol=1e-4)
    assert (invariance["classes"], invariance["domains"]) == (CLASSES, 3)
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]
    risks = [losses[domain == number].mean() for number in range(3)]
    assert_allclose(list(entry["prediction_invariance"]["risk"].values()), risks, rtol=1e-4)
    assert entry["prediction_invariance"]["risk_variance"] == pytest.approx(np.var(risks, ddof=1), rel=1e-3)
    pick = model.record.selected["train_val"]
    tested, value = entry["calibration"]["domains"]["sketch"], pick.temperature
    assert entry["calibration"]["temperature"] == (None if value is None else pytest.approx(value, rel=1e-5))
    assert (tested["role"], tested["n"]) == ("test", TEST)
    for name in ("ece", "nll"):  # what the run has measured on the same images
        assert tested[name] == pytest.approx(getattr(pick.metrics["test"], name), rel=1e-4, abs=1e-6)
    probability, after = np.exp(logits / (value or 1)), "" if value is None else "_scaled"
    probability /= probability.sum(1, keepdims=True)
    for number, name in enumerate(("art_painting", "cartoon", "photo")):
        of_domain, rows_of = entry["calibration"]["domains"][name], domain == number
        gap, counts = naive_ece(probability[rows_of], y[rows_of])
        assert of_domain["role"] == "validation" and of_domain["n"] == rows_of.sum()
        assert of_domain[f"ece{after}"] == pytest.approx(gap, rel=1e-4)
        assert [one["n"] for one in of_domain[f"reliability{after}"]] == counts
        assert of_domain["nll"] == pytest.approx(risks[number], rel=1e-4)


@pytest.mark.slow
def test_removal_begins_at_the_accuracy(folder: Path) -> None:
    for model in analysis(folder / "out/small")["models"]:
        if model["importance"]:
            assert len({curve[0] for curve in model["importance"]["class"].values()}) == 1


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[ModelKey]:
    """The models that are measured, in this process."""
    keys, inner = list[ModelKey](), analyse.entry

    def counted(model: TrainedModel, *rest: Any) -> Any:
        keys.append(model.record.key)
        if len(keys) == 5 and keys[0].method != "rsc":
            raise MemoryError("in the middle")
        return inner(model, *rest)

    monkeypatch.setattr(analyse, "entry", counted)
    monkeypatch.setattr(analyse, "own_cores", lambda: 1)
    return keys


@pytest.mark.slow
def test_a_second_analysis_measures_nothing_and_a_grown_run_the_new_models_only(
    folder: Path, tmp_path: Path, measured: list[ModelKey]
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    before = (tmp_path / "out/small/analysis.json").read_bytes()
    assert main(["analyse", str(tmp_path / "out/small")]) == 0
    assert not measured and (tmp_path / "out/small/analysis.json").read_bytes() == before
    grown = write(tmp_path, f"{METHODS[:-1]}, rsc]")
    grown.write_text(grown.read_text().replace(str(tmp_path / "data"), str(folder / "data")))
    assert main(["run", str(grown)]) == 0
    assert [key.method for key in measured] == ["rsc"] * 2
    entries = analysis(tmp_path / "out/small")["models"]
    assert [one for one in entries if one["method"] != "rsc"] == json.loads(before)["models"]


@pytest.mark.slow
def test_an_interrupted_analysis_goes_on_in_other_processes_and_ends_the_same(
    folder: Path, tmp_path: Path, measured: list[ModelKey], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    run = Path(shutil.copytree(folder / "out/small", tmp_path / "small"))
    expected = (run / "analysis.json").read_bytes()
    (run / "analysis.json").write_bytes(expected.replace(b'"seed": 0', b'"seed": 7', 1))
    assert main(["analyse", str(run)]) == 1
    assert "analysis.json: is damaged (its checksum differs); it is written again" in capsys.readouterr().err
    assert sum(len(file.read_bytes().splitlines()) for file in (run / "state/analysis").iterdir()) == 4
    monkeypatch.setattr(analyse, "own_cores", lambda: 3)
    assert main(["analyse", str(run)]) == 0
    assert (run / "analysis.json").read_bytes() == expected and not (run / "state").exists()


def encoded(n: int, classes: int, domain: int) -> Encoded:
    y = torch.arange(n) % classes
    z = torch.nn.functional.one_hot(y, 3).float() + torch.arange(n)[:, None] % 2
    return Encoded(z, y, torch.full((n,), domain), torch.arange(n))


def test_calibration_without_validation_images_and_of_a_domain_that_also_trains() -> None:
    def logits(z: torch.Tensor) -> torch.Tensor:
        return z * torch.tensor([1.0, 2.0, -1.0])

    found = calibration(logits, encoded(0, 2, 0), encoded(6, 1, 2), "ab", "abc", None)
    assert found["temperature"] is None and list(found["domains"]) == ["c"]
    assert found["domains"]["c"]["reliability_scaled"] is found["domains"]["c"]["ece_scaled"] is None
    found = calibration(logits, encoded(12, 3, 0), encoded(6, 1, 0), "ab", "abc", 2.0)
    assert found["temperature"] == 2.0
    assert {name: one["role"] for name, one in found["domains"].items()} == {
        "a (validation)": "validation",
        "a": "test",
    }


@pytest.mark.slow
def test_a_sample_has_as_many_images_of_every_domain_and_depends_on_their_number_alone(folder: Path) -> None:
    recipe = load(str(folder / "small.yaml"))
    plan = make_plan(recipe, read_data(recipe))
    limits = Limits(training=30, validation=12, test=9, augmented=10)
    found, again = (split_images(plan, plan.models[0], limits) for _ in range(2))
    assert found.training.domain.bincount().tolist() == [10, 10, 10] and len(found.test.rows) == 9
    assert found.training.n == TRAINING and len(found.training.rows) == 30
    assert torch.equal(again.training.rows, found.training.rows)
    assert not set(found.training.rows.tolist()) & set(found.validation.rows.tolist())


@pytest.mark.slow
def test_one_training_domain_gives_nulls(tmp_path: Path) -> None:
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
def test_the_official_split_with_a_validation_domain(tmp_path: Path) -> None:
    miniature.camelyon17(tmp_path / "data", per_slide=4)
    path = write(tmp_path, "[erm]", "name: official, selection: val_domain, seeds: 1", "camelyon17", more="")
    assert main(["run", str(path)]) == 0
    found = analysis(tmp_path / "out/small")
    assert found["selection"] == "val_domain"
    roles = {one["role"] for model in found["models"] for one in model["calibration"]["domains"].values()}
    assert roles == {"validation", "test"}


@pytest.mark.slow
def test_models_that_train_their_encoder(tmp_path: Path) -> None:
    miniature.domainbed(tmp_path / "data", "pacs", per_class=8)
    methods = "[erm, {name: xdomainmix, warmup_steps: 2}, mixstyle, lisa, linear_probe]"
    protocol = "test_domains: [sketch], seeds: 1, val_fraction: 0.4"
    how = {"model": "test_resnet", "kwargs": "{}, trainable: true", "steps": "4"}
    assert main(["run", str(write(tmp_path, methods, protocol, **how))]) == 0
    found = {model["method"]: model for model in analysis(tmp_path / "out/small")["models"]}
    assert {name for name, model in found.items() if model["divergence"]} == {"xdomainmix", "mixstyle", "lisa"}
    assert len({model["representation_invariance"]["paper"] for model in found.values()}) == len(found) == 5
    results = json.loads((tmp_path / "out/small/results.json").read_text())
    for record in results["runs"]:
        tested = found[record["method"]]["calibration"]["domains"]["sketch"]
        expected = record["selected"]["train_val"]["metrics"]["test"]
        assert (tested["n"], tested["nll"]) == (expected["n"], pytest.approx(expected["nll"], rel=1e-3))
