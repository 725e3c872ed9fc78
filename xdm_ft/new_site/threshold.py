"""The threshold of the probability for a wanted risk, in a model directory: threshold.json.

It is of one site, and comes from labels there alone: one from validation images was broken at 62 to 70% of sites.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from xdm_ft.evaluation.few_labels import DELTA
from xdm_ft.export import ModelPrecision, first_fault
from xdm_ft.export.directory import CONFIG, THRESHOLD, refuse_changed
from xdm_ft.export.predictor import Model
from xdm_ft.new_site.measure import AtRisk
from xdm_ft.report.finished import is_run
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.settings import Block
from xdm_ft.storage.atomic import replace_text
from xdm_ft.storage.lines import Damaged, one_line, read_object, with_checksum
from xdm_ft.version import __version__

HOW = "xdm-ft evaluate {} SITE --risk 0.1 --save"
Count = Annotated[int, Field(ge=0)]


class StoredThreshold(Block):
    """A threshold with its record."""

    format: Literal[1] = 1
    xdm_ft: str = __version__  # version that wrote it
    model: str  # checksum of its config.json
    precision: ModelPrecision  # in which the probabilities were computed
    threshold: Annotated[float, Field(gt=0, le=1)]
    risk: Annotated[float, Field(gt=0, lt=1)]
    delta: Annotated[float, Field(gt=0, lt=1)] = DELTA  # probability that the risk is larger
    labels: Count
    groups: Count | None  # None: images assumed independent
    answered: Count  # of the labelled images
    wrong: Count


def refuse_other_directories(folder: Path) -> None:
    """Raises `UserError` unless a threshold can be stored here: in a model directory."""
    if is_run(folder):
        raise UserError(f"--save: {folder} is a run directory; export a model of it first: xdm-ft export {folder} DIR")
    if not (folder / CONFIG).is_file():
        raise UserError(f"--save: {folder} is not a model directory on this machine; give one")


def store(model: Model, shown: AtRisk, groups: int | None) -> Path:
    """Writes the file, atomically, and returns its path.

    Raises `UserError` if it cannot be written, or if the directory holds another model than was read.
    """
    refuse_changed(model.folder, model.checksum)
    record = {name: getattr(shown, name) for name in ("threshold", "risk", "labels", "answered", "wrong")}
    stored = StoredThreshold(model=model.checksum, precision=model.module.precision, groups=groups, **record)
    document = with_checksum(stored.model_dump(mode="json"))
    replace_text(model.folder / THRESHOLD, json.dumps(document, indent=1, allow_nan=False) + "\n")
    return model.folder / THRESHOLD


def read_threshold(model: Model) -> StoredThreshold:
    """Reads the file of a model directory. Raises `UserError` if there is none for this model in its precision."""
    folder, precision = model.folder, model.module.precision
    path, again = folder / THRESHOLD, f"store one: {HOW.format(folder)}"
    if not path.is_file():
        raise UserError(f"--abstain-below: {folder} has no stored threshold; {again}")
    try:
        stored = StoredThreshold.model_validate(read_object(path))
    except (Damaged, ValidationError) as error:
        reason = first_fault(error) if isinstance(error, ValidationError) else one_line(error)
        raise UserError(f"--abstain-below: {path} is damaged ({reason[:200]}); {again}") from error
    if stored.model != model.checksum:
        raise UserError(f"--abstain-below: {path} is of another model; {again}")
    if stored.precision != precision:
        problem = f"is of probabilities in {stored.precision}, and these are in {precision}"
        raise UserError(f"--abstain-below: {path} {problem}; add --precision {stored.precision}")
    return stored
