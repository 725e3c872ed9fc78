"""Every image is decoded once to find those that do not decode, and never again while nothing has changed."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from cache_scenario import Files, write_images
from PIL import Image

from xdm_ft.cli.cache import list_cache, prune_cache, verify_cache
from xdm_ft.features import decoding, maintenance
from xdm_ft.features.decoding import undecodable
from xdm_ft.features.file_hashes import hash_files
from xdm_ft.features.maintenance import prune
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
    monkeypatch.setattr(decoding, "IMAGES_PER_SHARD", 4)


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


def test_a_damaged_shard_is_decoded_again(images: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = images.parent / "cache"
    faults, _ = found(Counting(images), cache)
    path = min((cache / "decoded").glob("*/shard-*"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    again, decoded = found(Counting(images), cache)
    assert again == faults and len(decoded) in (2, 4) and f"{path} is damaged" in caplog.text


def test_unreadable_files_are_reported_with_the_others(images: Path) -> None:
    (images / "gone.png").symlink_to("nowhere")
    faults, _ = found(Counting(images), images.parent / "cache")
    assert list(faults) == [3, 7, 10] and faults[10] == "No such file or directory"


def test_the_list_is_a_part_of_the_cache(images: Path) -> None:
    """It is listed, verified and pruned like features; no run refers to it."""
    cache = images.parent / "cache"
    faults, _ = found(Counting(images), cache)
    [entry] = list_cache(str(cache)).entries
    assert (entry.images, entry.encoder, entry.precision, entry.state) == (10, None, None, "current")
    assert entry.path.parent == cache / "decoded" and entry.bytes > 160
    assert list_cache(str(cache)).text().endswith("which of 10 images can be decoded")
    assert verify_cache(str(cache)).text() == f"{cache}: 0 sets of features, 1 list of decoded images, none damaged"
    assert prune(cache, referenced=set()) == []
    flip_last_byte(next(entry.path.glob("shard-*")))
    assert [one.state for one in verify_cache(str(cache)).entries] == ["damaged"]
    pruned = prune_cache(str(cache), None, max_gigabytes=0)
    assert [one.files for one in pruned.removed] == [3] and not entry.path.exists()
    assert found(Counting(images), cache) == (faults, [*range(10)])


def test_an_outdated_list_is_no_set_of_features(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = images.parent / "cache"
    found(Counting(images), cache)
    monkeypatch.setattr(maintenance, "SCHEMA", 1000)
    expected = f"{cache}: 0 sets of features, none damaged; 1 of an earlier version, which nothing reads"
    assert verify_cache(str(cache)).text() == expected


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_file_that_changes_during_the_check_is_refused(images: Path) -> None:
    class Changing(Counting):
        def image(self, row: int) -> Image.Image:
            if row == 1:
                (images / "00001.png").write_bytes(b"other")
            return super().image(row)

    with pytest.raises(UserError, match=r"00001\.png: this file was changed while images were checked; run again"):
        found(Changing(images), images.parent / "cache")
