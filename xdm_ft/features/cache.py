"""The features of a data set under a frozen encoder: read from the cache, or computed and added to it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from xdm_ft.encoders import Encoder
from xdm_ft.features import FeatureSettings
from xdm_ft.features.cache_key import key_parts
from xdm_ft.features.file_hashes import DistinctImages, FileHashes
from xdm_ft.features.forward import DTYPES, Elsewhere, Extraction, frozen_copy, refuse_unreadable
from xdm_ft.features.maintenance import stores
from xdm_ft.features.shards import Shard, open_shard
from xdm_ft.features.store import Store, cache_folder, complete, is_writable
from xdm_ft.features.views import View, all_views
from xdm_ft.images.dataset import Augmentation, ImageDataset
from xdm_ft.runtime.errors import UserError, plural
from xdm_ft.runtime.progress import pulse
from xdm_ft.storage.checksummed import Damaged

logger = logging.getLogger("xdm_ft")

MEMORY_FRACTION = 0.25  # features that need more of the machine's free memory stay in their memory-mapped files
GPU_FRACTION = 0.6  # the same of a GPU's: nothing else is there but a chunk of heads and its batches


class Features:
    """Features of N images: `features[rows]` is float32 [..., K] for int64 rows [...], on `device`.

    `features.of_views(rows, numbers)` also reads the augmented views, if there are any. All features are one tensor on
    the device if it takes at most `MEMORY_FRACTION` (`GPU_FRACTION`) of the free memory: as float32, else as they are
    stored. If neither fits, each request gathers its rows from the memory-mapped shards. The numbers are the same.
    """

    def __init__(
        self,
        shards: Sequence[Tensor],  # [n,K] each
        places: Tensor | None = None,
        *,
        key: str = "",
        unreadable: Mapping[int, str] | None = None,
        extracted: int = 0,
        device: torch.device | str = "cpu",
        streamed: bool = False,
        files: ShardFiles | None = None,
    ) -> None:
        """`files`: those of the shards; with them, another process that unpickles these features reads the same files.

        `places`: int64 [1 + views, N], where the features of each view and row are in the shards, one after the
        other; None: one view, in the order of the shards. `streamed`: leave them in their files, whatever fits."""
        self.key = key
        self.unreadable = dict(unreadable or {})  # row → why its image does not decode; its features are zero
        self.extracted = extracted  # number of images that this process or its tasks computed, the others were cached
        self.device = torch.device(device)
        self.width = shards[0].shape[1]
        self._shards, self._files = shards, files
        self._ends = torch.tensor([len(shard) for shard in shards]).cumsum(0)
        places = torch.arange(int(self._ends[-1]))[None] if places is None else places
        self.views = len(places) - 1  # number of augmented views
        self._places, self._rows = places.flatten(), places.shape[1]
        self._normalized = False
        self._table: Tensor | None = None  # [(1 + views) · N, K]
        fraction = MEMORY_FRACTION if self.device.type == "cpu" else GPU_FRACTION
        room = 0.0 if streamed else fraction * _free_memory(self.device) / max(1, places.numel() * self.width)
        # float32 even where bfloat16 is stored, as then no read converts
        fitting = [dtype for dtype in (torch.float32, shards[0].dtype) if dtype.itemsize <= room]
        if fitting:
            table = torch.empty(places.numel(), self.width, dtype=fitting[0], device=self.device)
            self._copy(self._places, table)
            self._table = table

    def __reduce__(self) -> tuple[Any, ...]:
        """What is pickled is where the features are. They are left in their files there, until `to` is called."""
        assert self._files is not None and not self._normalized, "features as `extract` returns them"
        places = self._places.view(1 + self.views, self._rows)
        return _reopened, (self._files, places, self.key, self.unreadable)

    def to(self, device: torch.device) -> Features:
        """Returns the same features on a device; in its memory, if they fit."""
        places = self._places.view(1 + self.views, self._rows)
        streamed = self._files is not None and self._files.streamed
        return Features(
            self._shards, places, key=self.key, unreadable=self.unreadable, device=device, streamed=streamed,
            files=self._files,
        )  # fmt: skip

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
            z = self._table[:end].index_select(0, flat.to(self.device)).float()
        if self._normalized:
            z /= z.norm(dim=-1, keepdim=True).clamp_min_(1e-12)  # as F.normalize does, without a second copy
        return z.view(*positions.shape, self.width)

    def normalized(self) -> Features:
        """The same features, L2-normalised when they are read (zero rows stay zero). Shares this object's memory."""
        normalized = object.__new__(Features)  # `copy.copy` would do what `__reduce__` says
        normalized.__dict__.update(vars(self) | {"_normalized": True})
        return normalized

    def _gather(self, positions: Tensor, end: int) -> Tensor:
        """float32 [n,K] on the device, read shard by shard."""
        if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < end:
            raise IndexError(f"rows {int(positions.min())}…{int(positions.max())} are outside 0…{end - 1}")
        z = torch.empty(len(positions), self.width)
        self._copy(self._places[positions], z)
        return z.to(self.device)

    def _copy(self, places: Tensor, z: Tensor) -> None:
        """Copies the features at these places to `z` [n,K]."""
        # sorted, so that each memory-mapped file is read once and from front to back
        ordered, order = places.sort()
        numbers, counts = torch.searchsorted(self._ends, ordered, right=True).unique_consecutive(return_counts=True)
        per_shard = ordered.split(counts.tolist()), order.split(counts.tolist())
        for number, of_shard, targets in zip(numbers.tolist(), *per_shard, strict=True):
            shard = self._shards[number]
            rows = of_shard - (int(self._ends[number]) - len(shard))
            if _is_range(rows) and _is_range(targets):  # a copy without an index is several times as fast
                z[int(targets[0]) : int(targets[-1]) + 1] = shard[int(rows[0]) : int(rows[-1]) + 1].to(z.device)
            else:
                z[targets.to(z.device)] = shard[rows].to(z.device, z.dtype)
            pulse.beat()


