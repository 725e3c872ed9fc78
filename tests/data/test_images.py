"""Decoding: every format that Pillow reads becomes an upright RGB image; broken images are reported by name."""

import io
import pickle
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from made_up import MadeUp
from PIL import Image

from xdm_ft.images.decode import UnreadableImage, decode, extensions, formats, scan, unreadable_message
from xdm_ft.runtime.errors import printable

NOISE = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
GREY = NOISE[..., 0]
LARGE = Image.fromarray(NOISE).resize((800, 600), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def pixels(data: bytes, least_side: int | None = None) -> np.ndarray:
    image = decode(data, "x", least_side)
    assert image.mode == "RGB"
    return np.asarray(image)


@pytest.mark.parametrize(
    "format", ["PNG", "BMP", "TIFF", "PPM", "GIF", "JPEG", "WEBP", "AVIF", "JPEG2000", "TGA", "ICO"]
)
def test_formats_from_bytes_and_from_files(format: str, tmp_path: Path) -> None:
    smooth = Image.fromarray(NOISE).resize((64, 48), Image.Resampling.BICUBIC)
    data = encoded(smooth, format)
    path = tmp_path / "picture.txt"  # the content decides the format, not the name
    path.write_bytes(data)
    image = decode(path, "x")
    assert np.array_equal(pixels(data), np.asarray(image))
    assert image.size == ((64, 48) if format != "ICO" else (48, 36))  # an icon has its own sizes
    difference = np.abs(pixels(data) - np.asarray(smooth.resize(image.size)).astype(int))
    assert difference.mean() < (20 if format == "GIF" else 8)  # GIF: 256 colours


@pytest.mark.parametrize(
    ("format", "least_side", "size"),
    [("JPEG", 225, (400, 300)), ("JPEG", 150, (200, 150)), ("JPEG", 1, (100, 75)), ("JPEG", None, (800, 600)),
     ("JPEG", 601, (800, 600)), ("PNG", 150, (800, 600))],
)  # fmt: skip
def test_a_draft_is_the_smallest_jpeg_whose_sides_are_long_enough(
    format: str, least_side: int | None, size: tuple[int, int]
) -> None:
    draft = pixels(encoded(LARGE, format), least_side)
    reduced = np.asarray(LARGE.resize(size, Image.Resampling.BOX)).astype(int)
    assert draft.shape == reduced.shape and np.abs(draft - reduced).mean() < 3
    upright = pixels(encoded(LARGE, format, exif=turned(6)), least_side)
    assert upright.shape == (size[0], size[1], 3)


RGBA = np.dstack([NOISE, np.full((6, 8), 255, np.uint8)])
RGBA[0, :2] = (10, 20, 30, 0), (0, 0, 0, 128)
ON_WHITE = NOISE.copy()
ON_WHITE[0, 0], ON_WHITE[0, 1] = 255, 127
FLIPPED = bytearray(encoded(Image.fromarray(NOISE)))
FLIPPED[-30] ^= 1
PALETTE = Image.fromarray(NOISE).quantize(48)
DEEP = np.array([[0, 128, 129, 257], [32768, 40000, 65406, 65535]], np.uint16)
SCALED = [[0, 0, 1, 1], [128, 156, 254, 255]]  # rounded, not clipped
RED = {"save_all": True, "append_images": [Image.new("RGB", (8, 6), "blue")]}
ORIENTED = [NOISE, NOISE[:, ::-1], NOISE[::-1, ::-1], NOISE[::-1]]
ORIENTED += [image.transpose(1, 0, 2) for image in (NOISE, NOISE[::-1], NOISE[::-1, ::-1], NOISE[:, ::-1])]
# what is encoded → [H,W,3], or [H,W] of greys
PIXELS: dict[str, tuple[bytes, object]] = {
    **{f"EXIF {n}": (encoded(Image.fromarray(NOISE), exif=turned(n)), ORIENTED[n - 1]) for n in range(1, 9)},
    "alpha": (encoded(Image.fromarray(RGBA, "RGBA")), ON_WHITE),
    "grey and alpha": (encoded(Image.fromarray(np.array([[[0, 0], [0, 255]]], np.uint8), "LA")), [[255, 0]]),
    "palette": (encoded(PALETTE), np.asarray(PALETTE.convert("RGB"))),
    "transparent palette": (encoded(PALETTE, transparency=bytes(48)), np.full((6, 8), 255)),
    "grey": (encoded(Image.fromarray(GREY)), GREY),
    "two values": (encoded(Image.fromarray(GREY > 128)), np.where(GREY > 128, 255, 0)),
    **{f"16 bits, {name}": (encoded(Image.fromarray(DEEP), name), SCALED) for name in ("PNG", "TIFF", "PPM")},
    "32 bits": (encoded(Image.fromarray(np.array([[0, 65535]], np.int32)), "TIFF"), [[0, 255]]),
    "floats": (encoded(Image.fromarray(np.array([[0, 0.5, 1]], np.float32)), "TIFF"), [[0, 128, 255]]),
    **{
        f"first frame, {name}": (
            encoded(Image.new("RGB", (8, 6), "red"), name, **RED, **({"lossless": True} if name == "WEBP" else {})),
            np.broadcast_to([255, 0, 0], (6, 8, 3)),
        )
        for name in ("GIF", "WEBP", "PNG", "TIFF")
    },
}


@pytest.mark.parametrize("name", PIXELS)
def test_pixels(name: str) -> None:
    data, expected = PIXELS[name]
    array = np.asarray(expected)
    assert np.array_equal(pixels(data), array if array.ndim == 3 else np.dstack([array] * 3))


def test_other_modes() -> None:
    ink = Image.new("CMYK", (16, 16), (255, 0, 0, 0))  # cyan
    assert np.abs(pixels(encoded(ink, "JPEG", quality=95)).astype(int) - [0, 255, 255]).max() < 12
    see_through = pixels(encoded(PALETTE, "PNG", transparency=int(np.asarray(PALETTE)[2, 3])))
    assert see_through[2, 3].tolist() == [255, 255, 255]
    good = encoded(Image.fromarray(NOISE), "JPEG")  # broken EXIF does not lose the image
    for junk in (b"Exif\0\0junk", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*\0\0\0\x08\x00\x05\x01\x12"):
        segment = b"\xff\xe1" + struct.pack(">H", len(junk) + 2) + junk
        assert pixels(good[:2] + segment + good[2:]).shape == (6, 8, 3)


JUNK = b"junk, no TIFF"
LONG = b"a" * 2_000_000  # Pillow's limit of a text is 1 MB
ROTATED = encoded(Image.fromarray(NOISE), exif=turned(3))


def chunk(name: bytes, content: bytes, damage: int = 0) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content) ^ damage)


