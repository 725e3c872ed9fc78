"""The order statistic behind a mask, found without sorting."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from xdm_ft.xdomainmix.kernel import call, kernel

SEARCH_ROWS = 384
"""From this many rows on, searching beats selecting on a CPU without compiler (torch 2.15, K = 512 … 2048); the mask is
the same."""
SEARCH_PASSES = 24
"""Counts of one search at most; half of the rows are solved after six, 999 of 1000 after twenty."""
WORTH_SHRINKING = 0.7
"""Share of unsolved rows below which copying them out costs less than counting the solved ones again."""


def divider(scores: Tensor, rank: int) -> Tensor:
    """A value τ per row such that `scores > τ` is `scores > x_(rank)`, x_(0) ≤ x_(1) ≤ … the sorted row.

    τ is x_(rank) itself or lies between it and the next larger score. NaN for a row with a NaN.

    Args:
        scores: float [...,K]; also under `torch.func.vmap`.
        rank: 0 … K−1.

    Returns:
        [...,1], without gradient.
    """
    return _Divider.apply(scores.detach(), rank)


class _Divider(torch.autograd.Function):
    """Every row is on its own, so a batch of heads is just more rows: the search sees them all at once."""

    @staticmethod
    def forward(scores: Tensor, rank: int) -> Tensor:
        rows = scores.reshape(-1, scores.shape[-1])  # [n,K]
        floats_on_cpu = rows.device.type == "cpu" and rows.dtype == torch.float32
        if floats_on_cpu and kernel() is not None:
            tau = _compiled(rows, rank)  # [n,1]
        else:
            tau = _search(rows, rank) if floats_on_cpu and len(rows) >= SEARCH_ROWS else _select(rows, rank)
        return tau.reshape(*scores.shape[:-1], 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], scores: Tensor, rank: int) -> tuple[Tensor, int]:
        assert in_dims[0] is not None, "vmap calls this only where the scores are stacked"
        return _Divider.apply(scores.movedim(in_dims[0], 0), rank), 0


def _compiled(rows: Tensor, rank: int) -> Tensor:
    """The same by `divider` of kernel.c, which looks for it as `_search` does, row by row in the processor's cache."""
    rows, tau = rows.contiguous(), rows.new_empty(len(rows), 1)
    call(kernel().dividers, len(rows), rows.shape[-1], rows.shape[-1], rows, rank, tau)
    return tau


def _select(rows: Tensor, rank: int) -> Tensor:
    """x_(rank) [n,1]: the smallest of the K−rank largest (torch counts NaN as largest, and amin keeps it)."""
    return rows.topk(rows.shape[-1] - rank, dim=-1, sorted=False).values.amin(-1, keepdim=True)


def _search(rows: Tensor, rank: int) -> Tensor:
    """The same by counting, for float32 rows: several times faster, since comparing and adding are vectorised.

    Any τ with exactly m = K−1−rank scores above it will do. It is looked for by false position on the number of scores
    above, from 0 and from where it would lie if the scores on its side of 0 were exponentially distributed. Rows that
    ties leave unsolved are selected from.
    """
    above = rows.shape[-1] - 1 - rank  # m
    scratch = torch.empty_like(rows)
    bracket = _Bracket.around(rows, above)
    broken = bracket.low.isnan()
    tau, count, guess = _start(rows, above, scratch)  # [n,1]
    found, left = tau.clone(), torch.arange(len(rows))
    for step in range(SEARCH_PASSES):
        excess = count - above
        found[left] = tau
        unsolved = (excess != 0)[:, 0]
        number = int(unsolved.sum())
        if number == 0:
            return found.masked_fill_(broken, torch.nan)
        bracket = bracket.narrowed(tau, excess)
        between = bracket.between()
        if step == 0:
            between = torch.where((guess > bracket.low) & (guess < bracket.high), guess, between)
        if number < WORTH_SHRINKING * len(left):
            rows, left, between = rows[unsolved], left[unsolved], between[unsolved]
            bracket = _Bracket(*(end[unsolved] for end in bracket))
            tau = between
        else:
            tau = torch.where(unsolved[:, None], between, tau)
        count = torch.gt(rows, tau, out=scratch[: len(rows)]).sum(-1, keepdim=True)
    found[left] = _select(rows, rank)
    return found.masked_fill_(broken, torch.nan)


class _Bracket(NamedTuple):
    """x_(rank) lies between `low` and `high`; the excesses, of either sign, are how many scores too many lie above."""

    low: Tensor  # [n,1], as all
    high: Tensor
    low_excess: Tensor
    high_excess: Tensor

    @classmethod
    def around(cls, rows: Tensor, above: int) -> _Bracket:
        low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
        return cls(low, high, torch.full_like(low, rows.shape[-1] - above), torch.full_like(high, -above))

    def narrowed(self, tau: Tensor, excess: Tensor) -> _Bracket:
        """τ becomes an end. The end that stays loses half its weight (Illinois rule), lest it stays for ever."""
        is_low = excess > 0
        return _Bracket(
            low=torch.where(is_low, tau, self.low),
            high=torch.where(is_low, self.high, tau),
            low_excess=torch.where(is_low, excess, self.low_excess / 2),
            high_excess=torch.where(is_low, self.high_excess / 2, excess),
        )

    def between(self) -> Tensor:
        return self.low + (self.high - self.low) * (self.low_excess / (self.low_excess - self.high_excess))


def _start(rows: Tensor, above: int, scratch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """τ = 0, how many scores lie above it, and the guess to try next: [n,1] each."""
    size = rows.shape[-1]
    zero = torch.zeros_like(rows[:, :1])
    count = torch.gt(rows, zero, out=scratch).sum(-1, keepdim=True)  # float32, exact up to 2^24
    at_least = torch.ge(rows, zero, out=scratch).sum(-1, keepdim=True)
    positive = torch.clamp(rows, min=0, out=scratch).sum(-1, keepdim=True)
    negative = rows.sum(-1, keepdim=True) - positive
    guess = torch.where(
        count > above,
        positive / count * (count / max(above, 0.5)).log(),
        negative / (size - count) * ((size - count) / (size - above)).log(),
    )
    solved = (count <= above) & (at_least > above)  # 0 is x_(rank) itself: features after ReLU are full of zeros
    return zero, torch.where(solved, above, count), guess
