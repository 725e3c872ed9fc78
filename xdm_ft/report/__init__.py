"""Tables and the page of a run, made from the files of its directory alone."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from xdm_ft.settings import Block, OneOrMany


class ReportSettings(Block):
    """Keys of the block `report`."""

    page: Annotated[bool, Field(description="write report.html and plots/ at the end of the run")] = True
    images: Annotated[bool, Field(description="show the most confident mistakes as small images in report.html")] = (
        False
    )
    seeds_averaged: Annotated[
        bool,
        Field(
            description="results.md has a table of each method's models of all seeds as one model, with the mean of "
            "their logits; reads the predictions of all models"
        ),
    ] = False
    log_with: Annotated[
        tuple[Literal["wandb", "trackio", "mlflow", "comet_ml", "clearml", "dvclive", "swanlab"], ...],
        OneOrMany,
        Field(description="other trackers that the end of the run logs curves and test values to"),
    ] = ()
