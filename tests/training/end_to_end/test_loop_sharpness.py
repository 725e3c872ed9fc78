"""Sharpness-aware steps of the loop: two passes over the same micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping

import pytest
import torch
from accelerate import Accelerator
from loop_models import SmallCNN, WithDomainHead, final_state, make_job, one_process, step_batch, train
from torch import Tensor, nn

from xdm_ft.algorithms import Algorithm
from xdm_ft.algorithms.erm import ERM
from xdm_ft.algorithms.xdomainmix import XDomainMix
from xdm_ft.encoders.timm import Timm
from xdm_ft.images.transforms import PreprocessingOverrides
from xdm_ft.runtime.tensors import Batch, Losses
from xdm_ft.sharpness import Tensors
from xdm_ft.sharpness.sam import SAM
from xdm_ft.training import Job, Training
from xdm_ft.training.end_to_end.batches import StepBatch
from xdm_ft.training.end_to_end.gradients import StepGradients
from xdm_ft.training.end_to_end.model import EndToEnd


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    with one_process() as accelerator:
        yield accelerator


def sam_by_hand(
    job: Job, encoder: SmallCNN, training: Training, rho: float, accelerator: Accelerator
) -> dict[str, Tensor]:
    """SAM over encoder and class head, the domain head beside it; batch norm in eval mode throughout."""
    encoder, algorithm = copy.deepcopy(encoder), job.make(job.setup)
    main = [*encoder.layers.parameters(), *algorithm.head.parameters()]
    domain_head = list(algorithm.domain_head.parameters())
    groups = [
        {"params": main[:-2], "lr": training.encoder_lr},
        {"params": main[-2:], "lr": job.training.lr},
        {"params": domain_head, "lr": job.training.lr},
    ]
    optimizer = torch.optim.Adam(groups, weight_decay=job.training.weight_decay)

    def gradients(batch: Batch, step: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
        losses = algorithm(encoder(batch.x), batch, step)
        of_main = list(torch.autograd.grad(losses.total, main, retain_graph=True))
        return of_main, list(torch.autograd.grad(losses.auxiliary, domain_head)), losses.buffers["memory"]

    for step in range(job.setup.steps):
        batch = step_batch(job, training.model_copy(update={"accumulation": 1}), accelerator, step).parts[0]
        first, auxiliary, memory = gradients(batch, step)
        norm = torch.cat([g.flatten() for g in first]).norm()
        before = [p.detach().clone() for p in main]
        with torch.no_grad():
            for parameter, gradient in zip(main, first, strict=True):
                parameter += rho * gradient / norm
        second, _, _ = gradients(batch, step)
        with torch.no_grad():
            for parameter, value in zip(main, before, strict=True):
                parameter.copy_(value)
        norm = torch.cat([g.flatten() for g in second]).norm()
        scale = min(1.0, training.clip_norm / float(norm + 1e-6))
        for parameter, gradient in zip([*main, *domain_head], [*[scale * g for g in second], *auxiliary], strict=True):
            parameter.grad = gradient
        optimizer.step()
        algorithm.memory.copy_(memory)
        algorithm.taken += 1
    return {f"encoder.{name}": value for name, value in encoder.state_dict().items()} | algorithm.state_dict()


@pytest.mark.slow
def test_equals_sam_written_out(accelerator: Accelerator) -> None:
    training = Training(batch_size=4, accumulation=2, clip_norm=0.5, encoder_lr=0.003)
    job, encoder = make_job(WithDomainHead, steps=5, sharpness=SAM(rho=0.1)), SmallCNN()
    got = final_state(train(job, encoder, training, accelerator, batch_norm="frozen"))
    expected = sam_by_hand(job, encoder, training, 0.1, accelerator)
    assert got.keys() == expected.keys()
    for name in got:
        torch.testing.assert_close(
            got[name], expected[name], rtol=0, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
        )
    erm = final_state(train(make_job(WithDomainHead, steps=5), encoder, training, accelerator, batch_norm="frozen"))
    assert (got["encoder.layers.0.weight"] - erm["encoder.layers.0.weight"]).abs().max() > 1e-4


class Spy(SAM):
    """Remembers what it was given."""

    def __init__(self) -> None:
        super().__init__(rho=0.1)
        self.given: list[Tensors] = []

    def combine(self, first: Tensors, second: Tensors) -> Tensors:
        self.given = [first, second]
        return super().combine(first, second)


def passes_of(
    make: type[Algorithm], encoder: nn.Module, accelerator: Accelerator, sharpness: SAM | None
) -> tuple[StepGradients, StepBatch]:
    job, training = make_job(make, steps=4), Training(batch_size=4, accumulation=2)
    inner = EndToEnd(copy.deepcopy(encoder), job.make(job.setup), "train").train()
    by_parts = inner.algorithm.loss_over != "batch"
    passes = StepGradients(accelerator.prepare(inner), inner, accelerator, sharpness, job.seed, by_parts)
    return passes, step_batch(job, training, accelerator, 0)


def test_weights_are_restored_exactly_and_statistics_and_buffers_change_once(accelerator: Accelerator) -> None:
    states = []
    for sharpness in (None, SAM(rho=0.1)):
        passes, batch = passes_of(WithDomainHead, SmallCNN(), accelerator, sharpness)
        before = {name: p.detach().clone() for name, p in passes.inner.named_parameters()}
        passes.run(batch, 0)
        assert all(torch.equal(p, before[name]) for name, p in passes.inner.named_parameters())
        states.append(passes.inner.weights())
    assert states[0]["taken"] == 1 and states[0]["encoder.layers.1.num_batches_tracked"] == 1
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


def test_the_domain_head_keeps_the_gradient_of_the_first_pass(accelerator: Accelerator) -> None:
    gradients = []
    for sharpness in (None, SAM(rho=0.1)):
        passes, batch = passes_of(WithDomainHead, SmallCNN(), accelerator, sharpness)
        passes.run(batch, 0)
        gradients.append({name: p.grad for name, p in passes.inner.algorithm.named_parameters()})
    assert torch.equal(gradients[0]["domain_head.weight"], gradients[1]["domain_head.weight"])
    assert not torch.equal(gradients[0]["head.weight"], gradients[1]["head.weight"])


def test_both_passes_drop_out_the_same(accelerator: Accelerator) -> None:
    spy = Spy()
    spy.rho = 0.0  # then both passes differ in nothing but their draws
    passes, batch = passes_of(ERM, SmallCNN(dropout=0.5), accelerator, spy)
    passes.run(batch, 0)
    first, second = spy.given
    assert "encoder.layers.0.weight" in first and "encoder.unreached.weight" not in first
    assert all(torch.equal(first[name], second[name]) for name in first)
    passes.run(batch, 1)
    assert not torch.equal(spy.given[0]["encoder.layers.0.weight"], first["encoder.layers.0.weight"])


def test_the_second_pass_reuses_what_the_first_returned(accelerator: Accelerator) -> None:
    reused: list[dict[str, Tensor]] = []

    class Holds(ERM):
        def loss(self, z: Tensor, batch: Batch, step: int) -> Losses:
            return super().loss(z, batch, step)._replace(first_pass_draws={"mask": z > 0.1})

        def loss_at_perturbed(self, z: Tensor, batch: Batch, step: int, masks: Mapping[str, Tensor]) -> Losses:
            reused.append({"given": masks["mask"], "now": z > 0.1})
            return super().loss(z, batch, step)

    passes, batch = passes_of(Holds, SmallCNN(), accelerator, SAM(rho=0.5))
    passes.run(batch, 0)
    assert len(reused) == 2
    with torch.no_grad():
        first = passes.inner.encoder(batch.parts[0].x) > 0.1
    assert torch.equal(reused[0]["given"], first) and not torch.equal(reused[0]["now"], first)


@pytest.mark.slow
def test_xdomainmix_with_sam_trains_a_timm_model(accelerator: Accelerator) -> None:
    recorded: dict[int, dict[str, float]] = {}
    torch.manual_seed(0)
    encoder = Timm(model="test_resnet", preprocessing=PreprocessingOverrides(size=32, crop=1.0))
    job = make_job(
        lambda setup: XDomainMix(setup, warmup_steps=10), steps=40, sharpness=SAM(), width=encoder.width, lr=0.003
    )
    training = Training(batch_size=16, encoder_lr=0.003, evaluate_every=10)
    trained = train(
        job, encoder, training, accelerator, record=lambda step, models: recorded.update({step: models[0][1]})
    )
    assert trained.failure is None and trained.mixed_steps == 30
    assert trained.selected["train_val"].step > 10
    assert recorded[40]["loss"] < 0.8 * recorded[10]["loss"]
    assert recorded[40]["without_same_partner"] < 0.5


@pytest.mark.slow
def test_mixed_steps_are_those_taken_where_patience_ends_the_training(accelerator: Accelerator) -> None:
    job = make_job(lambda setup: XDomainMix(setup, warmup_steps=2), steps=10, lr=0.0, weight_decay=0.0)
    training = Training(batch_size=4, encoder_lr=1e-30, evaluate_every=1, patience=1)
    trained = train(job, SmallCNN(), training, accelerator, batch_norm="frozen")
    assert trained.stopped_at == 4, "step 3 is the first that can be selected"
    assert trained.mixed_steps == 2
