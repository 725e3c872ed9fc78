"""The rows of `xdm-ft predict`: what is in them, how they survive a kill, and how they become a table.

`<out>.unfinished` is a file of JSON lines with checksums that is only appended to. The first line says what the
predictions are of; each other one holds the rows of some images and the number of images so far, and is on the disk
before the next images are done.
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from xdm_ft.export.parts import probabilities
from xdm_ft.export.predictor import Batch, Model
from xdm_ft.export.sources import Item
from xdm_ft.images.decode import NAMED_AT_MOST
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.progress import pulse
from xdm_ft.storage.atomic import UNFINISHED, disk_errors, replace_file, sync
from xdm_ft.storage.csv_cells import csv_line
from xdm_ft.storage.lines import Damaged, append_lines, read_lines

Row = list[str | float | bool | int | None]
Format = Literal["csv", "jsonl", "parquet"]
CLASS_PREFIX = "p:"  # of the columns of probabilities: a class may have the name of another column
ROWS_AT_ONCE = 4096  # that are in memory
SECONDS = 1.0  # between two writes: what a kill loses
LOCK_SECONDS = 3.0  # a killed command, and the processes that decode its images, end a moment later


@dataclass(frozen=True)
class Columns:
    """The columns besides path (or group), label and probability."""

    probabilities: bool = False  # one column per class
    entropy: bool = False  # of the probabilities, in nats
    spread: bool = False  # standard deviation, over an ensemble's heads, of the probability of the label
    top_k: int | None = None  # the K most probable classes
    distance: bool = False  # from the training images, and the percentage of unseen images that are nearer
    abstain_below: float | None = None  # no label if its probability is lower

    def refuse(self, model: Model, grouped: bool) -> None:
        """Raises `UserError` for columns that can not be computed."""
        classes = len(model.class_names)
        if self.top_k is not None and not 2 <= self.top_k <= classes:
            raise UserError(f"--top-k: {self.top_k} is not in 2…{classes}, the number of classes")
        if self.abstain_below is not None and not 0 < self.abstain_below <= 1:
            raise UserError(
                f"--abstain-below: {self.abstain_below} is not a probability above 0; give 0.5, for example"
            )
        if self.spread and not len(model.module.members):
            raise UserError(
                "--spread: the model has a single head; export several ones (xdm-ft export --ensemble), or leave it out"
            )
        if self.distance:
            model.reference_for("--distance")
        if self.spread and grouped:
            raise UserError("--spread: is of single images; leave out --spread or --group-by")

    def types(self, class_names: Sequence[str], grouped: bool) -> dict[str, type]:
        """Returns {column: type of its cells}, in order."""
        types: dict[str, type] = {"group" if grouped else "path": str, "label": str, "probability": float}
        for place in range(1, 1 + (self.top_k or 0)):
            types |= {f"label_{place}": str, f"probability_{place}": float}
        types |= {"entropy": float} if self.entropy else {}
        types |= {"spread": float} if self.spread else {}
        types |= {"distance": float, "distance_percentile": float} if self.distance else {}
        types |= {"abstained": bool} if self.abstain_below is not None else {}
        types |= {f"{CLASS_PREFIX}{name}": float for name in class_names} if self.probabilities else {}
        return types | ({"images": int} if grouped else {}) | {"error": str}

    def rows(
        self,
        class_names: Sequence[str],
        names: Sequence[str],
        p: np.ndarray,
        spread: np.ndarray | None = None,
        distances: np.ndarray | None = None,
    ) -> Iterator[Row]:
        """Yields a row per name, without the number of images of a group, and without the error.

        `p`: float32 [n,C]; `spread`: [n]; `distances`: [n,2], with their percentiles.
        """
        top = np.argsort(-p, axis=1, kind="stable")[:, : self.top_k or 1]
        of_top = _decimals(np.take_along_axis(p, top, 1))
        of_classes = _decimals(p) if self.probabilities else [[]] * len(names)
        numbers = [entropy(p)[:, None]] if self.entropy else []
        numbers += [] if spread is None else [spread[:, None]]
        numbers += [] if distances is None else [distances]
        others = _decimals(np.concatenate(numbers, axis=1)) if numbers else [[]] * len(names)
        for i, name in enumerate(names):
            labels = [class_names[number] for number in top[i]]
            # compared as it is printed
            abstained = self.abstain_below is not None and of_top[i][0] < self.abstain_below
            row: Row = [name, None if abstained else labels[0], of_top[i][0]]
            for pair in zip(labels, of_top[i], strict=True) if self.top_k else ():
                row += pair
            row += [*others[i], *([abstained] if self.abstain_below is not None else [])]
            yield [*row, *of_classes[i]]

    def empty(self, class_names: Sequence[str], grouped: bool) -> Row:
        """Returns the cells of `rows` behind the name, where nothing was predicted."""
        return [None] * (len(self.types(class_names, grouped)) - (3 if grouped else 2))


def _decimals(values: np.ndarray) -> list[Any]:
    """Returns float32 values as the shortest decimals that are read as the same float32: 0.1, not 0.10000000149."""
    return np.asarray(values, np.float32).astype("U").astype(np.float64).tolist()


def entropy(p: np.ndarray) -> np.ndarray:
    """Entropy −Σ p ln p of probabilities [n,C], float32 [n], in nats."""
    wide = p.astype(np.float64)
    return -(wide * np.log(np.where(wide > 0, wide, 1))).sum(1).astype(np.float32) + 0.0  # no −0


def spread_of(members: Tensor, p: Tensor, temperature: float) -> Tensor:
    """Standard deviation (S − 1) over the heads of the probability of the label: float32 [n].

    `members`: logits [S,n,C] of the heads. `p`: probabilities [n,C] of the ensemble.
    """
    of_heads = (members.double() / temperature).softmax(-1)  # [S,n,C]
    of_label = of_heads.gather(2, p.argmax(1)[None, :, None].expand(len(of_heads), -1, 1))[..., 0]  # [S,n]
    return of_label.std(0).float()


def image_rows(columns: Columns, model: Model, batch: Batch) -> Iterator[Row]:
    """Yields the rows of images. Of an image without a prediction all cells but the path and the error are empty."""
    readable, spread = batch.readable, None
    p = probabilities(batch.logits[readable])
    if columns.spread and batch.members is not None:
        spread = spread_of(batch.members[:, readable], p, model.config.temperature).numpy()
    names = [batch.items[position].path for position in readable]
    rows = columns.rows(model.class_names, names, p.numpy(), spread, _distances(columns, model, batch))
    empty = columns.empty(model.class_names, grouped=False)
    for position, item in enumerate(batch.items):
        reason = batch.unreadable.get(position)
        yield [*next(rows), None] if reason is None else [item.path, *empty, reason]


def group_rows(columns: Columns, model: Model, batch: Batch) -> Iterator[Row]:
    """Yields what `GroupMeans.add_all` takes of each image: path, group, every probability, the distance and its
    percentile if they are wanted, and None; or path, group, and why it has no prediction."""
    p, distances = probabilities(batch.logits[batch.readable]).numpy(), _distances(columns, model, batch)
    values = iter(_decimals(p if distances is None else np.concatenate([p, distances], 1)))
    for position, item in enumerate(batch.items):
        reason = batch.unreadable.get(position)
        yield [item.path, item.group, *(next(values) if reason is None else []), reason]


def _distances(columns: Columns, model: Model, batch: Batch) -> np.ndarray | None:
    """Returns distances of the readable images from the training images and their percentiles, float32 [n,2]."""
    if not columns.distance:
        return None
    reference = model.reference_for("--distance")
    distances = reference.distance(batch.encoded[batch.readable].numpy())
    return np.stack([distances, reference.percentile(distances)], 1)


class GroupMeans:
    """The means of the values of each group's images. Memory grows with the number of groups alone."""

    def __init__(self) -> None:
        self._sums: dict[str, np.ndarray] = {}  # float64 [C], or [C + 2] with the distance and its percentile
        self._images: dict[str, int] = {}  # that were predicted; in the order in which the groups came
        self._errors: dict[str, tuple[int, str]] = {}  # number of the others, the first of them and why

    def __len__(self) -> int:
        return len(self._images)

    def add_all(self, rows: Iterable[Row]) -> None:
        """Adds images, as `group_rows` yields them."""
        for path, group, *values, reason in rows:
            name = str(group)
            self._images.setdefault(name, 0)
            if reason is None:
                wide = np.asarray(values, np.float32).astype(np.float64)
                self._sums[name] = self._sums[name] + wide if name in self._sums else wide
                self._images[name] += 1
            else:
                count, first = self._errors.get(name, (0, f"{path}: {reason}"))
                self._errors[name] = count + 1, first

    def rows(self, columns: Columns, class_names: Sequence[str]) -> Iterator[Row]:
        """Yields a row per group, in the order in which the groups came."""
        groups = iter(self._images)
        while some := list(islice(groups, ROWS_AT_ONCE)):
            rows = self._predicted([group for group in some if self._images[group]], columns, class_names)
            for group in some:
                images, (errors, first) = self._images[group], self._errors.get(group, (0, ""))
                row = next(rows) if images else [group, *columns.empty(class_names, grouped=True)]
                yield [*row, images, f"{errors} of {images + errors} images: {first}" if errors else None]

    def _predicted(self, groups: list[str], columns: Columns, class_names: Sequence[str]) -> Iterator[Row]:
        if groups:
            means = np.stack([self._sums[group] / self._images[group] for group in groups]).astype(np.float32)
            p, distances = np.split(means, [len(class_names)], axis=1)
            yield from columns.rows(class_names, groups, p, distances=distances if columns.distance else None)


