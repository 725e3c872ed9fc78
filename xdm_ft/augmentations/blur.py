"""Random Gaussian blur."""

from __future__ import annotations

import math
from typing import Annotated

from PIL import Image
from pydantic import Field

from xdm_ft.augmentations import ORDERED, Augmentation, Draw, between
from xdm_ft.images.transforms import Preprocessing

_Deviation = Annotated[float, Field(ge=0.01, le=100)]
DEVIATIONS = 3  # that the kernel reaches at each side


class Blur(Augmentation):
    """Blurs every image, as a camera out of focus does: torchvision's `gaussian_blur`."""

    sigma: Annotated[
        tuple[_Deviation, _Deviation],
        ORDERED,
        Field(description="standard deviation of the blur, px, at least and at most"),
    ] = (0.1, 2.0)

    def apply(self, image: Image.Image, draw: Draw, preprocessing: Preprocessing) -> Image.Image:
        from torchvision.transforms.v2 import functional

        [u] = draw.uniform(1)
        sigma = between(self.sigma, u)
        # the blur reflects pixels at the border, of which there must be enough
        reach = min(math.ceil(DEVIATIONS * sigma), min(image.size) - 1)
        blurred: Image.Image = functional.gaussian_blur(image, [2 * reach + 1] * 2, [sigma] * 2)
        return blurred
