"""Counts over predictions, and the intervals made of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from made_up_runs import Named, write_run
from scipy.stats import t

from xdm_ft.evaluation.metrics import ECE_BINS
from xdm_ft.report import pooled
from xdm_ft.report.finished import Run, read_run
from xdm_ft.report.page import numbers
from xdm_ft.report.pooled import LEVELS, confidence_level


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return write_run(tmp_path_factory.mktemp("run"), methods=("zero_shot", "erm", "sam"))


def test_counts_are_those_of_a_loop(run: Run) -> None:
    pool = run.pools.of["sam", ("art",)]
    counts, bins = np.zeros((3, 3), int), np.zeros((ECE_BINS, 3))
    for record in run.records:
        if record.key[:2] == ("sam", ("art",)):
            read = run.prediction(record)
            assert read.probabilities is not None
            for label, predicted, row in zip(read.images.labels, read.predicted, read.probabilities, strict=True):
                counts[label, predicted] += 1
                place = min(int(np.ceil(float(row.max()) * ECE_BINS)) - 1, ECE_BINS - 1)
                bins[place] += 1, row.max(), label == predicted
    np.testing.assert_array_equal(pool.counts, counts)
    np.testing.assert_allclose(pool.bins, bins, rtol=1e-6)
    assert pool.levels.sum(0).tolist() == [counts.sum(), np.trace(counts)] and pool.read == 3


def test_an_interval_of_one_domain_is_that_of_seeds_and_images(run: Run) -> None:
    own = [record for record in run.records if record.key[:2] == ("erm", ("photo",))]
    right = np.array([p.predicted == p.images.labels for p in map(run.prediction, own)], float)  # [seeds, images]
    by_seed, by_image = right.mean(1), right.mean(0)
    of_seeds, of_images = by_seed.var(ddof=1) / 3, by_image.var(ddof=1) / len(by_image)
    freedom = (of_seeds + of_images) ** 2 / (of_seeds**2 / 2 + of_images**2 / (len(by_image) - 1))  # Satterthwaite
    half = t.ppf(0.975, freedom) * (of_seeds + of_images) ** 0.5
    found = numbers.domain_interval(run, "erm", "photo")
    assert found is not None
    low, high = max(right.mean() - half, 0), min(right.mean() + half, 1)
    assert found == pytest.approx((low, high), abs=1e-9)


def test_a_deterministic_method_has_an_interval_over_images_alone(run: Run) -> None:
    [record] = [record for record in run.records if record.key[:2] == ("zero_shot", ("art",))]
    read = run.prediction(record)
    right = (read.predicted == read.images.labels).astype(float)
    half = t.ppf(0.975, len(right) - 1) * right.std(ddof=1) / len(right) ** 0.5
    assert numbers.domain_interval(run, "zero_shot", "art") == pytest.approx(
        (right.mean() - half, right.mean() + half), abs=1e-9
    )


def test_the_mean_has_an_interval_only_with_every_seed(run: Run) -> None:
    [row] = [row for row in run.own_rows if row.method == "sam"]
    found = numbers.mean_interval(run, row)
    assert found is not None and row.mean is not None and found.low < row.mean < found.high
    fewer = Run(run.path, run.results, [one for one in run.records if one.key != ("sam", ("art",), 2, 0)], run.rows)
    assert numbers.mean_interval(fewer, row) is None
    assert numbers.mean_interval(run, next(one for one in run.rows if one.selection == "oracle")) is None


def test_of_too_many_predictions_the_first_seeds_are_read(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    one = (run.path / "models/erm/art/seed0-trial0/predictions.safetensors").stat().st_size
    monkeypatch.setattr(pooled, "MOST_BYTES", 15.5 * one)  # zero_shot has seed 0 alone: 9 models of it, 6 of seed 1
    again = read_run(run.path)
    assert (again.pools.read, again.pools.left_out) == (15, 6)
    assert again.pools.about() == "Counted over 15 of 21 models, those of the first seeds."
    assert again.pools.of["erm", ("art",)].values == run.pools.of["erm", ("art",)].values, "of all seeds"
    monkeypatch.setattr(pooled, "MOST_BYTES", 0)
    assert read_run(run.path).pools.read == 9, "never none"


def test_levels_of_confidence_rise_and_tell_apart_what_is_nearly_sure() -> None:
    near = 1 - 2.0 ** -np.arange(1, 24)
    levels = confidence_level(np.array([0.0, 0.001, *near, 1.0]))
    assert levels[0] == 0 and levels[-1] == LEVELS - 1
    assert (np.diff(levels) > 0).all()


def test_metrics_of_old_runs_without_values_per_image(tmp_path: Path) -> None:
    made = write_run(tmp_path, Named(("a", "b"), ("x", "y"), each=10), ("erm",), metric="ece")
    [row] = [row for row in made.own_rows if row.method == "erm"]
    assert numbers.mean_interval(made, row) is not None
    for record in made.picked:
        folder = made.path / "models" / "erm" / record.test_domains[0] / f"seed{record.seed}-trial0"
        _without(made, folder.relative_to(made.path).as_posix(), "train_val.per_image")
    assert numbers.mean_interval(read_run(tmp_path), row) is None


def _without(run: Run, folder: str, name: str) -> None:
    from xdm_ft.storage.run_directory import RunDirectory

    directory = RunDirectory(run.path)
    arrays = directory.predictions(folder)
    directory.write_predictions(folder, {key: value for key, value in arrays.items() if key != name})
