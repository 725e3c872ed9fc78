"""`xdm-ft cache`: lists, verifies and prunes the feature cache."""

from __future__ import annotations

import argparse
import datetime
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from xdm_ft.cli import CommandResult
from xdm_ft.features import FeatureSettings
from xdm_ft.features.cache import cache_folder
from xdm_ft.features.maintenance import Cached, prune, stores, verify
from xdm_ft.runtime.errors import UserError, plural
from xdm_ft.storage.lines import Damaged
from xdm_ft.storage.results_file import read_results

GIGABYTE = 10**9


def main(arguments: argparse.Namespace) -> CommandResult:
    if arguments.action == "prune":
        return prune_cache(arguments.dir, arguments.unused_days, arguments.max_size, arguments.unreferenced)
    return verify_cache(arguments.dir) if arguments.action == "verify" else list_cache(arguments.dir)


@dataclass(frozen=True)
class StoreEntry:
    """A store: features of one encoder, or activations at a cut of it, with one precision, in one view."""

    key: str
    path: Path
    bytes: int
    images: int
    last_used: str  # ISO 8601, UTC
    state: str  # "current"; "outdated": of another version, nothing reads it; "damaged", which only verify looks for
    encoder: dict[str, Any]  # {"component", "model", …}; "cut" of activations: the module that gets them
    precision: str
    view: dict[str, Any] | None  # {"number", "augmentation", …} of an augmented view
    faults: tuple[str, ...] = ()  # one for every damaged file

    def line(self) -> str:
        used = datetime.datetime.fromisoformat(self.last_used).astimezone().strftime("%Y-%m-%d %H:%M")
        cut = self.encoder.get("cut")
        activations = "" if cut is None else f", activations before {cut}"
        encoder = f"{self.encoder['component']} {self.encoder['model']}{activations}"
        line = f"{encoder}, {plural(self.images, 'image')}, {self.precision}"
        if self.view is not None:
            line += f", view {self.view['number']} of {self.view['augmentation']}"
        if self.state == "outdated":
            line += ", of another version: nothing reads it"
        return f"{self.key}  {self.bytes / GIGABYTE:8.3f} GB  last used {used}  {line}"


def list_cache(folder: str | None) -> CommandResult:
    """Returns the stores, last used first."""
    cache, stores = _stores(folder)
    lines = [entry.line() for _, entry in stores] or [f"{cache}: nothing is cached"]
    return CommandResult({"folder": cache, "entries": [entry for _, entry in stores]}, lines)


def verify_cache(folder: str | None) -> CommandResult:
    """Reads every file of the cache that a run of this version would read."""
    cache, stores = _stores(folder)
    entries = []
    for store, entry in stores:
        faults = () if store.is_outdated else tuple(verify(store))
        entries.append(replace(entry, state="damaged", faults=faults) if faults else entry)
    problems = [f"{entry.path}: {fault}" for entry in entries for fault in entry.faults]
    remedy = "the next run that uses these computes the damaged parts again"
    error = UserError(*problems, remedy) if problems else None

    current = [entry.encoder for entry in entries if entry.state != "outdated"]
    cuts = sum("cut" in encoder for encoder in current)
    text = plural(len(current), "set") + " of features"
    text += f" and activations ({cuts} of activations)" if cuts else ""
    outdated = len(entries) - len(current)
    text += ", none damaged" + (f"; {outdated} of another version, which nothing reads" if outdated else "")
    return CommandResult({"folder": cache, "entries": entries}, [f"{cache}: {text}"], error)


def prune_cache(
    folder: str | None, unused_days: float | None, max_gigabytes: float | None, runs: Sequence[str] | None = None
) -> CommandResult:
    """Removes features unused for `unused_days`, and those that no run below the folders `runs` was trained on.

    Then removes the longest unused features until `max_gigabytes` are left.
    """
    if unused_days is None and max_gigabytes is None and not runs:
        raise UserError("cache prune: no limit is given; give --unused-days N, --unreferenced DIR or --max-size GB")
    for name, value in (("--unused-days", unused_days), ("--max-size", max_gigabytes)):
        if value is not None and not 0 <= value < math.inf:
            raise UserError(f"cache prune: {name} {value}: must be a number of at least 0")
    max_bytes = None if max_gigabytes is None else int(max_gigabytes * GIGABYTE)
    referenced = find_references(runs) if runs else None
    cache, before = _stores(folder)
    files = prune(cache, unused_days=unused_days, max_bytes=max_bytes, referenced=referenced)
    removed, lines = list[dict[str, Any]](), []
    for store, entry in before:
        sizes = [file.bytes for file in files if file.path.parent == store.folder]
        if sizes:
            count, count_before = len(sizes), len(store.files)
            removed.append({"entry": entry, "files": count, "files_before": count_before, "bytes": sum(sizes)})
            lines.append(entry.line() + ("" if count == count_before else f", {count} of {count_before} files"))
    freed = sum(part["bytes"] for part in removed) / GIGABYTE
    lines.append(f"{plural(sum(part['files'] for part in removed), 'file')} removed, {freed:.3f} GB freed")
    return CommandResult({"folder": cache, "removed": removed}, lines)


def find_references(folders: Sequence[str]) -> set[str]:
    """Returns the keys of the features that the runs in these folders, at any depth, were trained on.

    Raises `UserError` if a folder holds no run or a results.json is damaged: its features must not be removed.
    """

    def refuse_unreadable(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):  # these hold no run
            problem = f"cannot be read ({error.strerror}); a run in it may need features"
            raise UserError(f"cache prune: {error.filename}: {problem}")

    keys: set[str] = set()
    for folder in folders:
        walk = os.walk(folder, onerror=refuse_unreadable)
        paths = sorted(Path(parent, "results.json") for parent, _, files in walk if "results.json" in files)
        if not paths:
            raise UserError(f"cache prune: {folder} holds no run (no results.json); name a run directory or its parent")
        for path in paths:
            try:
                # verified, though little of it is read: a damaged file may have lost the key of features in use
                features = read_results(path, lambda run: None)["environment"].get("features")
            except Damaged as error:
                raise UserError(f"cache prune: {path}: {error.fault}; delete it if it is not needed") from error
            # keys of stores: of features and of activations, under every encoder; a run end to end has none
            nested = [features]
            for value in nested:  # the list grows while it is read
                if isinstance(value, dict):
                    nested += value.values()
                elif value is not None:
                    keys.add(value)
    return keys


def _stores(folder: str | None) -> tuple[Path, list[tuple[Cached, StoreEntry]]]:
    """Returns the folder of the cache and its stores, last used first."""
    cache = cache_folder(FeatureSettings(dir=None if folder is None else Path(folder)))
    entries = []
    for store in stores(cache):
        used = datetime.datetime.fromtimestamp(store.last_used, datetime.UTC).isoformat(timespec="seconds")
        state, manifest = "outdated" if store.is_outdated else "current", store.manifest
        of_features = manifest["encoder"], manifest["precision"], manifest.get("view")
        entry = StoreEntry(store.key, store.folder, store.bytes, store.images(), used, state, *of_features)
        entries.append((store, entry))
    return cache, entries
