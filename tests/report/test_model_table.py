"""models.parquet: every model of a large run, as pandas reads it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from example_runs import results_of
from test_more_tables import two_sets

from xdm_ft.evaluation.records import ModelKey, Pick, Record
from xdm_ft.report import written
from xdm_ft.report.finished import read_run
from xdm_ft.report.model_table import parquet_of
from xdm_ft.runtime.tensors import Score
from xdm_ft.storage.run_directory import RunDirectory


def score(accuracy: float) -> Score:
    return Score(accuracy, accuracy, accuracy, None, None, 0.7, 0.1, 20, {"cat": 1.0}, {"ink": {"accuracy": 1.0}})


def model(trial: int, hparams: dict[str, Any], *rules: str) -> Record:
    picks = {rule: Pick(10 * trial, f"{rule}.safetensors", {"test": score(0.25), "val": score(0.5)}) for rule in rules}
    return Record(ModelKey("erm", ("ink", "chalk"), 0, trial), hparams, "ok", selected=picks, train_seconds=1.5)


def rows(*records: Record) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pyarrow.parquet.read_table(io.BytesIO(parquet_of(records))).to_pylist()
    return found


def test_a_row_per_model_and_rule() -> None:
    found = rows(model(0, {"lr": 1e-3}, "train_val"), model(1, {"lr": 1, "wide": True}, "train_val", "oracle"))
    assert [(row["trial"], row["selection"], row["step"]) for row in found] == [
        (0, "train_val", 0), (1, "train_val", 10), (1, "oracle", 10)
    ]  # fmt: skip
    assert found[0]["test_domains"] == "ink, chalk" and found[0]["weights"] == "train_val.safetensors"
    assert [row["hparams.lr"] for row in found] == [1e-3, 1.0, 1.0]
    assert [row["hparams.wide"] for row in found] == [None, True, True]
    assert found[2]["test.accuracy"] == 0.25 and found[2]["val.accuracy"] == 0.5 and found[2]["val.n"] == 20
    assert found[0]["train_seconds"] == 1.5 and found[0]["peak_memory"] is None
    assert "test.per_domain" not in found[0] and "test.auroc" not in found[0]


def test_settings_of_several_kinds_are_json() -> None:
    found = rows(model(0, {"p": 0.5, "l": [1, 2]}, "oracle"), model(1, {"p": "half", "l": None}, "oracle"))
    assert [row["hparams.p"] for row in found] == ["0.5", '"half"']
    assert [row["hparams.l"] for row in found] == ["[1, 2]", None]


def test_a_large_run_has_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written, "write_page", lambda run: (run.path / "report.html").write_text("page"))
    with RunDirectory(tmp_path / "run", "0", main=True) as directory:
        directory.begin()
        directory.write_results(results_of(two_sets()))
        run = read_run(tmp_path / "run")
        written.write_reports(directory, run)
        assert not (tmp_path / "run/models.parquet").exists()
        monkeypatch.setattr(written, "LARGE", len(run.records))
        assert tmp_path / "run/models.parquet" in written.write_reports(directory, run)
    table = pyarrow.parquet.read_table(tmp_path / "run/models.parquet")
    assert len(table) == sum(len(record.selected) for record in run.records)
