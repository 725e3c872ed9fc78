"""Cells of tables that are no names: missing values in all their spellings, and values that are not text."""

from __future__ import annotations

import datetime
import io
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest
from made_up import MadeUp
from PIL import Image

from xdm_ft.containers.image_tables import Columns
from xdm_ft.containers.tables import MISSING, alike, name_in
from xdm_ft.data.folder import Folder
from xdm_ft.data.parquet import Parquet
from xdm_ft.data.table import Table
from xdm_ft.experiment.faults import Finding, data_faults
from xdm_ft.runtime.errors import UserError

NAMES = ("a.png", "b.png", "c.png", "d.png")
COLUMNS = ("label", "domain", "group")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    for name in NAMES:
        Image.new("RGB", (5, 4), "teal").save(folder / name)
    return folder


def cells(**changed: Any) -> dict[str, list[Any]]:
    good = {"path": NAMES, "label": "cdcd", "domain": "xxyy", "group": "ppqq"}
    return {name: list(changed.get(name, column)) for name, column in good.items()}


def as_csv(folder: Path, columns: dict[str, list[Any]]) -> Table:
    rows = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    (folder / "t.csv").write_text("\n".join(rows))
    return Table(file=folder / "t.csv")


def as_parquet(folder: Path, columns: dict[str, list[Any]]) -> Table:
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "t.parquet")
    return Table(file=folder / "t.parquet")


def with_images(folder: Path, columns: dict[str, list[Any]]) -> Parquet:
    images = [(folder / name).read_bytes() for name in columns.pop("path")]
    pyarrow.parquet.write_table(pyarrow.table({"image": images, **columns}), folder / "images.parquet")
    return Parquet(file=folder / "images.parquet", columns=Columns(group="group"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hub")


def refused(read: Any, folder: Path, columns: dict[str, list[Any]]) -> str:
    with pytest.raises(UserError) as caught:
        read(folder, columns)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_pandas_reads_all_of_them_as_missing() -> None:
    texts = sorted(MISSING - {"NaT"})
    assert len(texts) > 15
    assert pandas.read_csv(io.StringIO("\n".join(["label", *texts])), skip_blank_lines=False)["label"].isna().all()


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("read", [as_csv, as_parquet])
def test_texts_that_mean_a_missing_value(read: Any, column: str, folder: Path) -> None:
    for text in sorted(MISSING):
        message = refused(read, folder, cells(**{column: ["u", "v", text, f" {text}"]}))
        row = 4 if read is as_csv else 3
        assert f'row {row}, column {column}: "{text}" means a missing value; fill it in, or write another' in message
        assert message.endswith("(and 1 more rows like it)")


NO_NAMES: dict[str, tuple[list[Any], str]] = {
    "null": (["u", None, "w", None], "the cell is empty; fill it in"),
    "blank": (["u", "  ", "w", ""], "the cell is empty; fill it in"),
    "float nan": ([0.0, np.nan, 1.0, 2.0], '"nan" means a missing value'),
    "infinity": ([0.0, np.inf, 1.0, 2.0], '"inf" means a missing value'),
    "list": ([["u"], ["v"], ["u"], ["v"]], "must be text or a number, not a list"),
    "struct": ([{"k": "u"}] * 4, "must be text or a number, not a struct"),
    "bytes": ([b"u", b"v", b"u", b"v"], "must be text or a number, not a byte string"),
    "date": ([datetime.date(2020, 1, 2)] * 4, "must be text or a number, not a date"),
    "timestamp": ([datetime.datetime(2020, 1, 2)] * 4, "must be text or a number, not a datetime"),
}


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("kind", NO_NAMES)
def test_cells_that_are_no_names(kind: str, column: str, folder: Path) -> None:
    values, problem = NO_NAMES[kind]
    first = 0 if kind in ("list", "struct", "bytes", "date", "timestamp") else 1
    message = refused(as_parquet, folder, cells(**{column: values}))
    assert f"t.parquet: row {first + 1}, column {column}: " in message and problem in message


@pytest.mark.parametrize("kind", NO_NAMES)
def test_tables_that_hold_the_images(kind: str, folder: Path) -> None:
    values, problem = NO_NAMES[kind]
    message = refused(with_images, folder, cells(label=values))
    if "text or a number" in problem:  # of the whole column, as it is its type
        assert "images.parquet: column label: a name must be text or a number, not a " in message
    else:
        assert "images.parquet: row " in message and f", column label: {problem}" in message


def test_names_of_every_other_kind(folder: Path) -> None:
    for values, names in (
        (["u", "v ", "u", "v"], ("u", "v")),
        ([1, 2, 1, 2], ("1", "2")),
        ([1.0, 2.5, 1.0, 2.5], ("1.0", "2.5")),
        ([Decimal("1"), Decimal("2")] * 2, ("1", "2")),
        (["none", "other", "none", "other"], ("none", "other")),
    ):
        assert as_parquet(folder, cells(label=values)).class_names == names
    assert with_images(folder, cells(label=["None ?", "v", "v", "v"])).class_names == ("None ?", "v")


def test_a_folder_may_be_called_none(tmp_path: Path) -> None:
    for place in ("nan/None", "nan/tumour", "NA/None", "NA/tumour"):
        (tmp_path / place).mkdir(parents=True)
        Image.new("RGB", (5, 4)).save(tmp_path / place / "0.png")
    dataset = Folder(root=tmp_path)
    assert (dataset.class_names, dataset.domain_names) == (("None", "tumour"), ("NA", "nan"))


def faults_of(dataset: Any) -> list[Finding]:
    without_copies: Any = SimpleNamespace(duplicates=list)
    return list(data_faults(dataset, without_copies, []))


def test_one_beside_one_point_zero_is_said(folder: Path) -> None:
    dataset = as_csv(folder, cells(label=["1", "1.0", "01", "2"], domain=["Site", "site", "x", "x"]))
    classes, domains, *_ = faults_of(dataset)
    assert classes.found.startswith('"01" (in x) and "1" (in Site) and "1.0" (in site) differ only in case, in spaces')
    assert domains.found.startswith('"Site" (1 image) and "site" (1 image) differ only in case, in spaces or in how')
    assert classes.remedy and domains.remedy
    assert not [one for one in faults_of(MadeUp([0, 1, 2], [0, 1, 1])) if "differ only" in one.found]


def test_names_that_are_alike() -> None:
    names = ["1", "1.0", "1e0", "cat", "Cat", "cat ", "é", "e\u0301", "a b", "ab", "nan", "1_0", "10", "inf", "²", "2"]
    assert alike(names) == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9], [14, 15]]


def test_a_name_is_returned_as_text() -> None:
    assert [name_in(cell) for cell in (" x ", 3, True, -0.5, 10**30)] == ["x", "3", "True", "-0.5", str(10**30)]
