"""results.csv: its rows against results.json, and names that a spreadsheet would compute."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from example_runs import comparison, model, results_of, run_of, two_sets, with_comparisons

from xdm_ft.evaluation.records import ModelKey, Pick, Record
from xdm_ft.report import written
from xdm_ft.report.csv import COLUMNS, csv_rows, csv_text, parquet_of, properties
from xdm_ft.report.finished import read_run
from xdm_ft.runtime.tensors import Score
from xdm_ft.storage.csv_cells import read_cell
from xdm_ft.storage.run_directory import RunDirectory


def rows_of(results: dict[str, Any]) -> list[dict[str, str]]:
    """What a reader of the file finds."""
    return list(csv.DictReader(io.StringIO(csv_text(csv_rows(run_of(results))))))


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
    assert float(mean["mean"]) == pytest.approx(0.55) and mean["worst_domain"] == "0.4" and mean["seeds"] == "2"
    assert (mean["images"], a["images"]) == ("", "20")
    assert {row["protocol"] for row in rows} == {"pets, 40 images; picked by train_val"}
    assert (a["run"], a["encoder"], a["encoder_trained"], a["augmentation"]) == ("made", "tiny", "frozen", "none")


def test_the_comparison_is_that_of_the_summary() -> None:
    results = results_of(two_sets())
    pair = comparison("xdomainmix", here="better", equal_within=0.2, look=2)
    declared = comparison("xdomainmix", "sam", here="no verdict", error=None)
    erm, *_, mean, a, _, other = rows_of(with_comparisons(results, pair, declared))
    assert erm["difference"] == erm["p_here"] == a["difference"] == a["p_here"] == "" and mean["of"] == "mean"
    text = {
        name: mean[name] for name in ("p_here", "p_here_holm", "p_elsewhere", "p_elsewhere_holm", "elsewhere", "note")
    }
    assert [*text.values()] == ["0.01", "0.02", "0.15", "0.3", "unknown", "images assumed independent"]
    assert (mean["here"], mean["equal_within"], mean["look"], mean["compared_with"]) == ("better", "0.2", "2", "erm")
    ends = [
        (f"{what}_low", f"{what}_high", half)
        for what, half in (("here", 0.02 * 2.570582), ("elsewhere", 0.05 * 12.706205))
    ]
    for low, high, half in ends:
        assert (float(mean[low]), float(mean[high])) == pytest.approx((0.1 - half, 0.1 + half), abs=1e-6)
    assert (mean["difference"], mean["error"], mean["freedom"], mean["share_seeds"]) == ("0.1", "0.02", "5.0", "0.75")
    assert (other["of"], other["method"], other["compared_with"]) == ("compared", "xdomainmix", "sam")
    assert (other["here"], other["here_low"], other["p_here"], other["mean"]) == ("no verdict", "", "", "")


def test_domains_of_one_held_out_set_have_rows_of_accuracy() -> None:
    runs = [model("erm", ("a", "b"), seed, accuracies={"a": 0.9, "b": 0.2 + 0.2 * seed}) for seed in (0, 1)]
    rows = rows_of(results_of(runs))
    assert [(row["of"], row["held_out"]) for row in rows] == [
        ("mean", ""), ("held_out", "a + b"), ("domain", "a"), ("domain", "b"),
    ]  # fmt: skip
    assert float(rows[3]["accuracy"]) == float(rows[3]["mean"]) == pytest.approx(0.3) and rows[3]["nll"] == ""


def test_failed_methods_and_missing_values_are_empty_cells() -> None:
    runs = two_sets()
    runs[0]["selected"]["train_val"]["metrics"]["test"]["auroc"] = None
    bad = {"method": "irm", "test_domains": ["a"], "seed": 0, "trial": 0, "hparams": {}, "selected": {}}
    rows = rows_of(results_of([*runs, bad | {"status": "failed", "reason": "the loss is nan"}]))
    assert rows[1]["auroc"] == "0.8" and rows[1]["auroc_stderr"] == ""  # of one seed
    failed = [row for row in rows if row["method"] == "irm"]
    assert len(failed) == 3 and failed[0]["failed"] == "1" and "the loss is nan" in failed[0]["reason"]
    assert all(row["mean"] == row["nll"] == row["images"] == "" and row["seeds"] == "0" for row in failed)


@pytest.mark.parametrize("sign", ["=", "+", "-", "@", "\t", "\r", "\n"])
def test_no_name_is_a_formula(sign: str) -> None:
    name = f'{sign}HYPERLINK("http://x","y"),;\n|'
    results = results_of([model(name, (name,), seed, accuracy=0.4 - seed) for seed in (0, 1)], name=name)
    results["summary"][0] |= {"protocol": name, "flags": [name]}
    text = csv_text(csv_rows(run_of(results)))
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    assert len(rows) == 2
    for row in rows:
        assert row["run"] == row["method"] == row["protocol"] == f"'{name}"
        assert read_cell("method", row["method"]) == name
        assert all(not cell.startswith(("=", "+", "@", "\t", "\r", "\n")) for cell in row.values() if cell)
        assert row["std"] == rows[0]["std"] and float(row["mean"]) == pytest.approx(-0.1)  # numbers stay numbers
    assert rows[1]["held_out"] == f"'{name}" and rows[0]["flags"] == f"'{name}"


def test_an_empty_summary_is_a_header() -> None:
    assert csv_text(csv_rows(run_of(results_of([])))) == ",".join(COLUMNS) + "\n"


def test_properties_tell_two_encoders_apart() -> None:
    def of(**recipe: Any) -> dict[str, Any]:
        return properties(run_of(results_of(two_sets(), **recipe)), "erm")

    assert of(encoder={"name": "timm", "model": "vit", "weights": "/private/home/big.bin", "trainable": True}) == {
        "run": "made", "encoder": "vit (big.bin)", "encoder_trained": "end to end", "augmentation": "none",
    }  # fmt: skip
    views = of(encoder={"name": "own"}, data={"train_augmentation": "crop"}, features={"views": 4})
    assert views["encoder"] == "own" and views["augmentation"] == "crop, 4 cached views"
    assert of(features=None, data={"train_augmentation": None})["augmentation"] == "none"


# ------------------------------------------------------------------------------------------------------ models.parquet


def score(accuracy: float) -> Score:
    return Score(accuracy, accuracy, accuracy, None, None, 0.7, 0.1, 20, {"cat": 1.0}, {"ink": {"accuracy": 1.0}})


def searched(trial: int, hparams: dict[str, Any], *rules: str) -> Record:
    picks = {rule: Pick(10 * trial, f"{rule}.safetensors", {"test": score(0.25), "val": score(0.5)}) for rule in rules}
    return Record(ModelKey("erm", ("ink", "chalk"), 0, trial), hparams, "ok", selected=picks, train_seconds=1.5)


def parquet_rows(*records: Record) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pyarrow.parquet.read_table(io.BytesIO(parquet_of(records))).to_pylist()
    return found


def test_a_row_per_model_and_rule() -> None:
    found = parquet_rows(
        searched(0, {"lr": 1e-3}, "train_val"), searched(1, {"lr": 1, "wide": True}, "train_val", "oracle")
    )
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
    found = parquet_rows(
        searched(0, {"p": 0.5, "l": [1, 2]}, "oracle"), searched(1, {"p": "half", "l": None}, "oracle")
    )
    assert [row["hparams.p"] for row in found] == ["0.5", '"half"']
    assert [row["hparams.l"] for row in found] == ["[1, 2]", None]


def test_a_large_run_has_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written, "write_page", lambda run: (run.path / "report.html").write_text("page") and [])
    with RunDirectory(tmp_path / "run", "0", main=True) as directory:
        directory.begin()
        directory.write_results(results_of(two_sets()))
        run = read_run(tmp_path / "run")
        written.write_reports(directory, run)
        assert not (tmp_path / "run/models.parquet").exists()
        monkeypatch.setattr(written, "MANY_MODELS", len(run.records))
        assert tmp_path / "run/models.parquet" in written.write_reports(directory, run)
    table = pyarrow.parquet.read_table(tmp_path / "run/models.parquet")
    assert len(table) == sum(len(record.selected) for record in run.records)


ENCODERS = ("small", "large")


def costly(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same runs with costs: model number i has i seconds and i MB; of xdomainmix the memory is not known."""
    for i, run in enumerate(runs):
        run |= {"train_seconds": float(i), "trained_parameters": 1000}
        if not run["method"].startswith("xdomainmix"):
            run["peak_memory"] = i * 10**6
    return runs


