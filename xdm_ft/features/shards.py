"""One file of cached features. Its header holds its key, its number and a checksum, so that it can be checked alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from xdm_ft.storage.checksummed import Damaged

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


def encode_shard(features: Tensor, unreadable: Mapping[int, str], key: str, number: int) -> bytes:
    """The bytes of a shard's safetensors file."""
    from safetensors.torch import save

    metadata = {"key": key, "shard": str(number), "unreadable": json.dumps(unreadable)}
    return save({"features": features}, {**metadata, "xxh3": _checksum(features, metadata)})


def open_shard(path: Path, key: str, number: int) -> Shard:
    """Maps the file and checks all of it. Raises `Damaged`, or `FileNotFoundError` if it does not exist."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            features = file.get_tensor("features")
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise Damaged(" ".join(str(error).split())) from error
    checksum = metadata.pop("xxh3", "")
    if checksum != _checksum(features, metadata):
        raise Damaged("its checksum differs")
    if (metadata["key"], metadata["shard"]) != (key, str(number)):
        raise Damaged(f"it is shard {metadata['shard']} of {metadata['key']}")
    unreadable = {int(row): reason for row, reason in json.loads(metadata["unreadable"]).items()}
    return Shard(features, unreadable, checksum)


def _checksum(features: Tensor, metadata: Mapping[str, str]) -> str:
    header = [sorted(metadata.items()), str(features.dtype), list(features.shape)]
    digest = xxhash.xxh3_64(json.dumps(header).encode())
    digest.update(features.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
