"""What holds for every method in both engines, over whatever lies in `xdm_ft/algorithms/` and `xdm_ft/sharpness/`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from loop_models import (
    SmallCNN,
    digit_annotations,
    digits,
    final_state,
    make_job,
    one_process,
    split,
    step_batch,
    train,
)
from own_training import under
from partnered import partnered
from torch import Tensor, nn

from xdm_ft.algorithms import Algorithm, Setup
from xdm_ft.algorithms.erm import ERM
from xdm_ft.encoders import Encoder, Portable
from xdm_ft.features.cache import Features
from xdm_ft.heads import Head
from xdm_ft.heads.cosine import Cosine
from xdm_ft.heads.linear import Linear
from xdm_ft.images.loader import ImageRows
from xdm_ft.images.transforms import evaluation_transform
from xdm_ft.protocol.samplers import PerDomainSampler
from xdm_ft.recipe.components import find, names
from xdm_ft.runtime.tensors import Batch, Criteria, Losses
from xdm_ft.sharpness import Sharpness
from xdm_ft.training import Job, Training
from xdm_ft.training.bank.step import stack, step
from xdm_ft.training.bank.train import train_chunk
from xdm_ft.training.end_to_end.gradients import StepGradients
from xdm_ft.training.end_to_end.model import EndToEnd, optimizer_of

FOUND = {name: find("algorithms", name) for name in names("algorithms")}
ALGORITHMS = {name: cls for name, cls in FOUND.items() if issubclass(cls, Algorithm)}
CACHED = {name: cls for name, cls in ALGORITHMS.items() if not cls.frozen_reason}
HEADS = {name: cls for name in names("heads") if (cls := find("heads", name)).trained}
SHARPNESS = {name: find("sharpness", name) for name in names("sharpness")}
STEPS = 20


class Pixels(Encoder):
    """The image at 8 × 8. Its one parameter is there to be trained, and does nothing at a learning rate of 1e-30."""

    width, normalize, pretraining, stage_names = 192, False, "none", ("stages.0", "stages.1")
    preprocessing = SmallCNN.preprocessing

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.stages = nn.Sequential(nn.Identity(), nn.AdaptiveAvgPool2d(8))

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.scale * self.stages(images).flatten(1)
        return features

    def identity(self) -> dict[str, object]:
        return {"component": "pixels"}

    def portable(self) -> Portable:
        return Portable({}, self.state_dict())


@cache
def table() -> Tensor:
    """Features [N,192] of the rows that the split uses; zero elsewhere."""
    rows = torch.cat([*split().train, split().evaluation["train_val"]])
    images = ImageRows(digits(), evaluation_transform(Pixels.preprocessing))
    features = torch.zeros(len(digits()), Pixels.width)
    with torch.no_grad():
        features[rows] = Pixels()(torch.stack([images[int(row)][0] for row in rows]))
    return features


def bank_state(job: Job, training: Training) -> dict[str, Tensor]:
    job = under(training.model_copy(update={"evaluate_every": job.setup.steps}), job)
    features, criteria = Features([table()]), Criteria(("train_val",), "accuracy")
    [trained] = train_chunk([job], features, digit_annotations(), criteria, record=lambda step, heads: None)
    return final_state(trained)


def loop_state(job: Job, training: Training, accelerator: Accelerator) -> dict[str, Tensor]:
    state = final_state(train(job, Pixels(), training.model_copy(update={"encoder_lr": 1e-30}), accelerator))
    return {name: value for name, value in state.items() if not name.startswith("encoder.")}


def job_of(
    make: type[Algorithm],
    steps: int = STEPS,
    sharpness: Sharpness | None = None,
    lr: float = 0.01,
    head: type[Head] = Linear,
) -> Job:
    return make_job(make, steps=steps, sharpness=sharpness, width=Pixels.width, lr=lr, head=head)


class Counts(ERM):
    """Plain ERM with a buffer that every pass would move."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))

    def loss(self, z: Tensor, batch: Batch, step: int) -> Losses:
        return super().loss(z, batch, step)._replace(buffers={"count": self.count + 1})


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    with one_process() as accelerator:
        yield accelerator


def test_there_are_methods_to_test() -> None:
    assert len(CACHED) >= 2 and len(ALGORITHMS) >= len(CACHED) and SHARPNESS and len(HEADS) >= 3


