"""Balanced class weights: their values, and training with them in both engines against loops written out."""

from __future__ import annotations

import copy
import dataclasses

import bank_problems
import loop_models
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from loop_models import SmallCNN, make_job, one_process, rows_of
from torch import Tensor, nn

from xdm_ft.algorithms import LossAverage
from xdm_ft.images.loader import ImageRows
from xdm_ft.images.transforms import evaluation_transform
from xdm_ft.protocol.samplers import sampler
from xdm_ft.training import Job, Training, balanced_class_weight

SGD = Training(batch_size=8, optimizer="sgd", momentum=0.0, encoder_lr=0.01)
WEIGHTS = [
    torch.tensor([0.2, 3.0, 1.0, 1.0, 0.5, 1.0, 2.0, 0.7, 5.0, 0.1]),
    torch.tensor([1.0, 1.0, 4.0, 0.3, 0.5, 0.9, 1.0, 0.2, 0.5, 8.0]),
]


def test_balanced_by_hand() -> None:
    labels = torch.tensor([0, 0, 0, 0, 2, 2, 3, 0])  # n = 8, three classes of five
    expected = torch.tensor([8 / (3 * 5), 0.0, 8 / (3 * 2), 8 / (3 * 1), 0.0])
    torch.testing.assert_close(balanced_class_weight(labels, 5), expected)
    assert balanced_class_weight(labels, 5).dtype == torch.float32


def test_balanced_is_scikit_learns() -> None:
    from sklearn.utils.class_weight import compute_class_weight

    labels = np.random.default_rng(0).choice(6, 500, p=[0.5, 0.3, 0.1, 0.05, 0.04, 0.01])
    theirs = compute_class_weight("balanced", classes=np.arange(6), y=labels)
    np.testing.assert_allclose(balanced_class_weight(torch.from_numpy(labels), 6).numpy(), theirs, rtol=1e-6)
    torch.testing.assert_close(
        balanced_class_weight(torch.from_numpy(labels), 6)[torch.from_numpy(labels)].mean(), torch.tensor(1.0)
    )


def weighted(job: Job, weight: Tensor, average: LossAverage) -> Job:
    return dataclasses.replace(job, setup=dataclasses.replace(job.setup, class_weight=weight, loss_average=average))


def loss_by_hand(logits: Tensor, y: Tensor, domain: Tensor, weight: Tensor, average: LossAverage) -> Tensor:
    if average == "sample":
        return F.cross_entropy(logits, y, weight=weight)
    own = [domain == d for d in domain.unique()]
    return torch.stack([F.cross_entropy(logits[o], y[o], weight=weight) for o in own]).mean()


@pytest.mark.parametrize("average", ["domain", "sample"])
def test_heads_of_a_bank_train_as_by_hand_each_with_its_weights(average: LossAverage) -> None:
    data, training = bank_problems.digits(), SGD.model_copy(update={"sampler": "class_balanced", "evaluate_every": 6})
    jobs = [
        weighted(bank_problems.job_of(held_out=h, seed=h, steps=6, lr=0.1), weight, average)
        for h, weight in enumerate(WEIGHTS)
    ]
    for job, weight, trained in zip(jobs, WEIGHTS, bank_problems.train(jobs, training), strict=True):
        head = job.make(job.setup).head
        rows = sampler("class_balanced", job.split.train, 8, job.seed, data.annotations.labels).indices(0, 6)
        for of_step in rows:
            logits = head(data.features[of_step])
            loss = loss_by_hand(
                logits, data.annotations.labels[of_step], data.annotations.domains[of_step], weight, average
            )
            gradients = torch.autograd.grad(loss, [head.weight, head.bias])
            with torch.no_grad():
                for parameter, gradient in zip((head.weight, head.bias), gradients, strict=True):
                    parameter -= job.training.lr * gradient
        selected = trained.selected["train_val"]
        assert selected.step == 6
        torch.testing.assert_close(selected.state["head.weight"], head.weight.detach(), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(selected.state["class_weight"], weight)


@pytest.mark.slow
@pytest.mark.parametrize("average", ["domain", "sample"])
def test_the_loop_trains_as_by_hand(average: LossAverage) -> None:
    job = weighted(make_job(steps=3, weight_decay=0.0), WEIGHTS[0], average)
    encoder, head = SmallCNN(), job.make(job.setup).head
    with one_process() as accelerator:
        got = loop_models.final_state(loop_models.train(job, encoder, SGD, accelerator, batch_norm="frozen"))
    model = nn.Sequential(copy.deepcopy(encoder), head).eval()
    images = ImageRows(loop_models.digits(), evaluation_transform(SmallCNN.preprocessing))
    of_encoder, of_head = list(model[0].layers.parameters()), list(head.parameters())
    optimizer = torch.optim.SGD(
        [{"params": of_encoder, "lr": SGD.encoder_lr}, {"params": of_head, "lr": job.training.lr}]
    )
    for step in range(3):
        rows = rows_of(job, SGD, step)
        labels, domains = (torch.from_numpy(of)[rows] for of in (images.dataset.labels, images.dataset.domains))
        logits = model(torch.stack([images[int(row)][0] for row in rows]))
        optimizer.zero_grad()
        loss_by_hand(logits, labels, domains, WEIGHTS[0], average).backward()
        optimizer.step()
    torch.testing.assert_close(got["head.weight"], head.weight.detach(), rtol=0, atol=1e-6)
    for name, value in model[0].state_dict().items():
        torch.testing.assert_close(got[f"encoder.{name}"], value, rtol=0, atol=1e-6)