class ShardFiles(NamedTuple):
    """The files of features, all of the same width and type."""

    files: tuple[tuple[Path, str], ...]  # of each shard: its path, the key of its store
    width: int
    dtype: torch.dtype
    streamed: bool  # as for `Features`

    def shards(self, of_files: Iterable[Tensor]) -> list[Tensor]:
        """Returns the shards as `Features` takes them: before those in files one of zeros, for images without one."""
        return [torch.zeros(1, self.width, dtype=self.dtype), *of_files]


def _reopened(files: ShardFiles, places: Tensor, key: str, unreadable: Mapping[int, str]) -> Features:
    """Returns unpickled features. Raises `UserError` if a file can not be read here."""
    opened = []
    for path, of_store in files.files:
        try:
            opened.append(open_shard(path, of_store, files.width, files.dtype).features)
        except (Damaged, OSError) as error:
            raise UserError(f"features.dir: {path} can not be read ({error})") from error
    return Features(files.shards(opened), places, key=key, unreadable=unreadable, streamed=True, files=files)


def _is_range(numbers: Tensor) -> bool:
    """Whether each number follows the one before."""
    return bool((numbers.diff() == 1).all())


def _free_memory(device: torch.device) -> float:
    """Free bytes on the device; on a CPU this process's part of them, as ranks of one machine share its memory."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    import psutil

    return psutil.virtual_memory().available / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def extract(
    encoder: Encoder,
    dataset: ImageDataset,
    hashes: FileHashes,
    settings: FeatureSettings,
    *,
    on_bad_image: Literal["error", "skip"],
    device: torch.device | str,
    show: bool,
    augmentation: Augmentation = "none",
    streamed: bool = False,
    elsewhere: Elsewhere | None = None,
) -> Features:
    """Returns the features of every row, in the plain view and in `settings.views` views of the `augmentation`.

    `device`: where they will be, and where they are computed, unless `elsewhere`.
    `streamed`: they are read from their files each time, for features that are large (activations of a cut).

    Features that are missing in the cache are computed and added to it, once for equal images. Processes that need the
    same features (ranks of a run, or several runs) divide them among themselves; those that a killed process did not
    finish are computed by another one.

    Raises `UserError` for images that do not decode if `on_bad_image` is "error". Finished shards stay in the cache.
    """
    device = torch.device(device)
    refuse_unreadable(hashes.unreadable, dataset, on_bad_image)
    images = hashes.images
    computing = device if elsewhere is None else elsewhere.device
    views = cached_views(encoder, dataset, images, settings, augmentation, computing)
    missing = [len(store.missing()) for _, store in views]
    if any(missing):
        _require_writable(views, sum(missing))
        _mention_outdated(views[0].store)
    model = frozen_copy(encoder, settings.precision, device) if any(missing) and elsewhere is None else encoder
    extracted, unreadable = 0, dict[int, str]()  # a long strip may decode in augmented views, which see a part of it
    for view, store in views:
        extraction = Extraction(model, view, dataset, hashes, store, images.rows, settings, computing, on_bad_image)
        what = f"features, view {view.number}" if view.number else "features"
        run = extraction.run if elsewhere is None else partial(elsewhere.run, extraction)
        extracted += complete(store, run, what, show)
        unreadable |= unreadable_rows(store, images, hashes)
        refuse_unreadable(unreadable, dataset, on_bad_image)
    shards, places, rows = list[Shard](), [], 1
    for _, store in views:
        first = rows + np.cumsum([0, *(len(shard.contents) for shard in store.shards)])
        places.append(np.where(images.number_of < 0, 0, (first[store.shard_of] + store.row_of)[images.number_of]))
        shards += store.shards
        rows = int(first[-1])
    paths = tuple((shard.path, store.key) for _, store in views for shard in store.shards)
    files = ShardFiles(paths, encoder.width, DTYPES[settings.precision], streamed)
    return Features(
        files.shards(shard.features for shard in shards),
        torch.from_numpy(np.stack(places)),
        key=views[0].store.key,
        unreadable=unreadable,
        extracted=extracted,
        device=device,
        streamed=streamed,
        files=files,
    )


class CachedView(NamedTuple):
    """A view of all images, and the store of its features, of which some may be missing."""

    view: View
    store: Store


def cached_views(
    encoder: Encoder,
    dataset: ImageDataset,
    images: DistinctImages,
    settings: FeatureSettings,
    augmentation: Augmentation,
    device: torch.device,
) -> list[CachedView]:
    """The plain view and `settings.views` augmented views."""
    cache, dtype = cache_folder(settings), DTYPES[settings.precision]
    parts = key_parts(encoder, dataset.decoder, settings.precision, device)
    views = []
    for view in all_views(augmentation, settings.views):
        of_view = {**parts, **view.key_parts(encoder.preprocessing)}
        views.append(CachedView(view, Store(cache, of_view, images.contents, encoder.width, dtype)))
    return views


def _require_writable(views: Sequence[CachedView], missing: int) -> None:
    """Raises `UserError` if the missing features can not be written, for lack of permission or of space."""
    plain = views[0].store
    if not is_writable(plain.cache):
        raise UserError(
            f"features.dir: {plain.cache} can not be written, and lacks {plain.what} of {plural(missing, 'image')}; "
            f"set features.dir to a folder of your own{plain.instead}"
        )
    plain.require_space(sum(store.bytes_needed for _, store in views[1:]))


def _mention_outdated(store: Store) -> None:
    """Logs, once for a new store, that the cache has features of an earlier version: why all are computed again."""
    found = [] if store.folder.exists() else stores(store.cache)
    outdated = [cached for cached in found if cached.is_outdated and cached.of_features]
    if outdated:
        logger.info(
            "%s: %s of features of an earlier version can not be read; `xdm-ft cache ls` lists them, and "
            "`xdm-ft cache prune` can delete them", store.cache, plural(len(outdated), "set"),
        )  # fmt: skip


def unreadable_rows(store: Store, images: DistinctImages, hashes: FileHashes) -> dict[int, str]:
    """Row → why its image does not decode."""
    reasons = store.unreadable()
    rows = np.flatnonzero(np.isin(images.number_of, list(reasons)))
    found = hashes.unreadable | {row: reasons[images.number_of[row]] for row in rows.tolist()}
    return dict(sorted(found.items()))
