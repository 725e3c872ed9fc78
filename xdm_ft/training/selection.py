"""Which weights a training returns: those of the step that a selection rule picks, or an average over steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xdm_ft.algorithms import Finish
from xdm_ft.averaging import Averaging, Segment
from xdm_ft.core import ORACLE, Annotations, Criteria, Tensors, honest_rule
from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER, is_defined, per_image_nll
from xdm_ft.evaluation.metrics import metric as metric_of
from xdm_ft.protocol.splits import SELECTION_SPLIT
from xdm_ft.runtime.errors import UserError
from xdm_ft.training import Job, RuleValues, Selected

FINAL_FIT = "final_fit"
"""The rule of a final fit: `Job.external_values` fixes its step before the training begins, and nothing is measured."""
LOSS_SPLIT = "train_val"
"""The validation images whose loss decides which steps an average contains, under every selection rule."""
BY_DOMAIN = "train_val"
"""The split that is measured as an unweighted mean over its domains: DomainBed averages the accuracies of the training
domains' validation parts (`env{i}_out_acc`, model_selection.py of Gulrajani & Lopez-Paz 2021), SWAD their losses. All
other splits are pooled."""


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
    """Returns {selection rule: rows (int64) of its split}, without rules that use other models' values.

    Raises `UserError` if a split has no rows.
    """
    rows_of = {}
    for rule in rules:
        if rule in job.external_values:
            continue
        name = split_of(rule)
        rows = job.split.evaluation.get(name)
        if rows is None or len(rows) == 0:
            raise UserError(
                f'protocol.selection: "{rule}" needs images in the split {name}, which is empty when '
                f"{', '.join(job.split.test_domains)} is held out; choose another rule"
            )
        rows_of[rule] = rows
    return rows_of


def external_values(job: Job, step: int) -> dict[str, float]:
    """Returns {selection rule: its value after `step` steps} for rules that use other models' values; nan: no value."""
    return {rule: values.get(step, math.nan) for rule, values in job.external_values.items()}


class RuleImages:
    """The images `rows` (int64 [n]) of one split, on which a selection metric is measured.

    Its tensors are on the device of the annotations, which is that of the logits to measure.
    """

    def __init__(self, split: str, rows: Tensor, annotations: Annotations, metric: str) -> None:
        rows = rows.to(annotations.labels.device)
        self.metric, self.labels, self.worst_of = metric, annotations.labels[rows], annotations.worst_of[rows]
        self.parts: tuple[Tensor, ...] | None = None  # positions of each domain's images; None: all images together
        self.part_of = torch.zeros_like(rows)  # int64 [n]: the number of an image's part; len(parts): in no part
        # the worst domain is a minimum over the domains already
        if split == BY_DOMAIN and metric != "worst_domain_accuracy":
            self.parts = tuple(defined_domains(rows, annotations, metric)[0].values())
            self.part_of += len(self.parts)
            for number, part in enumerate(self.parts):
                self.part_of[part] = number

    def value(self, logits: Tensor) -> float:
        """Returns the metric of finite logits [n,C], the unweighted mean over `parts`; nan if it is not defined."""
        if self.metric == "accuracy":
            return self.accuracy(self.count(logits.argmax(1) == self.labels).tolist())
        if self.metric == "nll":
            return self._mean(per_image_nll(logits, self.labels))
        if self.parts is None:
            return metric_of(self.metric, logits, self.labels, self.worst_of)
        values = (metric_of(self.metric, logits[p], self.labels[p], self.worst_of[p]) for p in self.parts)
        # fsum is exact in any order of the domains, so that equally good steps have equal values
        return math.fsum(values) / len(self.parts) if self.parts else math.nan

    def values(self, logits: Tensor) -> list[float]:
        """Returns `value` of H heads from their finite logits [n,H,C] on the CPU."""
        images, heads = logits.shape[:2]
        if self.metric == "nll":
            losses = per_image_nll(logits.flatten(0, 1), self.labels.repeat_interleave(heads)).reshape(images, heads)
            return [self._mean(np.ascontiguousarray(losses[:, head])) for head in range(heads)]
        return [self.value(logits[:, head]) for head in range(heads)]

    def _mean(self, losses: np.ndarray) -> float:
        """Returns the mean of losses [n], or of their means over parts."""
        if self.parts is None:
            return float(losses.mean())
        means = [float(losses[part.cpu().numpy()].mean()) for part in self.parts]
        return math.fsum(means) / len(means) if means else math.nan

    def count(self, right: Tensor) -> Tensor:
        """Returns the number of right predictions of every part, int64 [parts,…], from bool [n,…]."""
        if self.parts is None:
            return right.sum(0, keepdim=True)
        counts = torch.zeros(len(self.parts) + 1, *right.shape[1:], dtype=torch.int64, device=right.device)
        return counts.index_add_(0, self.part_of, right.long())[:-1]  # integers: exact in any order

    def accuracy(self, right: Sequence[int]) -> float:
        """Returns the accuracy from the number of right predictions of every part, as `count` returns them."""
        sizes = [len(self.labels)] if self.parts is None else list(map(len, self.parts))
        return math.fsum(n / size for n, size in zip(right, sizes, strict=True)) / len(sizes) if sizes else math.nan


