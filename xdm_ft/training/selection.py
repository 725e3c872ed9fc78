"""Which step of a training is kept: the best by the protocol's rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from xdm_ft.data.loading.splits import SELECTION_SPLIT, Split
from xdm_ft.errors import UserError
from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER
from xdm_ft.training import Selected


def evaluation_steps(steps: int, every: int | None) -> list[int]:
    """After how many steps a training of `steps` is evaluated: each `every`-th (null: a twentieth), and at the end."""
    every = every or max(1, steps // 20)
    return [*range(every, steps, every), steps]


def rows_of_rules(split: Split, rules: Sequence[str]) -> dict[str, Tensor]:
    """Selection rule → the rows (int64) of the split that it looks at. Raises `UserError` where there are none."""
    for rule in rules:
        rows = split.evaluation.get(SELECTION_SPLIT[rule])
        if rows is None or len(rows) == 0:
            raise UserError(
                f'protocol.selection: "{rule}" needs images in the split {SELECTION_SPLIT[rule]}, and there are none '
                f"with {', '.join(split.test_domains)} held out; choose another rule"
            )
    return {rule: split.evaluation[SELECTION_SPLIT[rule]] for rule in rules}


class Selector:
    """The best state of one model so far, for each rule. The first of equally good steps wins."""

    def __init__(self, rules: Sequence[str], metric: str, first_selectable_step: int = 1) -> None:
        self.rules, self.metric, self.first_selectable_step = tuple(rules), metric, first_selectable_step
        self.best: dict[str, float] = {}
        self.selected: dict[str, Selected] = {}

    def offer(
        self,
        step: int,
        values: Mapping[str, float],
        state: Callable[[], dict[str, Tensor]],
        hparams: Mapping[str, float] | None = None,
    ) -> None:
        """The metric's value for each rule after `step` steps. `state` is called once if a rule picks it."""
        if step < self.first_selectable_step:
            return
        better = [rule for rule in self.rules if self._improves(rule, values[rule])]
        if better:
            picked = Selected(step, state(), dict(hparams or {}))
            self.selected |= dict.fromkeys(better, picked)
            self.best |= {rule: values[rule] for rule in better}

    def _improves(self, rule: str, value: float) -> bool:
        if math.isnan(value):
            return False
        if rule not in self.best:
            return True
        return value > self.best[rule] if HIGHER_IS_BETTER[self.metric] else value < self.best[rule]

    def nothing_selected(self) -> str | None:
        """Why a rule has picked nothing; None where each has."""
        missing = [rule for rule in self.rules if rule not in self.selected]
        if not missing:
            return None
        return (
            f"nothing could be selected by {', '.join(missing)}: at no step from {self.first_selectable_step} on was "
            f"{self.metric} defined on its images and every logit finite"
        )
