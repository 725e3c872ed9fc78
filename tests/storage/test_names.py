"""Names of methods and domains as names of files: the same as before where short, and never outside the folder."""

from __future__ import annotations

import os
from pathlib import Path

from xdm_ft.storage.names import MAX_BYTES, file_name, model_folder

CJK = "語" * 29  # 261 bytes when percent-encoded
ODD = [
    "", ".", "..", "...", "a/b", "a%2Fb", "../../x", "/etc", ".hidden", "a\0b", "a\nb", "\udcff", "%-", "%~", "~",
    "a,b", "a%2Cb", CJK, CJK + "x", "x" * MAX_BYTES, "x" * (MAX_BYTES + 1), "x" * 300, "x" * 299 + "y", "é", "e\u0301",
]  # fmt: skip


def test_short_names_stay_as_they_were() -> None:
    folder = model_folder("xdomainmix+sam head 2", ("art_painting", "real world"), 3, 0)
    assert folder == "models/xdomainmix+sam head 2/art_painting,real world/seed3-trial0"
    assert file_name("ä/b") == "%C3%A4%2Fb"


def test_odd_names_are_distinct_files_of_one_folder(tmp_path: Path) -> None:
    assert len(set(ODD)) == len(ODD)
    for number, name in enumerate(ODD):
        (tmp_path / file_name(name)).write_text(str(number))
    assert len(os.listdir(tmp_path)) == len(ODD)
    for number, name in enumerate(ODD):
        found = file_name(name)
        assert (tmp_path / found).read_text() == str(number)
        assert found == file_name(name) and len(found.encode()) <= MAX_BYTES and not found.startswith(".")


def test_the_file_name_of_a_long_name_is_no_other_names() -> None:
    long = file_name(CJK)
    assert file_name(long) != long


def test_several_names_are_told_from_one_with_a_comma() -> None:
    several = [("a", "b"), ("a,b",), ("a", "", "b"), ("a", "b", ""), ("", "a", "b"), ("a",), ("b", "a")]
    assert len({file_name(*names) for names in several}) == len(several)
