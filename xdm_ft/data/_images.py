"""File or bytes → RGB image, and what a broken image is called."""

from __future__ import annotations

import errno
import io
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from xdm_ft.data import ImageDataset
from xdm_ft.errors import UserError, printable
from xdm_ft.progress import progress

ROWS_PER_TASK = 64
NAMED_AT_MOST = 3  # faults that a message spells out before it only counts
NO_PICTURES = {"BUFR", "GRIB", "HDF5", "MPEG", "WMF"}  # Pillow knows these by name but does not decode them
RUNS_PROGRAMS = {"EPS"}  # Ghostscript interprets the file
OF_THE_MACHINE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # say nothing about the image that was being read


class UnreadableImage(Exception):
    """An image that does not decode: its `name` for a message and the `reason`."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


class UndecodableInLoader(UserError):
    """`UserError` that stays one line when a DataLoader worker raises it.

    A DataLoader re-raises a worker's exception as `type(error)(text of the worker's whole traceback)`. The last line of
    that text is "<class>: <message>", and messages hold no newlines.
    """

    def __init__(self, text: str) -> None:
        last = text.rstrip().rsplit("\n", 1)[-1]
        super().__init__(last.removeprefix(f"{type(self).__module__}.{type(self).__qualname__}: "))


@lru_cache
def formats() -> tuple[str, ...]:
    """The formats that are read, by Pillow's names."""
    Image.init()
    return tuple(name for name in Image.OPEN if name not in NO_PICTURES | RUNS_PROGRAMS)


@lru_cache
def extensions() -> frozenset[str]:
    """The file name extensions of `formats()`, in lower case, with their dot."""
    known = set(formats())
    return frozenset(extension for extension, name in Image.registered_extensions().items() if name in known)


def decode(source: Path | bytes, name: str) -> Image.Image:
    """The first frame, upright (EXIF), as RGB. Transparent pixels show white, as on a page.

    16-bit and float greys keep their whole range: 0…65535 and 0…1 become 0…255. Raises `UnreadableImage` for anything
    that is no whole image, and for images of more pixels than `PIL.Image.MAX_IMAGE_PIXELS`.
    """
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=formats()) as image:
            limit = Image.MAX_IMAGE_PIXELS
            if limit is not None and image.width * image.height > limit:
                raise UnreadableImage(name, f"{image.width} × {image.height} pixels, more than the limit of {limit}")
            image.load()
            return _rgb(ImageOps.exif_transpose(image))
    except UnreadableImage as error:
        raise UnreadableImage(name, error.reason) from None
    except MemoryError:
        raise
    except Exception as error:  # PIL's decoders raise nearly anything on damaged files
        if isinstance(error, OSError) and error.errno in OF_THE_MACHINE:
            raise
        raise UnreadableImage(name, _reason(error)) from error


def _reason(error: Exception) -> str:
    if isinstance(error, Image.UnidentifiedImageError):
        return "not an image in a format that Pillow knows"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return printable(f"{error}" or type(error).__name__)


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":
        return _from_deep_grey(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def _from_deep_grey(image: Image.Image) -> Image.Image:
    # PIL's own conversion to 8 bits clips at 255 instead of scaling
    values = np.asarray(image)
    if image.mode == "F":
        if not (values.min() >= 0 and values.max() <= 1):
            raise UnreadableImage("", "float pixels outside 0…1: their scale is unknown")
        grey = np.rint(values * 255)
    else:
        values = values.astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise UnreadableImage("", "integer pixels outside 0…65535: their scale is unknown")
        grey = (values + 128) // 257  # 65535 = 255 · 257
    return Image.fromarray(grey.astype(np.uint8), mode="L").convert("RGB")


def scan(dataset: ImageDataset, workers: int, show: bool = True) -> dict[int, str]:
    """Decodes every image once: row → reason for those that do not decode, in row order."""

    def faults(rows: range) -> list[tuple[int, str]]:
        found = []
        for row in rows:
            try:
                dataset.image(row)
            except UnreadableImage as error:
                found.append((row, error.reason))
        return found

    def tasks() -> Iterator[range]:
        for first in range(0, len(dataset), ROWS_PER_TASK):
            yield range(first, min(first + ROWS_PER_TASK, len(dataset)))

    unreadable: dict[int, str] = {}
    # threads: Pillow decodes outside the interpreter lock
    with ThreadPoolExecutor(max(1, workers)) as pool, progress("checking", len(dataset), "images", show) as bar:
        for rows, found in zip(tasks(), pool.map(faults, tasks()), strict=True):
            unreadable.update(found)
            bar.advance(len(rows), f"{len(unreadable)} unreadable" if unreadable else "")
    return unreadable


def unreadable_message(unreadable: Mapping[int, str], dataset: ImageDataset) -> str:
    """One line that counts the images that do not decode, names the first and says what to do."""
    named = [f"{dataset.name(row)} ({reason})" for row, reason in list(unreadable.items())[:NAMED_AT_MOST]]
    more = len(unreadable) - len(named)
    count = "1 image does" if len(unreadable) == 1 else f"{len(unreadable)} images do"
    return (
        f"{count} not decode: {', '.join(named)}{f' and {more} more' if more else ''}; "
        "mend or remove them, or set data.on_bad_image: skip"
    )
