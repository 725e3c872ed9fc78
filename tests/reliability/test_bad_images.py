"""Images that do not decode, and names that no one should give, through the command line."""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from xdm_ft.cli.parser import main
from xdm_ft.data.folder import Folder

RECIPE = """\
name: small
data: {{name: folder, root: {root}}}
protocol: {{test_domains: [c], seeds: 1}}
encoder: {{name: timm, model: test_vit, preprocessing: {{size: 32}}, kwargs: {{img_size: 32}}}}
features: {{dir: {root}/../cache, workers: 0}}
methods: [erm]
training: {{steps: 2, batch_size: 2}}
report: {{page: false}}
output: {{dir: {root}/../out}}
"""
PIXELS = np.random.default_rng(0).integers(0, 256, (24, 20, 3), dtype=np.uint8)


def png(pixels: np.ndarray = PIXELS) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def bomb(path: Path) -> None:
    """60,000 × 60,000 pixels, says its header."""
    header = b"IHDR" + struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header)))


def unreadable(path: Path) -> None:
    path.write_bytes(png())
    path.chmod(0)


BAD: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: path.write_bytes(png()[:-200]),
    "zero bytes": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("no image"),
    "html": lambda path: path.write_text("<!DOCTYPE html><p>404"),
    "bomb": bomb,
    "dangling link": lambda path: path.symlink_to("nowhere.png"),
    "link in a circle": lambda path: path.symlink_to(path.name),
    "pipe": lambda path: os.mkfifo(path),
    "without permission": unreadable,
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 images: <a, b, c>/<cat, dog>/<0, 1>.png, each other than all others."""
    root = tmp_path_factory.mktemp("images") / "data"
    for n, place in enumerate(f"{d}/{c}/{i}.png" for d in "abc" for c in ("cat", "dog") for i in (0, 1)):
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (root / place).write_bytes(png(np.roll(PIXELS, n, axis=0)))
    return root


@pytest.fixture
def root(good: Path, tmp_path: Path) -> Path:
    shutil.copytree(good, tmp_path / "data")
    (tmp_path / "small.yaml").write_text(RECIPE.format(root=tmp_path / "data"))
    return tmp_path / "data"


def run(root: Path, *overrides: str) -> int:
    return main(["run", str(root.parent / "small.yaml"), *overrides])


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that standard error has from us."""
    told = capsys.readouterr().err
    [line] = [line for line in told.splitlines() if line.startswith("xdm-ft: ")]
    assert "Traceback" not in told and line.isprintable()
    return line