def of_two_encoders() -> dict[str, Any]:
    """ERM and XDomainMix under both encoders; the larger one has 0.05 more in each model."""
    runs = [
        model(f"{run['method']} @ {one}", tuple(run["test_domains"]), run["seed"], accuracy=accuracy(run) + gain)
        for one, gain in zip(ENCODERS, (0.0, 0.05), strict=True)
        for run in two_sets()
    ]
    return results_of(costly(runs), encoders=ENCODERS)


def accuracy(run: dict[str, Any]) -> float:
    return float(run["selected"]["train_val"]["metrics"]["test"]["accuracy"])


def test_results_csv_has_costs_and_pairs() -> None:
    results = of_two_encoders()
    results["recipe"]["methods"] = ["erm", {"name": "xdomainmix", "trainable": {"blocks": 2}}]
    pair = next(one for one in results["comparisons"] if one["second"] == "xdomainmix @ large")
    pair |= {"p_here": {"plain": 0.01, "holm": 0.03}, "here": "worse", "error_elsewhere": 0.01}
    rows = list(csv.DictReader(io.StringIO(csv_text(csv_rows(run_of(results))))))
    erm = next(row for row in rows if (row["method"], row["of"]) == ("erm @ large", "mean"))
    assert (erm["encoder"], erm["encoder_trained"], erm["compared_with"]) == ("vit_large", "frozen", "")
    assert [float(erm[name]) for name in ("trained_parameters", "train_seconds", "peak_memory")] == [1000, 9.5, 9.5e6]
    mix = next(row for row in rows if (row["method"], row["of"]) == ("xdomainmix @ small", "mean"))
    assert (mix["encoder_trained"], mix["compared_with"]) == ("last 2 blocks", "erm @ small")
    assert mix["peak_memory"] == ""
    pairs = [row for row in rows if row["of"] == "encoders"]
    assert [(row["method"], row["compared_with"]) for row in pairs] == [
        ("erm @ small", "erm @ large"), ("xdomainmix @ small", "xdomainmix @ large")
    ]  # fmt: skip
    last = pairs[1]
    assert float(last["difference"]) == pytest.approx(-0.05) and last["mean"] == last["train_seconds"] == ""
    assert (last["p_here_holm"], last["here"], last["elsewhere"]) == ("0.03", "worse", "unknown")
    assert float(last["elsewhere_low"]) == pytest.approx(-0.05 - 0.01 * 12.7062, abs=1e-6)
