"""Features of a data set under a frozen encoder: found in the cache, or extracted into it."""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from xdm_ft.data import Augmentation, ImageDataset
from xdm_ft.data._images import unreadable_message
from xdm_ft.encoders import Encoder
from xdm_ft.errors import UserError
from xdm_ft.features import FeatureSettings
from xdm_ft.features.cache_key import key_of, key_parts
from xdm_ft.features.file_hashes import FileHashes, hash_files
from xdm_ft.features.forward import DTYPES, Extraction, frozen_copy
from xdm_ft.features.shards import ShardLayout
from xdm_ft.features.store import Entry, cache_folder
from xdm_ft.features.views import View, all_views
from xdm_ft.progress import progress, pulse

logger = logging.getLogger("xdm_ft")

MEMORY_FRACTION = 0.25  # of what is free, that features may take; larger ones stay in their memory-mapped files
WAIT_SECONDS = 0.5  # between looks at what another process computes


class Features:
    """Features of N images: `features[rows]` is float32 [..., K] for int64 rows [...], on `device`.

    With `views` augmented views besides the plain one, `features.of_views(rows, numbers)` reads any of them. They are
    one tensor on the device where that takes a small part of its free memory; else each request gathers its rows from
    the memory-mapped shards.
    """

    def __init__(
        self,
        shards: Sequence[Tensor],  # [rows, K] each, all but the last of one length
        views: Sequence[Sequence[Tensor]] = (),  # the augmented ones, in shards of the same lengths
        *,
        key: str = "",
        unreadable: Mapping[int, str] | None = None,
        extracted: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.key = key
        self.unreadable = dict(unreadable or {})  # row → why its image does not decode; its features are zero
        self.extracted = extracted  # images that this process computed, instead of finding them
        self.device = torch.device(device)
        self.width = shards[0].shape[1]
        self.views = len(views)
        self._shards = [shard for of_view in (shards, *views) for shard in of_view]  # view after view
        self._shards_per_view, self._rows_per_shard = len(shards), len(shards[0])
        self._rows = sum(len(shard) for shard in shards)
        self._normalized = False
        rows = (1 + self.views) * self._rows
        fits = 4 * rows * self.width <= MEMORY_FRACTION * _free_memory(self.device)
        self._table = _table(self._shards, rows, self.device) if fits else None  # float32 [(1 + views) · N, K]

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, rows: Tensor) -> Tensor:
        """In the plain view. Raises `IndexError` for a row outside 0…N−1."""
        return self._read(rows, self._rows)

    def of_views(self, rows: Tensor, numbers: Tensor) -> Tensor:
        """float32 [..., K]: each row (0…N−1) in the view of its number (0: the plain one … `views`)."""
        return self._read(numbers * self._rows + rows, (1 + self.views) * self._rows)

    @property
    def in_memory(self) -> bool:
        return self._table is not None

    def _read(self, places: Tensor, end: int) -> Tensor:
        """[..., K] at view · N + row, which must be below `end`."""
        flat = places.reshape(-1)
        if self._table is None:
            z = self._gather(flat.cpu(), end)
        else:
            z = self._table[:end].index_select(0, flat.to(self.device))
        if self._normalized:
            z = F.normalize(z, dim=-1)
        return z.view(*places.shape, self.width)

    def normalized(self) -> Features:
        """The same features, L2-normalised (zero rows stay zero)."""
        view = copy.copy(self)
        view._normalized = True
        return view

    def _gather(self, places: Tensor, end: int) -> Tensor:
        """float32 [n,K] on the device. Shard by shard in row order, so that a file is read from front to back."""
        ordered, order = places.sort()
        if len(places) and not 0 <= int(ordered[0]) <= int(ordered[-1]) < end:
            raise IndexError(f"rows {int(ordered[0])}…{int(ordered[-1])} are outside 0…{end - 1}")
        z = torch.empty(len(places), self.width)
        view, row = ordered // self._rows, ordered % self._rows
        numbers, counts = (view * self._shards_per_view + row // self._rows_per_shard).unique_consecutive(
            return_counts=True
        )
        for number, within, into in zip(
            numbers.tolist(),
            (row % self._rows_per_shard).split(counts.tolist()),
            order.split(counts.tolist()),
            strict=True,
        ):
            z[into] = self._shards[number][within].float()
        return z.to(self.device)


def _table(shards: Sequence[Tensor], rows: int, device: torch.device) -> Tensor:
    table = torch.empty(rows, shards[0].shape[1], dtype=torch.float32, device=device)
    for part, shard in zip(table.split([len(shard) for shard in shards]), shards, strict=True):
        part.copy_(shard)
        pulse.beat()
    return table


