"""The files of a store of features: shards, and the manifest that says what they hold.

A shard holds `contents` (uint8 [n,16], the hash of each image's content) and `features` ([n,K] in the stored
precision). Its name is `shard-<hash of contents>.safetensors`, so that the same images give the same file. It can be
checked alone: it names its store, its images and two checksums.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass
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
        halves = _halves(contents)
        self.contents, self._order = contents, np.argsort(halves)
        self._sorted = halves[self._order]
        begins = np.flatnonzero(np.diff(self._sorted, prepend=~self._sorted[:1]))
        # how many contents share their first half at most: nearly always 1
        self._alike = int(np.diff(begins, append=len(contents)).max(initial=0))

    def find(self, contents: Contents) -> np.ndarray:
        """Returns the number of each content, int64 [n]; −1 where it is none of the M."""
        numbers, halves = np.full(len(contents), -1), _halves(contents)
        order = np.argsort(halves)  # sorted requests find their positions without waiting for memory
        positions = np.searchsorted(self._sorted, halves[order])
        for beyond in range(self._alike):
            candidates = self._order[np.minimum(positions + beyond, len(self._order) - 1)]
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
    if manifest.pop("checksum", None) != digest(json.dumps(manifest, sort_keys=True), bits=128):
        raise Damaged("its checksum differs")
    return manifest


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    checksum = digest(json.dumps(manifest, sort_keys=True), bits=128)
    text = json.dumps({**manifest, "checksum": checksum}, indent=2, ensure_ascii=False)
    replace_text(folder / MANIFEST, text + "\n")
