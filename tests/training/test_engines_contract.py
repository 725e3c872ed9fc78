"""Both engines train what the naive trainer trains: every method, every way to cut a batch, every part of an encoder.

Losses are those of the full batch, however many processes and micro-batches have parts of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import bank_problems
import pytest
import torch
from accelerate import Accelerator, debug_launcher
from accelerate.state import AcceleratorState
from bank_problems import job_of, under
from loop_models import (
    BlockCNN,
    SmallCNN,
    WithDomainHead,
    assert_close,
    batch_of,
    blocks,
    cached,
    digits,
    final_state,
    make_job,
    step_batch,
    train,
    vit,
)
from naive import State, mean, naive
from safetensors.torch import load_file, save_file
from scipy.stats import beta as beta_distribution
from torch import Tensor

from xdm_ft.algorithms import Algorithm, Setup
from xdm_ft.algorithms.erm import ERM
from xdm_ft.algorithms.fish import Fish
from xdm_ft.algorithms.irm import IRM
from xdm_ft.algorithms.lisa import LISA
from xdm_ft.algorithms.mixup import Mixup
from xdm_ft.algorithms.xdomainmix import XDomainMix
from xdm_ft.averaging import Averaging
from xdm_ft.averaging.bma import BMA
from xdm_ft.averaging.swad import SWAD
from xdm_ft.core import Batch
from xdm_ft.heads import Head
from xdm_ft.heads.cosine import Cosine
from xdm_ft.heads.linear import Linear
from xdm_ft.heads.mlp import MLP
from xdm_ft.recipe.components import find, names
from xdm_ft.sharpness import Sharpness
from xdm_ft.sharpness.sam import SAM
from xdm_ft.training import Job, Schedule, Training
from xdm_ft.training.bank.data import CachedData
from xdm_ft.training.end_to_end.gradients import StepGradients
from xdm_ft.training.end_to_end.model import EncoderPart, EndToEnd, optimizer_of
from xdm_ft.training.end_to_end.train import shut_down, take_step

ALGORITHMS = {name: cls for name in names("algorithms") if issubclass(cls := find("algorithms", name), Algorithm)}
CACHED = [name for name, cls in ALGORITHMS.items() if not cls.frozen_reason]
IN_PARTS = [name for name, cls in ALGORITHMS.items() if not cls.parts_reason]
HEADS = {name: cls for name in names("heads") if (cls := find("heads", name)).trained}
SHARPNESS = {name: find("sharpness", name) for name in names("sharpness")}
EARLY = {
    "xdomainmix": {"warmup_steps": 1, "quantile_steps": 1},
    "irm": {"anneal_steps": 1},
    "vrex": {"anneal_steps": 1},
}
ANY_VALLEY = SWAD(n_converge=1, tolerance_ratio=100.0)  # averages everything
STEPS = 3


def test_there_are_methods_to_test() -> None:
    assert len(CACHED) >= 8 and len(IN_PARTS) >= 10 and len(HEADS) >= 3 and len(SHARPNESS) >= 2


# --- the bank: three heads that differ in all that may differ

PLAIN = Training(optimizer="adam", amsgrad=True, schedule=Schedule(name="cosine", warmup_steps=1))
BANK = {
    "plain": (PLAIN, None, None),
    "sam, clip": (Training(optimizer="sgd", momentum=0.7, clip_norm=0.5), "sam", None),
    "swad": (Training(optimizer="adamw"), None, ANY_VALLEY),
    "bma": (PLAIN, None, BMA(beta=0.5)),
    "anchor": (Training(optimizer="sgd"), None, None),
    **{name: (PLAIN, name, None) for name in SHARPNESS if name != "sam"},
}


def bank_job(h: int, name: str, sharpness: str | None, averaging: Averaging | None, setup: dict[str, Any]) -> Job:
    job = job_of(
        ALGORITHMS[name], held_out=h, seed=h, steps=STEPS, lr=0.01 * (1 + h), weight_decay=0.1 * h,
        sharpness=SHARPNESS[sharpness](rho=0.05 * (1 + h)) if sharpness else None, setup=setup,
        **EARLY.get(name, {}),
    )  # fmt: skip
    return dataclasses.replace(job, averaging=BMA(beta=0.5 + 2 * h) if isinstance(averaging, BMA) else averaging)


def average_of(job: Job, states: list[State], first: int) -> State:
    """The mean from step `first` on; of BMA, weighted by scipy's density at the weights after 0, 1, …, T steps."""
    factors, count = None, len(states)
    if isinstance(job.averaging, BMA):
        beta = job.averaging.beta
        factors = [float(beta_distribution.pdf((number + 0.5) / count, beta, beta)) for number in range(count)]
    return mean(states[first:], job, factors)


