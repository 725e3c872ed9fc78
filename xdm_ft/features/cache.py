"""Features of a frozen encoder on the disk: one row per image, for ever, and `Features`, through which they are read.

`<cache>/<key>/` is the store of one encoder, preprocessing, precision and view. It holds

    manifest.json           what the features are: a line for people, the key with all of its parts, when it was begun
                            (UTC), the width K, and a checksum of all this
    shard-<hash of contents>.safetensors, …
                            `contents` (uint8 [n,16], the hash of each image's content) and `features` ([n,K] in the
                            stored precision). Equal images give equal files. A shard can be checked alone: it names its
                            store, its images and two checksums.

and beside it, while a run fills it, its lock `<cache>/<key>.lock`. A data set is a list of contents: order, names,
domains and labels of images are no part of a store, and data sets that share images share their features. Shards are
only ever added, so a killed process loses at most the shards that it was computing. Every file is written atomically:
the lock saves work, and no file depends on it.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from xdm_ft.features import FeatureSettings
from xdm_ft.features.key import key_of
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.progress import pulse
from xdm_ft.storage import digest
from xdm_ft.storage.atomic import disk_errors, remove_unfinished, replace_text
from xdm_ft.storage.cache_root import cache_root, one_at_a_time
from xdm_ft.storage.facts import INDEX
from xdm_ft.storage.lines import Damaged, json_object
from xdm_ft.storage.tensors import read_tensors, write_tensors

logger = logging.getLogger("xdm_ft")
SHARDS = "shard-*.safetensors"
MANIFEST = "manifest.json"
MEMORY_FRACTION = 0.25  # features that need more of the machine's free memory stay in their memory-mapped files
ROWS_AT_ONCE = 8192  # features that are read together, where they are used in blocks
GPU_FRACTION = 0.6  # the same of a GPU's: nothing else is there but a chunk of heads and its batches
WHAT = "image features, cached by xdm_ft; safe to delete"
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
        # ~ gives a number that differs from the first one, so that the first run of equal ones begins at 0
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


def cache_folder(settings: FeatureSettings) -> Path:
    """Returns the folder of the cache. Creates it, for its user only, if it does not exist.

    Raises `UserError` if it cannot be created or read. A folder that can only be read serves what is cached there.
    """
    folder = cache_path(settings)
    remedy = "set features.dir or XDM_FT_CACHE to a folder of your own"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise UserError(f"features.dir: {folder} cannot be created ({error.strerror}); {remedy}") from error
    if not os.access(folder, os.R_OK | os.X_OK, effective_ids=True):
        raise UserError(f"features.dir: {folder} cannot be read; {remedy}")
    return folder


def cache_path(settings: FeatureSettings) -> Path:
    """Returns the path of the cache's folder, which may not exist."""
    return cache_root(settings.dir).absolute()


def cache_of_run(settings: FeatureSettings) -> Path:
    """Returns the path of the cache that a run names, if one is there, else of the default one.

    A run may come from anyone, and must not name another folder to write to.
    """
    path = cache_path(settings)
    return path if (path / INDEX).is_file() else cache_path(FeatureSettings())


