"""Images in tars, as WebDataset writes them: KEY.jpg (or another image), with KEY.cls or KEY.json."""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, NamedTuple

import numpy as np
from pydantic import Field

from xdm_ft.image_files import CacheSize, PiecedImages, in_loader, open_files
from xdm_ft.image_files.files import (
    BEGIN_BYTES,
    Kinds,
    beside,
    count_files,
    index_names,
    is_split,
    kind_of,
    kinds_of,
    looks_like_data,
    not_read,
)
from xdm_ft.image_files.remote import is_remote, list_files, open_file, read_range
from xdm_ft.image_files.tables import (
    OWN_KEYS,
    Keys,
    encode_names,
    is_of_class,
    join_tables,
    name_columns,
    remember_table,
    soft_labels_not_read,
)
from xdm_ft.images import Container, FileState, Pieces
from xdm_ft.images.decode import HEIC, extensions
from xdm_ft.runtime.errors import UserError, did_you_mean, printable

if TYPE_CHECKING:
    from pyarrow import Table

PIECE_BYTES = 1 << 23  # of consecutive images that are read together, at least
BRACES = re.compile(r"\{([^{}]*)\}")
START, SIZE, MEMBER = "\0start", "\0size", "\0member"  # columns of an index; no key of KEY.json is named so
BLOCK = 512  # bytes, of which a tar consists
REMOTE_BYTES = 1 << 24  # of a remote tar, per request
LOCAL_BYTES = 1 << 13  # of a local tar: its headers are read, and images skipped
LABEL = ".cls"  # extension of the member that holds the class


class WebDataset(PiecedImages):
    """The images of the tars, in the order of their names and members.

    Where the images lie in a tar is found once, and remembered until the tar changes. Images that follow each other
    are read together; an image alone is read by its own range.
    """

    def __init__(
        self,
        *,
        file: Annotated[
            str | Path,
            Field(description="a .tar file, a folder of them (at any depth), a glob or a brace range such as "
                  "{000..123}.tar; also https://, s3://, gs://, hf://"),
        ],
        keys: Annotated[Keys, Field(description="keys of KEY.json")] = OWN_KEYS,
        cache_mb: CacheSize = 256,
    ) -> None:  # fmt: skip
        self.where, self.cache_mb = printable(file), cache_mb
        texts = [str(file)] if os.path.exists(os.path.expanduser(file)) else expand_braces(str(file))
        files = sorted({tar for text in texts for tar in list_files(text, ".tar", deep=True)})
        if not files:
            raise UserError(f"data.file: {self.where} contains no .tar files; name a folder that does")
        of_names = keys.model_dump()

        # the number: to be raised when tars are read otherwise
        reads = ["tar", 4, HEIC[0] in extensions()]  # it decides which row an image is, so hashes are kept under it too

        def index_of(address: str, state: FileState) -> Table:
            key = repr([*reads, "soft labels", address, state, of_names])
            return remember_table(key, lambda: read_tar(address, state, of_names))

        states, indexes = open_files(files, index_of)
        table, rows = join_tables(indexes, self.where), [len(index) for index in indexes]
        self.starts, self.sizes = table[START].to_numpy(), table[SIZE].to_numpy()
        self.members = table[MEMBER]  # in Arrow they take a fifth of the memory of a list
        self.pieces = _pieces(self.starts, self.sizes, rows, states)
        self.container = Container(tuple(files), repr(reads), self.pieces)
        self.domain_names, of_file = index_names([file.rstrip("/").rsplit("/", 2)[-2] for file in files])
        several = len({os.path.dirname(file) for file in files}) > 1  # a/train/0.tar and b/train/0.tar too
        if keys.domain is None and several and all(map(is_split, self.domain_names)):
            raise UserError(
                f"data.file: {self.where}: the folders of the tars, {', '.join(self.domain_names)}, are parts of a "
                "split, not domains; set data.keys.domain to the key of KEY.json that names the domain, or move the "
                "tars of each domain into a folder of its name"
            )
        self.domains = np.repeat(of_file, rows)
        # `key and name`: columns of the index have our names, whatever the keys of KEY.json are called
        name_columns(self, table, self.where, {name: key and name for name, key in of_names.items()})
        unread: Kinds = {}
        soft_labels = dict[str, None]()
        for index in indexes:
            soft_labels |= dict.fromkeys(json.loads(index.schema.metadata[b"soft_labels"]))
            for kind, (number, first) in json.loads(index.schema.metadata[b"left_out"]).items():
                before = unread.get(kind, (0, first))
                unread[kind] = before[0] + number, before[1]
        self.left_out = (
            *not_read(unread), *soft_labels_not_read(f"{self.where}: KEY.json", soft_labels), *beside(str(file), files)
        )  # fmt: skip

    def name(self, row: int) -> str:
        return printable(f"{self.container.files[self._file(row)]}, {self.members[int(row)]}")

    def name_in_data(self, row: int) -> str:
        tar = self.container.files[self._file(row)].rsplit("/", 2)[-2:]
        return printable(f"{'/'.join(tar)}, {self.members[int(row)]}")

    def content(self, row: int) -> bytes:
        number = int(self.pieces.of_row(row))
        if row == self.pieces.rows(number).start or number in self.memory.kept:
            return super().content(row)
        with in_loader():
            return self._range(row, row)  # random access, or the rest of a piece

    def read_piece(self, number: int) -> list[bytes]:
        rows = self.pieces.rows(number)
        data = self._range(rows.start, rows.stop - 1)
        starts = (self.starts[rows.start : rows.stop] - self.starts[rows.start]).tolist()
        sizes = self.sizes[rows.start : rows.stop].tolist()
        return [data[start : start + size] for start, size in zip(starts, sizes, strict=True)]

    def _range(self, first: int, last: int) -> bytes:
        """Returns the bytes from the image of one row to that of another one in the same tar."""
        file, stop = self._file(first), int(self.starts[last] + self.sizes[last])
        return read_range(self.container.files[file], self.pieces.states[file], int(self.starts[first]), stop)

    def _file(self, row: int) -> int:
        return int(self.pieces.file_of[self.pieces.of_row(row)])


