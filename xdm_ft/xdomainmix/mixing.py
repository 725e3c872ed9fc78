"""Equations (5) to (7): the augmented feature z̃."""

from __future__ import annotations

import torch
from torch import Tensor

from xdm_ft.runtime.tensors import Parts
from xdm_ft.xdomainmix.partners import Partners


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
    space = (None,) * (parts.csds.ndim - 1)
    lam = torch.where(torch.stack((partners.has_same, partners.has_other), 1), lam, 1.0)
    lam_1, lam_2, keep = lam[(..., 0, *space)], lam[(..., 1, *space)], keep[(..., *space)]  # [B,1,…]
    # the backward pass of `index_select` adds in the order of the batch; that of indexing does not on a CPU
    csds = lam_1 * parts.csds + (1 - lam_1) * parts.csds.index_select(0, partners.same)
    cgds = lam_2 * parts.cgds + (1 - lam_2) * parts.cgds.index_select(0, partners.other)
    return torch.where(keep, csds, 0.0) + cgds + parts.csdg + parts.cgdg
