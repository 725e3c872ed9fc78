"""A linear head: logits = W z + b."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xdm_ft.heads import Head, draw_weights


class Linear(Head, nn.Linear):
    """logits = W z + b, W [C,K] and b [C]. It has no settings."""

    source = "torch.nn.Linear"
    per_class = ("weight", "bias")

    def __init__(self, width: int, outputs: int, seed: int, stream: int) -> None:
        nn.Linear.__init__(self, width, outputs, dtype=torch.float32)
        self.values_per_image = outputs
        draw_weights([self.weight, self.bias], width, seed, stream)

    def forward(self, z: Tensor) -> Tensor:
        if self.training:  # (b + W zᵀ)ᵀ: on a CPU its backward pass is five times as fast as that of `F.linear`
            return torch.addmm(self.bias[:, None], self.weight, z.mT).mT
        return F.linear(z, self.weight, self.bias)

    def start_from_text(self, text_weight: Tensor) -> None:
        with torch.no_grad():
            self.weight.copy_(text_weight)
            self.bias.zero_()

    def stacked_logits(self, z: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        # one product with all H matrices stacked is on a CPU up to three times as fast as H products
        weight, bias = state["weight"], state["bias"]  # [H,C,K], [H,C]
        return torch.addmm(bias.flatten(), z, weight.flatten(0, 1).T).view(len(z), *bias.shape)
