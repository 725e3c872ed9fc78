"""Facts of image files that say how an image was made rather than what it shows: size, format, compression, camera.

A model that learns them instead of the content is right only where they go with the class. The last part is about the
values that pixels use.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageStat, JpegImagePlugin

from xdm_ft.images import ImageDataset, Range
from xdm_ft.images.decode import (
    IS_WIDE,
    ROWS_AT_ONCE,
    TYPE_LIMITS,
    EncodedImages,
    UnreadableImage,
    exif_of,
    is_wide_grey,
    memory_of,
    read_image,
    to_rgb,
    wide_colour,
)
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.machine import own_cores
from xdm_ft.runtime.progress import progress
from xdm_ft.runtime.watchdog import gather

if TYPE_CHECKING:
    from accelerate import Accelerator

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
BITS = (8, 10, 12, 14, 16)  # of `auto`
DARK = 26  # of 255: grey values below it are dark
BRIGHT_SHARE = 0.001  # of a domain's pixels that are not dark, at least
SAMPLE, SAMPLE_OF_ALL = 200, 4000  # images of a domain, and of all domains, at which a check looks
DRAFT = 64  # px: sides that are enough to see whether an image is dark
SEED = 0
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
    source = dataset.source(row)

    def facts(image: Image.Image) -> dict[str, float | str]:
        num_bytes = len(source) if isinstance(source, bytes) else source.stat().st_size
        facts = _size(image) | _file(image, num_bytes)  # before `draft`, which changes the size
        image.draft(None, (LEAST_SIDE, LEAST_SIDE))
        colour = None if dataset.intensity is None else wide_colour(image, source)
        return facts | _colour(to_rgb(image, dataset.intensity, colour))

    return read_image(source, dataset.name(row), facts)


def _size(image: Image.Image) -> dict[str, float | str]:
    return {"width": image.width, "height": image.height, "width / height": image.width / image.height}


def _file(image: Image.Image, num_bytes: int) -> dict[str, float | str]:
    exif = exif_of(image)
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
    names = [
        f"{statistic} {colour}"
        for statistic in ("mean", "spread of", "lightest")
        for colour in ("red", "green", "blue")
    ]
    return dict(zip(names, [*statistics.mean, *statistics.stddev, *lightest], strict=True))


# ---- The values that pixels use


class Extremes(NamedTuple):
    """The values of an image wider than 8 bits, as it stores them."""

    is_float: bool
    least: float
    largest: float

    def top(self, intensity: Range | None) -> float:
        """Returns the value that becomes 255."""
        return TYPE_LIMITS["float" if self.is_float else "integer"] if intensity is None else intensity.high

    def uses_more_than(self, share: float, intensity: Range | None) -> bool:
        """Whether its largest value lies above this share of what becomes 0…255."""
        low = 0.0 if intensity is None else intensity.low
        return self.largest > low + share * (self.top(intensity) - low)


class Pixels(NamedTuple):
    """What an image's pixels use."""

    bright: float  # share of the pixels that are not dark
    wide: Extremes | None  # None: the image has 8 bits


class PixelUse(NamedTuple):
    """What the pixels of several images use."""

    images: int
    bright: float  # share of the pixels that are not dark
    wide: int  # images wider than 8 bits
    extremes: list[Extremes]  # of these: of integers, of floats


class PixelCounts:
    """What the pixels of N images use, of those that were looked at. It is the `on_decoded` of a data set."""

    def __init__(self, images: int) -> None:
        # shared with processes that are forked later, such as the workers of a loader
        memory = mmap.mmap(-1, max(1, images) * 4 * np.dtype(np.float64).itemsize)
        self.values = np.frombuffer(memory).reshape(-1, 4)[:images]  # [N,4]
        """1 + `Pixels.bright`, or 0: nobody looked; then `Pixels.wide`, or NaN: 8 bits."""

    def __call__(self, dataset: EncodedImages, row: int, image: Image.Image) -> None:
        if not self.values[row, 0]:
            self.add(row, _pixels(dataset, row, image))

    def add(self, row: int, pixels: Pixels) -> None:
        self.values[row] = 1 + pixels.bright, *(pixels.wide or (np.nan,) * 3)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # on another machine nobody would see what is counted

    def add_copies(self, first: np.ndarray) -> None:
        """Counts the copies of images too. first: the first row of each row's image, int64 [N]; −1: unknown."""
        copies = (self.values[:, 0] == 0) & (first >= 0)
        self.values[copies] = self.values[first[copies]]

    def of(self, rows: np.ndarray) -> PixelUse | None:
        """Returns what these images use, bool [N]; None if nobody looked at any."""
        values = self.values[rows & (self.values[:, 0] > 0)]
        if not len(values):
            return None
        wide = values[~np.isnan(values[:, 1])]
        kinds = [wide[wide[:, 1] == is_float] for is_float in np.unique(wide[:, 1])]
        extremes = [Extremes(bool(of[0, 1]), float(of[:, 2].min()), float(of[:, 3].max())) for of in kinds]
        return PixelUse(len(values), float(values[:, 0].mean()) - 1, len(wide), extremes)

    def add_others(self, accelerator: Accelerator) -> bool:
        """Adds what the other processes of a run have counted. Returns whether there is anything."""
        rows = np.flatnonzero(self.values[:, 0])
        for of_process, values in gather(accelerator, [(rows, self.values[rows])]):
            self.values[of_process] = values
        return bool(self.values[:, 0].any())


