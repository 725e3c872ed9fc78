"""DomainBed's augmentation of training images."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from PIL import Image

from xdm_ft.augmentations import Augmentation, Draw
from xdm_ft.images.transforms import Preprocessing, drawing_from

if TYPE_CHECKING:
    from torchvision.transforms import Compose


class DomainBed(Augmentation):
    """DomainBed's: crop, flip left to right, colours, grey; in place of the encoder's resizing.

    `augment_transform` of DomainBed's datasets.py (Gulrajani & Lopez-Paz 2021). A random crop of 70% to 100% of the
    area is resized to the square and flipped left to right with probability 1/2; brightness, contrast, saturation and
    hue change by up to 0.3; the image becomes grey with probability 0.1. Size, interpolation, mean and std are the
    encoder's (DomainBed's: 224, bilinear, ImageNet's). It draws from torch's generator, seeded for each image.
    """

    replaces_resizing: ClassVar[bool] = True

    def apply(self, image: Image.Image, draw: Draw, preprocessing: Preprocessing) -> Image.Image:
        with drawing_from(draw.seed):
            augmented: Image.Image = _transform(preprocessing)(image)
        return augmented

    def steps(self, preprocessing: Preprocessing) -> list[Any]:
        return list(_transform(preprocessing).transforms)


@cache
def _transform(preprocessing: Preprocessing) -> Compose:
    from torchvision import transforms

    filter_ = transforms.InterpolationMode(preprocessing.interpolation)
    return transforms.Compose(
        [
            transforms.RandomResizedCrop(preprocessing.size, scale=(0.7, 1.0), interpolation=filter_),
            transforms.RandomHorizontalFlip(),
            transforms.ColorJitter(0.3, 0.3, 0.3, 0.3),
            transforms.RandomGrayscale(),  # its default probability is DomainBed's 0.1
        ]
    )