@pytest.mark.parametrize(
    ("name", "head"),
    [
        pytest.param(name, head, marks=() if name == "erm" or head == "linear" else pytest.mark.slow)
        for name in CACHED
        for head in HEADS
    ],
)
def test_both_engines_train_the_same_head_on_the_same_features(name: str, head: str, accelerator: Accelerator) -> None:
    training = Training(batch_size=8, optimizer="adam")
    job = job_of(ALGORITHMS[name], head=HEADS[head], lr=0.01 if head == "linear" else 0.001)
    cached, end_to_end = bank_state(job, training), loop_state(job, training, accelerator)
    assert cached.keys() == end_to_end.keys()
    for key, value in cached.items():
        torch.testing.assert_close(end_to_end[key], value, atol=1e-4, rtol=1e-4, msg=lambda text, k=key: f"{k}: {text}")


def batch_of(job: Job) -> Batch:
    rows = PerDomainSampler(job.split.train, 4, job.seed).indices(0, 1)[0]
    images = ImageRows(digits(), evaluation_transform(Pixels.preprocessing))
    x = torch.stack([images[int(row)][0] for row in rows])
    return Batch(
        x,
        torch.from_numpy(digits().labels)[rows],
        torch.from_numpy(digits().domains)[rows],
        rows,
        torch.arange(len(rows)),
    )


@pytest.mark.parametrize("number", [0, STEPS - 1])
@pytest.mark.parametrize("sharpness", SHARPNESS)
@pytest.mark.parametrize("make", [*ALGORITHMS.values(), Counts])
def test_a_second_pass_moves_no_buffer_again(
    make: type[Algorithm], sharpness: str, number: int, accelerator: Accelerator
) -> None:
    """End to end, in two micro-batches: buffers end where a step without sharpness leaves them."""
    buffers = []
    for used in (None, SHARPNESS[sharpness]()):
        job = job_of(make, sharpness=used)
        inner = EndToEnd(Pixels(), job.make(job.setup), "train").train()
        before = {name: value.clone() for name, value in inner.named_parameters()}
        by_parts = inner.algorithm.loss_over != "batch"
        passes = StepGradients(accelerator.prepare(inner), inner, accelerator, used, job.seed, by_parts)
        passes.run(step_batch(job, Training(batch_size=4, accumulation=2), accelerator, number), number)
        assert all(torch.equal(value, before[name]) for name, value in inner.named_parameters())
        buffers.append(dict(inner.algorithm.named_buffers()))
    assert make is not Counts or buffers[0]["count"] == 1
    assert all(torch.equal(value, buffers[1][name]) for name, value in buffers[0].items())


@pytest.mark.parametrize("number", [0, STEPS - 1])
@pytest.mark.parametrize("sharpness", SHARPNESS)
@pytest.mark.parametrize("make", [*CACHED.values(), Counts])
def test_a_second_pass_moves_no_buffer_again_in_the_bank(make: type[Algorithm], sharpness: str, number: int) -> None:
    buffers = []
    for used in (None, SHARPNESS[sharpness]()):
        job = job_of(make, sharpness=used)
        bank, batch = stack([under(Training(batch_size=4), job)], torch.device("cpu")), batch_of(job)
        cached = partnered(job.make(job.setup), batch._replace(x=table()[batch.index]), number)
        step(bank, Batch(**{name: field[None] for name, field in cached.fields().items()}), number)
        buffers.append(bank.buffers)
    assert make is not Counts or buffers[0]["count"] == 1
    assert all(torch.equal(value, buffers[1][name]) for name, value in buffers[0].items())


class Resets(ERM):
    """Plain ERM whose optimizer starts anew before the update of step 4."""

    def resets_optimizer(self, step: int) -> bool:
        return step == 4


def trained_by_hand(job: Job, optimizer: partial[torch.optim.Optimizer], reset_at: int | None) -> Tensor:
    """The head's weight after plain ERM on the cached features, with a new optimizer at `reset_at`."""
    algorithm = ERM(job.setup)
    current = optimizer(algorithm.parameters(), lr=job.training.lr)
    for number in range(job.setup.steps):
        rows = PerDomainSampler(job.split.train, 8, job.seed).indices(number, number + 1)[0]
        loss = F.cross_entropy(algorithm.head(table()[rows]), torch.from_numpy(digits().labels)[rows])
        current.zero_grad()
        loss.backward()
        if number == reset_at:
            current = optimizer(algorithm.parameters(), lr=job.training.lr)
        current.step()
    return algorithm.head.weight.detach()


@pytest.mark.parametrize("engine", ["bank", "loop"])
def test_both_engines_honour_amsgrad(engine: str, accelerator: Accelerator) -> None:
    training = Training(batch_size=8, optimizer="adam", amsgrad=True)
    job = make_job(ERM, steps=40, width=Pixels.width, weight_decay=0.0, lr=0.03)
    state = bank_state(job, training) if engine == "bank" else loop_state(job, training, accelerator)
    by_hand = trained_by_hand(job, partial(torch.optim.Adam, amsgrad=True), reset_at=None)
    without = trained_by_hand(job, torch.optim.Adam, reset_at=None)
    error, difference = ((found - by_hand).abs().max() for found in (state["head.weight"], without))
    assert error < difference / 10


