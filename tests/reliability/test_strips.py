"""Images that are small as files and large in memory, images for which memory is full, and Pillow's warnings."""

from __future__ import annotations

import io
import json
import logging
import struct
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from made_up import MadeUp
from PIL import Image

from xdm_ft.cli.parser import main
from xdm_ft.data.folder import Folder
from xdm_ft.images.decode import UnreadableImage, _pillow_warnings, decode, scan
from xdm_ft.images.loader import ImageRows
from xdm_ft.images.transforms import NotAStrip, Preprocessing, evaluation_transform, training_transform
from xdm_ft.runtime.errors import UserError

RECIPE = """\
name: small
data: {{name: folder, root: {root}/data}}
protocol: {{test_domains: [c], seeds: 1}}
encoder: {{name: timm, model: test_vit, preprocessing: {{size: 32}}, kwargs: {{img_size: 32}}}}
features: {{dir: {root}/cache, workers: 0}}
methods: [erm]
training: {{steps: 2, batch_size: 2}}
report: {{page: false}}
output: {{dir: {root}/out}}
"""
PIXELS = np.random.default_rng(0).integers(0, 256, (24, 20, 3), dtype=np.uint8)
STRIP = (120_000, 1)  # at 32 pixels, 123 million of them


def png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for n, place in enumerate(f"{d}/{c}/{i}.png" for d in "abc" for c in ("cat", "dog") for i in (0, 1)):
        path = tmp_path / "data" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(Image.fromarray(np.roll(PIXELS, n, axis=0))))
    (tmp_path / "small.yaml").write_text(RECIPE.format(root=tmp_path))
    return tmp_path


