"""The members of a tar of images, found once: where each image lies, and what is said about it."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, BinaryIO, NamedTuple

import numpy as np
from pydantic import Field

from xdm_ft.containers.named_columns import PLAIN, Column
from xdm_ft.images.decode import extensions
from xdm_ft.runtime.errors import UserError, did_you_mean, printable
from xdm_ft.runtime.settings import Block
from xdm_ft.storage.remote import FileInParts, FileState, is_remote, read_range

BLOCK = 512  # bytes, of which a tar consists
REMOTE_BYTES = 1 << 24  # of a remote tar, per request
LOCAL_BYTES = 1 << 13  # of a local tar: its headers are read, and images skipped
LABEL = "cls"  # extension of the member that holds the class


class Keys(Block):
    """The keys of KEY.json."""

    label: Annotated[str, Field(description="key of the class: text or an integer; without it, KEY.cls holds it")] = (
        "label"
    )
    domain: Annotated[str | None, Field(description="key of the domain; null: the name of the tar's folder")] = None
    group: Annotated[
        str | None, Field(description="key of the patient, slide or sequence; null: images are independent")
    ] = None
    split: Annotated[
        str | None, Field(description="key with train, val or test; null: the data have no split of their own")
    ] = None


OWN_KEYS = Keys()


class TarIndex(NamedTuple):
    """The n images of a tar, in the order of its members."""

    starts: np.ndarray  # int64 [n]: first byte
    sizes: np.ndarray  # int64 [n]: bytes
    names: list[str]  # of the members
    columns: dict[str, Column]

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns all of it as arrays; `TarIndex.read` of them is the index again."""
        about = json.dumps({"columns": list(self.columns), "names": self.names}).encode()
        found = {"starts": self.starts, "sizes": self.sizes, "about": np.frombuffer(about, np.uint8)}
        for name, column in self.columns.items():
            found |= column.arrays(name)
        return found

    @classmethod
    def read(cls, arrays: Mapping[str, np.ndarray]) -> TarIndex:
        about = json.loads(arrays["about"].tobytes())
        columns = {name: Column.read(arrays, name) for name in about["columns"]}
        return cls(arrays["starts"], arrays["sizes"], about["names"], columns)


class Members:
    """The images of a piece."""

    def __init__(self, data: bytes, starts: np.ndarray, sizes: np.ndarray) -> None:
        self.data, self.starts, self.sizes = data, starts - starts[0], sizes

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def __getitem__(self, place: int) -> bytes:
        start = int(self.starts[place])
        return self.data[start : start + int(self.sizes[place])]


class _Sample(NamedTuple):
    """The members of one key."""

    key: str
    image: tarfile.TarInfo | None
    label: str | None  # in KEY.cls
    about: dict[str, Any]  # in KEY.json


def read_tar(address: str, state: FileState, keys: Mapping[str, str | None]) -> TarIndex:
    """Returns the index of a tar. `keys`: {label, domain, group or split: its key in KEY.json, None: it is not there}.

    The label may be in KEY.cls instead. Keys without an image are skipped. Raises `UserError`, one line.
    """
    found = [sample for sample in _samples(address, state) if sample.image is not None]
    if not found:
        raise UserError(f"{printable(address)}: the tar contains no images (known by their extensions); remove it")
    columns = {}
    for name, key in keys.items():
        if key is not None:
            columns[name] = Column.of(_cell(address, sample, name, key) for sample in found)
    images = [sample.image for sample in found if sample.image is not None]
    starts, sizes = ([getattr(one, name) for one in images] for name in ("offset_data", "size"))
    return TarIndex(np.array(starts, np.int64), np.array(sizes, np.int64), [one.name for one in images], columns)


def _cell(address: str, sample: _Sample, name: str, key: str) -> Any:
    if name == "label" and sample.label is not None and key not in sample.about:
        return sample.label
    if key not in sample.about:
        place = f"{printable(address)}: {printable(sample.key)}.json"
        if not sample.about:
            instead = f" or {printable(sample.key)}.cls" if name == "label" else ""
            raise UserError(f'{place}: it must exist and have the key "{key}"{instead}')
        raise UserError(f'data.keys.{name}: {place} has no key "{key}"{did_you_mean(key, list(sample.about))}')
    cell = sample.about[key]
    if not isinstance(cell, PLAIN):
        place = f"{printable(address)}: {printable(sample.key)}.json"
        raise UserError(f"{place}, key {key}: a name must be text or a number; write it as text")
    return cell


