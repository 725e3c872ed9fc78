"""results.csv and models.parquet: their rows against results.json, and names that a spreadsheet would compute."""

from __future__ import annotations

import csv
import io
from typing import Any

import pyarrow.parquet
import pytest
from example_runs import comparison, model, results_of, run_of, two_sets, with_comparisons

from xdm_ft.evaluation.records import ModelKey, Pick, Record
from xdm_ft.report.csv import COLUMNS, csv_rows, csv_text, parquet_of, properties
from xdm_ft.runtime.tensors import Score
from xdm_ft.storage.csv_cells import read_cell


def rows_of(results: dict[str, Any]) -> list[dict[str, str]]:
    """What a reader of the file finds."""
    return list(csv.DictReader(io.StringIO(csv_text(csv_rows(run_of(results))), newline="")))


def cells(row: dict[str, str], names: str) -> list[str]:
    return [row[name] for name in names.split()]


def test_a_row_per_held_out_set_and_one_for_their_mean() -> None:
    rows = rows_of(results_of(two_sets()))
    assert [(row["method"], row["of"], row["held_out"]) for row in rows] == [
        (method, of, held)
        for method in ("erm", "xdomainmix")
        for of, held in (("mean", ""), ("held_out", "a"), ("held_out", "b"))
    ]
    assert all(tuple(row) == COLUMNS for row in rows)
    mean, a, b = rows[:3]
    assert float(a["mean"]) == pytest.approx(0.7) and float(a["std"]) == pytest.approx(0.02**0.5)  # 0.6 and 0.8
    assert float(b["accuracy"]) == pytest.approx(0.4) and float(b["accuracy_stderr"]) == pytest.approx(0.1)
    assert float(mean["mean"]) == pytest.approx(0.55) and cells(mean, "worst_domain seeds images") == ["0.4", "2", ""]
    assert cells(a, "images run encoder encoder_trained augmentation") == ["20", "made", "tiny", "frozen", "none"]
    assert {row["protocol"] for row in rows} == {"pets, 40 images; picked by train_val"}
    assert csv_text(csv_rows(run_of(results_of([])))) == ",".join(COLUMNS) + "\n"


def test_the_comparison_is_that_of_the_summary() -> None:
    results = results_of(two_sets())
    pair = comparison("xdomainmix", here="better", equal_within=0.2, look=2)
    declared = comparison("xdomainmix", "sam", here="no verdict", error=None)
    erm, *_, mean, a, _, other = rows_of(with_comparisons(results, pair, declared))
    assert erm["difference"] == erm["p_here"] == a["difference"] == a["p_here"] == "" and mean["of"] == "mean"
    tested = cells(mean, "p_here p_here_holm p_elsewhere p_elsewhere_holm elsewhere note")
    assert tested == ["0.01", "0.02", "0.15", "0.3", "unknown", "images assumed independent"]
    assert cells(mean, "here equal_within look compared_with") == ["better", "0.2", "2", "erm"]
    for what, half in (("here", 0.02 * 2.570582), ("elsewhere", 0.05 * 12.706205)):
        ends = float(mean[f"{what}_low"]), float(mean[f"{what}_high"])
        assert ends == pytest.approx((0.1 - half, 0.1 + half), abs=1e-6)
    assert cells(mean, "difference error freedom share_seeds") == ["0.1", "0.02", "5.0", "0.75"]
    assert cells(other, "of method compared_with here") == ["compared", "xdomainmix", "sam", "no verdict"]
    assert cells(other, "here_low p_here mean") == ["", "", ""]


def test_domains_of_one_set_failed_methods_and_missing_values() -> None:
    runs = [model("erm", ("a", "b"), seed, accuracies={"a": 0.9, "b": 0.2 + 0.2 * seed}) for seed in (0, 1)]
    rows = rows_of(results_of(runs))
    assert [(row["of"], row["held_out"]) for row in rows] == [
        ("mean", ""), ("held_out", "a + b"), ("domain", "a"), ("domain", "b"),
    ]  # fmt: skip
    assert float(rows[3]["accuracy"]) == float(rows[3]["mean"]) == pytest.approx(0.3) and rows[3]["nll"] == ""
    runs = two_sets()
    runs[0]["selected"]["train_val"]["metrics"]["test"]["auroc"] = None
    bad = {"method": "irm", "test_domains": ["a"], "seed": 0, "trial": 0, "hparams": {}, "selected": {}}
    rows = rows_of(results_of([*runs, bad | {"status": "failed", "reason": "the loss is nan"}]))
    assert cells(rows[1], "auroc auroc_stderr") == ["0.8", ""]  # of one seed
    failed = [row for row in rows if row["method"] == "irm"]
    assert len(failed) == 3 and failed[0]["failed"] == "1" and "the loss is nan" in failed[0]["reason"]
    assert all(cells(row, "mean nll images seeds") == ["", "", "", "0"] for row in failed)


