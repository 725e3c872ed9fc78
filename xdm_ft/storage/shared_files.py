"""Files that the heads of a large run share, as a hundred thousand small files are slow to write, read and copy.

Heads that train together share one. The weights of each, and its predictions, are entries (`storage.addresses`). The
tensors of an entry are named `<entry>/<name>`, and the file's metadata hold for each entry a JSON object: the entry's
own metadata with its checksum. So one model is checked and read without the others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from xdm_ft.storage.addresses import parts_of
from xdm_ft.storage.atomic import Together
from xdm_ft.storage.checksummed import (
    CHECKSUM,
    Damaged,
    json_object,
    read_tensors,
    tensors_checksum,
    write_checked,
    write_tensors,
)

_OPEN_FILES = 4


class Entry(NamedTuple):
    tensors: Mapping[str, Tensor]
    about: str  # its metadata with the checksum, as JSON


def read_entry(path: Path, entry: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the memory-mapped tensors of an entry by name, and its metadata. Reads all of the entry.

    Raises `Damaged`, or `FileNotFoundError` if there is no file.
    """
    found = entries(path).get(entry)
    if found is None:
        raise Damaged(f"it lacks {entry}")
    try:
        metadata = json_object(found.about.encode())
    except Damaged as error:
        raise Damaged(f"metadata of {entry}: {error}") from error
    if metadata.pop(CHECKSUM, None) != tensors_checksum(found.tensors, metadata):
        raise Damaged(f"the checksum of {entry} differs")
    return dict(found.tensors), metadata


def entries(path: Path) -> dict[str, Entry]:
    """Returns the entries of a shared file; verifies nothing. Errors as for `read_entry`."""
    status = path.stat()
    return _entries(path, (status.st_ino, status.st_size, status.st_mtime_ns))


@lru_cache(_OPEN_FILES)
def _entries(path: Path, _state: tuple[int, int, int]) -> dict[str, Entry]:
    tensors, metadata = read_tensors(path)
    of_entry: dict[str, dict[str, Tensor]] = {entry: {} for entry in metadata}
    for place, tensor in tensors.items():
        entry, _, name = place.rpartition("/")
        of_entry.setdefault(entry, {})[name] = tensor
    return {entry: Entry(found, metadata.get(entry, "")) for entry, found in of_entry.items()}


class TensorFiles(Together):
    """Safetensors files with checksums that are replaced together. Entries of the same file are written at once."""

    def __init__(self) -> None:
        super().__init__()
        self._shared: dict[Path, dict[str, Entry]] = {}

    @property
    def has_entries(self) -> bool:
        """Whether entries wait in memory for `replace`."""
        return bool(self._shared)

    def put(self, folder: Path, address: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Adds the tensors at an address below `folder`. Errors as for `add`."""
        file, entry = parts_of(address)
        if entry is None:
            write_checked(folder / file, tensors, metadata, self.add)
        else:
            about = {**metadata, CHECKSUM: tensors_checksum(tensors, metadata)}
            self._shared.setdefault(folder / file, {})[entry] = Entry(tensors, json.dumps(about, sort_keys=True))

    def replace(self) -> None:
        """Replaces the files that were added; a shared file keeps its other entries, as they are."""
        for path, new in self._shared.items():
            try:
                found = entries(path) | new
            except (FileNotFoundError, Damaged):  # whose models are all trained again
                found = new
            tensors = {
                # heads that train together may share memory, which a file of tensors can not
                f"{entry}/{name}": tensor.detach().cpu().clone()
                for entry in sorted(found)
                for name, tensor in found[entry].tensors.items()
            }
            write_tensors(path, tensors, {entry: of.about for entry, of in found.items()}, self.add)
        self._shared = {}
        super().replace()