def xdm_ft(verb: str, root: Path, *overrides: str) -> int:
    return main([verb, str(root / "small.yaml"), *overrides])


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that standard error has from us."""
    told = capsys.readouterr().err
    [line] = [line for line in told.splitlines() if line.startswith("xdm-ft: ")]
    assert "Traceback" not in told
    return line


def test_a_strip_is_named_or_left_out(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = png(Image.new("RGB", STRIP))
    assert len(content) < 2000
    (root / "data/a/cat/strip.png").write_bytes(content)
    assert xdm_ft("features", root) == 2
    line = refused(capsys)
    assert "a/cat/strip.png (120000 × 1 pixels, too long and narrow" in line and "data.on_bad_image: skip" in line
    assert xdm_ft("features", root, "data.on_bad_image=skip") == 0
    assert "1 of 13 images do not decode and are left out" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["features.views=1", pytest.param("encoder.trainable=true", marks=pytest.mark.slow)])
def test_augmented_training_leaves_it_out(kind: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "data/a/cat/strip.png").write_bytes(png(Image.new("RGB", STRIP)))
    overrides = ["data.train_augmentation=domainbed", kind]
    assert xdm_ft("run", root, *overrides) == 2
    assert "a/cat/strip.png (120000 × 1 pixels, too long" in refused(capsys)
    assert xdm_ft("run", root, *overrides, "data.on_bad_image=skip") == 0
    summary = json.loads((root / "out/small/results.json").read_text())["summary"]
    assert "1 unreadable image left out" in summary[0]["protocol"]


def test_doctor_finds_strips_and_bombs(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "data/a/cat/strip.png").write_bytes(png(Image.new("RGB", STRIP[::-1])))
    (root / "data/a/cat/large.png").write_bytes(png(Image.new("1", (10_000, 9_000))))
    assert xdm_ft("doctor", root) == 2
    told = capsys.readouterr()
    assert "a/cat/strip.png does not decode: 1 × 120000 pixels, too long and narrow" in told.out
    assert "a/cat/large.png does not decode: 10000 × 9000 pixels, more than the limit of 89478485" in told.out
    assert "Warning" not in told.err and "bomb" not in told.err


@pytest.mark.parametrize(("resize", "limit"), [("native", 2192), ("squash", 2192), ("pad", 202)])
def test_the_longest_strip_that_is_accepted_fits(resize: str, limit: int) -> None:
    preprocessing = Preprocessing(mean=(0.5,) * 3, std=(0.5,) * 3, size=200, crop=0.99, resize=resize)
    transforms = [evaluation_transform(preprocessing), training_transform(preprocessing, "domainbed")]
    for size in ((limit, 1), (1, limit)):
        image = Image.new("RGB", size)
        assert all(transform(image).shape == (3, 200, 200) for transform in transforms)
    for size in ((limit + 1, 1), (2, 2 * limit + 2)):
        with pytest.raises(UnreadableImage, match=f"its sides may differ {limit}-fold"):
            transforms[0](Image.new("RGB", size))


def test_every_size_accepts_images_that_are_no_strips() -> None:
    for size in (1, 224, 10_000):
        preprocessing = Preprocessing(mean=(0.5,) * 3, std=(0.5,) * 3, size=size)
        assert NotAStrip(preprocessing)(Image.new("RGB", (16, 1))).size == (16, 1)


def full(image: Image.Image) -> torch.Tensor:
    raise MemoryError


class FullMemory(MadeUp):
    def image(self, row: int) -> Image.Image:
        raise MemoryError


def test_full_memory_names_the_image(root: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    with pytest.raises(UserError, match="row 1: memory is full while this image"):
        ImageRows(MadeUp([0, 1], [0, 0]), full)[1]
    with pytest.raises(UserError, match="row 0: memory is full while this image"):
        scan(FullMemory([0, 1], [0, 0]), workers=2, show=False)
    resize = Image.Image.resize

    def too_large(image: Image.Image, *args: object, **kwargs: object) -> Image.Image:
        if image.width == 999:
            raise MemoryError
        return resize(image, *args, **kwargs)

    monkeypatch.setattr(Image.Image, "resize", too_large)
    (root / "data/a/cat/large.png").write_bytes(png(Image.new("RGB", (999, 20))))
    for workers in (0, 1):
        assert xdm_ft("run", root, "data.on_bad_image=skip", f"features.workers={workers}") == 2
        line = refused(capsys)
        assert "data/a/cat/large.png: memory is full while this image is decoded or resized; " in line


def test_pillows_own_log_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    stream = io.BytesIO()
    Image.fromarray(PIXELS).save(stream, "TIFF")
    three = struct.pack("<HHIHH", 277, 3, 1, 3, 0)  # the tag SamplesPerPixel
    content = stream.getvalue()
    assert content.count(three) == 1
    with pytest.raises(UnreadableImage, match=r"x\.tif: not an image"):
        decode(content.replace(three, struct.pack("<HHIHH", 277, 3, 1, 99, 0)), "x.tif")
    assert not caplog.records


def with_damaged_exif(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG")
    junk = b"Exif\0\0MM\0*\0\0\0\x08\x00\x05\x01\x12"
    good = stream.getvalue()
    return good[:2] + b"\xff\xe1" + struct.pack(">H", len(junk) + 2) + junk + good[2:]


def quiet(work: Callable[[], object], log: pytest.LogCaptureFixture) -> list[str]:
    """Returns what `work` logs. Python itself shows no warning, and shows the next one as before."""
    _pillow_warnings.images = 0
    log.clear()
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        before = warnings.filters[:], warnings.showwarning
        work()
        assert (warnings.filters, warnings.showwarning) == before and not shown
    return [message for message in log.messages if "damaged" in message]


@pytest.mark.slow
def test_pillows_warnings_name_the_image(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = with_damaged_exif(PIXELS)
    with caplog.at_level(logging.WARNING, "xdm_ft"):
        [line] = quiet(lambda: decode(content, "a/x.jpg"), caplog)
        assert line.startswith("a/x.jpg: parts of the file are damaged (Corrupt EXIF data. ") and "\n" not in line
        assert quiet(lambda: decode(png(Image.fromarray(PIXELS)), "good"), caplog) == []
        for number in range(40):
            (root / f"data/a/cat/{number}.jpg").write_bytes(with_damaged_exif(np.roll(PIXELS, number + 20, axis=1)))
        lines = quiet(lambda: scan(Folder(root=root / "data"), workers=4, show=False), caplog)
    assert len(lines) == 4 and len({line.split(":")[0] for line in lines}) == 4
    assert lines[3] == "further images with damaged parts are not named"
