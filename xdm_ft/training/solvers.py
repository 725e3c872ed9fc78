"""Trains methods that find their head without gradient steps: computes their candidates and selects one."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import torch

from xdm_ft.algorithms import Solver
from xdm_ft.runtime.errors import plural
from xdm_ft.runtime.progress import Progress, unseen
from xdm_ft.runtime.tensors import Annotations, Batch, Criteria
from xdm_ft.training import Job, Trained
from xdm_ft.training.bank.predictor import CachedPredictor
from xdm_ft.training.selection import Selector, external_values, rows_of_rules, rule_images, split_of

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
    solver, classes, selector = job.make(job.setup), job.setup.task.num_classes, Selector(criteria, 0)
    assert isinstance(solver, Solver)
    solver.eval()
    rows_of, predictor = rows_of_rules(job, criteria.rules), CachedPredictor(job, features)
    images = {r: rule_images(split_of(r), rows, annotations, criteria.metric, classes) for r, rows in rows_of.items()}
    rows, labels, domains = torch.cat(job.split.train), annotations.labels, annotations.domains
    batch = Batch(features[rows], labels[rows], job.split.domain_of[domains[rows]], rows, torch.arange(len(rows)))
    low, high = batch.x.aminmax(dim=1)  # [n], NaN if a feature is: without a copy of the features
    broken = rows[~(low.isfinite() & high.isfinite()).cpu()].tolist()
    if broken:
        why = f"features of {plural(len(broken), 'training image')} hold NaN or ∞; the first is row {broken[0]}"
        return Trained(job, {}, None, time.perf_counter() - started, why)
    for candidate in solver.solve(batch.x, batch):
        state, values = candidate.state, external_values(job, candidate.step)
        for rule, rows in rows_of.items():
            logits = predictor.logits(state, rows)
            values[rule] = images[rule].value(logits) if logits.isfinite().all() else math.nan  # nan: never selected
        selector.offer(candidate.step, values, lambda state=state: state, candidate.hparams)  # type: ignore[misc]
        bar.advance()
    failure, seconds = selector.nothing_selected(), time.perf_counter() - started
    return Trained(job, {} if failure else selector.selected, None, seconds, failure, selector.course)
