"""BMA's weights and SWAD's window, by hand, against scipy's density and the authors' queues."""

import logging
import math

import pytest
import torch
from scipy.stats import beta as beta_distribution

from xdm_ft.averaging import Segment
from xdm_ft.averaging.bma import BMA
from xdm_ft.averaging.swad import SWAD
from xdm_ft.training.selection import Averages


def test_the_weights_by_hand():
    # Beta(0.5, 0.5) has the density 1 / (π √(x (1 − x))); with T = 3 steps, x = 1/8, 3/8, 5/8, 7/8
    end, middle = 8 / (math.pi * math.sqrt(7)), 8 / (math.pi * math.sqrt(15))
    found = [BMA().weight(step, 3) for step in range(4)]
    assert found == pytest.approx([end, middle, middle, end])
    assert [BMA(beta=1).weight(step, 7) for step in range(8)] == pytest.approx([1.0] * 8)


@pytest.mark.parametrize("every", [1, 3, 4, 12])
def test_the_mean_is_the_weighted_sum_over_all_steps_and_the_start(every):
    """However the evaluations cut the training into segments; every head by its own β."""
    betas, steps = (0.5, 1.0, 0.1), 12
    weights = torch.randn(steps + 1, 3, 2, 5, generator=torch.Generator().manual_seed(0))  # steps, heads
    averages = Averages([BMA(beta=beta) for beta in betas], first_step=7, steps=steps)
    for taken in range(steps + 1):
        averages.add(taken, {"w": weights[taken]})
        if taken and taken % every == 0:
            averages.evaluated(taken, [math.nan] * 3)
    for head, beta in enumerate(betas):
        factors = [beta_distribution.pdf((step + 0.5) / (steps + 1), beta, beta) for step in range(steps + 1)]
        expected = sum(factor * weights[step, head] for step, factor in enumerate(factors)) / sum(factors)
        selected = averages.selected(head)
        assert (selected.step, selected.hparams) == (steps, {"averaged_from": 0})
        torch.testing.assert_close(selected.state["w"], expected, rtol=1e-5, atol=1e-6)
    one, other = (averages.selected(head) for head in (0, 2))
    assert not torch.allclose(one.state["w"], other.state["w"], atol=1e-3)


def run(losses, lengths=None, **settings):
    """SWAD's result for these losses. The weight after step t is 2ᵗ, so that a mean belongs to one window only."""
    average, taken = SWAD(**settings).begin(), 0
    for loss, length in zip(losses, lengths or [1] * len(losses), strict=True):
        steps = torch.arange(taken + 1, taken + length + 1)
        average.add(Segment(taken + 1, taken + length, {"w": (2.0**steps).double().mean()[None]}, length), loss)
        taken += length
    return average.result()


def in_the_queues(losses, n_s, n_e, r):
    """The result of the authors' two queues, of the last N_s and N_e evaluations: s, and the evaluations (from 1) in
    the average, repeated as often as they are added. None without s."""
    taken, s, threshold, queue = list[int](), 0, 0.0, list[int]()

    def lowest(some):
        return min(losses[k - 1] for k in some)

    for k in range(1, len(losses) + 1):
        queue = [*queue, k][-n_e:]
        window = [*range(k - n_s + 1, k + 1)]
        if not s and window[0] > 0 and losses[window[0] - 1] == lowest(window):
            s, threshold = window[0], r * sum(losses[i - 1] for i in window) / n_s
            if n_e < n_s:
                taken = window[1 : 1 + n_s - n_e]
            elif n_e > n_s:
                oldest = queue[: n_e - n_s + 1]
                above = [place for place, i in enumerate(oldest) if losses[i - 1] > threshold]
                taken = oldest[1 + (above[-1] + 1 if above else 0) :]
        elif s and queue[0] >= s:
            if lowest(queue) > threshold:
                return s, taken
            taken.append(queue[0])
    rest = queue[1:]
    while s and rest and lowest(rest) <= threshold:
        taken.append(rest.pop(0))
    return (s, taken) if s else None


def test_by_hand():
    # 0.5 is the first loss that the two after it do not undercut; l = 1.3 (0.5 + 0.6 + 0.55) / 3 = 0.715
    losses = [1.0, 0.8, 0.5, 0.6, 0.55, 0.72, 0.9, 0.7, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.1]
    got = run(losses)
    assert (got.first, got.last) == (3, 8)  # 0.72 and 0.9 are above l, but 0.7 follows within six
    assert got.mean["w"] == pytest.approx(sum(2.0**t for t in range(3, 9)) / 6)


