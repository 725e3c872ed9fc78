"""What each of several encoders costs: parameters, time per image, bytes of its features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from xdm_ft.experiment.prepare import Prepared, PreparedEncoder
from xdm_ft.features import FeatureSettings
from xdm_ft.features.extract import frozen_copy
from xdm_ft.images.loader import DTYPES
from xdm_ft.training.bank.timing import seconds_of

if TYPE_CHECKING:
    from accelerate import Accelerator

IMAGES = 16  # at most, in the batch that is timed
SECONDS = 1.0  # of timing per encoder


def encoder_costs(
    prepared: Prepared, settings: FeatureSettings, images: int, accelerator: Accelerator, before: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns `environment.encoders` of results.json: {} for a recipe of one encoder.

    `before`: what an earlier process of this run has measured, which is kept.
    """
    if None in prepared.encoders:
        return {}
    known = before.get("encoders", {})
    return {
        "encoders": {
            label: known.get(label) or _costs(own, settings, images, accelerator)
            for label, own in prepared.encoders.items()
        }
    }


def _costs(own: PreparedEncoder, settings: FeatureSettings, images: int, accelerator: Accelerator) -> dict[str, Any]:
    encoder, identity = own.encoder, own.encoder.identity()
    stored = (1 + settings.views) * encoder.width * DTYPES[settings.precision].itemsize
    return {
        "component": identity["component"],
        "model": identity.get("model"),
        "pretraining": encoder.pretraining,
        "width": encoder.width,
        "parameters": sum(one.numel() for one in encoder.parameters() if one.requires_grad),  # without a text side
        "ms_per_image": round(1e3 * _seconds_per_image(own, settings, accelerator), 3),
        "feature_bytes": None if own.features is None else images * stored,
    }


def _seconds_per_image(own: PreparedEncoder, settings: FeatureSettings, accelerator: Accelerator) -> float:
    """Returns the time of an image's forward pass in a batch, without decoding, measured on black images."""
    model = frozen_copy(own.encoder, settings.precision, accelerator.device)
    count, size = min(IMAGES, settings.batch_size), own.encoder.preprocessing.size
    pixels = torch.zeros(count, 3, size, size, device=accelerator.device, dtype=DTYPES[settings.precision])
    pixels = pixels.contiguous(memory_format=torch.channels_last)
    with torch.inference_mode():
        model(pixels)  # the first call of a size allocates
        return seconds_of(lambda: model(pixels), SECONDS) / count
