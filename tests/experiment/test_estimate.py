"""The estimate of a run's time: nothing is changed by it, small runs are not measured, and problems are named."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_runs import recipe

from xdm_ft.experiment import estimate as module
from xdm_ft.experiment import run
from xdm_ft.experiment.estimate import Estimate, ImageSeconds, estimate, first_line
from xdm_ft.experiment.plan import Plan, make_plan, read_data
from xdm_ft.experiment.prepare import build_encoders
from xdm_ft.features.extract import cached_images

pytestmark = pytest.mark.usefixtures("small_pacs")
CPU: Any = SimpleNamespace(device=torch.device("cpu"), num_processes=1, autocast=lambda: torch.enable_grad())


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "SMALL_SECONDS", 0.0)
    monkeypatch.setattr(module, "MEASURING_SECONDS", 0.01)
    yield


def planned(*overrides: str) -> tuple[Plan, Any]:
    made = recipe(*overrides)
    return make_plan(made, read_data(made)), build_encoders(made)


def said(caplog: pytest.LogCaptureFixture) -> str:
    """The first line of a run, after warnings about its data."""
    return next(record.getMessage() for record in caplog.records if record.levelno == logging.INFO)


def files() -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in Path().rglob("*")}


@pytest.mark.slow
def test_small_runs_are_not_measured(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def measured(*_: Any) -> float:
        raise AssertionError("it is small")

    for name in ("features", "training"):
        monkeypatch.setattr(module.Work, name, measured)
    plan, encoders = planned()
    assert estimate(plan, encoders, CPU).text() == "less than a minute"
    caplog.set_level(logging.INFO, "xdm_ft")
    made = recipe("methods=[erm]", "protocol.test_domains=[sketch]")
    run(made)
    assert said(caplog).endswith("1 model to train, less than a minute")
    assert said(caplog).startswith("cpu (")
    caplog.clear()
    run(made)
    assert said(caplog).endswith(": nothing is left to train")
    # of the cached images, all are found, and none under other settings
    count = cached_images(encoders[None], plan.dataset.decoder, made.features, "none", CPU.device)
    assert count == [len(plan.dataset)]
    assert cached_images(encoders[None], "another decoder", made.features, "none", CPU.device) == [0]


@pytest.mark.parametrize(
    "overrides",
    [
        ("methods=[erm,vrex]",),
        ("methods=[erm,fish]", "training.steps=3", "training.evaluate_every=3"),
        ("encoder.trainable=true", "methods=[erm,linear_probe]", "search={trials: 2, preset: domainbed}"),
        ("encoder.trainable={blocks: 1}", "methods=[erm+sam]"),
    ],
)
def test_measuring_changes_nothing(measuring: None, overrides: tuple[str, ...]) -> None:
    plan, encoders = planned(*overrides)
    before, random = files(), torch.get_rng_state()
    weights = {name: value.clone() for name, value in encoders[None].state_dict().items()}
    threads = torch.get_num_threads()
    found = estimate(plan, encoders, CPU)
    assert found.problem is None, found.problem
    assert found.seconds is not None and 0 < found.seconds < 600
    assert (found.features or 0) > 0 and (found.training or 0) > 0
    assert files() == before and torch.equal(torch.get_rng_state(), random) and torch.get_num_threads() == threads
    assert all(torch.equal(value, weights[name]) for name, value in encoders[None].state_dict().items())
    longer, _ = planned(*overrides, "training.steps=100000")
    assert (estimate(longer, encoders, CPU).training or 0) > 3 * (found.training or 0)


CUT = ImageSeconds(decode=0.5, below=2.0, forward=3.0, train=10.0)


@pytest.mark.parametrize(("use", "before"), [("cache", 0.0), ("compute", 0.5 + 2.0)])
def test_what_lies_below_a_cut_is_paid_once_or_at_every_step(
    use: str, before: float, measuring: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two cuts, and SAM above one of them; decoding takes one process of one core 0.5 s."""
    monkeypatch.setattr(module, "own_cores", lambda: 1)
    seconds = lambda plan, encoder, accelerator, frozen_in=None: ImageSeconds(0.5, 2.0) if frozen_in else CUT  # noqa: E731
    monkeypatch.setattr(module, "image_seconds", seconds)
    one, two = "{name: erm, trainable: {blocks: 1}}", "{name: sam, trainable: {blocks: 2}}"
    plan, encoders = planned(f"methods=[{one}, {two}]", f"features.cut={use}", "protocol.test_domains=[sketch]")
    found = estimate(plan, encoders, CPU)
    rows = len(plan.dataset)
    assert found.features == pytest.approx(2 * rows * (0.5 + 2.0) if use == "cache" else 0.0)
    (split,) = plan.splits
    assert plan.rules == ("train_val", "oracle")  # both measure at every evaluation, and all images at the end
    sizes = {name: len(rows) for name, rows in split.evaluation.items()}
    looks = 5 * (sizes["train_val"] + sizes["test_val"]) + 2 * sum(sizes.values())
    steps = 10 * 12  # steps × images
    expected = steps * (before + 10.0) + steps * (before + 20.0) + 2 * looks * (before + 3.0)
    assert found.training == pytest.approx(expected + 2 * module.SECONDS_PER_MODEL)