class Store:
    """The features of M different images on the disk, shared by all processes that need them."""

    def __init__(
        self, cache: Path, parts: Mapping[str, Any], contents: Contents, width: int, dtype: torch.dtype
    ) -> None:
        """`parts`: all that determines the features, as `key_parts` returns it. `contents` [M]: no two are equal."""
        self.key, self._parts = key_of(parts), parts
        self.cache, self.folder, self.contents = cache, cache / self.key, contents
        self.width, self.dtype = width, dtype
        self.shards: list[Shard] = []  # that hold some of the images
        self.shard_of = np.full(len(contents), -1, np.int32)  # [M], −1: not computed yet
        self.row_of = np.zeros(len(contents), np.int64)  # [M], row of the shard
        cut = parts.get("encoder", {}).get("cut")  # the module above it
        self.what = "features" if cut is None else f"activations before {cut}"
        self.instead = "" if cut is None else ", or features.cut: compute in a new run"
        self._seen: set[str] = set()  # names of shards that were opened, or are damaged
        self._damaged: dict[Path, Damaged] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """What is pickled is the same store, of which nothing has been read."""
        return Store, (self.cache, self._parts, self.contents, self.width, self.dtype)

    def part(self, numbers: np.ndarray) -> Store:
        """Returns the store of these images alone."""
        return Store(self.cache, self._parts, self.contents[numbers], self.width, self.dtype)

    def missing(self) -> np.ndarray:
        """Returns the numbers (int64, in 0…M−1) of the images that are still to be computed. Opens new shards."""
        self._open([path for path in sorted(self.folder.glob(SHARDS)) if path.name not in self._seen])
        return np.flatnonzero(self.shard_of < 0)

    def open(self, names: Iterable[str]) -> None:
        """Opens shards of other processes. A network disk may list them only a minute after they were written."""
        paths = [self.folder / name for name in names]
        unread = [path for path in paths if path.name not in self._seen or path in self._damaged]
        self._open([path for path in unread if path.exists()])

    @cached_property
    def _index(self) -> ContentIndex:
        return ContentIndex(self.contents)

    def _open(self, paths: Sequence[Path]) -> None:
        """Takes the missing images from these shards."""
        shards = list[Shard]()
        for path in paths:
            self._seen.add(path.name)
            self._damaged.pop(path, None)
            try:
                shards.append(open_shard(path, self.key, self.width, self.dtype))
            except FileNotFoundError:
                continue  # pruned since it was listed
            except Damaged as error:
                self._damaged[path] = error
        begins = self._index.find(np.array([shard.contents[0] for shard in shards], "S16"))
        for shard, begin in zip(shards, begins.tolist(), strict=True):
            # the images of a shard mostly follow each other here too; to see that takes a tenth of a look-up of each
            end = begin + len(shard.contents)
            is_run = begin >= 0 and np.array_equal(self.contents[begin:end], shard.contents)
            numbers = np.arange(begin, end) if is_run else self._index.find(shard.contents)
            rows = np.flatnonzero(numbers >= 0)  # −1: not of this data set
            rows = rows[self.shard_of[numbers[rows]] < 0]
            if not len(rows):
                continue
            try:
                shard.check()
            except Damaged as error:
                self._damaged[shard.path] = error
                continue
            self.shard_of[numbers[rows]], self.row_of[numbers[rows]] = len(self.shards), rows
            self.shards.append(shard)
            with suppress(OSError):  # `cache prune` goes by this time; another user's shard cannot be touched
                os.utime(shard.path)

    def unreadable(self) -> dict[int, str]:
        """Returns number of an image → why it does not decode."""
        reasons: dict[int, str] = {}
        for number_of_shard, shard in enumerate(self.shards):
            if shard.unreadable:
                numbers = np.flatnonzero(self.shard_of == number_of_shard)
                of_row = dict(zip(self.row_of[numbers].tolist(), numbers.tolist(), strict=True))
                reasons |= {of_row[row]: reason for row, reason in shard.unreadable.items() if row in of_row}
        return reasons

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Context in which no other run fills or prunes this store. Waits for one that does. Creates the folder."""
        with one_at_a_time(lock_file(self.folder), f"{self.folder}: waiting for another run to compute {self.what}"):
            with self._disk_errors():
                if not self.folder.exists():
                    self.folder.mkdir()
                    self.folder.chmod(self.cache.stat().st_mode & 0o777)  # for whom the cache is
                remove_unfinished(self.folder)  # of killed processes
                self._write_manifest()
            self.open([path.name for path in self._damaged])  # another run may have written them again
            for path, error in self._damaged.items():
                logger.warning("%s is damaged (%s): removing it, and computing its images again", path, error)
                with disk_errors(path):
                    path.unlink(missing_ok=True)
                self._seen.discard(path.name)  # it may be written again
            self._damaged = {}
            yield

    def _write_manifest(self) -> None:
        manifest = {"what": WHAT, "key": self.key, **self._parts, "width": self.width}
        try:
            written = read_manifest(self.folder)
            if all(written.get(key) == value for key, value in json.loads(json.dumps(manifest)).items()):
                return
            logger.warning("%s describes other features: writing it again", self.folder / MANIFEST)
        except FileNotFoundError:
            pass
        except Damaged as error:
            logger.warning("%s is damaged (%s): writing it again", self.folder / MANIFEST, error)
        write_manifest(self.folder, {**manifest, "created": datetime.now(UTC).isoformat(timespec="seconds")})

    def write(self, numbers: np.ndarray, features: Tensor, unreadable: Mapping[int, str]) -> Path:
        """Writes a shard (features [n,K] in the stored precision) and returns its path. Another thread may call this.

        `unreadable`: row of `features` → why its image does not decode.
        """
        with self._disk_errors():
            return write_shard(self.folder, self.key, self.contents[numbers], features, unreadable)

    def add(self, path: Path, numbers: np.ndarray) -> None:
        """Reads a shard back that `write` has written, and checks it."""
        self._open([path])
        if path in self._damaged or (self.shard_of[numbers] < 0).any():
            fault = self._damaged.get(path, "it is gone")
            raise UserError(f"{path}: differs from what was written to it ({fault}); check the disk")

    @property
    def bytes_needed(self) -> int:
        """Bytes of the missing features."""
        return int((self.shard_of < 0).sum()) * self.width * self.dtype.itemsize

    def require_space(self, extra_bytes: int = 0, is_full: bool = False) -> None:
        """Raises `UserError` if the missing features and `extra_bytes` do not fit on the disk, or if it `is_full`."""
        needed, free = self.bytes_needed + extra_bytes, shutil.disk_usage(self.cache).free
        if is_full or needed > free:
            raise UserError(
                f"{self.folder}: the disk is full: {self.what} need {needed / 1e6:,.1f} MB more, and "
                f"{free / 1e6:,.1f} MB are free; make room (xdm-ft cache prune) or set features.dir to another "
                f"disk{self.instead}, and run the same command again"
            )

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        """Context for writing to the folder. Raises `UserError` for a full disk or without permission."""
        try:
            with disk_errors(self.folder):
                yield
        except UserError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.ENOSPC, errno.EDQUOT):
                self.require_space(is_full=True)
            raise


def lock_file(folder: Path) -> Path:
    """Returns the lock of a store's folder, which prune removes with the folder locked: so the lock is beside it."""
    return folder.with_name(f"{folder.name}.lock")


