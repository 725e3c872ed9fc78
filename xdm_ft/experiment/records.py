"""Trains the planned models and turns each one into its record."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import textwrap
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from xdm_ft.algorithms import Algorithm, Solver
from xdm_ft.evaluation.calibration import temperature, validation_nll
from xdm_ft.evaluation.metrics import per_image, score
from xdm_ft.evaluation.predictions import HeldOutImages, Prediction, arrays_of, test_images
from xdm_ft.evaluation.records import Identity, Pick, Record
from xdm_ft.experiment.cross_domain import cross_domain_values
from xdm_ft.experiment.description import weights_metadata
from xdm_ft.experiment.engines import Engines, Model, Request, cost
from xdm_ft.experiment.jobs import Known, make_job
from xdm_ft.experiment.plan import Plan, PlannedModel, drawn_value, hparams, searched
from xdm_ft.experiment.prepared import Prepared
from xdm_ft.experiment.results import Outcome, ResultsFile
from xdm_ft.experiment.resume import RECORDS
from xdm_ft.experiment.train import NOTHING, DoneModels, train
from xdm_ft.experiment.training_features import keep_references, own_reference
from xdm_ft.images.dataset import ImageDataset
from xdm_ft.protocol.splits import SELECTION_SPLIT, Split
from xdm_ft.recipe.search import at_the_edge
from xdm_ft.runtime.tensors import Score
from xdm_ft.storage.addresses import address_in, folder_among_heads, images_file, method_folder, model_folder
from xdm_ft.storage.events import sub_run
from xdm_ft.storage.run_directory import RunDirectory
from xdm_ft.training import Job, Selected, Trained
from xdm_ft.training.rule_images import BY_DOMAIN, RuleImages, rule_images
from xdm_ft.training.selection import best_finish, split_of

logger = logging.getLogger("xdm_ft")
WARNING_LENGTH = 160  # characters of a failure, at most: it may list the rows of a batch
LARGEST = 16_000_000  # bytes of a model's probabilities: thousands of heads on DomainNet would fill the disk


def train_models(engines: Engines, results: ResultsFile) -> None:
    """Trains every planned model without a record, and saves its record, weights and predictions."""
    plan, accelerator = engines.plan, engines.accelerator
    if accelerator.is_main_process:
        skipped = [
            Record(
                *model.key,
                hparams(plan.recipe, model.item, model.training),
                "skipped",
                model.skipped,
                **model.item.of_records,
            )
            for model in plan.models
            if model.skipped
        ]
        if skipped:
            results.save((Outcome(RECORDS, record) for record in skipped), engines.directory)
        keep_test_images(plan.dataset, plan.splits, engines.directory)
        keep_references(plan, engines.prepared, plan.splits, engines.directory)
    planned = {model.key: model for model in plan.models if not model.skipped}
    wanted = planned.keys() - results.records.keys()
    if not wanted:
        return
    if accelerator.is_main_process:
        folders = sorted({_folder_on_disk(engines.plan, planned[key]) for key in wanted})
        folders += sorted({f"events/{sub_run(*key).rpartition('/')[0]}" for key in wanted})
        engines.directory.require_writable(["state", *folders])
    # also the models that may share a chunk of heads with a wanted one
    groups = {results.chunk_group(key) for key in wanted}
    known = cross_domain_values(engines, {key for key in planned if results.chunk_group(key) in groups}, results)
    done = [model for key, model in planned.items() if key not in wanted]
    costs = (cost(one.item, one.training, one.split, one.steps, one.item.trainable is not False) for one in done)
    train_planned(engines, planned, known, wanted, results, DoneModels(len(done), sum(costs)))


def _folder_on_disk(plan: Plan, model: PlannedModel) -> str:
    """Returns the folder with the model's files, or with the file that it may share with other heads."""
    shares = plan.is_large and model.item.trainable is False and not model.item.is_solver
    return method_folder(model.item.label) if shares else model_folder(*model.key)


