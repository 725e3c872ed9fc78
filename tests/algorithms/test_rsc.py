"""RSC against the recorded training and against numpy's percentiles, sample by sample."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from recorded import SETUP, Recorded, close
from torch import Tensor

from xdm_ft.algorithms import Setup
from xdm_ft.algorithms.rsc import RSC, as_fraction
from xdm_ft.core import Batch, Task


def test_recorded_training() -> None:
    """Masks exactly, all else to rounding. The recorded code is the paper's."""
    recorded = Recorded("rsc.npz", after="_param")
    algorithm = RSC(
        Setup(SETUP.task, SETUP.width, SETUP.steps, 0, "sample"),
        feature_drop=float(recorded["drop_f"]),
        batch_drop=float(recorded["drop_b"]),
    )
    y = recorded.batch.y
    for step, z, losses in recorded.steps(algorithm):
        reuse = losses.first_pass_draws
        assert torch.equal(reuse["kept"], recorded["mask_f"][step].bool())
        assert torch.equal(reuse["spared"], recorded["mask_b"][step, :, 0].bool())
        mask = reuse["kept"] | reuse["spared"][:, None]
        assert torch.equal(mask, recorded["mask"][step].bool())
        close(z.detach(), recorded["all_f"][step], "features")
        close(algorithm.head.weight.detach()[y], recorded["all_g"][step], "gradient of the true class's logit")
        close(algorithm.head(z).detach(), recorded["all_p"][step], "logits")
        muted = algorithm.head(z * reuse["kept"]).detach()
        close(muted, recorded["all_p_muted"][step], "logits of muted features")
        close(algorithm.head(z * mask).detach(), recorded["all_p_muted_again"][step], "logits of the loss")
        fall = algorithm.true_probability(algorithm.head(z), y) - algorithm.true_probability(muted, y)
        close(fall.detach(), recorded["changes"][step], "fall")
        close(losses.total.detach(), recorded["loss"][step], f"loss of step {step}")
    assert step == 2


def by_hand(algorithm: RSC, batch: Batch, feature_drop: float, batch_drop: float) -> tuple[Tensor, Tensor]:
    """Masks [B,K] and losses [B]: gradients by autograd, percentiles by numpy in float64."""
    z = batch.x.clone().requires_grad_()
    logits = algorithm.head(z)
    gradient = torch.autograd.grad(logits.gather(1, batch.y[:, None]).sum(), z, retain_graph=True)[0].double().numpy()
    mask, falls = torch.ones_like(z), []
    for i, row in enumerate(gradient):
        mask[i] = torch.tensor(row < np.percentile(row, 100 * (1 - feature_drop)))
        muted = algorithm.head((z[i] * mask[i])[None])[0]
        falls.append((logits[i].softmax(0)[batch.y[i]] - muted.softmax(0)[batch.y[i]]).item())
    bound = np.percentile(np.array(falls), 100 * (1 - batch_drop))
    for i, fall in enumerate(falls):
        if fall < bound:
            mask[i] = 1
    return mask, F.cross_entropy(algorithm.head(batch.x * mask), batch.y, reduction="none")


@pytest.mark.parametrize("feature_drop, batch_drop", [(1 / 3, 1 / 3), (0.1, 1.0)])
def test_loop_over_samples(feature_drop: float, batch_drop: float) -> None:
    generator = torch.Generator().manual_seed(1)
    setup = Setup(Task(tuple("abcd"), tuple("xy")), 33, 10, 5)
    z = torch.relu(torch.randn(23, 33, generator=generator))
    y, domain = (torch.randint(0, high, (23,), generator=generator) for high in (4, 2))
    batch = Batch(z, y, domain, torch.arange(23), torch.arange(23))
    algorithm = RSC(setup, feature_drop=feature_drop, batch_drop=batch_drop)
    mask, per_sample = by_hand(algorithm, batch, feature_drop, batch_drop)
    losses = algorithm(z, batch, 0)
    assert torch.equal(losses.first_pass_draws["kept"] | losses.first_pass_draws["spared"][:, None], mask.bool())
    expected = algorithm.average(per_sample, batch)
    torch.testing.assert_close(losses.total, expected)
    parameters = list(algorithm.head.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(losses.total, parameters), torch.autograd.grad(expected, parameters), atol=1e-6, rtol=1e-5
    )


@pytest.mark.parametrize("width, muted", [(4, 2), (1024, 342), (1280, 427), (2048, 683)])
def test_a_third_is_a_third(width: int, muted: int) -> None:
    """Where a third of K−1 is a whole number the percentile is a feature's own gradient, which is muted too."""
    algorithm = RSC(Setup(SETUP.task, width, 10, 0))
    batch = Batch(torch.randn(6, width), torch.arange(6) % 3, torch.arange(6) % 3, torch.arange(6), torch.arange(6))
    kept = algorithm(batch.x, batch, 0).first_pass_draws["kept"]
    assert ((~kept).sum(1) == muted).all()
    row = algorithm.head.weight.detach()[0].double().numpy()
    assert (row < np.float32(np.percentile(row, 200 / 3))).sum() == width - muted  # numpy's, in the weights' precision
    assert as_fraction(1 / 3).denominator == 3 and as_fraction(0.25).denominator == 4


def test_one_sample_is_muted() -> None:
    algorithm, sample = RSC(SETUP), torch.randn(1, SETUP.width)
    batch = Batch(sample, torch.tensor([1]), torch.tensor([2]), torch.tensor([0]), torch.tensor([0]))
    losses = algorithm(sample, batch, 0)
    assert not losses.first_pass_draws["spared"].any()
    torch.testing.assert_close(
        losses.total, F.cross_entropy(algorithm.head(sample * losses.first_pass_draws["kept"]), batch.y)
    )
