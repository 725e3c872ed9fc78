"""Small images that differ, as PNG files in memory, and Parquet files and tars of them."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
from PIL import Image

from xdm_ft.images import ImageDataset

SIZE = 8


def png(number: int) -> bytes:
    """An image whose first pixel holds the number."""
    pixels = np.full((SIZE, SIZE, 3), 40 * (number % 5), np.uint8)
    pixels[0, 0] = number & 255, number >> 8 & 255, number >> 16 & 255
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "png")
    return stream.getvalue()


def labels_of(numbers: range) -> dict[str, list[str]]:
    """Class, domain and group of each image."""
    return {
        "label": [("cat", "dog")[n % 2] for n in numbers],
        "domain": [("photo", "sketch", "clipart")[n // 2 % 3] for n in numbers],
        "group": [f"patient {n // 4}" for n in numbers],
    }


def write_parquet(path: Path, numbers: range, rows_per_group: int, struct: bool = False) -> Path:
    """Writes images as bytes, or as the structs of `datasets`: {bytes, path}."""
    path.parent.mkdir(parents=True, exist_ok=True)
    images: list[object] = [{"bytes": png(n), "path": f"a/{n}.png"} if struct else png(n) for n in numbers]
    table = pyarrow.table({"image": images, **labels_of(numbers)})
    pyarrow.parquet.write_table(table, path, row_group_size=rows_per_group)
    return path


def write_tar(path: Path, numbers: range, about: bool) -> Path:
    """Writes images with KEY.json, or with KEY.cls."""
    path.parent.mkdir(parents=True, exist_ok=True)
    labels = labels_of(numbers)
    with tarfile.open(path, "w") as file:
        for place, number in enumerate(numbers):
            said = {name: column[place] for name, column in labels.items()}
            members = {"png": png(number), "txt": b"ignored"}
            members |= {"json": json.dumps(said).encode()} if about else {"cls": said["label"].encode()}
            for extension, content in members.items():
                member = tarfile.TarInfo(f"a/{number:06d}.{extension}")
                member.size = len(content)
                file.addfile(member, io.BytesIO(content))
    return path


def same(found: ImageDataset, other: ImageDataset) -> None:
    """Both hold the same images with the same labels, in the same order."""
    assert (found.class_names, found.domain_names) == (other.class_names, other.domain_names)
    for one, two in ((found.labels, other.labels), (found.domains, other.domains), (found.groups, other.groups)):
        assert np.array_equal(one, two)
    assert [found.content(row) for row in range(len(found))] == [other.content(row) for row in range(len(other))]
