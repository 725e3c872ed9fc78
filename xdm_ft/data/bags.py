"""Slides or patients as bags of features, one file per slide, each pooled to one row; labels and domains in a table."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from xdm_ft.data.features import FeatureTable, LogitScale, TextFile
from xdm_ft.data.table import path_in, read_cells, split_in
from xdm_ft.image_files.bags import SUFFIXES, Bag, BagPool, BagUnit, files_of_slide, pooled, read_bags
from xdm_ft.image_files.files import index_names
from xdm_ft.image_files.tables import SLIDE_COLUMNS, SlideColumns, name_in, on_disk
from xdm_ft.runtime.errors import UserError, join_names, not_there, printable
from xdm_ft.storage.names import expand_user

SHARED = ("label", "domain", "split")  # what all slides of a group have in common
MOST_FAULTS = 100  # lines


class Bags(FeatureTable):
    """One row per bag: a slide, whose group is the patient, or a group with the patches of all its slides.

    All faulty rows and files are reported together. What pools a file is remembered under the hash of its content.
    """

    def __init__(
        self,
        *,
        folder: Annotated[Path, Field(description="folder with one file of features per slide: .h5, .pt or .npy")],
        table: Annotated[
            Path, Field(description="CSV or Parquet: slide or file, label, domain; optional: group, split")
        ],
        pool: Annotated[
            BagPool, Field(description="what the rows of a bag become: their mean, maximum, or both, of width 2K")
        ] = "mean",
        unit: Annotated[
            BagUnit, Field(description="bags: each slide, or all slides of a group (label and domain in common) as one")
        ] = "slide",
        columns: Annotated[SlideColumns, Field(description="names of the columns")] = SLIDE_COLUMNS,
        class_embeddings: TextFile = None,
        logit_scale: LogitScale = 100.0,
    ) -> None:
        if class_embeddings is not None and pool != "mean":
            raise UserError(f"data.pool: {pool} is no mean of image embeddings; use mean with data.class_embeddings")
        self.pool, self.unit, file = pool, unit, expand_user(table, "data.table")
        self.where = printable(file)
        rows = _Rows(file, expand_user(folder, "data.folder"), columns, unit)
        bags = [[i] for i in range(len(rows.files))]
        if unit == "group":
            bags = rows.by_group()
        self.columns = rows.columns
        self.features = rows.pooled(bags, pool)
        texts = {column: [values[i] for i, *_ in bags] for column, values in rows.values.items()}
        self.class_names, self.labels = index_names(texts["label"])
        self.domain_names, self.domains = index_names(texts["domain"])
        if "group" in texts:
            self.group_names, self.groups = index_names(texts["group"])
        if "split" in texts:
            self.splits = np.array(texts["split"])
        names = texts["group" if unit == "group" else rows.named_by]
        self.ids = tuple(map(printable, names)), np.arange(len(names))
        self.take_text(class_embeddings, logit_scale)

    @property
    def source(self) -> str:
        return f"{self.pool} of the features of each {self.unit} of {self.file_name}"


class _Rows:
    """The rows of a table of slides; `faults` are collected until the files are read."""

    def __init__(self, table: Path, folder: Path, columns: SlideColumns, unit: BagUnit) -> None:
        if not folder.is_dir():
            problem = "is not a folder" if folder.exists() else not_there(folder)
            raise UserError(f"data.folder: {folder} {problem}; name the folder of the slides' files")
        self.table, self.folder, self.faults = printable(table), folder, list[tuple[int, str]]()
        self.called = called = columns.model_dump()
        renamed = [key for key in columns.model_fields_set if called[key] != key]
        needed = dict.fromkeys(("label", "domain", *["group"] * (unit == "group"), *renamed))
        cells, self.numbers, ignored = read_cells(table, [*needed], called, False, "data.table")
        if not {"slide", "file"} & cells.keys():
            raise UserError(f"{table}: there is no column slide or file; add one, or set data.columns={{slide: NAME}}")
        self.columns = [called[column] for column in cells], ignored
        text_in = {"split": split_in, "file": path_in}
        self.values = {column: self._texts(column, cells[column], text_in.get(column, name_in)) for column in cells}
        self.named_by = "file" if "file" in cells else "slide"
        self.files = self._files(self.named_by)

    def _fault(self, i: int, problem: str) -> None:
        self.faults.append((i, problem))

    def _texts(self, column: str, cells: Sequence[object], text_in: Callable[[object], str]) -> list[str]:
        """Returns the text of each cell, "" for a faulty one."""
        texts = list[str]()
        for i, cell in enumerate(cells):
            try:
                texts.append(text_in(cell))
            except ValueError as error:
                texts.append("")
                self._fault(i, f"column {self.called[column]}: {error}")
        return texts

    def _files(self, column: str) -> list[str]:
        """Returns the file of each row, "" for one without, or with that of an earlier row."""
        files, row_of = list[str](), dict[str, int]()
        for i, text in enumerate(self.values[column]):
            names = files_of_slide(self.folder, text) if column == "slide" else [text]
            paths = [os.path.abspath(on_disk(self.folder, name)) for name in names]
            exist = [path for path in paths if text and os.path.lexists(path)]
            fault = ""
            if text and not exist:
                hint = "; write / instead of \\" if "\\" in text else ""
                endings = f" with {', '.join(SUFFIXES)}" if column == "slide" else ""
                fault = f"{text}{endings} does not exist in {printable(self.folder)}{hint}"
            elif len(exist) > 1:
                fault = f"{join_names([os.path.basename(path) for path in exist])} are several files; keep one"
            elif exist and exist[0] in row_of:
                fault = f"{text} is already in row {self.numbers[row_of[exist[0]]]}; remove one"
            if fault:
                self._fault(i, f"column {self.called[column]}: {fault}")
            files.append(exist[0] if exist and not fault else "")
            if files[-1]:
                row_of[files[-1]] = i
        return files

    def by_group(self) -> list[list[int]]:
        """Returns the rows of each group, in the order of the table."""
        rows_of: dict[str, list[int]] = {}
        for i, name in enumerate(self.values["group"]):
            rows_of.setdefault(name, []).append(i)
        for name, rows in rows_of.items():
            for column in [column for column in SHARED if column in self.values and name]:
                of_first, *others = dict.fromkeys(self.values[column][i] for i in rows)
                if others:
                    row = next(i for i in rows if self.values[column][i] == others[0])
                    problem = f"{others[0]} differs from {of_first} of another slide of group {name}; give it one"
                    self._fault(row, f"column {self.called[column]}: {problem}")
        return [*rows_of.values()]

    def pooled(self, bags: Sequence[Sequence[int]], pool: BagPool) -> np.ndarray:
        """Returns the pooled bags, float32 [N,K] or [N,2K]. Raises `UserError` with all faults of table and files."""
        files = [self.files[i] for rows in bags for i in rows if self.files[i]]
        read, widths, features = read_bags(files, show=True), dict[int, int](), list[np.ndarray]()
        for rows in bags:
            parts = list[Bag]()
            for i in rows:
                part = next(read) if self.files[i] else ""
                if isinstance(part, Bag):
                    parts.append(part)
                    widths[i] = len(part.mean)
                elif part:
                    self._fault(i, f"{self._name(i)}: {part}")
            if len({len(part.mean) for part in parts}) == 1:  # otherwise, as for every fault, nothing is returned
                features.append(pooled(parts, pool))
        for most, _ in Counter(widths.values()).most_common(1):
            for i, width in widths.items():
                if width != most:
                    problem = f"has {width} features per row, and most files have {most}; write one width"
                    self._fault(i, f"{self._name(i)}: {problem}")
        if self.faults:
            lines = [f"{self.table}: row {self.numbers[i]}, {problem}" for i, problem in sorted(self.faults)]
            more = [f"{self.table}: {len(lines) - MOST_FAULTS} more faults"] if len(lines) > MOST_FAULTS else []
            raise UserError(*lines[:MOST_FAULTS], *more)
        return np.stack(features)

    def _name(self, i: int) -> str:
        return printable(os.path.relpath(self.files[i], self.folder))
