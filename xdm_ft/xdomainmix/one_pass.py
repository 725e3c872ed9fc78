"""The same mathematics by `kernel.c`, in passes over features in a CPU's cache; the other modules are its oracle.

Everything is the same bit for bit, z̃ up to the sign of zeros, and runs under `torch.func.vmap` on all heads at once.
"""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor

from xdm_ft.randomness import Stream
from xdm_ft.xdomainmix.decomposition import decompose, rank_of
from xdm_ft.xdomainmix.kernel import call, kernel
from xdm_ft.xdomainmix.mixing import mix
from xdm_ft.xdomainmix.partners import OtherPartner, Partners

OTHER_PARTNERS = get_args(OtherPartner)
"""Numbered as in kernel.c."""


def available(z: Tensor) -> bool:
    """Whether features `z`, of one head, can be worked on here: pooled float32 on a CPU, and there is a compiler."""
    return z.device.type == "cpu" and z.dtype == torch.float32 and z.ndim == 2 and kernel() is not None


def linear_masks(
    z: Tensor,
    class_weight: Tensor,
    domain_weight: Tensor,
    y: Tensor,
    domain: Tensor,
    class_quantile: float,
    domain_quantile: float,
) -> tuple[Tensor, Tensor]:
    """M_c and M_d, each `specific_mask(linear_scores(z, weight, target), quantile)`: bool [B,K]. (1)(2)(3)

    Raises `IndexError` for a target that is no row of its weight.
    """
    ranks = rank_of(class_quantile, z.shape[-1]), rank_of(domain_quantile, z.shape[-1])
    masks: tuple[Tensor, Tensor] = _apply(_Masks, z, class_weight, domain_weight, y, domain, ranks)
    return masks


def mixed(
    z: Tensor, class_mask: Tensor, domain_mask: Tensor, same: Tensor, other: Tensor, lam: Tensor, keep: Tensor
) -> Tensor:
    """z̃ as `mix(decompose(z, class_mask, domain_mask), …)`, with λ as it acts, 1 without a partner: [B,K]. (4)-(7)

    Gradients flow to z. Raises `IndexError` for a place outside the batch.
    """
    features: Tensor = _apply(_Mixed, z, class_mask, domain_mask, same, other, lam, keep)
    return features


def draw(
    y: Tensor,
    domain: Tensor,
    index: Tensor,
    seed: Tensor,
    step: int,
    p_discard: Tensor,
    other: OtherPartner,
    discard_per_batch: bool,
    mix_same: bool,
    mix_other: bool,
) -> tuple[Partners, Tensor, Tensor]:
    """Partners, λ as it acts [B,2] and keep, bool [B], as `XDomainMix.draws` describes them. (5)(7)

    y, domain and index are int64 [B], `seed` int64 and `p_discard` float32 scalars. Classes and domains below 2^31.
    """
    settings = (OTHER_PARTNERS.index(other), discard_per_batch, mix_same, mix_other)
    same, chosen, has_same, has_other, lam, keep = _apply(_Draw, y, domain, index, seed, p_discard, step, settings)
    return Partners(same, chosen, has_same, has_other), lam, keep


def _apply(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    """`function.apply`, whose cost, most of that of a small batch, is only for gradients to z and `torch.func`."""
    if inputs[0].requires_grad or torch._C._are_functorch_transforms_active():
        return function.apply(*inputs)
    return function.forward(*inputs)


class _Masks(torch.autograd.Function):
    @staticmethod
    def forward(
        z: Tensor, class_weight: Tensor, domain_weight: Tensor, y: Tensor, domain: Tensor, ranks: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        z = z.contiguous()
        rows, batch, width = z.shape[:-1].numel(), z.shape[-2], z.shape[-1]
        masks = torch.empty(z.shape, dtype=torch.bool), torch.empty(z.shape, dtype=torch.bool)
        heads = (class_weight, y), (domain_weight, domain)
        for (weight, target), rank, mask in zip(heads, ranks, masks, strict=True):
            weight, target = weight.float().contiguous(), target.contiguous()
            call(kernel().masks, rows, width, batch, width, weight.shape[-2], z, weight, target, rank, mask)
        return masks

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        return _Masks.apply(*_leading(info, in_dims, inputs)), (0, 0)


class _Mixed(torch.autograd.Function):
    @staticmethod
    def forward(z: Tensor, *choices: Tensor) -> Tensor:
        z, choices = z.contiguous(), tuple(tensor.contiguous() for tensor in choices)
        batch, width = z.shape[-2], z.shape[-1]
        features = torch.empty_like(z)
        call(kernel().mix, z.shape[:-1].numel(), width, batch, width, z, *choices, features)
        return features

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        z, *choices = ctx.saved_tensors
        own = None
        if ctx.needs_input_grad[0]:
            vjp: Any = torch.func.vjp(lambda z: _plainly_mixed(z, *choices), z)[1]
            (own,) = vjp(gradient)
        return own, *(None for _ in choices)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        return _Mixed.apply(*_leading(info, in_dims, inputs)), 0


def _plainly_mixed(z: Tensor, *choices: Tensor) -> Tensor:
    if z.ndim > 2:
        mixed: Tensor = torch.vmap(_plainly_mixed)(z, *choices)
        return mixed
    class_mask, domain_mask, same, other, lam, keep = choices
    everyone = torch.ones_like(keep)
    return mix(decompose(z, class_mask, domain_mask), Partners(same, other, everyone, everyone), lam, keep)


class _Draw(torch.autograd.Function):
    @staticmethod
    def forward(
        y: Tensor, domain: Tensor, index: Tensor, seed: Tensor, p_discard: Tensor, step: int, settings: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        y, domain, index = y.contiguous(), domain.contiguous(), index.contiguous()
        same, other = torch.empty_like(y), torch.empty_like(y)
        has_same, has_other, keep = (torch.empty(y.shape, dtype=torch.bool) for _ in range(3))
        lam = torch.empty(*y.shape, 2)
        call(
            kernel().draw, y.shape[:-1].numel(), y.shape[-1] ** 2,
            y.shape[-1], seed.contiguous(), step, _STREAMS, index, y, domain, settings[0], p_discard.contiguous(),
            *settings[1:], same, other, has_same, has_other, lam, keep,
        )  # fmt: skip
        return same, other, has_same, has_other, lam, keep

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        return _Draw.apply(*_leading(info, in_dims, inputs)), (0,) * 6


def _leading(info: Any, in_dims: tuple[int | None, ...], inputs: tuple[Any, ...]) -> list[Any]:
    """Every tensor with the mapped dimension as its first."""
    moved = []
    for value, dim in zip(inputs, in_dims, strict=True):
        if isinstance(value, Tensor):
            value = value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)
        moved.append(value)
    return moved


_STREAMS = torch.tensor([Stream.PARTNERS, Stream.LAMBDA, Stream.DISCARD])
