"""Other experiment trackers (`report.log_with`), through Accelerate: one tracker run per `xdm-ft run`, at its end.

Processes that train heads can not share a tracker, so the main process logs what is on the disk when all models are
trained: the recipe, the curves of each method and held-out domain as means over seeds and trials, and the test values
of the summary. Single models are in TensorBoard's files.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from xdm_ft.experiment.growing import label_of
from xdm_ft.experiment.results import Results
from xdm_ft.recipe.settings import Recipe
from xdm_ft.runtime.errors import UserError, printable
from xdm_ft.runtime.progress import pulse
from xdm_ft.storage.events import read_scalars
from xdm_ft.storage.names import file_name

if TYPE_CHECKING:
    from accelerate import Accelerator

Values = dict[str, float]


def installed_trackers(recipe: Recipe) -> list[str]:
    """Returns the recipe's trackers. Raises `UserError` if the library of one is not installed."""
    if not recipe.report.log_with:
        return []
    from accelerate.tracking import get_available_trackers

    available = {str(name) for name in get_available_trackers()}
    missing = [name for name in recipe.report.log_with if name not in available]
    if missing:
        what = f"the library of {', '.join(missing)} is not installed"
        raise UserError(f"{recipe.name}: report.log_with: {what}; install it, or leave it out")
    return list(dict.fromkeys(recipe.report.log_with))


def log_results(accelerator: Accelerator, recipe: Recipe, found: Results) -> None:
    """Logs a finished run to the trackers of the accelerator. Called by the main process, after results are written.

    Raises `UserError` if a tracker fails: the run directory is complete then.
    """
    if not accelerator.log_with:
        return
    names, steps = _Names(), curves(found)
    last = max(steps, default=0)
    steps[last] = steps.get(last, {}) | tested(found)
    config = {names.of(key): value for key, value in _flat(_by_label(recipe.resolved()))}
    try:
        with pulse.waiting():  # for the network
            accelerator.init_trackers(recipe.name, config)
            for step in sorted(steps):
                accelerator.log({names.of(name): value for name, value in steps[step].items()}, step=step)
            for tracker in accelerator.trackers:  # not `end_training`, which would also end the group of processes
                tracker.finish()
    except Exception as error:  # each library raises errors of its own, such as for a missing login or network
        used, what = ", ".join(recipe.report.log_with), printable(str(error) or type(error).__name__)
        remedy = "the run is complete; run the same command to log it again, or leave report.log_with out"
        raise UserError(f"{recipe.name}: report.log_with: {used}: {what}; {remedy}") from error
    finally:
        accelerator.trackers.clear()


def curves(found: Results) -> dict[int, Values]:
    """Returns {step: {METHOD/HELD_OUT/TAG: mean over the models with a value there}} of the curves in `events/`."""
    sums: dict[int, dict[str, list[tuple[float, float]]]] = {}
    for sub_run, scalars in read_scalars(found.path / "events").items():
        heads = dict(scalars.get("train/heads", ()))
        for tag, points in scalars.items():
            if sub_run.count("/") == 2 and tag.startswith(("train/", "val/", "oracle/")) and tag != "train/heads":
                name = f"{sub_run.rpartition('/')[0]}/{tag}"
                for step, value in points:
                    sums.setdefault(step, {}).setdefault(name, []).append((value, heads.get(step, 1.0)))
    return {step: {name: _mean(values) for name, values in of_step.items()} for step, of_step in sums.items()}


def _mean(values: list[tuple[float, float]]) -> float:
    """Returns Σ w v / Σ w of the pairs (v, w)."""
    return math.fsum(value * weight for value, weight in values) / math.fsum(weight for _, weight in values)


def tested(found: Results) -> Values:
    """Returns {name: value} of the summary under the recipe's own rule, for methods that have results."""
    values: dict[str, float | None] = {}
    own = found.streamed["recipe"]["protocol"]["selection"]
    for row in found.rows:
        if row.selection == own:
            method = file_name(row.method, safe="+ ")
            values |= {f"{method}/test/{row.metric}": row.mean, f"{method}/test/{row.metric}_stderr": row.stderr}
            for domain, of_domain in row.per_test_domain.items():
                values[f"{method}/{file_name(domain, safe=' ')}/test/{row.metric}"] = of_domain["mean"]
    return {name: value for name, value in values.items() if value is not None}


def _by_label(resolved: dict[str, Any]) -> dict[str, Any]:
    return resolved | {"methods": {label_of(item): item for item in resolved["methods"]}}


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, bool | float | str]]:
    """Yields the dotted keys with a value; lists as JSON, as trackers have no others."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        elif isinstance(value, bool | int | float | str):
            yield f"{before}{key}", value
        elif value is not None:
            yield f"{before}{key}", json.dumps(value)


class _Names:
    """Names that every tracker accepts, distinct for distinct names: MLflow accepts the fewest characters."""

    def __init__(self) -> None:
        self.taken: dict[str, str] = {}  # accepted → given

    def of(self, name: str) -> str:
        accepted = clean = re.sub(r"[^A-Za-z0-9_./ :-]", "_", name)
        number = 1
        while self.taken.setdefault(accepted, name) != name:
            number += 1
            accepted = f"{clean}_{number}"
        return accepted