class Tally:
    """Counts rows, whose first cell is the image's path and whose last one is why it has no prediction, or None."""

    def __init__(self) -> None:
        self.images = self.unreadable = 0
        self.named: dict[str, str] = {}  # the first unreadable images → why

    def add(self, rows: Iterable[Row]) -> None:
        for path, *_, reason in rows:
            self.images += 1
            if reason is not None:
                self.unreadable += 1
                if len(self.named) < NAMED_AT_MOST:
                    self.named[str(path)] = str(reason)


class Unfinished:
    """The rows so far, in a file that `open_unfinished` has locked."""

    def __init__(self, out: Path, about: Mapping[str, Any], handle: int) -> None:
        self.out, self.file, self.about, self._handle = out, unfinished_file(out), dict(about), handle
        self.tally = Tally()
        self._rows: list[Row] = []
        self._due = time.monotonic() + SECONDS
        lines = len(list(islice(self._lines(), 2)))
        if not lines and os.fstat(handle).st_size:
            raise UserError(f"{self.file}: is damaged (no line is complete); delete it to begin anew")
        self.has_rows = lines == 2

    def begin(self) -> None:
        with disk_errors(self.file):
            os.ftruncate(self._handle, 0)
            self._append({"about": self.about, "count": 0, "rows": []})
            sync(self.file.parent)  # or a crash could lose the name of the new file

    def skip_done(self, items: Iterator[Item]) -> None:
        """Counts the rows of an earlier command, if any, and skips their images.

        Raises `UserError` if that had other options, or if its images are not the first of these.
        """
        about = next(self._lines())["about"]
        if about != self.about:
            key = next(key for key in {**self.about, **about} if about.get(key) != self.about.get(key))
            raise UserError(
                f"{self.file}: {key} was {about.get(key)} and is {self.about.get(key)} now; use the same model and "
                "options, or delete it to begin anew"
            )
        for line in self._lines():
            for row in line["rows"]:
                item = next(items, None)
                if item is None or item.path != row[0]:
                    now = "missing" if item is None else item.path
                    raise UserError(
                        f"{self.file}: is of other images, or the images have changed since: its image "
                        f"{self.tally.images + 1} is {row[0]}, now it is {now}; name the same ones, or delete it to "
                        "begin anew"
                    )
                self.tally.add([row])
                pulse.beat()

    def add(self, rows: Iterable[Row]) -> None:
        """Adds a row per image. They are on the disk a second later, or after `flush`."""
        rows = list(rows)
        self.tally.add(rows)
        self._rows += rows
        if time.monotonic() >= self._due:
            self.flush()

    def flush(self) -> None:
        if self._rows:
            self._append({"count": self.tally.images, "rows": self._rows})
            self.has_rows = True
        self._rows, self._due = [], time.monotonic() + SECONDS

    def rows(self) -> Iterator[Row]:
        """Yields the rows on the disk. Raises `UserError` if some are missing, at the latest after the last one."""
        count = 0
        for line in self._lines():
            yield from line["rows"]
            count = line["count"]
        if count != self.tally.images:
            raise UserError(
                f"{self.file}: has {count} rows of {self.tally.images} images, since another program has changed it; "
                "delete it to begin anew"
            )

    def complete(self, write: Callable[[Path], None]) -> None:
        """Makes the file of predictions by `write(path)`, and removes this one."""
        self._refuse_lost()
        # of a command that was killed here: mkstemp's names have eight characters
        for left in self.out.parent.glob(f".{glob.escape(self.out.name)}.{8 * '?'}{UNFINISHED}"):
            left.unlink(missing_ok=True)
        replace_file(self.out, write)
        self.remove()

    def remove(self) -> None:
        with disk_errors(self.file):
            if _is_named(self.file, self._handle):
                self.file.unlink()

    def _append(self, value: Any) -> None:
        self._refuse_lost()
        append_lines(self.file, [value])

    def _refuse_lost(self) -> None:
        if not _is_named(self.file, self._handle):
            raise UserError(
                f"{self.file}: was deleted or replaced while predictions were written to it; run the same command again"
            )

    def _lines(self) -> Iterator[Any]:
        """Yields the lines: {"about": …, "count": 0, "rows": []}, then {"count": images so far, "rows": […]}."""
        count = 0
        try:
            for number, line in enumerate(read_lines(self.file), start=1):
                is_dict = isinstance(line, dict)
                count += len(line["rows"]) if is_dict and "rows" in line else 0
                # the count shows lines that are missing, moved, or there twice
                if not is_dict or line.get("count") != count or ("about" in line) != (number == 1):
                    raise Damaged(f"line {number}: it is not where it was written")
                yield line
        except Damaged as error:
            raise UserError(f"{self.file}: is damaged ({error}); delete it to begin anew") from error


