"""Facts of image files: by hand for each format, from bytes in a table, without files, and of damaged ones."""

from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from made_up import MadeUp
from PIL import Image

from xdm_ft.data.folder import Folder
from xdm_ft.data.parquet import Parquet
from xdm_ft.images.facts import FACTS, MISSING, facts_of_row, image_facts


@pytest.fixture
def folder(tmp_path):
    """Two domains: noise as JPEG of a camera, and red as PNG, with a file that is not an image."""
    pixels = np.random.default_rng(0).integers(0, 256, (80, 120, 3)).astype(np.uint8)
    exif = Image.Exif()
    exif[271], exif[272] = "Acme", "X100\0"
    for domain in ("jpeg", "png"):
        for name in ("cat", "dog"):
            path = tmp_path / domain / name
            path.mkdir(parents=True)
            if domain == "jpeg":
                quality = 50 if name == "cat" else 90
                Image.fromarray(pixels).save(
                    path / "0.jpg", quality=quality, subsampling=0, exif=exif, progressive=True
                )
            else:
                Image.new("RGB", (30, 60), (255, 0, 10)).save(path / "0.png")
    (tmp_path / "png" / "dog" / "1.png").write_bytes(b"no image")
    return tmp_path


def row_of(data, name):
    return next(row for row in range(len(data)) if data.name(row).endswith(name))


def test_facts_of_each_file(folder):
    data = Folder(root=folder)
    of = facts_of_row(data, row_of(data, "png/cat/0.png"))
    size = (folder / "png/cat/0.png").stat().st_size
    assert of["width"] == 30 and of["height"] == 60 and of["width / height"] == 0.5
    assert of["format"] == "PNG" and of["mode"] == "RGB" and of["camera"] == ""
    assert of["bytes per pixel"] == size / 1800 and "JPEG luminance table" not in of
    assert [of[f"mean {c}"] for c in ("red", "green", "blue")] == [255, 0, 10] and of["spread of red"] == 0
    assert [of[f"lightest {c}"] for c in ("red", "green", "blue")] == [255, 0, 10]
    low, high = (facts_of_row(data, row_of(data, f"jpeg/{name}/0.jpg")) for name in ("cat", "dog"))
    assert low["width"] == 120 and low["camera"] == "Acme X100"  # not the smaller size that is decoded
    assert low["JPEG luminance table"] > high["JPEG luminance table"] > 0
    assert low["JPEG colour subsampling"] == 0 and low["JPEG progressive"] == 1
    assert low["mean red"] == pytest.approx(127, abs=6)


def test_an_unreadable_image_is_skipped_and_the_table_has_every_fact(folder):
    data = Folder(root=folder)
    table = image_facts(data, np.arange(len(data)), show=False)
    assert (
        len(data) == 5
        and row_of(data, "dog/1.png") not in table.rows.tolist()
        and table.values.shape == (4, len(FACTS))
    )
    values = dict(zip(FACTS, table.values.T, strict=True))
    is_jpeg = data.domains[table.rows] == data.domain_names.index("jpeg")
    assert values["format"].tolist() == [0.0 if jpeg else 1.0 for jpeg in is_jpeg]
    assert ((values["JPEG colour table"] == MISSING) == ~is_jpeg).all()
    assert table.columns(["size"]).shape == (4, 3) and table.columns(["EXIF camera"])[:, 0].tolist() == list(is_jpeg)
    none = image_facts(data, np.array([row_of(data, "dog/1.png")]), show=False)
    assert none.values.shape == (0, len(FACTS))


def test_bytes_in_a_table_have_the_facts_of_the_files(folder):
    paths = sorted(path for path in folder.rglob("*.*") if path.read_bytes() != b"no image")
    columns = {
        "image": [path.read_bytes() for path in paths],
        "label": [path.parts[-2] for path in paths],
        "domain": [path.parts[-3] for path in paths],
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "images.parquet")
    table, files = Parquet(file=folder / "images.parquet"), Folder(root=folder)
    for row, path in enumerate(paths):
        name = str(Path(*path.parts[-3:]))
        assert facts_of_row(table, row) == facts_of_row(files, row_of(files, name))


def test_data_without_files_have_size_and_colour():
    facts = facts_of_row(MadeUp([0, 1], [0, 0]), 0)
    assert facts["width"] == 1 and facts["mean red"] == 0 and "format" not in facts
    table = image_facts(MadeUp([0, 1], [0, 0]), np.arange(2), show=False)
    assert np.isfinite(table.values).all()
