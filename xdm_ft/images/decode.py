"""Decodes a file or bytes to an RGB image; finds and describes images that do not decode."""

from __future__ import annotations

import errno
import functools
import importlib
import io
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from xdm_ft.images import ImageDataset
from xdm_ft.runtime.errors import UserError, printable
from xdm_ft.runtime.progress import progress

ROWS_AT_ONCE = 1024  # that are given to the threads together
NAMED_AT_MOST = 3  # faults that a message names; it counts the others
NOT_DECODED = {"BUFR", "GRIB", "HDF5", "MPEG", "WMF"}  # Pillow recognizes these formats but cannot decode them
EXECUTED = {"EPS"}  # Pillow starts Ghostscript, which runs the file as a program
HEIC = (".heic", ".heif", ".hif")
HEIC_REMEDY = "pip install pillow-heif, which reads HEIC"
OF_THE_MACHINE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # the machine lacks something; the image may be good

logger = logging.getLogger("xdm_ft")
logging.getLogger("PIL").setLevel(logging.CRITICAL)  # it logs an error, without a name, and then raises the exception


DECODER = "xdm_ft.data._images.EncodedImages.image"
"""`ImageDataset.decoder` of `EncodedImages`: where it was when the first features were cached under this name."""


class UnreadableImage(Exception):
    """An image does not decode: `name` of the image for messages, and the `reason`."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


class FaultInLoader(UserError):
    """`UserError` that stays one line when a DataLoader worker raises it."""

    def __init__(self, text: str) -> None:
        # A DataLoader re-raises a worker's exception as type(error)(text of the worker's traceback). The last line of
        # that text is "<class>: <message>", as messages contain no newlines.
        last = text.rstrip().rsplit("\n", 1)[-1]
        super().__init__(last.removeprefix(f"{type(self).__module__}.{type(self).__qualname__}: "))


@contextmanager
def memory_of(name: str) -> Iterator[None]:
    """Context in which one image is decoded and transformed.

    Raises `UserError` with the image's `name` if the machine lacks memory or file handles.
    """
    try:
        yield
    except MemoryError as error:
        problem = "memory is full while this image is decoded or resized; free memory, or make the image smaller"
        raise FaultInLoader(f"{name}: {problem}") from error
    except OSError as error:
        if error.errno not in OF_THE_MACHINE:
            raise
        raise FaultInLoader(f"{name}: {error.strerror}; free some and run again") from error


@functools.lru_cache
def formats() -> tuple[str, ...]:
    """Returns Pillow's names of the formats that `decode` reads: HEIC is one where `pillow_heif` is installed."""
    Image.init()
    with suppress(ImportError):
        importlib.import_module("pillow_heif").register_heif_opener()
    return tuple(name for name in Image.OPEN if name not in NOT_DECODED | EXECUTED)


@functools.lru_cache
def extensions() -> frozenset[str]:
    """Returns the file name extensions of `formats()`, in lower case, with the dot."""
    names = formats()  # first, as it registers more
    return frozenset(extension for extension, name in Image.registered_extensions().items() if name in names)


class _PillowWarnings:
    """Collects the warnings of the image that each thread decodes.

    `warnings.catch_warnings` changes the whole process: the first thread that decodes enters it, the last one leaves.
    """

    def __init__(self) -> None:
        self.lock, self.threads, self.of_thread = threading.Lock(), 0, threading.local()
        self.caught = warnings.catch_warnings()
        self.images = 0  # number of images that had warnings

    @contextmanager
    def logged(self, name: str) -> Iterator[None]:
        """Context in which the image `name` is decoded. Logs its warnings if it decodes."""
        with self.lock:
            if self.threads == 0:
                self.caught = warnings.catch_warnings()
                self.caught.__enter__()
                warnings.filterwarnings("always", module="PIL")
                # `decode` refuses images above the limit itself
                warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
                warnings.showwarning = functools.partial(self._collect, warnings.showwarning)
            self.threads += 1
        self.of_thread.texts = texts = dict[str, None]()
        try:
            yield
        finally:
            self.of_thread.texts = None
            with self.lock:
                self.threads -= 1
                if self.threads == 0:
                    self.caught.__exit__(None, None, None)
        if texts:
            with self.lock:  # several threads decode: each image counts once, and the last line comes last
                self.images += 1
                if self.images <= NAMED_AT_MOST:
                    logger.warning("%s: parts of the file are damaged (%s); check the image", name, "; ".join(texts))
                if self.images == NAMED_AT_MOST:
                    logger.warning("further images with damaged parts are not named")

    def _collect(self, otherwise: Callable[..., None], message: Warning, *where: Any, **options: Any) -> None:
        texts = getattr(self.of_thread, "texts", None)
        if texts is None:  # of a thread that decodes nothing
            otherwise(message, *where, **options)
        else:
            texts[" ".join(str(message).split())] = None


_pillow_warnings = _PillowWarnings()


