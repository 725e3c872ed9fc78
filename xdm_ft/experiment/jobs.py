"""Planned model → `Job`, the input of an engine."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from xdm_ft.algorithms import Setup
from xdm_ft.experiment.plan import ExtraModel, Plan, PlannedModel
from xdm_ft.experiment.prepared import Prepared
from xdm_ft.protocol.splits import Split
from xdm_ft.runtime.tensors import Task
from xdm_ft.training import Job
from xdm_ft.training.class_weights import balanced

Known = Mapping[str, Mapping[int, float]]
"""{selection rule: {step: value}}, for a rule whose values are measured on other models; as `Job.known`."""


def make_job(plan: Plan, prepared: Prepared, model: PlannedModel | ExtraModel, known: Known) -> Job:
    recipe, item, split = plan.recipe, model.item, model.split
    setup = Setup(
        task=Task(plan.dataset.class_names, split.train_domains, recipe.protocol.metric),
        width=prepared.of(item).width,
        steps=model.steps,
        seed=model.seed,
        loss_average=recipe.training.loss_average,
        head=item.head.build,
        head_init=item.head_init,
        text_weight=prepared.of(item).text_weights[item.block.prompts] if item.reads_text else None,
        class_weight=_class_weight(plan, split),
    )
    return Job(
        method=item.label,
        test_domains=split.test_domains,
        seed=model.seed,
        trial=model.trial,
        split=split,
        setup=setup,
        make=item.algorithm.build,
        sharpness=item.sharpness.build() if item.sharpness else None,
        training=model.training,
        averaging=item.averaging.build() if item.averaging else None,
        normalized=item.reads_normalized,
        known=known,
    )


def _class_weight(plan: Plan, split: Split) -> Tensor | None:
    if plan.recipe.training.class_weights == "none":
        return None
    return balanced(plan.annotations.labels[torch.cat(split.train)], len(plan.dataset.class_names))
