"""The model to ship: the best method trained on all domains, to the step that selection settled on."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from xdm_ft.data.loading.derived_splits import all_domains
from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER
from xdm_ft.evaluation.trials import selection_value
from xdm_ft.experiment.engines import Model, Request
from xdm_ft.experiment.heartbeat import wait_for_everyone
from xdm_ft.experiment.material import Material
from xdm_ft.experiment.plan import Plan, hparams
from xdm_ft.experiment.run_directory import RunDirectory
from xdm_ft.experiment.work import Work, restarted
from xdm_ft.training.selection import evaluation_steps

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger("xdm_ft")
RULE = "final_fit"
Results = Mapping[str, Any]


def final_fit(
    plan: Plan, material: Material, directory: RunDirectory, accelerator: Accelerator, results: Results
) -> dict[str, Any] | None:
    """What results.json says of the model that is shipped; None where no method has an estimate.

    It trains on the training parts of all domains; their validation parts check it (`metrics`), which is no estimate:
    that is the one of leaving domains out, under `estimate`.
    """
    recipe = plan.recipe
    best = best_method(results["summary"], recipe.protocol.selection)
    if best is None:
        logger.warning("final_fit: no method has an estimate under %s; nothing is fitted", recipe.protocol.selection)
        return None
    rule, label = recipe.protocol.selection, best["method"]
    trial = best_trial([run for run in results["runs"] if run["method"] == label], rule, recipe.protocol.metric)
    records = [run for run in results["runs"] if run["method"] == label and run["trial"] == trial]
    planned = [model for model in plan.models if model.item.label == label and model.trial == trial]
    item, steps = planned[0].item, median(model.steps for model in planned)
    step = median(run["selected"][rule]["step"] for run in records if rule in run["selected"])
    if not item.is_solver:
        step = min(evaluation_steps(steps, recipe.training.evaluate_every), key=lambda known: abs(known - step))
    estimate = {key: best[key] for key in ("selection", "metric", "mean", "std", "stderr", "n", "protocol")}
    split = all_domains(plan.dataset, recipe.protocol, planned[0].seed, material.unreadable)
    about = {
        "method": label,
        "seed": planned[0].seed,
        "trial": trial,
        "hparams": hparams(recipe, item, planned[0].training),
        "domains": list(split.train_domains),
        "step": step,
        "estimate": estimate,
    }
    before = directory.final
    if before is not None and {key: before.get(key) for key in about} == about and before["status"] == "ok":
        return before
    logger.info("final_fit: %s on all %d domains, to step %d", label, len(split.train_domains), step)
    work = Work(plan, material, directory, accelerator)
    training = planned[0].training.model_copy(update={"patience": None})  # its step is known
    model = dataclasses.replace(planned[0], split=split, steps=steps, training=training)
    job = work.job(model, {RULE: {step: 1.0}})

    def keep(model: Model) -> None:
        trained = work.interpolated(model)
        if trained.failure is not None:
            told: dict[str, Any] = {"status": "failed", "reason": trained.failure}
        else:
            selected = trained.selected[RULE]
            logits = {name: model.logits(selected, rows).cpu() for name, rows in split.evaluation.items()}
            weights = directory.save_final(selected.state, work.metadata(selected, job)) if model.owned else ""
            own = {**selected.hparams, "weights": weights, "metrics": work.metrics(split, logits)}
            told = {"status": "ok", **own, **restarted(trained)}
        if model.owned:
            directory.remember(RULE, told)

    work.engines.train([Request(item, [job], (RULE,), {job.key}, keep)])
    wait_for_everyone(accelerator)
    return about | directory.recall(RULE)


def best_method(summary: Sequence[Mapping[str, Any]], rule: str) -> Mapping[str, Any] | None:
    """The row of the best mean under the rule, the first of equals; of methods all of whose models were trained."""
    rows = [row for row in summary if row["selection"] == rule and row["mean"] is not None and "reason" not in row]
    if not rows:
        return None
    sign = 1 if HIGHER_IS_BETTER[rows[0]["metric"]] else -1
    return max(rows, key=lambda row: sign * row["mean"])


def best_trial(records: Sequence[Mapping[str, Any]], rule: str, metric: str) -> int:
    """The draw of hyper-parameters that selection liked best, on the mean over held-out domains and seeds.

    One that failed for fewer of them goes before. Some record has a value.
    """
    values: dict[int, list[float]] = {}
    for record in records:
        if (value := selection_value(record, rule, metric)) is not None:
            values.setdefault(record["trial"], []).append(value)
    sign = 1 if HIGHER_IS_BETTER[metric] else -1
    return max(values, key=lambda trial: (len(values[trial]), sign * float(np.mean(values[trial]))))


def median(steps: Iterable[int]) -> int:
    """The lower one of two: a step that was picked."""
    ordered = sorted(steps)
    return int(ordered[(len(ordered) - 1) // 2])
