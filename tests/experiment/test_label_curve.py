"""`label_curve: true`: what labels of each held-out domain bring, by hand and in a run that is killed and grows."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import sklearn.datasets
import torch
from safetensors.torch import load_file
from scipy.stats import t
from sklearn.utils import Bunch
from small_runs import document
from warm_processes import two_ranks

from xdm_ft.cli.library import run
from xdm_ft.cli.parser import main
from xdm_ft.experiment import label_curve as curve
from xdm_ft.experiment.label_curve import Adapted, points_of
from xdm_ft.experiment.plan import read_data
from xdm_ft.experiment.prepare import build_encoders, prepare
from xdm_ft.experiment.work import start
from xdm_ft.protocol.splits import splits, stratified_part
from xdm_ft.recipe.check import load
from xdm_ft.recipe.settings import Recipe
from xdm_ft.training.adaptation import adapt_head

RUN = Path("output/tiny")
RECIPE = """\
name: tiny
data: {name: digits}
protocol: {name: leave_one_domain_out, seeds: 1}
encoder: {name: open_clip, model: demo, weights: demo}
features: {workers: 0}
methods: [knn, erm]
training: {steps: 4, batch_size: 4, evaluate_every: 2, lr: 0.01}
label_curve: true
report: {page: false}
"""


def few_digits() -> None:
    """For a process of its own: 160 digits of each style, of which half may be labelled."""
    every = sklearn.datasets.load_digits()
    few = Bunch(images=every.images[:640], target=every.target[:640])
    sklearn.datasets.load_digits = lambda: few
    curve.LABELS = (20, 60)


@pytest.fixture
def here(in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("sklearn.datasets.load_digits", sklearn.datasets.load_digits)  # and LABELS: restored
    monkeypatch.setattr(curve, "LABELS", curve.LABELS)
    few_digits()
    return in_folder


def recipe(*overrides: str) -> Recipe:
    Path("tiny.yaml").write_text(RECIPE)
    return load("tiny.yaml", [*overrides])


def of_run() -> dict[str, Any]:
    content: dict[str, Any] = document(RUN)["label_curve"]
    return content


# ------------------------------------------------------------------------------------------------------ means, by hand


def of_seed(start: float, **gains: float) -> dict[Adapted, float]:
    adapted = {("label", int(number[1:])): start + gain for number, gain in gains.items()}
    return {(None, 0): start} | adapted | {("random", number): value - 0.01 for (_, number), value in adapted.items()}


def test_points_are_means_over_seeds_then_over_domains() -> None:
    points = points_of(
        {
            ("a",): [of_seed(0.5, n10=0.02, n20=0.1), of_seed(0.7, n10=0.0, n20=0.2)],
            ("b",): [of_seed(0.2, n10=0.09, n20=0.1), of_seed(0.4, n10=0.09, n20=0.1)],
            ("c",): [of_seed(0.9, n10=0.01), of_seed(0.9, n10=0.03)],
            ("too", "few"): [of_seed(0.1), of_seed(0.1)],
        }
    )
    by = {(point["chosen"], point["labels"]): point for point in points}
    assert [*by] == [(None, 0), ("label", 10), ("label", 20), ("random", 10), ("random", 20)]
    first = by[None, 0]
    assert (first["gain"], first["interval"], first["value"]) == (0, None, pytest.approx((0.6 + 0.3 + 0.9) / 3))
    ten = by["label", 10]
    assert ten["past_gains"] == pytest.approx({"a": 0.01, "b": 0.09, "c": 0.02})
    assert ten["values"] == pytest.approx({"a": 0.61, "b": 0.39, "c": 0.92})
    half = t.ppf(0.975, 2) * np.std([0.01, 0.09, 0.02], ddof=1) / 3**0.5
    assert ten["interval"] == pytest.approx({"low": 0.04 - half, "high": 0.04 + half})
    assert ten["gain"] == pytest.approx(0.04)
    assert by["random", 10]["gain"] == pytest.approx(0.03)
    twenty = by["label", 20]
    assert twenty["past_gains"] == pytest.approx({"a": 0.15, "b": 0.1}) and twenty["interval"] is None, "two domains"
    assert points_of({("few",): [of_seed(0.1)]}) == []


# --------------------------------------------------------------------------------------------------------------- a run


def naive(made: Recipe, domain: str, number: int, by_class: bool = False) -> tuple[float, float]:
    """The accuracy, or mean recall, of ERM's model of seed 0 on half of a domain, without and with random labels of
    the other half.
    """
    dataset = read_data(made)
    features = prepare(made, dataset, build_encoders(made)[1], start(made)).encoders[None].features
    assert features is not None
    [split] = [one for one in splits(dataset, made.protocol, 0) if one.test_domains == (domain,)]
    entry = next(r for r in document(RUN)["runs"] if (r["method"], r["test_domains"]) == ("erm", [domain]))
    state = load_file(RUN / entry["selected"]["train_val"]["weights"])
    z, y = features[torch.arange(len(dataset))], torch.from_numpy(dataset.labels)
    training = z[torch.cat(split.train)].double()
    mean, deviation = training.mean(0).float(), training.std(0, correction=0).float()
    rows = np.flatnonzero(dataset.domains == dataset.domain_names.index(domain))
    half = stratified_part(dataset, rows, 0.5, 0)
    tested, chosen = np.setdiff1d(rows, half), np.random.default_rng(0).permutation(half)[:number]
    before = state["head.weight"], state["head.bias"]
    after = adapt_head(*before, z[chosen], y[chosen], mean, deviation)

    def right(weight: torch.Tensor, bias: torch.Tensor) -> float:
        is_right, of = ((z[tested] @ weight.T + bias).argmax(1) == y[tested]).double(), y[tested]
        return float(np.mean([is_right[of == c].mean() for c in of.unique()]) if by_class else is_right.mean())

    return right(*before), right(*after)


def test_a_metric_of_classes_is_the_metric_of_the_curve(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(curve, "LABELS", (20,))
    made = recipe("protocol.test_domains=[ink]", "methods=[erm]", "protocol.metric=macro_f1")
    run(made)
    points = {(point["chosen"], point["labels"]): point for point in of_run()["points"]}
    assert of_run()["metric"] == "balanced_accuracy"
    before, after = naive(made, "ink", 20, by_class=True)
    assert points[None, 0]["values"]["ink"] == pytest.approx(before) and before != naive(made, "ink", 20)[0]
    assert points["random", 20]["gain"] == pytest.approx(after - before)
    assert "| images chosen | labels | balanced accuracy | gain |" in (RUN / "results.md").read_text()
    capsys.readouterr()
    assert main(["run", "tiny.yaml", "protocol.test_domains=[ink]", "methods=[erm]", "protocol.metric=macro_f1"]) == 0
    assert " points of balanced accuracy (by domain: " in capsys.readouterr().out


def killed(*_: object) -> NoReturn:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_a_run_measures_it_once_and_again_when_it_was_killed_or_has_grown(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = recipe("protocol.test_domains=[ink, blurred, chalk]")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(curve, "points_of", killed)
        run(made)
    assert "label_curve" not in document(RUN)
    run(made)
    first = of_run()
    points = {(point["chosen"], point["labels"]): point for point in first["points"]}
    assert len(points) == 1 + 2 * 2 and first["method"] == "erm", "knn has no linear head"
    assert all(point["interval"] for (how, _), point in points.items() if how)
    before, after = naive(made, "ink", 20)
    assert points[None, 0]["values"]["ink"] == before and points["random", 20]["values"]["ink"] == after
    assert points["label", 60]["gain"] > 0.02
    text = (RUN / "results.md").read_text()
    assert "## What labels of a new site bring" in text and "as xdm-ft label does | 60 |" in text

    written = (RUN / "results.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(curve, "adapted_values", killed)
        run(made)  # nothing is computed again
    assert (RUN / "results.json").read_bytes() == written
    capsys.readouterr()
    assert main(["run", "tiny.yaml", "protocol.test_domains=[ink, blurred, chalk]", "protocol.seeds=2"]) == 0
    assert "labels   20 of a new site bring" in capsys.readouterr().out
    grown = of_run()
    assert grown["of"] != first["of"] and grown["points"] != first["points"]
    run(recipe("protocol.test_domains=[ink, blurred, chalk]", "protocol.seeds=2", "label_curve=false"))
    assert "label_curve" not in document(RUN)


@pytest.mark.slow
def test_two_processes_have_one_curve(here: Path) -> None:
    """The second process waits for the first one, which computes it alone; a run of one process has the same."""
    overrides = ["protocol.test_domains=[ink, blurred, chalk]", "training.steps=2"]
    recipe()
    two_ranks("run", "tiny.yaml", *overrides, cwd=here, first=few_digits)
    both = document(RUN)
    assert both["environment"]["processes"] == 2
    run(recipe(*overrides, "name=alone"))
    alone = document("output/alone")
    assert alone["label_curve"]["points"] == both["label_curve"]["points"] and alone["summary"] == both["summary"]
    for path in Path("output/alone/models").rglob("*.safetensors"):
        assert path.read_bytes() == Path(RUN, *path.parts[2:]).read_bytes(), path


def test_what_can_not_be_measured_is_one_line(
    here: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, logger="xdm_ft")
    monkeypatch.setattr(curve, "LABELS", (1000,))
    run(recipe("protocol.test_domains=[ink]", "methods=[erm]"))
    assert "label_curve: no domain splits" in caplog.text and "label_curve" not in document(RUN)
    failing = "training.lr=1.0e+38", "training.steps=60", "name=other"
    run(recipe("protocol.test_domains=[ink]", "methods=[erm]", *failing))
    assert "label_curve: no method with a linear head has a value" in caplog.text