def expand_braces(text: str) -> Iterator[str]:
    """Yields the texts of {000..123} and {a,b}, as a shell does."""
    match = BRACES.search(text)
    if match is None:
        yield text
        return
    first, dots, last = match[1].partition("..")
    parts = match[1].split(",")
    if dots and first.isdecimal() and last.isdecimal():
        width = len(first) if len(first) == len(last) else 0
        parts = [f"{number:0{width}d}" for number in range(int(first), int(last) + 1)]
    for part in parts:
        yield from expand_braces(text[: match.start()] + part + text[match.end() :])


def _pieces(starts: np.ndarray, sizes: np.ndarray, rows: list[int], states: tuple[FileState, ...]) -> Pieces:
    """Returns runs of images of one tar, each at least `PIECE_BYTES` long except at the end of a tar."""
    ends, file_of, first = list[int](), list[int](), 0
    for file, count in enumerate(rows):
        last = first + count
        ends_at = starts[first:last] + sizes[first:last]
        while first < last:
            # the first image that ends so far behind the start of this run
            end = last - len(ends_at) + int(np.searchsorted(ends_at, starts[first] + PIECE_BYTES)) + 1
            first = min(end, last)
            ends.append(first)
            file_of.append(file)
    return Pieces(np.array(ends, np.int64), np.array(file_of, np.int64), states)


# ---- The index of a tar


class _Sample(NamedTuple):
    """An image, and the other members of its key."""

    key: str
    image: tarfile.TarInfo
    label: str | None  # in KEY.cls
    values: dict[str, Any]  # in KEY.json


