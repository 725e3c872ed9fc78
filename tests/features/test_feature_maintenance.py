"""Listing, checking and pruning the cache."""

from __future__ import annotations

import os
import time
from pathlib import Path

from cache_scenario import WIDTH, Pixels, features_of
from filelock import FileLock

from xdm_ft.features.maintenance import entries, prune, verify


def filled(cache: Path) -> dict[int, str]:
    """Three entries, used 30, 20 and 10 days ago: images → key."""
    keys = {}
    for rows, days in ((70, 30), (40, 20), (10, 10)):
        keys[rows] = features_of(Pixels(rows), cache).key
        used = time.time() - days * 86400
        os.utime(cache / keys[rows] / "manifest.json", (used, used))
    return keys


def test_entries_last_used_first(tmp_path: Path) -> None:
    keys = filled(tmp_path)
    found = entries(tmp_path)
    assert [entry.key for entry in found] == [keys[10], keys[40], keys[70]]
    assert [round((time.time() - entry.last_used) / 86400) for entry in found] == [10, 20, 30]
    assert found[2].manifest is not None and found[2].manifest["data"]["images"] == 70
    assert found[2].bytes == sum(path.stat().st_size for path in (tmp_path / keys[70]).iterdir()) > 70 * WIDTH * 4
    assert entries(tmp_path / "nowhere") == []


def test_use_of_an_entry_is_recorded(tmp_path: Path) -> None:
    keys = filled(tmp_path)
    assert features_of(Pixels(70), tmp_path).extracted == 0
    assert entries(tmp_path)[0].key == keys[70]


def test_entry_without_a_good_manifest_is_listed(tmp_path: Path) -> None:
    key = features_of(Pixels(10), tmp_path).key
    manifest = tmp_path / key / "manifest.json"
    manifest.write_text("{}")
    assert [(entry.key, entry.manifest) for entry in entries(tmp_path)] == [(key, None)]
    manifest.unlink()
    assert [(entry.key, entry.manifest) for entry in entries(tmp_path)] == [(key, None)]


def test_verify_names_every_damaged_or_missing_file(tmp_path: Path) -> None:
    key = features_of(Pixels(120), tmp_path).key
    assert verify(tmp_path, key) == []
    path = tmp_path / key / "shard-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    (tmp_path / key / "shard-00002.safetensors").write_bytes(b"")
    (tmp_path / key / "shard-00003.safetensors").unlink()
    faults = verify(tmp_path, key)
    assert faults[0] == "shard-00001.safetensors is damaged (its checksum differs)"
    assert faults[1].startswith("shard-00002.safetensors is damaged")
    assert faults[2] == "shard-00003.safetensors is missing"
    (tmp_path / key / "manifest.json").write_text("{}")
    assert verify(tmp_path, key)[0] == "manifest.json is damaged (its checksum differs)"
    (tmp_path / key / "manifest.json").unlink()
    assert verify(tmp_path, key)[0] == "manifest.json is missing"
    assert len(verify(tmp_path, key)) == 3

    assert features_of(Pixels(120), tmp_path).extracted == 32 + 32 + 24
    assert verify(tmp_path, key) == []


def test_prune_by_age(tmp_path: Path) -> None:
    keys = filled(tmp_path)
    assert prune(tmp_path) == []
    assert [entry.key for entry in prune(tmp_path, unused_days=15)] == [keys[70], keys[40]]
    assert [entry.key for entry in entries(tmp_path)] == [keys[10]]
    assert features_of(Pixels(10), tmp_path).extracted == 0
    assert features_of(Pixels(70), tmp_path).extracted == 70


def test_prune_by_size(tmp_path: Path) -> None:
    keys = filled(tmp_path)
    total = sum(entry.bytes for entry in entries(tmp_path))
    assert prune(tmp_path, max_bytes=total) == []
    assert [entry.key for entry in prune(tmp_path, max_bytes=total - 1)] == [keys[70]]
    assert [entry.key for entry in prune(tmp_path, max_bytes=0)] == [keys[40], keys[10]]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_prune_keeps_entries_that_are_being_computed(tmp_path: Path) -> None:
    keys = filled(tmp_path)
    with FileLock(tmp_path / keys[40] / "shard-00000.safetensors.lock"):
        assert [entry.key for entry in prune(tmp_path, max_bytes=0)] == [keys[70], keys[10]]
    assert [entry.key for entry in prune(tmp_path, max_bytes=0)] == [keys[40]]


def test_prune_deletes_what_a_killed_prune_left(tmp_path: Path) -> None:
    keys = filled(tmp_path)
    (tmp_path / keys[40]).rename(tmp_path / f".cleared-{keys[40]}")
    assert len(entries(tmp_path)) == 2
    prune(tmp_path)
    assert not (tmp_path / f".cleared-{keys[40]}").exists()


def test_deleted_features_stay_readable_for_their_process(tmp_path: Path, monkeypatch) -> None:
    import torch

    from xdm_ft.features import cache

    monkeypatch.setattr(cache, "MEMORY_FRACTION", 0.0)
    features = features_of(Pixels(70), tmp_path)
    before = features[torch.arange(70)]
    prune(tmp_path, max_bytes=0)
    assert torch.equal(features[torch.arange(70)], before)