def cached_batch(job: Job, training: Training, step: int) -> Batch:
    data, split = bank_problems.digits(), job.split
    rows = under(training, job).sampler(data.annotations.labels).indices(step, step + 1)[0]
    labels, domains = data.annotations.labels[rows], split.domain_of[data.annotations.domains[rows]]
    return Batch(data.features[rows], labels, domains, rows, torch.arange(len(rows)))


def bank_cases() -> list[tuple[str, str, str]]:
    of_all = "plain", "sam, clip", "swad", "anchor"
    cases = [(name, variant, "linear") for name, variant in product(CACHED, of_all)]
    cases += [("xdomainmix", "bma", "linear"), ("erm", "anchor", "cosine")]
    cases += [("erm", variant, "linear") for variant in BANK if variant not in of_all]
    return cases + [(name, "sam, clip", head) for name in ("erm", "xdomainmix") for head in HEADS if head != "linear"]


@pytest.mark.parametrize(("name", "variant", "head"), bank_cases())
def test_heads_of_a_bank(name: str, variant: str, head: str) -> None:
    training, sharpness, averaging = BANK[variant]
    training = training.model_copy(update={"batch_size": 8, "evaluate_every": STEPS})
    anchors = [torch.linspace(0.5, 20, 10) * (h + 1) if variant == "anchor" else None for h in range(3)]
    setups = [{"head": HEADS[head], "anchor": anchor} for anchor in anchors]
    jobs = [bank_job(h, name, sharpness, averaging, setup) for h, setup in enumerate(setups)]
    for job, trained in zip(jobs, bank_problems.train(jobs, training), strict=True):
        states = naive(job, training, partial(cached_batch, job, training))
        first = job.make(job.setup).first_selectable_step
        begin = 0 if variant == "bma" else first
        expected = states[-1] if job.averaging is None else average_of(job, states, begin)
        selected = trained.selected["train_val"]
        assert selected.step == STEPS and trained.job.key == job.key
        assert selected.hparams == ({"averaged_from": begin} if job.averaging else {})
        assert_close(selected.state, expected, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["class_balanced", "pooled"])
def test_class_weights_and_buffers_of_a_bank(kind: str) -> None:
    """Per head: weights of its own, and buffers that one of two passes moves."""
    training = Training(batch_size=9, sampler=kind, optimizer="sgd", evaluate_every=STEPS)
    weights = torch.rand(2, 10, generator=torch.Generator().manual_seed(0)) + 0.2
    for average, method in product(("domain", "sample"), (ERM, WithDomainHead)):
        if method is WithDomainHead and kind == "pooled":
            continue  # it divides by the number of samples of every domain
        jobs = [
            job_of(method, h, h, steps=STEPS, sharpness=SAM(), setup={"class_weight": weight, "loss_average": average})
            for h, weight in enumerate(weights)
        ]
        for job, trained in zip(jobs, bank_problems.train(jobs, training), strict=True):
            expected = naive(job, training, partial(cached_batch, job, training))[-1]
            assert_close(trained.selected["train_val"].state, expected, atol=1e-5)
            assert method is ERM or trained.selected["train_val"].state["taken"] == STEPS


