"""The models of a run as rows of TensorBoard's table of hyper-parameters, with their test values."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from xdm_ft.evaluation.records import Record
from xdm_ft.experiment.plan import Plan
from xdm_ft.runtime.errors import printable
from xdm_ft.storage.events import sub_run, trial_sub_run
from xdm_ft.storage.run_directory import RunDirectory
from xdm_ft.storage.sessions import Session

TEST = ("accuracy", "balanced_accuracy", "macro_f1", "auroc", "worst_domain_accuracy", "nll", "ece")


def write_sessions(plan: Plan, records: Iterable[Record], directory: RunDirectory) -> None:
    """Writes a session per model. In a large run: one per method and trial, with means."""
    trained = [record for record in records if record.status != "skipped"]
    if not plan.is_large:
        for record in trained:
            directory.write_session(sub_run(*record.key), _of_model(plan, record))
        return
    by_trial: dict[tuple[str, int], list[Record]] = {}
    for record in trained:
        by_trial.setdefault((record.method, record.trial), []).append(record)
    for (method, trial), of_trial in by_trial.items():
        directory.write_session(trial_sub_run(method, trial), _of_trial(plan, of_trial))


def _of_model(plan: Plan, record: Record) -> Session:
    held_out = ", ".join(map(printable, record.test_domains))
    pick = record.selected.get(plan.rules[0])
    about = {"method": record.method, "held_out": held_out, "trial": record.trial, "selection": plan.rules[0]}
    row = f"{printable(record.method)}/{held_out}/trial{record.trial}"
    step = 0 if pick is None else pick.step
    return Session(row, _plain(about | record.hparams), step, _scalars(plan, record), record.status == "failed")


def _of_trial(plan: Plan, records: Sequence[Record]) -> Session:
    """Returns the means over held-out domains and seeds; with failed models those over the others, marked as failed."""
    first = records[0]
    about = {"method": first.method, "trial": first.trial, "selection": plan.rules[0]}
    values = [_scalars(plan, record) for record in records if record.status == "ok"]
    tags = dict.fromkeys(tag for of_model in values for tag in of_model)
    found = {tag: [of_model[tag] for of_model in values if tag in of_model] for tag in tags}
    means = {tag: math.fsum(of_tag) / len(of_tag) for tag, of_tag in found.items()}
    row = f"{printable(first.method)}/trial{first.trial}"
    failed = len(values) < len(records)
    return Session(row, _plain(about | first.hparams), 0, means | {"test/models": float(len(values))}, failed)


def _scalars(plan: Plan, record: Record) -> dict[str, float]:
    """Returns {tag: value} of the weights that the recipe's rule picked.

    These are the metrics on the test images, the value by which they were picked, and what else was picked: their step,
    and what a solver or the end of a training varied, which differs between seeds. Undefined ones are left out.
    """
    pick = record.selected.get(plan.rules[0])
    if pick is None:
        return {}
    test = {f"test/{name}": getattr(pick.metrics["test"], name) for name in TEST}
    picked = {plan.recipe.protocol.metric: pick.value, "step": pick.step, **pick.hparams}
    found = test | {f"selection/{name}": value for name, value in picked.items()}
    return {tag: value for tag, value in found.items() if value is not None}


def _plain(hparams: dict[str, Any]) -> dict[str, bool | float | str]:
    """Returns values that the table can show: lists as JSON, texts without control characters; None has no cell."""
    found = dict[str, bool | float | str]()
    for name, value in hparams.items():
        if isinstance(value, bool | int | float):
            found[name] = value
        elif value is not None:
            found[name] = printable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    return found