def read_tar(address: str, state: FileState, keys: Mapping[str, str | None]) -> Table:
    """Returns a row for each image of a tar, in the order of its members: `START` and `SIZE` (bytes), `MEMBER` (name).

    `keys`: {label, domain, group or split: its key in KEY.json, None: it is not there}; each is a column. The label may
    be in KEY.cls instead. Its schema's metadata have what is not read: members that look like data, and keys p:CLASS.
    Raises `UserError`, one line.
    """
    import pyarrow

    unread = list[str]()
    samples = list(_samples(address, state, unread))
    if not samples:
        others = f": {count_files(Counter(map(kind_of, unread)))}" if unread else ""
        raise UserError(f"{address}: the tar contains no images (known by their extensions){others}; remove it")
    columns = {
        START: pyarrow.array([sample.image.offset_data for sample in samples], pyarrow.int64()),
        SIZE: pyarrow.array([sample.image.size for sample in samples], pyarrow.int64()),
        MEMBER: pyarrow.array([sample.image.name for sample in samples], pyarrow.large_string()),
    }
    for name, key in keys.items():
        if key is not None:
            cells = [_cell(address, sample, name, key) for sample in samples]
            kinds = sorted({type(cell).__name__ for cell in cells} - {"NoneType"})
            if len(kinds) > 1:
                many = f"has values of several types ({', '.join(kinds)})"
                raise UserError(f"{address}: key {key} {many}; write one type")
            columns[name] = encode_names(pyarrow.chunked_array([cells]), f"{printable(address)}: key {key}")
    soft_labels = [*dict.fromkeys(name for sample in samples for name in sample.values if is_of_class(name))]
    metadata = {"left_out": json.dumps(kinds_of(unread)), "soft_labels": json.dumps(soft_labels)}
    return pyarrow.table(columns).replace_schema_metadata(metadata)


def _cell(address: str, sample: _Sample, name: str, key: str) -> Any:
    if name == "label" and sample.label is not None and key not in sample.values:
        return sample.label
    member = f"{printable(address)}: {printable(sample.key)}.json"
    if not sample.values:
        instead = f" or {printable(sample.key)}.cls" if name == "label" else ""
        raise UserError(f'{member}: it must exist and have the key "{key}"{instead}')
    if key not in sample.values:
        raise UserError(f'data.keys.{name}: {member} has no key "{key}"{did_you_mean(key, list(sample.values))}')
    cell = sample.values[key]
    if not isinstance(cell, str | int | float | None):
        raise UserError(f"{member}, key {key}: a name must be text or a number; write it as text")
    return cell


def _samples(address: str, state: FileState, unread: list[str]) -> Iterator[_Sample]:
    """Yields the images with what is known of them, and adds the names of members that look like data to `unread`.

    WebDataset cuts names at the first dot; the members of such a key follow each other. Of a key with several images,
    `x.jpg` and `x.mask.png`, the image is that of the key itself, and every other one that has labels of its own: of
    0.25.jpg, 0.25.cls, 0.5.jpg and 0.5.cls both.
    """
    for key, group in groupby(_members(address, state), lambda member: _key(member[0].name)):
        texts, images, data = dict[str, dict[str, bytes]](), list[tuple[str, tarfile.TarInfo]](), list[str]()
        for member, content, is_data in group:
            stem, extension = os.path.splitext(member.name)
            if content is not None:
                texts.setdefault(stem, {})[extension] = content
            elif extension.lower() in extensions():
                images.append((stem, member))
            elif is_data:
                data.append(member.name)
        own = [image for image in images if image[0] in {key, *texts}]
        chosen = own or images
        if len(chosen) > len({stem for stem, _ in own}) and len(chosen) > 1:
            both = f"{printable(chosen[0][1].name)} and {printable(chosen[1][1].name)}"
            raise UserError(f"{address}: {both} are two images of one key; give each its own key")
        for stem, image in chosen:
            yield _Sample(stem, image, *_said(address, stem if stem in texts else key, texts))
        unread += [image.name for stem, image in images if (stem, image) not in chosen]
        if not images:
            labels = [f"{stem}{LABEL}" for stem, of_stem in texts.items() if LABEL in of_stem]
            unread += data or labels[:1]


