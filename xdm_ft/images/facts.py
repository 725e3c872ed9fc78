"""Facts of image files that say how an image was made rather than what it shows: size, format, compression, camera.

A model that learns them instead of the content is right only where they go with the class.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageStat, JpegImagePlugin

from xdm_ft.images import ImageDataset
from xdm_ft.images.decode import ROWS_AT_ONCE, EncodedImages, UnreadableImage, memory_of, open_image, to_rgb
from xdm_ft.runtime.machine import own_cores
from xdm_ft.runtime.progress import progress

LEAST_SIDE = 64  # px, of the decoded image whose colours are measured
FACTS = {
    "width": "size",
    "height": "size",
    "width / height": "size",
    "format": "format",
    "mode": "format",
    "JPEG luminance table": "compression",  # mean of the quantization steps: the coarser, the lower the quality
    "JPEG colour table": "compression",
    "JPEG colour subsampling": "compression",  # Pillow's number: 0 is 4:4:4, 1 is 4:2:2, 2 is 4:2:0
    "JPEG progressive": "compression",
    "camera": "EXIF camera",
    "lightest red": "lightest colour",  # the 98th percentile: white paper shows a tint that the mean colour hides
    "lightest green": "lightest colour",
    "lightest blue": "lightest colour",
    "bytes per pixel": "bytes per pixel",
    "mean red": "colour",
    "mean green": "colour",
    "mean blue": "colour",
    "spread of red": "colour",
    "spread of green": "colour",
    "spread of blue": "colour",
}
"""Fact → its family."""
CONTENT = ("bytes per pixel", "colour")  # families that depend on what an image shows too: foxes are red
LIGHTEST = 0.98  # share of the pixels that are at most as light
CATEGORIES = ("format", "mode", "camera")  # texts; the other facts are numbers
MISSING = -1.0  # of a number that the file lacks, such as the tables of a PNG; all numbers are at least 0


@dataclass(frozen=True)
class ImageFacts:
    """The facts of n images. A column per key of `FACTS`, in this order; categories are numbered."""

    rows: np.ndarray  # int64 [n], rows of the data set whose image can be read
    values: np.ndarray  # float64 [n,F]

    def columns(self, families: Sequence[str]) -> np.ndarray:
        """Returns the facts of some families: float64 [n, columns of these]."""
        return self.values[:, [family in families for family in FACTS.values()]]


def image_facts(dataset: ImageDataset, rows: np.ndarray, show: bool = True) -> ImageFacts:
    """Returns the facts of these rows; an image that cannot be read is skipped. `show`: whether to show progress."""

    def read(row: int) -> dict[str, float | str] | None:
        try:
            with memory_of(dataset.name(row)):
                return facts_of_row(dataset, row)
        except UnreadableImage:
            return None

    facts: dict[int, dict[str, float | str]] = {}
    with ThreadPoolExecutor(own_cores()) as pool, progress("facts", len(rows), "images", show) as bar:
        for first in range(0, len(rows), ROWS_AT_ONCE):
            some = rows[first : first + ROWS_AT_ONCE].tolist()
            facts.update({row: of for row, of in zip(some, pool.map(read, some), strict=True) if of is not None})
            bar.advance(len(some))
    values = np.full((len(facts), len(FACTS)), MISSING)
    for column, name in enumerate(FACTS):
        entries = [of.get(name, "" if name in CATEGORIES else MISSING) for of in facts.values()]
        # numbered in the order of the alphabet, so that the numbers depend neither on the threads nor on the sample
        values[:, column] = np.unique(entries, return_inverse=True)[1] if name in CATEGORIES else entries
    return ImageFacts(np.fromiter(facts, np.int64, len(facts)), values)


def facts_of_row(dataset: ImageDataset, row: int) -> dict[str, float | str]:
    """Returns those of `FACTS` that an image has. Raises `UnreadableImage`. Data without files have size and colour."""
    if not isinstance(dataset, EncodedImages):
        image = dataset.image(row)
        return _size(image) | _colour(image)
    content = dataset.content(row)
    source = content if isinstance(content, bytes) else Path(content)
    with open_image(source, dataset.name(row)) as image:
        num_bytes = len(source) if isinstance(source, bytes) else source.stat().st_size
        facts = _size(image) | _file(image, num_bytes)  # before `draft`, which changes the size
        image.draft(None, (LEAST_SIDE, LEAST_SIDE))
        image.load()
        return facts | _colour(to_rgb(image))


def _size(image: Image.Image) -> dict[str, float | str]:
    return {"width": image.width, "height": image.height, "width / height": image.width / image.height}


def _file(image: Image.Image, num_bytes: int) -> dict[str, float | str]:
    exif = image.getexif()
    camera = " ".join(f"{exif.get(tag, '')}".strip("\0 ") for tag in (ExifTags.Base.Make, ExifTags.Base.Model))
    facts: dict[str, float | str] = {
        "format": image.format or "",
        "mode": image.mode,
        "bytes per pixel": num_bytes / (image.width * image.height),
        "camera": camera.strip(),
    }
    if isinstance(image, JpegImagePlugin.JpegImageFile):
        tables = [float(np.mean(table)) for table in image.quantization.values()]
        facts |= dict(zip(("JPEG luminance table", "JPEG colour table"), tables, strict=False))
        facts["JPEG colour subsampling"] = JpegImagePlugin.get_sampling(image)
        facts["JPEG progressive"] = bool(image.info.get("progressive"))
    return facts


def _colour(image: Image.Image) -> dict[str, float | str]:
    statistics, below = ImageStat.Stat(image), np.cumsum(np.reshape(image.histogram(), (3, 256)), 1)
    lightest = [int(np.searchsorted(channel, LIGHTEST * channel[-1])) for channel in below]
    names = [f"{what} {colour}" for what in ("mean", "spread of", "lightest") for colour in ("red", "green", "blue")]
    return dict(zip(names, [*statistics.mean, *statistics.stddev, *lightest], strict=True))
