"""One file of cached features. Its header holds its key, its number and a checksum, so that it can be checked alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from xdm_ft.storage.checksummed import Damaged, read_tensors, write_tensors
from xdm_ft.storage.digests import digest

IMAGES_PER_SHARD = 256  # few, so that little is lost when an extraction is killed
MAX_SHARDS = 1024  # more images than fit in so many shards make the shards larger


@dataclass(frozen=True)
class ShardLayout:
    """How N rows are cut into shards. It depends on N alone, so that runs which share a cache agree on it."""

    rows: int

    @property
    def rows_per_shard(self) -> int:
        return max(IMAGES_PER_SHARD, -(-self.rows // MAX_SHARDS))  # −(−a // b) is a / b rounded up

    def __len__(self) -> int:
        return -(-self.rows // self.rows_per_shard)

    def span(self, number: int) -> range:
        """The rows of a shard."""
        first = number * self.rows_per_shard
        return range(first, min(first + self.rows_per_shard, self.rows))


@dataclass(frozen=True)
class Shard:
    """The checked contents of a shard's file."""

    features: Tensor  # [rows, K] in the stored precision, memory-mapped
    unreadable: dict[int, str]  # row of the data set → why its image does not decode
    checksum: str


def write_shard(path: Path, features: Tensor, unreadable: Mapping[int, str], key: str, number: int) -> None:
    metadata = {"key": key, "shard": str(number), "unreadable": json.dumps(unreadable)}
    write_tensors(path, {"features": features}, {**metadata, "xxh3": _checksum(features, metadata)})


def open_shard(path: Path, key: str, number: int) -> Shard:
    """Maps the file and checks all of it. Raises `Damaged`, or `FileNotFoundError` if it does not exist."""
    tensors, metadata = read_tensors(path)
    checksum = metadata.pop("xxh3", "")
    if "features" not in tensors or checksum != _checksum(tensors["features"], metadata):
        raise Damaged("its checksum differs")
    if (metadata["key"], metadata["shard"]) != (key, str(number)):
        raise Damaged(f"it is shard {metadata['shard']} of {metadata['key']}")
    unreadable = {int(row): reason for row, reason in json.loads(metadata["unreadable"]).items()}
    return Shard(tensors["features"], unreadable, checksum)


def _checksum(features: Tensor, metadata: Mapping[str, str]) -> str:
    header = [sorted(metadata.items()), str(features.dtype), list(features.shape)]
    return digest(json.dumps(header), features)
