"""The model to ship: the method that selection liked best, trained on all images, with what selection settled on.

Nothing is chosen in this fit, and no image is left that could: the method, its hyper-parameters, the step and whatever
else validation picked come from the runs behind the estimate. The schedule is that of the planned steps, all of which
are taken, also where an earlier one is kept.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from xdm_ft.averaging import Interval
from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER
from xdm_ft.evaluation.trials import picked_trials, selection_value
from xdm_ft.experiment.engines import Model, Request, starting_weights
from xdm_ft.experiment.heartbeat import wait_for_everyone
from xdm_ft.experiment.plan import Plan, PlannedModel, drawn_value, hparams, searched
from xdm_ft.experiment.prepared import Prepared
from xdm_ft.experiment.records import Work, restarted
from xdm_ft.experiment.run_directory import RunDirectory, identity
from xdm_ft.protocol.derived_splits import all_domains
from xdm_ft.recipe.blocks import MethodItem, drawn_item, drawn_training
from xdm_ft.recipe.read import Recipe
from xdm_ft.recipe.search import Value
from xdm_ft.tensors import Criteria
from xdm_ft.training import Job, Selected
from xdm_ft.training.interpolation import interpolate
from xdm_ft.training.selection import FINAL_FIT

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger("xdm_ft")
Record = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Fit:
    """What is settled before the fit begins."""

    model: PlannedModel
    step: int  # whose weights are kept; of a solver, the candidate's place on its path
    averaged_from: int | None  # the first step of averaged weights, `step` being the last
    alpha: float | None  # of interpolated weights
    how: str  # what was done, for people

    def job(self, work: Work) -> Job:
        job = work.job(self.model, {FINAL_FIT: {self.step: 1.0}})
        if self.averaged_from is None:
            return job
        return dataclasses.replace(job, averaging=Interval(self.averaged_from, self.step))

    def kept(self, model: Model) -> Selected:
        selected = model.trained.selected[FINAL_FIT]
        if self.alpha is None:
            return selected
        state = interpolate(starting_weights(model), selected.state, self.alpha)
        return dataclasses.replace(selected, state=state, hparams=selected.hparams | {"alpha": self.alpha})


def final_fit(
    plan: Plan, prepared: Prepared, directory: RunDirectory, accelerator: Accelerator, results: Mapping[str, Any]
) -> dict[str, Any] | None:
    """What results.json says of the model that is shipped; None where no method has an estimate."""
    protocol = plan.recipe.protocol
    values = selection_values(results, protocol.selection, protocol.metric)
    if not values:
        rule = protocol.selection
        logger.warning("final_fit: no method has a value under %s in all of its runs; nothing is fitted", rule)
        return None
    label = best(values, protocol.metric)
    (row,) = _rows(results, protocol.selection, label)
    picked = picked_trials(
        [run for run in results["runs"] if run["method"] == label], protocol.selection, protocol.metric
    )
    fit = settle(plan, picked, prepared.unreadable)
    about = _about(plan, fit, row, values)
    before = directory.final
    if before is not None and {key: before.get(key) for key in about} == about and before["status"] == "ok":
        return before
    logger.info("final_fit: %s", fit.how)
    work = Work(plan, prepared, directory, accelerator)
    job = fit.job(work)

    def keep(model: Model) -> None:
        if model.owned:
            directory.remember(FINAL_FIT, _told(work, fit, model))

    work.engines.train([Request(fit.model.item, [job], Criteria((FINAL_FIT,), protocol.metric), {job.key}, keep)])
    wait_for_everyone(accelerator)
    return about | directory.recall(FINAL_FIT)


def _told(work: Work, fit: Fit, model: Model) -> dict[str, Any]:
    """What came of it, its weights written."""
    failure = model.trained.failure
    if failure is None:
        selected = fit.kept(model)
        if all(value.isfinite().all() for value in selected.state.values()):
            weights = work.directory.save_final(selected.state, work.metadata(selected, model.trained.job))
            return {"status": "ok", **selected.hparams, "weights": weights, **restarted(model.trained)}
        failure = f"the weights are not finite after step {selected.step}"
    return {"status": "failed", "reason": failure}


def _about(plan: Plan, fit: Fit, row: Record, values: Mapping[str, float]) -> dict[str, Any]:
    model, split = fit.model, fit.model.split
    estimate = {key: row[key] for key in ("selection", "metric", "mean", "std", "stderr", "n", "protocol")}
    about = {
        "method": model.item.label,
        "chosen_by": {"selection": row["selection"], "metric": row["metric"], "values": values},
        "seed": model.seed,
        "hparams": hparams(plan.recipe, model.item, model.training),
        "domains": list(split.train_domains),
        "images": {name: len(rows) for name, rows in zip(split.train_domains, split.train, strict=True)},
        "step": fit.step,
        "estimate": estimate | {"of": plan.recipe.protocol.name},
        "how": fit.how,
    }
    found: dict[str, Any] = json.loads(json.dumps(about))  # as it is read again from results.json
    return found


def selection_values(results: Mapping[str, Any], rule: str, metric: str) -> dict[str, float]:
    """Method → the mean over held-out domains and seeds of what the rule saw of the trials that it picked.

    Of methods that have such a value in all of their runs, and an estimate. Test images have no say in it.
    """
    picked: dict[str, list[Record]] = {}
    for record in picked_trials(results["runs"], rule, metric):
        picked.setdefault(record["method"], []).append(record)
    found = {}
    for row in _rows(results, rule):
        seen = [selection_value(record, rule) for record in picked.get(row["method"], ())]
        known = [value for value in seen if value is not None]
        if known and len(known) == len(seen) and row["mean"] is not None and "reason" not in row:
            found[row["method"]] = math.fsum(known) / len(known)
    return found


def _rows(results: Mapping[str, Any], rule: str, method: str | None = None) -> list[Record]:
    rows = [row for row in results["summary"] if row["selection"] == rule]
    return rows if method is None else [row for row in rows if row["method"] == method]


def best(values: Mapping[str, float], metric: str) -> str:
    """The first of equals."""
    sign = 1 if HIGHER_IS_BETTER[metric] else -1
    return max(values, key=lambda method: sign * values[method])


def settle(plan: Plan, picked: Sequence[Record], unreadable: Iterable[int] = ()) -> Fit:
    """What the picked runs of one method (one per held-out domains and seed) settle for the fit on all images."""
    recipe, rule = plan.recipe, plan.recipe.protocol.selection
    models = {model.key: model for model in plan.models}
    planned = [models[identity(record)] for record in picked]
    selected = [record["selected"][rule] for record in picked]
    item = next(item for item in recipe.methods if item.label == planned[0].item.label)
    step, drawn = median(one["step"] for one in selected), combined(recipe, item, [run["hparams"] for run in picked])
    averaged_from = median(one["averaged_from"] for one in selected) if "averaged_from" in selected[0] else None
    alpha = median(one["alpha"] for one in selected) if "alpha" in selected[0] else None
    training = drawn_training(recipe.training, drawn)
    if not item.is_solver:  # evaluated at the steps that matter, whose weights nothing looks at; never ended early
        every = step if averaged_from is None else math.gcd(averaged_from - 1, step)
        training = training.model_copy(update={"patience": None, "evaluate_every": every})
    model = dataclasses.replace(
        planned[0],
        item=drawn_item(item, drawn),
        training=training,
        split=all_domains(plan.dataset, tuple(unreadable)),
        trial=0,
        steps=median(one.steps for one in planned),
    )
    fit = Fit(model, step, averaged_from, alpha, "")
    differs = [key for key in drawn if len({drawn_value(run["hparams"], key) for run in picked}) > 1]
    return dataclasses.replace(fit, how=_how(recipe, fit, len(picked), differs))


def combined(recipe: Recipe, item: MethodItem, hparams_of_runs: Sequence[Mapping[str, Any]]) -> dict[str, Value]:
    """Each searched key on its own: the median of the values picked where a range is searched, else the most frequent.

    A key without a value is left out: the recipe's own holds.
    """
    found = {}
    for key, distribution in searched(recipe, item):
        values = [drawn_value(values, key) for values in hparams_of_runs]
        value = median(values) if distribution.choice is None and None not in values else mode(values)
        if value is not None:
            found[key] = value
    return found


def median(values: Iterable[Any]) -> Any:
    """The lower one of two: a value that was picked."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def mode(values: Iterable[Any]) -> Any:
    """The most frequent value, the first of equals."""
    return Counter(values).most_common(1)[0][0]


