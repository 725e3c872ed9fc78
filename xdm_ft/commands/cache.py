"""`xdm-ft cache`: lists, verifies and prunes the feature cache."""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Sequence
from pathlib import Path

from xdm_ft.errors import UserError, printable
from xdm_ft.features import FeatureSettings
from xdm_ft.features.maintenance import Cached, prune, stores, verify
from xdm_ft.features.store import cache_folder
from xdm_ft.storage.checksummed import Damaged, read_results

GIGABYTE = 10**9


def cache_folder_of(folder: str | None) -> Path:
    return cache_folder(FeatureSettings(dir=None if folder is None else Path(folder)))


def cache(
    action: str,
    folder: str | None,
    unused_days: float | None,
    max_gigabytes: float | None,
    runs: Sequence[str] | None,
) -> str:
    """Performs `xdm-ft cache ls|verify|prune` and returns the text to print."""
    if action == "prune":
        return prune_cache(folder, unused_days, max_gigabytes, runs)
    return verify_cache(folder) if action == "verify" else list_cache(folder)


def list_cache(folder: str | None) -> str:
    """Returns one line per store: key, size, last use, encoder and number of images."""
    cache = cache_folder_of(folder)
    return "\n".join([_line(store) for store in stores(cache)] or [f"{cache}: nothing is cached"])


def verify_cache(folder: str | None) -> str:
    """Reads every file of the cache. Raises `UserError` with one line per damaged file."""
    cache = cache_folder_of(folder)
    found = stores(cache)
    current = [store for store in found if not store.is_outdated]
    faults = [f"{store.folder}: {fault}" for store in current for fault in verify(store)]
    if faults:
        raise UserError(*faults, "the next run that uses these features computes the damaged parts again")
    outdated = f"; {len(found) - len(current)} of an earlier version, which nothing reads" if found != current else ""
    return f"{cache}: {len(current)} sets of features, none damaged{outdated}"


def prune_cache(
    folder: str | None, unused_days: float | None, max_gigabytes: float | None, runs: Sequence[str] | None = None
) -> str:
    """Removes features unused for `unused_days`, and those that no run below the folders `runs` was trained on.

    Then removes the longest unused features until `max_gigabytes` are left. Returns the text to print.
    """
    if unused_days is None and max_gigabytes is None and not runs:
        raise UserError("cache prune: no limit is given; give --unused-days N, --unreferenced DIR or --max-size GB")
    for name, value in (("--unused-days", unused_days), ("--max-size", max_gigabytes)):
        if value is not None and not 0 <= value < math.inf:
            raise UserError(f"cache prune: {name} {value}: must be a number of at least 0")
    max_bytes = None if max_gigabytes is None else int(max_gigabytes * GIGABYTE)
    referenced = referenced_by(runs) if runs else None
    cache = cache_folder_of(folder)
    before = stores(cache)
    removed = prune(cache, unused_days=unused_days, max_bytes=max_bytes, referenced=referenced)
    lines = []
    for store in before:
        files = [file for file in removed if file.path.parent == store.folder]
        if files:
            part = "" if len(files) == len(store.files) else f", {len(files)} of {len(store.files)} files"
            lines.append(f"{_line(store)}{part}")
    freed = sum(file.bytes for file in removed) / GIGABYTE
    return "\n".join([*lines, f"{len(removed)} files removed, {freed:.3f} GB freed"])


def referenced_by(folders: Sequence[str]) -> set[str]:
    """Returns the keys of the features that the runs in these folders, at any depth, were trained on.

    Raises `UserError` if a folder holds no run or a results.json is damaged: its features must not be removed.
    """
    keys = set()
    for folder in folders:
        found = sorted(
            Path(parent, "results.json")
            for parent, _, files in os.walk(folder, onerror=_refuse_unreadable)
            if "results.json" in files
        )
        if not found:
            raise UserError(f"cache prune: {folder} holds no run (no results.json); name a run directory or its parent")
        for path in found:
            try:
                features = read_results(path)["environment"].get("features")
            except Damaged as error:
                raise UserError(f"cache prune: {path}: is damaged ({error}); delete it if it is not needed") from error
            keys |= {features["key"]} if features else set()  # a run end to end has no cached features
    return keys


def _refuse_unreadable(error: OSError) -> None:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return  # holds no run
    raise UserError(f"cache prune: {error.filename}: can not be read ({error.strerror}); a run in it may need features")


def _line(store: Cached) -> str:
    used = datetime.datetime.fromtimestamp(store.last_used).strftime("%Y-%m-%d %H:%M")
    manifest = store.manifest
    encoder = manifest["encoder"]
    what = f"{encoder['component']} {encoder['model']}, {store.images()} images, {manifest['precision']}"
    if "view" in manifest:
        what += f", view {manifest['view']['number']} of {manifest['view']['augmentation']}"
    if store.is_outdated:
        what += ", of an earlier version: nothing reads it"
    return printable(f"{store.key}  {store.bytes / GIGABYTE:8.3f} GB  last used {used}  {what}")
