"""Features of a data set under a frozen encoder: found in the cache, or extracted into it."""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from xdm_ft.data import ImageDataset
from xdm_ft.data.loading.images import unreadable_message
from xdm_ft.encoders import Encoder
from xdm_ft.errors import UserError
from xdm_ft.features import FeatureSettings
from xdm_ft.features.content import read_contents
from xdm_ft.features.forward import STORED, Extraction, frozen_copy
from xdm_ft.features.ingredients import ingredients, key_of
from xdm_ft.features.shards import Grid
from xdm_ft.features.store import Entry, cache_folder
from xdm_ft.progress import progress

logger = logging.getLogger("xdm_ft")

MEMORY_FRACTION = 0.25  # of what is free, that features may take; larger ones stay in their memory-mapped files
WAIT_SECONDS = 0.5  # between looks at what another process computes


class Features:
    """Features of N images: `features[rows]` is float32 [..., K] for int64 rows [...], on `device`.

    They are one tensor on the device where that takes a small part of its free memory; else each request gathers its
    rows from the memory-mapped shards.
    """

    def __init__(
        self,
        shards: Sequence[Tensor],  # [rows, K] each, all but the last of one length
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
        self._shards, self._rows_per_shard = shards, len(shards[0])
        self._rows = sum(len(shard) for shard in shards)
        self._normalized = False
        fits = 4 * self._rows * self.width <= MEMORY_FRACTION * _free_memory(self.device)
        self._table = _table(shards, self._rows, self.device) if fits else None  # float32 [N,K]

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Raises `IndexError` for a row outside 0…N−1."""
        flat = rows.reshape(-1)
        z = self._gather(flat.cpu()) if self._table is None else self._table.index_select(0, flat.to(self.device))
        if self._normalized:
            z = F.normalize(z, dim=-1)
        return z.view(*rows.shape, self.width)

    def normalized(self) -> Features:
        """The same features, L2-normalised (zero rows stay zero)."""
        view = copy.copy(self)
        view._normalized = True
        return view

    def _gather(self, rows: Tensor) -> Tensor:
        """float32 [n,K] on the device. Shard by shard in row order, so that a file is read from front to back."""
        ordered, order = rows.sort()
        if len(rows) and not 0 <= int(ordered[0]) <= int(ordered[-1]) < self._rows:
            raise IndexError(f"rows {int(ordered[0])}…{int(ordered[-1])} are outside 0…{self._rows - 1}")
        z = torch.empty(len(rows), self.width)
        numbers, counts = (ordered // self._rows_per_shard).unique_consecutive(return_counts=True)
        for number, within, places in zip(
            numbers.tolist(),
            (ordered % self._rows_per_shard).split(counts.tolist()),
            order.split(counts.tolist()),
            strict=True,
        ):
            z[places] = self._shards[number][within].float()
        return z.to(self.device)


def _table(shards: Sequence[Tensor], rows: int, device: torch.device) -> Tensor:
    table = torch.empty(rows, shards[0].shape[1], dtype=torch.float32, device=device)
    for part, shard in zip(table.split(len(shards[0])), shards, strict=True):
        part.copy_(shard)
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
) -> Features:
    """The features of every row, computed where the cache lacks them.

    Processes that need the same features (ranks of a run, or other runs) share the work shard by shard and wait for
    each other's last shards; a killed one's are taken over. Raises `UserError` for images that do not decode where
    `on_bad_image` is "error"; whatever was computed before stays in the cache.
    """
    device = torch.device(device)
    cache = cache_folder(settings)
    contents = read_contents(dataset, cache, show)
    _refuse(contents.unreadable, dataset, on_bad_image)
    parts = ingredients(encoder, dataset, contents, settings.precision, device)
    entry = Entry(cache, key_of(parts), Grid(len(dataset)), encoder.width, STORED[settings.precision])
    about = {**parts, "summary": _summary(dataset), "width": encoder.width, "batch_size": settings.batch_size}
    extracted = 0
    missing = entry.missing()
    if missing:
        entry.require_space()
        if entry.manifest is None:
            entry.describe(about)
        model = frozen_copy(encoder, settings.precision, device)
        extraction = Extraction(model, dataset, contents, entry, settings, device, on_bad_image)
        extracted = _compute(extraction, missing, show)
    entry.describe(about)
    _refuse(entry.unreadable, dataset, on_bad_image)
    shards = [entry.shards[number].features for number in range(len(entry.grid))]
    return Features(shards, key=entry.key, unreadable=entry.unreadable, extracted=extracted, device=device)


def _refuse(unreadable: Mapping[int, str], dataset: ImageDataset, on_bad_image: str) -> None:
    if unreadable and on_bad_image == "error":
        raise UserError(unreadable_message(unreadable, dataset))


def _compute(extraction: Extraction, missing: list[int], show: bool) -> int:
    """Until no shard is missing; the number of images that this process computed."""
    entry, extracted, said = extraction.entry, 0, False
    with progress("features", entry.images(missing), "images", show) as bar:
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
                time.sleep(WAIT_SECONDS)
            missing = left
    return extracted


def _summary(dataset: ImageDataset) -> dict[str, object]:
    """What a reader of the manifest recognises the data by."""
    counts = np.bincount(dataset.domains, minlength=len(dataset.domain_names)).tolist()
    return {"domains": dict(zip(dataset.domain_names, counts, strict=True)), "classes": list(dataset.class_names)}
