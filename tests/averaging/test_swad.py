"""SWAD's rule and averages, against values worked out by hand and algorithm 1 written out."""

from __future__ import annotations

import logging

import pytest
import torch

from xdm_ft.averaging import Segment
from xdm_ft.averaging.swad import SWAD
from xdm_ft.training.averages import Averages


def run(losses: list[float], lengths: list[int] | None = None, **settings) -> Segment:
    """The weight of step t is 2ᵗ: its mean over a window tells the window."""
    average, taken = SWAD(**settings).begin(), 0
    for loss, length in zip(losses, lengths or [1] * len(losses), strict=True):
        steps = torch.arange(taken + 1, taken + length + 1)
        average.add(Segment(taken + 1, taken + length, {"w": (2.0**steps).double().mean()[None]}), loss)
        taken += length
    return average.result()


def algorithm_1(losses: list[float], n_s: int, n_e: int, r: float) -> tuple[int, int] | None:
    """t_s and t_e, from 1, with one iteration per evaluation; None where t_s is never set."""
    t_s, t_e, threshold = None, len(losses), None
    for i in range(1, len(losses) + 1):
        if threshold is None:
            window = losses[i - n_s : i]
            if i >= n_s and losses[i - n_s] == min(window):
                t_s, threshold = i - n_s + 1, r * sum(window) / n_s
        if threshold is not None and i >= n_e + t_s and threshold < min(losses[i - n_e : i]):
            t_e = i - n_e
            break
    return None if t_s is None else (t_s, t_e)


def test_by_hand() -> None:
    # 0.5 is the first loss that the two after it do not undercut; l = 1.3 (0.5 + 0.6 + 0.55) / 3 = 0.715
    losses = [1.0, 0.8, 0.5, 0.6, 0.55, 0.72, 0.9, 0.7, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.1]
    got = run(losses)
    assert (got.first, got.last) == (3, 8)  # 0.72 and 0.9 are above l, but 0.7 follows within six
    assert got.mean["w"] == pytest.approx(sum(2.0**t for t in range(3, 9)) / 6)


def test_segments_count_by_their_steps() -> None:
    got = run([0.5, 0.6, 0.55, 0.5], lengths=[3, 1, 4, 2])
    assert (got.first, got.last) == (1, 10)
    assert got.mean["w"] == pytest.approx(sum(2.0**t for t in range(1, 11)) / 10)


def test_it_goes_on_to_the_end_where_the_valley_does_not_end() -> None:
    got = run([0.5, 0.6, 0.55, 9.0, 9.0])
    assert (got.first, got.last) == (1, 5)
    assert got.mean["w"] == pytest.approx(sum(2.0**t for t in range(1, 6)) / 5)


@pytest.mark.parametrize("losses", [[0.5], [0.5, 0.4], [0.6, 0.5, 0.4, 0.3]])
def test_without_a_valley_the_last_segment(losses: list[float], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="xdm_ft"):
        got = run(losses)
    assert got.first == got.last == len(losses) and "no valley" in caplog.text


@pytest.mark.parametrize("n_s, n_e", [(3, 6), (1, 1), (2, 2), (3, 3), (2, 4)])
def test_against_algorithm_1(n_s: int, n_e: int) -> None:
    generator, ended = torch.Generator().manual_seed(n_s), 0
    for _ in range(60):
        losses = (
            1 + torch.rand(16, generator=generator) + torch.linspace(0, 2, 16) * torch.rand(1, generator=generator)
        ).tolist()
        window = algorithm_1(losses, n_s, n_e, 1.3)
        got = run(losses, n_converge=n_s, n_tolerance=n_e, tolerance_ratio=0.3)
        if window is None:
            continue
        assert (got.first, got.last) == window
        first, last = window
        assert got.mean["w"].item() == pytest.approx((2.0 ** (last + 1) - 2.0**first) / (last - first + 1), rel=1e-6)
        ended += last < 16
    assert ended > 5


def test_averages_of_stacked_models_are_those_of_each_alone() -> None:
    torch.manual_seed(0)
    weights = torch.randn(12, 2, 3, 4)  # steps, heads
    losses = torch.tensor([[0.5, 0.9], [0.6, 0.8], [0.7, 0.7], [0.6, 0.6]])
    averages = Averages(SWAD(), heads=2, first_step=3)
    for taken in range(1, 13):
        averages.add(taken, {"w": weights[taken - 1]})
        if taken % 3 == 0:
            averages.evaluated(taken, losses[taken // 3 - 1].tolist())
    first = averages.selected(0, lambda mean: mean | {"b": torch.ones(())}, ("train_val", "oracle"))
    assert first["train_val"] is first["oracle"]
    assert first["oracle"].step == 12 and first["oracle"].hparams == {"averaged_from": 3}
    torch.testing.assert_close(first["oracle"].state["w"], weights[2:, 0].mean(0))
    torch.testing.assert_close(first["oracle"].state["b"], torch.ones(()))
    second = averages.selected(1, lambda mean: mean, ("oracle",))["oracle"]  # its loss only ever falls
    torch.testing.assert_close(second.state["w"], weights[9:, 1].mean(0))


def test_a_loss_that_is_not_finite_is_no_average() -> None:
    averages = Averages(SWAD(), heads=2, first_step=1)
    averages.add(1, {"w": torch.zeros(2, 1)})
    averages.evaluated(1, [None, 0.5])
    assert "not finite after step 1" in str(averages.nothing_averaged(0))
    assert averages.nothing_averaged(1) is None
