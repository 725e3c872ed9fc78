"""Which images a path means, in which order, with which group, and what is refused before anything is read."""

import errno
import io
import os
import sys
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest

from xdm_ft.export.sources import Sources, count_files
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage.lines import csv_line

NAMES = ("b/2.png", "b/1.JPG", "a/x/deep.tif", "b/notes.txt", ".hidden/h.png", "b/.h.png", "top.png", "c.png/i.bmp")


@pytest.fixture
def scans(in_folder):
    """Some empty files: a source knows images by their extension alone."""
    for name in NAMES:
        (in_folder / "scans" / name).parent.mkdir(parents=True, exist_ok=True)
        (in_folder / "scans" / name).touch()
    return in_folder / "scans"


def paths(*given, **how):
    sources = Sources(given, **how)
    found = list(sources)
    assert sources.count() == len(found)
    assert all(os.path.lexists(item.content) for item in found)
    return [item.path for item in found]


def test_a_folder_is_read_in_order_at_any_depth(scans):
    names = ["a/x/deep.tif", "b/1.JPG", "b/2.png", "c.png/i.bmp", "top.png"]
    assert paths("scans") == [f"scans/{name}" for name in names]
    assert paths("scans/") == [f"scans/{name}" for name in names]
    assert paths(str(scans / "b"), "scans/top.png") == [f"{scans}/b/1.JPG", f"{scans}/b/2.png", "scans/top.png"]


def test_links_are_followed_and_not_in_circles(scans):
    (scans / "b" / "back").symlink_to(scans)
    (scans / "link.png").symlink_to(scans / "top.png")
    (scans / "self.png").symlink_to("self.png")
    (scans / "b" / "to_a").symlink_to(scans / "a")  # with the other, 2^40 ways to the same images
    for given in ("scans", "scans/**/*.*"):
        found = [item.path for item in Sources([given])]
        assert found.count("scans/b/2.png") == 1 and len([path for path in found if "deep" in path]) == 1
        assert {"scans/link.png", "scans/self.png"} <= {*found}  # the latter does not decode


@pytest.mark.parametrize("given", ["scans", "scans/**/*.png"])
def test_a_folder_that_can_not_be_read_is_not_passed_over(scans, given, monkeypatch):
    def scandir(folder):
        if str(folder).endswith("a/x"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return original(folder)

    original = os.scandir
    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UserError, match="PATH: scans/a/x cannot be read: Permission denied"):
        paths(given)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("scans/**/*.png", ["b/2.png", "top.png"]),
        ("scans/**", ["a/x/deep.tif", "b/1.JPG", "b/2.png", "c.png/i.bmp", "top.png"]),
        ("scans/*/*", ["b/1.JPG", "b/2.png", "c.png/i.bmp"]),
        ("scans/[ab]/**/*.???", ["a/x/deep.tif", "b/1.JPG", "b/2.png"]),
        ("scans/**/x/**/deep.*", ["a/x/deep.tif"]),
        ("./scans//b/*2*", ["b/2.png"]),
    ],
)
def test_globs(scans, pattern, names):
    found = paths(pattern)
    assert [os.path.normpath(path) for path in found] == [f"scans/{name}" for name in names]
    assert paths(f"{scans.parent}/{pattern}") == [os.path.join(f"{scans.parent}", path) for path in found]


def test_a_file_whose_name_looks_like_a_glob_is_a_file(scans):
    (scans / "a[1]*.png").touch()
    assert paths("scans/a[1]*.png") == ["scans/a[1]*.png"]


def test_a_folder_whose_name_looks_like_a_glob_is_a_folder(scans):
    for folder in ("run[1]", "run1", "a*"):
        (scans / folder).mkdir()
        (scans / folder / f"{folder}.png").touch()
    assert paths("scans/run[1]/*.png") == ["scans/run[1]/run[1].png"]
    assert paths(f"{scans}/run[1]/*.p[n]g") == [f"{scans}/run[1]/run[1].png"]
    assert paths("scans/run[01]/*.png") == ["scans/run1/run1.png"]


def test_a_glob_reads_no_folder_that_it_can_not_match(scans, monkeypatch):
    read, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda folder: (read.append(os.path.normpath(folder)), scandir(folder))[1])
    assert paths("scans/b/*.png") == ["scans/b/2.png"]
    assert set(read) == {"scans/b"}


def test_a_table_of_predictions_names_the_same_images_and_groups(scans):
    """`predict` writes what a spreadsheet would compute with ./ or an apostrophe."""
    names = ["=1.png", "-2.png", "./@3.png", "+4/5.png", "'=6.png", " 7.png"]
    for name in names:
        (scans / name).parent.mkdir(exist_ok=True)
        (scans / name).touch()
    rows = [[name, group, 0.5] for name, group in zip(names, ("=a", "'=a", "-1", "+", "b", "c"), strict=True)]
    lines = [csv_line(("path", "site", "probability"), row) for row in [["path", "site", "probability"], *rows]]
    (scans / "t.csv").write_text("".join(lines))
    text = (scans / "t.csv").read_text()
    assert not [line for line in text.splitlines() if line.startswith(("=", "+", "-", "@"))]
    found = list(Sources([str(scans / "t.csv")], "site"))
    assert [[item.path, item.group, 0.5] for item in found] == rows
    assert all(os.path.lexists(item.content) for item in found)


