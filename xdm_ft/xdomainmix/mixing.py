"""Equations (4) to (7): the four parts of z, partners, and the augmented feature z̃."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from xdm_ft.xdomainmix.masks import stack_heads

OtherPartner = Literal[
    "other_class_other_domain", "other_class_same_domain", "same_class_other_domain", "same_as_x_i"
]  # fmt: skip
"""The paper's four choices of x_j. `same_class_other_domain` excludes x_i, unless it is the only such sample."""


class Parts(NamedTuple):
    """Class-specific or generic × domain-specific or generic components of z, each like z. They sum to z exactly."""

    csds: Tensor  # Z_c,d
    csdg: Tensor  # Z_c,¬d
    cgds: Tensor  # Z_¬c,d
    cgdg: Tensor  # Z_¬c,¬d


def decompose(z: Tensor, class_mask: Tensor, domain_mask: Tensor) -> Parts:
    """The four parts of z: M ⊙ z for the four combinations of M_c and M_d with their complements. (4)

    z is [B,K] or [B,K,h,w], the masks are bool [B,K]: one value per channel of a map. The parts sum to z bit for bit: a
    part is −0.0 where its mask is False. −0.0 is the neutral element of float addition; +0.0 is not, as −0.0 + 0.0 is
    +0.0. The gradient of each element of z is that of the one part that contains it.

    >>> z, of_class = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([[True, True, False, False]])
    >>> parts = decompose(z, of_class, domain_mask=torch.tensor([[True, False, True, False]]))
    >>> parts.csds, parts.cgdg
    (tensor([[1., -0., -0., -0.]]), tensor([[-0., -0., -0., 4.]]))
    >>> sum(parts)
    tensor([[1., 2., 3., 4.]])
    """
    space = (None,) * (z.ndim - class_mask.ndim)
    of_class, of_domain = class_mask[(..., *space)], domain_mask[(..., *space)]
    nothing = torch.full((), -0.0, dtype=z.dtype, device=z.device)
    masks = of_class & of_domain, of_class & ~of_domain, ~of_class & of_domain, ~(of_class | of_domain)
    return Parts(*(torch.where(mask, z, nothing) for mask in masks))


class Partners(NamedTuple):
    """Positions in the batch. A sample without a valid partner is its own partner, with `has_… = False`.

    >>> alone, no = torch.tensor([0]), torch.tensor([False])
    >>> Partners(same=alone, other=alone, has_same=no, has_other=no).has_same
    tensor([False])
    """

    same: Tensor  # int64 [B], x_i: same class, other domain
    other: Tensor  # int64 [B], x_j: other class, other domain by default
    has_same: Tensor  # bool [B]
    has_other: Tensor  # bool [B]


def draw_partners(
    y: Tensor, domain: Tensor, noise: Tensor, other: OtherPartner = "other_class_other_domain"
) -> Partners:
    """Draws one x_i and one x_j for every sample, uniformly over the valid samples of the batch. (5)

    `y`, `domain` int64 [B]; `noise` is u in [0, 1), [B,2], for x_i and for x_j: the ⌊u·n⌋-th of the n valid samples is
    drawn, in the order of the batch. Raises `ValueError` if `other` is none of the four choices.

    >>> y, domain = torch.tensor([0, 1, 0, 1]), torch.tensor([0, 0, 1, 1])
    >>> partners = draw_partners(y, domain, torch.rand(4, 2))  # one sample is valid each time
    >>> partners.same, partners.other
    (tensor([2, 3, 0, 1]), tensor([3, 2, 1, 0]))
    """
    same_class, same_domain = y[:, None] == y, domain[:, None] == domain  # [B,B]
    first = same_class & ~same_domain
    same, has_same = pick(first, noise[:, 0])
    if other == "same_as_x_i":
        return Partners(same, same, has_same, has_same)
    if other == "other_class_other_domain":
        valid = ~(same_class | same_domain)
    elif other == "other_class_same_domain":
        valid = ~same_class & same_domain
    elif other == "same_class_other_domain":
        is_x_i = same[:, None] == torch.arange(len(y), device=y.device)  # [B,B]
        valid = first & (~is_x_i | (first.sum(1, keepdim=True) == 1))
    else:
        raise ValueError(f"other: {other!r} is unknown; choose one of {', '.join(get_args(OtherPartner))}")
    chosen, has_other = pick(valid, noise[:, 1])
    return Partners(same, chosen, has_same, has_other)


