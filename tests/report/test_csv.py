"""results.csv and models.parquet: their rows against results.json, and names that a spreadsheet would compute."""

from __future__ import annotations

import csv
import io
from typing import Any

import pyarrow.parquet
import pytest
from example_runs import OF_MODELS, assert_golden, comparison, model, results_of, run_of, two_sets, with_comparisons

from xdm_ft.core import ModelKey, Score
from xdm_ft.report.csv import COLUMNS, csv_rows, csv_text, parquet_of, properties
from xdm_ft.results.model import Pick, Record
from xdm_ft.results.run import Run
from xdm_ft.storage.lines import read_cell


def rows_of(results: dict[str, Any]) -> list[dict[str, str]]:
    """What a reader of the file finds."""
    return list(csv.DictReader(io.StringIO(csv_text(csv_rows(run_of(results))), newline="")))


def test_golden_tables(run: Run, example: Run) -> None:
    """Also: a comparison that stands beside no row, domains of one set, a failed method, a value that is missing."""
    together = [model("erm", ("a", "b"), seed, accuracies={"a": 0.9, "b": 0.2 + 0.2 * seed}) for seed in (0, 1)]
    runs = two_sets()
    runs[0]["selected"]["train_val"]["metrics"]["test"]["auroc"] = None
    bad = {**OF_MODELS, "method": "irm", "test_domains": ["a"], "seed": 0, "trial": 0, "hparams": {}, "selected": {}}
    failed = results_of([*runs, bad | {"status": "failed", "reason": "the loss is nan"}])
    pair = comparison("xdomainmix", here="better", equal_within=0.2, look=2)
    rows = [pair, comparison("erm", "xdomainmix", here="no verdict", error=None)]
    made = [run, example, *map(run_of, (results_of(together), failed, with_comparisons(results_of(two_sets()), *rows)))]
    assert_golden("tables.csv", "".join(csv_text(csv_rows(of)) for of in made))
    assert {name for of in made for row in csv_rows(of) for name in row} <= {*COLUMNS}, "or they would vanish"
    assert csv_text(csv_rows(run_of(results_of([])))) == ",".join(COLUMNS) + "\n"


def test_numbers_of_two_sets() -> None:
    mean, a, b = rows_of(results_of(two_sets()))[:3]
    assert float(a["mean"]) == pytest.approx(0.7) and float(a["std"]) == pytest.approx(0.02**0.5)  # 0.6 and 0.8
    assert float(b["accuracy"]) == pytest.approx(0.4) and float(b["accuracy_stderr"]) == pytest.approx(0.1)
    assert float(mean["mean"]) == pytest.approx(0.55) and (mean["worst_domain"], mean["seeds"]) == ("0.4", "2")
    [_, _, _, mix, *_] = rows_of(with_comparisons(results_of(two_sets()), comparison("xdomainmix", here="better")))
    for what, half in (("here", 0.02 * 2.570582), ("elsewhere", 0.05 * 12.706205)):
        ends = float(mix[f"{what}_low"]), float(mix[f"{what}_high"])
        assert ends == pytest.approx((0.1 - half, 0.1 + half), abs=1e-6)


@pytest.mark.parametrize("sign", ["=", "+", "-", "@", "\t", "\r", "\n"])
def test_no_name_is_a_formula(sign: str) -> None:
    name = f'{sign}HYPERLINK("http://x","y"),;\n|'
    results = results_of([model(name, (name,), seed, accuracy=0.4 - seed) for seed in (0, 1)], name=name)
    results["summary"][0] |= {"protocol": name, "flags": [name]}
    rows = rows_of(results)
    assert len(rows) == 2
    for row in rows:
        assert [row["run"], row["method"], row["protocol"]] == [f"'{name}"] * 3
        assert read_cell("method", row["method"]) == name
        assert all(not cell.startswith(("=", "+", "@", "\t", "\r", "\n")) for cell in row.values() if cell)
        assert row["std"] == rows[0]["std"] and float(row["mean"]) == pytest.approx(-0.1)  # numbers stay numbers
    assert rows[1]["held_out"] == f"'{name}" and rows[0]["flags"] == f"'{name}"


def test_properties_tell_two_encoders_apart() -> None:
    def of(**recipe: Any) -> list[str]:
        made = properties(run_of(results_of(two_sets(), **recipe)), "erm")
        return [made[key] for key in ("encoder", "encoder_trained", "augmentation")]

    big = {"name": "timm", "model": "vit", "weights": "/private/home/big.bin", "trainable": True}
    assert of(encoder=big) == ["vit (big.bin)", "end to end", "none"]
    assert of(encoder={"name": "timm", "model": "own"}) == ["own", "frozen", "none"]


def test_models_parquet() -> None:
    def searched(trial: int, hparams: dict[str, Any], *rules: str) -> Record:
        scores = [
            Score(a, a, a, None, None, 0.7, 0.1, 20, {"cat": 1.0}, {"ink": {"accuracy": 1.0}}) for a in (0.25, 0.5)
        ]
        metrics = dict(zip(("test", "val"), scores, strict=True))
        picks = {rule: Pick(10 * trial, f"{rule}.safetensors", metrics) for rule in rules}
        return Record(
            ModelKey("erm", ("ink", "chalk"), 0, trial), hparams, "ok", selected=picks, train_seconds=1.5, **OF_MODELS
        )

    records = [
        searched(0, {"lr": 1e-3, "p": 0.5, "l": [1, 2]}, "train_val"),
        searched(1, {"lr": 1, "wide": True, "p": "half", "l": None}, "train_val", "oracle"),
    ]
    rows = pyarrow.parquet.read_table(io.BytesIO(parquet_of(records))).to_pylist()
    assert [(row["trial"], row["selection"], row["step"]) for row in rows] == [
        (0, "train_val", 0), (1, "train_val", 10), (1, "oracle", 10)
    ]  # fmt: skip
    assert rows[0]["test_domains"] == "ink, chalk" and rows[0]["weights"] == "train_val.safetensors"
    assert [row["hparams.lr"] for row in rows] == [1e-3, 1.0, 1.0]
    assert [row["hparams.wide"] for row in rows] == [None, True, True]
    assert [row["hparams.p"] for row in rows[:2]] == ["0.5", '"half"'], "settings of several kinds are JSON"
    assert [row["hparams.l"] for row in rows[:2]] == ["[1, 2]", None]
    assert rows[2]["test.accuracy"] == 0.25 and rows[2]["val.accuracy"] == 0.5 and rows[2]["val.n"] == 20
    assert rows[0]["train_seconds"] == 1.5 and rows[0]["peak_memory"] is None
    assert "test.per_domain" not in rows[0] and "test.auroc" not in rows[0]