@pytest.mark.parametrize("name", CACHED)
def test_soft_labels_in_a_bank(name: str) -> None:
    """Methods that read them train on them, weighted too; all others train as without them."""
    training = Training(batch_size=8, optimizer="sgd", evaluate_every=STEPS)
    hard, weight = bank_problems.digits(), torch.linspace(0.5, 2, 10)
    soft = dataclasses.replace(hard.annotations, soft_labels=bank_problems.soften(hard.annotations.labels, 10))
    jobs = [job_of(ALGORITHMS[name], h, h, steps=STEPS, setup={"class_weight": weight}, **EARLY.get(name, {}))
            for h in range(2)]  # fmt: skip
    data = CachedData(hard.features, soft)

    def batch_of_step(job: Job, step: int) -> Batch:
        batch = cached_batch(job, training, step)
        return batch._replace(targets=soft.soft_labels[batch.row]) if ALGORITHMS[name].reads_soft_labels else batch

    for job, trained in zip(jobs, bank_problems.train(jobs, training, data=data), strict=True):
        expected = naive(job, training, partial(batch_of_step, job))
        assert_close(trained.selected["train_val"].state, expected[-1], atol=1e-5)
        first = job.make(job.setup).first_selectable_step
        assert not torch.equal(expected[first - 1]["head.weight"], expected[-1]["head.weight"])


# --- end to end, in one process


class Case(NamedTuple):
    job: Job
    training: dict[str, Any] = {}
    encoder: str = "small"
    above: tuple[str, ...] = ("",)
    arguments: dict[str, Any] = {}
    part: Any = True
    atol: float = 1e-6


ENCODERS: dict[str, Callable[[], Any]] = {"small": SmallCNN, "cnn": BlockCNN, "vit": vit}
BASE = {"batch_size": 4, "encoder_lr": 0.003}
CLASS_WEIGHT = torch.linspace(0.2, 3, 10)
CUT_VIT = {"encoder": "vit", "part": blocks(2), "above": ("model.blocks.1.", "model.blocks.2.", "model.norm.")}
CUT_CNN = {"encoder": "cnn", "part": blocks(3), "above": ("stages.0.1.", "stages.1.", "norm."), "atol": 1e-5}
SGD = {"optimizer": "sgd", "encoder_lr": 0.01}
LOOP = {
    "adam, cosine, clip": Case(
        make_job(steps=4), {"schedule": Schedule(name="cosine", warmup_steps=2), "clip_norm": 0.5}
    ),
    "batch norm": Case(make_job(steps=3), {"amsgrad": True}, arguments={"batch_norm": "train"}),
    "adamw": Case(make_job(weight_decay=2.0, head=Cosine), {"optimizer": "adamw"}, atol=1e-5),
    "sam, domain head, parts": Case(
        make_job(WithDomainHead, sharpness=SAM(rho=0.1)), {"batch_size": 5, "accumulation": 2, "clip_norm": 0.5}
    ),
    "anchor, sam, parts": Case(make_job(sharpness=SAM(rho=0.1), anchor=CLASS_WEIGHT), SGD | {"accumulation": 2}),
    "sagm": Case(make_job(sharpness=SHARPNESS["sagm"]()), SGD),
    "class weights": Case(
        make_job(class_weight=CLASS_WEIGHT), SGD | {"sampler": "class_balanced", "batch_size": 8, "accumulation": 3}
    ),
    "class weights by sample": Case(
        make_job(class_weight=CLASS_WEIGHT, loss_average="sample"), SGD | {"sampler": "pooled", "accumulation": 2}
    ),
    "fish, parts": Case(make_job(Fish), {"accumulation": 2, "clip_norm": 0.5}),
    "mixup": Case(make_job(partial(Mixup, alpha=2.0), sharpness=SAM(rho=0.1)), SGD),
    "cutmix": Case(make_job(partial(LISA, mix="cutmix"), sharpness=SAM(rho=0.1)), SGD),
    "lisa, parts": Case(make_job(LISA), SGD | {"accumulation": 2}),
    "optimizer that is reset": Case(make_job(partial(IRM, anneal_steps=2, penalty_weight=1.0)), SGD),
    "unfreezing": Case(make_job(steps=5), {}, arguments={"unfreeze_at": 3, "batch_norm": "train"}),
    "unfreezing, sam": Case(make_job(sharpness=SAM(rho=0.1)), SGD, arguments={"unfreeze_at": 2}),
    "swad": Case(dataclasses.replace(make_job(steps=3), averaging=ANY_VALLEY)),
    "bma, unfreezing": Case(
        dataclasses.replace(make_job(steps=3), averaging=BMA(beta=0.5)), arguments={"unfreeze_at": 1}, atol=1e-5
    ),
    "vit, sam": Case(make_job(WithDomainHead, width=64, sharpness=SAM(rho=0.1)), SGD, **CUT_VIT),
    "vit, parts, xdomainmix": Case(
        make_job(partial(XDomainMix, warmup_steps=1, quantile_steps=1), width=64), SGD | {"accumulation": 2}, **CUT_VIT
    ),
    "cnn, batch norm": Case(make_job(steps=3, width=16), SGD, arguments={"batch_norm": "train"}, **CUT_CNN),
    "cnn, sam": Case(make_job(width=16, sharpness=SAM(rho=0.1)), SGD | {"clip_norm": 0.5}, **CUT_CNN),
}  # fmt: skip
QUICK = {"sam, domain head, parts", "fish, parts"}


