"""Random changes of training images: a file each. They work on the resized image, before it is normalised."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from PIL import Image
from pydantic import AfterValidator
from torch import Tensor

from xdm_ft.images.transforms import Preprocessing, normalizing_transform, resizing_transform
from xdm_ft.runtime.randomness import Stream, uniform
from xdm_ft.runtime.settings import Block
from xdm_ft.storage import digest
from xdm_ft.version import code_of

if TYPE_CHECKING:
    from torchvision.transforms import Compose


class Draw(NamedTuple):
    """What the random numbers of an augmentation depend on, for one image."""

    seed: int  # of the image: 64 bits
    position: int  # of the augmentation among those of the image

    def uniform(self, count: int) -> list[float]:
        """Returns numbers in [0, 1)."""
        return uniform(self.seed, self.position, Stream.IMAGE_CHANGE, torch.arange(count)).tolist()


class Augmentation(Block, ABC):
    """An augmentation with its settings, which are its keys in a recipe."""

    replaces_resizing: ClassVar[bool] = False
    """Whether it gets the whole image and resizes it, in place of the encoder's own resizing."""

    @abstractmethod
    def apply(self, image: Image.Image, draw: Draw, preprocessing: Preprocessing) -> Image.Image:
        """Returns the changed image: RGB, of size × size pixels. `draw` alone decides what is random."""

    def steps(self, preprocessing: Preprocessing) -> list[Any]:
        """Returns what tells this augmentation from others: its text is part of the keys of features."""
        return [f"{self!r}, code {digest(code_of(type(self)))}"]

    @property
    def name(self) -> str:
        return type(self).__module__.rpartition(".")[2]

    def __str__(self) -> str:
        changed = self.model_dump(exclude_defaults=True)
        settings = ", ".join(f"{key} {value}" for key, value in changed.items())
        return f"{self.name} ({settings})" if settings else self.name


class Augmentations(tuple[Augmentation, ...]):
    """The augmentations of a training image, in their order. One that replaces the resizing comes first."""

    def __str__(self) -> str:
        return " + ".join(map(str, self)) or "none"


NO_AUGMENTATION = Augmentations()


def _ordered(ends: tuple[float, float]) -> tuple[float, float]:
    if ends[0] > ends[1]:
        raise ValueError("must be two numbers, the lower one first")
    return ends


ORDERED = AfterValidator(_ordered)
"""Marks a setting of two numbers, between which one is drawn."""


def between(ends: tuple[float, float], u: float) -> float:
    return ends[0] + u * (ends[1] - ends[0])


@dataclass(frozen=True)
class TrainingTransform:
    """A transform: RGB image of any size, seed (64 bits) → RGB image of size × size pixels."""

    preprocessing: Preprocessing
    augmentations: Augmentations

    def __call__(self, image: Image.Image, seed: int) -> Image.Image:
        if not (self.augmentations and self.augmentations[0].replaces_resizing):
            image = self._resize(image)
        for position, augmentation in enumerate(self.augmentations):
            image = augmentation.apply(image, Draw(seed, position), self.preprocessing)
        return image

    @cached_property
    def _resize(self) -> Compose:
        return resizing_transform(self.preprocessing)

    def tensor(self, image: Image.Image, seed: int) -> Tensor:
        """Returns the image as the encoder reads it, normalised: float32 [3, size, size].

        Without augmentations it has the encoder's own preprocessing, as in WILDS' examples when they train on
        Camelyon17 and FMoW (`image_base` without `additional_train_transform`).
        """
        tensor: Tensor = self._normalize(self(image, seed))
        return tensor

    def steps(self) -> Compose:
        """Returns all of its steps after the decoder's; their text says every setting."""
        from torchvision import transforms

        steps = [step for augmentation in self.augmentations for step in augmentation.steps(self.preprocessing)]
        return transforms.Compose([*steps, *self._normalize.transforms])

    @cached_property
    def _normalize(self) -> Compose:
        return normalizing_transform(self.preprocessing)
