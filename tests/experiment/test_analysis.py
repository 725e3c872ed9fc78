"""The measures of a run's models: their values, the images they are of, and an analysis that is resumed."""

import json
from pathlib import Path

import miniature
import numpy as np
import pytest
import small_runs
import torch
from numpy.testing import assert_allclose
from small_runs import document

from xdm_ft.analysis import Encoded
from xdm_ft.analysis.calibration import calibration
from xdm_ft.analysis.invariance import Invariance
from xdm_ft.cli.parser import main
from xdm_ft.core import ModelKey
from xdm_ft.experiment import analyse
from xdm_ft.experiment.analyse import FROZEN, Limits, read_model, split_images
from xdm_ft.experiment.pieces import RunContext
from xdm_ft.experiment.plan import make_plan, read_data
from xdm_ft.experiment.prepare import build_encoders, prepare
from xdm_ft.experiment.work import launched
from xdm_ft.results.run import read_run
from xdm_ft.storage.run_directory import RunDirectory

RUN = Path("output/small")
TRAINING, VALIDATION, TEST, CLASSES = 105, 63, 56, 7


@pytest.fixture
def in_bank(bank, monkeypatch):
    monkeypatch.chdir(bank)


@pytest.mark.slow
def test_every_picked_model_is_measured_and_the_state_is_gone(in_bank):
    content, run = document(RUN, "analysis"), read_run(RUN)
    keys = [(m["method"], tuple(m["test_domains"]), m["seed"], m["trial"]) for m in content["models"]]
    assert keys == [record.key for record in run.picked] and len(keys) == 7 * 2
    assert not (RUN / "state").exists() and run.analysis | {"checksum": content["checksum"]} == content
    assert content["images"]["sketch"] == {
        "training": TRAINING, "used": TRAINING, "validation": VALIDATION, "validation_used": VALIDATION, "test": TEST,
        "test_used": TEST,
    }  # fmt: skip
    for model in content["models"]:
        first, xdm = model["seed"] == 4, model["method"] == "xdomainmix"
        assert (model["importance"] is not None) == (model["embedding"] is not None) == first
        assert model["domain_head"] == (None if not first else "own" if xdm else "fitted")
        assert (model["divergence"] is not None) == (xdm or model["method"] == "mixup")
        pairs = {"class_specific_vs_generic", "domain_specific_vs_generic"}
        if model["divergence"]:
            pairs.add("original_vs_augmented")
            levels = [0.9, 0.8, 0.7, 0.6, 0.5] if xdm else [None]
            assert [level["quantile"] for level in model["divergence"]] == levels
            assert {level["n"] for level in model["divergence"]} == {TRAINING // 2}
        assert model["embedding"] is None or set(model["embedding"]["pairs"]) == pairs
        if model["importance"]:
            starts = {curve[0] for curve in model["importance"]["class"].values()}
            assert len(starts) == 1, "removal of features begins at the accuracy"


def naive_invariance(z, y, domain):
    paper, code = 0.0, []
    for c in range(CLASSES):
        cells = [z[(y == c) & (domain == d)] for d in range(3)]
        covariances = [np.cov(cell.T) for cell in cells]
        paper += sum(((a - b) ** 2).sum() for a in covariances for b in covariances) / (CLASSES * 3)
        for a, b in ((0, 1), (0, 2), (1, 2)):
            between_means = ((cells[a].mean(0) - cells[b].mean(0)) ** 2).mean()
            code.append(between_means + ((covariances[a] - covariances[b]) ** 2).mean())
    return paper, np.mean(code)


def naive_ece(probability, y):
    confidence, right = probability.max(1), probability.argmax(1) == y
    gap, counts = 0.0, []
    for k in range(15):
        inside = (confidence > k / 15) & (confidence <= (k + 1) / 15)
        counts.append(int(inside.sum()))
        gap += abs(right[inside].sum() - confidence[inside].sum()) / len(y)
    return gap, counts


@pytest.fixture(scope="module")
def models(bank):
    """The plan, and the first model of each method."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(bank)
        recipe, run = small_runs.load("small.yaml", list(small_runs.BANK)), read_run(RUN)
        dataset = read_data(recipe)
        plan = make_plan(recipe, dataset)
        with launched(recipe) as accelerator:
            prepared = prepare(recipe, dataset, build_encoders(recipe)[1], accelerator)
            context = RunContext(plan, prepared, RunDirectory(run.path), accelerator)
            planned = {model.key: model for model in plan.models}
            records = [record for record in run.picked if record.seed == 4]
            read = {r.method: (planned[r.key], read_model(context, planned[r.key], r)) for r in records}
    return plan, read


@pytest.mark.slow
@pytest.mark.parametrize("method", ["erm", "xdomainmix", "cosine", "mlp", "linear_probe", "unit"])
def test_values_are_those_of_a_naive_loop(method, in_bank, models):
    plan, read = models
    planned, model = read[method]
    [entry] = [
        m for m in document(RUN, "analysis")["models"] if (m["method"], m["seed"]) == (method, model.record.seed)
    ]
    rows, y, domain, _ = split_images(plan, planned, FROZEN).validation
    features = model.features(rows)
    assert torch.allclose(features.norm(dim=1), torch.ones(len(rows))) == (method == "unit")
    logits, z, y, domain = (value.numpy() for value in (model.logits(features).double(), features.double(), y, domain))

    invariance = entry["representation_invariance"]
    expected = naive_invariance(z, y, domain)
    assert_allclose([invariance["paper"], invariance["published_code"]], expected, rtol=1e-4)
    assert (invariance["classes"], invariance["domains"]) == (CLASSES, 3)
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]
    risks = [losses[domain == number].mean() for number in range(3)]
    assert_allclose(list(entry["prediction_invariance"]["risk"].values()), risks, rtol=1e-4)
    assert entry["prediction_invariance"]["risk_variance"] == pytest.approx(np.var(risks, ddof=1), rel=1e-3)

    pick = model.record.selected["train_val"]
    tested, temperature = entry["calibration"]["domains"]["sketch"], pick.temperature
    assert entry["calibration"]["temperature"] == (
        None if temperature is None else pytest.approx(temperature, rel=1e-5)
    )
    assert (tested["role"], tested["n"]) == ("test", TEST)
    for name in ("ece", "nll"):  # what the run has measured on the same images
        assert tested[name] == pytest.approx(getattr(pick.metrics["test"], name), rel=1e-4, abs=1e-6)
    probability, suffix = np.exp(logits / (temperature or 1)), "" if temperature is None else "_scaled"
    probability /= probability.sum(1, keepdims=True)
    for number, name in enumerate(("art_painting", "cartoon", "photo")):
        calibrated, inside = entry["calibration"]["domains"][name], domain == number
        gap, counts = naive_ece(probability[inside], y[inside])
        assert calibrated["role"] == "validation" and calibrated["n"] == inside.sum()
        assert calibrated[f"ece{suffix}"] == pytest.approx(gap, rel=1e-4)
        assert [level["n"] for level in calibrated[f"reliability{suffix}"]] == counts
        assert calibrated["nll"] == pytest.approx(risks[number], rel=1e-4)


@pytest.fixture
def measured(monkeypatch):
    """The models that are measured in this process. The fifth of them fails, unless they begin with rsc."""
    keys, entry = list[ModelKey](), analyse.entry

    def counted(model, *rest):
        keys.append(model.record.key)
        if len(keys) == 5 and keys[0].method != "rsc":
            raise MemoryError("in the middle")
        return entry(model, *rest)

    monkeypatch.setattr(analyse, "entry", counted)
    monkeypatch.setattr(analyse, "own_cores", lambda: 1)
    return keys


@pytest.mark.slow
def test_an_analysis_is_done_once_resumed_in_other_processes_and_grows(bank_copy, measured, monkeypatch, capsys):
    file = RUN / "analysis.json"
    expected = file.read_bytes()
    assert main(["analyse", str(RUN)]) == 0
    assert not measured and file.read_bytes() == expected

    file.write_bytes(expected.replace(b'"seed": 0', b'"seed": 7', 1))
    assert main(["analyse", str(RUN)]) == 1
    assert "analysis.json: is damaged (its checksum differs); it is written again" in capsys.readouterr().err
    assert sum(len(lines.read_bytes().splitlines()) for lines in (RUN / "state/analysis").iterdir()) == 4
    monkeypatch.setattr(analyse, "own_cores", lambda: 3)
    assert main(["analyse", str(RUN)]) == 0
    assert file.read_bytes() == expected and not (RUN / "state").exists()

    measured.clear()
    monkeypatch.setattr(analyse, "own_cores", lambda: 1)
    small_runs.results(*small_runs.BANK, small_runs.BANK[1].replace("unit}]", "unit}, rsc]"))
    assert [key.method for key in measured] == ["rsc"] * 2
    entries = document(RUN, "analysis")["models"]
    assert [entry for entry in entries if entry["method"] != "rsc"] == json.loads(expected)["models"]


def encoded(n, classes, domain):
    y = torch.arange(n) % classes
    z = torch.nn.functional.one_hot(y, 3).float() + torch.arange(n)[:, None] % 2
    return Encoded(z, y, torch.full((n,), domain), torch.arange(n))


def test_calibration_without_validation_images_and_of_a_domain_that_also_trains():
    def logits(z):
        return z * torch.tensor([1.0, 2.0, -1.0])

    alone = calibration(logits, encoded(0, 2, 0), encoded(6, 1, 2), "ab", "abc", None)
    assert alone["temperature"] is None and list(alone["domains"]) == ["c"]
    assert alone["domains"]["c"]["reliability_scaled"] is alone["domains"]["c"]["ece_scaled"] is None
    both = calibration(logits, encoded(12, 3, 0), encoded(6, 1, 0), "ab", "abc", 2.0)
    roles = {name: domain["role"] for name, domain in both["domains"].items()}
    assert both["temperature"] == 2.0 and roles == {"a (validation)": "validation", "a": "test"}


@pytest.mark.slow
def test_a_sample_has_as_many_images_of_every_domain_and_depends_on_their_number_alone(models):
    plan, _ = models
    limits = Limits(training=30, validation=12, test=9, augmented=10)
    sample, again = (split_images(plan, plan.models[0], limits) for _ in range(2))
    assert sample.training.domain.bincount().tolist() == [10, 10, 10] and len(sample.test.rows) == 9
    assert sample.training.n == TRAINING and len(sample.training.rows) == 30
    assert torch.equal(again.training.rows, sample.training.rows)
    assert not set(sample.training.rows.tolist()) & set(sample.validation.rows.tolist())


@pytest.mark.slow
def test_one_training_domain_gives_nulls(in_folder):
    for domain in ("art_painting", "cartoon"):
        for c, name in enumerate(("dog", "horse")):
            for i in range(8 if (domain, name) != ("cartoon", "horse") else 1):  # almost a missing class
                miniature.save(in_folder / f"data/{domain}/{name}/{i}.png", c, len(domain), i)
    small_runs.results("data={name: folder, root: data}", "methods=[erm, linear_probe]", "analyse=true")
    assert "spread_as_published" not in document(RUN)["summary"][0], "own images are beside nothing"
    assert "published" not in (RUN / "results.md").read_text().lower()
    content = document(RUN, "analysis")
    assert len(content["models"]) == 4
    for model in content["models"]:
        assert model["representation_invariance"] == Invariance(None, None, 0, 0, None, None)._asdict()
        assert model["prediction_invariance"]["risk_variance"] is None
        assert len(model["prediction_invariance"]["risk"]) == 1
        assert model["domain_head"] is None
        if model["importance"] is not None:
            assert model["importance"]["domain"] is model["importance"]["area"]["domain"] is None


@pytest.mark.slow
def test_models_that_train_their_encoder(end_to_end, monkeypatch):
    monkeypatch.chdir(end_to_end)
    models = {model["method"]: model for model in document(RUN, "analysis")["models"]}
    assert {name for name, model in models.items() if model["divergence"]} == {"xdomainmix", "mixstyle", "lisa"}
    assert len({model["representation_invariance"]["paper"] for model in models.values()}) == len(models) == 6
    for record in document(RUN)["runs"]:
        tested = models[record["method"]]["calibration"]["domains"]["sketch"]
        expected = record["selected"]["train_val"]["metrics"]["test"]
        assert (tested["n"], tested["nll"]) == (expected["n"], pytest.approx(expected["nll"], rel=1e-3))