@contextmanager
def open_image(source: Path | bytes, name: str) -> Iterator[Image.Image]:
    """Context with an image file whose header is read; what is decoded inside is guarded too.

    Raises `UnreadableImage` for a damaged or truncated image, and for an image with more pixels than
    `PIL.Image.MAX_IMAGE_PIXELS`. Logs Pillow's warnings.
    """
    file = io.BytesIO(source) if isinstance(source, bytes) else source
    try:
        with _pillow_warnings.logged(name), Image.open(file, formats=formats()) as image:
            # Pillow refuses an image only above twice the limit; between the two it warns
            limit = Image.MAX_IMAGE_PIXELS
            if limit is not None and image.width * image.height > limit:
                raise UnreadableImage(name, f"{image.width} × {image.height} pixels, more than the limit of {limit}")
            yield image
    except UnreadableImage as error:
        raise UnreadableImage(name, error.reason) from None
    except MemoryError:
        raise
    except Image.UnidentifiedImageError as error:
        hint = f"; {HEIC_REMEDY}" if name.lower().endswith(HEIC) else ""
        raise UnreadableImage(name, f"not an image in a format that Pillow reads{hint}") from error
    except Image.DecompressionBombError as error:  # above twice the limit
        raise UnreadableImage(name, f"more pixels than the limit of {Image.MAX_IMAGE_PIXELS}") from error
    except Exception as error:  # damaged files make Pillow's decoders raise nearly any type
        if isinstance(error, OSError) and error.errno in OF_THE_MACHINE:
            raise
        if isinstance(error, OSError) and error.strerror:
            hint = "; write / instead of \\" if error.errno == errno.ENOENT and "\\" in name else ""
            raise UnreadableImage(name, f"{error.strerror}{hint}") from error
        raise UnreadableImage(name, printable(f"{error}" or type(error).__name__)) from error


def decode(source: Path | bytes, name: str, least_side: int | None = None) -> Image.Image:
    """Returns the first frame as RGB, EXIF orientation applied. Transparent pixels become white.

    16-bit and float greys keep their whole range: 0…65535 and 0…1 become 0…255. `least_side`: a JPEG is decoded at 1/2,
    1/4 or 1/8 of its size where no side gets shorter than this many pixels (Pillow's draft mode). Raises and logs as
    `open_image` does.
    """
    with open_image(source, name) as image:
        if least_side is not None:
            image.draft(None, (least_side, least_side))
        # inside the context: `Image.open` reads the header alone, and damage shows here
        image.load()
        return to_rgb(image)


class EncodedImages(ImageDataset):
    """Images whose content is an encoded image file, on the disk or as bytes. All such data sets decode alike."""

    decoder = DECODER

    def image(self, row: int, least_side: int | None = None) -> Image.Image:
        content = self.content(row)
        return decode(content if isinstance(content, bytes) else Path(content), self.name(row), least_side)

    def draft(self, row: int, least_side: int | None) -> Image.Image:
        return (
            self.image(row) if least_side is None else self.image(row, least_side)
        )  # of a subclass with an `image` of its own


def to_rgb(image: Image.Image) -> Image.Image:
    """Returns an opened image as `decode` does. Raises `UnreadableImage` for grey values of unknown scale."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I") or image.mode == "F":
        # Pillow's own conversion to 8 bits clips at 255 instead of scaling
        values, is_float = np.asarray(image), image.mode == "F"
        kind, limit = ("float", 1) if is_float else ("integer", 65535)
        values = values if is_float else values.astype(np.int64)
        if not (values.min() >= 0 and values.max() <= limit):  # also of NaN
            raise UnreadableImage("", f"{kind} pixels outside 0…{limit}, so that their scale is unknown")
        grey = np.rint(values * 255) if is_float else (values + 128) // 257  # rounded, as 65535 = 255 · 257
        return Image.fromarray(grey.astype(np.uint8), mode="L").convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def scan(
    dataset: ImageDataset,
    workers: int,
    check: Callable[[Image.Image], object] | None = None,
    show: bool = True,
    rows: Sequence[int] | None = None,
) -> dict[int, str]:
    """Decodes every image, or those of `rows`, once. Returns {row: reason} for those that do not decode, in order.

    `check` may raise `UnreadableImage` for an image that decodes.
    """

    def fault(row: int) -> str | None:
        try:
            with memory_of(dataset.name(row)):
                image = dataset.image(row)
            if check is not None:
                check(image)
        except UnreadableImage as error:
            return error.reason
        return None

    wanted, unreadable = range(len(dataset)) if rows is None else rows, dict[int, str]()
    # threads suffice: Pillow releases the interpreter lock while it decodes
    with ThreadPoolExecutor(max(1, workers)) as pool, progress("checking", len(wanted), "images", show) as bar:
        for first in range(0, len(wanted), ROWS_AT_ONCE):
            some = wanted[first : first + ROWS_AT_ONCE]
            reasons = zip(some, pool.map(fault, some), strict=True)
            unreadable.update({row: reason for row, reason in reasons if reason is not None})
            bar.advance(len(some), f"{len(unreadable)} unreadable" if unreadable else "")
    return unreadable


def unreadable_message(unreadable: Mapping[int, str], dataset: ImageDataset) -> str:
    """Returns one line: the number of images that do not decode, the names of the first, and what to do."""
    named = [f"{dataset.name(row)} ({reason})" for row, reason in list(unreadable.items())[:NAMED_AT_MOST]]
    more = len(unreadable) - len(named)
    count = "1 image does" if len(unreadable) == 1 else f"{len(unreadable)} images do"
    return (
        f"{count} not decode: {', '.join(named)}{f' and {more} more' if more else ''}; "
        "repair or remove them, or set data.on_bad_image: skip"
    )
