"""Equations (1) and (2): how much every feature dimension contributes to the logit of the true class, or domain."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def linear_scores(z: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """score(z^k) = ∂v/∂z^k · z^k of a linear head v = W z + b: the row of W at the target, times z. (1)(2)

    Exact, without a backward pass. A map is scored as under a head on its spatial mean, whose derivative is W/(hw) at
    every position; the scores of a channel are averaged over space, as `autograd_scores` does.

    Args:
        z: features, [B,K] or [B,K,h,w].
        weight: W of the class head or the domain head, [C,K].
        target: the true class or the true domain, int64 [B].

    Returns:
        float32 [B,K], without gradient.
    """
    z, row = z.detach().float(), F.embedding(target, weight.detach().float())  # row [B,K]
    if z.ndim == row.ndim:
        return row * z
    space = z.shape[row.ndim :].numel()  # hw
    return row * z.flatten(row.ndim).mean(-1) / space


def autograd_scores(z: Tensor, head: Callable[[Tensor], Tensor], target: Tensor) -> Tensor:
    """score(z^k) = ∂v/∂z^k · z^k for any differentiable head, by one backward pass. (1)(2)

    Args:
        z: features, [B,K] or [B,K,h,w].
        head: z → logits [B,C], every sample on its own (no batch statistics).
        target: the true class or the true domain, int64 [B].

    Returns:
        float32 [B,K], without gradient. The scores of a channel of a map are averaged over space.
    """

    def target_logits(features: Tensor) -> Tensor:
        return (
            head(features).gather(1, target[:, None]).sum()
        )  # samples are independent: the sum's gradient is each one's

    z = z.detach().float()
    with torch.no_grad(), torch.autocast(z.device.type, enabled=False):  # func.grad differentiates even so, by z alone
        score = torch.func.grad(target_logits)(z) * z  # like z
    return score.flatten(2).mean(-1) if score.ndim > 2 else score
