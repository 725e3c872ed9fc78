"""Images that do not decode or are large in memory only, and losses that are not finite, in every verb."""

import io
import json
import logging
import os
import re
import shutil
import struct
import time
import warnings
import zlib
from functools import partial
from pathlib import Path

import miniature
import numpy as np
import pytest
import torch
from made_up import MadeUp
from PIL import Image
from real_runs import TEST_VIT, one_line

from xdm_ft.augmentations import Augmentations, TrainingTransform
from xdm_ft.augmentations.domainbed import DomainBed
from xdm_ft.cli.parser import main
from xdm_ft.data.folder import Folder
from xdm_ft.experiment import pieces
from xdm_ft.images.decode import UnreadableImage, _pillow_warnings, decode, scan
from xdm_ft.images.loader import ImageRows
from xdm_ft.images.transforms import NotAStrip, Preprocessing, evaluation_transform
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.machine import out_of_memory_as_user_error
from xdm_ft.training.end_to_end.gradients import StepGradients

RECIPE = f"""\
name: small
data: {{name: folder, root: data}}
protocol: {{test_domains: [c], seeds: 1}}
encoder: {{{TEST_VIT}}}
features: {{dir: cache, workers: 0}}
methods: [erm]
training: {{steps: 2, batch_size: 2}}
report: {{page: false}}
output: {{dir: out}}
"""
PIXELS = np.random.default_rng(0).integers(0, 256, (24, 20, 3), dtype=np.uint8)
STRIP = (120_000, 1)  # at 32 pixels, 123 million of them
SKIP = "data.on_bad_image=skip"


def png(image):
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


GOOD = png(Image.fromarray(PIXELS))


def bomb(path):
    """60,000 × 60,000 pixels, says its header."""
    header = b"IHDR" + struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header)))


BAD = {
    "truncated": lambda path: path.write_bytes(GOOD[:-200]),
    "zero bytes": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("no image"),
    "html": lambda path: path.write_text("<!DOCTYPE html><p>404"),
    "bomb": bomb,
    "strip": lambda path: path.write_bytes(png(Image.new("RGB", STRIP))),
    "dangling link": lambda path: path.symlink_to("nowhere.png"),
    "link in a circle": lambda path: path.symlink_to(path.name),
    "pipe": os.mkfifo,
}


@pytest.fixture
def root(in_folder):
    """The current folder: small.yaml, and 12 images data/<a, b, c>/<cat, dog>/<0, 1>.png, all of them different."""
    for n, name in enumerate(f"{d}/{c}/{i}.png" for d in "abc" for c in ("cat", "dog") for i in (0, 1)):
        path = in_folder / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(Image.fromarray(np.roll(PIXELS, n, axis=0))))
    (in_folder / "small.yaml").write_text(RECIPE)
    return in_folder / "data"


def xdm_ft(verb, *overrides):
    return main([verb, "small.yaml", *overrides])


def results():
    document = json.loads(Path("out/small/results.json").read_text())
    return document


def as_table(root):
    """The data as a table instead, its rows in the order of the paths."""
    rows = sorted(str(path.relative_to(root)) for path in root.glob("*/*/*"))
    lines = [f"{row},{row.split('/')[1]},{row.split('/')[0]}" for row in rows]
    (root / "table.csv").write_text("\n".join(["path,label,domain", *lines]))
    return [f"data={{name: table, file: {root / 'table.csv'}}}"]


def test_each_bad_image_is_named(root, capsys):
    for kind, make in BAD.items():
        path = root / "a/cat/bad.png"
        make(path)
        assert xdm_ft("features") == 2, kind
        line = one_line(capsys.readouterr().err)
        assert "a/cat/bad.png (" in line and SKIP.replace("=", ": ") in line, kind
        assert ("120000 × 1 pixels, too long and narrow" in line) == (kind == "strip")
        path.unlink()


@pytest.mark.parametrize(
    ("table", "overrides"),
    [
        (False, []),
        pytest.param(True, ["encoder.trainable=true", "data.train_augmentation=domainbed"], marks=pytest.mark.slow),
        pytest.param(False, ["features.views=1", "data.train_augmentation=domainbed"], marks=pytest.mark.soak),
    ],
)
def test_bad_images_are_left_out_and_counted(table, overrides, root, capsys):
    for number, kind in enumerate(("truncated", "zero bytes", "text", "strip")):
        BAD[kind](root / "a/cat" / f"bad {number}.png")
    overrides = [*(as_table(root) if table else []), *overrides]
    assert xdm_ft("run", *overrides) == 2
    line = one_line(capsys.readouterr().err)
    assert "4 images do not decode" in line and "bad 0.png (" in line and "and 1 more" in line
    assert xdm_ft("run", *overrides, SKIP) == 0
    assert "4 of 16 images do not decode and are left out" in capsys.readouterr().err
    assert "4 unreadable images left out" in results()["summary"][0]["protocol"]
    assert "4 unreadable images left out" in Path("out/small/results.md").read_text()


