"""The learning rate over the steps of a training."""

from __future__ import annotations

import math

from xdm_ft.training import Schedule


def learning_rate_factor(step: int, steps: int, schedule: Schedule) -> float:
    """Returns the factor of the learning rates at `step` (0…steps−1).

    The warm-up rises linearly, (step + 1) / (warmup_steps + 1), so that no step is wasted on a learning rate of 0.
    Cosine then falls as ½[1 + cos(π t / T)] after t of the T remaining steps, from 1 to 0 after the last one
    (Loshchilov & Hutter 2017; torch's `CosineAnnealingLR` with T_max = T).
    """
    warmup = schedule.warmup_steps
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if schedule.name == "constant":
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))