def _samples(address: str, state: FileState) -> Iterator[_Sample]:
    """Yields the keys of a tar. The members of a key follow each other, as in WebDataset."""
    sample = _Sample("", None, None, {})
    for member, content in _members(address, state):
        key, extension = _key_and_extension(member.name)
        if key != sample.key:
            yield sample
            sample = _Sample(key, None, None, {})
        if f".{extension.lower()}" in extensions():
            if sample.image is not None:
                first = f"{printable(sample.image.name)} and {printable(member.name)}"
                raise UserError(f"{printable(address)}: {first} are two images of one key; give each its own key")
            sample = sample._replace(image=member)
        elif content is not None:
            sample = _with(sample, extension, content, f"{printable(address)}: {printable(member.name)}")
    yield sample


def _key_and_extension(name: str) -> tuple[str, str]:
    """Returns `folder/key` and `extension` of the member folder/key.extension, as WebDataset cuts it."""
    folder, base = os.path.split(name)
    stem, _, extension = base.partition(".")
    return os.path.join(folder, stem), extension


def _with(sample: _Sample, extension: str, content: bytes, place: str) -> _Sample:
    """Returns the sample with what its KEY.cls or KEY.json says."""
    try:
        if extension == LABEL:
            return sample._replace(label=content.decode().strip())
        about = json.loads(content)
    except ValueError as error:
        raise UserError(f"{place}: can not be read ({printable(error)}); write it as UTF-8 text") from error
    if not isinstance(about, dict):
        raise UserError(f"{place}: it must be a JSON object, with a key for each name")
    return sample._replace(about=about)


def _members(address: str, state: FileState) -> Iterator[tuple[tarfile.TarInfo, bytes | None]]:
    """Yields the regular files in a tar, KEY.cls and KEY.json with their bytes. A remote tar is read once, from front
    to back.

    Raises `UserError` where the tar is damaged or cut, and for an image that is a link or sparse.
    """
    offset, after = 0, ""
    try:
        reader = io.BufferedReader(_Blocks(address, state), BLOCK)
        # mode "r:" refuses a compressed tar, of which no range can be read
        with tarfile.open(fileobj=reader, mode="r:") as file:
            for member in file:
                offset, after = min(file.offset, state.size), f", after the member {printable(member.name)}"
                extension = _key_and_extension(member.name)[1]
                if member.isreg() and not member.issparse():
                    content = file.extractfile(member) if extension in (LABEL, "json") else None
                    yield member, None if content is None else content.read()
                elif f".{extension.lower()}" in extensions() and not member.isdir():
                    raise UserError(
                        f"{printable(address)}: {printable(member.name)} is a link or sparse; write each image in full "
                        "(GNU tar: --dereference --hard-dereference, without --sparse)"
                    )
                file.members = []  # type: ignore[attr-defined]  # else it keeps all of them
            # tarfile takes a header that it can not read, and the end of the file, for the end of the tar
            problem = _fault_of_end(reader, offset := file.offset)
    except (tarfile.TarError, EOFError) as error:
        problem = f"can not be read as a tar ({printable(error)})"
    if problem is not None:
        remedy = "copy the file again, or write it again as one tar without compression"
        raise UserError(f"{printable(address)}: byte {offset}{after}: {problem}; {remedy}")


def _fault_of_end(reader: BinaryIO, offset: int) -> str | None:
    """Returns what is wrong if the tar does not end at `offset`, with two blocks of zeros and zeros behind them."""
    reader.seek(offset)
    end = reader.read(2 * BLOCK)
    if end[:BLOCK].strip(b"\0"):
        return "damaged: here is neither a member nor the end of the tar"
    if len(end) < 2 * BLOCK:
        return "cut: the file ends without the two blocks of zeros that end a tar"
    while end:
        if end.strip(b"\0"):
            return "the tar ends here, but other data follow"
        end = reader.read(1 << 20)
    return None


class _Blocks(FileInParts):
    """A file that is read in large blocks, of which the last one is kept."""

    def __init__(self, address: str, state: FileState) -> None:
        super().__init__(address, state)
        self.block = REMOTE_BYTES if is_remote(address) else LOCAL_BYTES
        self.first, self.data = 0, b""

    def readinto(self, buffer: Any) -> int:
        if self.place >= self.length:
            return 0
        if not self.first <= self.place < self.first + len(self.data):
            stop = min(self.place + self.block, self.length)
            self.first, self.data = self.place, read_range(self.address, self.place, stop, self.length)
        part = self.data[self.place - self.first :][: len(buffer)]
        buffer[: len(part)] = part
        self.place += len(part)
        return len(part)
