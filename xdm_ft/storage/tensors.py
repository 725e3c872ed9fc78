"""Safetensors files of a run, whose metadata hold a checksum.

A hundred thousand small files are slow to write, read and copy, so heads that train together in a large run share one.
The weights of each, and its predictions, are entries (`storage.names`): the tensors of an entry are named
`<entry>/<name>`, and `<entry>/metadata` holds its own metadata with its checksum, as JSON in bytes. So one model is
checked and read without the others, and the file's header stays small.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from xdm_ft.runtime.errors import printable
from xdm_ft.storage import tensors_digest
from xdm_ft.storage.atomic import Replace, Together, order_metadata, replace_file
from xdm_ft.storage.lines import Damaged, json_object, one_line
from xdm_ft.storage.names import parts_of

Arrays = dict[str, np.ndarray]
CHECKSUM = "xxh3"  # key of the metadata of a safetensors file
METADATA = "metadata"  # name of the tensor with an entry's metadata
_OPEN_FILES = 64  # heads are read in the order of the recipe, in which those of several files may alternate


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], replace: Replace = replace_file
) -> None:
    """Writes a safetensors file atomically, by `replace`. Equal tensors and metadata give equal bytes.

    Raises `UserError` if the file cannot be written.
    """
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}

    def write(temporary: Path) -> None:
        try:
            save_file(kept, temporary, dict(metadata))
        except SafetensorError as error:
            # only the text says which error of the system it was, "(os error 28)" or "Os { code: 28"
            number = re.search(r"(?:os error |Os \{ code: )(\d+)", str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
        order_metadata(temporary)

    replace(path, write, sum(tensor.nbytes for tensor in kept.values()))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the memory-mapped tensors of a safetensors file by name, and its metadata. Verifies no checksum.

    Raises `Damaged`, or `FileNotFoundError` if there is no file.
    """
    with _as_damage(path), safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in sorted(file.keys())}, dict(file.metadata() or {})


Sizes = Mapping[str, Sequence[int | range]]
"""{name of a tensor: for each axis its size, or those that it may have}"""


def refuse_other_sizes(path: Path, wanted: Sizes) -> None:
    """Raises `Damaged` unless a safetensors file holds these tensors alone; no tensor is read."""
    with _as_damage(path), safe_open(path, framework="pt") as file:
        names = [*file.keys()]
        if foreign := [name for name in names if name not in wanted]:
            raise Damaged(f"{printable(foreign[0])[:80]} is no tensor of such a file")
        if missing := [name for name in wanted if name not in names]:
            raise Damaged(f"{missing[0]} is missing")
        for name, axes in wanted.items():
            shape = file.get_slice(name).get_shape()
            pairs = zip(shape, axes, strict=False)
            fit = [size in axis if isinstance(axis, range) else size == axis for size, axis in pairs]
            if len(shape) != len(axes) or not all(fit):
                sizes = [f"{a.start} to {a.stop - 1}" if isinstance(a, range) else str(a) for a in axes]
                raise Damaged(f"{name} has the shape {shape}, not [{', '.join(sizes)}]")


@contextmanager
def _as_damage(path: Path) -> Iterator[None]:
    """Context for reading a safetensors file. Raises `Damaged`, or `FileNotFoundError` if there is none."""
    if path.exists() and not path.is_file():
        raise Damaged("it is a folder" if path.is_dir() else "it is not a file")
    try:
        yield
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise Damaged(f"it is not a complete safetensors file: {one_line(error)}") from error


def write_checked(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], replace: Replace = replace_file
) -> str:
    """Writes a safetensors file as `write_tensors` does, with a checksum of its tensors and metadata: the result."""
    checksum = tensors_checksum(tensors, metadata)
    write_tensors(path, tensors, {**metadata, CHECKSUM: checksum}, replace)
    return checksum


