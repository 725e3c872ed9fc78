"""Equations (1) to (7) in one pass over the features: the kernel of `XDomainMix.augment` on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xdm_ft.xdomainmix.stacking import stacked


def select_and_mix(z: Tensor, choices: tuple[Tensor, ...], selection: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Returns z̃ [B,K], M_c and M_d, bit for bit as the functions of the equations do.

    Args:
        z: features, float32 [B,K].
        choices: x_i and x_j as places in the batch, int64 [B] each; λ1 and λ2 in effect, float32 [B,2]; which samples
            keep Z_c,d, bool [B].
        selection: three tensors for the class, then three for the domain: rows s [R,K]; each sample's place in them,
            int64 [B]; a rank, int64 [1]. A dimension is specific where s ⊙ z exceeds the score of that rank.
    """
    found: tuple[Tensor, ...] = _Augment.apply(z, *choices, *(tensor.detach() for tensor in selection))
    return found


def mix_masked(z: Tensor, choices: tuple[Tensor, ...], masks: tuple[Tensor, ...]) -> Tensor:
    """Returns z̃ [B,K] for given M_c and M_d, bool [B,K]; other arguments as for `select_and_mix`."""
    mixed: Tensor = _Augment.apply(z, *choices, *masks)[0]
    return mixed


class _Augment(torch.autograd.Function):
    """Its inputs are z, the four choices, and either both masks or the six tensors of a selection."""

    @staticmethod
    def forward(z: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        from xdm_ft.xdomainmix import _numba  # takes three seconds to import

        choices, given = tensors[:4], tensors[4:]
        return (_numba.mix(z, choices, given),) if len(given) == 2 else _numba.augment(z, choices, given)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        masks = output[1:] or inputs[5:]
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs[1:5], *masks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """z̃ is linear in the parts: the gradient of a part sums, over all z̃ that use it, gradient × its factor."""
        same, other, lam, keep, of_class, of_domain = ctx.saved_tensors
        lam_1, lam_2 = lam[:, :1], lam[:, 1:]  # [B,1]
        kept = torch.where(keep[:, None], gradient, 0.0)
        csds = (lam_1 * kept).index_add(0, same, (1 - lam_1) * kept)
        cgds = (lam_2 * gradient).index_add(0, other, (1 - lam_2) * gradient)
        of_z = torch.where(of_domain, torch.where(of_class, csds, cgds), gradient)
        return of_z, *(None for _ in ctx.needs_input_grad[1:])

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Runs H batches as one batch of H·B samples: head h's places start at h·B, its rows of s at h·R."""
        z, same, other, lam, keep, *given = stacked(info, in_dims, tensors)  # each [H,…]
        heads, batch = same.shape
        head = torch.arange(heads, device=z.device)[:, None]
        if len(given) == 6:
            for slopes, own in ((0, 1), (3, 4)):
                given[own] = given[own] + head * given[slopes].shape[1]
        flat = (z, same + head * batch, other + head * batch, lam, keep, *given)
        found = _Augment.apply(*(tensor.flatten(0, 1) for tensor in flat))
        return tuple(tensor.unflatten(0, (heads, batch)) for tensor in found), (0,) * len(found)
