"""Features in the cache, found by the bytes of an image. Nothing is written there."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import Tensor

from xdm_ft.encoders import Encoder
from xdm_ft.features import FeatureSettings
from xdm_ft.features.cache_key import key_of, key_parts
from xdm_ft.features.forward import DTYPES
from xdm_ft.features.shards import Shard, open_shard
from xdm_ft.features.store import SHARDS, cache_path
from xdm_ft.features.views import all_views
from xdm_ft.images.dataset import Augmentation
from xdm_ft.storage.checksummed import Damaged

logger = logging.getLogger("xdm_ft")


def cached_images(
    encoder: Encoder, decoder: str, settings: FeatureSettings, augmentation: Augmentation, device: torch.device
) -> list[int]:
    """Returns for each view how many images the cache holds under the key of these settings, of whatever data set."""
    folder, parts = cache_path(settings), key_parts(encoder, decoder, settings.precision, device)
    keys = [
        key_of({**parts, **view.key_parts(encoder.preprocessing)}) for view in all_views(augmentation, settings.views)
    ]
    return [len(Lookup(folder / key, key, encoder.width, DTYPES[settings.precision])) for key in keys]


class Lookup:
    """The features of a store as it is now. A folder that is missing or can not be read holds none.

    It takes 28 bytes of memory per image of the store; the features stay in their memory-mapped files. Forked processes
    share both.
    """

    def __init__(self, folder: Path, key: str, width: int, dtype: torch.dtype) -> None:
        self.shards: list[Shard] = []
        self._checked: dict[int, bool] = {}  # number of a shard → whether its features are intact
        try:
            paths = sorted(folder.glob(SHARDS))
        except OSError:
            paths = []
        for path in paths:
            try:
                self.shards.append(open_shard(path, key, width, dtype))
            except (Damaged, OSError) as error:
                logger.debug("%s: not used (%s)", path, error)  # `xdm-ft cache verify` reports it
        sizes = [len(shard.contents) for shard in self.shards]
        contents = np.concatenate([np.empty(0, "S16"), *(shard.contents for shard in self.shards)])
        self._order = np.argsort(contents)
        self._contents = contents[self._order]
        self._shard = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        self._first = np.cumsum([0, *sizes])

    def __len__(self) -> int:
        return len(self._contents)

    def find(self, content: bytes) -> Tensor | str | None:
        """Returns the features [K] of the image with these bytes, why it does not decode, or None if it is unknown."""
        digest = np.array(xxhash.xxh3_128_digest(content), "S16")
        place = int(np.searchsorted(self._contents, digest))
        if place == len(self) or self._contents[place] != digest:
            return None
        position = int(self._order[place])
        number = int(self._shard[position])
        row = position - int(self._first[number])
        if not self._is_intact(number):
            return None
        return self.shards[number].unreadable.get(row) or self.shards[number].features[row]

    def _is_intact(self, number: int) -> bool:
        """Whether the features of a shard have their checksum, which is read once."""
        if number not in self._checked:
            try:
                self.shards[number].check()
                self._checked[number] = True
            except Damaged:
                self._checked[number] = False
        return self._checked[number]
