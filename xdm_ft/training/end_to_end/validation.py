"""Measures the selection metric on validation images while a model trains end to end."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from xdm_ft.runtime.tensors import Annotations, Criteria
from xdm_ft.training import Job
from xdm_ft.training.averages import LOSS_SPLIT
from xdm_ft.training.end_to_end.inputs import Inputs
from xdm_ft.training.end_to_end.model import EndToEnd
from xdm_ft.training.end_to_end.prediction import EvaluationImages, precision_of
from xdm_ft.training.rule_images import RuleImages, rule_images
from xdm_ft.training.selection import rows_of_rules, split_of

if TYPE_CHECKING:
    from accelerate import Accelerator


class EndToEndValidation:
    """The validation images of the selection rules, evaluated in the precision of the training."""

    def __init__(
        self,
        job: Job,
        inputs: Inputs,
        annotations: Annotations,
        criteria: Criteria,
        batch_size: int,
        accelerator: Accelerator,
        *,
        loss: bool,
    ) -> None:
        """`loss`: also measure the loss on the images of LOSS_SPLIT, as `self.loss`."""
        self.metric = criteria.metric
        self.precision = precision_of(accelerator)
        self.loss = math.nan  # loss on LOSS_SPLIT at the last evaluation, if it is measured
        watched = rows_of_rules(job, [*criteria.rules, LOSS_SPLIT] if loss else criteria.rules)

        def measured(rule: str, metric: str) -> RuleImages:
            classes = job.setup.task.num_classes
            return rule_images(split_of(rule), watched[rule], annotations, metric, classes)

        self.measured = {rule: measured(rule, criteria.metric) for rule in watched}
        self.measured_loss = measured(LOSS_SPLIT, "nll") if loss else None
        self.images = {
            rule: EvaluationImages(inputs, rows, batch_size, accelerator, persistent=True)
            for rule, rows in watched.items()
        }

    def evaluate(self, inner: EndToEnd) -> dict[str, float] | None:
        """Returns {selection rule: value of the metric}; None if logits are not finite."""
        inner.eval()
        values = {}
        for rule, images in self.images.items():
            logits = images.logits(inner, self.precision)
            if not logits.isfinite().all():
                return None
            values[rule] = self.measured[rule].value(logits)
            if rule == LOSS_SPLIT and self.measured_loss is not None:
                self.loss = self.measured_loss.value(logits)
        inner.train()
        return values
