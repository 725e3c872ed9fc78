"""The rows of `xdm-ft predict`: what is in them, how they survive a kill, and how they become a table.

`<out>.unfinished` is a file of JSON lines with checksums that is only appended to. The first line says what the
predictions are of; each other one holds the rows of some images and the number of images so far, and is on the disk
before the next images are done.
"""

from __future__ import annotations

import glob
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from filelock import FileLock, Timeout
from torch import Tensor

from xdm_ft.export import probabilities
from xdm_ft.export.predictor import ImageBatch, Model
from xdm_ft.export.sources import Item
from xdm_ft.image_files.tables import CLASS_PREFIX
from xdm_ft.images.decode import NAMED_AT_MOST
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.progress import pulse
from xdm_ft.storage.atomic import TAKEN, UNFINISHED, Together, disk_errors, sync
from xdm_ft.storage.lines import Damaged, append_lines, csv_line, read_lines

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]  # on Windows

PredictionRow = list[str | float | bool | int | None]
Format = Literal["csv", "jsonl", "parquet"]
IsUnknown = Callable[[Tensor], np.ndarray]
"""Features [n,K], as the head reads them → which of the images belong to no class, bool [n]."""
ROWS_AT_ONCE = 4096  # that are in memory
SECONDS = 1.0  # between two writes: what a kill loses
BUSY = "another command is writing to it; wait for it, or name another file"
LOCK_SECONDS = 3.0  # a killed command, and the processes that decode its images, end a moment later


@dataclass(frozen=True)
class ExtraColumns:
    """The columns besides path (or group), label and probability."""

    probabilities: bool = False  # one column per class
    entropy: bool = False  # of the probabilities, in nats
    spread: bool = False  # standard deviation, over an ensemble's heads, of the probability of the label
    top_k: int | None = None  # the K most probable classes
    distance: bool = False  # from the training images, and the percentage of unseen images that are nearer
    unknown: bool = False  # whether an image belongs to no class
    abstain_below: float | None = None  # no label if its probability is lower


