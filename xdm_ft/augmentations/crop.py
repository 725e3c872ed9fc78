"""A random crop."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

from PIL import Image
from pydantic import Field

from xdm_ft.augmentations import ORDERED, Augmentation, Draw, between
from xdm_ft.images.transforms import Preprocessing

_Share = Annotated[float, Field(gt=0, le=1)]
ASPECT = 4 / 3  # of the sides, at most, as torchvision's RandomResizedCrop has it


class Crop(Augmentation):
    """Crops a part of the image to the encoder's size, in place of its resizing.

    The crop has a share of the area within `scale` and sides that differ by a factor of up to 4/3, log-uniform, as far
    as it fits the image: torchvision's `RandomResizedCrop` without its tries.
    """

    replaces_resizing: ClassVar[bool] = True

    scale: Annotated[
        tuple[_Share, _Share], ORDERED, Field(description="share of the area that is kept, at least and at most")
    ] = (0.7, 1.0)

    def apply(self, image: Image.Image, draw: Draw, preprocessing: Preprocessing) -> Image.Image:
        from torchvision.transforms import InterpolationMode
        from torchvision.transforms.v2 import functional

        share, aspect, left, top = draw.uniform(4)
        area = between(self.scale, share) * image.width * image.height
        # a crop of aspect r is √(area · r) wide and √(area / r) high, and both fit
        narrowest, widest = area / image.height**2, image.width**2 / area
        low, high = (min(max(end, narrowest), widest) for end in (1 / ASPECT, ASPECT))
        ratio = math.exp(between((math.log(low), math.log(high)), aspect))
        width = min(max(1, round(math.sqrt(area * ratio))), image.width)
        height = min(max(1, round(math.sqrt(area / ratio))), image.height)
        x, y = int(left * (image.width - width + 1)), int(top * (image.height - height + 1))
        size, filter_ = [preprocessing.size] * 2, InterpolationMode(preprocessing.interpolation)
        cropped: Image.Image = functional.resized_crop(image, y, x, height, width, size, filter_)
        return cropped
