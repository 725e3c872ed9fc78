"""Bags of features in files, as tools for slides write them: one row per patch, which are pooled to one row per bag.

HDF5 with `features` [n,K] or [1,n,K] (TRIDENT, CLAM), a tensor in .pt (CLAM), or an array in .npy (torchmil). One
dimension [K], as slide encoders write, is a bag of one row. Attributes and `coords` are not read.

`<cache>/bags.sqlite` has {path and state of a file: hash of its content} and {hash: number, mean and maximum of
its rows}, so that an unchanged file is not read again, whatever the pooling.
"""

from __future__ import annotations

import math
import os
import pickle
import time
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from xdm_ft.image_files.tables import on_disk
from xdm_ft.images.decode import OF_THE_MACHINE, UnreadableImage
from xdm_ft.runtime.errors import UserError, did_you_mean, printable
from xdm_ft.runtime.progress import progress
from xdm_ft.storage.atomic import is_writable
from xdm_ft.storage.cache_root import cache_root, one_at_a_time
from xdm_ft.storage.facts import WRITTEN, Facts, hash_file, regular_file, stamp
from xdm_ft.storage.lines import one_line

BagPool = Literal["mean", "max", "mean_max"]
BagUnit = Literal["slide", "group"]
SUFFIXES = (".h5", ".pt", ".npy")
FEATURES = "features"  # name of the array in HDF5
INDEX = "bags.sqlite"
FILES_AT_ONCE = 256  # whose facts are looked up together
BLOCK = 1 << 22  # numbers of a bag that are in memory
SECONDS = 1.0  # of reading, which a kill loses at most, with the bag that was read


class Bag(NamedTuple):
    """What pools the rows of a file."""

    size: int  # number of rows
    mean: np.ndarray  # float64 [K]
    maximum: np.ndarray  # float32 [K]


def pooled(bags: Sequence[Bag], pool: BagPool) -> np.ndarray:
    """Returns the rows of several files as one bag, pooled: float32 [K], or [2K] for `mean_max`.

    In whatever order they are named, the bits are equal.
    """
    bags = sorted(bags, key=lambda bag: bag.mean.tobytes())
    size = sum(bag.size for bag in bags)
    mean = sum(bag.mean * (bag.size / size) for bag in bags)
    maximum = np.max([bag.maximum for bag in bags], axis=0)
    parts = {"mean": (mean,), "max": (maximum,), "mean_max": (mean, maximum)}
    return np.concatenate(parts[pool]).astype(np.float32)


def files_of_slide(folder: str | Path, name: str) -> list[str]:
    """Returns the paths from the folder of the files of a slide, which has one."""
    names = [f"{name}{suffix}" for suffix in SUFFIXES]
    return [name for name in names if os.path.lexists(on_disk(folder, name))]


def read_bags(files: Sequence[str], show: bool) -> Iterator[Bag | str]:
    """Yields the bag of each file, or why it cannot be read. Files of known content are not read, others are added.

    Of several processes one reads, and the others wait for what it finds. Raises `UserError` if h5py is missing, or for
    a file that is being written.
    """
    root = cache_root()
    with suppress(OSError):  # nothing is remembered
        root.mkdir(parents=True, exist_ok=True)
    facts = Facts(root if is_writable(root) else None, INDEX, "XDM_FT_CACHE")
    with progress("reading", len(files), "bags", show) as bar:
        for first in range(0, len(files), FILES_AT_ONCE):
            some = files[first : first + FILES_AT_ONCE]
            bags = _known(some, facts)
            bar.skip(len(bags))
            if len(bags) < len(set(some)):
                alone = one_at_a_time(root / f"{INDEX}.lock") if facts.path else nullcontext()
                with alone:
                    bags |= _known([file for file in some if file not in bags], facts)
                    missing = [file for file in dict.fromkeys(some) if file not in bags]
                    for file, bag in _read_new(missing, facts):
                        bags[file] = bag
                        bar.advance()
            yield from (bags[file] for file in some)


def _known(files: Sequence[str], facts: Facts) -> dict[str, Bag | str]:
    """Returns the bags of those files whose content is in the index."""
    keys = dict[str, bytes]()
    for file in files:
        try:
            keys[file] = _file_key(file, stamp(regular_file(file)))
        except (OSError, ValueError):  # said when it is read
            continue
    contents = facts.find(keys.values())
    found = facts.find({*contents.values()})
    return {
        file: _unpacked(found[contents[key]])
        for file, key in keys.items()
        if key in contents and contents[key] in found
    }


def _file_key(file: str, state: tuple[int, int, int]) -> bytes:
    return Facts.key("bag file", np.array(state, np.int64).tobytes(), os.fsencode(os.path.abspath(file)))


def _read_new(files: Sequence[str], facts: Facts) -> Iterator[tuple[str, Bag | str]]:
    """Yields each file with its bag, or why it cannot be read, and adds the bags to the index."""
    new, due = dict[bytes, bytes](), time.monotonic() + SECONDS
    try:
        for file in files:
            try:
                regular_file(file)
                state, digest = hash_file(file)
                content = Facts.key("bag", digest)
                known = facts.find([content]).get(content)  # a copy, or a file that was moved
                bag = read_bag(file) if known is None else _unpacked(known)
                if stamp(os.stat(file)) != state:
                    raise UserError(f"{file}: {WRITTEN}")
            except UnreadableImage as error:
                yield file, error.reason
                continue
            except (OSError, ValueError) as error:  # ValueError: not a regular file, a null byte in the path
                if isinstance(error, OSError) and error.errno in OF_THE_MACHINE:
                    raise
                yield file, getattr(error, "strerror", None) or str(error)
                continue
            new |= {_file_key(file, state): content, content: _packed(bag)}
            if time.monotonic() >= due:
                facts.add(new)
                new, due = {}, time.monotonic() + SECONDS
            yield file, bag
    finally:
        facts.add(new)


