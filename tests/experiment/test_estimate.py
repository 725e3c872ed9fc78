"""The estimate of a run's time: nothing is changed by it, small runs are not measured, and problems are named."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_runs import recipe

from xdm_ft.cli.library import run
from xdm_ft.experiment import estimate as module
from xdm_ft.experiment.estimate import ImageSeconds, TimeEstimate, estimate, first_line
from xdm_ft.experiment.plan import make_plan, read_data
from xdm_ft.experiment.prepare import build_encoders
from xdm_ft.features.extract import cached_images
from xdm_ft.report.comparisons import _wall_seconds

pytestmark = pytest.mark.usefixtures("small_pacs")
CPU = SimpleNamespace(device=torch.device("cpu"), num_processes=1, autocast=lambda: torch.enable_grad())
SKETCH = "methods=[erm]", "protocol.test_domains=[sketch]"


@pytest.fixture
def measuring(monkeypatch):
    monkeypatch.setattr(module, "SMALL_SECONDS", 0.0)
    monkeypatch.setattr(module, "TIMING_SECONDS", 0.01)
    monkeypatch.setattr(module, "own_cores", lambda: 1)


def planned(*overrides):
    made = recipe(*overrides)
    made, encoders = build_encoders(made)
    return make_plan(made, read_data(made)), encoders


def first_message(caplog):
    """The first line of a run, after warnings about its data."""
    return next(record.getMessage() for record in caplog.records if record.levelno == logging.INFO)


@pytest.mark.slow
def test_small_runs_are_not_measured(monkeypatch, caplog):
    def measured(*_, **__):
        raise AssertionError("it is small")

    for name in ("head_seconds", "image_seconds"):
        monkeypatch.setattr(module, name, measured)
    plan, encoders = planned()
    assert estimate(plan, encoders, CPU).text() == "less than a minute"
    caplog.set_level(logging.INFO, "xdm_ft")
    made = recipe(*SKETCH)
    run(made)
    line = first_message(caplog)
    assert line.startswith("cpu (") and line.endswith("1 model to train, less than a minute")
    caplog.clear()
    run(made)
    assert first_message(caplog).endswith(": nothing of the estimate is left to train")
    # of the cached images, all are counted, and none under other settings
    for decoder, count in ((plan.dataset.decoder, len(plan.dataset)), ("another decoder", 0)):
        assert cached_images(encoders[None], decoder, made.features, "none", CPU.device) == [count]


@pytest.mark.parametrize(
    "overrides",
    [
        ("methods=[erm,vrex]",),
        ("methods=[erm,fish]", "training.steps=3", "training.evaluate_every=3"),
        ("encoder.trainable=true", "methods=[erm,linear_probe]", "search={trials: 2, preset: domainbed}"),
        ("encoder.trainable={blocks: 1}", "methods=[erm+sam]"),
    ],
)
def test_measuring_changes_nothing(measuring, overrides):
    def state():
        files = {str(path): path.stat().st_mtime_ns for path in Path().rglob("*")}
        weights = {name: value.tolist() for name, value in encoders[None].state_dict().items()}
        return files, weights, torch.get_rng_state().tolist(), torch.get_num_threads()

    plan, encoders = planned(*overrides)
    before, made = state(), estimate(plan, encoders, CPU)
    assert state() == before
    assert made.problem is None and made.seconds is not None and 0 < made.seconds < 600
    assert made.features > 0 and made.training > 0
    longer, _ = planned(*overrides, "training.steps=100000")
    assert estimate(longer, encoders, CPU).training > 3 * made.training


@pytest.mark.parametrize(("use", "before"), [("cache", 0.0), ("compute", 0.5 + 2.0)])
def test_what_lies_below_a_cut_is_paid_once_or_at_every_step(use, before, measuring, monkeypatch):
    """Two cuts, and SAM above one of them; decoding takes one process of one core 0.5 s."""
    speed = 1e9  # operations per second
    cut = ImageSeconds(decode=0.5, below=2.0, forward=3.0, train=10.0, speed=speed)

    def image_seconds(plan, encoder, accelerator, frozen_in=None):
        return ImageSeconds(0.5, 2.0, speed=speed) if frozen_in else cut

    monkeypatch.setattr(module, "image_seconds", image_seconds)
    one, two = "{name: erm, trainable: {blocks: 1}}", "{name: sam, trainable: {blocks: 2}}"
    plan, encoders = planned(f"methods=[{one}, {two}]", f"features.cut={use}", "protocol.test_domains=[sketch]")
    made = estimate(plan, encoders, CPU)
    assert made.features == pytest.approx(2 * len(plan.dataset) * (0.5 + 2.0) if use == "cache" else 0.0)
    (split,) = plan.splits
    assert plan.rules == ("train_val", "oracle")  # both measure at every evaluation, and all images at the end
    sizes = {name: len(rows) for name, rows in split.evaluation.items()}
    looks = 5 * (sizes["train_val"] + sizes["test_val"]) + 2 * sum(sizes.values())
    steps = 10 * 12  # steps × images
    expected = steps * (before + 10.0) + steps * (before + 20.0) + 2 * looks * (before + 3.0)
    assert made.training == pytest.approx(expected + 2 * module.SECONDS_PER_MODEL)
    # a GPU of 10⁴ times the speed decodes as slowly, and encodes meanwhile
    images = 2 * len(plan.dataset) if use == "cache" else 2 * (steps + looks)
    assert made.with_gpu == pytest.approx(0.5 * images + 2 * module.SECONDS_PER_MODEL)


def test_operations_are_two_per_weight_and_place():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.Flatten(), torch.nn.Linear(8 * 16, 5))
    assert module._operations(model, torch.zeros(2, 3, 4, 4)) == 2 * (3 * 8 * 9 * 16 + 8 * 16 * 5)


def test_a_gpu_is_named_where_a_cpu_takes_long():
    assert (
        TimeEstimate("cpu", 60.0, 7200.0, with_gpu=300.0).text()
        == "about 2.0 h (computed for a GPU of 10 TFLOP/s: 5 min)"
    )
    assert TimeEstimate("cpu", 60.0, 400.0, with_gpu=30.0).text() == "about 8 min (features 60 s, training 7 min)"
    assert (
        "GPU" not in TimeEstimate("cpu", 60.0, 7200.0, with_gpu=5000.0).text() + TimeEstimate("x", 1.0, 7200.0).text()
    )


def test_what_can_not_be_measured_is_named_and_the_run_is_done(measuring, monkeypatch, caplog):
    def broken(*_):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(module, "head_seconds", broken)
    caplog.set_level(logging.INFO, "xdm_ft")
    assert not run(recipe(*SKETCH)).failed
    expected = "to train, the time could not be measured (RuntimeError: no such kernel)"
    assert first_message(caplog).endswith(expected)


def test_pieces_side_by_side_divide_the_time_of_a_table():
    def seconds(*runs, **environment):
        keys = "method", "train_seconds", "trainable"
        every = [SimpleNamespace(**dict(zip(keys, run, strict=True))) for run in runs]
        return _wall_seconds(SimpleNamespace(results={"environment": environment}, every=every))

    cpu = {"device": "cpu", "processes": 1, "threads": 2}
    chunk, other, deep = [("erm", 5.0, False)] * 2, ("linear_probe", 20.0, False), ("erm last", 7.0, True)
    assert seconds(*chunk, other, deep, **cpu) == 15 + 7
    assert seconds(*chunk, **cpu) == 10, "heads that train together are one piece"
    assert seconds(*chunk, other, deep, **cpu | {"device": "cuda"}) == 30 + 7


def test_known_models_take_no_time(measuring, monkeypatch):
    plan, encoders = planned("methods=[erm]")
    timed, head_seconds = [], module.head_seconds
    monkeypatch.setattr(
        module, "head_seconds", lambda jobs, *rest: timed.append(len(jobs)) or head_seconds(jobs, *rest)
    )
    keys = [model.key for model in plan.models]
    line = first_line(plan, encoders, CPU, keys[:-1])
    assert f"1 of {len(keys)} models to train (erm: 1 model), about" in line and timed == [1]
