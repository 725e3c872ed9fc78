"""Jobs under another `training` block."""

from __future__ import annotations

import dataclasses

from xdm_ft.training import Job, Training


def under(training: Training, job: Job) -> Job:
    """The job under `training`, with its own learning rate and weight decay."""
    own = {"lr": job.training.lr, "weight_decay": job.training.weight_decay}
    return dataclasses.replace(job, training=training.model_copy(update=own))
