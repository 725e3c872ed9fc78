"""Learning curves and hyper-parameters in TensorBoard, and other experiment trackers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from xdm_ft.core import ORACLE
from xdm_ft.experiment.plan import Plan
from xdm_ft.recipe.settings import Recipe
from xdm_ft.results.model import Record
from xdm_ft.results.run import Run
from xdm_ft.runtime.errors import UserError, printable
from xdm_ft.runtime.progress import pulse
from xdm_ft.storage.names import file_name
from xdm_ft.storage.run_directory import RunDirectory
from xdm_ft.storage.tensorboard import Session, read_scalars, sub_run
from xdm_ft.training import Job
from xdm_ft.training.selection import FINAL_FIT

if TYPE_CHECKING:
    from accelerate import Accelerator


_Scalars = Mapping[str, float]
NOT_ACCEPTED = re.compile(r"[^A-Za-z0-9_./ :-]")  # characters of a name that some tracker refuses
TEST = ("accuracy", "balanced_accuracy", "macro_f1", "auroc", "worst_domain_accuracy", "nll", "ece")


def write_curves(
    plan: Plan, chunk: Sequence[Job], step: int, evaluated: Sequence[tuple[Job, _Scalars]], directory: RunDirectory
) -> None:
    """Writes what was measured after `step` steps, as `train_chunk` records it. `chunk`: all that train together.

    In a large run the heads of a chunk with the same test domains share a sub-run. All of them train in one process, so
    each sub-run has one writer at a time. Models that train end to end, and those of the final fit, have their own.
    """
    curves = list[tuple[Job, dict[str, float]]]()
    for job, values in evaluated:
        shown = {n: value for n, value in values.items() if math.isfinite(value) and not n.startswith(f"{FINAL_FIT}/")}
        curves.append((job, {_tag(name, plan.rules[0]): value for name, value in shown.items()}))
    final_fit = FINAL_FIT in chunk[0].external_values  # few models, which are the result of the run
    if not plan.is_large or plan.recipe.trains_encoders or final_fit:
        for job, values in curves:
            directory.write_scalars(sub_run(*job.key), step, values)
        return
    # reversed, as the last of equal keys stays: a sub-run is named by its first head
    first = {job.test_domains: job for job in reversed(chunk)}
    together: dict[tuple[str, ...], list[_Scalars]] = {}
    for job, values in curves:
        together.setdefault(job.test_domains, []).append(values)
    for test_domains, of_heads in together.items():
        # of every tag the mean over the heads that have it, and its range
        summary, by_tag = {"train/heads": float(len(of_heads))}, dict[str, list[float]]()
        for tag, value in (entry for values in of_heads for entry in values.items()):
            by_tag.setdefault(tag, []).append(value)
        for tag, of_tag in by_tag.items():
            summary |= {tag: math.fsum(of_tag) / len(of_tag)}
            summary |= {f"lowest/{tag}": min(of_tag), f"highest/{tag}": max(of_tag)}
        directory.write_scalars(sub_run(*first[test_domains].key, heads=True), step, summary)


def _tag(name: str, recipe_rule: str) -> str:
    """Returns the tag of a scalar, `NAME`, or of a rule's value, `RULE/METRIC`."""
    rule, _, metric = name.rpartition("/")
    if not rule:
        return f"train/{name}"
    if rule == ORACLE:  # a curve of the held-out domain must not look like one of validation
        return f"oracle/{metric}"
    return f"val/{metric}" if rule == recipe_rule else f"val/{rule}/{metric}"


def write_sessions(plan: Plan, records: Iterable[Record], directory: RunDirectory) -> None:
    """Writes a session per model; none in a large run, whose table would have thousands of rows."""
    rule = plan.rules[0]
    for record in (record for record in records if record.status != "skipped" and not plan.is_large):
        held_out, pick = ", ".join(map(printable, record.test_domains)), record.selected.get(rule)
        facts = {"method": record.method, "held_out": held_out, "trial": record.trial, "selection": rule}
        row, step = f"{printable(record.method)}/{held_out}/trial{record.trial}", 0 if pick is None else pick.step
        session = Session(row, _plain(facts | record.hparams), step, _scalars(plan, record), record.status == "failed")
        directory.write_session(sub_run(*record.key), session)