def read_checked(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the memory-mapped tensors by name and the metadata that `write_checked` wrote, without the checksum.

    Reads all of the file. Raises `Damaged`, or `FileNotFoundError` if there is no file.
    """
    return read_with_checksum(path)[:2]


def read_with_checksum(path: Path, entry: str | None = None) -> tuple[dict[str, Tensor], dict[str, str], str]:
    """Returns what `read_checked` does, of an entry what `read_entry` does, and the checksum. Raises as they do."""
    if entry is not None:
        return _entry_with_checksum(path, entry)
    with _as_damage(path), safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata() or {})
        checksum = metadata.pop(CHECKSUM, None)
        if checksum is None:  # checked first, as a file that we did not write may have a million tensors
            raise Damaged("it has no checksum")
        tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
    if checksum != tensors_checksum(tensors, metadata):
        raise Damaged("its checksum differs")
    return tensors, metadata, checksum


def tensors_checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Returns the checksum that `write_checked` adds to the metadata."""
    return tensors_digest(dict(sorted(tensors.items())), json.dumps(sorted(metadata.items())))


def tensors_of(arrays: Arrays) -> dict[str, Tensor]:
    """Returns copies, because safetensors refuses tensors that share memory."""
    return {name: torch.tensor(array) for name, array in arrays.items()}


def read_entry(path: Path, entry: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the memory-mapped tensors of an entry by name, and its metadata. Reads all of the entry.

    Raises `Damaged`, or `FileNotFoundError` if there is no file.
    """
    return read_with_checksum(path, entry)[:2]


def _entry_with_checksum(path: Path, entry: str) -> tuple[dict[str, Tensor], dict[str, str], str]:
    tensors = read_unchecked(path, entry)
    try:
        # viewed as bytes, as a file that we did not write may hold anything
        metadata = json_object(tensors.pop(METADATA, torch.empty(0)).flatten().view(torch.uint8).numpy().tobytes())
    except Damaged as error:
        raise Damaged(f"metadata of {entry}: {error}") from error
    checksum = metadata.pop(CHECKSUM, None)
    if checksum != tensors_checksum(tensors, metadata):
        raise Damaged(f"the checksum of {entry} differs")
    return tensors, metadata, checksum


def read_unchecked(path: Path, entry: str) -> dict[str, Tensor]:
    """Returns the memory-mapped tensors of an entry and its metadata, unverified. Raises as `read_entry`."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(path) from error
    except OSError as error:
        raise Damaged(str(error.strerror)) from error
    file = _open_shared(path, (status.st_ino, status.st_size, status.st_mtime_ns))
    if entry not in file.names:
        raise Damaged(f"it lacks {entry}")
    return file.tensors(entry)


class _SharedFile:
    """An open file, whose tensors are made when they are read: making those of all heads takes long."""

    def __init__(self, path: Path, _state: tuple[int, ...] = ()) -> None:
        self._path = path
        with _as_damage(path):
            self._file = safe_open(path, framework="pt")
        self.names: dict[str, list[str]] = {}  # of each entry's tensors
        for full_name in sorted(self._file.keys()):
            entry, _, name = full_name.rpartition("/")
            self.names.setdefault(entry, []).append(name)

    def tensors(self, entry: str) -> dict[str, Tensor]:
        with _as_damage(self._path):
            return {name: self._file.get_tensor(f"{entry}/{name}") for name in self.names[entry]}


_open_shared = lru_cache(_OPEN_FILES)(_SharedFile)  # by path, inode, size and time of the last change


class TensorFiles(Together):
    """Safetensors files with checksums that are replaced together. Entries of the same file are written at once."""

    def __init__(self) -> None:
        super().__init__()
        self._shared: dict[Path, dict[str, dict[str, Tensor]]] = {}

    @property
    def waiting_bytes(self) -> int:
        """The size of the entries that wait in memory for `replace`."""
        entries = (tensors for of_file in self._shared.values() for tensors in of_file.values())
        return sum(tensor.nbytes for tensors in entries for tensor in tensors.values())

    def put(self, folder: Path, address: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
        """Adds the tensors at an address below `folder`, and returns their checksum. Errors as for `add`."""
        file, entry = parts_of(address)
        if entry is None:
            return write_checked(folder / file, tensors, metadata, self.add)
        checksum = tensors_checksum(tensors, metadata)
        header = json.dumps({**metadata, CHECKSUM: checksum}, sort_keys=True).encode()
        # copies, as heads that train together may share memory, which the tensors of a file cannot
        kept = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        kept[METADATA] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        self._shared.setdefault(folder / file, {})[entry] = kept
        return checksum

    def replace(self) -> None:
        """Replaces the files that were added; a shared file keeps its other entries, as they are."""
        for path, new in self._shared.items():
            try:
                old = _SharedFile(path)
                entries = {entry: old.tensors(entry) for entry in old.names} | new
            except (FileNotFoundError, Damaged):  # whose models are all trained again
                entries = new
            named = {f"{entry}/{name}": tensor for entry in entries for name, tensor in entries[entry].items()}
            write_tensors(path, named, {}, self.add)
        self._shared = {}
        super().replace()