class Predictions:
    """The table of predictions: a row per image, or per group of images with the means of their values.

    `types`: {column: type of its cells}, in order. `computed`: number of images that passed through the encoder.
    Memory grows with the number of groups alone.
    """

    def __init__(
        self, model: Model, columns: ExtraColumns, format_: Format, grouped: bool, is_unknown: IsUnknown | None = None
    ) -> None:
        """`is_unknown`: for that column. Raises `UserError` for columns that cannot be computed."""
        classes, top_k, threshold = len(model.class_names), columns.top_k, columns.abstain_below
        if top_k is not None and not 2 <= top_k <= classes:
            raise UserError(f"--top-k: {top_k} is not in 2…{classes}, the number of classes")
        if threshold is not None and not 0 < threshold <= 1:
            raise UserError(f"--abstain-below: {threshold} is not a probability above 0; give 0.5, for example")
        if columns.spread and not len(model.module.members):
            raise UserError(
                "--spread: the model has a single head; export several (xdm-ft export --ensemble), or leave it out"
            )
        self._reference = model.reference_for("--distance") if columns.distance else None
        for option in ("spread", "unknown"):
            if getattr(columns, option) and grouped:
                raise UserError(f"--{option}: is for single images; leave out --{option} or --group-by")
        self._is_unknown = is_unknown
        self.model, self.columns, self.format, self.grouped, self.computed = model, columns, format_, grouped, 0

        types: dict[str, type] = {"group" if grouped else "path": str, "label": str, "probability": float}
        for rank in range(1, 1 + (top_k or 0)):
            types |= {f"label_{rank}": str, f"probability_{rank}": float}
        types |= {"entropy": float} if columns.entropy else {}
        types |= {"spread": float} if columns.spread else {}
        types |= {"distance": float, "distance_percentile": float} if columns.distance else {}
        types |= {"unknown": bool} if columns.unknown else {}
        types |= {"abstained": bool} if threshold is not None else {}
        types |= {f"{CLASS_PREFIX}{name}": float for name in model.class_names} if columns.probabilities else {}
        self._empty: PredictionRow = [None] * (len(types) - 1)  # cells behind the name, where nothing was predicted
        self.types: dict[str, type] = types | ({"images": int} if grouped else {}) | {"error": str}

        # float64 [C], or [C + 2] with the distance and its percentile: sums over the images of each group
        self._sums: dict[str, np.ndarray] = {}
        self._images: dict[str, int] = {}  # that were predicted; in the order in which the groups came
        self._errors: dict[str, tuple[int, str]] = {}  # number of the others, the first of them and why

    @property
    def groups(self) -> int | None:
        """The number of groups; None without groups."""
        return len(self._images) if self.grouped else None

    def rows_of(self, batch: ImageBatch) -> Iterator[PredictionRow]:
        """Yields a row per image: its path, cells and None, or why it has no prediction.

        With groups it is what `add_to_groups` takes: path, group, every probability, distances and None, or why.
        """
        self.computed += batch.computed
        readable, columns, distances, spread = batch.readable, self.columns, None, None
        p = probabilities(batch.logits[readable])  # [n,C]
        if self._reference is not None:
            distance = self._reference.distance(batch.encoded[readable].numpy())
            distances = np.stack([distance, self._reference.percentile(distance)], 1)  # [n,2]
        if columns.spread and batch.members is not None:
            members = batch.members[:, readable].double() / self.model.config.temperature  # [S,n,C]
            of_label = members.softmax(-1).gather(2, p.argmax(1)[None, :, None].expand(len(members), -1, 1))  # [S,n,1]
            spread = of_label[..., 0].std(0).float().numpy()
        if self.grouped:
            cells = iter(decimals(p.numpy() if distances is None else np.concatenate([p.numpy(), distances], 1)))
        else:
            unknown = None
            if self._is_unknown is not None:
                unknown = self._is_unknown(self.model.module.head_input(batch.encoded[readable]))
            cells = self._cells(p.numpy(), spread, distances, unknown)
        for position, item in enumerate(batch.items):
            reason = batch.unreadable.get(position)
            name = [item.path, item.group] if self.grouped else [item.path]
            empty = [] if self.grouped else self._empty
            yield [*name, *(next(cells) if reason is None else empty), reason]

    def _cells(
        self,
        p: np.ndarray,
        spread: np.ndarray | None,
        distances: np.ndarray | None,
        unknown: np.ndarray | None = None,
    ) -> Iterator[PredictionRow]:
        """Yields the cells of images or groups behind the name. `p`: [n,C]; `distances`: [n,2]; the others: [n]."""
        columns, names = self.columns, self.model.class_names
        # stable: of equal probabilities the first class is the label, as in `Model.predict`
        top = np.argsort(-p, axis=1, kind="stable")[:, : columns.top_k or 1]  # [n,K]
        labels = [[names[number] for number in of_rank] for of_rank in top.T]
        values = decimals(np.take_along_axis(p, top, 1).T)
        # compared as it is printed
        abstained = [columns.abstain_below is not None and value < columns.abstain_below for value in values[0]]
        first = [None if abstains else label for label, abstains in zip(labels[0], abstained, strict=True)]
        cells: list[list[Any]] = [first, values[0]]
        for pair in zip(labels, values, strict=True) if columns.top_k else ():
            cells += pair
        if columns.entropy:  # −Σ p ln p
            wide = p.astype(np.float64)
            entropy = -(wide * np.log(np.where(wide > 0, wide, 1))).sum(1)
            cells.append(decimals(entropy.astype(np.float32) + 0.0))  # no −0
        cells += [] if spread is None else [decimals(spread)]
        cells += [] if distances is None else decimals(distances.T)
        cells += [] if unknown is None else [unknown.tolist()]
        cells += [] if columns.abstain_below is None else [abstained]
        cells += decimals(p.T) if columns.probabilities else []
        yield from map(list, zip(*cells, strict=True))

    def add_to_groups(self, rows: Iterable[PredictionRow]) -> None:
        """Adds images, as `rows_of` yields them."""
        for path, group, *values, reason in rows:
            name = str(group)
            self._images.setdefault(name, 0)
            if reason is None:
                # to float32 first: the cells are its decimals, and a resumed command must add the same numbers
                wide = np.asarray(values, np.float32).astype(np.float64)
                self._sums[name] = self._sums[name] + wide if name in self._sums else wide
                self._images[name] += 1
            else:
                count, first = self._errors.get(name, (0, f"{path}: {reason}"))
                self._errors[name] = count + 1, first

    def group_rows(self) -> Iterator[PredictionRow]:
        """Yields a row per group, in the order in which the groups came."""
        groups = iter(self._images)
        while some := list(islice(groups, ROWS_AT_ONCE)):
            means = [self._sums[group] / self._images[group] for group in some if self._images[group]]
            cells: Iterator[PredictionRow] = iter(())
            if means:
                p, distances = np.split(np.stack(means).astype(np.float32), [len(self.model.class_names)], axis=1)
                cells = self._cells(p, None, distances if self.columns.distance else None)
            for group in some:
                images, (errors, first) = self._images[group], self._errors.get(group, (0, ""))
                error = f"{errors} of {images + errors} images: {first}" if errors else None
                yield [group, *(next(cells) if images else self._empty), images, error]

    @property
    def header(self) -> bytes:
        return self.line(list(self.types)) if self.format == "csv" else b""

    def line(self, row: PredictionRow) -> bytes:
        """Returns a row as a line. A name that is not UTF-8 has its own bytes in CSV, and escapes (\\udc80) in JSON."""
        if self.format == "csv":
            return csv_line(self.types, row).encode("utf-8", "surrogateescape")
        return f"{json.dumps(dict(zip(self.types, row, strict=True)), allow_nan=False)}\n".encode()

    def write(self, path: Path, rows: Iterable[PredictionRow]) -> None:
        """Writes the file, of which few rows are in memory. Raises `OSError`."""
        if self.format != "parquet":
            with path.open("wb") as file:
                file.write(self.header)
                file.writelines(map(self.line, rows))
            return
        import pyarrow
        from pyarrow.parquet import ParquetWriter

        def utf8(cell: object) -> object:
            """Bytes that are not UTF-8, which Parquet refuses in texts, become \\x80."""
            return os.fsencode(cell).decode("utf-8", "backslashreplace") if isinstance(cell, str) else cell

        types = {str: pyarrow.string(), float: pyarrow.float32(), bool: pyarrow.bool_(), int: pyarrow.int64()}
        schema, rows = pyarrow.schema([(name, types[type_]) for name, type_ in self.types.items()]), iter(rows)
        with ParquetWriter(path, schema) as writer:
            while some := list(islice(rows, ROWS_AT_ONCE)):
                cells = [[utf8(cell) for cell in column] for column in zip(*some, strict=True)]
                arrays = [pyarrow.array(column, field.type) for column, field in zip(cells, schema, strict=True)]
                writer.write_batch(pyarrow.record_batch(arrays, schema=schema))


