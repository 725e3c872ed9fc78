"""The bootstrap of benchmarks/verdicts.py, the rule of earlier versions, against resampling in a loop."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks/verdicts.py"))
SIZES = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5])
SUMS = np.array([[2, 1, 0, 1, 5, 4, 2, 3, 5, 0, 1], [0, 0, 4, 1, 1, 9, 1, 6, 0, 3, 5]])


def of_resamples(resamples: np.ndarray) -> np.ndarray:
    """The accuracies of both models on resamples [draws,groups] of the groups' numbers, by a loop."""
    images = [sum(SIZES[g] for g in drawn) for drawn in resamples]
    return np.array(
        [[sum(row[g] for g in drawn) / n for row in SUMS] for drawn, n in zip(resamples, images, strict=True)]
    )


def test_the_weights_are_the_draws_of_one_multinomial() -> None:
    times = np.random.default_rng(0).multinomial(11, np.full(11, 1 / 11), 150)
    resamples = np.array([np.repeat(np.arange(11), row) for row in times])
    assert SCRIPT["bootstrap"](SUMS, SIZES, 150).tolist() == of_resamples(resamples).tolist()


@pytest.mark.parametrize("size", [1, 1 << 22], ids=["float32", "float64"])
def test_blocks_of_groups_are_resampled_as_the_groups(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    bootstrap = SCRIPT["bootstrap"]
    monkeypatch.setitem(bootstrap.__globals__, "BLOCK", 4)  # blocks of 4, 4 and 3 groups
    found = bootstrap(SUMS * size, SIZES * size, 10_000)
    resamples = np.random.default_rng(1).integers(0, 11, (10_000, 11))
    expected = of_resamples(resamples)
    assert found.mean(0) == pytest.approx(expected.mean(0), abs=4 * expected.std() / 100)
    assert found.std(0) == pytest.approx(expected.std(0), rel=0.04)
    assert np.corrcoef(found.T)[0, 1] == pytest.approx(np.corrcoef(expected.T)[0, 1], abs=0.04)