def _how(recipe: Recipe, fit: Fit, runs: int, differs: Sequence[str]) -> str:
    """What was done, in one line."""
    split, item, rule = fit.model.split, fit.model.item, recipe.protocol.selection
    official = "the official split's training, validation and test parts alike"
    held_out = "the domains held out for the estimate included"
    images = sum(len(rows) for rows in split.train)
    parts = [
        f"{item.label} has the best {recipe.protocol.metric} by {rule}, the mean over its {runs} runs",
        f"trained on all {images} labelled images of {len(split.train_domains)} domains "
        f"({', '.join(split.train_domains)}), {official if recipe.protocol.name == 'official' else held_out}",
    ]
    if item.is_solver:
        parts.append(f"candidate {fit.step} of its path (from 0), the median of those picked")
    elif fit.averaged_from is not None:
        parts.append(f"weights averaged over steps {fit.averaged_from} to {fit.step}, the medians of those averaged")
    else:
        parts.append(f"weights after step {fit.step}, the median of the steps picked")
    if fit.alpha is not None:
        parts.append(f"α = {fit.alpha}, the median")
    chosen = {key for key in differs if recipe.search.distributions[key].choice is not None}
    for keys, what in (
        ([key for key in differs if key not in chosen], "the median"),
        ([key for key in differs if key in chosen], "the most frequent"),
    ):
        if keys:
            parts.append(f"{', '.join(keys)}: {what} over the trials picked")
    return "; ".join([*parts, "nothing was chosen in this fit, and no image is left to measure it on"])
