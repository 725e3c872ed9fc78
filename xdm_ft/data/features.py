"""Features that were computed elsewhere, in an npz or in Parquet files, with labels and domains: no images."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from PIL import Image
from pydantic import Field

from xdm_ft.image_files.files import beside
from xdm_ft.image_files.remote import list_files, open_file, state_of
from xdm_ft.image_files.tables import encode_names, join_tables, name_columns, number_names
from xdm_ft.images import ImageDataset
from xdm_ft.runtime.errors import UserError, did_you_mean, plural, printable

if TYPE_CHECKING:
    from pyarrow import Array, ChunkedArray, Table

FEATURES = "features"
NEEDED = (FEATURES, "label", "domain")
COLUMNS = (*NEEDED, "group", "split", "id")
OF_TEXT = (FEATURES, "label")  # columns of class embeddings
MOST_DEFLATED = 1032  # times as many bytes as a member of a zip takes: more cannot be in it

TextFile = Annotated[
    str | Path | None,
    Field(
        description=".npz or .parquet with a row per class: label, features (its text embedding, of the same "
        "CLIP as the images); they are L2-normalised"
    ),
]
LogitScale = Annotated[float, Field(gt=0, description="factor of cosines with class_embeddings in logits (CLIP: 100)")]


class FeatureTable(ImageDataset):
    """One row per image: features, label, domain; optional: group, split, id. Others are ignored.

    A row counts as an image whose content is its features: rows with equal features are copies of each other.
    """

    has_images: ClassVar[bool] = False
    needed: ClassVar[Sequence[str]] = NEEDED
    features: np.ndarray  # float32 [N,K]
    class_embeddings: np.ndarray | None = None  # float32 [C,K], L2-normalised
    text_source: str  # of the class embeddings, for the protocol
    logit_scale: float

    def __init__(
        self,
        *,
        file: Annotated[
            str | Path,
            Field(
                description=".npz, .parquet, a folder of Parquet files or a glob, with a row per image: features "
                "(K numbers), label, domain; optional: group, split, id"
            ),
        ],
        class_embeddings: TextFile = None,
        logit_scale: LogitScale = 100.0,
    ) -> None:
        file = str(file)
        self.where = printable(file)
        files = list_files(file, ".npz" if file.endswith(".npz") else ".parquet", deep=False)
        if not files:
            raise UserError(f"data.file: {self.where} contains no .parquet files; name a folder that does")
        parts = [read_features(name, self.needed) for name in files]
        widths = [features.shape[1] for features, _ in parts]
        for name, width in zip(files, widths, strict=True):
            if width != widths[0]:
                raise UserError(
                    f"{name}: has {width} features per row, and {files[0]} has {widths[0]}; write one width"
                )
        kept = [[*table.column_names] for _, table in parts]
        for name, columns in zip(files, kept, strict=True):
            if missing := sorted({*kept[0]} ^ {*columns}):
                raise UserError(f"{name}: column {missing[0]} is in some files alone; write it to all, or to none")
        self.features = parts[0][0] if len(parts) == 1 else np.concatenate([features for features, _ in parts])
        table = join_tables([table for _, table in parts], self.where)
        columns = [name for name in table.column_names if name != "id"]
        name_columns(self, table, self.where, {name: name for name in columns})
        if "domain" not in columns:
            self.domain_names, self.domains = (Path(self.where).stem,), np.zeros(len(self.labels), np.int64)
        self.left_out = beside(file, files)
        self.ids: tuple[tuple[str, ...], np.ndarray] | None = None  # the names, and which one a row has
        if "id" in table.column_names:
            self.ids = number_names(table["id"], self.where, "id", None)
            self._refuse_repeated(*self.ids)
        self._refuse_not_finite()
        self.take_text(class_embeddings, logit_scale)

    def take_text(self, class_embeddings: str | Path | None, logit_scale: float) -> None:
        """Sets the class embeddings, of a file with those of all classes. Raises `UserError`."""
        self.logit_scale = logit_scale
        if class_embeddings is None:
            return
        file = str(class_embeddings)
        embeddings, table = read_features(file, OF_TEXT)
        where, (names, number_of) = printable(file), number_names(table["label"], printable(file), "label", None)
        counts = np.bincount(number_of, minlength=len(names))
        width = self.features.shape[1]
        problem = ""
        if embeddings.shape[1] != width:
            problem = f"has {embeddings.shape[1]} features, and {self.where} has {width}; give those of the same CLIP"
        elif (repeated := np.flatnonzero(counts > 1)).size:
            problem = f'class "{names[repeated[0]]}" is in {counts[repeated[0]]} rows; write one per class'
        elif missing := [name for name in self.class_names if name not in names]:
            problem = f'has no class "{missing[0]}" of the data{did_you_mean(missing[0], [*names])}'
        elif (broken := np.flatnonzero(~np.isfinite(embeddings).all(1) | ~embeddings.any(1))).size:
            problem = f'the features of class "{names[number_of[broken[0]]]}" are zero or not finite; repair them'
        if problem:
            raise UserError(f"data.class_embeddings: {where}: {problem}")
        row_of = {names[number]: row for row, number in enumerate(number_of.tolist())}
        kept = embeddings[[row_of[name] for name in self.class_names]].astype(np.float64)
        self.class_embeddings = (kept / np.linalg.norm(kept, axis=1, keepdims=True)).astype(np.float32)
        others = len(names) - len(self.class_names)
        self.text_source = f"class embeddings of {Path(where).name}"
        self.text_source += f", without {plural(others, 'class')} that the data lack" if others else ""

    def _refuse_repeated(self, names: tuple[str, ...], number_of: np.ndarray) -> None:
        counts = np.bincount(number_of, minlength=len(names))
        if (repeated := np.flatnonzero(counts > 1)).size:
            rows = ", ".join(map(str, np.flatnonzero(number_of == repeated[0])[:3].tolist()))
            problem = f'"{names[repeated[0]]}" is the id of rows {rows}, and {len(repeated)} ids occur more than once'
            raise UserError(f"{self.where}: column id: {problem}; give each row its own, or leave the column out")

    def _refuse_not_finite(self) -> None:
        broken = np.flatnonzero(~np.isfinite(self.features).all(1))
        if len(broken):
            problem = f"{len(broken)} of {len(self)} rows are not finite (NaN, ±∞ or beyond float32)"
            first = self.name_in_data(int(broken[0]))
            raise UserError(f"{self.where}: column {FEATURES}: {problem}, the first: {first}; repair or remove them")

    @property
    def file_name(self) -> str:
        """The last part of the path, for the protocol."""
        return Path(self.where).name

    @property
    def source(self) -> str:
        """What the features are, for the protocol."""
        return f"features of {self.file_name}"

    def image(self, row: int) -> Image.Image:
        raise UserError(f"{self.name(row)}: has no image, only features; use data with images for this")

    def name(self, row: int) -> str:
        return f"{self.where}, {self.name_in_data(row)}"

    def name_in_data(self, row: int) -> str:
        return f"row {row}" if self.ids is None else self.row_id(row)

    def row_id(self, row: int) -> str:
        return str(row) if self.ids is None else self.ids[0][self.ids[1][row]]

    def content(self, row: int) -> bytes:
        return self.features[row].tobytes()


def read_features(file: str, needed: Sequence[str]) -> tuple[np.ndarray, Table]:
    """Returns the features of an .npz or .parquet, float32 [n,K], and the other columns. Raises `UserError`."""
    return _read_npz(file, needed) if file.endswith(".npz") else _read_parquet(file, needed)


def _read_npz(file: str, needed: Sequence[str]) -> tuple[np.ndarray, Table]:
    """Returns the features, float32 [n,K], and the other columns. Raises `UserError`."""
    import pyarrow

    with _damage_in(file), open_file(file, state_of(file), 2**20) as source:
        if source.read(len(np.lib.format.MAGIC_PREFIX)) == np.lib.format.MAGIC_PREFIX:
            raise UserError(f"{file}: is one array, not an npz; write it with numpy.savez")
        with zipfile.ZipFile(source) as content:
            names = [info.filename.removesuffix(".npy") for info in content.infolist()]
            _require_columns(file, names, "array", needed)
            infos = {name: content.infolist()[names.index(name)] for name in COLUMNS if name in names}
            _check_headers(file, {name: _header(file, name, content, info) for name, info in infos.items()})
            arrays = {name: _array(content, info) for name, info in infos.items()}
        z = arrays.pop(FEATURES)
        return _float32(z), _columns(file, {name: pyarrow.array(values) for name, values in arrays.items()})


def _header(file: str, name: str, content: zipfile.ZipFile, info: zipfile.ZipInfo) -> tuple[tuple[int, ...], np.dtype]:
    """Returns shape and type of an array, of which nothing else is read. Raises `UserError` if its size is another."""
    with content.open(info) as member:
        try:
            major, _ = np.lib.format.read_magic(member)
        except ValueError as error:
            raise UserError(f"{file}: {name} is no array; write it with numpy.savez") from error
        read = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(member)
        if dtype.hasobject:
            problem = "holds Python objects, which can run code when they are read"
            raise UserError(f"{file}: array {name} {problem}; write it as text or numbers (astype(str))")
        size = math.prod(shape) * dtype.itemsize
        if size != info.file_size - member.tell() or info.file_size > MOST_DEFLATED * (info.compress_size + 1):
            held = f"its header says {size:,} bytes, and the file holds {info.compress_size:,}"
            raise UserError(f"{file}: array {name} is damaged ({held}); write the file again")
    return shape, dtype


def _check_headers(file: str, headers: Mapping[str, tuple[tuple[int, ...], np.dtype]]) -> None:
    """Raises `UserError` for arrays that do not fit together, or into the memory, before they are read."""
    import psutil

    shape, dtype = headers[FEATURES]
    if len(shape) != 2 or dtype.kind != "f":
        raise UserError(f"{file}: {FEATURES} is {dtype} {list(shape)}; it must be floating, of shape [rows, K]")
    for name, (others, _) in headers.items():
        if name != FEATURES and others != shape[:1]:
            raise UserError(f"{file}: {name} has shape {list(others)}; it must be [{shape[0]}], one per row")
    if not math.prod(shape):
        raise UserError(f"{file}: has no rows, or rows without features; write one per image")
    needed, free = (
        sum(math.prod(of) * kind.itemsize for of, kind in headers.values()),
        psutil.virtual_memory().available,
    )
    if needed > free:
        raise UserError(
            f"{file}: needs {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free; write it smaller"
        )


def _array(content: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    with content.open(info) as member:
        values = np.lib.format.read_array(member, allow_pickle=False)
    return values.astype(values.dtype.newbyteorder("="), copy=False)  # Arrow reads the machine's order of bytes alone


def _read_parquet(file: str, needed: Sequence[str]) -> tuple[np.ndarray, Table]:
    """Returns the features, float32 [n,K], and the other columns. Raises `UserError`."""
    from pyarrow.parquet import ParquetFile

    with _damage_in(file), open_file(file, state_of(file)) as source:
        parquet = ParquetFile(source, pre_buffer=True, page_checksum_verification=True)
        names = parquet.schema_arrow.names
        _require_columns(file, names, "column", needed)
        table = parquet.read(columns=[name for name in COLUMNS if name in names])
        z = _matrix(file, table[FEATURES])
        return z, _columns(file, {name: table[name] for name in table.column_names if name != FEATURES})


def _matrix(file: str, cells: ChunkedArray) -> np.ndarray:
    """Returns lists of floats as float32 [n,K]. Raises `UserError` for another type, or several lengths."""
    import pyarrow.compute as pc
    from pyarrow import types

    kind = cells.type
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if not (is_list and types.is_floating(kind.value_type)):
        raise UserError(f"{file}: column {FEATURES} holds {kind}; it must hold a list of floats per row")
    lengths = pc.list_value_length(cells).fill_null(0).to_numpy()
    width = int(lengths[0]) if len(lengths) else 0
    if (others := np.flatnonzero(lengths != width)).size:
        problem = f"row {others[0]} has {lengths[others[0]]} values, and row 0 has {width}"
        raise UserError(f"{file}: column {FEATURES}: {problem}; write lists of one length")
    z, first = np.empty((len(cells), width), np.float32), 0
    if not z.size:
        raise UserError(f"{file}: has no rows, or rows without features; write one per image")
    for chunk in cells.chunks:  # a null inside becomes NaN, which is refused
        z[first : first + len(chunk)] = _float32(chunk.flatten().to_numpy(zero_copy_only=False)).reshape(-1, width)
        first += len(chunk)
    return z


def _float32(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # ∞ is refused with its row
        return np.ascontiguousarray(values, np.float32)


def _columns(file: str, values: Mapping[str, Array | ChunkedArray]) -> Table:
    import pyarrow

    return pyarrow.table(
        {
            name: encode_names(
                column if isinstance(column, pyarrow.ChunkedArray) else pyarrow.chunked_array([column]),
                f"{printable(file)}: column {name}",
            )
            for name, column in values.items()
        }
    )


def _require_columns(file: str, names: list[str], purpose: str, needed: Sequence[str]) -> None:
    for name in needed:
        if name not in names:
            raise UserError(f'{file}: has no {purpose} "{name}"{did_you_mean(name, names)}')
    for name in COLUMNS:
        if names.count(name) > 1:
            raise UserError(f"{file}: two {purpose}s have the name {name}; keep one")


@contextmanager
def _damage_in(file: str) -> Iterator[None]:
    """Context for reading a file. Raises `UserError` for what is not as its format says."""
    import pyarrow

    damage: tuple[type[Any], ...] = (
        pyarrow.ArrowException,
        zipfile.BadZipFile,
        zlib.error,
        OSError,
        ValueError,
        EOFError,
        MemoryError,
        NotImplementedError,
        RuntimeError,
    )
    try:
        yield
    except damage as error:
        reason = " ".join(printable(f"{type(error).__name__}: {error}").split())[:200]
        raise UserError(f"{file}: cannot be read ({reason}); write the file again") from error
