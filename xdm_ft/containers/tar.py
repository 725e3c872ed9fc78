"""The members of a tar of images, found once: where each image lies, and what is said about it."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, NamedTuple

from pydantic import Field

from xdm_ft.containers.remote import is_remote, open_file
from xdm_ft.containers.tables import encode_names
from xdm_ft.images.dataset import FileState
from xdm_ft.images.decode import extensions
from xdm_ft.runtime.errors import UserError, did_you_mean, printable
from xdm_ft.runtime.settings import Block

if TYPE_CHECKING:
    from pyarrow import Table

START, SIZE, MEMBER = "\0start", "\0size", "\0member"  # columns of an index; no key of KEY.json is named so
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


class _Sample(NamedTuple):
    """The members of one key."""

    key: str
    image: tarfile.TarInfo | None
    label: str | None  # in KEY.cls
    about: dict[str, Any]  # in KEY.json


def read_tar(address: str, state: FileState, keys: Mapping[str, str | None]) -> Table:
    """Returns a row for each image of a tar, in the order of its members: `START` and `SIZE` (bytes), `MEMBER` (name).

    `keys`: {label, domain, group or split: its key in KEY.json, None: it is not there}; each is a column. The label may
    be in KEY.cls instead. Keys without an image are skipped. Raises `UserError`, one line.
    """
    import pyarrow

    samples = [sample for sample in _samples(address, state) if sample.image is not None]
    if not samples:
        raise UserError(f"{address}: the tar contains no images (known by their extensions); remove it")
    images = [sample.image for sample in samples if sample.image is not None]
    columns = {
        START: pyarrow.array([image.offset_data for image in images], pyarrow.int64()),
        SIZE: pyarrow.array([image.size for image in images], pyarrow.int64()),
        MEMBER: pyarrow.array([image.name for image in images], pyarrow.large_string()),
    }
    for name, key in keys.items():
        if key is not None:
            cells = [_cell(address, sample, name, key) for sample in samples]
            kinds = sorted({type(cell).__name__ for cell in cells} - {"NoneType"})
            if len(kinds) > 1:
                many = f"has values of several types ({', '.join(kinds)})"
                raise UserError(f"{address}: key {key} {many}; write one type")
            columns[name] = encode_names(pyarrow.chunked_array([cells]), f"{printable(address)}: key {key}")
    return pyarrow.table(columns)


def _cell(address: str, sample: _Sample, name: str, key: str) -> Any:
    if name == "label" and sample.label is not None and key not in sample.about:
        return sample.label
    place = f"{printable(address)}: {printable(sample.key)}.json"
    if key not in sample.about:
        if not sample.about:
            instead = f" or {printable(sample.key)}.cls" if name == "label" else ""
            raise UserError(f'{place}: it must exist and have the key "{key}"{instead}')
        raise UserError(f'data.keys.{name}: {place} has no key "{key}"{did_you_mean(key, list(sample.about))}')
    cell = sample.about[key]
    if not isinstance(cell, str | int | float | None):
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
                raise UserError(f"{address}: {first} are two images of one key; give each its own key")
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
        raise UserError(f"{place}: can not be read ({error}); write it as UTF-8 text") from error
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
        reader = open_file(address, state, REMOTE_BYTES if is_remote(address) else LOCAL_BYTES)
        # mode "r:" refuses a compressed tar, of which no range can be read
        with reader, tarfile.open(fileobj=reader, mode="r:") as file:
            for member in file:
                offset, after = min(file.offset, state.size), f", after the member {printable(member.name)}"
                extension = _key_and_extension(member.name)[1]
                if member.isreg() and not member.issparse():
                    content = file.extractfile(member) if extension in (LABEL, "json") else None
                    yield member, None if content is None else content.read()
                elif f".{extension.lower()}" in extensions() and not member.isdir():
                    raise UserError(
                        f"{address}: {member.name} is a link or sparse; write each image in full "
                        "(GNU tar: --dereference --hard-dereference, without --sparse)"
                    )
                file.members = []  # type: ignore[attr-defined]  # else it keeps all of them
            # tarfile takes a header that it can not read, and the end of the file, for the end of the tar
            problem = _fault_of_end(reader, offset := file.offset)
    except (tarfile.TarError, EOFError) as error:
        problem = f"can not be read as a tar ({printable(error)})"
    if problem is not None:
        remedy = "copy the file again, or write it again as one tar without compression"
        raise UserError(f"{address}: byte {offset}{after}: {problem}; {remedy}")


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
