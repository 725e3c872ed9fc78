"""Equations (5) to (7): the augmented feature z̃."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xdm_ft.tensors import Parts
from xdm_ft.xdomainmix.partners import Partners
from xdm_ft.xdomainmix.stacking import stacked


def mix(parts: Parts, partners: Partners, lam: Tensor, keep: Tensor) -> Tensor:
    """z̃ = Z̃_c,d + Z̃_¬c,d + Z_c,¬d + Z_¬c,¬d, without Z̃_c,d where it is discarded. (5)(6)(7)

    Z̃_c,d = λ1 Z_c,d + (1−λ1) Z_i c,d and Z̃_¬c,d = λ2 Z_¬c,d + (1−λ2) Z_j ¬c,d. A partner contributes its own part,
    cut by its own masks. A sample without a partner keeps its own part (λ = 1).

    Args:
        parts: of the whole batch, each [...,B,K] or [...,B,K,h,w].
        partners: places in the batch, each [...,B].
        lam: λ1 and λ2, [...,B,2].
        keep: bool [...,B]; False drops Z̃_c,d.

    Returns:
        z̃, like a part. Gradients flow to the sample's own parts and to its partners'.
    """
    lam = torch.where(torch.stack((partners.has_same, partners.has_other), -1), lam, 1.0)
    mixed: Tensor = _Mix.apply(*parts, partners.same, partners.other, lam, keep)
    return mixed


def plainly(parts: Parts, same: Tensor, other: Tensor, lam: Tensor, keep: Tensor) -> Tensor:
    """The same in plain torch, of parts [B,…] and with λ = 1 where there is no partner: the oracle of the kernel."""
    lam_1, lam_2, keep = _beside(parts.csds, lam, keep)
    csds = lam_1 * parts.csds + (1 - lam_1) * parts.csds[same]
    cgds = lam_2 * parts.cgds + (1 - lam_2) * parts.cgds[other]
    return torch.where(keep, csds, 0.0) + cgds + parts.csdg + parts.cgdg


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(*tensors: Tensor) -> Tensor:
        *given, same, other, lam, keep = one_batch(*tensors)
        parts = Parts(*given)
        if parts.csds.device.type == "cpu" and all(tensor.dtype == torch.float32 for tensor in (*parts, lam)):
            from xdm_ft.xdomainmix import _numba  # takes half a second to import

            mixed = _numba.mix(parts, same, other, lam, keep)
        else:
            mixed = plainly(parts, same, other, lam, keep)
        return mixed.view(tensors[0].shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[4:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """z̃ is linear in the parts: each receives the gradient times its factor, a partner's part from all it serves."""
        flat, same, other, lam, keep = one_batch(gradient, *ctx.saved_tensors)
        lam_1, lam_2, keep = _beside(flat, lam, keep)
        kept = torch.where(keep, flat, 0.0)
        csds = (lam_1 * kept).index_add(0, same, (1 - lam_1) * kept)
        cgds = (lam_2 * flat).index_add(0, other, (1 - lam_2) * flat)
        return csds.view(gradient.shape), gradient, cgds.view(gradient.shape), gradient, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor) -> tuple[Tensor, int]:
        return _Mix.apply(*stacked(info, in_dims, tensors)), 0


def one_batch(*tensors: Tensor) -> list[Tensor]:
    """The batches of many heads as one, [...,B,…] → [N,…]; the places in it count on from head to head.

    The last four tensors are those that `mix` calls same, other, lam and keep.
    """
    batch, axes = tensors[-1].shape[-1], tensors[-1].ndim
    *features, same, other, lam, keep = (tensor.flatten(0, axes - 1) for tensor in tensors)
    first = torch.arange(len(same), device=same.device) // batch * batch  # the first place of the sample's head
    return [*features, same + first, other + first, lam, keep]


def _beside(part: Tensor, lam: Tensor, keep: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """λ1, λ2 and keep as [B,1,…], with the axes of `part`."""
    space = (None,) * (part.ndim - 1)
    return lam[(..., 0, *space)], lam[(..., 1, *space)], keep[(..., *space)]
