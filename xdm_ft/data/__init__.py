"""One file per data set. The file's stem is its name in a recipe, its class's constructor keywords are recipe keys.

What a data set promises is `ImageDataset`; decoding, transforms, splits and samplers are in `data/loading`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import numpy as np
from PIL import Image

Augmentation = Literal["none", "domainbed"]
"""Random changes of training images, see `xdm_ft.data._transforms.training_transform`."""


class ImageDataset(ABC):
    """N labelled images from D domains. Row i is the same image for ever: caches and splits refer to it by number.

    Constructors check what can be checked without decoding and raise `UserError`.
    """

    class_names: tuple[str, ...]  # C
    domain_names: tuple[str, ...]  # D
    labels: np.ndarray  # int64 [N]
    domains: np.ndarray  # int64 [N]
    groups: np.ndarray | None = None  # int64 [N]: patient, slide, sequence; None where unknown
    splits: np.ndarray | None = None
    """str [N], where the data set comes with a split: train | val | test; instead of val also train_val | val_domain,
    where the data set tells them apart and not the domain does; "" for an image that is in no part."""
    worst_of: np.ndarray | None = None
    """int64 [N], where the groups of the worst group's accuracy are not the domains; −1: in none of them."""

    def __len__(self) -> int:
        return len(self.labels)

    folder_order: bool = (
        False  # rows of a domain are in the order of class and file names, which DomainBed's split counts
    )
    train_augmentation: ClassVar[Augmentation] = "none"  # what is usual with it, end to end
    as_published: bool = False  # known to hold what was published: a class that a domain lacks, it lacks by nature

    @abstractmethod
    def image(self, row: int) -> Image.Image:
        """The decoded image, RGB, EXIF orientation applied. Raises `UnreadableImage` with its name."""

    @abstractmethod
    def name(self, row: int) -> str:
        """What to call the image in a message: its path, or its place in memory."""

    @abstractmethod
    def content(self, row: int) -> str | bytes:
        """What determines the image's pixels: the path of its file (str), or its bytes where there is no file."""