def keep_test_images(dataset: ImageDataset, splits: Iterable[Split], directory: RunDirectory) -> None:
    """Writes the test images that predictions refer to, once for all models with the same test domains."""
    for split in splits:
        file = images_file(split.test_domains)
        if not directory.is_intact(file, "it will be written again"):
            arrays = test_images(dataset, split.evaluation["test"].numpy())
            directory.write_arrays(file, arrays, {"class_names": json.dumps(dataset.class_names)})


def train_planned(
    engines: Engines,
    planned: Mapping[Identity, PlannedModel],
    known: Mapping[Identity, Known],
    wanted: Collection[Identity],
    results: ResultsFile,
    done: DoneModels = NOTHING,
) -> None:
    """Trains the wanted models and saves their records. All planned models determine the chunks of heads.

    `done` are the models of the run that need no training now: its bar counts them.
    """
    groups: dict[tuple[str, int], list[PlannedModel]] = {}
    for model in planned.values():
        groups.setdefault(results.chunk_group(model.key), []).append(model)
    requests = []
    for models in groups.values():
        if any(model.key in wanted for model in models):
            jobs = [make_job(engines.plan, engines.prepared, model, known.get(model.key, {})) for model in models]
            requests.append(Request(models[0].item, jobs, engines.plan.criteria, wanted))

    train(engines, requests, partial(_measured, planned), results, what="training", done=done)


def _measured(planned: Mapping[Identity, PlannedModel], engines: Engines, model: Model) -> Outcome:
    return measure(engines.plan, engines.prepared, planned[model.trained.job.key], model)


def measure(plan: Plan, prepared: Prepared, planned: PlannedModel, model: Model) -> Outcome:
    """Returns a model's record, with its weights and its predictions on the test images."""
    trained, job = _finished(plan, planned, model), model.trained.job
    record = _unmeasured(plan, planned, trained)
    if trained.failure is not None:
        held_out = ", ".join(job.test_domains)
        short = textwrap.shorten(trained.failure, WARNING_LENGTH, placeholder=" … (the rest is in results.json)")
        logger.warning("%s, %s held out, seed %d: %s", job.method, held_out, job.seed, short)
        return Outcome(RECORDS, dataclasses.replace(record, status="failed", reason=trained.failure))
    folder = model_folder(*planned.key) if model.shared is None else folder_among_heads(model.shared, *planned.key)
    weights, predictions, picks = {}, [], {}
    found: dict[int, tuple[dict[str, Tensor], Pick]] = {}  # rules that picked the same weights share them
    for rule, selected in trained.selected.items():
        if id(selected.state) not in found:
            logits = {name: model.logits(selected, rows).cpu() for name, rows in job.split.evaluation.items()}
            broken = [name for name, values in logits.items() if not values.isfinite().all()]
            if broken:
                reason = f"the logits of {', '.join(broken)} images are not finite at step {selected.step}"
                return Outcome(RECORDS, dataclasses.replace(record, status="failed", reason=reason))
            file = address_in(folder, rule)
            pick = _pick(plan, planned, selected, logits, file)
            if selected.state is trained.selected[plan.rules[0]].state:  # other rules are for comparison
                pick = dataclasses.replace(pick, temperature=_temperature(plan, planned, logits))
            pick = dataclasses.replace(pick, validation_nll=_validation_nll(plan, planned, logits, pick.temperature))
            measured = {"metrics": pick.to_json()["metrics"]}
            metadata = weights_metadata(plan, prepared, planned, rule, selected, measured, pick.temperature)
            weights[file] = selected.state, metadata
            found[id(selected.state)] = logits, pick
        logits, pick = found[id(selected.state)]
        picks[rule] = dataclasses.replace(pick, value=_value(plan, job, rule, selected, logits))
        predictions.append(_prediction(plan, planned, rule, logits["test"]))
    rule = plan.rules[0]
    done = dataclasses.replace(record, selected=picks, **_of_head(job, planned, picks))
    references = {}
    if rule in picks:
        references = own_reference(plan, job.split, model, trained.selected[rule], picks[rule].weights)
    return Outcome(RECORDS, done, weights, {folder: arrays_of(predictions)}, references)


