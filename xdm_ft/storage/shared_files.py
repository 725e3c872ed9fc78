"""Files that the heads of a large run share, as a hundred thousand small files are slow to write, read and copy.

Heads that train together share one. The weights of each, and its predictions, are entries (`storage.names`). The
tensors of an entry are named `<entry>/<name>`, and `<entry>/metadata` holds its own metadata with its checksum, as JSON
in bytes. So one model is checked and read without the others, and the file's header stays small.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from xdm_ft.storage.atomic import Together
from xdm_ft.storage.checksummed import (
    CHECKSUM,
    Damaged,
    as_damage,
    json_object,
    tensors_checksum,
    write_checked,
    write_tensors,
)
from xdm_ft.storage.names import parts_of

METADATA = "metadata"  # name of the tensor with an entry's metadata
_OPEN_FILES = 64  # heads are read in the order of the recipe, in which those of several files may alternate


def read_entry(path: Path, entry: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the memory-mapped tensors of an entry by name, and its metadata. Reads all of the entry.

    Raises `Damaged`, or `FileNotFoundError` if there is no file.
    """
    tensors = unchecked_entry(path, entry)
    try:
        # viewed as bytes, as a file that we did not write may hold anything
        metadata = json_object(tensors.pop(METADATA, torch.empty(0)).flatten().view(torch.uint8).numpy().tobytes())
    except Damaged as error:
        raise Damaged(f"metadata of {entry}: {error}") from error
    if metadata.pop(CHECKSUM, None) != tensors_checksum(tensors, metadata):
        raise Damaged(f"the checksum of {entry} differs")
    return tensors, metadata


def unchecked_entry(path: Path, entry: str) -> dict[str, Tensor]:
    """Returns the memory-mapped tensors of an entry and its metadata, unverified. Raises as `read_entry`."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(path) from error
    except OSError as error:
        raise Damaged(str(error.strerror)) from error
    file = _opened(path, (status.st_ino, status.st_size, status.st_mtime_ns))
    if entry not in file.names:
        raise Damaged(f"it lacks {entry}")
    return file.tensors(entry)


class _SharedFile:
    """An open file, whose tensors are made when they are read: making those of all heads takes long."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with as_damage(path):
            self._file = safe_open(path, framework="pt")
        self.names: dict[str, list[str]] = {}  # of each entry's tensors
        for place in sorted(self._file.keys()):
            entry, _, name = place.rpartition("/")
            self.names.setdefault(entry, []).append(name)

    def tensors(self, entry: str) -> dict[str, Tensor]:
        with as_damage(self._path):
            return {name: self._file.get_tensor(f"{entry}/{name}") for name in self.names[entry]}


@lru_cache(_OPEN_FILES)
def _opened(path: Path, _state: tuple[int, int, int]) -> _SharedFile:
    return _SharedFile(path)


class TensorFiles(Together):
    """Safetensors files with checksums that are replaced together. Entries of the same file are written at once."""

    def __init__(self) -> None:
        super().__init__()
        self._shared: dict[Path, dict[str, dict[str, Tensor]]] = {}

    @property
    def waiting_bytes(self) -> int:
        """The size of the entries that wait in memory for `replace`."""
        waiting = (tensors for entries in self._shared.values() for tensors in entries.values())
        return sum(tensor.nbytes for tensors in waiting for tensor in tensors.values())

    def put(self, folder: Path, address: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Adds the tensors at an address below `folder`. Errors as for `add`."""
        file, entry = parts_of(address)
        if entry is None:
            write_checked(folder / file, tensors, metadata, self.add)
            return
        about = json.dumps({**metadata, CHECKSUM: tensors_checksum(tensors, metadata)}, sort_keys=True).encode()
        # copies, as heads that train together may share memory, which the tensors of a file can not
        kept = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        kept[METADATA] = torch.frombuffer(bytearray(about), dtype=torch.uint8)
        self._shared.setdefault(folder / file, {})[entry] = kept

    def replace(self) -> None:
        """Replaces the files that were added; a shared file keeps its other entries, as they are."""
        for path, new in self._shared.items():
            try:
                old = _SharedFile(path)
                found = {entry: old.tensors(entry) for entry in old.names} | new
            except (FileNotFoundError, Damaged):  # whose models are all trained again
                found = new
            named = {f"{entry}/{name}": tensor for entry in found for name, tensor in found[entry].items()}
            write_tensors(path, named, {}, self.add)
        self._shared = {}
        super().replace()
