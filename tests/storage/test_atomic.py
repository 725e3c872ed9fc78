"""Files that appear whole, and are a function of their content."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.interrupt import resumed_by
from xdm_ft.storage import atomic
from xdm_ft.storage.atomic import UNFINISHED, Together, disk_errors, order_metadata, remove_unfinished, replace_text


def test_what_a_killed_process_leaves_is_swept_and_nothing_else(tmp_path: Path) -> None:
    replace_text(tmp_path / "a" / "kept.json", "{}")
    (tmp_path / "a" / ".hidden").touch()
    code = f"""
import os
from pathlib import Path
from xdm_ft.storage.atomic import replace_file
def write(path):
    path.write_text("half")
    os._exit(0)
replace_file(Path({str(tmp_path)!r}) / "a" / "new.json", write)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    [left] = (tmp_path / "a").glob(f".new.json.*{UNFINISHED}")
    of_safetensors = tmp_path / "a" / ".tmpA1b2C3"
    of_safetensors.touch()
    (tmp_path / f".folder{UNFINISHED}").mkdir()  # a folder is none of ours
    remove_unfinished(tmp_path)
    assert not left.exists() and not of_safetensors.exists()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [".hidden", "kept.json"]


def test_the_same_metadata_in_another_order_is_the_same_file(tmp_path: Path) -> None:
    metadata, found = {"step": "3", "normalize": "true", "τ": 'a "quoted" word', "b": "{}"}, set()
    for number in range(20):
        path = tmp_path / str(number)
        save_file({"w": torch.arange(5.0), "a": torch.ones(2, 3)}, path, metadata)
        order_metadata(path)
        found.add(path.read_bytes())
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == metadata
            assert torch.equal(file.get_tensor("w"), torch.arange(5.0))
    assert len(found) == 1


def test_files_written_together_are_safe_before_any_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All fsyncs of files come before all renames, and those before the fsyncs of the folders, one of each."""
    events, replace = [], os.replace
    monkeypatch.setattr(atomic, "sync", lambda path: events.append(("sync", path.is_dir(), path.parent.name)))
    monkeypatch.setattr(
        os, "replace", lambda old, new: (events.append(("rename", Path(new).name)), replace(old, new))[1]
    )
    with Together() as files:
        for name in ("a/1", "a/2", "b/3"):
            files.add(tmp_path / name, lambda path, name=name: path.write_text(name))
        assert not list(tmp_path.glob("*/[0-9]"))
        files.replace()
        files.replace()  # nothing is left to do
    assert sorted(events[:3]) == [("sync", False, "a"), ("sync", False, "a"), ("sync", False, "b")]
    assert events[3:6] == [("rename", "1"), ("rename", "2"), ("rename", "3")]
    assert events[6:] == [("sync", True, tmp_path.name)] * 2
    assert {path.name: path.read_text() for path in tmp_path.rglob("*") if path.is_file()} == {
        "1": "a/1", "2": "a/2", "3": "b/3"
    }  # fmt: skip


def test_a_full_disk_leaves_no_temporary_file_and_says_how_to_resume(tmp_path: Path) -> None:
    def broken(path: Path) -> None:
        raise OSError(errno.ENOSPC, "")

    (tmp_path / "a").write_text("before")
    with (
        pytest.raises(UserError, match=r"b: the disk is full.* and run the same command to resume"),
        Together() as files,
    ):
        files.add(tmp_path / "a", lambda path: path.write_text("after"))
        files.add(tmp_path / "b", broken)
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_text() == "before"
    with pytest.raises(UserError, match="space and add --again"), resumed_by("add --again"), disk_errors(tmp_path):
        raise OSError(errno.ENOSPC, "")
