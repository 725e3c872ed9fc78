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

    C_a never takes shape. With X_a the centred features, n_a × K, ⟨C_a, C_b⟩ = ‖X_a X_bᵀ‖² / ((n_a − 1)(n_b − 1)), so
    the products of all centred samples, [B,B], hold every covariance distance: B² K operations where D B K² were.
    """
    members = F.one_hot(domain, num_domains).to(z.dtype)  # [B,D]
    count = members.sum(0)  # [D]
    means = (members.T @ z) / count.clamp(min=1)[:, None]  # [D,K]
    centred = z - members @ means  # [B,K]
    weight = members / (count - 1).clamp(min=1)  # [B,D]
    inner = weight.T @ (centred @ centred.T).square() @ weight  # ⟨C_a, C_b⟩ [D,D]
    own = inner.diagonal()
    covariances = (own[:, None] + own - 2 * inner) / z.shape[1] ** 2  # [D,D]
    offsets = (means[:, None] - means).square().mean(-1)  # [D,D]
    several = count > 1
    pairs = (several[:, None] & several).triu(1)  # bool [D,D]
    return ((offsets + covariances) * pairs).sum() / pairs.sum().clamp(min=1)
