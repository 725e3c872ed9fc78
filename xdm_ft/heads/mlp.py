"""A head with one hidden layer."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from xdm_ft.heads import Head, draw_weights


class MLP(Head):
    """logits = W₂ σ(W₁ z + b₁) + b₂, one hidden layer of `hidden_width` units.

    Both layers are initialised as torch's linear layers: U(−1/√n, 1/√n), n their number of inputs. GELU is the default,
    as in CLIP's and timm's transformers.
    """

    source = "torch.nn.Linear twice; GELU: Hendrycks & Gimpel 2016"
    text_reason = (
        "mlp cannot start from class embeddings, as they do not fit a hidden layer; use head: linear or cosine"
    )

    def __init__(
        self,
        width: int,
        outputs: int,
        seed: int,
        stream: int,
        *,
        hidden_width: Annotated[int, Field(ge=1, le=100_000, description="units of the hidden layer")] = 512,
        activation: Annotated[Literal["gelu", "relu"], Field(description="σ, of the hidden units")] = "gelu",
    ) -> None:
        super().__init__()
        self.hidden_width, self.activation = hidden_width, activation
        self.values_per_image = max(hidden_width, outputs)
        self.hidden = nn.Linear(width, hidden_width, dtype=torch.float32)
        self.output = nn.Linear(hidden_width, outputs, dtype=torch.float32)
        drawn = draw_weights([self.hidden.weight, self.hidden.bias], width, seed, stream)
        # after the draws of the hidden layer, or both layers would begin with the same numbers
        draw_weights([self.output.weight, self.output.bias], hidden_width, seed, stream, first=drawn)

    def forward(self, z: Tensor) -> Tensor:
        hidden = self.hidden(z)  # [B,hidden_width]
        logits: Tensor = self.output(F.gelu(hidden) if self.activation == "gelu" else F.relu(hidden))
        return logits
