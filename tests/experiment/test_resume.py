"""What the lines of several processes say of one model."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from small_runs import recipe, results

from xdm_ft.evaluation.records import ModelKey, Record
from xdm_ft.experiment.results import RECORDS, read_records
from xdm_ft.experiment.resume import keep_choices_of_run
from xdm_ft.storage.run_directory import RunDirectory

OK = Record(ModelKey("erm", ("a",), 0, 0), {}, "ok", train_seconds=1.0)
FAILED = Record(ModelKey("erm", ("a",), 0, 0), {}, "failed", "a nan", train_seconds=1.0)


@pytest.mark.parametrize("first", ["0", "0.1"])
def test_a_model_that_was_trained_again_counts_as_trained(first: str, tmp_path: Path) -> None:
    """Another process than before may train it: neither the names of files nor their order say which line is newer."""
    second = {"0": "0.1", "0.1": "0"}[first]
    RunDirectory(tmp_path, first).append(RECORDS, FAILED.to_json())
    RunDirectory(tmp_path, second).append(RECORDS, OK.to_json())
    assert read_records(RunDirectory(tmp_path)) == {OK.key: OK}


def test_a_run_that_goes_on_keeps_the_precision_and_the_batch_size_of_its_features(
    small_pacs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On another machine the defaults of both may be others."""
    short = "methods=[erm]", "protocol.test_domains=[sketch]"
    begun = results(*short, "features.batch_size=7", "features.precision=bf16")["recipe"]["features"]
    assert (begun["batch_size"], begun["precision"]) == (7, "bf16")
    caplog.set_level(logging.INFO, "xdm_ft")
    assert results(*short, "protocol.seeds=2")["recipe"]["features"] == begun
    assert "features.precision: bf16, as when this run started" in caplog.messages
    assert keep_choices_of_run(recipe(*short, "features.batch_size=5")).features.batch_size == 5
