"""Images: found, decoded, transformed, loaded. Here: the base class of data sets."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from PIL import Image
from pydantic import BeforeValidator, model_validator

from xdm_ft.runtime.settings import Block

NOT_ORDERED = "low and high must be finite, and low below high"


class Range(Block):
    """Values of pixels that become 0 and 255."""

    low: float
    high: float

    @model_validator(mode="after")
    def _ordered(self) -> Range:
        if not (self.low < self.high and math.isfinite(self.high - self.low) and self.high - self.low > 1e-300):
            raise ValueError(NOT_ORDERED)
        return self

    def __str__(self) -> str:
        return "…".join(repr(value).removesuffix(".0") for value in (self.low, self.high))


def _check(value: Any) -> Any:
    """Returns the value. Raises `ValueError`, one line where pydantic would have one for each type that is allowed."""
    if isinstance(value, Range) or value in ("type", "auto"):
        return value
    ends = [*value.values()] if isinstance(value, Mapping) and value.keys() == {"low", "high"} else []
    if not ends or any(isinstance(end, bool) or not isinstance(end, int | float) for end in ends):
        raise ValueError("must be type, auto, or two numbers {low: 0, high: 4095}")
    if not (all(abs(end) <= 1e300 for end in ends) and value["low"] < value["high"]):  # integers may be huge
        raise ValueError(NOT_ORDERED)
    return value


Intensity = Annotated[Literal["type", "auto"] | Range, BeforeValidator(_check)]
"""`data.intensity`: what becomes 0…255 of images wider than 8 bits."""


class FileState(NamedTuple):
    """What tells a file from a changed one without reading it."""

    size: int
    version: str  # ETag, else the time of the last change; on this machine the times of modification and status change


class Container(NamedTuple):
    """The files of a table that holds the bytes of all images, in the order of the rows, and the column."""

    files: tuple[str, ...]  # paths or addresses
    column: str
    pieces: Pieces | None = None  # None: any image may be in any of the files


class Pieces(NamedTuple):
    """P runs of rows that are read at once, each from one file. The images of a piece are bytes, none is a file."""

    ends: np.ndarray  # int64 [P]: the row after the last one of each
    file_of: np.ndarray  # int64 [P], index of `Container.files`
    states: tuple[FileState, ...]  # of the files, when rows and pieces were counted

    def of_row(self, row: int | np.ndarray) -> np.ndarray:
        """Returns the number of the piece that a row is in."""
        return np.searchsorted(self.ends, row, side="right")

    def rows(self, number: int) -> range:
        return range(int(self.ends[number - 1]) if number else 0, int(self.ends[number]))

    def in_file(self, number: int) -> int:
        """Returns the number of a piece among those of its file."""
        return number - int(np.searchsorted(self.file_of, self.file_of[number]))


class ImageDataset(ABC):
    """N labelled images from D domains. Row i must always be the same image: splits refer to row numbers.

    Constructors check everything that needs no decoding and raise `UserError`.
    """

    class_names: tuple[str, ...]  # C
    domain_names: tuple[str, ...]  # D
    labels: np.ndarray  # int64 [N]
    domains: np.ndarray  # int64 [N]
    groups: np.ndarray | None = None  # int64 [N]: patient, slide or sequence; None if unknown
    group_names: tuple[str, ...] | None = None  # of the numbers in `groups`; None: they have no other name
    columns: tuple[Sequence[str], Sequence[str]] | None = None  # of a table of images: those that are read, and others
    soft_labels: np.ndarray | None = None  # float32 [N,C], rows with sum 1; `labels` is among each row's largest
    splits: np.ndarray | None = None
    """str [N], None if the data set has no split of its own: train | val | test; "" for an image in no part. The
    official protocol takes val as train_val if its domain also trains, else as val_domain; a data set may also name
    these two itself."""
    worst_of: np.ndarray | None = None
    """int64 [N], the groups of `worst_domain_accuracy` if they are not the domains; −1: in no group."""
    folder_order: bool = False
    """Whether the rows of a domain are in the order of class and file names, on which DomainBed's split depends."""
    train_augmentation: ClassVar[str] = "none"
    """The default augmentation of end-to-end training and of `features.views`."""
    has_images: ClassVar[bool] = True
    """Whether there are images; else rows have `features` that were computed elsewhere."""
    container: Container | None = None
    """Where `content` reads bytes from, if it is a table on the disk: as long as its files stay, so do all contents."""
    left_out: tuple[str, ...] = ()
    """What looks like data and yields no image, a line each: "problem, the first: NAME; remedy"."""
    intensity: Range | None = None
    """What becomes 0…255 of images wider than 8 bits; None: the range of their types. See `images.decode.decode`."""
    small_domains: tuple[str, ...] = ()
    """Domains that `data.domain_min` has joined to one, or left out."""
    never_held_out: tuple[str, ...] = ()
    """Domains that train only, as they are too small."""
    as_published: bool = False
    """Whether the images are known to be the published ones. A class missing from a domain is then not reported."""

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def image(self, row: int) -> Image.Image:
        """Returns the decoded image: RGB, EXIF orientation applied. Raises `UnreadableImage` with its name."""

    def draft(self, row: int, least_side: int | None) -> Image.Image:
        """Returns the image, or a smaller one with sides of `least_side` px or more if that decodes faster."""
        return self.image(row)

    @property
    def decoder(self) -> str:
        """A name for what decodes `content`: one content under one decoder is one image, in any data.

        It is part of the keys of features, so it must never change.
        """
        return f"{type(self).image.__module__}.{type(self).image.__qualname__}"

    @abstractmethod
    def name(self, row: int) -> str:
        """Returns the name of the image for messages: its path, or its place in a table or in memory."""

    def name_in_data(self, row: int) -> str:
        """Returns the name of the image in predictions, one line that does not depend on where the data lie."""
        return self.name(row)

    @abstractmethod
    def content(self, row: int) -> str | bytes:
        """Returns what determines the pixels: the path of the image file (str), or the bytes if there is no file.

        The decoder must not depend on anything else of the data set.
        """
