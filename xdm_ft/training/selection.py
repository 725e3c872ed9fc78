"""Selects the best step of a training by the protocol's rules."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from xdm_ft.algorithms import Finish
from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER
from xdm_ft.evaluation.trials import ORACLE, honest_rule
from xdm_ft.protocol.splits import SELECTION_SPLIT
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.tensors import Criteria
from xdm_ft.training import Job, RuleValues, Selected

FINAL_FIT = "final_fit"
"""The rule of a final fit: `Job.external_values` fixes its step before the training begins, and nothing is measured."""


def evaluation_steps(steps: int, every: int | None) -> list[int]:
    """Returns the numbers of steps after which a training is evaluated: every `every` steps, and at the end.

    `every` None: a twentieth of the steps.
    """
    every = every or max(1, steps // 20)
    return [*range(every, steps, every), steps]


def split_of(rule: str) -> str:
    """Returns the split that a selection rule measures; for a name that is no rule, the split of that name.

    `cross_domain` picks a step by other models; whatever else it picks (`best_finish`) is measured on `train_val`.
    """
    return "train_val" if rule == "cross_domain" else SELECTION_SPLIT.get(rule, rule)


def rows_of_rules(job: Job, rules: Sequence[str]) -> dict[str, Tensor]:
    """Returns {selection rule: rows (int64) of the split that it measures}, without rules whose values are known.

    Raises `UserError` if a split has no rows.
    """
    found = {}
    for rule in rules:
        if rule in job.external_values:
            continue
        name = split_of(rule)
        rows = job.split.evaluation.get(name)
        if rows is None or len(rows) == 0:
            raise UserError(
                f'protocol.selection: "{rule}" needs images in the split {name}, which has none if '
                f"{', '.join(job.split.test_domains)} is held out; choose another rule"
            )
        found[rule] = rows
    return found


def external_values(job: Job, step: int) -> dict[str, float]:
    """Returns {selection rule: its value after `step` steps} for rules whose values are known; nan: no value."""
    return {rule: of_step.get(step, math.nan) for rule, of_step in job.external_values.items()}


class Selector:
    """Keeps the best state of one model so far, for each rule. The first of equally good steps wins.

    `oracle` goes on to an equally good step that the `honest_rule` picks: if that rule's last pick is among the steps
    that are best for `oracle`, both have the same step.

    The first rule is the recipe's own: if it selects nothing, the training has failed. Other rules may select nothing.
    """

    def __init__(self, criteria: Criteria, first_selectable_step: int = 1, patience: int | None = None) -> None:
        """`patience`: evaluations in a row without a better value by the first rule, after which training stops."""
        self.rules, self.metric = criteria.rules, criteria.metric
        self.first_selectable_step = first_selectable_step
        self.selected: dict[str, Selected] = {}
        self.followed = honest_rule(criteria.rules)  # by `oracle`
        self.course: RuleValues = {rule: {} for rule in self.rules}
        self.patience, self.waited = patience, 0
        self.stopped_at: int | None = None  # number of steps after which patience ended

    def offer(
        self,
        step: int,
        values: Mapping[str, float],
        state: Callable[[], dict[str, Tensor]],
        hparams: Mapping[str, float] | None = None,
    ) -> list[str]:
        """Selects the state after `step` steps for each rule that it improves, given the metric's value for each rule.

        `state` returns the weights; it is called once, and only if a rule selects this step. Returns these rules.
        Patience counts steps that improve the first rule's value, not equal ones that `oracle` follows.
        """
        for rule in self.rules:
            self.course[rule][step] = values[rule]
        if step < self.first_selectable_step:
            return []
        better = [rule for rule in self.rules if self._improves(rule, values[rule])]
        picking = [rule for rule in self.rules if rule in better or self._follows(rule, values[rule], better)]
        if picking:
            weights = state()  # one copy for all rules that pick this step
            for rule in picking:
                self.selected[rule] = Selected(step, weights, dict(hparams or {}), value=values[rule])
        self.waited = 0 if self.rules[0] in better else self.waited + 1
        if self.patience is not None and self.waited >= self.patience:
            self.stopped_at = step
        return picking

    def _follows(self, rule: str, value: float, better: Sequence[str]) -> bool:
        return (
            rule == ORACLE and self.followed in better and rule in self.selected and value == self.selected[rule].value
        )

    def _improves(self, rule: str, value: float) -> bool:
        if math.isnan(value):
            return False
        best = self.selected[rule].value if rule in self.selected else None
        if best is None:
            return True
        return value > best if HIGHER_IS_BETTER[self.metric] else value < best

    def state(self) -> dict[str, Any]:
        # rules that picked the same step share its weights, which are stored once
        distinct = {id(selected.state): selected for selected in self.selected.values()}
        place = {key: number for number, key in enumerate(distinct)}
        return {
            "values": {rule: selected.value for rule, selected in self.selected.items()},
            "waited": self.waited,
            "stopped_at": self.stopped_at,
            "course": self.course,
            "picked": [[one.step, one.state, one.hparams] for one in distinct.values()],
            "by_rule": {rule: place[id(selected.state)] for rule, selected in self.selected.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        picked = [Selected(*one) for one in state["picked"]]
        self.selected = {
            rule: dataclasses.replace(picked[number], value=state["values"][rule])
            for rule, number in state["by_rule"].items()
        }
        self.course = state["course"]
        self.waited, self.stopped_at = state["waited"], state["stopped_at"]

    def nothing_selected(self) -> str | None:
        """Returns why the first rule has selected nothing; None if it has selected a step."""
        if self.rules[0] in self.selected:
            return None
        return (
            f"{self.rules[0]} could select no step: from step {self.first_selectable_step} on, {self.metric} was "
            "undefined on its images, or a logit was not finite, at every evaluation"
        )


def best_finish(
    selected: Selected,
    offered: Iterable[Finish],
    rule: str,
    criteria: Criteria,
    measure: Callable[[Selected], Mapping[str, float]],
) -> Selected | None:
    """Returns `selected` with the best of the weights that its method offers (`Algorithm.finish`), by `rule`.

    `criteria` has all rules of the run. `measure` returns the metric on every split. `Selected.curve` has the values of
    all offered weights, None for an undefined metric. Returns None if the metric is undefined on the rule's split for
    all weights that can be picked.
    """
    selector = Selector(criteria, first_selectable_step=0)
    curve: list[dict[str, float | None]] = []
    for one in offered:
        here = dataclasses.replace(selected, state=one.state, hparams=selected.hparams | one.varied)
        values = measure(here)
        point = {name: value if math.isfinite(value) else None for name, value in values.items()}
        curve.append({**one.varied, **point})
        if one.selectable:
            of_rules = {one: values[split_of(one)] for one in criteria.rules}
            selector.offer(here.step, of_rules, lambda here=here: here.state, here.hparams)  # type: ignore[misc]
    picked = selector.selected.get(rule)
    return None if picked is None else dataclasses.replace(picked, curve=curve)
