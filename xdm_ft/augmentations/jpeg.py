"""Random JPEG compression."""

from __future__ import annotations

import io
from typing import Annotated

from PIL import Image
from pydantic import Field

from xdm_ft.augmentations import ORDERED, Augmentation, Draw, between
from xdm_ft.images.transforms import Preprocessing

_Quality = Annotated[int, Field(ge=1, le=100)]


class Jpeg(Augmentation):
    """Compresses every image as JPEG and decodes it, as sites store images differently."""

    quality: Annotated[
        tuple[_Quality, _Quality], ORDERED, Field(description="quality of the JPEG, 1 to 100, at least and at most")
    ] = (50, 95)

    def apply(self, image: Image.Image, draw: Draw, preprocessing: Preprocessing) -> Image.Image:
        [u] = draw.uniform(1)
        file = io.BytesIO()  # torchvision's own encoder is to be removed
        image.save(file, "JPEG", quality=round(between(self.quality, u)))
        return Image.open(file).convert("RGB")
