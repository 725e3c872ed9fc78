"""Names as files, texts as cells of CSV, and checksums: what lies on users' disks under them may not change."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from xdm_ft.core import ModelKey
from xdm_ft.results.model import Pick, Record
from xdm_ft.storage import digest, json_digest, tensors_digest
from xdm_ft.storage.lines import csv_line, read_cell
from xdm_ft.storage.names import MAX_BYTES, address_in, file_name, model_folder, parts_of, predictions_in

VIT = {"encoder": "vit", "trainable": False}  # of a record

CJK = "語" * 29  # 261 bytes when percent-encoded
ODD = [
    "", ".", "..", "...", "a/b", "a%2Fb", "../../x", "/etc", ".hidden", "a\0b", "a\nb", "\udcff", "%-", "%~", "~",
    "a,b", "a%2Cb", CJK, CJK + "x", "x" * MAX_BYTES, "x" * (MAX_BYTES + 1), "x" * 300, "x" * 299 + "y", "é", "e\u0301",
]  # fmt: skip


def test_names_are_distinct_files_of_one_folder(tmp_path: Path) -> None:
    assert file_name("ä/b") == "%C3%A4%2Fb" and file_name("art_painting") == "art_painting"
    for number, name in enumerate(ODD):
        (tmp_path / file_name(name)).write_text(str(number))
    assert len(os.listdir(tmp_path)) == len(set(ODD)) == len(ODD)
    for number, name in enumerate(ODD):
        file = file_name(name)
        assert (tmp_path / file).read_text() == str(number)
        assert len(file.encode()) <= MAX_BYTES and not file.startswith(".")
    assert file_name(file_name(CJK)) != file_name(CJK), "that of a long name is no other name's"
    several = [("a", "b"), ("a,b",), ("a", "", "b"), ("a", "b", ""), ("", "a", "b"), ("a",), ("b", "a")]
    assert len({file_name(*names) for names in several}) == len(several)


def test_addresses() -> None:
    key = ("erm", ("a#b", "c"), 3, 2)
    own, shared = model_folder(*key), model_folder(*key, "1a2b")
    folder = model_folder("xdomainmix+sam head 2", ("art_painting", "real world"), 3, 0)
    assert folder == "models/xdomainmix+sam head 2/art_painting,real world/seed3-trial0"
    assert own == "models/erm/a%23b,c/seed3-trial2", "# is in no name of a folder"
    assert shared == "models/erm/heads-1a2b.safetensors#a%23b,c/seed3-trial2"
    assert address_in(own, "val") == f"{own}/val.safetensors" and address_in(shared, "val") == f"{shared}/val"
    for folder, rules in ((own, ()), (own, ("val",)), (shared, ("val", "oracle"))):
        picks = {rule: Pick(1, address_in(folder, rule), {}) for rule in rules}
        assert Record(ModelKey(*key), {}, "ok", selected=picks, **VIT).folder == folder
    assert parts_of(predictions_in(own)) == (f"{own}/predictions.safetensors", None)
    assert parts_of(predictions_in(shared)) == (
        "models/erm/heads-1a2b.safetensors", "a%23b,c/seed3-trial2/predictions",
    )  # fmt: skip


# ---- Cells of CSV: no text is a formula to a spreadsheet, and reading gives every text back

SIGNS = ("=", "+", "-", "@", "\t", "\r", "\n")
TEXTS = [
    before + sign + after
    for sign in SIGNS
    for before in ("", "'", "''", "a", "./", "././", " ")
    for after in ("", "1+1")
]
TEXTS += ["", "'", "'a", "''", "./", "./a.png", "././a.png", "cat ", "cat", "/absolute", "é=1", 'a"b,c']  # fmt: skip
COLUMNS = ("path", "label", "probability", "abstained", "note")


@pytest.mark.parametrize("text", TEXTS)
def test_every_text_comes_back_and_none_is_a_formula(text: str) -> None:
    line = csv_line(COLUMNS, [text, text, -1.5, True, None])
    [[path, label, *others]] = csv.reader(io.StringIO(line, newline=""))
    assert others == ["-1.5", "true", ""], "numbers stay numbers"
    assert not path.startswith(SIGNS) and not label.startswith(SIGNS)
    assert read_cell("path", path) == text and read_cell("label", label) == text


def test_only_what_needs_it_is_quoted() -> None:
    for path in (" a.png", "  ", " ./a.png", "./ a.png"):  # readers drop a blank at the beginning
        [[cell]] = csv.reader(io.StringIO(csv_line(["path"], [path])), skipinitialspace=True)
        assert read_cell("path", cell) == path
    assert csv_line(COLUMNS, ["-a.png", "=1+1", 0.5, False, "'a"]) == "./-a.png,'=1+1,0.5,false,'a\n"
    assert csv_line(COLUMNS, ["./a.png", "'=1", None, None, "a=b"]) == "./a.png,''=1,,,a=b\n"


# ---- Checksums


def test_texts_arrays_and_tensors_are_their_bytes_one_after_the_other() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    expected = xxhash.xxh3_64("τ".encode() + array.tobytes()).hexdigest()
    assert digest("τ", array) == digest("τ", torch.from_numpy(array)) == expected
    assert digest("τ", array.T.copy().T) == expected, "however they lie in memory"
    assert digest(array, bits=128) == xxhash.xxh3_128(array.tobytes()).hexdigest()
    half = torch.tensor([1.0, -2.5], dtype=torch.bfloat16)
    assert digest(half) == xxhash.xxh3_64(b"\x80\x3f\x20\xc0").hexdigest()
    assert digest(torch.zeros(0)) == digest("") == xxhash.xxh3_64(b"").hexdigest()


def test_names_types_and_shapes_count() -> None:
    one = {"w": torch.zeros(2, 3)}
    others = [{"v": torch.zeros(2, 3)}, {"w": torch.zeros(3, 2)}, {"w": torch.zeros(2, 3, dtype=torch.int32)}]
    assert len({tensors_digest(tensors) for tensors in (one, *others)}) == 4
    assert tensors_digest(one) == xxhash.xxh3_64(b"w torch.float32 [2, 3]\n" + bytes(24)).hexdigest()
    assert tensors_digest(one, "about") != tensors_digest(one)


def test_a_json_value_is_what_is_read_of_it_again() -> None:
    assert json_digest({"b": 1, "a": (2, None)}) == json_digest({"a": [2, None], "b": 1})
    assert json_digest({10: 1, 9: 2}) == json_digest({"10": 1, "9": 2})
    assert json_digest({"a": 1}) == xxhash.xxh3_64(b'{"a": 1}').hexdigest()
