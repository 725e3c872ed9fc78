"""The cycle of τ_d."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache


def domain_quantile(step: int, every: int, start: float = 0.9, stop: float = 0.5, drop: float = 0.1) -> float:
    """The quantile behind τ_d: from `start` by `drop` down to `stop`, each value held for `every` steps, then again.

    0.9, 0.8, 0.7, 0.6, 0.5, 0.9, … Rational and integer arithmetic throughout: lowering a float drifts, and makes 0.5
    two stages (0.5000000000000001, then 0.5).

    Args:
        step: steps since the end of the warm-up, from 0.
        every: n, in steps.
    """
    if step < 0 or every < 1:
        raise ValueError(f"step {step} must be at least 0 and every {every} at least 1")
    values = _cycle(start, stop, drop)
    return values[step // every % len(values)]


@cache
def _cycle(start: float, stop: float, drop: float) -> tuple[float, ...]:
    top, bottom, by = Fraction(str(start)), Fraction(str(stop)), Fraction(str(drop))
    if bottom > top or by <= 0:
        raise ValueError(f"{start} can not fall to {stop} by {drop}")
    stages = math.ceil((top - bottom) / by) + 1
    return tuple(float(max(bottom, top - stage * by)) for stage in range(stages))