def as_table(root: Path) -> list[str]:
    """The data as a table instead, its rows in the order of the paths."""
    rows = sorted(str(path.relative_to(root)) for path in root.glob("*/*/*"))
    lines = [f"{row},{row.split('/')[1]},{row.split('/')[0]}" for row in rows]
    (root / "table.csv").write_text("\n".join(["path,label,domain", *lines]))
    return [f"data={{name: table, file: {root / 'table.csv'}}}"]


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_image_is_named_or_left_out_and_counted(
    kind: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "without permission" and os.geteuid() == 0:
        pytest.skip("the superuser may read everything")
    BAD[kind](root / "a" / "cat" / "bad.png")
    assert run(root) == 2
    line = refused(capsys)
    assert "a/cat/bad.png (" in line and "data.on_bad_image: skip" in line
    assert run(root, "data.on_bad_image=skip") == 0
    [row] = {row["protocol"] for row in results(root)["summary"] if row["selection"] == "train_val"}
    assert "folder, 13 images" in row and "1 unreadable image left out" in row


def results(root: Path) -> dict:
    return json.loads((root.parent / "out/small/results.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("table", [False, True])
def test_all_of_them_at_once(table: bool, trainable: bool, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = ["truncated", "zero bytes", "text", "bomb"]
    for number, kind in enumerate(kinds):
        BAD[kind](root / "a" / "cat" / f"bad {number}.png")
    overrides = [*(as_table(root) if table else []), f"encoder.trainable={str(trainable).lower()}"]
    assert run(root, *overrides) == 2
    line = refused(capsys)
    assert "4 images do not decode" in line and "bad 0.png (" in line and "and 1 more" in line
    assert run(root, *overrides, "data.on_bad_image=skip") == 0
    assert "4 unreadable images left out" in results(root)["summary"][0]["protocol"]
    assert "4 unreadable images left out" in (root.parent / "out/small/results.md").read_text()


def test_a_table_names_links_that_lead_nowhere(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    BAD["dangling link"](root / "a/cat/gone.png")
    BAD["link in a circle"](root / "a/cat/round.png")
    (root / "a/cat/folder.png").mkdir()
    assert run(root, *as_table(root)) == 2
    line = refused(capsys)
    assert "3 of 15 are missing" in line and "gone.png" in line and "round.png" in line and "folder.png" in line


def test_nothing_decodes(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in root.glob("*/*/*.png"):
        path.write_bytes(b"")
    assert run(root, "data.on_bad_image=skip") == 2
    refused(capsys)


def test_wrong_extensions_and_odd_modes_have_their_pixels(root: Path) -> None:
    """The right pixels, upright, by name: what decodes wrongly would make a wrong number."""
    grey = PIXELS[..., 0]
    exif = Image.Exif()
    exif[0x0112] = 6
    folder = root / "a" / "cat"
    Image.fromarray(PIXELS).save(folder / "w.png", "BMP")
    Image.fromarray(grey.astype(np.uint16) * 257).save(folder / "x.png")
    Image.fromarray(PIXELS).save(folder / "y.png", exif=exif)
    Image.fromarray(PIXELS).save(folder / "z.tif", save_all=True, append_images=[Image.new("RGB", (20, 24), "red")])
    cyan = Image.new("CMYK", (20, 24), (255, 0, 0, 0))
    cyan.save(folder / "zc.tif")
    palette = Image.fromarray(PIXELS).quantize(16)
    palette.save(folder / "zp.png")
    dataset = Folder(root=root)
    found = {Path(path).name: np.asarray(dataset.image(row)) for row, path in enumerate(dataset.paths)}
    assert np.array_equal(found["w.png"], PIXELS) and np.array_equal(found["z.tif"], PIXELS)
    assert np.array_equal(found["x.png"], np.dstack([grey] * 3))
    assert np.array_equal(found["y.png"], PIXELS[::-1].transpose(1, 0, 2))
    assert np.abs(found["zc.tif"].astype(int) - [0, 255, 255]).max() <= 1
    assert np.array_equal(found["zp.png"], np.asarray(palette.convert("RGB")))
    assert run(root) == 0


ODD = "d <b>bold|*_`~$&\n\x1b[31m ü大 x"


def test_odd_names_of_domains_classes_and_files(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for old, new in (("b/dog", "b/" + ODD), ("a/dog", "a/" + ODD), ("c/dog", "c/" + ODD)):
        (root / old).rename(root / new)
    (root / "b").rename(root / ODD)
    (root / "a/cat/0.png").rename(root / f"a/cat/{ODD}.png")
    assert run(root, "protocol.test_domains=null") == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "bold" in shown
    text = (root.parent / "out/small/results.md").read_text()
    assert "\x1b" not in text and "<b>" not in text.replace("\\<b\\>", "")
    table = [line for line in text.splitlines() if "bold" in line]
    assert table and all(line.startswith(("|", "**", "- ", "##")) for line in table)
    domains = {run["test_domains"][0] for run in results(root)["runs"]}
    assert domains == {"a", "c", "d <b>bold|*_`~$&\\n\\x1b[31m ü大 x"}
    (root / f"a/cat/{ODD}.png").write_bytes(b"")
    assert run(root, "protocol.test_domains=null", f"output.dir={root.parent / 'other'}") == 2
    assert "\\n\\x1b[31m" in refused(capsys)