def _scalars(plan: Plan, record: Record) -> dict[str, float]:
    """Returns {tag: value} of the weights that the recipe's rule picked.

    These are the metrics on the test images, the value by which they were picked, and what else was picked: their step,
    and what a solver or the end of a training varied, which differs between seeds. Undefined ones are left out.
    """
    pick = record.selected.get(plan.rules[0])
    if pick is None:
        return {}
    scalars = {f"test/{name}": getattr(pick.metrics["test"], name) for name in TEST}
    picked = {plan.recipe.protocol.metric: pick.value, "step": pick.step, **pick.hparams}
    scalars |= {f"selection/{name}": value for name, value in picked.items()}
    return {tag: value for tag, value in scalars.items() if value is not None}


def _plain(hparams: dict[str, Any]) -> dict[str, bool | float | str]:
    """Returns values that the table can show: lists as JSON, texts without control characters; None has no cell."""
    plain = dict[str, bool | float | str]()
    for name, value in hparams.items():
        if isinstance(value, bool | int | float):
            plain[name] = value
        elif value is not None:
            plain[name] = printable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    return plain


def installed_trackers(recipe: Recipe) -> list[str]:
    """Returns the recipe's trackers. Raises `UserError` if the library of one is not installed."""
    if not recipe.report.log_with:
        return []
    from accelerate.tracking import get_available_trackers

    available = {str(name) for name in get_available_trackers()}
    missing = [name for name in recipe.report.log_with if name not in available]
    if missing:
        problem = f"the library of {', '.join(missing)} is not installed"
        raise UserError(f"{recipe.name}: report.log_with: {problem}; install it, or leave it out")
    return list(dict.fromkeys(recipe.report.log_with))


def log_results(accelerator: Accelerator, recipe: Recipe, run: Run) -> None:
    """Logs a finished run to the trackers of the accelerator. Called by the main process, after results are written.

    Raises `UserError` if a tracker fails: the run directory is complete then.
    """
    if not accelerator.log_with:
        return
    steps = curves(run)
    last = max(steps, default=0)
    steps[last] = steps.get(last, {}) | test_values(run)
    try:
        with pulse.waiting():  # for the network
            accelerator.init_trackers(recipe.name)
            for step in sorted(steps):
                accelerator.log({NOT_ACCEPTED.sub("_", name): value for name, value in steps[step].items()}, step=step)
            for tracker in accelerator.trackers:  # not `end_training`, which would also end the group of processes
                tracker.finish()
    except Exception as error:  # each library raises errors of its own, such as for a missing login or network
        used, problem = ", ".join(recipe.report.log_with), printable(str(error) or type(error).__name__)
        remedy = "the run is complete; run the same command to log it again, or leave report.log_with out"
        raise UserError(f"{recipe.name}: report.log_with: {used}: {problem}; {remedy}") from error
    finally:
        # else `end_training`, when the run shuts down, would finish them a second time
        accelerator.trackers.clear()


def curves(run: Run) -> dict[int, dict[str, float]]:
    """Returns {step: {METHOD/HELD_OUT/TAG: mean over the models with a value there}} of the curves in `events/`."""
    points: dict[int, dict[str, list[tuple[float, float]]]] = {}  # pairs (value, number of heads)
    for name_of_run, scalars in read_scalars(run.path / "events").items():
        heads = dict(scalars.get("train/heads", ()))
        for tag, of_tag in scalars.items():
            if tag.startswith(("train/", "val/", "oracle/")) and tag != "train/heads":
                name = f"{name_of_run.rpartition('/')[0]}/{tag}"
                for step, value in of_tag:
                    points.setdefault(step, {}).setdefault(name, []).append((value, heads.get(step, 1.0)))
    return {
        step: {
            name: math.fsum(value * n for value, n in pairs) / math.fsum(n for _, n in pairs)
            for name, pairs in of_step.items()
        }
        for step, of_step in points.items()
    }


def test_values(run: Run) -> dict[str, float]:
    """Returns {name: value} of the summary under the recipe's own rule, for methods that have results."""
    values: dict[str, float | None] = {}
    for row in run.recipe_rows:
        method = file_name(row.method, safe="+ ")
        values |= {f"{method}/test/{row.metric}": row.mean, f"{method}/test/{row.metric}_stderr": row.stderr}
        for domain, of_domain in row.per_test_domain.items():
            values[f"{method}/{file_name(domain, safe=' ')}/test/{row.metric}"] = of_domain["mean"]
    return {name: value for name, value in values.items() if value is not None}
