"""Every image is decoded once to find those that do not decode, and never again while nothing has changed."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from cache_scenario import Files, write_images
from PIL import Image

from xdm_ft.features import hashes as hashing
from xdm_ft.features.hashes import hash_files, undecodable
from xdm_ft.images.transforms import Preprocessing
from xdm_ft.runtime.errors import UserError

OWN = Preprocessing(mean=(0.5,) * 3, std=(0.5,) * 3, size=8, resize="pad")
STRIP = "too long and narrow"


class Counting(Files):
    """Counts the images that are decoded."""

    decoder = "test_decoding.Counting.image"

    def __init__(self, folder: Path, stops_at: int = -1) -> None:
        super().__init__(folder)
        self.seen: list[int] = []
        self.stops_at = stops_at

    def image(self, row: int) -> Image.Image:
        self.seen.append(row)
        if row == self.stops_at:
            raise KeyboardInterrupt
        return super().image(row)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "DECODED_PER_COMMIT", 4)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    (tmp_path / "cache").mkdir()
    folder = write_images(tmp_path / "images", 10)
    (folder / "00003.png").write_bytes(b"no image")
    Image.new("RGB", (9000, 1)).save(folder / "00007.png")
    return folder


def found(data: Counting, cache: Path | None, preprocessing: Preprocessing = OWN) -> tuple[dict[int, str], list[int]]:
    """The images that do not decode, and the rows that were decoded for that."""
    hashes = hash_files(data, cache, show=False)
    faults = undecodable(data, hashes, preprocessing, cache, 2, show=False)
    return faults, sorted(data.seen)


def test_images_are_decoded_once(images: Path) -> None:
    cache = images.parent / "cache"
    faults, decoded = found(Counting(images), cache)
    assert list(faults) == [3, 7] and decoded == [*range(10)]
    assert faults[3] == "not an image in a format that Pillow reads" and STRIP in faults[7]
    assert found(Counting(images), cache) == (faults, [])
    assert found(Counting(images.rename(images.parent / "moved")), cache) == (faults, [])


def test_what_changes_is_decoded_again(images: Path) -> None:
    cache = images.parent / "cache"
    found(Counting(images), cache)
    (images / "00005.png").write_bytes(b"broken now")
    Image.fromarray(np.full((8, 8, 3), 9, np.uint8)).save(images / "00003.png")
    faults, decoded = found(Counting(images), cache)
    assert (list(faults), decoded) == ([5, 7], [3, 5])
    shutil.copy(images / "00000.png", images / "00005.png")
    assert found(Counting(images), cache)[1] == [], "it is a copy of another image"


def test_another_resize_may_refuse_other_strips(images: Path) -> None:
    cache, native = images.parent / "cache", OWN.model_copy(update={"resize": "native"})
    assert list(found(Counting(images), cache)[0]) == [3, 7]
    faults, decoded = found(Counting(images), cache, native)
    assert list(faults) == [3] and len(decoded) == 10
    assert found(Counting(images), cache, native) == (faults, [])


def test_nothing_is_remembered_without_a_cache(images: Path) -> None:
    first = found(Counting(images), None)
    assert list(first[0]) == [3, 7] and first[1] == [*range(10)]
    assert found(Counting(images), None) == first


def test_an_interrupted_check_goes_on_behind_its_last_shard(images: Path) -> None:
    cache = images.parent / "cache"
    data = Counting(images, stops_at=9)
    hashes = hash_files(data, cache, show=False)
    with pytest.raises(KeyboardInterrupt):
        undecodable(data, hashes, OWN, cache, 1, show=False)
    assert found(Counting(images), cache) == (found(Counting(images), None)[0], [8, 9])


@pytest.mark.parametrize("column", ["checksum = 'a'", "xxh3_128 = zeroblob(64)", "reasons = '{}'"])
def test_a_damaged_entry_is_decoded_again(column: str, images: Path) -> None:
    cache = images.parent / "cache"
    faults, _ = found(Counting(images), cache)
    with closing(sqlite3.connect(cache / "index.sqlite")) as index, index:
        index.execute(f"UPDATE decoded SET {column} WHERE rowid = 1")
    assert found(Counting(images), cache) == (faults, [0, 1, 2, 3])


def test_processes_divide_the_images(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each decodes its part, and what the others have not put into the index."""
    cache, data = images.parent / "cache", Counting(images)
    ranks = [SimpleNamespace(process_index=rank, num_processes=2) for rank in range(2)]
    hashes, seen = hash_files(data, cache, show=False), []

    def wait(accelerator: object) -> None:
        seen.append(sorted(data.seen))

    monkeypatch.setattr(hashing, "wait_for_everyone", wait)
    faults = [undecodable(data, hashes, OWN, cache, 1, False, rank) for rank in ranks]
    assert seen == [[0, 1, 2, 3, 4], [*range(10)]] and sorted(data.seen) == [*range(10)]
    assert faults[0] == faults[1] == found(Counting(images), None)[0]


def test_unreadable_files_are_reported_with_the_others(images: Path) -> None:
    (images / "gone.png").symlink_to("nowhere")
    faults, _ = found(Counting(images), images.parent / "cache")
    assert list(faults) == [3, 7, 10] and faults[10] == "No such file or directory"


def test_a_file_that_changes_during_the_check_is_refused(images: Path) -> None:
    class Changing(Counting):
        def image(self, row: int) -> Image.Image:
            if row == 1:
                (images / "00001.png").write_bytes(b"other")
            return super().image(row)

    with pytest.raises(UserError, match=r"00001\.png: this file was changed while images were checked; run again"):
        found(Changing(images), images.parent / "cache")
