"""One file of cached features. It proves itself: what it belongs to and a checksum travel inside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from xdm_ft.storage.checksummed import Damaged, read_tensors, write_tensors
from xdm_ft.storage.digests import digest

IMAGES = 256  # per shard, so that little is lost when an extraction is killed …
AT_MOST = 1024  # … but no more shards than this: large data sets have larger ones


@dataclass(frozen=True)
class Grid:
    """How N rows are cut into shards. A function of N alone: runs that share a cache agree on it."""

    rows: int

    @property
    def rows_per_shard(self) -> int:
        return max(IMAGES, -(-self.rows // AT_MOST))

    def __len__(self) -> int:
        return -(-self.rows // self.rows_per_shard)

    def span(self, number: int) -> range:
        """The rows of a shard."""
        first = number * self.rows_per_shard
        return range(first, min(first + self.rows_per_shard, self.rows))


@dataclass(frozen=True)
class Shard:
    """What a shard's file holds."""

    features: Tensor  # [rows, K] in the stored precision, memory-mapped
    unreadable: dict[int, str]  # row of the data set → why its image does not decode
    digest: str


def write_shard(path: Path, features: Tensor, unreadable: Mapping[int, str], key: str, number: int) -> None:
    metadata = {"key": key, "shard": str(number), "unreadable": json.dumps(unreadable)}
    write_tensors(path, {"features": features}, {**metadata, "xxh3": _digest(features, metadata)})


def open_shard(path: Path, key: str, number: int) -> Shard:
    """Maps the file and checks all of it. Raises `Damaged`, and `FileNotFoundError` where there is none."""
    tensors, metadata = read_tensors(path)
    checksum = metadata.pop("xxh3", "")
    if "features" not in tensors or checksum != _digest(tensors["features"], metadata):
        raise Damaged("its checksum differs")
    if (metadata["key"], metadata["shard"]) != (key, str(number)):
        raise Damaged(f"it is shard {metadata['shard']} of {metadata['key']}")
    unreadable = {int(row): reason for row, reason in json.loads(metadata["unreadable"]).items()}
    return Shard(tensors["features"], unreadable, checksum)


def _digest(features: Tensor, metadata: Mapping[str, str]) -> str:
    header = [sorted(metadata.items()), str(features.dtype), list(features.shape)]
    return digest(json.dumps(header), features)