def _finished(plan: Plan, planned: PlannedModel, model: Model) -> Trained:
    """Returns the model after its method's finish. Each rule selects among the finished weights as it did the step."""
    trained, job = model.trained, model.trained.job
    if not getattr(planned.item.algorithm.cls, "varied_by_finish", ()) or trained.failure is not None:
        return trained  # solvers lack this attribute
    algorithm = job.make(job.setup)
    assert isinstance(algorithm, Algorithm)
    start, metric = model.starting_weights(), plan.recipe.protocol.metric
    images = {name: _images(plan, name, rows) for name, rows in job.split.evaluation.items()}

    def measured(selected: Selected) -> dict[str, float]:
        logits = {name: model.logits(selected, rows).cpu() for name, rows in job.split.evaluation.items()}
        return {
            name: images[name].value(values) if values.isfinite().all() else math.nan for name, values in logits.items()
        }

    picked = {}
    for rule, selected in trained.selected.items():
        best = best_finish(selected, algorithm.finish(start, selected.state), rule, plan.criteria, measured)
        if best is not None:
            picked[rule] = best
        elif rule == plan.rules[0]:
            varied = " and ".join(algorithm.varied_by_finish.values())
            reason = f"{metric} on the images of {rule} is undefined for every {varied}"
            return dataclasses.replace(trained, selected={}, failure=reason)
    return dataclasses.replace(trained, selected=picked)


def _unmeasured(plan: Plan, planned: PlannedModel, trained: Trained) -> Record:
    """Returns the record without selected weights."""
    taken = planned.steps if trained.stopped_at is None else trained.stopped_at
    return Record(
        *planned.key,
        hparams=hparams(plan.recipe, planned.item, planned.training),
        status="ok",
        mixed_steps=trained.mixed_steps,
        gradient_evaluations=planned.item.gradient_evaluations(taken, len(trained.job.split.train)),
        stopped_at=trained.stopped_at,
        train_seconds=round(trained.seconds, 3),
        trained_parameters=_trained_parameters(trained),
        peak_memory=trained.peak_memory,
        restarted=restarted(trained),
        **planned.item.of_records,
    )


def _of_head(job: Job, planned: PlannedModel, picks: Mapping[str, Pick]) -> dict[str, Any]:
    """Returns what the record says of the head: what it was picked from, and what it holds of the training images."""
    item, images = planned.item, sum(map(len, planned.split.train))
    solver = job.make(job.setup) if item.is_solver else None
    if isinstance(solver, Solver):
        tuned = solver.candidates
    else:
        tuned = max((len(pick.curve) for pick in picks.values() if pick.curve), default=1)
    holds = {"training_features": images} if item.head.cls.training_features else {}
    return ({"tuned_settings": tuned} if tuned > 1 else {}) | holds


def _trained_parameters(trained: Trained) -> int:
    """Returns the number of values that training changes: none of a head that the text encoder gives."""
    if trained.parameters is not None:
        return trained.parameters
    method = trained.job.make(trained.job.setup)
    if method.needs_text and not isinstance(method, Algorithm):
        return 0
    return sum(parameter.numel() for parameter in method.parameters() if parameter.requires_grad)


def restarted(trained: Trained) -> dict[str, Any] | None:
    """Returns the number of restarts of a training that could not be resumed, and their reasons; None without any."""
    if not trained.restarts:
        return None
    return {"times": len(trained.restarts), "reasons": list(trained.restarts)}


