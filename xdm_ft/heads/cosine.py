"""A cosine head: logits = s · cos(z, w_c), with a learned scale s."""

from __future__ import annotations

import math
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from xdm_ft.heads import Head, draw_weights


class Cosine(Head):
    """logits_c = s ⟨z/‖z‖, w_c/‖w_c‖⟩: CLIP's classifier with trainable w_c and log s.

    Logits do not depend on the length of z, so `encoder.normalize` has no effect on them. If z = 0, the logits are 0.
    CLIP limits s to 100 in pre-training; here s has no limit. The decay of sgd and adam acts on log s as on
    any other parameter; that of adamw does not.
    """

    source = "Radford et al. 2021 (CLIP), section 2.5; as a classifier: Gidaris & Komodakis 2018"
    normalizes = True
    per_class = ("weight",)

    def __init__(
        self,
        width: int,
        outputs: int,
        seed: int,
        stream: int,
        *,
        scale: Annotated[
            float,
            Field(
                gt=0,
                description="initial s = 1 / temperature (CLIP: 1/0.07); head_init: zero_shot starts at the encoder's "
                "own logit scale instead",
            ),
        ] = 1 / 0.07,
    ) -> None:
        super().__init__()
        self.values_per_image = outputs
        self.weight = nn.Parameter(torch.empty(outputs, width, dtype=torch.float32))
        # its logarithm, as in CLIP: no step makes s negative
        self.log_scale = nn.Parameter(torch.tensor(math.log(scale), dtype=torch.float32))
        draw_weights([self.weight], width, seed, stream)

    def forward(self, z: Tensor) -> Tensor:
        # s multiplies the [C,K] weights, which are fewer than the values of z or the logits of many images
        return F.normalize(z, dim=-1) @ (self.log_scale.exp() * F.normalize(self.weight, dim=-1)).mT

    def start_from_text(self, text_weight: Tensor) -> None:
        scale = text_weight.norm(dim=1).mean()  # the norm of every row is the logit scale
        with torch.no_grad():
            self.weight.copy_(text_weight / scale)
            self.log_scale.copy_(scale.log())