LOOP_CASES = [
    pytest.param(name, reads, marks=() if name in QUICK else pytest.mark.slow)
    for name, case in LOOP.items()
    for reads in (("images",) if case.part is True else ("images", "cache"))
]


@pytest.mark.parametrize(("name", "reads"), LOOP_CASES)
def test_a_model_end_to_end(name: str, reads: str, accelerator: Accelerator, tmp_path: Path) -> None:
    case = LOOP[name]
    encoder, job, arguments = ENCODERS[case.encoder](), case.job, {"batch_norm": "frozen", **case.arguments}
    training = Training(**{**BASE, **case.training})
    part = EncoderPart(case.part) if reads == "images" else cached(encoder, case.part, tmp_path)
    start = {key: value.clone() for key, value in encoder.state_dict().items()}
    got = final_state(train(job, encoder, training, accelerator, part=part, **arguments))
    assert all(torch.equal(value, start[key]) for key, value in encoder.state_dict().items()), "a copy trains"
    by_hand = partial(batch_of, job, training, encoder=encoder)
    states = naive(job, training, by_hand, encoder, above=case.above, **arguments)
    begin = 0 if isinstance(job.averaging, BMA) else 1
    expected = states[-1] if job.averaging is None else average_of(job, states, begin)
    assert_close(got, expected, case.atol)
    trained = [
        key for key in expected if key.startswith("encoder.") and key.endswith(".weight") and "unreached" not in key
    ]
    assert trained and all(not torch.equal(got[key], start[key.removeprefix("encoder.")]) for key in trained)


# --- end to end, in 1 and 2 processes × 1 and 2 micro-batches: in float64, since masks are discontinuous

BATCH = {"per_domain": 7, "pooled": 22}  # neither divides by 4
FIRST, LAST = 8, 10  # after the warm-up of XDomainMix and the annealing of IRM


class Parts(NamedTuple):
    make: Callable[[Setup], Algorithm]
    sampler: str
    sharpness: Sharpness | None
    setup: dict[str, Any]
    clip_norm: float | None = None
    soft: bool = False  # with soft labels

    @property
    def job(self) -> Job:
        text = torch.randn(10, SmallCNN.width, generator=torch.Generator().manual_seed(1))
        return make_job(self.make, LAST, sharpness=self.sharpness, text_weight=text, weight_decay=0.0, **self.setup)

    def training(self, accumulation: int) -> Training:
        settings = {"batch_size": BATCH[self.sampler], "sampler": self.sampler, "accumulation": accumulation}
        return Training(**settings, optimizer="sgd", encoder_lr=0.01, clip_norm=self.clip_norm)