def _packed(bag: Bag) -> bytes:
    return np.int64(bag.size).tobytes() + bag.mean.tobytes() + bag.maximum.tobytes()


def _unpacked(fact: bytes) -> Bag:
    width = (len(fact) - 8) // 12
    size, mean = np.frombuffer(fact, np.int64, 1), np.frombuffer(fact, np.float64, width, 8)
    return Bag(int(size[0]), mean, np.frombuffer(fact, np.float32, width, 8 + 8 * width))


# ---- One file


def read_bag(file: str) -> Bag:
    """Reads a file in blocks of rows, always the same ones: three formats of one array give the same bits.

    Raises `UnreadableImage` for what is no bag of finite floats, and `UserError` if h5py is missing.
    """
    with _rows_of(file) as rows:
        shape = [*rows.shape]
        first: tuple[int, ...] = (0,) if len(shape) == 3 and shape[0] == 1 else ()
        if not _is_floating(rows) or len(shape) - len(first) not in (1, 2):
            kind = str(rows.dtype).removeprefix("torch.")
            raise UnreadableImage(file, f"{FEATURES} is {kind} {shape}; it must be floating, [n,K], [1,n,K] or [K]")
        if not math.prod(shape):
            raise UnreadableImage(file, f"is empty: {FEATURES} is {shape}")
        count, width = (1, shape[0]) if len(shape) == 1 else shape[-2:]
        total, maximum = np.zeros(width), np.full(width, -np.inf, np.float32)
        at_once = max(1, BLOCK // width)
        for start in range(0, count, at_once):
            block = rows[:] if len(shape) == 1 else rows[(*first, slice(start, start + at_once))]
            z = _float32(block).reshape(-1, width)
            if (broken := np.flatnonzero(~np.isfinite(z).all(1))).size:
                problem = f"row {start + broken[0]} is not finite (NaN, ±∞ or beyond float32)"
                raise UnreadableImage(file, problem)
            total += z.sum(0, dtype=np.float64)
            maximum = np.maximum(maximum, z.max(0))
    return Bag(count, total / count, maximum)


def _is_floating(rows: Any) -> bool:
    return bool(rows.is_floating_point() if hasattr(rows, "is_floating_point") else rows.dtype.kind == "f")


def _float32(block: Any) -> np.ndarray:
    with np.errstate(over="ignore"):  # ∞ is refused with its row
        return np.asarray(block.float() if hasattr(block, "is_floating_point") else block, np.float32)


@contextmanager
def _rows_of(file: str) -> Iterator[Any]:
    """Yields the array of a file, of which slices are read from the disk. Raises `UnreadableImage`."""
    kind = Path(file).suffix.lower()
    if kind not in SUFFIXES:
        raise UnreadableImage(file, f"is no bag; its name must end in {', '.join(SUFFIXES)}")
    try:
        if kind == ".h5":
            with _hdf5(file) as rows:
                yield rows
        else:
            yield _tensor(file) if kind == ".pt" else _array(file)
    except (UnreadableImage, UserError, MemoryError):
        raise
    except Exception as error:  # of the file's library, for damage: nearly any type
        if isinstance(error, OSError) and error.errno in OF_THE_MACHINE:
            raise
        reason = printable(one_line(error))[:120] or type(error).__name__
        raise UnreadableImage(file, f"cannot be read ({reason}); write it again") from error


@contextmanager
def _hdf5(file: str) -> Iterator[Any]:
    try:
        import h5py
    except ImportError as error:
        raise UserError(f"{file}: HDF5 needs h5py, not installed here; pip install 'xdm_ft[bags]'") from error

    with h5py.File(file, "r", locking="best-effort") as content:
        rows = content.get(FEATURES)
        if not isinstance(rows, h5py.Dataset):
            others = [name for name in content if name != FEATURES]  # it may be a group, or a link to nothing
            raise UnreadableImage(file, f'has no array "{FEATURES}"{did_you_mean(FEATURES, others)}')
        if rows.shape is None:
            raise UnreadableImage(file, f"is empty: {FEATURES} has no values")
        if rows.is_virtual or rows.external or rows.file.filename != content.filename:
            raise UnreadableImage(file, f"{FEATURES} lies in another file; copy it into this one")
        # what was never written reads as zeros
        chunks = rows.chunks and math.prod(-(-n // of) for n, of in zip(rows.shape, rows.chunks, strict=True))
        is_written = rows.id.get_num_chunks() >= chunks if chunks else rows.id.get_storage_size() >= rows.nbytes
        if not is_written:
            raise UnreadableImage(file, f"{FEATURES} was not written to its end; write it again")
        yield rows


def _tensor(file: str) -> Any:
    import torch

    try:
        # a file in the old format, which is no zip, cannot be mapped
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of kinds of tensors that are refused below
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError as error:
        problem = "holds Python objects, which can run code, or is damaged; save the tensor of features alone"
        raise UnreadableImage(file, problem) from error
    if not isinstance(content, torch.Tensor) or content.layout != torch.strided:
        kind = content.layout if isinstance(content, torch.Tensor) else type(content).__name__
        raise UnreadableImage(file, f"holds {kind}, not a tensor; save the tensor of features alone")
    return content.detach()


def _array(file: str) -> np.ndarray:
    rows = np.load(file, mmap_mode="r", allow_pickle=False)
    if not isinstance(rows, np.ndarray):
        raise UnreadableImage(file, "is no array in .npy; write it with numpy.save")
    return rows
