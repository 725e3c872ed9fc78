"""Decodes a file or bytes to an RGB image; finds and describes images that do not decode."""

from __future__ import annotations

import errno
import functools
import importlib
import io
import logging
import struct
import sys
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import ExifTags, Image
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import BITSPERSAMPLE, PHOTOMETRIC_INTERPRETATION, SAMPLEFORMAT, TiffImageFile

from xdm_ft.images import ImageDataset, Range
from xdm_ft.runtime.errors import UserError, printable
from xdm_ft.runtime.progress import progress

T = TypeVar("T")
ROWS_AT_ONCE = 1024  # that are given to the threads together
NAMED_AT_MOST = 3  # faults that a message names; it counts the others
NOT_DECODED = {"BUFR", "GRIB", "HDF5", "MPEG", "WMF"}  # Pillow recognizes these formats but cannot decode them
EXECUTED = {"EPS"}  # Pillow starts Ghostscript, which runs the file as a program
HEIC = (".heic", ".heif", ".hif")
HEIC_REMEDY = "pip install pillow-heif, which reads HEIC"
TYPE_LIMITS = {"integer": 65535.0, "float": 1.0}  # of pixels wider than 8 bits: what becomes 255
IS_WIDE = "wider than 8 bits"  # key of `Image.info`
OTHER_BYTE = {"16L": "16B", "16B": "16L", "16N": f"16{'B' if sys.byteorder == 'little' else 'L'}"}
OF_THE_MACHINE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # the machine lacks something; the image may be good

UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF orientation → what undoes it."""
PNG, TIFF = b"\x89PNG\r\n\x1a\n", {b"II*\0": "<", b"MM\0*": ">"}
EXIF = b"Exif\0\0"
# descriptions, XMP, IPTC, Photoshop, EXIF, ICC profile, GPS, interoperability; 65000 is a private tag, which is skipped
TIFF_OPTIONAL, PRIVATE = {*range(269, 273), 305, 306, 315, 316, 700, 33432, 33723, 34377, 34665, 34675, 34853}, 65000

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
                size = f"{image.width} × {image.height} pixels"
                raise UnreadableImage(name, f"{size}, more than the limit of {limit}: cut it into tiles")
            if isinstance(image, TiffImageFile):
                image.filename = ""  # else Pillow maps the stored rows of an image to its size when turned upright
            yield image
    except UnreadableImage as error:
        raise UnreadableImage(name, error.reason) from None
    except MemoryError:
        raise
    except Image.UnidentifiedImageError as error:
        hint = f"; {HEIC_REMEDY}" if name.lower().endswith(HEIC) else ""
        raise UnreadableImage(name, f"not an image in a format that Pillow reads{hint}") from error
    except Image.DecompressionBombError as error:  # above twice the limit
        raise UnreadableImage(
            name, f"more pixels than the limit of {Image.MAX_IMAGE_PIXELS}: cut it into tiles"
        ) from error
    except Exception as error:  # damaged files make Pillow's decoders raise nearly any type
        if isinstance(error, OSError) and error.errno in OF_THE_MACHINE:
            raise
        if isinstance(error, OSError) and error.strerror:
            hint = "; write / instead of \\" if error.errno == errno.ENOENT and "\\" in name else ""
            raise UnreadableImage(name, f"{error.strerror}{hint}") from error
        raise UnreadableImage(name, printable(f"{error}" or type(error).__name__)) from error


def read_image(source: Path | bytes, name: str, read: Callable[[Image.Image], T]) -> T:
    """Returns what `read` returns of the opened image. Raises and logs as `open_image` does.

    If that fails, the file is tried without its optional metadata: they may be larger than Pillow allows, or damaged.
    """
    try:
        with open_image(source, name) as image:
            refuse_misread(image)
            return read(image)
    except UnreadableImage as error:
        try:
            pixels = without_metadata(source if isinstance(source, bytes) else source.read_bytes())
            if pixels is None or pixels == source:
                raise error
            with open_image(pixels, name) as image:
                refuse_misread(image)
                return read(image)
        except (UnreadableImage, OSError, ValueError):  # ValueError: a null byte in the path
            raise error from None


def refuse_misread(image: Image.Image) -> None:
    """Raises `UnreadableImage` for a TIFF whose values Pillow returns as others: signed, inverted, or above 2³¹."""
    if not isinstance(image, TiffImageFile):
        return
    signed = 2 in image.tag_v2.get(SAMPLEFORMAT, ())
    if signed and 8 in image.tag_v2.get(BITSPERSAMPLE, ()):
        raise UnreadableImage("", "signed 8-bit pixels, which Pillow reads as unsigned: write them as 16-bit integers")
    if is_wide_grey(image):
        if image.tag_v2.get(PHOTOMETRIC_INTERPRETATION) == 0:
            raise UnreadableImage("", "a TIFF wider than 8 bits whose 0 is white: write it with 0 as black")
        if image.mode == "I" and not signed and np.asarray(image).min() < 0:
            raise UnreadableImage("", "unsigned 32-bit pixels above 2³¹ − 1: write them as 16-bit integers or floats")


def decode(
    source: Path | bytes, name: str, least_side: int | None = None, intensity: Range | None = None
) -> Image.Image:
    """Returns the first frame as RGB, EXIF orientation applied. Transparent pixels become white.

    Images wider than 8 bits: `intensity` becomes 0…255; None: 0…65535 of integers and 0…1 of floats, which is the
    whole range of their types. `least_side`: a JPEG is decoded at 1/2, 1/4 or 1/8 of its size where no side gets
    shorter than this many pixels (Pillow's draft mode). Raises and logs as `open_image` does.
    """

    def read(image: Image.Image) -> Image.Image:
        if least_side is not None:
            image.draft(None, (least_side, least_side))
        is_wide = is_wide_grey(image) or wide_colour_modes(image) is not None  # before `load`, which forgets the modes
        rgb = to_rgb(image, intensity, None if intensity is None else wide_colour(image, source))
        if is_wide:
            rgb.info[IS_WIDE] = True
        return rgb

    return read_image(source, name, read)


def decoder_of(intensity: Range | None) -> str:
    """Returns the `ImageDataset.decoder` of `decode`."""
    return DECODER if intensity is None else f"{DECODER} {intensity}"


class EncodedImages(ImageDataset):
    """Images whose content is an encoded image file, on the disk or as bytes. All such data sets decode alike."""

    on_decoded: Callable[[EncodedImages, int, Image.Image], None] | None = None
    """Called with every row that is decoded, and its image."""

    @property
    def decoder(self) -> str:
        return decoder_of(self.intensity)

    def source(self, row: int) -> Path | bytes:
        """Returns the content of an image for `decode`."""
        content = self.content(row)
        return content if isinstance(content, bytes) else Path(content)

    def image(self, row: int, least_side: int | None = None) -> Image.Image:
        image = decode(self.source(row), self.name(row), least_side, self.intensity)
        if self.on_decoded is not None:
            self.on_decoded(self, row, image)
        return image

    def draft(self, row: int, least_side: int | None) -> Image.Image:
        return (
            self.image(row) if least_side is None else self.image(row, least_side)
        )  # of a subclass with an `image` of its own


def to_rgb(image: Image.Image, intensity: Range | None = None, colour: np.ndarray | None = None) -> Image.Image:
    """Returns an opened image as `decode` does. `colour`: its `wide_colour`.

    Raises `UnreadableImage` for grey values of unknown scale.
    """
    image.load()  # `Image.open` reads the header alone, and damage shows here; a TIFF is upright only then
    image = upright(image)
    if is_wide_grey(image):
        # Pillow's own conversion to 8 bits clips at 255 instead of scaling
        return Image.fromarray(to_8_bits(np.asarray(image), intensity)).convert("RGB")
    if colour is not None:
        wide = Image.fromarray(to_8_bits(colour, intensity))
        if image.mode == "RGBA":
            wide.putalpha(image.getchannel("A"))
        image = wide
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def to_8_bits(values: np.ndarray, intensity: Range | None) -> np.ndarray:
    """Integers or floats of any shape → uint8 of the same shape, rounded; `intensity` is as in `decode`.

    What lies outside of an intensity becomes 0 or 255. Raises `UnreadableImage` for values outside of a type's range,
    and for those that are not finite.
    """
    is_float = values.dtype.kind == "f"
    if intensity is None:
        kind = "float" if is_float else "integer"
        limit, values = round(TYPE_LIMITS[kind]), values if is_float else values.astype(np.int64)
        if not (values.min() >= 0 and values.max() <= limit):  # also of NaN
            raise UnreadableImage(
                "", f"{kind} pixels outside 0…{limit}, so that their scale is unknown: set data.intensity"
            )
        scaled = np.rint(values * 255) if is_float else (values + 128) // 257  # rounded, as 65535 = 255 · 257
        return scaled.astype(np.uint8)
    if is_float and not np.isfinite(values).all():
        raise UnreadableImage("", "pixels that are NaN or infinite")
    scaled = values.astype(np.float64)
    np.clip(scaled, intensity.low, intensity.high, out=scaled)
    scaled -= intensity.low
    scaled *= 255 / (intensity.high - intensity.low)
    return np.rint(scaled).astype(np.uint8)


def wide_colour(image: Image.Image, source: Path | bytes) -> np.ndarray | None:
    """Returns the colours uint16 [H,W,3] of a PNG or TIFF with 16 bits per channel, of which Pillow keeps the higher
    bytes; None for other images. `image`: opened from the `source`, and not loaded.

    Premultiplied colours and CMYK are not read so: they stay as Pillow has them.
    """
    modes = wide_colour_modes(image)
    if modes is None or not isinstance(image, PngImageFile | TiffImageFile):
        return None
    mode, other = modes
    with type(image)(io.BytesIO(source) if isinstance(source, bytes) else source) as again:
        again.tile = [
            tile._replace(args=other if isinstance(tile.args, str) else (other, *(tile.args or ())[1:]))
            for tile in again.tile
        ]
        low = np.asarray(upright(again), np.uint16)
    high = low[..., :1] if mode.startswith("LA") else np.asarray(upright(image), np.uint16)
    low = low[..., 1:2] if mode.startswith("LA") else low
    return np.broadcast_to(high[..., :3] << 8 | low[..., :3], (*low.shape[:2], 3))


def is_wide_grey(image: Image.Image) -> bool:
    """Whether its pixels are single numbers wider than 8 bits."""
    return image.mode.startswith("I") or image.mode == "F"


def wide_colour_modes(image: Image.Image) -> tuple[str, str] | None:
    """Returns the raw mode of an image with 16 bits per colour, and the one that reads their lower bytes; else None.

    None too once the image is loaded, as Pillow then forgets how it was stored.
    """
    if not isinstance(image, PngImageFile | TiffImageFile) or image.mode not in ("RGB", "RGBA") or not image.tile:
        return None
    arguments: Any = image.tile[0].args
    mode = str(arguments if isinstance(arguments, str) else arguments[0])
    if mode[-3:] not in OTHER_BYTE or mode.startswith("RGBa"):
        return None
    # the lower bytes are the higher ones in the other order; grey and alpha have no such mode: four bytes of a pixel
    return mode, "RGBA" if mode.startswith("LA") else f"{mode[:-3]}{OTHER_BYTE[mode[-3:]]}"


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


# ---- Optional metadata, which never decide whether pixels count


def exif_of(image: Image.Image) -> Image.Exif:
    """Returns the EXIF data of an image; empty if they are damaged."""
    try:
        exif = image.getexif()
        exif.get(ExifTags.Base.Orientation)  # Pillow reads a value when it is asked for
        return exif
    except Exception:  # damaged ones make Pillow raise nearly any type
        return Image.Exif()


def upright(image: Image.Image) -> Image.Image:
    """Returns the image as its EXIF orientation says; as it is if that is missing, damaged or unknown.

    `ImageOps.exif_transpose` would also write the EXIF data anew, and fail where they are odd.
    """
    orientation = exif_of(image).get(ExifTags.Base.Orientation, 1)
    method = UPRIGHT.get(orientation) if isinstance(orientation, int) else None
    return image if method is None else image.transpose(method)


def without_metadata(content: bytes) -> bytes | None:
    """Returns a PNG, JPEG or TIFF file without its optional metadata, with the same pixels; None for other files.

    The EXIF data of PNG and JPEG stay, as they say which way is up.
    """
    try:
        if content.startswith(PNG):
            return PNG + b"".join(_png_chunks(content))
        if content.startswith(b"\xff\xd8"):
            return b"\xff\xd8" + b"".join(_jpeg_segments(content))
        if content[:4] in TIFF:
            return _tiff_without_tags(content, TIFF[content[:4]])
    except (struct.error, IndexError):  # the file ends early: its pixels are damaged too
        pass
    return None


def _png_chunks(content: bytes) -> Iterator[bytes]:
    """Yields the chunks that pixels need, and intact EXIF data."""
    start = len(PNG)
    while start < len(content):
        length, name = struct.unpack_from(">I4s", content, start)
        chunk = content[start : start + 12 + length]
        is_intact = zlib.crc32(chunk[4:-4]) == int.from_bytes(chunk[-4:])
        if name in (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND") or (name == b"eXIf" and is_intact):
            yield chunk
        start += 12 + length


def _jpeg_segments(content: bytes) -> Iterator[bytes]:
    """Yields the segments that pixels need, and EXIF data."""
    start = 2
    while content[start + 1] != 0xDA:  # start of scan
        marker, length = content[start + 1], struct.unpack_from(">H", content, start + 2)[0]
        segment = content[start : start + 2 + length]
        # JFIF and Adobe say what the colours are, unless they are cut short
        is_colour = (marker == 0xE0 and length >= 16) or (marker == 0xEE and length >= 14)
        is_exif = marker == 0xE1 and segment[4:].startswith(EXIF)
        if is_colour or is_exif or not (0xE0 <= marker <= 0xEF or marker == 0xFE):  # application data, comments
            yield segment
        start += 2 + length
    yield content[start:]


def _tiff_without_tags(content: bytes, order: str) -> bytes:
    """Returns the file with other numbers for the optional tags of its first page."""
    changed, (start,) = bytearray(content), struct.unpack_from(f"{order}I", content, 4)
    (count,) = struct.unpack_from(f"{order}H", content, start)
    for entry in range(start + 2, start + 2 + 12 * count, 12):
        if struct.unpack_from(f"{order}H", content, entry)[0] in TIFF_OPTIONAL:
            struct.pack_into(f"{order}H", changed, entry, PRIVATE)
    return bytes(changed)
