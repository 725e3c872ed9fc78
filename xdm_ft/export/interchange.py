"""A model's class head in the form of class embeddings, as other programs for CLIP read it."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from xdm_ft.export.parts import Classifier
from xdm_ft.heads import Head
from xdm_ft.heads.cosine import Cosine
from xdm_ft.heads.linear import Linear
from xdm_ft.runtime.errors import UserError


class ClassEmbeddings(NamedTuple):
    """logits [B,C] = scale · ẑ @ embeddingsᵀ + bias, for L2-normalised features ẑ [B,K]."""

    embeddings: Tensor  # float32 [C,K]; rows have length 1 on average, and exactly 1 for a cosine head
    scale: float
    bias: Tensor  # float32 [C]; 0 for a cosine head


def class_embeddings(classifier: Classifier) -> ClassEmbeddings:
    """Returns the head of a model, or the mean of an ensemble's heads, as class embeddings, on the CPU.

    The temperature is in `scale` and `bias`. Raises `UserError` if the logits are not linear in L2-normalised features.
    """
    heads: list[Head] = [classifier.head] if classifier.head is not None else list(classifier.members)  # type: ignore[arg-type]
    found = [_linear_map(head, classifier.normalize) for head in heads]
    weight = torch.stack([weight for weight, _ in found]).mean(0) / classifier.temperature  # [C,K]
    bias = torch.stack([bias for _, bias in found]).mean(0) / classifier.temperature
    scale = weight.norm(dim=1).mean().item()
    return ClassEmbeddings((weight / (scale or 1.0)).float().cpu(), scale, bias.float().cpu())


def _linear_map(head: Head, normalize: bool) -> tuple[Tensor, Tensor]:
    """Returns W float64 [C,K] and b [C] of a head: logits = W ẑ + b."""
    if isinstance(head, Cosine):
        weight = head.log_scale.double().exp() * F.normalize(head.weight.double(), dim=-1)
        return weight.detach(), weight.new_zeros(len(weight)).detach()
    if not isinstance(head, Linear):
        name = type(head).__name__.lower()
        raise UserError(f"class embeddings: the head is {name}, which has none; train with head: linear or cosine")
    if not normalize:
        raise UserError(
            "class embeddings: the linear head reads features that are not L2-normalised; train with "
            "encoder.normalize: true, or with head: cosine"
        )
    return head.weight.double().detach(), head.bias.double().detach()
