"""Tables and the page of a run, made from the files of its directory alone."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from xdm_ft.runtime.settings import Block, OneOrMany


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
    compare: Annotated[
        tuple[tuple[str, str], ...],
        Field(
            description="pairs of rows, such as [[xdomainmix, erm]]: the comparisons that you decided on before the "
            "run. With encoders, a pair of methods stands for one pair under each of them"
        ),
    ] = ()
    margin: Annotated[
        float | None,
        Field(
            gt=0,
            description="in points (nats for nll), e.g. 1.0: rows whose interval lies inside ±margin are equal within "
            "it; null: no such verdict",
        ),
    ] = None
    log_with: Annotated[
        tuple[Literal["wandb", "trackio", "mlflow", "comet_ml", "clearml", "dvclive", "swanlab"], ...],
        OneOrMany,
        Field(description="other trackers that the end of the run logs curves and test values to"),
    ] = ()

    @field_validator("compare", mode="before")
    @classmethod
    def _pairs(cls, value: object) -> object:
        pairs = value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
            raise ValueError("must be a list of pairs of rows, such as [[xdomainmix, erm]]")
        return value