def _pick(plan: Plan, planned: PlannedModel, selected: Selected, logits: Mapping[str, Tensor], file: str) -> Pick:
    metrics = {name: _score(plan, rows, logits[name]) for name, rows in planned.split.evaluation.items()}
    doubts = flags(plan, planned, selected)
    return Pick(selected.step, file, metrics, dict(selected.hparams), selected.curve or None, doubts or None)


def _score(plan: Plan, rows: Tensor, logits: Tensor) -> Score:
    about, names = plan.annotations, (plan.dataset.class_names, plan.dataset.domain_names)
    return score(logits, about.labels[rows], about.domains[rows], *names, worst_of=about.worst_of[rows])


def _temperature(plan: Plan, planned: PlannedModel, logits: Mapping[str, Tensor]) -> float | None:
    """Returns the temperature on the validation images of the training domains; None without such images."""
    rows = planned.split.evaluation.get(BY_DOMAIN)
    return None if rows is None else temperature(logits[BY_DOMAIN], plan.annotations.labels[rows])


def _validation_nll(
    plan: Plan, planned: PlannedModel, logits: Mapping[str, Tensor], temperature: float | None
) -> float | None:
    """Returns the NLL of logits divided by the temperature, on its images, or else on those of a validation domain.

    None without such images.
    """
    name = next((name for name in (BY_DOMAIN, SELECTION_SPLIT["val_domain"]) if name in planned.split.evaluation), None)
    if name is None:
        return None
    return validation_nll(logits[name], plan.annotations.labels[planned.split.evaluation[name]], temperature)


def flags(plan: Plan, planned: PlannedModel, selected: Selected) -> list[str]:
    """Returns the reasons to doubt a pick: a better one may lie beyond the last step or beyond a searched range."""
    found = []
    if not planned.item.is_solver and planned.item.averaging is None and selected.step == planned.steps:
        found.append("last step picked")
    values = hparams(plan.recipe, planned.item, planned.training)
    item = next(item for item in plan.recipe.methods if item.label == planned.item.label)
    for key, _ in searched(plan.recipe, item):
        if at_the_edge(plan.recipe.search_of(item), key, drawn_value(values, key)):
            found.append(f"{key} at the edge of its range")
    return found


def _value(plan: Plan, job: Job, rule: str, selected: Selected, logits: Mapping[str, Tensor]) -> float | None:
    """Returns the selection value of a pick. Averaged weights have none yet: it is computed here from their logits."""
    # values in `known` were measured on other models, so the logits of this one can not give them
    value = job.known[rule].get(selected.step) if rule in job.known else selected.value
    if value is None:
        name = split_of(rule)
        value = _images(plan, name, job.split.evaluation[name]).value(logits[name])
    return value if math.isfinite(value) else None


def _images(plan: Plan, split: str, rows: Tensor) -> RuleImages:
    """Returns the images of a split, on which selection measures the protocol's metric."""
    metric, classes = plan.recipe.protocol.metric, len(plan.dataset.class_names)
    return rule_images(split, rows, plan.annotations, metric, classes)


def _prediction(plan: Plan, planned: PlannedModel, rule: str, logits: Tensor) -> Prediction:
    rows = planned.split.evaluation["test"]
    values = per_image(plan.recipe.protocol.metric, logits, plan.annotations.labels[rows])
    predicted = logits.argmax(-1).numpy().astype(np.int64)
    # other rules are for comparison: their probabilities would only multiply the size of the file
    probabilities = _probabilities(logits) if rule == plan.rules[0] else None
    method, test_domains, seed, _ = planned.key
    images = HeldOutImages.of(plan.dataset, rows.numpy())
    return Prediction(method, test_domains, seed, rule, images, predicted, values, probabilities)


def _probabilities(logits: Tensor) -> np.ndarray:
    """Returns float32 [n,C], or those of the predicted classes, [n], if all would take more than `LARGEST` bytes."""
    found = logits.double().softmax(-1).float()
    kept: np.ndarray = (found if found.nbytes <= LARGEST else found.amax(-1)).numpy()
    return kept
