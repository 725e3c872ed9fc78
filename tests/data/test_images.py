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


def encoded(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


def pixels(data: bytes) -> np.ndarray:
    image = decode(data, "x")
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
    assert np.array_equal(pixels(data), np.asarray(decode(path, "x")))
    assert decode(path, "x").size == ((64, 48) if format != "ICO" else (48, 36))  # an icon has its own sizes
    expected = np.asarray(smooth.resize(decode(path, "x").size)).astype(int)
    assert np.abs(pixels(data).astype(int) - expected).mean() < (20 if format == "GIF" else 8)  # GIF: 256 colours


@pytest.mark.parametrize(
    ("format", "least_side", "size"),
    [("JPEG", 225, (400, 300)), ("JPEG", 150, (200, 150)), ("JPEG", 1, (100, 75)), ("JPEG", None, (800, 600)),
     ("JPEG", 601, (800, 600)), ("PNG", 150, (800, 600))],
)  # fmt: skip
def test_a_draft_is_the_smallest_jpeg_whose_sides_are_long_enough(
    format: str, least_side: int | None, size: tuple[int, int]
) -> None:
    smooth = Image.fromarray(NOISE).resize((800, 600), Image.Resampling.BICUBIC)
    draft = decode(encoded(smooth, format), "x", least_side)
    assert draft.size == size and draft.mode == "RGB"
    reduced = np.asarray(smooth.resize(size, Image.Resampling.BOX)).astype(int)
    assert np.abs(np.asarray(draft).astype(int) - reduced).mean() < 3


def test_a_draft_is_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.fromarray(NOISE).resize((800, 600))
    assert decode(encoded(image, "JPEG", exif=exif), "x", 150).size == (150, 200)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(orientation: int) -> None:
    image = Image.fromarray(NOISE)
    exif = Image.Exif()
    exif[0x0112] = orientation
    upright = {
        1: NOISE,
        2: NOISE[:, ::-1],
        3: NOISE[::-1, ::-1],
        4: NOISE[::-1],
        5: NOISE.transpose(1, 0, 2),
        6: NOISE[::-1].transpose(1, 0, 2),
        7: NOISE[::-1, ::-1].transpose(1, 0, 2),
        8: NOISE[:, ::-1].transpose(1, 0, 2),
    }[orientation]
    assert np.array_equal(pixels(encoded(image, "PNG", exif=exif)), upright)


def test_broken_exif_does_not_lose_the_image() -> None:
    image = Image.fromarray(NOISE)
    good = encoded(image, "JPEG")
    for junk in (b"Exif\0\0junk", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*\0\0\0\x08\x00\x05\x01\x12"):
        segment = b"\xff\xe1" + struct.pack(">H", len(junk) + 2) + junk
        assert pixels(good[:2] + segment + good[2:]).shape == (6, 8, 3)


def test_transparency_shows_white() -> None:
    rgba = np.dstack([NOISE, np.full((6, 8), 255, np.uint8)])
    rgba[0, 0] = (10, 20, 30, 0)
    rgba[0, 1] = (0, 0, 0, 128)
    found = pixels(encoded(Image.fromarray(rgba, "RGBA")))
    assert found[0, 0].tolist() == [255, 255, 255]
    assert found[0, 1].tolist() == [127, 127, 127]
    assert np.array_equal(found[1:], NOISE[1:])
    grey = Image.fromarray(np.dstack([np.zeros((2, 2), np.uint8), np.array([[0, 255], [255, 255]], np.uint8)]), "LA")
    assert pixels(encoded(grey))[..., 0].tolist() == [[255, 0], [0, 0]]


def test_palettes() -> None:
    image = Image.fromarray(NOISE).quantize(48)
    assert image.mode == "P"
    assert np.array_equal(pixels(encoded(image)), np.asarray(image.convert("RGB")))
    see_through = pixels(encoded(image, "PNG", transparency=int(np.asarray(image)[2, 3])))
    assert see_through[2, 3].tolist() == [255, 255, 255]
    with_alpha = pixels(encoded(image, "PNG", transparency=bytes([0] * 48)))
    assert (with_alpha == 255).all()


def test_grey_and_bilevel() -> None:
    grey = NOISE[..., 0]
    assert np.array_equal(pixels(encoded(Image.fromarray(grey))), np.dstack([grey] * 3))
    bits = Image.fromarray(grey > 128)
    assert bits.mode == "1"
    assert np.array_equal(pixels(encoded(bits))[..., 0], np.where(grey > 128, 255, 0))


def test_cmyk() -> None:
    ink = Image.new("CMYK", (16, 16), (255, 0, 0, 0))  # cyan
    found = pixels(encoded(ink, "JPEG", quality=95))
    assert np.abs(found.astype(int) - [0, 255, 255]).max() < 12


@pytest.mark.parametrize("format", ["PNG", "TIFF", "PPM"])
def test_16_bits_are_scaled_not_clipped(format: str) -> None:
    deep = np.array([[0, 128, 129, 257], [32768, 40000, 65406, 65535]], np.uint16)
    found = pixels(encoded(Image.fromarray(deep), format))
    assert found[..., 0].tolist() == [[0, 0, 1, 1], [128, 156, 254, 255]]
    assert (found == found[..., :1]).all()


def test_integers_and_floats_of_unknown_scale_are_refused() -> None:
    assert pixels(encoded(Image.fromarray(np.array([[0, 65535]], np.int32)), "TIFF"))[0, :, 0].tolist() == [0, 255]
    assert pixels(encoded(Image.fromarray(np.array([[0, 0.5, 1]], np.float32)), "TIFF"))[0, :, 0].tolist() == [
        0,
        128,
        255,
    ]
    for values in (np.array([[0, 65536]], np.int32), np.array([[-1, 5]], np.int32), np.array([[0, 1.5]], np.float32),
                   np.array([[0, np.nan]], np.float32)):  # fmt: skip
        with pytest.raises(UnreadableImage, match=r"x: .* so that their scale is unknown"):
            decode(encoded(Image.fromarray(values), "TIFF"), "x")


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_animations_show_their_first_frame(format: str) -> None:
    frames = [Image.new("RGB", (8, 6), colour) for colour in ("red", "blue")]
    options = {"lossless": True} if format == "WEBP" else {}
    data = encoded(frames[0], format, save_all=True, append_images=frames[1:], **options)
    assert (pixels(data) == [255, 0, 0]).all()


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP", "AVIF"])
def test_truncated_files_are_refused_unless_no_pixel_is_missing(format: str) -> None:
    data = encoded(Image.fromarray(np.tile(NOISE, (4, 4, 1))), format)
    whole, refused = pixels(data), 0
    for length in range(0, len(data), 3):
        try:
            assert np.array_equal(pixels(data[:length]), whole)
        except UnreadableImage as error:
            refused += 1
            assert error.name == "x"
            assert error.reason
            assert "\n" not in error.reason
    assert refused > 0.9 * len(range(0, len(data), 3))


def reason(source: bytes | Path) -> str:
    with pytest.raises(UnreadableImage) as caught:
        decode(source, "x")
    return caught.value.reason


def test_files_that_are_not_images_are_refused(tmp_path: Path) -> None:
    assert "not an image" in reason(b"")
    assert "not an image" in reason(b"some text")
    assert "not an image" in reason(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n")  # would start Ghostscript
    assert reason(tmp_path / "missing.png") == "No such file or directory"
    assert reason(tmp_path) == "Is a directory"


def test_a_flipped_bit_is_found() -> None:
    data = bytearray(encoded(Image.fromarray(NOISE)))
    data[-30] ^= 1
    assert reason(bytes(data))


def png_header(width: int, height: int) -> bytes:
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + struct.pack(">I", 13)
        + header
        + struct.pack(">I", zlib.crc32(header))
        + bytes(4)
        + b"IDAT"
    )


def test_decompression_bombs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason(png_header(60000, 60000)) == "more pixels than the limit of 89478485"
    # Pillow itself would only warn
    assert reason(png_header(12000, 12000)) == "12000 × 12000 pixels, more than the limit of 89478485"
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 47)
    assert reason(encoded(Image.fromarray(NOISE))) == "8 × 6 pixels, more than the limit of 47"


def test_an_error_of_the_machine_is_not_an_unreadable_image(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_files(*args: object, **kwargs: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(Image, "open", out_of_files)
    with pytest.raises(OSError, match="Too many open files"):
        decode(b"", "x")


def test_names_are_printed_on_one_line() -> None:
    assert printable("a\nb\tc\x1b[31m.png") == r"a\nb\tc\x1b[31m.png"
    assert printable("Übung 大.png") == "Übung 大.png"
    assert printable(b"\xff.png".decode("utf-8", "surrogateescape")) == r"\udcff.png"


def test_unreadable_image_survives_pickling() -> None:
    copy = pickle.loads(pickle.dumps(UnreadableImage("a.png", "torn")))
    assert (copy.name, copy.reason, str(copy)) == ("a.png", "torn", "a.png: torn")


def test_extensions() -> None:
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
    found = scan(dataset, workers, show=False)
    assert list(found.items()) == [(row, f"reason {row}") for row in (3, 73, 143, 213, 283)]
    assert scan(MadeUp([0, 1], [0, 0]), workers) == {}


def test_unreadable_message() -> None:
    dataset = Torn(np.arange(300) % 2, np.zeros(300))
    message = unreadable_message(scan(dataset, 1, show=False), dataset)
    assert message.startswith(
        "5 images do not decode: row 3 (reason 3), row 73 (reason 73), row 143 (reason 143) and 2"
    )
    assert "data.on_bad_image: skip" in message
    assert unreadable_message({3: "torn"}, dataset).startswith("1 image does not decode: row 3 (torn); ")
