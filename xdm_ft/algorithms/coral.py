"""CORAL: features with the same mean and covariance in every domain."""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from xdm_ft.algorithms import Algorithm, Setup, linear
from xdm_ft.tensors import Batch, Losses


class CORAL(Algorithm):
    """loss = R + γ · mean over pairs of domains a, b of [1/K ‖μ_a − μ_b‖² + 1/K² ‖C_a − C_b‖²], R the risk.

    μ_d [K] and C_d [K,K] are the mean and the covariance (divided by n_d − 1) of the domain's features in the batch. A
    domain with fewer than two samples has no covariance and is in no pair; without a pair the penalty is 0.

    Deep CORAL (Sun & Saenko 2016, eq. 1) compares covariances of a source and a target by 1/(4K²) ‖C_a − C_b‖²; this
    is DomainBed's form for several training domains, with the means beside them and without the 1/4. γ = 1 is its
    default.
    """

    source = "Sun & Saenko 2016, Deep CORAL (ECCV workshops), eq. (1), as DomainBed has it for several domains"
    # DomainBed's range (hparams_registry.py)
    search_ranges = {"gamma": {"log_uniform": (1e-1, 1e1)}}
    min_domains = 2
    frozen_reason = (
        "its penalty is on the features, which a frozen encoder does not change, so it would be erm; "
        "set encoder.trainable: true, or use erm"
    )

    def __init__(
        self,
        setup: Setup,
        *,
        gamma: Annotated[float, Field(ge=0, description="γ, weight of the distance between domains")] = 1.0,
    ) -> None:
        super().__init__(setup)
        self.gamma: Tensor
        self.register_buffer("gamma", torch.tensor(gamma, dtype=torch.float32))

    def loss(self, z: Tensor, batch: Batch, step: int) -> Losses:
        risk = self.average(F.cross_entropy(linear(z, self.head), batch.y, reduction="none"), batch)
        distance = mean_distance(z, batch.domain, self.task.num_domains)
        total = risk + self.gamma * distance
        return Losses(total, auxiliary=total.new_zeros(()), logs={"risk": risk, "penalty": distance})


def mean_distance(z: Tensor, domain: Tensor, num_domains: int) -> Tensor:
    """The mean over pairs of domains of 1/K ‖μ_a − μ_b‖² + 1/K² ‖C_a − C_b‖², from z [B,K] and domain int64 [B].

    Computed as 2/(n − 1) Σ_a [1/K ‖μ_a − μ̄‖² + 1/K² ‖C_a − C̄‖²], n domains and μ̄, C̄ their means, in float64: near-equal
    domains differ by little beside their covariances, so these are subtracted before anything is squared. No [K,K]
    matrix takes shape: the centred samples span at most B dimensions, and in an orthonormal basis of their span every
    C_a is [B,B].
    """
    members = F.one_hot(domain, num_domains).double()  # [B,D]
    count = members.sum(0)  # [D]
    means = (members.T @ z.double()) / count.clamp(min=1)[:, None]  # [D,K]
    centred = z.double() - members @ means  # [B,K]
    # Held constant: another basis could only shorten C_a − C̄, and this one does not, so their gradients are the same
    basis = torch.linalg.qr(centred.detach().T)[0]  # [K,min(B,K)]
    own = centred @ basis  # [B,min(B,K)]
    weight = members / (count - 1).clamp(min=1)  # [B,D]
    covariances = (own.T * weight.T[:, None]) @ own  # [D,min(B,K),min(B,K)]
    several = (count > 1).double()  # [D]
    width = z.shape[1]
    spread = _spread(means, several) / width + _spread(covariances.flatten(1), several) / width**2
    return (2 * spread / (several.sum() - 1).clamp(min=1)).to(z.dtype)


def _spread(values: Tensor, taken: Tensor) -> Tensor:
    """Σ_d ‖v_d − v̄‖² of vectors [D,V], over the domains d where `taken` [D] is 1 and not 0; v̄ is their mean."""
    mean = taken @ values / taken.sum().clamp(min=1)
    return taken @ (values - mean).square().sum(1)