@pytest.mark.parametrize("sign", ["=", "+", "-", "@", "\t", "\r", "\n"])
def test_no_name_is_a_formula(sign: str) -> None:
    name = f'{sign}HYPERLINK("http://x","y"),;\n|'
    results = results_of([model(name, (name,), seed, accuracy=0.4 - seed) for seed in (0, 1)], name=name)
    results["summary"][0] |= {"protocol": name, "flags": [name]}
    rows = rows_of(results)
    assert len(rows) == 2
    for row in rows:
        assert cells(row, "run method protocol") == [f"'{name}"] * 3
        assert read_cell("method", row["method"]) == name
        assert all(not cell.startswith(("=", "+", "@", "\t", "\r", "\n")) for cell in row.values() if cell)
        assert row["std"] == rows[0]["std"] and float(row["mean"]) == pytest.approx(-0.1)  # numbers stay numbers
    assert rows[1]["held_out"] == f"'{name}" and rows[0]["flags"] == f"'{name}"


def test_properties_tell_two_encoders_apart() -> None:
    def of(**recipe: Any) -> dict[str, Any]:
        return properties(run_of(results_of(two_sets(), **recipe)), "erm")

    assert of(encoder={"name": "timm", "model": "vit", "weights": "/private/home/big.bin", "trainable": True}) == {
        "run": "made", "encoder": "vit (big.bin)", "encoder_trained": "end to end", "augmentation": "none",
    }  # fmt: skip
    views = of(encoder={"name": "own"}, data={"train_augmentation": "crop"}, features={"views": 4})
    assert views["encoder"] == "own" and views["augmentation"] == "crop, 4 cached views"
    assert of(features=None, data={"train_augmentation": None})["augmentation"] == "none"


def test_costs_and_pairs_of_two_encoders() -> None:
    """Model number i has i seconds and i MB; of xdomainmix the memory is unknown. The larger encoder has 0.05 more."""
    encoders, runs = ("small", "large"), []
    for encoder, gain in zip(encoders, (0.0, 0.05), strict=True):
        for entry in two_sets():
            accuracy = float(entry["selected"]["train_val"]["metrics"]["test"]["accuracy"])
            made = model(f"{entry['method']} @ {encoder}", tuple(entry["test_domains"]), entry["seed"],
                         accuracy=accuracy + gain)  # fmt: skip
            made |= {"train_seconds": float(len(runs)), "trained_parameters": 1000}
            runs.append(made | ({} if "mix" in entry["method"] else {"peak_memory": len(runs) * 10**6}))
    results = results_of(runs, encoders=encoders)
    results["recipe"]["methods"] = ["erm", {"name": "xdomainmix", "trainable": {"blocks": 2}}]
    pair = next(entry for entry in results["comparisons"] if entry["second"] == "xdomainmix @ large")
    pair |= {"p_here": {"plain": 0.01, "holm": 0.03}, "here": "worse", "error_elsewhere": 0.01}
    rows = rows_of(results)
    erm = next(row for row in rows if (row["method"], row["of"]) == ("erm @ large", "mean"))
    assert cells(erm, "encoder encoder_trained compared_with") == ["vit_large", "frozen", ""]
    assert [float(erm[name]) for name in ("trained_parameters", "train_seconds", "peak_memory")] == [1000, 9.5, 9.5e6]
    mix = next(row for row in rows if (row["method"], row["of"]) == ("xdomainmix @ small", "mean"))
    assert cells(mix, "encoder_trained compared_with peak_memory") == ["last 2 blocks", "erm @ small", ""]
    pairs = [row for row in rows if row["of"] == "encoders"]
    assert [(row["method"], row["compared_with"]) for row in pairs] == [
        ("erm @ small", "erm @ large"), ("xdomainmix @ small", "xdomainmix @ large")
    ]  # fmt: skip
    assert float(pairs[1]["difference"]) == pytest.approx(-0.05)
    assert cells(pairs[1], "mean train_seconds p_here_holm here elsewhere") == ["", "", "0.03", "worse", "unknown"]
    assert float(pairs[1]["elsewhere_low"]) == pytest.approx(-0.05 - 0.01 * 12.7062, abs=1e-6)


def test_models_parquet() -> None:
    def searched(trial: int, hparams: dict[str, Any], *rules: str) -> Record:
        scores = [
            Score(a, a, a, None, None, 0.7, 0.1, 20, {"cat": 1.0}, {"ink": {"accuracy": 1.0}}) for a in (0.25, 0.5)
        ]
        metrics = dict(zip(("test", "val"), scores, strict=True))
        picks = {rule: Pick(10 * trial, f"{rule}.safetensors", metrics) for rule in rules}
        return Record(ModelKey("erm", ("ink", "chalk"), 0, trial), hparams, "ok", selected=picks, train_seconds=1.5)

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
