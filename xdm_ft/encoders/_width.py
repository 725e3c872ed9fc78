"""The width K of an encoder, measured."""

from __future__ import annotations

import torch

from xdm_ft.encoders import Encoder
from xdm_ft.runtime.errors import UserError

NOT_TAKEN = (RuntimeError, AssertionError, ValueError, TypeError)
"""What libraries raise for images of a size that a model does not take."""


def size_not_taken(model: str, size: int, error: Exception) -> UserError:
    return UserError(
        f'encoder.preprocessing.size: "{model}" does not take images of {size} px '
        f"({' '.join(str(error).split())[:120]}); leave size out or, for a ViT, set encoder.kwargs.img_size too"
    )


def measure_width(encoder: Encoder, model: str) -> int:
    """K from one forward pass of a black image: a library's `num_features` differs from it for some models.

    Raises `UserError` if the model does not take images of `encoder.preprocessing.size`, or does not pool its features.
    """
    size = encoder.preprocessing.size
    try:
        with torch.no_grad():
            features = encoder(torch.zeros(1, 3, size, size))
    except NOT_TAKEN as error:
        raise size_not_taken(model, size, error) from error
    if features.ndim != 2:
        raise UserError(
            f'encoder: "{model}" returns features of shape {tuple(features.shape)} instead of [batch, K]; '
            "leave global_pool out of encoder.kwargs"
        )
    return features.shape[1]