class Lookup:
    """The features of a store as it is now. A folder that is missing or cannot be read holds none.

    It takes 36 bytes of memory per image of the store; the features stay in their memory-mapped files. Forked processes
    share both.
    """

    def __init__(self, folder: Path, key: str, width: int, dtype: torch.dtype) -> None:
        self.store = folder, key, width, dtype
        self.shards: list[Shard] = []
        self._intact: dict[int, bool] = {}  # by the number of the shard; its features are read once
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
        self._contents = ContentIndex(contents)
        self._shard = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        self._first = np.cumsum([0, *sizes])

    def __len__(self) -> int:
        return len(self._shard)

    def __reduce__(self) -> tuple[type[Lookup], tuple[Path, str, int, torch.dtype]]:
        return Lookup, self.store  # a spawned process maps the files itself

    def find(self, hashed: bytes) -> Tensor | str | None:
        """Returns the features [K] of the image with this hash, why it does not decode, or None if it is unknown."""
        position = int(self._contents.find(np.array([hashed], "S16"))[0])
        if position < 0:
            return None
        number = int(self._shard[position])
        shard, row = self.shards[number], position - int(self._first[number])
        if number not in self._intact:
            try:
                shard.check()
                self._intact[number] = True
            except Damaged:
                self._intact[number] = False
        return (shard.unreadable.get(row) or shard.features[row]) if self._intact[number] else None


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
        self.extracted = extracted  # images that the processes or tasks of this run computed; the others were cached
        self.device = torch.device(device)
        self.width = shards[0].shape[1]
        self._shards, self._files = shards, files
        self._ends = torch.tensor([len(shard) for shard in shards]).cumsum(0)
        places = torch.arange(int(self._ends[-1]))[None] if places is None else places
        self._places, self._rows = places.contiguous(), places.shape[1]
        self.views = len(places) - 1  # number of augmented views
        self._before = 0  # number of the views that are left out before the first of them
        self._normalized = False
        self._standard: tuple[Tensor, Tensor] | None = None  # mean and deviation [K]
        self._table: Tensor | None = None  # [(1 + views) · N, K]
        room = 0.0 if streamed else _memory_for_features(self.device) / max(1, places.numel() * self.width)
        # float32 even where bfloat16 is stored, as then no read converts
        fitting = [dtype for dtype in (torch.float32, shards[0].dtype) if dtype.itemsize <= room]
        if fitting:
            table = torch.empty(places.numel(), self.width, dtype=fitting[0], device=self.device)
            self._copy(places.reshape(-1), table)
            self._table = table

    def __reduce__(self) -> tuple[Any, ...]:
        """What is pickled is where the features are. They are left in their files there, until `to` is called."""
        assert self._files is not None and not (self._normalized or self._standard or self._before), (
            "features as `extract` returns them"
        )
        return self._files.open, (self._places, self.key, self.unreadable)

    def to(self, device: torch.device) -> Features:
        """Returns the same features on a device; in its memory, if they fit."""
        streamed = self._files is not None and self._files.streamed
        return Features(
            self._shards, self._places, key=self.key, unreadable=self.unreadable, device=device, streamed=streamed,
            files=self._files,
        )  # fmt: skip

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Features of `rows` in the plain view. Raises `IndexError` for a row outside 0…N−1."""
        return self._read(rows, self._rows)

    def of_views(self, rows: Tensor, numbers: Tensor) -> Tensor:
        """float32 [..., K]: each row (0…N−1) in the view of that number (0: plain, 1…`views`: augmented)."""
        if self._before:
            numbers = numbers + self._before * (numbers > 0)  # 0 is the plain one
        return self._read(numbers * self._rows + rows, (1 + self._before + self.views) * self._rows)

    def of_views_alone(self, before: int, count: int) -> Features:
        """The same features with `count` augmented views: those behind the first `before`. Shares the memory."""
        return self._changed(_before=self._before + before, views=count)

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
        if self._standard is not None:
            mean, deviation = self._standard
            z = z.sub_(mean).div_(deviation)
        return z.view(*positions.shape, self.width)

    def normalized(self) -> Features:
        """The same features, L2-normalised when they are read (zero rows stay zero). Shares this object's memory."""
        return self._changed(_normalized=True)

    def standardized(self, mean: Tensor, deviation: Tensor) -> Features:
        """The same features less a mean [K], divided by a deviation [K], when they are read. Shares the memory."""
        return self._changed(_standard=(mean.to(self.device), deviation.to(self.device)))

    def _changed(self, **attributes: Any) -> Features:
        changed = object.__new__(type(self))  # `copy.copy` would do what `__reduce__` says
        changed.__dict__.update(vars(self) | attributes)
        return changed

    def _gather(self, positions: Tensor, end: int) -> Tensor:
        """float32 [n,K] on the device, read shard by shard."""
        if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < end:
            raise IndexError(f"rows {int(positions.min())}…{int(positions.max())} are outside 0…{end - 1}")
        z = torch.empty(len(positions), self.width)
        self._copy(self._places.view(-1)[positions], z)
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

    def open(self, places: Tensor, key: str, unreadable: Mapping[int, str]) -> Features:
        """Returns unpickled features. Raises `UserError` if a file cannot be read here."""
        features = []
        for path, key_of_store in self.files:
            try:
                features.append(open_shard(path, key_of_store, self.width, self.dtype).features)
            except (Damaged, OSError) as error:
                raise UserError(f"features.dir: {path} cannot be read ({error})") from error
        return Features(self.shards(features), places, key=key, unreadable=unreadable, streamed=True, files=self)


def _is_range(numbers: Tensor) -> bool:
    """Whether each number follows the one before."""
    return bool((numbers.diff() == 1).all())


def _memory_for_features(device: torch.device) -> float:
    """Bytes of the device's free memory; on a CPU of this process's part, as ranks of a machine share its memory."""
    if device.type == "cuda":
        return GPU_FRACTION * torch.cuda.mem_get_info(device)[0]
    import psutil

    return MEMORY_FRACTION * psutil.virtual_memory().available / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def standard(features: Features, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the mean and the deviation float32 [K] of the features of some images; 1 where they do not vary."""
    total = torch.zeros(2, features.width, dtype=torch.float64)
    origin = features[rows[:1].to(features.device)].cpu().double()  # squares of far-off features cancel
    for some in rows.split(ROWS_AT_ONCE):
        z = features[some.to(features.device)].cpu().double() - origin
        total += torch.stack([z.sum(0), (z**2).sum(0)])
    mean, square = total / len(rows)
    deviation = (square - mean**2).clamp(min=0).sqrt().float()
    return (origin[0] + mean).float(), torch.where(deviation > 0, deviation, 1.0)