@contextmanager
def counting_pixels(dataset: ImageDataset) -> Iterator[PixelCounts]:
    """Context in which the pixels of images are counted as they are decoded; of encoded images alone."""
    counts = PixelCounts(len(dataset))
    if not isinstance(dataset, EncodedImages):
        yield counts
        return
    dataset.on_decoded = counts
    try:
        yield counts
    finally:
        dataset.on_decoded = None


def extremes(dataset: ImageDataset, row: int) -> Extremes | None:
    """Returns the extremes of an image's values; None if it has 8 bits, does not decode, or is not finite.

    Of an image with 8 bits the header alone is read.
    """
    if not isinstance(dataset, EncodedImages):
        return None
    source = dataset.source(row)

    def values(image: Image.Image) -> np.ndarray | None:
        return np.asarray(image) if is_wide_grey(image) else wide_colour(image, source)

    try:
        of_image = read_image(source, dataset.name(row), values)
    except UnreadableImage:
        return None
    if of_image is None or not np.isfinite(of_image).all():
        return None
    return Extremes(of_image.dtype.kind == "f", float(of_image.min()), float(of_image.max()))


def automatic(found: Iterable[Extremes]) -> Range | None:
    """Returns the range of `data.intensity: auto`, of the extremes of all wider images; None: there are none.

    It is 0 to 2ᵇ − 1, b the fewest of `BITS` that hold the largest value. Floats, and integers that no b holds or that
    are below 0, have the range from the least value to the largest. Raises `UserError` if no range fits.
    """
    images = [*found]
    if not images:
        return None
    if len({image.is_float for image in images}) == 2:
        problem = "some images hold integers and others floats, whose scales differ"
        raise UserError(f"data.intensity: auto: {problem}; convert one kind, or set {{low, high}}")
    low, high = range_of(images)
    if low == high:
        raise UserError(f"data.intensity: auto: all pixels wider than 8 bits are {low:g}; set {{low, high}}")
    return Range(low=low, high=high)


def range_of(images: Sequence[Extremes]) -> tuple[float, float]:
    """Returns the range that holds all values of one or more images, as `automatic` takes it."""
    low, high = min(image.least for image in images), max(image.largest for image in images)
    if any(image.is_float for image in images) or low < 0:
        return low, high
    return next(((0.0, 2.0**bits - 1) for bits in BITS if high <= 2**bits - 1), (low, high))


def pixels(dataset: ImageDataset, row: int) -> Pixels | None:
    """Returns what the pixels of an image use, which is decoded; None if it does not decode."""
    try:
        with memory_of(dataset.name(row)):
            return _pixels(dataset, row, dataset.draft(row, DRAFT))
    except UnreadableImage:
        return None


def _pixels(dataset: ImageDataset, row: int, image: Image.Image) -> Pixels:
    width, height = (min(side, 2 * DRAFT) for side in image.size)  # points of a grid are enough
    histogram = image.resize((width, height), Image.Resampling.NEAREST).convert("L").histogram()
    return Pixels(sum(histogram[DARK:]) / sum(histogram), extremes(dataset, row) if image.info.get(IS_WIDE) else None)


def sample_of_domains(dataset: ImageDataset) -> np.ndarray:
    """Returns the rows of a seeded sample: int64, sorted, at most `SAMPLE` of a domain.

    Of a table in pieces, it takes few whole pieces, as reading one image reads its piece.
    """
    generator, rows = np.random.default_rng(SEED), np.arange(len(dataset))
    order = generator.permutation(len(rows))
    pieces = None if dataset.container is None else dataset.container.pieces
    if pieces is not None:
        of_row = generator.permutation(len(pieces.ends))[pieces.of_row(rows)]
        order = order[np.argsort(of_row[order], kind="stable")]
    most = max(1, min(SAMPLE, SAMPLE_OF_ALL // len(dataset.domain_names)))
    by_domain = [order[dataset.domains[order] == domain][:most] for domain in range(len(dataset.domain_names))]
    return np.sort(np.concatenate(by_domain))
