"""What the selection rules look at while a model trains end to end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from xdm_ft.data.loading.samplers import ImageRows
from xdm_ft.evaluation.metrics import metric as metric_of
from xdm_ft.training import Job
from xdm_ft.training.averages import LOSS_SPLIT
from xdm_ft.training.passes import EndToEnd
from xdm_ft.training.prediction import EvaluationImages, precision_of
from xdm_ft.training.selection import rows_of_rules

if TYPE_CHECKING:
    from accelerate import Accelerator


class Validation:
    """What the selection rules look at, evaluated while training, in the precision of the training."""

    def __init__(
        self,
        job: Job,
        images: ImageRows,
        labels: Tensor,
        worst_of: Tensor,
        rules: Sequence[str],
        metric: str,
        batch_size: int,
        accelerator: Accelerator,
    ) -> None:
        self.labels, self.worst_of, self.metric = labels, worst_of, metric
        self.precision = precision_of(accelerator)
        self.loss = math.nan  # on the images of LOSS_SPLIT, where they are looked at, at the last evaluation
        self.rows = rows_of_rules(job, rules)
        self.images = {
            rule: EvaluationImages(images, rows, batch_size, accelerator, persistent=True)
            for rule, rows in self.rows.items()
        }

    def evaluate(self, inner: EndToEnd) -> dict[str, float] | None:
        """Selection rule → the metric on its split; None where logits are not finite."""
        inner.eval()
        head = inner.algorithm.head
        values = {}
        for rule, images in self.images.items():
            logits = images.logits(inner.encoder, head.weight, head.bias, self.precision)
            if not logits.isfinite().all():
                return None
            rows = self.rows[rule]
            values[rule] = metric_of(self.metric, logits, self.labels[rows], self.worst_of[rows])
            if rule == LOSS_SPLIT:
                self.loss = metric_of("nll", logits, self.labels[rows], self.worst_of[rows])
        inner.train()
        return values
