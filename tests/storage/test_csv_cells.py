"""No text of a CSV file is a formula to a spreadsheet, and reading one gives every text back."""

import csv
import io

import pytest

from xdm_ft.storage.csv_cells import csv_line, read_cell

SIGNS = ("=", "+", "-", "@", "\t", "\r", "\n")
TEXTS = [
    before + sign + after
    for sign in SIGNS
    for before in ("", "'", "''", "a", "./", "././", " ")
    for after in ("", "1+1")
]
TEXTS += ["", "'", "'a", "''", "./", "./a.png", "././a.png", "cat ", "cat", "/absolute", "é=1", 'a"b,c']  # fmt: skip
COLUMNS = ("path", "label", "probability", "abstained", "note")


def cells_of(line: str) -> list[str]:
    [cells] = csv.reader(io.StringIO(line, newline=""))
    return cells


@pytest.mark.parametrize("text", TEXTS)
def test_every_text_comes_back_and_none_is_a_formula(text: str) -> None:
    line = csv_line(COLUMNS, [text, text, -1.5, True, None])
    path, label, *others = cells_of(line)
    assert others == ["-1.5", "true", ""], "numbers stay numbers"
    assert not path.startswith(SIGNS) and not label.startswith(SIGNS)
    assert read_cell("path", path) == text and read_cell("label", label) == text


@pytest.mark.parametrize("path", [" a.png", "  ", " ./a.png", "./ a.png"])
def test_a_path_keeps_the_blank_that_readers_drop(path: str) -> None:
    [[cell]] = csv.reader(io.StringIO(csv_line(["path"], [path])), skipinitialspace=True)
    assert read_cell("path", cell) == path


def test_only_what_needs_it_is_quoted() -> None:
    assert csv_line(COLUMNS, ["-a.png", "=1+1", 0.5, False, "'a"]) == "./-a.png,'=1+1,0.5,false,'a\n"
    assert csv_line(COLUMNS, ["./a.png", "'=1", None, None, "a=b"]) == "./a.png,''=1,,,a=b\n"
