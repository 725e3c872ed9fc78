"""`xdm-ft cache`: lists, verifies and prunes the feature cache."""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xdm_ft.cli.answer import Answer
from xdm_ft.features import FeatureSettings
from xdm_ft.features.cache import cache_folder, cut_in
from xdm_ft.features.maintenance import Cached, prune, stores, verify
from xdm_ft.runtime.errors import UserError, plural, printable
from xdm_ft.storage.lines import Damaged
from xdm_ft.storage.results_file import read_results

GIGABYTE = 10**9


def cache_folder_of(folder: str | None) -> Path:
    return cache_folder(FeatureSettings(dir=None if folder is None else Path(folder)))


@dataclass(frozen=True)
class Entry:
    """A store: features of one encoder, or activations at a cut of it, with one precision, in one view.

    Or the images that were decoded, to see whether they can be: then `encoder` and `precision` are None.
    """

    key: str
    path: Path
    bytes: int
    images: int
    last_used: str  # ISO 8601, UTC
    state: str  # "current"; "outdated": of an earlier version, nothing reads it; "damaged", which only verify looks for
    encoder: dict[str, Any] | None  # {"component", "model", …}; "cut" of activations: the module that gets them
    precision: str | None
    view: dict[str, Any] | None  # {"number", "augmentation", …} of an augmented view
    faults: tuple[str, ...] = ()  # one for every damaged file


@dataclass(frozen=True)
class Listed(Answer):
    folder: Path
    entries: list[Entry]

    def text(self) -> str:
        return "\n".join([_line(entry) for entry in self.entries] or [f"{self.folder}: nothing is cached"])


@dataclass(frozen=True)
class Verified(Answer):
    folder: Path
    entries: list[Entry]

    @property
    def error(self) -> UserError | None:
        faults = [f"{entry.path}: {fault}" for entry in self.entries for fault in entry.faults]
        remedy = "the next run that uses these computes the damaged parts again"
        return UserError(*faults, remedy) if faults else None

    def text(self) -> str:
        outdated = sum(entry.state == "outdated" for entry in self.entries)
        of_cuts = sum(entry.state != "outdated" and "cut" in (entry.encoder or {}) for entry in self.entries)
        checks = sum(entry.state != "outdated" and entry.encoder is None for entry in self.entries)
        count = len(self.entries) - outdated - checks
        what = f"{plural(count, 'set')} of features"
        if of_cuts:
            what = f"{plural(count, 'set')} of features and activations ({of_cuts} of activations)"
        what += f", {plural(checks, 'list')} of decoded images" * bool(checks) + ", none damaged"
        return f"{self.folder}: {what}" + (f"; {outdated} of an earlier version, which nothing reads" * bool(outdated))


@dataclass(frozen=True)
class Removed:
    entry: Entry  # as it was before
    files: int
    files_before: int
    bytes: int


@dataclass(frozen=True)
class Pruned(Answer):
    folder: Path
    removed: list[Removed]

    def text(self) -> str:
        lines = []
        for one in self.removed:
            part = "" if one.files == one.files_before else f", {one.files} of {one.files_before} files"
            lines.append(f"{_line(one.entry)}{part}")
        files, freed = (sum(getattr(one, name) for one in self.removed) for name in ("files", "bytes"))
        return "\n".join([*lines, f"{plural(files, 'file')} removed, {freed / GIGABYTE:.3f} GB freed"])


def cache(
    action: str,
    folder: str | None,
    unused_days: float | None,
    max_gigabytes: float | None,
    runs: Sequence[str] | None,
) -> Listed | Verified | Pruned:
    """Performs `xdm-ft cache ls|verify|prune`."""
    if action == "prune":
        return prune_cache(folder, unused_days, max_gigabytes, runs)
    return verify_cache(folder) if action == "verify" else list_cache(folder)


def list_cache(folder: str | None) -> Listed:
    """Returns the stores, last used first."""
    cache = cache_folder_of(folder)
    return Listed(cache, [_entry(store) for store in stores(cache)])


def verify_cache(folder: str | None) -> Verified:
    """Reads every file of the cache that a run of this version would read."""
    cache = cache_folder_of(folder)
    return Verified(cache, [_entry(store, () if store.is_outdated else verify(store)) for store in stores(cache)])


def prune_cache(
    folder: str | None, unused_days: float | None, max_gigabytes: float | None, runs: Sequence[str] | None = None
) -> Pruned:
    """Removes features unused for `unused_days`, and those that no run below the folders `runs` was trained on.

    Then removes the longest unused features until `max_gigabytes` are left.
    """
    if unused_days is None and max_gigabytes is None and not runs:
        raise UserError("cache prune: no limit is given; give --unused-days N, --unreferenced DIR or --max-size GB")
    for name, value in (("--unused-days", unused_days), ("--max-size", max_gigabytes)):
        if value is not None and not 0 <= value < math.inf:
            raise UserError(f"cache prune: {name} {value}: must be a number of at least 0")
    max_bytes = None if max_gigabytes is None else int(max_gigabytes * GIGABYTE)
    referenced = referenced_by(runs) if runs else None
    cache = cache_folder_of(folder)
    before = [(store, _entry(store)) for store in stores(cache)]
    removed = prune(cache, unused_days=unused_days, max_bytes=max_bytes, referenced=referenced)
    found = []
    for store, entry in before:
        files = [file for file in removed if file.path.parent == store.folder]
        if files:
            found.append(Removed(entry, len(files), len(store.files), sum(file.bytes for file in files)))
    return Pruned(cache, found)


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
                features = read_results(path, lambda run: None)["environment"].get("features")
            except Damaged as error:
                raise UserError(f"cache prune: {path}: is damaged ({error}); delete it if it is not needed") from error
            keys |= set(_feature_keys(features or {}))  # a run end to end has no cached features
    return keys


def _feature_keys(features: Mapping[str, Any]) -> Iterator[str]:
    """Yields the keys of stores in `environment.features`: of features and of activations, under every encoder."""
    for value in features.values():
        if isinstance(value, Mapping):
            yield from _feature_keys(value)
        elif value is not None:
            yield value


def _refuse_unreadable(error: OSError) -> None:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return  # holds no run
    raise UserError(f"cache prune: {error.filename}: can not be read ({error.strerror}); a run in it may need features")


def _entry(store: Cached, faults: Sequence[str] = ()) -> Entry:
    manifest = store.manifest
    state = "damaged" if faults else "outdated" if store.is_outdated else "current"
    return Entry(
        store.key,
        store.folder,
        store.bytes,
        store.images(),
        datetime.datetime.fromtimestamp(store.last_used, datetime.UTC).isoformat(timespec="seconds"),
        state,
        manifest.get("encoder"),
        manifest.get("precision"),
        manifest.get("view"),
        tuple(faults),
    )


def _line(entry: Entry) -> str:
    used = datetime.datetime.fromisoformat(entry.last_used).astimezone().strftime("%Y-%m-%d %H:%M")
    images = plural(entry.images, "image")
    if entry.encoder is None:
        what = f"which of {images} can be decoded"
    else:
        cut = cut_in({"encoder": entry.encoder})
        activations = "" if cut is None else f", activations before {cut}"
        what = f"{entry.encoder['component']} {entry.encoder['model']}{activations}, {images}, {entry.precision}"
    if entry.view is not None:
        what += f", view {entry.view['number']} of {entry.view['augmentation']}"
    if entry.state == "outdated":
        what += ", of an earlier version: nothing reads it"
    return printable(f"{entry.key}  {entry.bytes / GIGABYTE:8.3f} GB  last used {used}  {what}")