def decayed_by_hand(job: Job, groups: list[dict[str, object]], cls: type[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """The parameters after plain ERM on the cached features with one of torch's optimizers."""
    algorithm = ERM(job.setup)
    own = dict(algorithm.named_parameters())
    by_name = [group | {"params": [own[name] for name in group["params"]]} for group in groups]
    optimizer = cls(by_name, lr=job.training.lr)
    for number in range(job.setup.steps):
        rows = PerDomainSampler(job.split.train, 8, job.seed).indices(number, number + 1)[0]
        optimizer.zero_grad()
        F.cross_entropy(algorithm.head(table()[rows]), torch.from_numpy(digits().labels)[rows]).backward()
        optimizer.step()
    return {name: value.detach() for name, value in own.items()}


@pytest.mark.parametrize("engine", ["bank", "loop"])
@pytest.mark.parametrize(("head", "others"), [(Linear, "head.bias"), (Cosine, "head.log_scale")])
def test_adamw_decays_weights_alone_in_both_engines(
    head: type[Head], others: str, engine: str, accelerator: Accelerator
) -> None:
    """Neither biases nor the temperature; adam's L2 penalty is of all of them, as before."""
    job = make_job(ERM, steps=8, width=Pixels.width, weight_decay=2.0, lr=0.02, head=head)
    weights = {"params": ["head.weight"], "weight_decay": 2.0}
    for name, cls, rest in (("adamw", torch.optim.AdamW, 0.0), ("adam", torch.optim.Adam, 2.0)):
        training = Training(batch_size=8, optimizer=name)
        state = bank_state(job, training) if engine == "bank" else loop_state(job, training, accelerator)
        groups = [weights, {"params": [others], "weight_decay": rest}]
        by_hand = decayed_by_hand(job, groups, cls)
        otherwise = decayed_by_hand(job, [weights, {"params": [others], "weight_decay": 2.0 - rest}], cls)
        for key, value in by_hand.items():
            torch.testing.assert_close(state[key], value, atol=1e-5, rtol=1e-4)
        assert (by_hand[others] - otherwise[others]).abs().max() > 1e-3


def test_what_adamw_decays_of_an_encoder() -> None:
    """Convolutions and matrices of heads; not batch norm, biases and temperatures. Other optimizers decay all."""
    for optimizer in ("adamw", "adam", "sgd"):
        job = make_job(ALGORITHMS["xdomainmix"], steps=9, head=Cosine)
        inner = EndToEnd(SmallCNN(), job.make(job.setup), "train")
        groups = optimizer_of(inner, Training(optimizer=optimizer, weight_decay=0.5)).param_groups
        decay = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
        found = {name: decay[id(parameter)] for name, parameter in inner.roles().main.items()}
        found |= {name: decay[id(parameter)] for name, parameter in inner.roles().auxiliary.items()}
        names = {"head.weight", "domain_head.weight", "encoder.layers.0.weight", "encoder.layers.3.weight"}
        if optimizer == "adamw":
            assert {name for name, value in found.items() if value == 0.5} == names
            assert {"head.log_scale", "domain_head.log_scale", "encoder.layers.1.weight"} <= found.keys() - names
        assert set(found.values()) == ({0.5, 0.0} if optimizer == "adamw" else {0.5})


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["bank", "loop"])
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_both_engines_honour_a_reset_of_the_optimizer(name: str, engine: str, accelerator: Accelerator) -> None:
    training = Training(batch_size=8, optimizer=name, momentum=0.9)
    job = make_job(Resets, steps=8, width=Pixels.width, weight_decay=0.0)
    state = bank_state(job, training) if engine == "bank" else loop_state(job, training, accelerator)
    classes = {"sgd": partial(torch.optim.SGD, momentum=0.9), "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    optimizer = partial(classes[name], weight_decay=0.0)
    by_hand = trained_by_hand(job, optimizer, reset_at=4)
    assert (by_hand - trained_by_hand(job, optimizer, reset_at=None)).abs().max() > 1e-3
    torch.testing.assert_close(state["head.weight"], by_hand, atol=1e-5, rtol=1e-4)


def test_the_table_holds_what_the_encoder_gives() -> None:
    batch = batch_of(job_of(ERM))
    with torch.no_grad():
        assert torch.equal(Pixels()(batch.x), table()[batch.index])
