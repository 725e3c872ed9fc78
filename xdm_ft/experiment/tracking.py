"""Learning curves and hyper-parameters in TensorBoard, and other experiment trackers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from xdm_ft.evaluation.records import Record
from xdm_ft.experiment.plan import Plan
from xdm_ft.experiment.results import Results
from xdm_ft.experiment.resume import label_of
from xdm_ft.recipe.settings import Recipe
from xdm_ft.report.finished import ORACLE
from xdm_ft.runtime.errors import UserError, printable
from xdm_ft.runtime.progress import pulse
from xdm_ft.storage.names import file_name
from xdm_ft.storage.run_directory import RunDirectory
from xdm_ft.storage.tensorboard import Session, read_scalars, sub_run, trial_sub_run
from xdm_ft.training import Job
from xdm_ft.training.selection import FINAL_FIT

if TYPE_CHECKING:
    from accelerate import Accelerator


Scalars = Mapping[str, float]


def write_curves(
    plan: Plan, chunk: Sequence[Job], step: int, evaluated: Sequence[tuple[Job, Scalars]], directory: RunDirectory
) -> None:
    """Writes what was measured after `step` steps, as `train_chunk` records it. `chunk`: all that train together.

    In a large run the heads of a chunk with the same test domains share a sub-run. All of them train in one process, so
    each sub-run has one writer at a time. Models that train end to end, and those of the final fit, have their own.
    """
    found = [(job, _by_tag(values, plan.rules[0])) for job, values in evaluated]
    final_fit = FINAL_FIT in chunk[0].external_values  # few models, which are the result of the run
    if not plan.is_large or plan.recipe.trains_encoders or final_fit:
        for job, values in found:
            directory.write_scalars(sub_run(*job.key), step, values)
        return
    first = {job.test_domains: job for job in reversed(chunk)}
    together: dict[tuple[str, ...], list[Scalars]] = {}
    for job, values in found:
        together.setdefault(job.test_domains, []).append(values)
    for test_domains, of_heads in together.items():
        directory.write_scalars(sub_run(*first[test_domains].key, heads=True), step, _summary(of_heads))


def _by_tag(values: Scalars, own_rule: str) -> dict[str, float]:
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


def _summary(of_heads: Sequence[Scalars]) -> dict[str, float]:
    """Returns the mean of every tag over the heads that have it, its range, and the number of heads."""
    found = {"train/heads": float(len(of_heads))}
    for tag in dict.fromkeys(tag for values in of_heads for tag in values):
        values = [values[tag] for values in of_heads if tag in values]
        found[tag] = math.fsum(values) / len(values)
        found |= {f"lowest/{tag}": min(values), f"highest/{tag}": max(values)}
    return found


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
    for name_of_run, scalars in read_scalars(found.path / "events").items():
        heads = dict(scalars.get("train/heads", ()))
        for tag, points in scalars.items():
            if name_of_run.count("/") == 2 and tag.startswith(("train/", "val/", "oracle/")) and tag != "train/heads":
                name = f"{name_of_run.rpartition('/')[0]}/{tag}"
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
