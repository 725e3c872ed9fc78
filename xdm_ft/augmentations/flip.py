"""Flips and quarter turns."""

from __future__ import annotations

from typing import Annotated

from PIL import Image
from pydantic import Field

from xdm_ft.augmentations import Augmentation, Draw
from xdm_ft.images.transforms import Preprocessing


class Flip(Augmentation):
    """Flips left to right and upside down, and turns by quarters, each as likely.

    Slides and satellite images have no upper side; for others, set both settings to false.
    """

    vertical: Annotated[bool, Field(description="flip upside down too, with probability 1/2")] = True
    quarter_turns: Annotated[bool, Field(description="turn by 0, 90, 180 or 270 degrees, each as likely")] = True

    def apply(self, image: Image.Image, draw: Draw, preprocessing: Preprocessing) -> Image.Image:
        horizontal, vertical, turn = draw.uniform(3)
        if horizontal < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if self.vertical and vertical < 0.5:
            image = image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
        turns = None, Image.Transpose.ROTATE_90, Image.Transpose.ROTATE_180, Image.Transpose.ROTATE_270
        by = turns[int(4 * turn)] if self.quarter_turns else None
        return image if by is None else image.transpose(by)
