"""Files that appear whole, and are a function of their content."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from xdm_ft.storage.atomic import UNFINISHED, order_metadata, remove_unfinished, replace_text


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
