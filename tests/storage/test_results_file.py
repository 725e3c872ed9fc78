"""results.json as it lies on the disk: each model in a line, the rest indented."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from xdm_ft.storage.checksummed import INPUTS, read_results, results_digest
from xdm_ft.storage.digests import json_digest
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


def test_the_checksum_is_that_of_the_whole_without_what_runs_that_agree_differ_in() -> None:
    runs = [{"method": name, "seed": 0, "hparams": {10: 1, 9: 2}, "train_seconds": 3.0} for name in NAMES]
    results = {"schema": 1, **CLEAR, "runs": runs, "summary": [], "final_fit": {"runs": []}, "checksum": "other"}
    kept = [{"method": name, "seed": 0, "hparams": {"10": 1, "9": 2}} for name in NAMES]
    environment = dict.fromkeys(INPUTS)
    whole = {"schema": 1, **CLEAR, "environment": environment, "runs": kept, "summary": [], "final_fit": {"runs": []}}
    assert results_digest(results) == json_digest(whole)
    as_read = json.loads(json.dumps(results))
    assert results_digest(as_read, is_read=True) == json_digest(whole)
    assert results_digest({**as_read, "runs": []}, is_read=True) == json_digest({**whole, "runs": []})
