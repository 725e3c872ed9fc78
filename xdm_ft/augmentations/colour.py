"""Random brightness, contrast, saturation and hue."""

from __future__ import annotations

from typing import Annotated

from PIL import Image
from pydantic import Field

from xdm_ft.augmentations import Augmentation, Draw, between
from xdm_ft.images.transforms import Preprocessing

_Change = Annotated[float, Field(ge=0, le=10)]


class Colour(Augmentation):
    """Changes brightness, contrast, saturation and hue in random order, as `ColorJitter`."""

    brightness: Annotated[_Change, Field(description="b: factor in 1 ± b, at least 0")] = 0.3
    contrast: Annotated[_Change, Field(description="as brightness")] = 0.3
    saturation: Annotated[_Change, Field(description="as brightness")] = 0.3
    hue: Annotated[float, Field(ge=0, le=0.5, description="h: shift in ±h of the colour circle")] = 0.3

    def apply(self, image: Image.Image, draw: Draw, preprocessing: Preprocessing) -> Image.Image:
        from torchvision.transforms.v2 import functional

        factors = {
            functional.adjust_brightness: self.brightness,
            functional.adjust_contrast: self.contrast,
            functional.adjust_saturation: self.saturation,
        }
        ranges = {change: (max(0.0, 1 - most), 1 + most) for change, most in factors.items() if most}
        ranges |= {functional.adjust_hue: (-self.hue, self.hue)} if self.hue else {}
        amounts, order = (draw.uniform(8)[first : first + len(ranges)] for first in (0, 4))
        for _, amount, (change, ends) in sorted(zip(order, amounts, ranges.items(), strict=True), key=lambda of: of[0]):
            image = change(image, between(ends, amount))
        return image