def _free_memory(device: torch.device) -> float:
    """Bytes that this process may count on."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    import psutil

    return psutil.virtual_memory().available / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def extract(
    encoder: Encoder,
    dataset: ImageDataset,
    settings: FeatureSettings,
    *,
    on_bad_image: Literal["error", "skip"],
    device: torch.device | str,
    show: bool,
    augmentation: Augmentation = "none",
) -> Features:
    """The features of every row, in the plain view and `settings.views` of the `augmentation`, computed where missing.

    Processes that need the same features (ranks of a run, or other runs) share the work shard by shard and wait for
    each other's last shards; a killed one's are taken over. Raises `UserError` for images that do not decode where
    `on_bad_image` is "error"; whatever was computed before stays in the cache.
    """
    device = torch.device(device)
    cache = cache_folder(settings)
    hashes = hash_files(dataset, cache, show)
    _refuse_unreadable(hashes.unreadable, dataset, on_bad_image)
    sets = cached_sets(encoder, dataset, hashes, settings, augmentation, device)
    missing = [cached.entry.missing() for cached in sets]
    plain = sets[0].entry
    plain.require_space(sum(cached.entry.needed for cached in sets[1:]))
    model = frozen_copy(encoder, settings.precision, device) if any(missing) else encoder
    extracted = 0
    for (view, entry, about), lacks in zip(sets, missing, strict=True):
        if lacks:
            if entry.manifest is None:
                entry.update_manifest(about)
            extraction = Extraction(model, view, dataset, hashes, entry, settings, device, on_bad_image)
            extracted += _compute_missing(extraction, lacks, show)
        entry.update_manifest(about)
        _refuse_unreadable(entry.unreadable, dataset, on_bad_image)
    shards = [[entry.shards[number].features for number in range(len(entry.layout))] for _, entry, _ in sets]
    return Features(
        shards[0], shards[1:], key=plain.key, unreadable=plain.unreadable, extracted=extracted, device=device
    )


class CachedSet(NamedTuple):
    """A view of all images in the cache."""

    view: View
    entry: Entry
    about: dict[str, object]  # for its manifest


def cached_sets(
    encoder: Encoder,
    dataset: ImageDataset,
    hashes: FileHashes,
    settings: FeatureSettings,
    augmentation: Augmentation,
    device: torch.device,
) -> list[CachedSet]:
    """The plain view and the augmented ones that the settings ask for, each an entry of its own, complete or not."""
    cache, stored = cache_folder(settings), DTYPES[settings.precision]
    parts = key_parts(encoder, dataset, hashes, settings.precision, device)
    beside = {"summary": _summary(dataset), "width": encoder.width, "batch_size": settings.batch_size}
    sets = []
    for view in all_views(augmentation, settings.views):
        own = {**parts, **view.key_parts(encoder.preprocessing)}
        entry = Entry(cache, key_of(own), ShardLayout(len(dataset)), encoder.width, stored)
        sets.append(CachedSet(view, entry, {**own, **beside}))
    return sets


def _refuse_unreadable(unreadable: Mapping[int, str], dataset: ImageDataset, on_bad_image: str) -> None:
    if unreadable and on_bad_image == "error":
        raise UserError(unreadable_message(unreadable, dataset))


def _compute_missing(extraction: Extraction, missing: list[int], show: bool) -> int:
    """Until no shard is missing; the number of images that this process computed."""
    entry, view, extracted, said = extraction.entry, extraction.view.number, 0, False
    with progress(f"features, view {view}" if view else "features", entry.images(missing), "images", show) as bar:
        while missing:
            computed = extraction.run(missing, bar)
            extracted += computed
            left = entry.missing()
            elsewhere = entry.images(missing) - entry.images(left) - computed
            if elsewhere:
                bar.advance(elsewhere, "another process helps")
            elif left and not computed:
                if not said:
                    logger.info("features: waiting for another process to compute %d images", entry.images(left))
                said = True
                with pulse.waiting():
                    time.sleep(WAIT_SECONDS)
            missing = left
    return extracted


def _summary(dataset: ImageDataset) -> dict[str, object]:
    """What a reader of the manifest recognises the data by."""
    counts = np.bincount(dataset.domains, minlength=len(dataset.domain_names)).tolist()
    return {"domains": dict(zip(dataset.domain_names, counts, strict=True)), "classes": list(dataset.class_names)}