def parts_cases() -> dict[str, Parts]:
    """Every method on batches per domain, and on pooled ones with class weights or with the mean over samples."""
    cases, weighted, sam = {}, {"class_weight": torch.linspace(0.5, 2, 10)}, SAM(rho=0.1)
    for name in IN_PARTS:
        cls = ALGORITHMS[name]
        cases[f"{name} per domain"] = Parts(cls, "per_domain", None, {})
        cases[f"{name} sam, clip per domain"] = Parts(cls, "per_domain", sam, {}, 0.5)
        if not cls.pooled_reason:
            cases[f"{name} sam, clip weighted"] = Parts(cls, "pooled", sam, weighted, 0.5)
            cases[f"{name} by sample"] = Parts(cls, "pooled", None, {"loss_average": "sample"})
        if cls.reads_soft_labels:
            cases[f"{name} soft"] = Parts(cls, "per_domain", sam, weighted, soft=True)
        if name in ("erm", "xdomainmix", "groupdro"):
            cases[f"{name} anchored"] = Parts(cls, "per_domain", sam, {"anchor": torch.linspace(0.5, 2, 10)})
    heads: list[tuple[type[Head], SAM | None]] = [(MLP, SAM(rho=0.1)), (Cosine, None), (Linear, None)]
    for head, sharpness in heads:  # scores of both heads by autograd
        cases[f"xdomainmix {head.__name__}"] = Parts(XDomainMix, "per_domain", sharpness, {"head": head})
    return cases


def double(batch: Batch) -> Batch:
    return batch._replace(x=batch.x.double(), partner=None if batch.partner is None else batch.partner.double())


def walked(case: Parts, accelerator: Accelerator, accumulation: int) -> State:
    """The state after the steps FIRST … LAST − 1, and the loss of the last."""
    job, training = case.job, case.training(accumulation)
    inner = EndToEnd(double_cnn().double(), job.make(job.setup).double(), "frozen").train()
    by_parts = inner.algorithm.loss_over != "batch" and inner.algorithm.parts_add_up(case.sampler == "pooled")
    model, optimizer = accelerator.prepare(inner, optimizer_of(inner, under(training, job).training))
    gradients = StepGradients(model, inner, accelerator, job.sharpness, job.seed, by_parts)
    for step in range(FIRST, LAST):
        batch = step_batch(job, training, accelerator, step, case.soft)
        batch.parts[:] = [double(part) for part in batch.parts]
        losses = take_step(gradients, optimizer, batch, step, 1.0, training.clip_norm)
    return inner.weights() | {"loss": losses.total}


def double_cnn() -> SmallCNN:
    """All of it trains."""
    encoder = SmallCNN()
    del encoder.unreached
    return encoder


@contextmanager
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def walk_all(folder: Path) -> None:
    torch.set_num_threads(1)  # a forked child must not touch the parent's thread pool
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision="no")
    with float64():
        for number, (name, case) in enumerate(parts_cases().items()):
            file = f"{name}, {accelerator.process_index}.safetensors"
            save_file(walked(case, accelerator, accumulation=1 + number % 2), folder / file)
    shut_down(accelerator)


@pytest.fixture(scope="module")
def of_two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("walks")
    digits()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        debug_launcher(walk_all, (folder,), num_processes=2)
    return folder