def defined_domains(rows: Tensor, annotations: Annotations, metric: str) -> tuple[dict[int, Tensor], list[int]]:
    """Returns {domain: positions of its images in `rows`} where the metric is defined on them, and the other domains.

    The labels alone decide which domains count, so they are the same at every step and in every trial.
    """
    domains, defined, undefined = annotations.domains[rows], dict[int, Tensor](), list[int]()
    for domain in domains.unique().tolist():
        positions = (domains == domain).nonzero()[:, 0]
        if is_defined(metric, annotations.labels[rows[positions]]):
            defined[domain] = positions
        else:
            undefined.append(domain)
    return defined, undefined


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
        hparams: Mapping[str, float | None] | None = None,
    ) -> list[str]:
        """Selects the state after `step` steps for each rule that it improves, given the metric's value for each rule.

        `state` returns the weights; it is called once, and only if a rule selects this step. Returns these rules.
        Patience counts steps that improve the first rule's value, not equal ones that `oracle` follows.
        """
        for rule in self.rules:
            self.course[rule][step] = values[rule]
        if step < self.first_selectable_step:
            return []
        best = {rule: picked.value for rule, picked in self.selected.items() if picked.value is not None}
        sign = 1 if HIGHER_IS_BETTER[self.metric] else -1
        better = [
            rule
            for rule in self.rules
            if not math.isnan(values[rule]) and (rule not in best or sign * values[rule] > sign * best[rule])
        ]
        picking = better
        # the default NaN equals nothing: an oracle that has picked no step follows no other rule
        if self.followed in better and ORACLE not in better and values.get(ORACLE) == best.get(ORACLE, math.nan):
            picking = [rule for rule in self.rules if rule in better or rule == ORACLE]
        if picking:
            weights = state()  # one copy for all rules that pick this step
            for rule in picking:
                self.selected[rule] = Selected(step, weights, dict(hparams or {}), value=values[rule])
        self.waited = 0 if self.rules[0] in better else self.waited + 1
        if self.patience is not None and self.waited >= self.patience:
            self.stopped_at = step
        return picking

    def state(self) -> dict[str, Any]:
        # rules that picked the same step share its weights, which are stored once
        distinct = {id(selected.state): selected for selected in self.selected.values()}
        index = {key: number for number, key in enumerate(distinct)}
        return {
            "values": {rule: selected.value for rule, selected in self.selected.items()},
            "waited": self.waited,
            "stopped_at": self.stopped_at,
            "course": self.course,
            "picked": [[picked.step, picked.state, picked.hparams] for picked in distinct.values()],
            "by_rule": {rule: index[id(selected.state)] for rule, selected in self.selected.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        picked = [Selected(*entry) for entry in state["picked"]]
        self.selected = {
            rule: dataclasses.replace(picked[number], value=state["values"][rule])
            for rule, number in state["by_rule"].items()
        }
        self.course = state["course"]
        self.waited, self.stopped_at = state["waited"], state["stopped_at"]

    def failure(self) -> str | None:
        """Returns why the first rule has selected nothing; None if it has selected a step."""
        if self.rules[0] in self.selected:
            return None
        return (
            f"{self.rules[0]} could not select a step: from step {self.first_selectable_step} on, every "
            f"evaluation had an undefined {self.metric} on its images, or a logit that was not finite"
        )


class Averages:
    """The averages of H models that train together. Parameters are stacked, [H,…]; a single model has H = 1."""

    def __init__(self, averagings: Sequence[Averaging], first_step: int, steps: int) -> None:
        """One `Averaging` per model, all of one kind. `steps`: the length of the training.

        Weights after fewer than `first_step` steps are ignored, unless the kind begins with those before training.
        """
        self.averagings, self.steps = averagings, steps
        self.averages = [averaging.begin() for averaging in averagings]
        self.first_step = 0 if averagings[0].from_start else first_step
        self.mean: Tensors = {}  # mean of the weights after each step since the last evaluation
        self.count = 0  # number of those steps
        self.weights = [0.0 for _ in averagings]  # sum of each head's factors of those steps
        self.broken_at: dict[int, int] = {}  # head → number of steps at its first validation loss that is not finite

    @torch.no_grad()
    def add(self, taken: int, parameters: Tensors) -> None:
        """Adds the weights after `taken` steps to the mean since the last evaluation."""
        if taken < self.first_step or (taken == 0 and self.count):
            return  # a training that stopped before its first step has added the weights of step 0 already
        self.count += 1
        factors = [averaging.weight(taken, self.steps) for averaging in self.averagings]
        if self.count == 1:
            self.weights = factors
            self.mean = {name: value.detach().clone() for name, value in parameters.items()}
            return
        self.weights = [weight + factor for weight, factor in zip(self.weights, factors, strict=True)]
        shares = [factor / weight for factor, weight in zip(factors, self.weights, strict=True)]
        # heads of one bank may differ in the β of their averages (BMA): then each has a share of its own
        if len(set(shares)) == 1:
            torch._foreach_lerp_([*self.mean.values()], [parameters[name] for name in self.mean], shares[0])
            return
        for name, mean in self.mean.items():  # [H,…]
            share = torch.tensor(shares, dtype=mean.dtype, device=mean.device).view(-1, *[1] * (mean.dim() - 1))
            mean.lerp_(parameters[name], share)

    def evaluated(self, taken: int, losses: Sequence[float | None], ended: Collection[int] = ()) -> None:
        """Passes the mean since the last evaluation, and the validation loss, to the average of every head.

        `losses`: each head's validation loss after `taken` steps; None if it is not finite. `ended`: heads whose
        training ended at an earlier evaluation; their averages do not change.
        """
        if self.count == 0:
            return
        means = {name: value.cpu() for name, value in self.mean.items()}  # one copy from the device for all heads
        for head, (average, loss) in enumerate(zip(self.averages, losses, strict=True)):
            if head in ended:
                continue
            if loss is None:
                self.broken_at.setdefault(head, taken)
            elif head not in self.broken_at:
                # a copy: a view of one head would keep the weights of all heads in memory
                mean = {name: value[head].clone() for name, value in means.items()}
                average.add(Segment(taken - self.count + 1, taken, mean, self.weights[head]), loss)
        self.count = 0

    def failure(self, head: int) -> str | None:
        """Returns why a head has no average; None if it has one."""
        if head not in self.broken_at:
            return None
        return f"the loss of the {LOSS_SPLIT} images was not finite after step {self.broken_at[head]}"

    def state(self) -> dict[str, Any]:
        return {
            "averages": [average.state() for average in self.averages],
            "mean": self.mean if self.count else {},
            "count": self.count,
            "weights": self.weights,
            "broken_at": self.broken_at,
        }

    def load_state(self, state: Mapping[str, Any], device: torch.device) -> None:
        for average, saved in zip(self.averages, state["averages"], strict=True):
            average.load_state(saved)
        self.mean = {name: value.to(device) for name, value in state["mean"].items()}
        self.count, self.weights, self.broken_at = state["count"], state["weights"], state["broken_at"]

    def selected(self, head: int) -> Selected:
        """Returns the average of one head, whatever the selection rule. Its `state` has the parameters alone."""
        average = self.averages[head].result()
        return Selected(average.last, average.mean, {"averaged_from": average.first})


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
    selector = Selector(criteria, first_selectable_step=0)  # the step is picked already: a warm-up has no say
    curve: list[dict[str, float | None]] = []
    for finish in offered:
        finished = dataclasses.replace(selected, state=finish.state, hparams={**selected.hparams, **finish.varied})
        values = measure(finished)
        point = {name: value if math.isfinite(value) else None for name, value in values.items()}
        curve.append({**finish.varied, **point})
        if finish.selectable:
            by_rule = {name: values[split_of(name)] for name in criteria.rules}
            selector.offer(selected.step, by_rule, lambda state=finish.state: state, finished.hparams)  # type: ignore[misc]
    picked = selector.selected.get(rule)
    return None if picked is None else dataclasses.replace(picked, curve=curve)
