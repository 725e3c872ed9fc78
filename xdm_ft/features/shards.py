"""The files of a store of features: shards, and the manifest that says what they hold.

A shard holds `contents` (uint8 [n,16], the hash of each image's content) and `features` ([n,K] in the stored
precision). Its name is `shard-<hash of contents>.safetensors`, so that the same images give the same file. It can be
checked alone: it names its store, its images and two checksums.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xdm_ft.storage.atomic import replace_text
from xdm_ft.storage.digests import digest
from xdm_ft.storage.lines import Damaged, json_object
from xdm_ft.storage.tensors import read_tensors, write_tensors

SHARDS = "shard-*.safetensors"
MANIFEST = "manifest.json"
Contents = np.ndarray
"""Hashes of images as bytes of length 16 (numpy type S16), one per image: they compare and sort as one value."""


@dataclass(frozen=True)
class Shard:
    """An open shard. All but its features is checked; `check` checks those."""

    path: Path
    contents: Contents  # [n]
    features: Tensor  # [n,K] in the stored precision, memory-mapped
    unreadable: dict[int, str]  # row of the shard → why its image does not decode; its features are zero
    checksum: str  # of the features

    def check(self) -> None:
        """Reads all features. Raises `Damaged` if they are not those that were written."""
        if digest(self.features) != self.checksum:
            raise Damaged("its checksum differs")


def contents_of(digests: np.ndarray) -> Contents:
    """uint8 [N,16] → S16 [N]."""
    return np.ascontiguousarray(digests).view("S16")[:, 0]


class ContentIndex:
    """Finds contents among M different ones, by the first half of their hashes."""

    def __init__(self, contents: Contents) -> None:
        self.contents, self._halves = np.ascontiguousarray(contents), _halves(contents)

    @cached_property
    def _order(self) -> np.ndarray:
        """The numbers of the contents in the order of their first halves."""
        return np.argsort(self._halves)

    @cached_property
    def _sorted(self) -> np.ndarray:
        return self._halves[self._order]

    @cached_property
    def _alike(self) -> int:
        """How many contents share their first half at most: nearly always 1."""
        begins = np.flatnonzero(np.diff(self._sorted, prepend=~self._sorted[:1]))
        return int(np.diff(begins, append=len(self.contents)).max(initial=0))

    def find_each(self, parts: Sequence[Contents]) -> list[np.ndarray]:
        """Returns what `find` returns for each part.

        The images of a shard mostly follow each other here, too. Then the first one is looked up, and the others are
        compared with those behind it: that takes a tenth of the time.
        """
        begins = self._begins(parts)
        runs = [self._is_run(begin, part) for begin, part in zip(begins, parts, strict=True)]
        others = [part for part, is_run in zip(parts, runs, strict=True) if not is_run]
        ends = np.cumsum([len(part) for part in others])
        numbers_of_others = iter(np.split(self.find(np.concatenate(others)), ends[:-1]) if others else ())
        return [
            np.arange(begin, begin + len(part)) if is_run else next(numbers_of_others)
            for begin, part, is_run in zip(begins, parts, runs, strict=True)
        ]

    def _begins(self, parts: Sequence[Contents]) -> list[int]:
        """Returns the number of a content that has the first half of the first one of each part; −1: none known."""
        firsts = np.concatenate([np.empty(0, np.uint64), *(_halves(part[:1]) for part in parts)])
        begins, order = np.full(len(parts), -1), np.argsort(firsts)
        if len(firsts) == len(parts) > 0:
            places = np.minimum(np.searchsorted(firsts[order], self._halves), len(firsts) - 1)
            numbers = np.flatnonzero(firsts[order][places] == self._halves)
            begins[order[places[numbers]]] = numbers
        return begins.tolist()

    def _is_run(self, begin: int, part: Contents) -> bool:
        """Whether the contents from the number `begin` on are those of a part."""
        behind = self.contents[begin : begin + len(part)]
        return begin >= 0 and np.array_equal(behind.view(np.uint64), np.ascontiguousarray(part).view(np.uint64))

    def find(self, contents: Contents) -> np.ndarray:
        """Returns the number of each content, int64 [n]; −1 where it is none of the M."""
        numbers = np.full(len(contents), -1)
        if not len(self.contents):
            return numbers
        order = np.argsort(_halves(contents))  # sorted requests find their places without waiting for memory
        places = np.searchsorted(self._sorted, _halves(contents)[order])
        for beyond in range(self._alike):
            candidates = self._order[np.minimum(places + beyond, len(self._order) - 1)]
            equal = self.contents[candidates] == contents[order]
            numbers[order[equal]] = candidates[equal]
        return numbers


def _halves(contents: Contents) -> np.ndarray:
    """uint64 [n], the first half of each hash."""
    return np.ascontiguousarray(contents).view(np.uint64)[::2].copy()


def write_shard(folder: Path, key: str, contents: Contents, features: Tensor, unreadable: Mapping[int, str]) -> Path:
    """Writes a shard of the store `key`, and returns its path. `unreadable`: row of the shard → reason."""
    path = folder / _name(contents)
    # copied, because numpy cuts the trailing zero bytes of an S16 value when it is taken alone
    hashes = torch.from_numpy(contents.view(np.uint8).reshape(len(contents), 16).copy())
    metadata = {"key": key, "unreadable": json.dumps(unreadable), "features_xxh3": digest(features)}
    tensors = {"contents": hashes, "features": features}
    write_tensors(path, tensors, {**metadata, "xxh3": _checksum(hashes, features, metadata)})
    return path


def open_shard(path: Path, key: str, width: int, dtype: torch.dtype) -> Shard:
    """Maps a shard of the store `key` and checks all but its features.

    Raises `Damaged`, or `FileNotFoundError` if it does not exist.
    """
    if not stat.S_ISREG(path.lstat().st_mode):
        raise Damaged("it is not a regular file")  # opening a pipe would block for ever
    tensors, metadata = read_tensors(path)
    checksum = metadata.pop("xxh3", "")
    if tensors.keys() != {"contents", "features"}:
        raise Damaged("it is not a shard of features")
    hashes, features = tensors["contents"], tensors["features"]
    if checksum != _checksum(hashes, features, metadata):
        raise Damaged("its checksum differs")
    contents = contents_of(hashes.numpy())
    if metadata["key"] != key or path.name != _name(contents):
        raise Damaged(f"it is {_name(contents)} of {metadata['key']}")
    if features.shape != (len(contents), width) or features.dtype != dtype:
        raise Damaged(f"its features are {features.dtype} {list(features.shape)}")
    unreadable = {int(row): reason for row, reason in json.loads(metadata["unreadable"]).items()}
    return Shard(path, contents, features, unreadable, metadata["features_xxh3"])


def _name(contents: Contents) -> str:
    return f"shard-{digest(contents.view(np.uint8))}.safetensors"


def _checksum(contents: Tensor, features: Tensor, metadata: Mapping[str, str]) -> str:
    header = [sorted(metadata.items()), str(features.dtype), list(features.shape), str(contents.dtype)]
    return digest(json.dumps(header), contents)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns the manifest of a store without its checksum. Raises `Damaged`, or `FileNotFoundError`."""
    try:
        manifest = json_object((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Damaged(error.strerror or str(error)) from error
    if manifest.pop("checksum", None) != _manifest_checksum(manifest):
        raise Damaged("its checksum differs")
    return manifest


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    complete = {**manifest, "checksum": _manifest_checksum(manifest)}
    replace_text(folder / MANIFEST, json.dumps(complete, indent=2, ensure_ascii=False) + "\n")


def _manifest_checksum(manifest: Mapping[str, Any]) -> str:
    return digest(json.dumps(manifest, sort_keys=True), bits=128)