def test_segments_count_by_their_steps():
    got = run([0.5, 0.6, 0.55, 0.5], lengths=[3, 1, 4, 2])
    assert (got.first, got.last) == (1, 10)
    assert got.mean["w"] == pytest.approx(sum(2.0**t for t in range(1, 11)) / 10)


@pytest.mark.parametrize(("early", "first"), [([0.7, 0.7, 0.7, 0.7], 3), ([0.7, 9.0, 0.7, 0.7], 4), ([0.7], 2)])
def test_the_start_moves_back_within_the_valley(early, first):
    """l = 1.3 · 0.6 = 0.78; s is the evaluation after `early`, whose losses fall. The first evaluation never joins."""
    got = run([*(loss - 0.001 * k for k, loss in enumerate(early)), 0.6, 0.6, 0.6, 0.6])
    assert (got.first, got.last) == (first, len(early) + 4)


@pytest.mark.parametrize("losses", [[0.5], [0.5, 0.4], [0.6, 0.5, 0.4, 0.3]])
def test_without_a_valley_the_last_segment(losses, caplog):
    with caplog.at_level(logging.WARNING, logger="xdm_ft"):
        got = run(losses)
    assert got.first == got.last == len(losses) and "no valley" in caplog.text


@pytest.mark.parametrize("n_s, n_e", [(3, 6), (1, 1), (2, 2), (3, 3), (2, 4), (4, 2), (3, 1)])
def test_against_the_authors_queues(n_s, n_e):
    generator, ended, earlier, trailing = torch.Generator().manual_seed(n_s), 0, 0, 0
    for _ in range(60):
        random, slope = torch.rand(24, generator=generator), torch.rand(2, generator=generator)
        falls = [1.5 + slope[1].item() / k for k in range(1, n_e + 1)]  # else s may come before the N_e-th evaluation
        losses = falls + (1 + random + torch.linspace(0, 2, 24) * slope[0]).tolist()
        expected = in_the_queues(losses, n_s, n_e, 1.3)
        got = run(losses, n_converge=n_s, n_tolerance=n_e, tolerance_ratio=0.3)
        if expected is None or expected[0] > len(losses) - n_e:
            continue
        s, window = expected[0], sorted({expected[0], *expected[1]})
        threshold = 1.3 * sum(losses[s - 1 : s - 1 + n_s]) / n_s
        if n_e < n_s:  # its queues then take in evaluations above l among the N_s
            window = window[: max(i for i, k in enumerate(window) if losses[k - 1] <= threshold) + 1]
        assert [*range(got.first, got.last + 1)] == window
        first, last = got.first, got.last
        assert got.mean["w"].item() == pytest.approx((2.0 ** (last + 1) - 2.0**first) / (last - first + 1), rel=1e-6)
        ended += min(losses[last : last + n_e]) > threshold if last + n_e <= len(losses) else 0
        earlier += first < s
        trailing += len(losses) - n_e < last < len(losses)
    assert ended > 5 and (trailing > 0 or n_e == 1) and (earlier > 5) == (n_e > n_s + 1)


def test_averages_of_stacked_models_are_those_of_each_alone():
    torch.manual_seed(0)
    weights = torch.randn(12, 2, 3, 4)  # steps, heads
    losses = torch.tensor([[0.5, 0.9], [0.6, 0.8], [0.7, 0.7], [0.6, 0.6]])
    averages = Averages([SWAD(), SWAD()], first_step=3, steps=12)
    for taken in range(1, 13):
        averages.add(taken, {"w": weights[taken - 1]})
        if taken % 3 == 0:
            averages.evaluated(taken, losses[taken // 3 - 1].tolist())
    first, second = averages.selected(0), averages.selected(1)  # the loss of the second only ever falls
    assert first.step == 12 and first.hparams == {"averaged_from": 3}
    torch.testing.assert_close(first.state["w"], weights[2:, 0].mean(0))
    torch.testing.assert_close(second.state["w"], weights[9:, 1].mean(0))


def test_a_loss_that_is_not_finite_is_no_average():
    averages = Averages([SWAD(), SWAD()], first_step=1, steps=1)
    averages.add(1, {"w": torch.zeros(2, 1)})
    averages.evaluated(1, [None, 0.5])
    assert "not finite after step 1" in str(averages.failure(0))
    assert averages.failure(1) is None
