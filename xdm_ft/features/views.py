"""Views of an image: the plain one, for evaluation, and augmented ones drawn from a fixed seed, for training."""

from __future__ import annotations

from collections.abc import Callable
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

    def transform(self, preprocessing: Preprocessing) -> Callable[[Image.Image, np.ndarray], Image.Image]:
        """Returns a transform: RGB image, hash of its content (uint8 [16]) → RGB image of size × size.

        Its random draws depend on view and hash alone.
        """
        resize, augment = resizing_transform(preprocessing), augmenting_transform(preprocessing, self.augmentation)

        def transform(image: Image.Image, content: np.ndarray) -> Image.Image:
            if self.number == 0:
                return resize(image)
            index = int.from_bytes(content[:8].tobytes(), "little", signed=True)
            with drawing_from(int(bits(SEED, self.number, Stream.VIEW_IMAGE, index))):
                return augment(image)

        return transform

    def key_parts(self, preprocessing: Preprocessing) -> dict[str, object]:
        """The parts of the cache key that an augmented view adds to those of the plain view."""
        if self.number == 0:
            return {}
        steps = repr(training_transform(preprocessing, self.augmentation))  # every transform with its parameters
        return {"view": {"number": self.number, "augmentation": self.augmentation, "transform": steps, "seed": SEED}}


def all_views(augmentation: Augmentation, count: int) -> list[View]:
    """The plain view and `count` augmented ones."""
    return [View(), *(View(number, augmentation) for number in range(1, 1 + count))]