def unfinished_file(out: Path) -> Path:
    return out.with_name(f"{out.name}{UNFINISHED}")


def refuse_taken(out: Path, resume: bool) -> None:
    """Raises `UserError` if there is such a file already, without unfinished predictions that are to be resumed."""
    with disk_errors(out):
        if out.exists() and not (resume and unfinished_file(out).exists()):
            raise UserError(f"{out}: exists already; name another file, or delete it")


@contextmanager
def open_unfinished(out: Path, about: Mapping[str, Any], resume: bool) -> Iterator[Unfinished]:
    """Yields the unfinished file of `out`, which no other process writes to. Without rows it is removed at the end.

    Raises `UserError` if `out` exists, if it can not be written, or if there are earlier rows and not `resume`.
    """
    refuse_taken(out, resume)
    handle = _lock(unfinished_file(out))
    try:
        unfinished = Unfinished(out, about, handle)
        if unfinished.has_rows and not resume:
            raise UserError(
                f"{unfinished.file}: unfinished predictions of an earlier command; add --resume to continue them, or "
                "delete it"
            )
        try:
            if not unfinished.has_rows:
                refuse_taken(out, resume=False)  # the command that held the lock may have completed it
                unfinished.begin()
            yield unfinished
        finally:
            if not unfinished.has_rows:
                unfinished.remove()
    finally:
        os.close(handle)