def decimals(values: np.ndarray) -> list[Any]:
    """Returns float32 values as the shortest decimals that are read as the same float32: 0.1, not 0.10000000149."""
    return np.asarray(values, np.float32).astype("U").astype(np.float64).tolist()


class Tally:
    """Counts rows, whose first cell is the image's path and whose last one is why it has no prediction, or None."""

    def __init__(self) -> None:
        self.images = self.unreadable = 0
        self.named: dict[str, str] = {}  # the first unreadable images → why

    def add(self, rows: Iterable[PredictionRow]) -> None:
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
        self.replaces = out.exists()  # of a command that was killed after it made the file
        self._rows: list[PredictionRow] = []
        self._due = time.monotonic() + SECONDS
        lines = len(list(islice(self._lines(), 2)))
        if not lines and os.fstat(handle).st_size:
            raise UserError(f"{self.file}: is damaged (no line is complete); delete it to begin anew")
        self.has_rows = lines == 2

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
                        f"{self.file}: is of other images, or the images have changed: its image "
                        f"{self.tally.images + 1} was {row[0]} and is {now} now; name the same images, or delete "
                        "it to begin anew"
                    )
                self.tally.add([row])
                pulse.beat()

    def add(self, rows: Iterable[PredictionRow]) -> None:
        """Adds a row per image. They are on the disk a second later, or after `flush`."""
        rows = list(rows)
        self.tally.add(rows)
        self._rows += rows
        if time.monotonic() >= self._due:
            self.flush()

    def flush(self) -> None:
        if self._rows:
            # appending to a deleted file would make a new one, without the rows before
            self._refuse_lost()
            append_lines(self.file, [{"count": self.tally.images, "rows": self._rows}])
            self.has_rows = True
        self._rows, self._due = [], time.monotonic() + SECONDS

    def rows(self) -> Iterator[PredictionRow]:
        """Yields the rows on the disk. Raises `UserError` if some are missing, at the latest after the last one."""
        count = 0
        for line in self._lines():
            yield from line["rows"]
            count = line["count"]
        if count != self.tally.images:
            raise UserError(
                f"{self.file}: has {count} rows for {self.tally.images} images, because another program changed "
                "it; delete it to begin anew"
            )

    def complete(self, write: Callable[[Path], None]) -> None:
        """Makes the file of predictions by `write(path)`; this one is of no more use.

        Raises `UserError` if there is such a file now, and was none when the command began.
        """
        self._refuse_lost()
        # of a command that was killed here: mkstemp's names have eight characters
        for left in self.out.parent.glob(f".{glob.escape(self.out.name)}.{8 * '?'}{UNFINISHED}"):
            left.unlink(missing_ok=True)
        with Together(new=not self.replaces) as files:
            files.add(self.out, write)
            files.replace()
        self.has_rows = False

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
            raise UserError(f"{out}: {TAKEN}")


