"""Damaged files, full disks and images that do not decode are found and named, and cost no finished shard."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cache_scenario import SHARD, WIDTH, Files, Pixels, Tiny, features_of, write_images
from safetensors.torch import load_file

from xdm_ft.features import cache
from xdm_ft.features.cache import Features
from xdm_ft.features.shards import Shard, open_shard, write_shard
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage import atomic
from xdm_ft.storage.lines import Damaged

ROWS = torch.arange(70)


@pytest.fixture
def good(tmp_path: Path) -> Features:
    return features_of(Pixels(70), tmp_path)


def shard(tmp_path: Path, good: Features, images: int = SHARD) -> Path:
    """A shard with that number of images."""
    found = (tmp_path / good.key).glob("shard-*.safetensors")
    return min(path for path in found if len(load_file(path)["features"]) == images)


def again(tmp_path: Path, good: Features) -> int:
    """Extracts, compares the features with `good`, and returns the number of images computed."""
    features = features_of(Pixels(70), tmp_path)
    assert torch.equal(features[ROWS], good[ROWS])
    assert features_of(Pixels(70), tmp_path).extracted == 0
    return features.extracted


@pytest.mark.parametrize("place", [0, 3, 8, 20, 100, 200, 300, -1])
def test_a_flipped_bit_costs_one_shard(place: int, tmp_path: Path, good: Features, caplog) -> None:
    path = shard(tmp_path, good)
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)
    assert again(tmp_path, good) == SHARD
    assert [f"{path} is damaged" in record.message for record in caplog.records] == [True]


def opened(path: Path, good: Features) -> Shard:
    """The checked shard, in memory."""
    found = open_shard(path, good.key, WIDTH, torch.float32)
    found.check()
    return Shard(path, found.contents.copy(), found.features.clone(), found.unreadable, found.checksum)


def test_every_flipped_byte_of_a_shard_is_found(tmp_path: Path, good: Features) -> None:
    path = shard(tmp_path, good, 70 - 2 * SHARD)
    data = path.read_bytes()
    original = opened(path, good)
    harmless = 0
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x41]) + data[place + 1 :])
        try:
            found = opened(path, good)
        except Damaged:
            continue
        assert torch.equal(found.features, original.features) and found.unreadable == {}
        assert (found.contents == original.contents).all()
        harmless += 1
    assert harmless < 10  # padding


@pytest.mark.parametrize("size", [0, 1, 7, 8, 100, -1])
def test_a_truncated_shard_is_computed_again(size: int, tmp_path: Path, good: Features, caplog) -> None:
    path = shard(tmp_path, good)
    path.write_bytes(path.read_bytes()[:size])
    assert again(tmp_path, good) == SHARD
    assert f"{path} is damaged" in caplog.text


def test_a_missing_shard_is_computed_again(tmp_path: Path, good: Features) -> None:
    shard(tmp_path, good).unlink()
    assert again(tmp_path, good) == SHARD


def test_a_shard_under_the_name_of_another_is_found(tmp_path: Path, good: Features, caplog) -> None:
    other = shard(tmp_path, good, 70 - 2 * SHARD)
    shutil.copy(other, shard(tmp_path, good))
    assert again(tmp_path, good) == SHARD
    assert f"it is {other.name} of" in caplog.text


def test_a_shard_of_another_store_is_found(tmp_path: Path, good: Features, caplog) -> None:
    other = features_of(Pixels(70), tmp_path, Tiny(argument="b"))
    path = shard(tmp_path, good)
    shutil.copy(tmp_path / other.key / path.name, path)
    assert again(tmp_path, good) == SHARD
    assert f"of {other.key}" in caplog.text


def test_features_of_another_width_are_found(tmp_path: Path, good: Features, caplog) -> None:
    path = shard(tmp_path, good)
    contents = open_shard(path, good.key, WIDTH, torch.float32).contents
    write_shard(path.parent, good.key, contents, torch.zeros(SHARD, WIDTH + 1), {})
    assert again(tmp_path, good) == SHARD
    assert "its features are torch.float32 [32, 6]" in caplog.text


@pytest.mark.parametrize("kind", ["folder", "link to a folder", "broken link", "pipe"])
def test_something_else_in_the_place_of_a_shard(kind: str, tmp_path: Path, good: Features, caplog) -> None:
    path = shard(tmp_path, good)
    path.unlink()
    if kind == "folder":
        path.mkdir()
        with pytest.raises(UserError, match=r"shard-.*: can not be written: Is a directory"):
            features_of(Pixels(70), tmp_path)
        return
    {
        "link to a folder": lambda: path.symlink_to("/"),
        "broken link": lambda: path.symlink_to("nowhere"),
        "pipe": lambda: os.mkfifo(path),
    }[kind]()
    assert again(tmp_path, good) == SHARD


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "list", "binary", "nested"])
def test_a_damaged_manifest_costs_no_shard(damage: str, tmp_path: Path, good: Features, caplog) -> None:
    path = tmp_path / good.key / "manifest.json"
    whole = path.read_bytes()
    path.write_bytes(
        {
            "flip": whole.replace(b'"width": 5', b'"width": 4'),
            "truncate": whole[:-20],
            "empty": b"",
            "list": b"[]",
            "binary": b"\xff\xfe" + whole,
            "nested": b"[" * 100_000,
        }[damage]
    )
    assert again(tmp_path, good) == 0
    features_of(Pixels(71), tmp_path)  # what adds to the store mends it
    assert f"{path} is damaged" in caplog.text and cache.read_manifest(path.parent)["width"] == WIDTH


def test_a_missing_manifest_costs_no_shard(tmp_path: Path, good: Features) -> None:
    (tmp_path / good.key / "manifest.json").unlink()
    assert again(tmp_path, good) == 0
    features_of(Pixels(71), tmp_path)
    assert cache.read_manifest(tmp_path / good.key)["width"] == WIDTH


def test_a_disk_that_is_too_small_is_reported_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    encoder = Tiny()
    with pytest.raises(UserError, match=r"the disk is full: 0\.4 MB more are needed for features, 0\.0 MB are free"):
        features_of(Pixels(20_000), tmp_path, encoder)
    assert encoder.seen[0] == 0


def test_a_disk_that_fills_leaves_a_valid_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace, written = os.replace, []

    def full_after_the_first_shard(source: Path, target: Path) -> None:
        if "shard" in str(target) and written:
            raise OSError(errno.ENOSPC, "No space left on device")
        if "shard" in str(target):
            written.append(target)
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(atomic.os, "replace", full_after_the_first_shard)
        with pytest.raises(UserError) as fault:
            features_of(Pixels(70), tmp_path)
    needed = (70 - SHARD) * WIDTH * 4 / 1e6
    assert f"{needed:,.1f} MB more are needed" in str(fault.value) and "\n" not in str(fault.value)
    assert len(written) == 1
    assert features_of(Pixels(70), tmp_path).extracted == 70 - SHARD


def test_bad_images_are_refused_by_name_and_cost_nothing_else(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", 70)
    (images / "00040.png").write_bytes(b"no image")
    (images / "00041.png").write_bytes((images / "00041.png").read_bytes()[:90])
    with pytest.raises(UserError) as fault:
        features_of(Files(images), tmp_path / "cache")
    assert str(fault.value).startswith(f"2 images do not decode: {images / '00040.png'} (not an image")
    assert "data.on_bad_image: skip" in str(fault.value) and "\n" not in str(fault.value)

    features = features_of(Files(images), tmp_path / "cache", on_bad_image="skip")
    assert features.extracted == 70 - SHARD  # the first shard was complete
    assert list(features.unreadable) == [40, 41]
    assert torch.equal(features[torch.tensor([40, 41])], torch.zeros(2, WIDTH))
    assert features[torch.tensor([39, 42])].abs().sum(1).min() > 0
    found = features_of(Files(images), tmp_path / "cache", on_bad_image="skip")
    assert (found.extracted, found.unreadable) == (0, features.unreadable)
    with pytest.raises(UserError, match="2 images do not decode"):  # also if the features are cached
        features_of(Files(images), tmp_path / "cache")


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_files(workers: int, tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", 3)
    (images / "gone.png").symlink_to("nowhere")
    os.mkfifo(images / "pipe.png")
    (images / "round.png").symlink_to("round.png")
    dataset = Files(images)
    with pytest.raises(UserError, match=r"3 images do not decode: .*gone\.png \(No such file"):
        features_of(dataset, tmp_path / "cache")
    features = features_of(dataset, tmp_path / "cache", on_bad_image="skip", workers=workers)
    assert list(features.unreadable) == [3, 4, 5]
    assert features.unreadable[4] == "not a regular file"
    (images / "gone.png").unlink()
    shutil.copy(images / "00000.png", images / "gone.png")
    mended = features_of(Files(images), tmp_path / "cache", on_bad_image="skip")
    assert list(mended.unreadable) == [4, 5] and mended.extracted == 0, "it is a copy of another image"


class Changing(Files):
    """A file changes between the hash of its content and its decoding."""

    decoder = "cache_scenario.Files.image"

    def image(self, row: int) -> object:
        if row == 40:
            shutil.copy(self.paths[0], self.paths[40])
        return super().image(row)


def test_a_file_that_changes_during_extraction_is_refused(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", 70)
    with pytest.raises(UserError, match=r"00040\.png: this file was changed while features were computed"):
        features_of(Changing(images), tmp_path / "cache")
    assert features_of(Files(images), tmp_path / "cache").extracted == 69 - SHARD  # image 40 is now a copy of image 0


def test_faults_are_logged_for_users(good: Features, tmp_path: Path, caplog) -> None:
    shard(tmp_path, good).write_bytes(b"")
    with caplog.at_level(logging.WARNING, logger="xdm_ft"):
        features_of(Pixels(70), tmp_path)
    assert {(record.name, record.levelname) for record in caplog.records} == {("xdm_ft", "WARNING")}