def _lock(file: Path) -> int:
    """Returns a handle of the file, which is made if there is none, and locked until it is closed.

    Raises `UserError` for a link, and if another process keeps the lock.
    """
    until = time.monotonic() + LOCK_SECONDS
    while True:
        with disk_errors(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            with suppress(BlockingIOError):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_named(file, handle):  # not if the command that held the lock has removed its file
                    return handle
        os.close(handle)
        if time.monotonic() > until:
            raise UserError(f"{file}: another command is writing to it; wait for it, or name another file")
        time.sleep(0.05)


def _is_named(file: Path, handle: int) -> bool:
    """Whether the path names the open file, and not another one or none."""
    try:
        return os.path.samestat(os.lstat(file), os.fstat(handle))
    except FileNotFoundError:
        return False


def format_of(out: Path | None) -> Format:
    """Returns the format that a file's name asks for; csv without a file. Raises `UserError` for another suffix."""
    formats: dict[str, Format] = {".csv": "csv", ".jsonl": "jsonl", ".parquet": "parquet"}
    suffix = ".csv" if out is None else out.suffix.lower()
    if suffix not in formats:
        remedy = "end it in .csv, .jsonl or .parquet, or add --format"
        raise UserError(f"--out {out}: the name asks for no known format; {remedy}")
    return formats[suffix]


def header_of(columns: Collection[str], format_: Format) -> bytes:
    return line_of(columns, list(columns), "csv") if format_ == "csv" else b""


def line_of(columns: Iterable[str], row: Row, format_: Format) -> bytes:
    """Returns a row as a line. A name that is not UTF-8 has its own bytes in CSV, and escapes (\\udc80) in JSON."""
    if format_ == "csv":
        return csv_line(columns, row).encode("utf-8", "surrogateescape")
    return f"{json.dumps(dict(zip(columns, row, strict=True)), allow_nan=False)}\n".encode()


def write_table(path: Path, columns: Mapping[str, type], rows: Iterable[Row], format_: Format) -> None:
    """Writes a file of the columns {name: type of its cells}, of which few rows are in memory. Raises `OSError`."""
    if format_ == "parquet":
        _write_parquet(path, columns, iter(rows))
        return
    with path.open("wb") as file:
        file.write(header_of(columns, format_))
        file.writelines(line_of(columns, row, format_) for row in rows)


def _write_parquet(path: Path, columns: Mapping[str, type], rows: Iterator[Row]) -> None:
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    types = {str: pyarrow.string(), float: pyarrow.float32(), bool: pyarrow.bool_(), int: pyarrow.int64()}
    schema = pyarrow.schema([(name, types[type_]) for name, type_ in columns.items()])
    with ParquetWriter(path, schema) as writer:
        while some := list(islice(rows, ROWS_AT_ONCE)):
            cells = [[_utf8(cell) for cell in column] for column in zip(*some, strict=True)]
            arrays = [pyarrow.array(column, field.type) for column, field in zip(cells, schema, strict=True)]
            writer.write_batch(pyarrow.record_batch(arrays, schema=schema))


def _utf8(cell: object) -> object:
    """Bytes that are not UTF-8, which Parquet refuses in texts, become \\x80."""
    return os.fsencode(cell).decode("utf-8", "backslashreplace") if isinstance(cell, str) else cell
