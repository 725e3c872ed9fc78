"""Which images decode. An image is decoded once for this, and never again while its bytes and the decoder stay.

`<cache>/decoded` is a cache of its own, in which a store holds features of width 0: that an image is in it says that it
was decoded whole, or why that failed. So ranks and runs divide the images among themselves, and a killed check goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import PIL
import torch
from PIL import Image

from xdm_ft.features.cache import unreadable_rows
from xdm_ft.features.cache_key import SCHEMA
from xdm_ft.features.file_hashes import FileHashes
from xdm_ft.features.store import DECODED, Store, complete, is_writable
from xdm_ft.images.dataset import ImageDataset
from xdm_ft.images.decode import scan
from xdm_ft.images.transforms import NotAStrip, Preprocessing
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.progress import Progress
from xdm_ft.storage.atomic import disk_errors
from xdm_ft.version import __version__

IMAGES_PER_SHARD = 256  # at least
MAX_SHARDS = 1024


def undecodable(
    dataset: ImageDataset,
    hashes: FileHashes,
    preprocessing: Preprocessing,
    cache: Path | None,
    threads: int,
    show: bool,
) -> dict[int, str]:
    """Returns {row: reason} of the images that do not decode, or that the preprocessing refuses, in order.

    Decodes those images that were not decoded before, with so many threads. Nothing is remembered if `cache` is None or
    can not be written. Raises `UserError` for a file that changes meanwhile.
    """
    check = NotAStrip(preprocessing)
    if cache is None or not is_writable(cache):
        return scan(dataset, threads, check, show)
    folder = cache / DECODED
    with disk_errors(folder):
        if not folder.exists():
            folder.mkdir(exist_ok=True)
            folder.chmod(cache.stat().st_mode & 0o777)  # for whom the cache is
    images = hashes.images
    parts = {
        "schema": SCHEMA,
        "decoder": dataset.decoder,
        "most_pixels": Image.MAX_IMAGE_PIXELS,
        "resize": [check.how, check.limit],
        "versions": {"xdm_ft": __version__, "pillow": PIL.__version__},
    }
    store = Store(folder, parts, images.contents, 0, torch.uint8)
    complete(store, _Check(dataset, hashes, store, images.rows, check, threads).run, "checking", show)
    return unreadable_rows(store, images, hashes)


@dataclass(frozen=True)
class _Check:
    dataset: ImageDataset
    hashes: FileHashes
    store: Store
    rows: np.ndarray  # int64 [M], the row of each of the store's images
    check: NotAStrip
    threads: int

    def run(self, bar: Progress) -> int:
        """Decodes the images that no other process decodes, and returns their number."""
        size, decoded = max(IMAGES_PER_SHARD, len(self.rows) // MAX_SHARDS), 0
        try:
            while len(numbers := self.store.claim(size)):
                rows = self.rows[numbers].tolist()
                found = scan(self.dataset, self.threads, self.check, show=False, rows=rows)
                changed = self.hashes.changed_file(rows)
                if changed is not None:
                    raise UserError(f"{changed}: this file was changed while images were checked; run again")
                reasons = {rows.index(row): reason for row, reason in found.items()}
                nothing = torch.zeros(len(numbers), 0, dtype=torch.uint8)
                self.store.add(self.store.write(numbers, nothing, reasons), numbers)
                decoded += len(numbers)
                bar.advance(len(numbers))
        finally:
            self.store.release()
        return decoded
