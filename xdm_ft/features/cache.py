"""The features of a data set under a frozen encoder: read from the cache, or computed and added to it."""

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
from xdm_ft.encoders import Encoder
from xdm_ft.features import FeatureSettings
from xdm_ft.features.cache_key import key_of, key_parts
from xdm_ft.features.file_hashes import FileHashes, hash_files
from xdm_ft.features.forward import DTYPES, Extraction, frozen_copy, refuse_unreadable
from xdm_ft.features.shards import ShardLayout
from xdm_ft.features.store import Entry, cache_folder
from xdm_ft.features.views import View, all_views
from xdm_ft.progress import progress, pulse

logger = logging.getLogger("xdm_ft")

MEMORY_FRACTION = 0.25  # features that need more of the free memory stay in their memory-mapped files
WAIT_SECONDS = 0.5  # between checks whether another process has finished its shards


class Features:
    """Features of N images: `features[rows]` is float32 [..., K] for int64 rows [...], on `device`.

    `features.of_views(rows, numbers)` also reads the augmented views, if there are any. All features are one tensor on
    the device if it takes at most `MEMORY_FRACTION` of the free memory. If not, each request gathers its rows from the
    memory-mapped shards.
    """

    def __init__(
        self,
        shards: Sequence[Tensor],  # of the plain view: [rows, K] each, all but the last of the same length
        views: Sequence[Sequence[Tensor]] = (),  # the augmented views, in shards of the same lengths
        *,
        key: str = "",
        unreadable: Mapping[int, str] | None = None,
        extracted: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.key = key
        self.unreadable = dict(unreadable or {})  # row → why its image does not decode; its features are zero
        self.extracted = extracted  # number of images that this process computed, the others were cached
        self.device = torch.device(device)
        self.width = shards[0].shape[1]
        self.views = len(views)  # number of augmented views
        # those of the plain view, then those of view 1, view 2, …
        self._shards = [shard for of_view in (shards, *views) for shard in of_view]
        self._shards_per_view, self._rows_per_shard = len(shards), len(shards[0])
        self._rows = sum(len(shard) for shard in shards)
        self._normalized = False
        rows = (1 + self.views) * self._rows
        # 4 bytes per number: the table is float32 even where bfloat16 is stored
        fits = 4 * rows * self.width <= MEMORY_FRACTION * _free_memory(self.device)
        self._table = _table(self._shards, rows, self.device) if fits else None  # float32 [(1 + views) · N, K]

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Features of `rows` in the plain view. Raises `IndexError` for a row outside 0…N−1."""
        return self._read(rows, self._rows)

    def of_views(self, rows: Tensor, numbers: Tensor) -> Tensor:
        """float32 [..., K]: each row (0…N−1) in the view of that number (0: plain, 1…`views`: augmented)."""
        return self._read(numbers * self._rows + rows, (1 + self.views) * self._rows)

    @property
    def in_memory(self) -> bool:
        return self._table is not None

    def _read(self, positions: Tensor, end: int) -> Tensor:
        """[..., K] at the positions view · N + row, each in 0…`end` − 1."""
        flat = positions.reshape(-1)
        if self._table is None:
            z = self._gather(flat.cpu(), end)
        else:
            # cut at `end`, so that index_select refuses a row past the view instead of reading the next one's
            z = self._table[:end].index_select(0, flat.to(self.device))
        if self._normalized:
            z = F.normalize(z, dim=-1)
        return z.view(*positions.shape, self.width)

    def normalized(self) -> Features:
        """The same features, L2-normalised when they are read (zero rows stay zero). Shares this object's memory."""
        normalized = copy.copy(self)
        normalized._normalized = True
        return normalized

    def _gather(self, positions: Tensor, end: int) -> Tensor:
        """float32 [n,K] on the device, read shard by shard."""
        # sorted, so that each memory-mapped file is read once and from front to back
        ordered, order = positions.sort()
        if len(positions) and not 0 <= int(ordered[0]) <= int(ordered[-1]) < end:
            raise IndexError(f"rows {int(ordered[0])}…{int(ordered[-1])} are outside 0…{end - 1}")
        z = torch.empty(len(positions), self.width)
        view, row = ordered // self._rows, ordered % self._rows
        numbers, counts = (view * self._shards_per_view + row // self._rows_per_shard).unique_consecutive(
            return_counts=True
        )
        for number, rows, targets in zip(
            numbers.tolist(),
            (row % self._rows_per_shard).split(counts.tolist()),
            order.split(counts.tolist()),
            strict=True,
        ):
            z[targets] = self._shards[number][rows].float()
        return z.to(self.device)


def _table(shards: Sequence[Tensor], rows: int, device: torch.device) -> Tensor:
    """All shards in one float32 tensor [rows, K] on the device."""
    table = torch.empty(rows, shards[0].shape[1], dtype=torch.float32, device=device)
    for part, shard in zip(table.split([len(shard) for shard in shards]), shards, strict=True):
        part.copy_(shard)
        pulse.beat()
    return table


def _free_memory(device: torch.device) -> float:
    """Free bytes on the device; on a CPU this process's part of them, as ranks of one machine share its memory."""
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
    """Returns the features of every row, in the plain view and in `settings.views` views of the `augmentation`.

    Features that are missing in the cache are computed and added to it. Processes that need the same features (ranks of
    a run, or several runs) divide the shards among them; the shards of a killed process are computed by another one.

    Raises `UserError` for images that do not decode if `on_bad_image` is "error". Finished shards stay in the cache.
    """
    device = torch.device(device)
    cache = cache_folder(settings)
    hashes = hash_files(dataset, cache, show)
    refuse_unreadable(hashes.unreadable, dataset, on_bad_image)
    sets = cached_sets(encoder, dataset, hashes, settings, augmentation, device)
    missing_of_sets = [cached.entry.missing() for cached in sets]
    plain = sets[0].entry
    plain.require_space(sum(cached.entry.needed for cached in sets[1:]))
    model = frozen_copy(encoder, settings.precision, device) if any(missing_of_sets) else encoder
    extracted = 0
    for (view, entry, description), missing in zip(sets, missing_of_sets, strict=True):
        if missing:
            if entry.manifest is None:  # written first, so that an unfinished entry can be identified
                entry.update_manifest(description)
            extraction = Extraction(model, view, dataset, hashes, entry, settings, device, on_bad_image)
            extracted += _compute_missing(extraction, missing, show)
        entry.update_manifest(description)
        refuse_unreadable(entry.unreadable, dataset, on_bad_image)
    shards = [[entry.shards[number].features for number in range(len(entry.layout))] for _, entry, _ in sets]
    return Features(
        shards[0], shards[1:], key=plain.key, unreadable=plain.unreadable, extracted=extracted, device=device
    )


class CachedSet(NamedTuple):
    """The cache entry of one view of all images."""

    view: View
    entry: Entry
    description: dict[str, object]  # what its manifest says of the features


def cached_sets(
    encoder: Encoder,
    dataset: ImageDataset,
    hashes: FileHashes,
    settings: FeatureSettings,
    augmentation: Augmentation,
    device: torch.device,
) -> list[CachedSet]:
    """One set for the plain view and one for each of `settings.views` augmented views. An entry may be incomplete."""
    cache, dtype = cache_folder(settings), DTYPES[settings.precision]
    parts = key_parts(encoder, dataset, hashes, settings.precision, device)
    not_in_key = {"summary": _summary(dataset), "width": encoder.width, "batch_size": settings.batch_size}
    sets = []
    for view in all_views(augmentation, settings.views):
        view_parts = {**parts, **view.key_parts(encoder.preprocessing)}
        entry = Entry(cache, key_of(view_parts), ShardLayout(len(dataset)), encoder.width, dtype)
        sets.append(CachedSet(view, entry, {**view_parts, **not_in_key}))
    return sets


def _compute_missing(extraction: Extraction, missing: list[int], show: bool) -> int:
    """Computes shards, or waits for processes that do, until none is missing. Returns how many images it computed."""
    entry, view, extracted, wait_logged = extraction.entry, extraction.view.number, 0, False
    with progress(f"features, view {view}" if view else "features", entry.images(missing), "images", show) as bar:
        while missing:
            computed = extraction.run(missing, bar)
            extracted += computed
            still_missing = entry.missing()
            by_others = entry.images(missing) - entry.images(still_missing) - computed
            if by_others:
                bar.advance(by_others, "another process helps")
            elif still_missing and not computed:
                if not wait_logged:
                    waiting_for = entry.images(still_missing)
                    logger.info("features: waiting for another process to compute %d images", waiting_for)
                wait_logged = True
                with pulse.waiting():
                    time.sleep(WAIT_SECONDS)
            missing = still_missing
    return extracted


def _summary(dataset: ImageDataset) -> dict[str, object]:
    """Images per domain, and class names: not part of the key, but what a person recognises the data by."""
    counts = np.bincount(dataset.domains, minlength=len(dataset.domain_names)).tolist()
    return {"domains": dict(zip(dataset.domain_names, counts, strict=True)), "classes": list(dataset.class_names)}
