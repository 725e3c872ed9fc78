"""Methods that find their head without gradient steps: their candidates, and the pick among them."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from xdm_ft.algorithms import Solver
from xdm_ft.progress import pulse
from xdm_ft.tensors import Annotations, Batch, Criteria
from xdm_ft.training import Job, Trained
from xdm_ft.training.bank.cached_data import head_logits
from xdm_ft.training.rule_images import RuleImages, rule_images
from xdm_ft.training.selection import Selector, known_values, rows_of_rules, split_of

if TYPE_CHECKING:
    from xdm_ft.features.cache import Features


def solve(job: Job, features: Features, annotations: Annotations, criteria: Criteria) -> Trained:
    """Offers the solver's candidates to selection, in their order. Deterministic on a CPU.

    `features` are the L2-normalised ones where the solver says `normalized`. `Selected.step` is the candidate's place
    in the path, `Selected.hparams` what distinguishes it.
    """
    started = time.perf_counter()
    solver = job.make(job.setup)
    assert isinstance(solver, Solver)
    watched, classes = rows_of_rules(job, criteria.rules), job.setup.task.num_classes
    images = {
        rule: rule_images(split_of(rule), own, annotations, criteria.metric, classes) for rule, own in watched.items()
    }
    selector = Selector(criteria, first_selectable_step=0)
    rows, labels, domains = torch.cat(job.split.train), annotations.labels, annotations.domains
    batch = Batch(features[rows], labels[rows], job.split.domain_of[domains[rows]], rows, torch.arange(len(rows)))
    broken = rows[~torch.isfinite(batch.x).all(1).cpu()].tolist()
    if broken:
        why = f"the features of {len(broken)} training images are not finite, the first that of row {broken[0]}"
        return Trained(job, {}, None, time.perf_counter() - started, why)
    for candidate in solver.solve(batch.x, batch):
        state = {"head.weight": candidate.weight.cpu(), "head.bias": candidate.bias.cpu()}
        values = {
            rule: _value(images[rule], head_logits(features, of_rule, state).cpu()) for rule, of_rule in watched.items()
        }
        values |= known_values(job, candidate.step)
        selector.offer(candidate.step, values, lambda state=state: state, candidate.hparams)  # type: ignore[misc]
        pulse.beat()
    failure = selector.nothing_selected()
    return Trained(
        job, {} if failure else selector.selected, None, time.perf_counter() - started, failure, selector.course
    )


def _value(images: RuleImages, logits: Tensor) -> float:
    """nan, which is never selected, where a logit is not finite."""
    return images.value(logits) if torch.isfinite(logits).all() else math.nan
