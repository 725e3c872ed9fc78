"""results.json as it lies on the disk: each model in a line, the rest indented."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from xdm_ft.storage.checksummed import read_results
from xdm_ft.storage.run_directory import RunDirectory

NAMES = ['a "runs": []', 'b\n "runs": []', "c …"]  # as class names from data may be
CLEAR: dict[str, Any] = {"recipe": {"name": "x", "runs": []}, "environment": {}, "classes": NAMES}


@pytest.mark.parametrize("count", [0, 1, 3])
def test_each_model_is_a_line(tmp_path: Path, count: int) -> None:
    runs = [{"method": name, "seed": 0} for name in NAMES[:count]]
    results = {"schema": 1, **CLEAR, "runs": runs, "summary": []}
    with RunDirectory(tmp_path / "run", "0", main=True) as directory:
        directory.begin()
        directory.write_results(results)
    found = read_results(tmp_path / "run/results.json")
    assert found.pop("checksum") and found == results and list(found) == list(results)
    lines = (tmp_path / "run/results.json").read_text().splitlines()
    first = lines.index(' "runs": [') + 1
    assert [json.loads(line.removesuffix(",")) for line in lines[first : first + count]] == runs
    assert lines[first + count] == " ],"
