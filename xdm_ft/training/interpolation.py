"""Weights between those that a training started from and those that it ended with (WiSE-FT)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Literal

from torch import Tensor

from xdm_ft.tensors import Criteria
from xdm_ft.training import Selected
from xdm_ft.training.selection import Selector

ALPHAS = tuple(tenth / 10 for tenth in range(11))
Curve = list[dict[str, float | None]]


def interpolate(start: Mapping[str, Tensor], end: Mapping[str, Tensor], alpha: float) -> dict[str, Tensor]:
    """θ_α = (1 − α) θ_start + α θ_end, parameters and buffers alike; whole numbers (counters) are those of `end`.

    Exactly `start` at α = 0 and `end` at α = 1.
    """
    return {
        name: (1 - alpha) * start[name].to(value) + alpha * value if value.is_floating_point() else value
        for name, value in end.items()
    }


def on_the_line(
    selected: Selected,
    start: Mapping[str, Tensor],
    share: float | Literal["select"],
    metric: str,
    looks_at: str,
    evaluate: Callable[[Selected], dict[str, float]],
) -> Selected | None:
    """The model at α = `share`, or at the α of ALPHAS that is best on the split `looks_at`, the smallest where equal.

    `evaluate` gives the metric on every split. `Selected.curve` has it at every α; None is a metric that is not
    defined. None is returned where it is so on `looks_at` at every α.
    """
    selector = Selector(Criteria((looks_at,), metric), first_selectable_step=0)
    curve: Curve = []
    for alpha in sorted({*ALPHAS, *([] if share == "select" else [share])}):
        here = dataclasses.replace(
            selected,
            state=interpolate(start, selected.state, alpha),
            hparams=selected.hparams | {"alpha": alpha},
        )
        values = evaluate(here)
        point: dict[str, float | None] = {"alpha": alpha}
        curve.append(point | {name: value if math.isfinite(value) else None for name, value in values.items()})
        if share in ("select", alpha):
            selector.offer(here.step, {looks_at: values[looks_at]}, lambda here=here: here.state, here.hparams)  # type: ignore[misc]
    picked = selector.selected.get(looks_at)
    return None if picked is None else dataclasses.replace(picked, curve=curve)