def _said(address: str, stem: str, texts: Mapping[str, Mapping[str, bytes]]) -> tuple[str | None, dict[str, Any]]:
    """Returns the text of STEM.cls, None without one, and the object in STEM.json."""
    label, values = None, {}
    for extension, content in texts.get(stem, {}).items():
        member = f"{printable(address)}: {printable(stem)}{extension}"
        try:
            if extension == LABEL:
                label = content.decode().strip()
            else:
                values = json.loads(content)
        except ValueError as error:
            raise UserError(f"{member}: cannot be read ({error}); write it as UTF-8 text") from error
        if not isinstance(values, dict):
            raise UserError(f"{member}: it must be a JSON object, with a key for each name")
    return label, values


def _key(name: str) -> str:
    """Returns `folder/key` of the member folder/key.extension, as WebDataset cuts it."""
    folder, base = os.path.split(name)
    return os.path.join(folder, base.partition(".")[0])


def _members(address: str, state: FileState) -> Iterator[tuple[tarfile.TarInfo, bytes | None, bool]]:
    """Yields the regular files in a tar, KEY.cls and KEY.json with their bytes, and whether they look like data. Hidden
    ones, such as ._x.jpg of a Mac, are skipped. A remote tar is read once, from front to back.

    Raises `UserError` where the tar is damaged or cut, and for an image that is a link or sparse.
    """
    offset, after = 0, ""
    try:
        reader = open_file(address, state, REMOTE_BYTES if is_remote(address) else LOCAL_BYTES)
        # mode "r:" refuses a compressed tar, of which no range can be read
        with reader, tarfile.open(fileobj=reader, mode="r:") as file:
            for member in file:
                offset, after = min(file.offset, state.size), f", after the member {printable(member.name)}"
                extension = os.path.splitext(member.name)[1]
                if os.path.basename(member.name).startswith("."):
                    pass
                elif member.isreg() and not member.issparse():
                    content = file.extractfile(member) if extension in (LABEL, ".json") else None
                    is_data = looks_like_data(member.name, partial(_begin, file, member))
                    yield member, None if content is None else content.read(), is_data
                elif extension.lower() in extensions() and not member.isdir():
                    raise UserError(
                        f"{address}: {member.name} is a link or sparse; write each image in full "
                        "(GNU tar: --dereference --hard-dereference, without --sparse)"
                    )
                file.members = []  # type: ignore[attr-defined]  # else it keeps all of them
            # tarfile takes a header that it cannot read, and the end of the file, for the end of the tar
            problem = _fault_of_end(reader, offset := file.offset)
    except (tarfile.TarError, EOFError) as error:
        problem = f"cannot be read as a tar ({printable(error)})"
    if problem is not None:
        remedy = "copy the file again, or write it again as one tar without compression"
        raise UserError(f"{address}: byte {offset}{after}: {problem}; {remedy}")


def _begin(file: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    content = file.extractfile(member)
    return b"" if content is None else content.read(BEGIN_BYTES)


def _fault_of_end(reader: BinaryIO, offset: int) -> str | None:
    """Returns what is wrong if the tar does not end at `offset`, with two blocks of zeros and zeros behind them."""
    reader.seek(offset)
    end = reader.read(2 * BLOCK)
    if end[:BLOCK].strip(b"\0"):
        return "damaged: neither a member nor the end of the tar is here"
    if len(end) < 2 * BLOCK:
        return "cut: the file ends without the two blocks of zeros that end a tar"
    while end:
        if end.strip(b"\0"):
            return "the tar ends here, but more data follow"
        end = reader.read(1 << 20)
    return None