def test_what_can_not_be_measured_is_said_and_the_run_goes_on(
    measuring: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(module, "head_seconds", broken)
    caplog.set_level(logging.INFO, "xdm_ft")
    assert not run(recipe("methods=[erm]", "protocol.test_domains=[sketch]")).failed
    assert said(caplog).endswith("to train, the time could not be measured (RuntimeError: no such kernel)")


def test_the_parts_of_the_text() -> None:
    assert Estimate("cpu", 3600.0, 7200.0).text() == "about 3.0 h (features 60 min, training 2.0 h)"
    assert Estimate("cpu", 0.0, 41.0).text() == "about 40 s"
    assert Estimate("cpu", 1.0, 86400.0 * 3).text() == "about 3 days"
    document = Estimate("cpu").to_json()
    assert document["seconds"] is None and document["problem"] is None and document["text"] == "less than a minute"


@pytest.mark.parametrize(("has_bf16", "seconds", "found"), [(True, 1.0, 2.0), (True, 3.0, None), (False, 1.0, None)])
def test_bf16_is_named_where_it_is_twice_as_fast(
    has_bf16: bool, seconds: float, found: float | None, measuring: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image takes 4 s in fp32 and `seconds` in bf16, beside 1 s to decode it; `found`: in bf16, with decoding."""

    def image_seconds(plan: Plan, encoder: Any, accelerator: Any, frozen_in: str) -> ImageSeconds:
        return ImageSeconds(1.0, seconds if frozen_in == "bf16" else 4.0)

    monkeypatch.setattr(module, "own_cores", lambda: 1)
    monkeypatch.setattr(module, "image_seconds", image_seconds)
    monkeypatch.setattr(module, "cpu_has_bf16", lambda: has_bf16)
    plan, encoders = planned("methods=[erm]")
    images = len(plan.dataset)
    one = estimate(plan, encoders, CPU)
    assert one.features == 5.0 * images
    assert one.features_in_bf16 == (None if found is None else found * images)
    assert ("features.precision=bf16 would take " in one.text()) == (found is not None)
    assert one.to_json()["features_seconds_in_bf16"] == one.features_in_bf16
    already, _ = planned("methods=[erm]", "features.precision=bf16")
    assert estimate(already, encoders, CPU).features_in_bf16 is None
    monkeypatch.setattr(module, "SMALL_SECONDS", 1e9)
    assert "bf16" not in estimate(plan, encoders, CPU).text()


def test_known_models_take_no_time(measuring: None, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, encoders = planned("methods=[erm]")
    timed: list[int] = []
    real: Callable[..., Any] = module.head_seconds

    def noted(jobs: Any, *rest: Any) -> Any:
        timed.append(len(jobs))
        return real(jobs, *rest)

    monkeypatch.setattr(module, "head_seconds", noted)
    keys = [model.key for model in plan.models]
    line = first_line(plan, encoders, CPU, keys[:-1])
    assert f"1 of {len(keys)} models to train (erm: 1 model), about" in line and timed == [1]
