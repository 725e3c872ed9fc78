"""Trains methods that find their head without gradient steps: computes their candidates and selects one."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from xdm_ft.algorithms import Solver
from xdm_ft.runtime.errors import plural
from xdm_ft.runtime.progress import Progress, unseen
from xdm_ft.runtime.tensors import Annotations, Batch, Criteria
from xdm_ft.training import Job, Trained
from xdm_ft.training.bank.cached_data import cached_logits
from xdm_ft.training.rule_images import RuleImages, rule_images
from xdm_ft.training.selection import Selector, external_values, rows_of_rules, split_of

if TYPE_CHECKING:
    from xdm_ft.features.cache import Features


def solve(
    job: Job, features: Features, annotations: Annotations, criteria: Criteria, bar: Progress | None = None
) -> Trained:
    """Returns the candidates that the selection rules pick, offered in the solver's order. Deterministic on a CPU.

    `features` must be L2-normalised if the solver is `normalized`. `Selected.step` is the candidate's index in the
    path, `Selected.hparams` the hyper-parameters that the solver varied. `bar` counts the candidates.
    """
    started, bar = time.perf_counter(), bar or unseen()
    solver = job.make(job.setup)
    assert isinstance(solver, Solver)
    solver.eval()
    watched, classes = rows_of_rules(job, criteria.rules), job.setup.task.num_classes
    images = {
        rule: rule_images(split_of(rule), own, annotations, criteria.metric, classes) for rule, own in watched.items()
    }
    selector = Selector(criteria, first_selectable_step=0)
    rows, labels, domains = torch.cat(job.split.train), annotations.labels, annotations.domains
    batch = Batch(features[rows], labels[rows], job.split.domain_of[domains[rows]], rows, torch.arange(len(rows)))
    low, high = batch.x.aminmax(dim=1)  # [n], NaN if a feature is: without a copy of the features
    broken = rows[~(low.isfinite() & high.isfinite()).cpu()].tolist()
    if broken:
        why = f"features of {plural(len(broken), 'training image')} hold NaN or ∞; the first is row {broken[0]}"
        return Trained(job, {}, None, time.perf_counter() - started, why)
    for candidate in solver.solve(batch.x, batch):
        state = candidate.state
        # assign, not copy: the rounding of products depends on the layout in memory
        solver.load_state_dict(state, assign=True)
        solver.to(features.device)
        values = {
            rule: _value(images[rule], cached_logits(features, of_rule, solver).cpu())
            for rule, of_rule in watched.items()
        }
        values |= external_values(job, candidate.step)
        selector.offer(candidate.step, values, lambda state=state: state, candidate.hparams)  # type: ignore[misc]
        bar.advance()
    failure = selector.nothing_selected()
    return Trained(
        job, {} if failure else selector.selected, None, time.perf_counter() - started, failure, selector.course
    )


def _value(images: RuleImages, logits: Tensor) -> float:
    """Returns the metric's value; nan, which is never selected, if a logit is not finite."""
    return images.value(logits) if torch.isfinite(logits).all() else math.nan
