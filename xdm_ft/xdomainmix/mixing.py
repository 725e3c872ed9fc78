"""Equations (5) to (7): the augmented feature z̃."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xdm_ft.tensors import Parts
from xdm_ft.xdomainmix.partners import Partners
from xdm_ft.xdomainmix.stacking import runs_kernel, stacked


def mix(parts: Parts, partners: Partners, lam: Tensor, keep: Tensor) -> Tensor:
    """z̃ = Z̃_c,d + Z̃_¬c,d + Z_c,¬d + Z_¬c,¬d, without Z̃_c,d where it is discarded. (5)(6)(7)

    Z̃_c,d = λ1 Z_c,d + (1−λ1) Z_i c,d and Z̃_¬c,d = λ2 Z_¬c,d + (1−λ2) Z_j ¬c,d. A partner contributes its own part,
    cut by its own masks. A sample without a partner keeps its own part (λ = 1).

    Args:
        parts: parts of the whole batch, each [B,K] or [B,K,h,w].
        partners: x_i and x_j, as places in the batch.
        lam: λ1 and λ2, [B,2].
        keep: bool [B]; False drops Z̃_c,d.

    Returns:
        z̃, like a part. Gradients flow to the sample's own parts and to its partners'.
    """
    lam = torch.where(torch.stack((partners.has_same, partners.has_other), 1), lam, 1.0)
    mixed: Tensor = _Mix.apply(*parts, partners.same, partners.other, lam, keep)
    return mixed


def reference(parts: Parts, same: Tensor, other: Tensor, lam: Tensor, keep: Tensor) -> Tensor:
    """`mix` in plain torch, which the kernel must equal; `lam` is 1 for samples without a partner."""
    lam_1, lam_2, keep = _beside(parts.csds, lam, keep)
    csds = lam_1 * parts.csds + (1 - lam_1) * parts.csds[same]
    cgds = lam_2 * parts.cgds + (1 - lam_2) * parts.cgds[other]
    return torch.where(keep, csds, 0.0) + cgds + parts.csdg + parts.cgdg


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(*tensors: Tensor) -> Tensor:
        parts, (same, other, lam, keep) = Parts(*tensors[:4]), tensors[4:]
        if not all(runs_kernel(tensor, "cpu") for tensor in (*parts, lam)):
            return reference(parts, same, other, lam, keep)
        from xdm_ft.xdomainmix import _numba  # takes two seconds to import

        return _numba.mix(parts, same, other, lam, keep)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[4:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """z̃ is linear in the parts: the gradient of a part sums, over all z̃ that use it, gradient × its factor."""
        same, other, lam, keep = ctx.saved_tensors
        lam_1, lam_2, keep = _beside(gradient, lam, keep)
        kept = torch.where(keep, gradient, 0.0)
        csds = (lam_1 * kept).index_add(0, same, (1 - lam_1) * kept)
        cgds = (lam_2 * gradient).index_add(0, other, (1 - lam_2) * gradient)
        return csds, gradient, cgds, gradient, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor) -> tuple[Tensor, int]:
        """Runs H batches as one batch of H·B samples: head h's places start at h·B."""
        *parts, same, other, lam, keep = stacked(info, in_dims, tensors)  # each [H,B,…]
        heads, batch = same.shape
        first = torch.arange(heads, device=same.device)[:, None] * batch  # first place of every head
        given = (*parts, same + first, other + first, lam, keep)
        mixed: Tensor = _Mix.apply(*(tensor.flatten(0, 1) for tensor in given))
        return mixed.unflatten(0, (heads, batch)), 0


def _beside(part: Tensor, lam: Tensor, keep: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns λ1, λ2 and keep as [B,1,…], with as many axes as `part`."""
    space = (None,) * (part.ndim - 1)
    return lam[(..., 0, *space)], lam[(..., 1, *space)], keep[(..., *space)]
