"""Records: what lines of several processes say of one model, and the number of parameters that it has trained."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from loop_models import make_job
from small_runs import recipe, results

from xdm_ft.algorithms.erm import ERM
from xdm_ft.algorithms.knn import KNN
from xdm_ft.algorithms.linear_probe import LinearProbe
from xdm_ft.algorithms.xdomainmix import XDomainMix
from xdm_ft.algorithms.zero_shot import ZeroShot
from xdm_ft.evaluation.records import ModelKey, Record
from xdm_ft.experiment.models import trained_parameters
from xdm_ft.experiment.results import RECORDS, keep_choices_of_run, read_records
from xdm_ft.heads.mlp import MLP
from xdm_ft.heads.neighbours import Neighbours
from xdm_ft.storage.run_directory import RunDirectory
from xdm_ft.training import Trained

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


HEAD = 10 * 8 + 10  # 10 classes, 8 features


@pytest.mark.parametrize(
    "method, head, expected",
    [
        (ERM, None, HEAD),
        (ERM, partial(MLP, hidden_width=4), 4 * 8 + 4 + 10 * 4 + 10),
        (XDomainMix, None, HEAD + 3 * 8 + 3),  # 3 training domains
        (LinearProbe, None, HEAD),
        (KNN, Neighbours, 0),
        (ZeroShot, None, 0),
    ],
)
def test_trained_parameters_where_no_engine_counts_them(method: Any, head: Any, expected: int) -> None:
    job = make_job(method, width=8, **({} if head is None else {"head": head}))
    trained = Trained(job, {}, None, 0.0)
    assert trained_parameters(trained) == expected
    assert trained.peak_memory is None, "of a bank, which trains several models at once"
