"""Records and rows come back from results.json as they went in, in the order of the keys that it has always had."""

from __future__ import annotations

import json

import pytest

from xdm_ft.core import Interval, ModelKey, Score
from xdm_ft.results.model import Pick, Record
from xdm_ft.results.table import SummaryRow

VIT = {"encoder": "vit", "trainable": False}  # of a record

SCORE = Score(0.5, 0.5, 0.4, None, None, 1.0, 0.1, 4, {"cat": 0.5, "dog": None}, {"a": {"accuracy": 0.5, "n": 4}})
PICK = Pick(
    3, "models/w.safetensors", {"test": SCORE}, {"alpha": 0.3}, [{"alpha": 0.0, "test": None}], ["late"], 0.7, 1.5, 0.4
)
WHOLE = Record(
    ModelKey("erm", ("a", "b"), 1, 2), {"lr": 0.1}, "ok", None, {"train_val": PICK}, 5, 6, 7, 1.5, 8, 21, 2533, 9,
    {"times": 1, "reasons": ["why"]}, True, encoder="vit", trainable={"blocks": 2},
)  # fmt: skip
ROW = SummaryRow(
    "erm", "train_val", "accuracy", "test", 0.5, 0.1, 0.05, 3, Interval(0.4, 0.6), {"kind": "k", "value": None},
    {"a": {"mean": 0.5, "std": None}},
    "a line", {"draws": 2, "gradient_evaluations": None}, 1, 2, "why", ["late in 1 of 3 picks"], "balanced",
    augmentation="none", encoder="vit", trainable=False,
)  # fmt: skip
RECORDS = {
    "ok": WHOLE,
    "plain": Record(
        ModelKey("erm", ("a",), 0, 0),
        {},
        "ok",
        selected={"oracle": Pick(1, "w", {"test": SCORE})},
        train_seconds=0.0,
        encoder="vit",
        trainable=True,
    ),
    "failed": Record(
        ModelKey("erm", ("a",), 0, 0), {}, "failed", "a nan", train_seconds=1.0, encoder="vit", trainable=True
    ),
    "skipped": Record(ModelKey("erm", ("a",), 0, 0), {}, "skipped", "needs two", **VIT),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_comes_back(name: str) -> None:
    record = RECORDS[name]
    assert Record.from_json(json.loads(json.dumps(record.to_json(), allow_nan=False))) == record


def test_a_row_comes_back() -> None:
    few = SummaryRow.from_json({key: ROW.to_json()[key] for key in ROW.to_json() if key not in ("failed", "flags")})
    for row in (ROW, few):
        assert SummaryRow.from_json(json.loads(json.dumps(row.to_json()))) == row
    assert "failed" not in few.to_json() and few.to_json()["reason"] == "why"


def test_the_order_of_keys() -> None:
    identity = ["method", "test_domains", "seed", "trial", "hparams", "status"]
    of_row = ["method", "encoder", "trainable", *identity[1:]]
    measured = ["mixed_steps", "deterministic", "gradient_evaluations", "stopped_at", "train_seconds"]
    measured += ["trained_parameters", "tuned_settings", "training_features", "peak_memory", "restarted"]
    assert list(WHOLE.to_json()) == [*of_row, "selected", *measured]
    assert list(RECORDS["failed"].to_json()) == [*of_row, "selected", "train_seconds", "reason"]
    assert list(RECORDS["skipped"].to_json()) == [*of_row, "reason", "selected"]
    picked = ["step", "alpha", "weights", "metrics", "curve", "flags", "value", "temperature", "validation_nll"]
    assert list(PICK.to_json()) == picked
    start = ["method", "encoder", "trainable", "selection", "metric", "split", "mean", "std", "stderr", "n", "interval"]
    end = ["spread_as_published", "per_test_domain", "protocol", "budget", "failed", "skipped"]
    assert list(ROW.to_json()) == [*start, *end, "reason", "flags", "class_weights", "augmentation"]


def test_a_flat_row_holds_plain_values_alone() -> None:
    flat = ROW.flat()
    assert not [name for name, value in flat.items() if isinstance(value, dict | list)]
    assert flat["mean:a"] == 0.5 and (flat["mean_low"], flat["mean_high"]) == (0.4, 0.6) and flat["draws"] == 2
    assert SummaryRow.from_json(ROW.to_json() | {"interval": None}).flat()["mean_low"] is None