def test_images_that_can_not_be_used_at_all(root, capsys):
    BAD["dangling link"](root / "a/cat/gone.png")
    BAD["link in a circle"](root / "a/cat/round.png")
    (root / "a/cat/folder.png").mkdir()
    assert xdm_ft("run", *as_table(root)) == 2
    line = one_line(capsys.readouterr().err)
    assert "3 of 15 are missing" in line and all(name in line for name in ("gone.png", "round.png", "folder.png"))
    shutil.rmtree(root / "a/cat/folder.png")

    (root / "a/cat/strip.png").write_bytes(png(Image.new("RGB", STRIP[::-1])))
    (root / "a/cat/large.png").write_bytes(png(Image.new("1", (10_000, 9_000))))
    assert xdm_ft("doctor") == 2
    printed = capsys.readouterr()
    assert "a/cat/strip.png does not decode: 1 × 120000 pixels, too long and narrow" in printed.out
    assert "a/cat/large.png does not decode: 10000 × 9000 pixels, more than the limit of 89478485" in printed.out
    assert "Warning" not in printed.err and "bomb" not in printed.err

    for path in root.glob("*/*/*.png"):
        path.unlink()
        path.write_bytes(b"")
    assert xdm_ft("run", SKIP) == 2
    one_line(capsys.readouterr().err)


def test_wrong_extensions_and_odd_modes_have_their_pixels(root):
    """The right pixels, upright, by name: what decodes wrongly would make a wrong number."""
    grey = PIXELS[..., 0]
    exif = Image.Exif()
    exif[0x0112] = 6
    folder = root / "a" / "cat"
    Image.fromarray(PIXELS).save(folder / "w.png", "BMP")
    Image.fromarray(grey.astype(np.uint16) * 257).save(folder / "x.png")
    Image.fromarray(PIXELS).save(folder / "y.png", exif=exif)
    Image.fromarray(PIXELS).save(folder / "z.tif", save_all=True, append_images=[Image.new("RGB", (20, 24), "red")])
    Image.new("CMYK", (20, 24), (255, 0, 0, 0)).save(folder / "zc.tif")
    palette = Image.fromarray(PIXELS).quantize(16)
    palette.save(folder / "zp.png")
    dataset = Folder(root=root)
    images = {Path(path).name: np.asarray(dataset.image(row)) for row, path in enumerate(dataset.paths)}
    assert np.array_equal(images["w.png"], PIXELS) and np.array_equal(images["z.tif"], PIXELS)
    assert np.array_equal(images["x.png"], np.dstack([grey] * 3))
    assert np.array_equal(images["y.png"], PIXELS[::-1].transpose(1, 0, 2))
    assert np.abs(images["zc.tif"].astype(int) - [0, 255, 255]).max() <= 1
    assert np.array_equal(images["zp.png"], np.asarray(palette.convert("RGB")))


# ---- Strips, full memory and Pillow's warnings


@pytest.mark.parametrize(("resize", "limit"), [("native", 2192), ("pad", 202)])
def test_the_longest_strip_that_is_accepted_fits(resize, limit):
    preprocessing = Preprocessing(mean=(0.5,) * 3, std=(0.5,) * 3, size=200, crop=0.99, resize=resize)
    augmented = TrainingTransform(preprocessing, Augmentations([DomainBed()])).tensor
    transforms = [evaluation_transform(preprocessing), partial(augmented, seed=1)]
    for size in ((limit, 1), (1, limit)):
        assert all(transform(Image.new("RGB", size)).shape == (3, 200, 200) for transform in transforms)
    for size in ((limit + 1, 1), (2, 2 * limit + 2)):
        with pytest.raises(UnreadableImage, match=f"its sides may differ {limit}-fold"):
            transforms[0](Image.new("RGB", size))
    for edge in (1, 224, 10_000):
        every_size = Preprocessing(mean=(0.5,) * 3, std=(0.5,) * 3, size=edge)
        assert NotAStrip(every_size)(Image.new("RGB", (16, 1))).size == (16, 1)


def full(image):
    raise MemoryError


class FullMemory(MadeUp):
    def image(self, row):
        raise MemoryError


def test_full_memory_names_the_image(root, capsys, monkeypatch):
    with pytest.raises(UserError, match="row 1: memory is full while this image"):
        ImageRows(MadeUp([0, 1], [0, 0]), full)[1]
    with pytest.raises(UserError, match="row 0: memory is full while this image"):
        scan(FullMemory([0, 1], [0, 0]), workers=2, show=False)
    resize = Image.Image.resize

    def too_large(image, *args, **kwargs):
        if image.width == 999:
            raise MemoryError
        return resize(image, *args, **kwargs)

    monkeypatch.setattr(Image.Image, "resize", too_large)
    (root / "a/cat/large.png").write_bytes(png(Image.new("RGB", (999, 20))))
    for workers in (0, 1):
        assert xdm_ft("features", SKIP, f"features.workers={workers}") == 2
        line = one_line(capsys.readouterr().err)
        assert "data/a/cat/large.png: memory is full while this image is decoded or resized; " in line


