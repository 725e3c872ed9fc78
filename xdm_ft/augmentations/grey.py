"""Random loss of colour."""

from __future__ import annotations

from typing import Annotated

from PIL import Image
from pydantic import Field

from xdm_ft.augmentations import Augmentation, Draw
from xdm_ft.images.transforms import Preprocessing


class Grey(Augmentation):
    """Makes some images grey: torchvision's `RandomGrayscale`."""

    probability: Annotated[float, Field(ge=0, le=1, description="share of the images that become grey")] = 0.1

    def apply(self, image: Image.Image, draw: Draw, preprocessing: Preprocessing) -> Image.Image:
        from torchvision.transforms.v2 import functional

        [u] = draw.uniform(1)
        changed: Image.Image = functional.to_grayscale(image, 3) if u < self.probability else image
        return changed
