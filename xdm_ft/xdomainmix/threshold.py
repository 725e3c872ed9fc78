"""The cycle of τ_d."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache

from torch import Tensor


def quantile_stage(step: int | Tensor, every: int, stages: int) -> int | Tensor:
    """Returns the place in the cycle of τ_d at a step since the warm-up: 0 … stages−1, each one for `every` steps."""
    return step // every % stages


def domain_quantile(step: int, every: int, start: float = 0.9, stop: float = 0.5, drop: float = 0.1) -> float:
    """Returns the quantile of τ_d: it falls from `start` to `stop` by `drop` every `every` steps, then starts again.

    0.9, 0.8, 0.7, 0.6, 0.5, 0.9, … The cycle is computed with integers and rationals: subtracting 0.1 from a float
    drifts, so that 0.5 would take two stages (0.5000000000000001, then 0.5).

    Args:
        step: steps since the end of the warm-up, from 0.
        every: n, in steps.

    Raises:
        ValueError: `step` is negative, `every` is less than 1, or the cycle can not fall from `start` to `stop`.
    """
    if step < 0 or every < 1:
        raise ValueError(f"step {step} and every {every}: step must be at least 0, every at least 1")
    values = quantile_cycle(start, stop, drop)
    return values[int(quantile_stage(step, every, len(values)))]


@cache
def quantile_cycle(start: float = 0.9, stop: float = 0.5, drop: float = 0.1) -> tuple[float, ...]:
    """Returns the quantiles of a cycle, in order. Raises `ValueError` as `domain_quantile` does."""
    top, bottom, by = Fraction(str(start)), Fraction(str(stop)), Fraction(str(drop))
    if bottom > top or by <= 0:
        raise ValueError(f"start {start}, stop {stop}, drop {drop}: start must be at least stop, and drop positive")
    stages = math.ceil((top - bottom) / by) + 1
    return tuple(float(max(bottom, top - stage * by)) for stage in range(stages))
