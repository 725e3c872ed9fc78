"""Equations (1) and (2): the contribution of every feature dimension to the logit of the true class or domain."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def linear_scores(z: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """score(z^k) = ∂v/∂z^k · z^k of a linear head v = W z + b: the target's row of W, times z. (1)(2)

    For maps the head acts on the spatial mean, so the derivative is W/(hw) at every position; the score of a channel is
    the mean over its positions.

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

    `head` maps z to logits [B,C] sample by sample (no batch statistics). A module is called with z in the dtype of its
    parameters. Other arguments and the result are those of `linear_scores`.
    """
    score = target_gradient(z, head, target) * z.detach().float()  # like z
    return score.flatten(2).mean(-1) if score.ndim > 2 else score


def target_gradient(z: Tensor, head: Callable[[Tensor], Tensor], target: Tensor) -> Tensor:
    """Returns ∂v/∂z of the target's logit v, float32 like z, without gradient. Arguments as for `autograd_scores`."""

    def target_logits(features: Tensor) -> Tensor:
        # samples are independent, so the gradient of the sum holds the gradient of each sample
        return head(features).gather(1, target[:, None]).sum()

    parameter = next(head.parameters(), None) if isinstance(head, nn.Module) else None
    z = z.detach() if parameter is None else z.detach().to(parameter.dtype)
    with torch.no_grad(), torch.autocast(z.device.type, enabled=False):  # func.grad differentiates by z all the same
        gradient: Tensor = torch.func.grad(target_logits)(z)
    return gradient.float()