def pick(valid: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Picks the ⌊u·n⌋-th of the n valid samples in each row of `valid` [B,B].

    Returns its position, int64 [B] (the row's own if n = 0), and whether n > 0, bool [B].
    """
    rank = valid.cumsum(1, dtype=torch.int32)  # [B,B]: number of valid samples up to this one
    count = rank[:, -1]  # n [B]
    wanted = torch.minimum((u * count).int(), count - 1)  # the float32 product must not round up to n
    position = torch.searchsorted(rank, wanted[:, None], right=True)[:, 0]  # first position with rank > wanted
    return torch.where(count > 0, position, torch.arange(len(u), device=u.device)), count > 0


def mix(parts: Parts, partners: Partners, lam: Tensor, keep: Tensor) -> Tensor:
    """z̃ = Z̃_c,d + Z̃_¬c,d + Z_c,¬d + Z_¬c,¬d, without Z̃_c,d where it is discarded. (5)(6)(7)

    Z̃_c,d = λ1 Z_c,d + (1−λ1) Z_i c,d and Z̃_¬c,d = λ2 Z_¬c,d + (1−λ2) Z_j ¬c,d. A partner contributes its own part,
    cut by its own masks. A sample without a partner keeps its own part (λ = 1).

    `parts` are those of the whole batch, `lam` is λ1 and λ2 [B,2], `keep` bool [B] (False drops Z̃_c,d). Returns z̃,
    like a part. Gradients flow to the sample's own parts and to its partners'.

    >>> z, yes = torch.tensor([[0.0, 1.0], [8.0, 3.0]]), torch.tensor([True, True])
    >>> parts = decompose(z, torch.tensor([[True, False]] * 2), torch.tensor([[True, False]] * 2))  # Z_c,d and Z_¬c,¬d
    >>> partners = Partners(torch.tensor([1, 0]), torch.tensor([1, 0]), yes, yes)
    >>> mix(parts, partners, lam=torch.tensor([[0.5, 0.5], [0.75, 0.5]]), keep=yes)
    tensor([[4., 1.],
            [6., 3.]])
    """
    space = (None,) * (parts.csds.ndim - 1)
    lam = torch.where(torch.stack((partners.has_same, partners.has_other), 1), lam, 1.0)
    lam_1, lam_2, keep = lam[(..., 0, *space)], lam[(..., 1, *space)], keep[(..., *space)]  # [B,1,…]
    # the backward pass of `index_select` adds in the order of the batch; that of indexing does not on a CPU
    csds = lam_1 * parts.csds + (1 - lam_1) * parts.csds.index_select(0, partners.same)
    cgds = lam_2 * parts.cgds + (1 - lam_2) * parts.cgds.index_select(0, partners.other)
    return torch.where(keep, csds, 0.0) + cgds + parts.csdg + parts.cgdg


def select_and_mix(z: Tensor, choices: tuple[Tensor, ...], selection: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Returns z̃ [B,K], M_c and M_d, bit for bit as the functions of the equations do.

    Args:
        z: features, float32 [B,K].
        choices: x_i and x_j as positions in the batch, int64 [B] each; λ1 and λ2 in effect, float32 [B,2]; whether
            Z_c,d is kept, bool [B].
        selection: three tensors for the class, then three for the domain: rows s [R,K]; each sample's row,
            int64 [B]; a rank, int64 [1]. A dimension is specific where s ⊙ z exceeds the score of that rank.
    """
    augmented: tuple[Tensor, ...] = _Augment.apply(z, *choices, *(tensor.detach() for tensor in selection))
    return augmented


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
        """Runs H batches as one batch of H·B samples: head h's positions start at h·B, its rows of s at h·R."""
        z, same, other, lam, keep, *given = stack_heads(info, in_dims, tensors)  # each [H,…]
        heads, batch = same.shape
        head = torch.arange(heads, device=z.device)[:, None]
        if len(given) == 6:
            for slopes, row in ((0, 1), (3, 4)):
                given[row] = given[row] + head * given[slopes].shape[1]
        flat = (z, same + head * batch, other + head * batch, lam, keep, *given)
        augmented = _Augment.apply(*(tensor.flatten(0, 1) for tensor in flat))
        return tuple(tensor.unflatten(0, (heads, batch)) for tensor in augmented), (0,) * len(augmented)
