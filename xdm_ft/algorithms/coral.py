"""CORAL: penalises differences between the domains' feature means and covariances."""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from xdm_ft.algorithms import Algorithm, Setup
from xdm_ft.core import Batch, Losses


class CORAL(Algorithm):
    """loss = R + γ · mean over pairs of domains a, b of [1/K ‖μ_a − μ_b‖² + 1/K² ‖C_a − C_b‖²], R the risk.

    μ_d [K] and C_d [K,K] are the mean and the covariance (divided by n_d − 1) of the domain's features in the batch. A
    domain with fewer than two samples has no covariance and is in no pair; without a pair the penalty is 0.

    Deep CORAL (Sun & Saenko 2016, eq. 1) compares the covariances of a source and a target by 1/(4K²) ‖C_a − C_b‖².
    This is DomainBed's form for several training domains: it compares means too and omits the 1/4. γ = 1 is its
    default.
    """

    source = "Sun & Saenko 2016, Deep CORAL (ECCV workshops), eq. (1), as DomainBed has it for several domains"
    # DomainBed's range (hparams_registry.py)
    search_ranges = {"gamma": {"log_uniform": (1e-1, 1e1)}}
    min_domains = 2
    reads_soft_labels = True
    frozen_reason = (
        "its penalty changes only the encoder, so it equals erm on a frozen one; set encoder.trainable: true, "
        "or use erm"
    )

    def __init__(
        self,
        setup: Setup,
        *,
        gamma: Annotated[float, Field(ge=0, description="γ, weight of the penalty")] = 1.0,
    ) -> None:
        super().__init__(setup)
        self.gamma: Tensor
        self.register_buffer("gamma", torch.tensor(gamma, dtype=torch.float32))

    def loss(self, z: Tensor, batch: Batch, step: int | Tensor) -> Losses:
        risk = self.average(F.cross_entropy(self.logits(z), self.class_target(batch), reduction="none"), batch)
        distance = mean_distance(z, batch.domain, self.task.num_domains)
        total = risk + self.gamma * distance
        return Losses(total, auxiliary=total.new_zeros(()), logs={"risk": risk, "penalty": distance})


def mean_distance(z: Tensor, domain: Tensor, num_domains: int) -> Tensor:
    """Returns the mean over pairs of domains of 1/K ‖μ_a − μ_b‖² + 1/K² ‖C_a − C_b‖², from z [B,K], domain int64 [B].

    Computed as 2/(n − 1) Σ_a [1/K ‖μ_a − μ̄‖² + 1/K² ‖C_a − C̄‖²], with the means μ̄, C̄ over the n domains, in float64.
    Matrices are subtracted before they are squared, as near-equal domains differ by little compared with their
    covariances. No [K,K] matrix is formed: the centred samples span at most B dimensions, and in an orthonormal basis
    of this span every C_a is [B,B].
    """
    members = F.one_hot(domain, num_domains).double()  # [B,D]
    count = members.sum(0)  # [D]
    means = (members.T @ z.double()) / count.clamp(min=1)[:, None]  # [D,K]
    centred = z.double() - members @ means  # [B,K]
    # detached: C_a − C̄ lies in the span of the basis, so a small turn of it changes the norm in second order only
    basis = torch.linalg.qr(centred.detach().T)[0]  # [K,min(B,K)]
    coordinates = centred @ basis  # [B,min(B,K)]
    weight = members / (count - 1).clamp(min=1)  # [B,D]
    covariances = (coordinates.T * weight.T[:, None]) @ coordinates  # [D,min(B,K),min(B,K)]
    several = (count > 1).double()  # [D]
    width = z.shape[1]
    spread = _spread(means, several) / width + _spread(covariances.flatten(1), several) / width**2
    return (2 * spread / (several.sum() - 1).clamp(min=1)).to(z.dtype)


def _spread(values: Tensor, taken: Tensor) -> Tensor:
    """Returns Σ_d ‖v_d − v̄‖² of vectors [D,V] over the domains d with `taken` [D] = 1 (else 0); v̄ is their mean."""
    mean = taken @ values / taken.sum().clamp(min=1)
    return taken @ (values - mean).square().sum(1)
