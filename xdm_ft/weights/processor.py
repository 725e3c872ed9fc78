"""The preprocessing of a model of transformers: its image processor, expressed as `Preprocessing`, and compared."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from xdm_ft.images.transforms import Interpolation, Preprocessing, Resize, evaluation_transform, resized_side
from xdm_ft.runtime.errors import UserError

TOLERANCE = (
    1.0  # mean difference from the processor's pixels, in levels of 255: what resizing in other libraries rounds
)
SIZES = ((300, 200), (150, 330))  # px, width and height of the images on which both are compared
_INTERPOLATION: dict[int, Interpolation] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers
_WARP = 384  # px; from here on, processors with a `crop_pct` resize to the square
BY_HAND = "set mean, std, size, crop, interpolation and resize in encoder.preprocessing"


class _Geometry(NamedTuple):
    side: int  # px, to which images are resized
    size: int  # px, of the input
    resize: Resize


def from_processor(processor: Any, model: str) -> Preprocessing:
    """Returns the preprocessing of an image processor. Raises `UserError` if ours can not do the same.

    Crops may lie one pixel beside the processor's, which rounds half a pixel down.
    """
    geometry, interpolation = _geometry(processor), _INTERPOLATION.get(int(processor.resample or 0))
    if geometry is None or interpolation is None:
        raise _not_expressible(processor, model)
    # (factor · 255 · p − mean) / std, with pixels p in 0…1
    factor = 255.0 * (processor.rescale_factor if processor.do_rescale else 1.0)
    mean, std = (processor.image_mean, processor.image_std) if processor.do_normalize else ([0.0] * 3, [1.0] * 3)
    if not len(mean) == len(std) == 3:
        raise _not_expressible(processor, model)
    found = Preprocessing(
        mean=(mean[0] / factor, mean[1] / factor, mean[2] / factor),
        std=(std[0] / factor, std[1] / factor, std[2] / factor),
        size=geometry.size,
        crop=_crop(geometry),
        interpolation=interpolation,
        resize=geometry.resize,
    )
    if not all(_agrees(processor, found, _noise(*size)) for size in SIZES):
        raise _not_expressible(processor, model)
    return found


def _not_expressible(processor: Any, model: str) -> UserError:
    return UserError(
        f'encoder.preprocessing: the images of "{model}" are prepared by {type(processor).__name__}, whose settings '
        f"have no equal here; {BY_HAND}"
    )


def _geometry(processor: Any) -> _Geometry | None:
    """None if the settings are not a resize, with or without a centre crop, to a square."""
    asked, crop = _given(processor.size), _given(getattr(processor, "crop_size", None))
    side, resize = asked.get("shortest_edge") or asked.get("height"), "native" if "shortest_edge" in asked else "squash"
    if not processor.do_resize or side is None or len(asked) > 2 or asked.get("width", side) != side:
        return None
    if (share := getattr(processor, "crop_pct", None)) is not None and resize == "native":  # ConvNeXT's
        return _Geometry(int(side / share), side, "native") if side < _WARP else _Geometry(side, side, "squash")
    if not getattr(processor, "do_center_crop", False):
        return _Geometry(side, side, "squash") if resize == "squash" else None
    size = crop.get("height")
    if size is None or size != crop.get("width") or size > side:
        return None
    return _Geometry(side, size, "native" if resize == "native" else "squash")


def _given(size: Mapping[str, int] | None) -> dict[str, int]:
    """{`height`, `width`, `shortest_edge` or another name: px} of what is set."""
    return {key: value for key, value in dict(size or {}).items() if value}


def _crop(geometry: _Geometry) -> float:
    """The fraction size / side. `resized_side` rounds down; a fraction one bit below gives the side itself."""
    crop = geometry.size / geometry.side
    found = math.floor(geometry.size / crop)
    return crop if found == geometry.side else math.nextafter(crop, 0.0)


def _noise(width: int, height: int) -> Image.Image:
    """An image of noise, on which every other filter, size or crop differs by many levels."""
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def _agrees(processor: Any, ours: Preprocessing, image: Image.Image) -> bool:
    assert resized_side(ours) >= ours.size
    theirs = torch.as_tensor(processor(images=image, return_tensors="pt")["pixel_values"][0])  # [3,H,W]
    own = evaluation_transform(ours)(image)  # [3,H,W]
    if theirs.shape != own.shape:
        return False
    levels = 255 * torch.tensor(ours.std).view(3, 1, 1)
    shifts = product((-1, 0, 1), repeat=2) if ours.crop < 1 or ours.resize == "native" else [(0, 0)]
    return min(_difference(theirs * levels, own * levels, *shift) for shift in shifts) <= TOLERANCE


def _difference(a: Tensor, b: Tensor, down: int, right: int) -> float:
    """Mean absolute difference inside the border, where b is shifted by whole pixels."""
    shifted = b.roll((down, right), (1, 2))
    return (a - shifted)[:, 1:-1, 1:-1].abs().mean().item()
