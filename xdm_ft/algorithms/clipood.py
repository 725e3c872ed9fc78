"""CLIPood: margin metric softmax with the class embeddings as fixed class head."""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from xdm_ft.algorithms import Algorithm, Setup
from xdm_ft.core import Batch, Losses


def margins(text_weight: Tensor, strength: float) -> Tensor:
    """Returns λ · D(T_y, T_c) / τ in row y and column c, [C,C]; D is 1 − cosine similarity, and the diagonal is 0.

    `text_weight` [C,K]: L2-normalised class embeddings × logit scale 1/τ. `strength`: λ.
    """
    scale = text_weight.norm(dim=1).mean()  # the norm of every row is the logit scale
    embeddings = F.normalize(text_weight, dim=1)
    distance = (1 - embeddings @ embeddings.T).fill_diagonal_(0)
    return strength * scale * distance


class CLIPood(Algorithm):
    """ℓ(x, y) = −log [ exp(S(I_x, T_y)/τ) / Σ_c exp((S(I_x, T_c) + λ D(T_y, T_c))/τ) ], D(T_y, T_c) = 1 − S(T_y, T_c).

    S is cosine similarity, I_x the image's feature, T_c the class embedding, and 1/τ the logit scale of the pre-trained
    encoder (100 for CLIP). A wrong class has a margin that grows with its distance from the true one in text space:
    confusing distant classes costs more. The authors' code subtracts λ T_y from I_x, which lowers every logit of the
    sample by λ/τ more than here and leaves ℓ unchanged.

    The class head is fixed: the class embeddings, without gradient. So only the encoder trains, and logits are those of
    zero-shot with the trained encoder. λ = 0 is the cross-entropy of these logits. The paper's method is `clipood+bma`,
    with AdamW, lr 5e-6, weight decay 0.1, a cosine schedule, and norm layers in eval mode.

    Means over samples follow `training.loss_average` and `class_weights`; the paper's is the mean over the batch.
    """

    source = "Shu et al. 2023, CLIPood: Generalizing CLIP to Out-of-Distributions, margin metric softmax"
    needs_text = True
    loss_over = "sample"
    frozen_reason = (
        "its class head is fixed, so a frozen encoder leaves nothing to train; set encoder.trainable to train "
        "some of it"
    )

    def __init__(
        self,
        setup: Setup,
        *,
        margin: Annotated[
            float, Field(ge=0, description="λ, factor of the margins: distances between class embeddings, 0…2")
        ] = 0.3,
    ) -> None:
        super().__init__(setup)
        self.head.requires_grad_(False)
        num_classes = setup.task.num_classes
        # without a text side only settings are checked, and nothing trains
        text = torch.zeros(num_classes, 1) if setup.text_weight is None else setup.text_weight.float()
        self.margins: Tensor
        # [C,C]; not in the state dict, because the setup determines it
        self.register_buffer("margins", margins(text, margin), persistent=False)

    def loss(self, z: Tensor, batch: Batch, step: int | Tensor) -> Losses:
        logits = self.logits(z) + self.margins[batch.y]  # [B,C]
        total = self.average(F.cross_entropy(logits, batch.y, reduction="none"), batch)
        return Losses(total, auxiliary=total.new_zeros(()))