def with_damaged_exif(pixels):
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG")
    junk = b"Exif\0\0MM\0*\0\0\0\x08\x00\x05\x01\x12"
    good = stream.getvalue()
    return good[:2] + b"\xff\xe1" + struct.pack(">H", len(junk) + 2) + junk + good[2:]


def logged(work, log):
    """Returns what `work` logs. Python itself shows no warning, and shows the next one as before."""
    _pillow_warnings.images = 0
    log.clear()
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        before = warnings.filters[:], warnings.showwarning
        work()
        assert (warnings.filters, warnings.showwarning) == before and not shown
    return [message for message in log.messages if "damaged" in message]


def test_pillows_warnings_name_the_image(root, caplog):
    stream = io.BytesIO()
    Image.fromarray(PIXELS).save(stream, "TIFF")
    three = struct.pack("<HHIHH", 277, 3, 1, 3, 0)  # the tag SamplesPerPixel
    assert stream.getvalue().count(three) == 1
    with pytest.raises(UnreadableImage, match=r"x\.tif: not an image"):
        decode(stream.getvalue().replace(three, struct.pack("<HHIHH", 277, 3, 1, 99, 0)), "x.tif")
    assert not caplog.records, "Pillow's own log is silent"

    content = with_damaged_exif(PIXELS)
    with caplog.at_level(logging.WARNING, "xdm_ft"):
        [line] = logged(lambda: decode(content, "a/x.jpg"), caplog)
        assert line.startswith("a/x.jpg: parts of the file are damaged (Corrupt EXIF data. ") and "\n" not in line
        assert logged(lambda: decode(GOOD, "good"), caplog) == []
        for number in range(40):
            (root / f"a/cat/{number}.jpg").write_bytes(with_damaged_exif(np.roll(PIXELS, number + 20, axis=1)))
        caplog.handler.addFilter(lambda record: time.sleep(0.02) or True)  # other threads count meanwhile
        lines = logged(lambda: scan(Folder(root=root), workers=4, show=False), caplog)
    assert len(lines) == 4 and len({line.split(":")[0] for line in lines}) == 4
    assert lines[3] == "further images with damaged parts are not named"


# ---- Losses that are not finite, gaps in the data, and models that do not fit the memory

DIVERGING = "methods=[erm, {name: vrex, penalty_weight: 1.0e+300, anneal_steps: 0}, xdomainmix]"
FOUR_STEPS = ["training.steps=4", "training.evaluate_every=2"]


@pytest.mark.slow
@pytest.mark.parametrize("trainable", ["false", "true"])
def test_a_loss_that_is_not_finite_fails_alone(trainable, root, capsys):
    assert xdm_ft("run", DIVERGING, *FOUR_STEPS, f"encoder.trainable={trainable}") == 1
    records = {record["method"]: record for record in results()["runs"]}
    status = {method: record["status"] for method, record in records.items()}
    assert status == {"erm": "ok", "vrex": "failed", "xdomainmix": "ok"}
    assert re.search(r"loss .*at step \d of 4; .*rows", records["vrex"]["reason"])
    printed = capsys.readouterr()
    assert "vrex: 1 of 1 runs failed" in printed.out and "Traceback" not in printed.err
    assert "- vrex: 1 of 1 runs failed" in Path("out/small/results.md").read_text()


def test_gaps_in_the_data_are_in_the_protocol(root):
    for number, domain in enumerate("abc"):
        miniature.save(root / domain / "bird/0.png", 1, number, 0)
        miniature.save(root / domain / "bird/1.png", 1, number, 1)
    miniature.save(root / "d/cat/0.png", 0, 3, 0)
    miniature.save(root / "d/bird/0.png", 1, 3, 0)
    assert xdm_ft("run", "protocol.val_fraction=0.2") == 0
    protocol = results()["summary"][0]["protocol"]
    assert "no training image of dog in d" in protocol and "no validation image of d" in protocol


@pytest.mark.slow
def test_heads_that_do_not_fit_the_memory(root, capfd, monkeypatch):
    monkeypatch.setattr(pieces, "own_cores", lambda: 2)
    monkeypatch.setattr(pieces, "train_chunk", lambda *_, **__: torch.empty(1 << 50))
    assert xdm_ft("run", "methods=[erm,irm]") == 2
    line = one_line(capfd.readouterr().err)
    assert re.search("(erm|irm), one head: does not fit the memory of this machine; lower training.batch_size", line)


@pytest.mark.slow
def test_a_model_that_does_not_fit_the_memory(root, capfd, monkeypatch):
    def raises(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def is_full(*_):
        raise MemoryError

    for run in (raises, is_full):
        monkeypatch.setattr(StepGradients, "run", run)
        assert xdm_ft("run", "encoder.trainable=true") == 2
        line = one_line(capfd.readouterr().err)
        assert "erm, c held out, seed 0: does not fit " in line
        assert line.endswith("; lower training.batch_size or raise training.accumulation")
    with pytest.raises(RuntimeError, match="shapes"), out_of_memory_as_user_error("erm", "lower it"):
        raise RuntimeError("shapes do not match")
