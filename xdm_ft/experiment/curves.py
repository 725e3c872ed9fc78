"""Learning curves in TensorBoard: one sub-run per model, or per group of heads if a run has many models.

`storage.events` has the layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from xdm_ft.experiment.plan import Plan
from xdm_ft.report.finished import ORACLE
from xdm_ft.storage.events import heads_sub_run, sub_run
from xdm_ft.storage.run_directory import RunDirectory
from xdm_ft.training import Job
from xdm_ft.training.selection import FINAL_FIT

Values = Mapping[str, float]


def write_curves(
    plan: Plan, chunk: Sequence[Job], step: int, evaluated: Sequence[tuple[Job, Values]], directory: RunDirectory
) -> None:
    """Writes what was measured after `step` steps, as `train_chunk` records it. `chunk`: all that train together.

    In a large run the heads of a chunk with the same test domains share a sub-run. All of them train in one process, so
    each sub-run has one writer at a time. Models that train end to end, and those of the final fit, have their own.
    """
    found = [(job, _by_tag(values, plan.rules[0])) for job, values in evaluated]
    final_fit = FINAL_FIT in chunk[0].known  # few models, which are the result of the run
    if not plan.is_large or plan.recipe.trains_encoders or final_fit:
        for job, values in found:
            directory.write_scalars(sub_run(*job.key), step, values)
        return
    first = {job.test_domains: job for job in reversed(chunk)}
    together: dict[tuple[str, ...], list[Values]] = {}
    for job, values in found:
        together.setdefault(job.test_domains, []).append(values)
    for test_domains, of_heads in together.items():
        directory.write_scalars(heads_sub_run(*first[test_domains].key), step, _summary(of_heads))


def _by_tag(values: Values, own_rule: str) -> dict[str, float]:
    """Returns {tag: value} of those that are defined."""
    found = {_tag(name, own_rule): value for name, value in values.items() if not name.startswith(f"{FINAL_FIT}/")}
    return {tag: value for tag, value in found.items() if math.isfinite(value)}


def _tag(name: str, own_rule: str) -> str:
    """Returns the tag of a scalar, `NAME`, or of a rule's value, `RULE/METRIC`."""
    rule, _, metric = name.rpartition("/")
    if not rule:
        return f"train/{name}"
    if rule == ORACLE:  # a curve of the held-out domain must not look like one of validation
        return f"oracle/{metric}"
    return f"val/{metric}" if rule == own_rule else f"val/{rule}/{metric}"


def _summary(of_heads: Sequence[Values]) -> dict[str, float]:
    """Returns the mean of every tag over the heads that have it, its range, and the number of heads."""
    found = {"train/heads": float(len(of_heads))}
    for tag in dict.fromkeys(tag for values in of_heads for tag in values):
        values = [values[tag] for values in of_heads if tag in values]
        found[tag] = math.fsum(values) / len(values)
        found |= {f"lowest/{tag}": min(values), f"highest/{tag}": max(values)}
    return found
