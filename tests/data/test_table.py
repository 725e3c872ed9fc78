"""Images in a table: every message names the file, the row and the column."""

import os
from pathlib import Path

import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from xdm_ft.data import load_dataset
from xdm_ft.data.table import TableDataset
from xdm_ft.image_files.tables import column_meant
from xdm_ft.protocol.splits import Protocol, splits
from xdm_ft.recipe.components import find, settings_model
from xdm_ft.runtime.errors import UserError

NAMES = ("a.png", "b.png", "c d.png", "sub/e.png")
CSV = """path,label,domain
b.png,dog,photo
a.png,cat,photo
c d.png,dog,sketch
sub/e.png,cat,sketch
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    for name in NAMES:
        Image.new("RGB", (5, 4), "teal").save(tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("name", ["table", "parquet"])
def test_a_block_of_results_json_gives_the_data_again(folder: Path, name: str) -> None:
    png = (folder / "a.png").read_bytes()
    cells = {
        "path": ["a.png", "b.png"],
        "image": [png, png],
        "label": ["wrong"] * 2,
        "class": ["x", "y"],
        "site": ["s", "t"],
    }
    pyarrow.parquet.write_table(pyarrow.table(cells), folder / "t.parquet")
    columns = {"label": "class", "domain": "site"}
    made = settings_model(find("data", name)).model_validate({"file": str(folder / "t.parquet"), "columns": columns})
    again = load_dataset({"name": name, **made.model_dump(mode="json")})
    assert (again.class_names, again.domain_names) == (("x", "y"), ("s", "t"))
    with pytest.raises(UserError, match="data: Input should be"):
        load_dataset({"name": name, "file": "t.parquet", "columns": 3})


def write(folder: Path, text: str, name: str = "t.csv", encoding: str = "utf-8") -> Path:
    (folder / name).write_text(text, encoding=encoding)
    return folder / name


def test_rows_keep_the_order_of_the_table(folder: Path) -> None:
    dataset = TableDataset(file=write(folder, CSV))
    assert [os.path.relpath(path, folder) for path in dataset.paths] == ["b.png", "a.png", "c d.png", "sub/e.png"]
    assert (dataset.class_names, dataset.domain_names) == (("cat", "dog"), ("photo", "sketch"))
    assert (dataset.labels.tolist(), dataset.domains.tolist()) == ([1, 0, 1, 0], [0, 0, 1, 1])
    assert (dataset.groups, dataset.splits) == (None, None)
    assert dataset.image(3).size == (5, 4) and dataset.name(3) == dataset.content(3) == str(folder / "sub/e.png")
    frame = pandas.read_csv(folder / "t.csv").assign(domain=[3, 3, 5, 5], group=["x", "x", "y", "z"])
    frame.to_parquet(folder / "t.parquet")
    parquet = TableDataset(file=folder / "t.parquet")
    assert parquet.domain_names == ("3", "5"), "hospital numbers become names"
    assert parquet.labels.tolist() == [1, 0, 1, 0] and parquet.groups.tolist() == [0, 0, 1, 2]
    assert parquet.paths == dataset.paths
    assert set(settings_model(find("data", "table")).model_fields) == {"file", "root", "group", "columns"}


def test_optional_columns_in_any_order_blanks_and_other_columns(folder: Path) -> None:
    text = (
        "extra, split, domain ,group,path,label\r\n"
        "1,train, photo,p2,a.png,none\r\n"
        "1,train, photo,p3,sub/e.png,other\r\n"
        '2,val,photo ,p1, "b.png",other\r\n'
        "\r\n"
        "3,test,sketch,p2,c d.png,none\r\n\r\n"
    )
    dataset = TableDataset(file=write(folder, text, encoding="utf-8-sig"))
    assert (dataset.class_names, dataset.domain_names) == (("none", "other"), ("photo", "sketch"))
    assert dataset.groups.tolist() == [1, 2, 0, 1] and dataset.splits.tolist() == ["train", "train", "val", "test"]
    (split,) = splits(dataset, Protocol(name="official"), seed=0)
    assert {name: rows.tolist() for name, rows in split.evaluation.items()} == {"train_val": [2], "test": [3]}
    assert split.test_domains == ("sketch",)
    by_path = TableDataset(file=folder / "t.csv", group=r"^\w+")
    assert by_path.groups.tolist() == [0, 3, 1, 2], "the recipe's group overrides the column"


def test_names_that_were_quoted_for_spreadsheets(folder: Path) -> None:
    for name, sign in (("a.png", "="), ("b.png", "@")):
        (folder / name).rename(folder / f"{sign}{name}")
    text = "path,label,domain,group\n./=a.png,'=1+1,'-1,'+49\n./@b.png,''=1+1,photo,'@home\n./c d.png,'a',-1,x\n"
    dataset = TableDataset(file=write(folder, text))
    assert [os.path.relpath(path, folder) for path in dataset.paths] == ["=a.png", "@b.png", "c d.png"]
    assert set(dataset.class_names) == {"=1+1", "'=1+1", "'a'"} and set(dataset.domain_names) == {"-1", "photo"}
    assert dataset.domains[0] == dataset.domains[2], "an unquoted one is read as before"


def test_root_and_absolute_paths(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    file = write(elsewhere, f"path,label,domain\na.png,x,d\n{folder}/b.png,y,d\n")
    assert TableDataset(file=file, root=folder).paths == [str(folder / "a.png"), str(folder / "b.png")]


def fault(file: Path) -> str:
    with pytest.raises(UserError) as caught:
        TableDataset(file=file)
    assert "\n" not in str(caught.value)
    return str(caught.value)


CELLS = "but the header has 3; quote cells that contain commas"
EMPTY = "the cell is empty; fill it in"
NO_NUMBER = "must be a number from 0 to 1, unless all p: of the row are empty"


def votes(cells: str, columns: str = "p:cat,p:dog") -> str:
    """A table of a cat and a dog with these columns too."""
    cat, dog = cells.split("\n")
    return f"path,label,domain,{columns}\na.png,cat,d,{cat}\nb.png,dog,d,{dog}\n"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("a.png,cat", "a.png,", f"row 3, column label: {EMPTY}"),
        ("\na.png,cat,photo\nc d.png,dog", "\n\na.png,,photo\nc d.png,",
         f"row 4, column label: {EMPTY} (and 1 more row like it)"),
        ("a.png,cat", "b.png,cat", "row 3, column path: b.png is already in row 2; remove one"),
        ("a.png,cat", "sub/../b.png,cat", "row 3, column path: sub/../b.png is already in row 2; remove one"),
        ("a.png,cat,photo", "a.png,cat", f"row 3: the row has 2 cells, {CELLS}"),
        ("path,label", "file,class", "there is no column path, label; found: file, class, domain; rename file to path, "
         "class to label, or set data.columns={path: file, label: class}"),
        ("path,label,domain", "Image_Path,labels,hospital",
         "there is no column path, label, domain; found: Image_Path, labels, hospital; rename Image_Path to path, "
         "labels to label, hospital to domain, or set data.columns={path: Image_Path, label: labels, domain: "
         "hospital}"),
        ("path,label,domain", "path,table,main", "there is no column label, domain; found: path, table, main; rename "
         "the columns, or set data.columns={label: NAME, domain: NAME}"),
        ("path,label,domain", "path;label;domain",
         "the columns are separated by semicolons; save it with commas"),
        ("path,label,domain", "path,label,domain,label", "two columns have the name label; rename one"),
        ('a.png,cat,photo', '"a.png"x,cat,photo', "row 3: ',' expected after '\"'"),
        ("a.png,cat", "é.png,cat", "the text is not UTF-8 (invalid continuation byte at byte 34); save it as UTF-8"),
        (CSV, "path,label,domain\n", "the table has no rows; add one per image"),
        (CSV, "path,label,domain,split\na.png,x,d,train\nb.png,y,d,tests\n",
         'row 3, column split: "tests" is not a split; did you mean "test"?'),
        (CSV, votes("1,0\n,1"), f"row 3, column p:cat: {NO_NUMBER}"),
        (CSV, votes("1,0\n1.2,-0.2"), f"row 3, column p:dog: {NO_NUMBER}"),
        (CSV, votes("1,0\ntwo,1"), f"row 3, column p:cat: {NO_NUMBER}"),
        (CSV, votes("60,40\n30,70"),
         "row 2, column p:cat: the columns p: of the row sum to 100; they must sum to 1 (and 1 more row like it)"),
        (CSV, votes("1,0\n0.6,0.3"), "row 3, column p:cat: the columns p: of the row sum to 0.9; they must sum to 1"),
        (CSV, votes("1,0\ninf,1"), "row 3, column p:cat: the columns p: of the row sum to inf; they must sum to 1"),
        (CSV, votes("0.9,0.1\n0.6,0.4"),
         "row 3, column p:dog: is 0.4, and p:cat is 0.6; the label must be among the most probable"),
        (CSV, votes("1,0\n0,1", "p:cat,p:dig"), 'column p:dig: no label has this name; did you mean "p:dog"?'),
        (CSV, votes("1,0\n0,1", "p:cat,age"), "there is no column p:dog; add it, or leave out all columns p:CLASS"),
        (CSV, votes("1,0\n0,1", "p:cat,p:cat"), "two columns have the name p:cat; rename one"),
        (CSV, votes("1,0,cat,1\n0,1,dog,1", "p:cat,p:dog,predicted,probability"),
         "the column probability shows that p:cat holds predictions; leave out the columns p:CLASS, or write the votes "
         "into them and leave out probability"),
    ],
)  # fmt: skip
def test_faults_of_a_csv_file(folder: Path, old: str, new: str, message: str) -> None:
    assert old in CSV
    file = write(folder, CSV.replace(old, new, 1), encoding="latin-1")
    assert fault(file) == f"{file}: {message}"


def test_soft_labels_are_in_the_order_of_the_classes(folder: Path) -> None:
    """Sums off by rounding are corrected, ties keep the label, and a row of empty cells is its label."""
    rows = "b.png,dog,d,1,0.0\na.png,cat,d,0.3334,0.6669\nc d.png,dog,d,,\nsub/e.png,cat,d,0.5,0.5\n"
    file = write(folder, f"path,label,domain,p:dog, P: cat\n{rows}")
    dataset = TableDataset(file=file)
    assert dataset.soft_labels is not None and dataset.soft_labels.dtype == np.float32
    expected = [[0, 1], [0.6669 / 1.0003, 0.3334 / 1.0003], [0, 1], [0.5, 0.5]]
    np.testing.assert_array_equal(dataset.soft_labels, np.array(expected, np.float32))
    assert dataset.columns == (["path", "label", "domain", "p:dog", "P: cat"], [])
    pandas.read_csv(file, skipinitialspace=True).to_parquet(folder / "v.parquet")
    np.testing.assert_array_equal(TableDataset(file=folder / "v.parquet").soft_labels, dataset.soft_labels)
    assert TableDataset(file=write(folder, CSV)).soft_labels is None
    numbered = write(folder, "path,label,domain,p:0,p:1\na.png,1,d,0.2,0.8\nb.png,0,d,1,0\n")
    np.testing.assert_array_equal(TableDataset(file=numbered).soft_labels, np.array([[0.2, 0.8], [1, 0]], np.float32))


def test_the_recipe_names_the_columns(folder: Path) -> None:
    file = write(folder, "File,diagnosis,site,label,pid\na.png,x,d,1,p1\nb.png,y,d,1,p2\n")
    columns = (
        settings_model(find("data", "table"))
        .model_validate(
            {"file": file, "columns": {"path": "File", "label": "diagnosis", "domain": "site", "group": "pid"}}
        )
        .columns
    )  # type: ignore[attr-defined]
    dataset = TableDataset(file=file, columns=columns)
    assert (dataset.class_names, dataset.domain_names, dataset.group_names) == (("x", "y"), ("d",), ("p1", "p2"))
    assert dataset.columns == (["File", "diagnosis", "site", "pid"], ["label"])
    pandas.read_csv(file).to_parquet(folder / "c.parquet")
    assert TableDataset(file=folder / "c.parquet", columns=columns).labels.tolist() == [0, 1]
    for named, problem in ({"group": "who"}, "there is no column who"), ({"label": "dx"}, "label: diagnosis}"):
        with pytest.raises(UserError, match=problem):
            TableDataset(file=file, columns=columns.model_copy(update=named))
    file.write_text(file.read_text().replace("b.png,y", "b.png,"))
    with pytest.raises(UserError, match="row 3, column diagnosis: the cell is empty"):
        TableDataset(file=file, columns=columns)


def test_a_column_is_suggested_by_its_meaning() -> None:
    names = ["image_width", "img_name", "Hospital ID", "TumorClass", "patient_id", "image_id"]
    meant = {column: column_meant(column, names) for column in ("path", "label", "domain", "group", "split")}
    assert meant == dict(path="img_name", label="TumorClass", domain="Hospital ID", group="patient_id", split=None)
    assert column_meant("label", ["table", "lable"]) == "lable" and column_meant("domain", ["main", "remain"]) is None


def test_names_and_paths_in_either_encoding(folder: Path) -> None:
    """A Mac writes é as two characters; the table of a site names the file in one, or the reverse."""
    one, two = "é", "e\u0301"
    for name, on_disk in ((one, two), (f"o{two}", f"o{one}")):
        Image.new("RGB", (5, 4)).save(folder / f"{on_disk}.png")
        dataset = TableDataset(file=write(folder, f"path,label,domain\n{name}.png,{one},d\na.png,{two},d\n"))
        assert dataset.class_names == (one,) and dataset.paths[0] == str(folder / f"{on_disk}.png")
        assert dataset.image(0).size == (5, 4)
    again = write(folder, f"path,label,domain\n{one}.png,x,d\n{two}.png,x,d\n")
    assert "is already in row 2" in fault(again)


def test_paths_of_windows_have_a_hint(folder: Path) -> None:
    file = write(folder, CSV.replace("sub/", "sub\\"))
    assert "the file does not exist; write / instead of \\; 1 of 4 are missing" in fault(file)


def test_missing_files_are_named_and_counted(folder: Path) -> None:
    file = write(folder, CSV + "".join(f"no{i}.png,cat,photo\n" for i in range(5)))
    problem = f"row 6, column path: the file does not exist; 5 of 9 are missing: {folder}/no0.png, "
    assert (message := fault(file)).startswith(f"{file}: {problem}") and message.count(".png") == 3
    assert message.endswith(f"; paths start at {folder}; data.root names another folder")


def test_faults_of_the_file(folder: Path) -> None:
    assert "does not exist" in fault(folder / "none.csv")
    assert "does not end in .csv or .parquet" in fault(write(folder, CSV, "t.xlsx"))
    (folder / "dir.csv").mkdir()
    assert "is not a file" in fault(folder / "dir.csv")
    assert "cannot be read as Parquet" in fault(write(folder, "text", "t.parquet"))
    frame = pandas.DataFrame({"path": ["a.png", "b.png"], "label": ["x", None], "domain": ["d", "d"]})
    frame.to_parquet(folder / "n.parquet")
    assert fault(folder / "n.parquet").endswith(f"n.parquet: row 2, column label: {EMPTY}")
    frame[["path"]].to_parquet(folder / "m.parquet")
    assert "there is no column label, domain; found: path; rename" in fault(folder / "m.parquet")
    damaged = pyarrow.array([b"\xff.png"]).view(pyarrow.string())
    table = pyarrow.table({"path": damaged, "label": ["x"], "domain": ["d"]})
    pyarrow.parquet.write_table(table, folder / "u.parquet")
    assert "u.parquet: cannot be read as Parquet: 'utf-8' codec can't decode byte 0xff" in fault(folder / "u.parquet")
