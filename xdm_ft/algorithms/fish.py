"""Fish: makes the gradients of different domains agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from xdm_ft.algorithms import Setup
from xdm_ft.algorithms.erm import ERM
from xdm_ft.runtime.randomness import Stream, permutation


class Fish(ERM):
    """θ ← θ + ε (θ̃ − θ), θ̃ from θ by one optimizer step on each domain's loss in turn; ε is `meta_lr`.

    The domains come in random order, a step starts where the one before ended, and the optimizer keeps its state. To
    first order this minimises loss − γ Σ_{i≠j} G_i·G_j: it raises the inner products of the domains' gradients G.

    θ is all parameters, without batch-norm statistics. meta_lr = 0.5 is DomainBed's default (its code takes the domains
    in a fixed order); the paper tuned it per data set.
    """

    source = "Shi et al. 2022, Gradient Matching for Domain Generalization (ICLR), Algorithm 1 (Fish)"
    # DomainBed's range (hparams_registry.py)
    search_ranges = {"meta_lr": {"choice": (0.05, 0.1, 0.5)}}
    min_domains = 2
    pooled_reason = "its inner steps take one domain each; set training.sampler: per_domain"

    def __init__(
        self,
        setup: Setup,
        *,
        meta_lr: Annotated[
            float, Field(gt=0, le=1, description="ε, fraction of the inner steps' total change to keep; 1: all of it")
        ] = 0.5,
    ) -> None:
        super().__init__(setup)
        self.meta_lr: Tensor
        self.register_buffer("meta_lr", torch.tensor(meta_lr, dtype=torch.float32), persistent=False)

    @staticmethod
    def gradients_per_step(num_domains: int) -> int:
        """One per inner step; together the inner steps see as many images as one step of ERM."""
        return num_domains

    def update(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        step: int,
    ) -> Iterator[int | None]:
        before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        yield from self.order(step)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(meta_step(before[name], parameter, buffers["meta_lr"]))

    def order(self, step: int) -> list[int]:
        """Returns the order of the domains: the same for all seeds, as the heads of a bank step together."""
        return permutation(0, step, Stream.DOMAIN_ORDER, self.task.num_domains).tolist()


def meta_step(before: Tensor, inner: Tensor, meta_lr: Tensor) -> Tensor:
    """θ + ε (θ̃ − θ), with ε [], or [H] for H stacked models."""
    return before + meta_lr[(..., *(None for _ in before.shape[meta_lr.ndim :]))] * (inner - before)