def test_tables(scans):
    (scans / "t.csv").write_text('path, other\nb/2.png,1\n\n"b/1.JPG",2\nmissing.png,3\n')
    found = list(Sources(["scans/t.csv"]))
    assert [item.path for item in found] == ["b/2.png", "b/1.JPG", "missing.png"]
    assert [item.content for item in found] == ["scans/b/2.png", "scans/b/1.JPG", "scans/missing.png"]
    pyarrow.parquet.write_table(pyarrow.table({"n": [1, 2], "path": ["b/2.png", f"{scans}/top.png"]}), "t.parquet")
    found = list(Sources(["t.parquet"]))
    assert [item.content for item in found] == ["b/2.png", f"{scans}/top.png"]
    assert Sources(["t.parquet", "scans/t.csv", "scans"]).count() == 10


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_groups_are_of_a_column_or_of_an_expression(scans, kind):
    rows = {"path": ["b/2.png", "b/1.JPG"], "patient": ["p 1", " p2 "]}
    if kind == "csv":
        (scans / "t.csv").write_text("path,patient\nb/2.png,p 1\nb/1.JPG, p2 \n")
    else:
        pyarrow.parquet.write_table(pyarrow.table(rows), scans / "t.parquet")
    assert [item.group for item in Sources([f"scans/t.{kind}"])] == ["", ""]
    assert [item.group for item in Sources([f"scans/t.{kind}"], "patient")] == ["p 1", "p2"]
    assert [item.group for item in Sources([f"scans/t.{kind}", "scans/b"], r"(.)/(\d)")] == ["b/2", "b/1", "b/1", "b/2"]
    assert [item.group for item in Sources(["scans/b"], r"\d")] == ["1", "2"]


def test_a_list_on_standard_input(scans, monkeypatch):
    lines = b"scans/b/2.png\n\nmissing.png\r\nnot\xffutf8.png\nlast.png"
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(lines)))
    sources = Sources(["scans/top.png", "-"])
    assert sources.count() is None
    found = [item.path for item in sources]
    assert found == ["scans/top.png", "scans/b/2.png", "missing.png", "not\udcffutf8.png", "last.png"]


@pytest.mark.parametrize(
    ("given", "group_by", "line"),
    [
        (["scans", "scans/none.png"], None, "scans/none.png: does not exist; name"),
        (["scans/**/*.webp"], None, r"scans/**/*.webp: matches no image"),
        (["-", "-"], None, "is given twice"),
        (["scans"], "b/", "--group-by: b/ matches nothing in scans/a/x/deep.tif"),
        (["scans/t.csv"], "slide", "slide is not a column of scans/t.csv and matches nothing in b/2.png"),
        (["scans/other.csv"], None, "there is no column path; found: file; rename file to path"),
        (["scans/cell.csv"], None, "row 3, column path: the cell is empty"),
        (["scans/cell.csv"], "patient", "row 2, column patient: the cell is empty"),
        (["scans/text.parquet"], None, "cannot be read as Parquet: 'utf-8' codec can't decode byte 0xff"),
        (["scans/a\nb*.png"], None, r"scans/a\nb*.png: matches"),
    ],
)
def test_what_is_refused(scans, given, group_by, line):
    (scans / "t.csv").write_text("path\nb/2.png\n")
    (scans / "other.csv").write_text("file\nx.png\n")
    (scans / "cell.csv").write_text("path,patient\nb/2.png,\n,1\n")
    damaged = pyarrow.array([b"\xff.png"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"path": damaged}), scans / "text.parquet")
    with pytest.raises(UserError) as error:
        Sources(given, group_by).count()
    assert line in str(error.value) and "\n" not in str(error.value)


def test_other_files_are_counted_by_extension(scans):
    for name in ("b/1.DCM", "a/x/2.dcm", "a/IM0001", "a/1.2.840.10008", "a/.hidden.dcm"):
        (scans / name).touch()
    sources = Sources(["scans"])
    sources.count()
    assert count_files(sources.others) == "5 other files: 2 .dcm, 2 without an extension, 1 .txt"
    list(sources)
    assert sources.others.total() == 5, "what iterating finds is not added to what counting has found"
    sources = Sources(["scans/b/*", "scans/top.png", "scans/a/IM0001"])
    assert sources.count() == 4 and sources.others == {".dcm": 1, ".txt": 1}
    many = {f".{letter}": 2 for letter in "abcdefghij"}
    assert count_files(many).endswith(", 2 .h, 4 with other extensions")