@contextmanager
def open_unfinished(out: Path, about: Mapping[str, Any], resume: bool) -> Iterator[Unfinished]:
    """Yields the unfinished file of `out`, which no other process writes to. Without rows it is removed at the end.

    Raises `UserError` if `out` exists, if it cannot be written, or if there are earlier rows and not `resume`.
    """
    refuse_taken(out, resume)
    file = unfinished_file(out)
    with ExitStack() as locked:
        if fcntl is None:
            locked.enter_context(_file_beside(file))
        handle = _lock(file)
        opened = locked.enter_context(ExitStack())
        opened.callback(os.close, handle)
        unfinished = Unfinished(out, about, handle)
        if unfinished.has_rows and not resume:
            raise UserError(
                f"{file}: unfinished predictions of an earlier command; add --resume to continue them, or delete it"
            )
        try:
            if not unfinished.has_rows:
                refuse_taken(out, resume=False)  # the command that held the lock may have completed it
                with disk_errors(file):
                    os.ftruncate(handle, 0)
                    append_lines(file, [{"about": dict(about), "count": 0, "rows": []}])
                    sync(file.parent)  # or a crash could lose the name of the new file
            yield unfinished
        finally:
            if not unfinished.has_rows and _is_named(file, handle):
                with disk_errors(file):
                    if fcntl is None:
                        opened.close()  # Windows removes no open file
                    file.unlink()


@contextmanager
def _file_beside(file: Path) -> Iterator[None]:
    """Context of a lock where an open file has none: of a file beside it. Raises `UserError`, as `_lock` does."""
    with disk_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(file.with_name(f"{file.name}.lock"), timeout=LOCK_SECONDS):
            yield
    except Timeout as error:
        raise UserError(f"{file}: {BUSY}") from error


def _lock(file: Path) -> int:
    """Returns a handle of the file, which is made if there is none, and locked until it is closed.

    Raises `UserError` for a link, and if another process keeps the lock.
    """
    until = time.monotonic() + LOCK_SECONDS
    while True:
        with disk_errors(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            if file.is_symlink():
                raise UserError(f"{file}: is a symbolic link; delete it, or name another file")
            # O_NOFOLLOW: the file will be truncated, and a link could lead to any other one
            handle = os.open(file, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
            if fcntl is None:
                return handle
            with suppress(BlockingIOError):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_named(file, handle):  # not if the command that held the lock has removed its file
                    return handle
        os.close(handle)
        if time.monotonic() > until:
            raise UserError(f"{file}: {BUSY}")
        time.sleep(0.05)


def _is_named(file: Path, handle: int) -> bool:
    """Whether the path names the open file, and not another one or none."""
    try:
        return os.path.samestat(os.lstat(file), os.fstat(handle))
    except FileNotFoundError:
        return False
