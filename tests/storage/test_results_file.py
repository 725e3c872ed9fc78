"""results.json as it lies on the disk: each model in a line, the rest indented."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from xdm_ft.storage import json_digest, results_file
from xdm_ft.storage.lines import Damaged, OtherVersion
from xdm_ft.storage.results_file import INPUTS, read_results, unverified_facts, write_results
from xdm_ft.storage.run_directory import RunDirectory

NAMES = ['a "runs": []', 'b\n "runs": []', "c …"]  # as class names from data may be
CLEAR: dict[str, Any] = {"recipe": {"name": "x", "runs": []}, "environment": {}, "classes": NAMES}


@pytest.fixture(autouse=True)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in the file is tested here, and not what its schema says."""
    monkeypatch.setattr(results_file, "_refuse_other_types", lambda *_: None)


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


def test_the_checksum_is_that_of_the_whole_without_what_runs_that_agree_differ_in(tmp_path: Path) -> None:
    runs = [{"method": name, "seed": 0, "hparams": {10: 1, 9: 2}, "train_seconds": 3.0} for name in NAMES]
    results = {"schema": 1, **CLEAR, "runs": runs, "summary": [], "final_fit": {"runs": []}, "checksum": "other"}
    kept = [{"method": name, "seed": 0, "hparams": {"10": 1, "9": 2}} for name in NAMES]
    environment = dict.fromkeys(INPUTS)
    whole = {"schema": 1, **CLEAR, "environment": environment, "runs": kept, "summary": [], "final_fit": {"runs": []}}
    as_read = json.loads(json.dumps(results))
    for content, digested in ((results, whole), (as_read, whole), ({**as_read, "runs": []}, {**whole, "runs": []})):
        assert json.loads(written(tmp_path, content).read_text())["checksum"] == json_digest(digested)


RUNS = [{"method": name, "seed": number, "hparams": {"a": {"b": [1, {}]}}} for number, name in enumerate(NAMES)]
RESULTS = {"schema": 1, **CLEAR, "runs": RUNS, "summary": [{"runs": []}], "tested_on": "x"}


def written(folder: Path, results: Mapping[str, Any] = RESULTS) -> Path:
    write_results(folder / "results.json", results)
    return folder / "results.json"


@pytest.mark.parametrize("layout", [{}, {"indent": 2}, {"indent": 1, "sort_keys": True}])
@pytest.mark.parametrize("runs", [[], RUNS])
def test_other_layouts_of_the_same_content_are_read(tmp_path: Path, layout: dict[str, Any], runs: list[Any]) -> None:
    path = written(tmp_path, {**RESULTS, "runs": runs})
    content = read_results(path)
    path.write_text(json.dumps(content, **layout) + "\n")
    assert read_results(path) == content


def test_models_are_made_one_by_one(tmp_path: Path) -> None:
    """`runs` may be any iterable, and what reads it gets one model at a time."""
    path = written(tmp_path, {**RESULTS, "runs": (run for run in RUNS)})
    assert path.read_bytes() == written(tmp_path / "other").read_bytes()
    found = read_results(path, lambda run: run["seed"])
    assert found["runs"] == [0, 1, 2] and found["tested_on"] == "x"
    facts = unverified_facts(path)
    assert facts == {**found, "runs": []}


def test_memory_is_that_of_one_model(tmp_path: Path) -> None:
    runs = ({"method": "erm", "seed": seed, "text": "x" * 100_000} for seed in range(300))
    tracemalloc.start()
    try:
        path = written(tmp_path, {**RESULTS, "runs": runs})
        assert sum(read_results(path, lambda run: run["seed"])["runs"]) == 299 * 150
        assert unverified_facts(path)["runs"] == []
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert path.stat().st_size > 30_000_000 and peak < 3_000_000


def test_an_unchanged_file_is_left_alone(tmp_path: Path) -> None:
    path = written(tmp_path)
    before = path.stat()
    written(tmp_path)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    written(tmp_path, {**RESULTS, "tested_on": "y"})
    assert path.stat().st_ino != before.st_ino and [*tmp_path.iterdir()] == [path]


def test_a_fault_of_a_model_comes_after_damage(tmp_path: Path) -> None:
    def refused(run: dict[str, Any]) -> None:
        if run["seed"]:
            raise OtherVersion(f"seed {run['seed']}")

    path = written(tmp_path)
    with pytest.raises(OtherVersion, match=r"^seed 1$"):
        read_results(path, refused)
    path.write_bytes(path.read_bytes().replace(b'"seed": 2', b'"seed": 3'))
    with pytest.raises(Damaged, match="its checksum differs"):
        read_results(path, refused)


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80)
def test_damage_is_found(tmp_path: Path, data: st.DataObject) -> None:
    """Whatever happens to its bytes: the file is damaged, or holds the same content as Python's reader says too."""
    path = written(tmp_path)
    whole, content = path.read_bytes(), read_results(path)
    begin = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(begin, min(len(whole), begin + 40)))
    path.write_bytes(whole[:begin] + data.draw(st.binary(max_size=3)) + whole[end:])
    try:
        found = read_results(path)
    except Damaged:
        return
    assert found == content == json.loads(path.read_bytes())


def test_lines_that_are_no_json_together(tmp_path: Path) -> None:
    path = written(tmp_path)
    whole = path.read_bytes()
    for old, new in ((b"},\n  {", b"}\n  {"), (b"}\n ],", b"},\n ],"), (b"\n ],\n", b"\n")):
        assert old in whole
        path.write_bytes(whole.replace(old, new, 1))
        with pytest.raises(Damaged, match="it is not JSON"):
            read_results(path)
    path.write_bytes(whole.replace(b' "runs": [\n', b' "runs": [\n\n'))  # an empty line is no damage
    assert read_results(path)["runs"] == RUNS