def with_chunk(name: bytes, content: bytes, damage: int = 0, whole: bytes = encoded(Image.fromarray(NOISE))) -> bytes:
    return whole[:33] + chunk(name, content, damage) + whole[33:]  # behind IHDR


def with_segment(marker: int, content: bytes) -> bytes:
    whole = encoded(Image.fromarray(NOISE), "JPEG")
    return whole[:2] + b"\xff" + bytes([marker]) + struct.pack(">H", len(content) + 2) + content + whole[2:]


def with_number_as_xmp() -> bytes:
    whole, entry = encoded(Image.fromarray(NOISE), "TIFF"), struct.pack("<HHI", 284, 3, 1)  # the planar configuration
    assert whole.count(entry) == 1
    return whole.replace(entry, struct.pack("<HHI", 700, 3, 1))


METADATA = {
    "PNG, EXIF": with_chunk(b"eXIf", JUNK),
    "PNG, EXIF as text": with_chunk(b"tEXt", b"Raw profile type exif\0\nexif\n zz\nnothex"),
    "PNG, long text": with_chunk(b"zTXt", b"k\0\0" + zlib.compress(LONG)),
    "PNG, long international text": with_chunk(b"iTXt", b"k\0\1\0\0\0" + zlib.compress(LONG)),
    "PNG, much text": with_chunk(b"tEXt", b"k\0" + 40 * LONG),
    "PNG, large profile": with_chunk(b"iCCP", b"n\0\0" + zlib.compress(LONG)),
    "PNG, unknown profile": with_chunk(b"iCCP", b"n\0\7junk"),
    "PNG, text of a wrong checksum": with_chunk(b"tEXt", b"k\0v", 1),
    "PNG, short chunks": with_chunk(b"gAMA", b"\0", whole=with_chunk(b"pHYs", b"\0")),
    "JPEG, EXIF": with_segment(0xE1, b"Exif\0\0" + JUNK),
    "JPEG, short profile": with_segment(0xE2, b"ICC_PROFILE\0"),
    "JPEG, short JFIF": with_segment(0xE0, b"JFIF\0"),
    "JPEG, orientation 99": encoded(Image.fromarray(NOISE), "JPEG", exif=turned(99)),
    "WEBP, EXIF": encoded(Image.fromarray(NOISE), "WEBP", lossless=True, exif=JUNK),
    "WEBP, XMP and profile": encoded(Image.fromarray(NOISE), "WEBP", lossless=True, xmp=b"\xff", icc_profile=JUNK),
    "TIFF, EXIF": encoded(Image.fromarray(NOISE), "TIFF", tiffinfo={34665: 99_999_999}),
    "TIFF, XMP that is no text": with_number_as_xmp(),
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata_do_not_decide_whether_pixels_count(name: str) -> None:
    plain = encoded(Image.fromarray(NOISE), "JPEG") if name.startswith("JPEG") else encoded(Image.fromarray(NOISE))
    assert np.array_equal(pixels(METADATA[name]), pixels(plain))


def test_without_a_long_text_a_png_is_still_upright_and_damaged_pixels_are_still_refused() -> None:
    long = b"k\0\0" + zlib.compress(LONG)
    assert np.array_equal(pixels(with_chunk(b"zTXt", long, whole=ROTATED)), NOISE[::-1, ::-1])
    assert "MAX_TEXT_CHUNK" in reason(with_chunk(b"zTXt", long, whole=bytes(FLIPPED)))


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP", "AVIF"])
def test_truncated_files_are_refused_unless_no_pixel_is_missing(format: str) -> None:
    data = encoded(Image.fromarray(np.tile(NOISE, (4, 4, 1))), format)
    whole, refused = pixels(data), 0
    lengths = range(0, len(data), max(3, len(data) // 100))
    for length in lengths:
        try:
            assert np.array_equal(pixels(data[:length]), whole)
        except UnreadableImage as error:
            refused += 1
            assert error.name == "x" and error.reason and "\n" not in error.reason
    assert refused > 0.9 * len(lengths)


def png_header(width: int, height: int) -> bytes:
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    sized = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return b"\x89PNG\r\n\x1a\n" + sized + bytes(4) + b"IDAT"


UNKNOWN = "so that their scale is unknown"
REFUSED: list[tuple[bytes | np.ndarray, str]] = [
    (b"", "not an image"),
    (b"some text", "not an image"),
    (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "not an image"),  # would start Ghostscript
    (bytes(FLIPPED), ""),
    (png_header(60000, 60000), "more pixels than the limit of 89478485"),
    (png_header(12000, 12000), "12000 × 12000 pixels, more than the limit of 89478485"),  # Pillow would only warn
    (np.array([[0, 65536]], np.int32), UNKNOWN),
    (np.array([[-1, 5]], np.int32), UNKNOWN),
    (np.array([[0, 1.5]], np.float32), UNKNOWN),
    (np.array([[0, np.nan]], np.float32), UNKNOWN),
]


def reason(source: bytes | Path) -> str:
    with pytest.raises(UnreadableImage) as caught:
        decode(source, "x")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert copy.name == "x" and str(copy) == str(caught.value) == f"x: {copy.reason}"
    return caught.value.reason


@pytest.mark.parametrize(("source", "text"), REFUSED)
def test_what_is_no_image_is_refused(source: bytes | np.ndarray, text: str) -> None:
    assert text in reason(source if isinstance(source, bytes) else encoded(Image.fromarray(source), "TIFF"))


def test_other_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason(tmp_path / "missing.png") == "No such file or directory"
    assert reason(tmp_path) == "Is a directory"
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 47)
    assert reason(encoded(Image.fromarray(NOISE))) == "8 × 6 pixels, more than the limit of 47: cut it into tiles"

    def out_of_files(*args: object, **kwargs: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(Image, "open", out_of_files)
    with pytest.raises(OSError, match="Too many open files"):  # of the machine: the image may be good
        decode(b"", "x")


def test_names() -> None:
    assert printable("a\nb\tc\x1b[31m.png") == r"a\nb\tc\x1b[31m.png"
    assert printable("Übung 大.png") == "Übung 大.png"
    assert printable(b"\xff.png".decode("utf-8", "surrogateescape")) == r"\udcff.png"
    assert {".png", ".jpg", ".jpeg", ".webp", ".tif", ".bmp", ".gif", ".avif"} <= extensions()
    assert not {".txt", ".csv", ".eps", ".pdf", ".h5", ".mpg", ""} & extensions()
    assert {"PNG", "JPEG", "WEBP"} <= set(formats())


class Torn(MadeUp):
    def image(self, row: int) -> Image.Image:
        if row % 70 == 3:
            raise UnreadableImage(self.name(row), f"reason {row}")
        return super().image(row)


@pytest.mark.parametrize("workers", [1, 3])
def test_scan_finds_every_unreadable_row(workers: int) -> None:
    dataset = Torn(np.arange(300) % 2, np.zeros(300))
    unreadable = scan(dataset, workers, show=False)
    assert list(unreadable.items()) == [(row, f"reason {row}") for row in (3, 73, 143, 213, 283)]
    assert scan(MadeUp([0, 1], [0, 0]), workers) == {}
    message, first = unreadable_message(unreadable, dataset), "row 3 (reason 3), row 73 (reason 73), row 143"
    assert message.startswith(f"5 images do not decode: {first} (reason 143) and 2")
    assert "data.on_bad_image: skip" in message
    assert unreadable_message({3: "torn"}, dataset).startswith("1 image does not decode: row 3 (torn); ")
