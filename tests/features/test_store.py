"""The store on the disk: damage costs one shard and no number, pruning keeps what is used or not ours."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cache_scenario import SHARD, WIDTH, Files, Pixels, Tiny, features_of, write_images
from safetensors.torch import load_file

from xdm_ft.cli.cache import list_cache, prune_cache, verify_cache
from xdm_ft.cli.parser import main
from xdm_ft.features import cache, maintenance
from xdm_ft.features.cache import WHAT, Features, open_shard, read_manifest, write_manifest, write_shard
from xdm_ft.features.maintenance import prune, stores, verify
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage import atomic
from xdm_ft.storage.cache_root import one_at_a_time
from xdm_ft.storage.lines import Damaged

ROWS = torch.arange(70)
LAST = 70 - 2 * SHARD  # images of the third shard


@pytest.fixture
def good(tmp_path: Path) -> Features:
    return features_of(Pixels(70), tmp_path)


def shard(folder: Path, good: Features, images: int = SHARD) -> Path:
    """A shard with so many images."""
    found = (folder / good.key).glob("shard-*.safetensors")
    return min(path for path in found if len(load_file(path)["features"]) == images)


def again(folder: Path, good: Features) -> int:
    """Extracts, compares the features with `good`, and returns the number of images computed."""
    features = features_of(Pixels(70), folder)
    assert torch.equal(features[ROWS], good[ROWS])
    assert features_of(Pixels(70), folder).extracted == 0
    return features.extracted


# ---- Damage


def flip(place: int) -> Callable[[Path], object]:
    def flipped(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[place] ^= 4
        path.write_bytes(data)

    return flipped


def instead(make: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda path: (path.unlink(), make(path))


def other_width(path: Path) -> None:
    contents = open_shard(path, path.parent.name, WIDTH, torch.float32).contents
    write_shard(path.parent, path.parent.name, contents, torch.zeros(SHARD, WIDTH + 1), {})


def of_another_store(path: Path) -> None:
    other = features_of(Pixels(70), path.parents[1], Tiny(argument="b"))
    shutil.copy(path.parents[1] / other.key / path.name, path)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    **{f"bit {place}": (flip(place), "damaged") for place in (0, 3, 8, 20, 100, 200, 300, -1)},
    **{
        f"{size} bytes": (lambda path, size=size: path.write_bytes(path.read_bytes()[:size]), "damaged")
        for size in (0, 1, 7, 8, 100, -1)
    },
    "gone": (Path.unlink, ""),
    "of other images": (
        lambda path: shutil.copy(min(path.parent.glob("shard-*"), key=lambda p: p.stat().st_size), path), "it is shard-"
    ),
    "of another store": (of_another_store, "it is shard-"),
    "of another width": (other_width, "its features are torch.float32 [32, 6]"),
    "link to a folder": (instead(lambda path: path.symlink_to("/")), "damaged"),
    "broken link": (instead(lambda path: path.symlink_to("nowhere")), "damaged"),
    "pipe": (instead(os.mkfifo), "damaged"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_computed_again(
    damage: str, tmp_path: Path, good: Features, caplog: pytest.LogCaptureFixture
) -> None:
    path = shard(tmp_path, good)
    make, reason = DAMAGES[damage]
    make(path)
    with caplog.at_level(logging.WARNING, logger="xdm_ft"):
        assert again(tmp_path, good) == SHARD
    assert [record.levelname for record in caplog.records] == (["WARNING"] if reason else [])
    assert not reason or (f"{path} is damaged" in caplog.text and reason in caplog.text)


def test_every_flipped_byte_of_a_shard_is_found(tmp_path: Path, good: Features) -> None:
    def opened() -> tuple[bytes, bytes, dict[int, str]]:
        found = open_shard(path, good.key, WIDTH, torch.float32)
        found.check()
        return found.contents.tobytes(), found.features.numpy().tobytes(), found.unreadable

    path = shard(tmp_path, good, LAST)
    data, original, harmless = path.read_bytes(), opened(), 0
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x41]) + data[place + 1 :])
        try:
            assert opened() == original
        except Damaged:
            continue
        harmless += 1
    assert harmless < 10  # padding
    instead(Path.mkdir)(path)
    with pytest.raises(UserError, match=r"shard-.*: cannot be written: Is a directory"):
        features_of(Pixels(70), tmp_path)


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "list", "binary", "nested", "gone"])
def test_a_damaged_manifest_costs_no_shard(damage: str, tmp_path: Path, good: Features, caplog) -> None:
    path = tmp_path / good.key / "manifest.json"
    whole = path.read_bytes()
    changed = {
        "flip": whole.replace(b'"width": 5', b'"width": 4'), "truncate": whole[:-20], "empty": b"", "list": b"[]",
        "binary": b"\xff\xfe" + whole, "nested": b"[" * 100_000,
    }  # fmt: skip
    path.unlink() if damage == "gone" else path.write_bytes(changed[damage])
    assert stores(tmp_path) == [] == prune(tmp_path, max_bytes=0), "what it does not describe is left alone"
    assert again(tmp_path, good) == 0
    features_of(Pixels(71), tmp_path)  # what adds to the store mends it
    assert (f"{path} is damaged" in caplog.text) == (damage != "gone")
    assert read_manifest(path.parent)["width"] == WIDTH and [store.images() for store in stores(tmp_path)] == [71]


def test_only_damaged_shards_of_views_are_named_and_computed_again(tmp_path: Path, caplog) -> None:
    views = {"views": 2}
    good = features_of(Pixels(120), tmp_path, **views)
    [second] = [store for store in stores(tmp_path) if store.manifest.get("view", {}).get("number") == 2]
    flipped, empty, gone, _ = sorted(second.folder.glob("shard-*"))
    assert verify(second) == [] and "3 sets of features, none damaged" in verify_cache(str(tmp_path)).text()
    lost = sum(len(load_file(path)["features"]) for path in (flipped, empty, gone))
    flip(-1)(flipped)
    empty.write_bytes(b"")
    gone.unlink()
    faults = verify(second)
    assert faults[0] == f"{flipped.name} is damaged (its checksum differs)"
    assert faults[1].startswith(f"{empty.name} is damaged") and len(faults) == 2
    verified = verify_cache(str(tmp_path))
    assert verified.exit_status == 2 and f"{flipped.name} is damaged" in str(verified.error)
    assert ("damaged", 2) in {(entry.state, len(entry.faults)) for entry in verified.document["entries"]}
    again = features_of(Pixels(120), tmp_path, **views)
    assert again.extracted == lost and f"{flipped} is damaged" in caplog.text and verify(second) == []
    rows = torch.arange(120)
    for number in range(3):
        assert torch.equal(again.of_views(rows, rows * 0 + number), good.of_views(rows, rows * 0 + number))


# ---- The disk


@pytest.mark.parametrize("views", [0, 2])
def test_a_disk_that_is_too_small_is_reported_before_any_work(
    views: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed, encoder = (1 + views) * 70 * WIDTH * 4, Tiny()
    settings = {"views": views}
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: SimpleNamespace(free=needed - 1))
    with pytest.raises(UserError, match=r"the disk is full: features need 0\.0 MB more, and 0\.0 MB are free"):
        features_of(Pixels(70), tmp_path, encoder, **settings)
    assert encoder.seen[0] == 0
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: SimpleNamespace(free=needed))
    assert features_of(Pixels(70), tmp_path, encoder, **settings).extracted == (1 + views) * 70


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
    assert f"need {needed:,.1f} MB more" in str(fault.value) and "\n" not in str(fault.value)
    assert len(written) == 1 and features_of(Pixels(70), tmp_path).extracted == 70 - SHARD


# ---- Images that do not decode, or change


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_images_are_refused_by_name_and_cost_nothing_else(workers: int, tmp_path: Path) -> None:
    images, cached = write_images(tmp_path / "images", 70), tmp_path / "cache"
    (images / "00040.png").write_bytes(b"no image")
    (images / "00041.png").write_bytes((images / "00041.png").read_bytes()[:90])
    with pytest.raises(UserError) as fault:
        features_of(Files(images), cached, workers=workers)
    assert str(fault.value).startswith(f"2 images do not decode: {images / '00040.png'} (not an image")
    assert "data.on_bad_image: skip" in str(fault.value) and "\n" not in str(fault.value)
    (images / "gone.png").symlink_to("nowhere")
    os.mkfifo(images / "pipe.png")
    with pytest.raises(UserError, match=r"2 images do not decode: .*gone\.png \(No such file"):
        features_of(Files(images), cached, workers=workers)
    skip = {"on_bad_image": "skip", "workers": workers, "views": 1}
    features = features_of(Files(images), cached, **skip)
    assert features.extracted == 70 - SHARD + 70, "the first shard was complete"
    assert list(features.unreadable) == [40, 41, 70, 71] and features.unreadable[71] == "not a regular file"
    rows = torch.tensor([40, 41, 70, 71])
    assert not features[rows].any() and not features.of_views(rows, rows * 0 + 1).any()
    assert features[torch.tensor([39, 42])].abs().sum(1).min() > 0
    (images / "gone.png").unlink()
    shutil.copy(images / "00000.png", images / "gone.png")
    mended = features_of(Files(images), cached, **skip)
    assert list(mended.unreadable) == [40, 41, 71] and mended.extracted == 0, "it is a copy of another image"
    (images / "pipe.png").unlink()
    with pytest.raises(UserError, match="2 images do not decode"):  # also if the features are cached
        features_of(Files(images), cached)


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


# ---- Listing, checking, pruning


@pytest.fixture
def keys(tmp_path: Path) -> dict[int, str]:
    """Three stores, used 30, 20 and 10 days ago: images → key."""
    found = {}
    for rows, days in ((70, 30), (40, 20), (10, 10)):
        found[rows] = features_of(Pixels(rows), tmp_path, named(rows)).key
        for path in (tmp_path / found[rows]).glob("shard-*"):
            os.utime(path, (time.time() - days * 86400,) * 2)
    return found


def named(rows: int) -> Tiny:
    return Tiny(argument=str(rows))


def computed_again(folder: Path, rows: int) -> int:
    return features_of(Pixels(rows), folder, named(rows)).extracted


def listed(folder: Path) -> list[str]:
    for store in stores(folder):  # the listing shows the encoder's model, which a tiny encoder lacks
        write_manifest(store.folder, {**store.manifest, "encoder": {**store.manifest["encoder"], "model": "m"}})
    return list_cache(str(folder)).text().splitlines()


def test_stores_last_used_first(tmp_path: Path, keys: dict[int, str]) -> None:
    cached = stores(tmp_path)
    assert [store.key for store in cached] == [keys[10], keys[40], keys[70]] and stores(tmp_path / "nowhere") == []
    assert [round((time.time() - store.last_used) / 86400) for store in cached] == [10, 20, 30]
    assert [store.images() for store in cached] == [10, 40, 70]
    assert cached[2].bytes == sum(path.stat().st_size for path in (tmp_path / keys[70]).glob("shard-*"))
    assert cached[2].bytes > 70 * (WIDTH * 4 + 16)
    assert computed_again(tmp_path, 70) == 0 and stores(tmp_path)[0].key == keys[70], "use is recorded"
    features_of(Pixels(70), tmp_path / "views", views=2)
    lines = listed(tmp_path / "views")
    assert sum("70 images, fp32, view 1 of domainbed" in line for line in lines) == 1 and len(lines) == 3
    assert sum(line.endswith("70 images, fp32") for line in lines) == 1


def test_prune_by_age_and_size(tmp_path: Path, keys: dict[int, str]) -> None:
    total = sum(store.bytes for store in stores(tmp_path))
    assert prune(tmp_path) == [] == prune(tmp_path, max_bytes=total)
    assert [file.path.parent.name for file in prune(tmp_path, max_bytes=total - 1)] == [keys[70]]
    assert 0 < computed_again(tmp_path, 70) < 70, "its other shards are kept"
    assert {file.path.parent.name for file in prune(tmp_path, unused_days=15)} == {keys[40]}, "70 was used just now"
    assert computed_again(tmp_path, 10) == 0 and computed_again(tmp_path, 40) == 40
    prune(tmp_path, max_bytes=0)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_prune_keeps_what_a_run_refers_to_with_its_views(tmp_path: Path) -> None:
    views = {"views": 2}
    kept, other = (features_of(Pixels(10), tmp_path, named(number), **views).key for number in (1, 2))
    removed = {file.path.parent.name for file in prune(tmp_path, referenced={kept})}
    assert len(removed) == 3 and other in removed
    assert features_of(Pixels(10), tmp_path, named(1), **views).extracted == 0


class Pruning(Pixels):
    """Prunes and verifies the cache while its images are read."""

    decoder = "cache_scenario.Pixels.image"
    folder: Path

    def image(self, row: int) -> object:
        if row == SHARD + 5:
            assert len(prune(self.folder, max_bytes=0)) > 0
            assert [verify(store) for store in stores(self.folder)] == [[]], "only that which is being computed is left"
        return super().image(row)


def test_prune_keeps_stores_for_which_features_are_computed(tmp_path: Path, keys: dict[int, str]) -> None:
    dataset = Pruning(70)
    dataset.folder = tmp_path
    features = features_of(dataset, tmp_path)
    assert features.extracted == 70 and features_of(Pixels(70), tmp_path).extracted == 0
    assert [store.key for store in stores(tmp_path)] == [features.key]


def test_two_prunes_at_once(tmp_path: Path, keys: dict[int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def after_the_other(path: Path, **settings: Any) -> AbstractContextManager[None]:
        monkeypatch.undo()
        assert len(prune(tmp_path, max_bytes=0)) > 0
        return one_at_a_time(path, **settings)

    monkeypatch.setattr(maintenance, "one_at_a_time", after_the_other)
    assert prune(tmp_path, max_bytes=0) == [] == stores(tmp_path)


def test_prune_deletes_only_what_is_ours(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    key = features_of(Pixels(40), folder).key
    plain, foreign, linked = (folder / (letter * 32) for letter in "abc")
    for made in (plain, foreign, elsewhere):
        made.mkdir()
    (foreign / "manifest.json").write_text(json.dumps({"what": "another program's"}))
    write_manifest(elsewhere, read_manifest(folder / key))
    linked.symlink_to(elsewhere)
    kept = [plain / "thesis.txt", folder / key / "notes.txt", foreign / "shard-0.safetensors"]
    kept.append(elsewhere / "shard-0.safetensors")
    for path in kept:
        path.write_text("mine")
    assert len(listed(folder)) == 1 and "1 set of features" in verify_cache(str(folder)).text()
    prune(folder, max_bytes=0)
    assert all(path.exists() for path in [*kept, foreign / "manifest.json", elsewhere / "manifest.json"])
    assert not list((folder / key).glob("shard-*"))


def test_what_another_version_wrote_is_said_to_be_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old = tmp_path / ("d" * 32)
    encoder = {"component": "tiny", "model": "m"}
    old.mkdir()
    write_manifest(old, {"what": WHAT, "key": old.name, "schema": 1, "encoder": encoder, "precision": "fp32"})
    (old / "shard-00000.safetensors").write_bytes(b"features")
    os.utime(old / "shard-00000.safetensors", (time.time() - 40 * 86400,) * 2)
    with caplog.at_level("INFO", logger="xdm_ft"):
        for rows in (3, 4):
            features_of(Pixels(rows), tmp_path)
            assert caplog.text.count("1 set of features are from another version of xdm_ft and cannot be read") == 1
    new = next(store for store in stores(tmp_path) if not store.is_outdated)
    write_manifest(new.folder, {**new.manifest, "encoder": encoder})
    assert list_cache(str(tmp_path)).text().count("of another version: nothing reads it") == 1
    assert "1 set of features, none damaged; 1 of another version" in verify_cache(str(tmp_path)).text()
    assert "1 file removed" in prune_cache(str(tmp_path), 35, None).text() and not old.exists()


@pytest.mark.parametrize("option", ["--unused-days=nan", "--unused-days=-1", "--max-size=inf", "--max-size=-1"])
def test_faults_of_the_options(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "prune", "--dir", str(tmp_path), option]) == 2
    assert option.partition("=")[0] in capsys.readouterr().err
