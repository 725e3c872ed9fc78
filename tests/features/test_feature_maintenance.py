"""Listing, checking and pruning the cache."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch
from cache_scenario import SHARD, WIDTH, Pixels, Tiny, features_of

from xdm_ft.cli.cache import list_cache, prune_cache, verify_cache
from xdm_ft.features import cache
from xdm_ft.features.cache import lock_file
from xdm_ft.features.maintenance import Cached, prune, stores, verify
from xdm_ft.features.shards import read_manifest, write_manifest
from xdm_ft.storage.cache_root import one_at_a_time


def filled(folder: Path) -> dict[int, str]:
    """Three stores, used 30, 20 and 10 days ago: images → key."""
    keys = {}
    for rows, days in ((70, 30), (40, 20), (10, 10)):
        keys[rows] = features_of(Pixels(rows), folder, Tiny(argument=str(rows))).key
        for path in (folder / keys[rows]).glob("shard-*"):
            os.utime(path, (time.time() - days * 86400,) * 2)
    return keys


def again(folder: Path, rows: int) -> int:
    """The number of images that are computed again."""
    return features_of(Pixels(rows), folder, Tiny(argument=str(rows))).extracted


def store_of(folder: Path, key: str) -> Cached:
    return next(store for store in stores(folder) if store.key == key)


def test_stores_last_used_first(tmp_path: Path) -> None:
    keys = filled(tmp_path)
    found = stores(tmp_path)
    assert [store.key for store in found] == [keys[10], keys[40], keys[70]]
    assert [round((time.time() - store.last_used) / 86400) for store in found] == [10, 20, 30]
    assert [store.images() for store in found] == [10, 40, 70]
    assert found[2].bytes == sum(path.stat().st_size for path in (tmp_path / keys[70]).glob("shard-*"))
    assert found[2].bytes > 70 * (WIDTH * 4 + 16)
    assert stores(tmp_path / "nowhere") == []


def test_use_is_recorded(tmp_path: Path) -> None:
    keys = filled(tmp_path)
    assert again(tmp_path, 70) == 0
    assert stores(tmp_path)[0].key == keys[70]


def test_verify_names_every_damaged_file(tmp_path: Path) -> None:
    key = features_of(Pixels(120), tmp_path).key
    assert verify(store_of(tmp_path, key)) == []
    one, two, three, _ = sorted((tmp_path / key).glob("shard-*"))
    data = bytearray(one.read_bytes())
    data[-1] ^= 1
    one.write_bytes(data)
    two.write_bytes(b"")
    three.unlink()
    faults = verify(store_of(tmp_path, key))
    assert faults[0] == f"{one.name} is damaged (its checksum differs)"
    assert faults[1].startswith(f"{two.name} is damaged") and len(faults) == 2
    verified = verify_cache(str(tmp_path))
    assert verified.exit_status == 2 and f"{one.name} is damaged" in str(verified.error)
    assert [(entry.state, len(entry.faults)) for entry in verified.document["entries"]] == [("damaged", 2)]
    features_of(Pixels(120), tmp_path)
    assert verify(store_of(tmp_path, key)) == []
    assert "1 set of features, none damaged" in verify_cache(str(tmp_path)).text()


def test_prune_by_age(tmp_path: Path) -> None:
    keys = filled(tmp_path)
    assert prune(tmp_path) == []
    removed = {file.path.parent.name for file in prune(tmp_path, unused_days=15)}
    assert removed == {keys[70], keys[40]}
    assert [store.key for store in stores(tmp_path)] == [keys[10]]
    assert again(tmp_path, 10) == 0 and again(tmp_path, 70) == 70


def test_prune_by_size_takes_the_longest_unused_shards(tmp_path: Path) -> None:
    keys = filled(tmp_path)
    total = sum(store.bytes for store in stores(tmp_path))
    assert prune(tmp_path, max_bytes=total) == []
    assert [file.path.parent.name for file in prune(tmp_path, max_bytes=total - 1)] == [keys[70]]
    assert 0 < again(tmp_path, 70) < 70, "its other shards are kept"
    prune(tmp_path, max_bytes=0)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_prune_keeps_stores_for_which_features_are_computed(tmp_path: Path) -> None:
    keys = filled(tmp_path)
    with one_at_a_time(lock_file(tmp_path / keys[40])):
        assert keys[40] not in {file.path.parent.name for file in prune(tmp_path, max_bytes=0)}
        assert [store.key for store in stores(tmp_path)] == [keys[40]]
    prune(tmp_path, max_bytes=0)
    assert stores(tmp_path) == []


def not_ours(folder: Path) -> list[Path]:
    """Folders and files that other programs could keep in the folder of the cache."""
    plain, foreign, linked = folder / ("a" * 32), folder / ("b" * 32), folder / ("c" * 32)
    plain.mkdir()
    (plain / "thesis.txt").write_text("mine")
    foreign.mkdir()
    (foreign / "manifest.json").write_text(json.dumps({"what": "another program's"}))
    (foreign / "shard-00000.safetensors").write_text("mine")
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir()
    write_manifest(elsewhere, read_manifest(next(folder.glob("*/manifest.json")).parent))
    (elsewhere / "shard-00000.safetensors").write_text("mine")
    linked.symlink_to(elsewhere)
    return [plain / "thesis.txt", foreign / "manifest.json", foreign / "shard-00000.safetensors", *elsewhere.iterdir()]


def test_prune_deletes_only_what_is_ours(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    key = features_of(Pixels(40), folder).key
    (folder / key / "notes.txt").write_text("mine")
    kept = [*not_ours(folder), folder / key / "notes.txt"]
    assert len(list_cache_lines(folder)) == 1
    assert "1 set of features" in verify_cache(str(folder)).text()
    prune(folder, max_bytes=0)
    assert all(path.exists() for path in kept)
    assert not list((folder / key).glob("shard-*"))


def list_cache_lines(folder: Path) -> list[str]:
    for store in stores(folder):  # the listing shows the encoder's model, which a tiny encoder lacks
        write_manifest(store.folder, {**store.manifest, "encoder": {**store.manifest["encoder"], "model": "m"}})
    return list_cache(str(folder)).text().splitlines()


def test_a_store_without_a_good_manifest_is_left_alone(tmp_path: Path) -> None:
    key = features_of(Pixels(10), tmp_path).key
    (tmp_path / key / "manifest.json").write_text("{}")
    assert stores(tmp_path) == [] == prune(tmp_path, max_bytes=0)
    assert features_of(Pixels(10), tmp_path).extracted == 0
    assert features_of(Pixels(11), tmp_path).extracted == 1
    assert [store.images() for store in stores(tmp_path)] == [11]


def test_features_of_an_earlier_version_are_said_to_be_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its folders have one shard for each range of rows of one data set, and nothing reads them."""
    filled(tmp_path)
    old = tmp_path / ("d" * 32)
    old.mkdir()
    manifest = {"what": "image features, cached by xdm_ft; safe to delete", "key": old.name, "schema": 1}
    encoder = {"component": "tiny", "model": "m"}
    write_manifest(old, manifest | {"encoder": encoder, "precision": "fp32", "data": {"images": 3}, "complete": True})
    (old / "shard-00000.safetensors").write_bytes(b"features")
    (old / "shard-00000.safetensors.lock").touch()
    os.utime(old / "shard-00000.safetensors", (time.time() - 40 * 86400,) * 2)
    lines = list_cache_lines(tmp_path)
    assert "of an earlier version: nothing reads it" in lines[-1] and len(lines) == 4
    assert "3 sets of features, none damaged; 1 of an earlier version" in verify_cache(str(tmp_path)).text()
    with caplog.at_level("INFO", logger="xdm_ft"):
        features_of(Pixels(3), tmp_path, Tiny(argument="new"))
        assert caplog.text.count("1 set of features of an earlier version can not be read") == 1
        features_of(Pixels(4), tmp_path, Tiny(argument="new"))
        assert caplog.text.count("of an earlier version") == 1
    assert "1 file removed" in prune_cache(str(tmp_path), 35, None).text() and not old.exists()


def test_deleted_features_stay_readable_for_their_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MEMORY_FRACTION", 0.0)
    features = features_of(Pixels(70), tmp_path)
    before = features[torch.arange(70)]
    assert len(prune(tmp_path, max_bytes=0)) == 3
    assert torch.equal(features[torch.arange(70)], before)


class Pruning(Pixels):
    """Prunes and verifies the cache while its images are read."""

    decoder = "cache_scenario.Pixels.image"
    folder: Path

    def image(self, row: int) -> object:
        if row == SHARD + 5:
            prune(self.folder, max_bytes=0)
            assert [verify(store) for store in stores(self.folder)] == [[]]
        return super().image(row)


def test_prune_and_verify_while_features_are_computed(tmp_path: Path) -> None:
    dataset = Pruning(70)
    dataset.folder = tmp_path
    features = features_of(dataset, tmp_path)
    assert features.extracted == 70 and features_of(Pixels(70), tmp_path).extracted == 0