@cache
def walked_naively(name: str) -> State:
    with float64():
        case = parts_cases()[name]
        job, training = case.job, case.training(1)
        batches = lambda step: double(batch_of(job, training, step, soft=case.soft))  # noqa: E731
        return naive(job, training, batches, double_cnn(), first=FIRST, double=True)[-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", parts_cases())
def test_micro_batches(name: str, accelerator: Accelerator) -> None:
    with float64():
        states = [walked(parts_cases()[name], accelerator, accumulation) for accumulation in (1, 2)]
    for state in states:
        assert_close(state, walked_naively(name), atol=1e-9, rtol=1e-6)
    torch.testing.assert_close(states[1]["loss"], states[0]["loss"], rtol=1e-6, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", parts_cases())
def test_two_processes(name: str, of_two_processes: Path) -> None:
    for process in (0, 1):
        state = load_file(of_two_processes / f"{name}, {process}.safetensors")
        assert_close(state, walked_naively(name), atol=1e-9, rtol=1e-6)


# --- what a step costs, and what it leaves as it is


class Counted(SmallCNN):
    calls: list[int] = []

    def forward(self, images: Tensor) -> Tensor:
        self.calls.append(len(images))
        return super().forward(images)


def step_gradients(
    make: Any, encoder: Any, accelerator: Accelerator, sharpness: Sharpness | None = None
) -> StepGradients:
    job = make_job(make, sharpness=sharpness, width=encoder.width)
    inner = EndToEnd(encoder, job.make(job.setup), "train").train()
    by_parts = inner.algorithm.loss_over != "batch"
    return StepGradients(accelerator.prepare(inner), inner, accelerator, sharpness, job.seed, by_parts)


def test_features_are_encoded_once_more_only_where_samples_are_compared(accelerator: Accelerator) -> None:
    """Under accumulation a loss over samples costs no further forward pass."""
    for make, passes_of_encoder in ((ERM, 1), (partial(XDomainMix, warmup_steps=0), 2)):
        gradients = step_gradients(make, Counted(), accelerator)
        Counted.calls.clear()
        gradients.run(step_batch(make_job(make), Training(batch_size=4, accumulation=2), accelerator, 0), 0)
        assert Counted.calls == [6, 6] * passes_of_encoder


@pytest.mark.parametrize("sharpness", [None, *(cls() for cls in SHARPNESS.values())])
def test_passes_restore_weights_and_repeat_dropout(sharpness: Sharpness | None, accelerator: Accelerator) -> None:
    """Bit for bit; batch-norm statistics and buffers move once, as without a second pass."""
    batch = step_batch(make_job(WithDomainHead), Training(batch_size=4, accumulation=2), accelerator, 0)
    states = []
    for used in (None, sharpness):
        gradients = step_gradients(WithDomainHead, SmallCNN(dropout=0.5), accelerator, used)
        before = {name: p.detach().clone() for name, p in gradients.inner.named_parameters()}
        gradients.run(batch, 0)
        assert all(torch.equal(p, before[name]) for name, p in gradients.inner.named_parameters())
        states.append(gradients.inner.weights())
        beside = gradients.inner.algorithm.domain_head.weight.grad
        states[-1]["gradient of the domain head"] = beside
    assert states[0]["taken"] == 1 and states[0]["encoder.layers.1.num_batches_tracked"] == 1
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


class Spy(SAM):
    def combine(self, first: State, second: State) -> State:
        self.given = first, second
        return super().combine(first, second)


def test_both_passes_drop_out_the_same(accelerator: Accelerator) -> None:
    spy = Spy()
    spy.rho = 0.0  # then both passes differ in nothing but their draws
    gradients, job = step_gradients(ERM, SmallCNN(dropout=0.5), accelerator, spy), make_job()
    batch = step_batch(job, Training(batch_size=4, accumulation=2), accelerator, 0)
    gradients.run(batch, 0)
    first, second = spy.given
    assert "encoder.layers.0.weight" in first and "encoder.unreached.weight" not in first
    assert all(torch.equal(first[name], second[name]) for name in first)
    gradients.run(batch, 1)
    assert not torch.equal(spy.given[0]["encoder.layers.0.weight"], first["encoder.layers.0.weight"])
