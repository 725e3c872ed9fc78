"""Views of an image: the plain one, for evaluation, and augmented ones drawn from a fixed seed, for training."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image

from xdm_ft.images.dataset import Augmentation
from xdm_ft.images.transforms import (
    Preprocessing,
    augmenting_transform,
    drawing_from,
    resizing_transform,
    training_transform,
)
from xdm_ft.runtime.randomness import Stream, bits

SEED = 0  # of the augmentations; the same in every run, so that runs of all seeds share the cached views


@dataclass(frozen=True)
class View:
    """One pass over all images. View v does not depend on the number of views, so that views can be added later."""

    number: int = 0  # 0: the plain one; 1, 2, …: augmented
    augmentation: Augmentation = "none"

    def transform(self, preprocessing: Preprocessing) -> ViewTransform:
        return ViewTransform(self, preprocessing)

    def key_parts(self, preprocessing: Preprocessing) -> dict[str, object]:
        """The parts of the cache key that an augmented view adds to those of the plain view."""
        if self.number == 0:
            return {}
        steps = repr(training_transform(preprocessing, self.augmentation))  # every transform with its parameters
        return {"view": {"number": self.number, "augmentation": self.augmentation, "transform": steps, "seed": SEED}}


class ViewTransform:
    """(RGB image, hash of its content) → RGB image of size × size. Random draws depend on view and hash alone."""

    def __init__(self, view: View, preprocessing: Preprocessing) -> None:
        self.view = view
        if view.number == 0:
            self._transform = resizing_transform(preprocessing)
        else:
            self._transform = augmenting_transform(preprocessing, view.augmentation)

    def __call__(self, image: Image.Image, content: np.ndarray) -> Image.Image:
        """`content`: uint8 [16]."""
        if self.view.number == 0:
            return self._transform(image)
        index = int.from_bytes(content[:8].tobytes(), "little", signed=True)
        with drawing_from(int(bits(SEED, self.view.number, Stream.VIEW_IMAGE, index))):
            return self._transform(image)


def all_views(augmentation: Augmentation, count: int) -> list[View]:
    """The plain view and `count` augmented ones."""
    return [View(), *(View(number, augmentation) for number in range(1, 1 + count))]
