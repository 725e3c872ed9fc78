"""One loss over what several processes have encoded, for methods whose samples look for each other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import all_gather

from xdm_ft.tensors import Batch


@dataclass(frozen=True)
class Together:
    """The micro-batches that all processes encode at a time, as one.

    Every process computes the loss of all of it, so it has the whole gradient of the heads, and by its own features
    that of its share of the encoder. Averaged over P processes, as gradients are, the latter must count P times.
    """

    y: Tensor  # int64 [B], of all processes, in the order of the whole batch
    domain: Tensor  # int64 [B]
    index: Tensor  # int64 [B]
    order: Tensor  # int64 [B]: where each of them is among the processes' features, one process after the other
    sizes: tuple[int, ...]  # how many each process has; they sum to B
    process: int  # which of them this one is
    weight: float  # its part of the step's images

    def gathered(self, z: Tensor) -> tuple[Tensor, Batch]:
        """Features of all, [B,K], of this process's own `z`, and the batch that they belong to."""
        padded = z.new_zeros(max(self.sizes), z.shape[1])
        padded[: len(z)] = z.detach()
        everyone = [torch.empty_like(padded) for _ in self.sizes]
        all_gather(everyone, padded)
        own = z.view_as(z)
        if own.requires_grad:
            own.register_hook(lambda gradient: gradient * len(self.sizes))
        pieces = [features[:size] for features, size in zip(everyone, self.sizes, strict=True)]
        pieces[self.process] = own
        features = torch.cat(pieces)[self.order]
        return features, Batch(features, self.y, self.domain, self.index)
