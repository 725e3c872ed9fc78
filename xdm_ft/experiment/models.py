"""Trains the planned models and turns each one into its record, with its weights, predictions and references."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xdm_ft.algorithms import Algorithm, Solver
from xdm_ft.evaluation.calibration import temperature, validation_nll
from xdm_ft.evaluation.distance import fit
from xdm_ft.evaluation.metrics import per_image, score
from xdm_ft.evaluation.predictions import HeldOutImages, Prediction, arrays_of, test_images
from xdm_ft.evaluation.records import ModelKey, Pick, Record
from xdm_ft.experiment.cluster import device_of
from xdm_ft.experiment.pieces import Group, Piece, RunContext, cost, do_pieces, pieces_of
from xdm_ft.experiment.plan import Plan, PlannedModel, drawn_value, extra_models, hparams, searched
from xdm_ft.experiment.prepare import ExternalValues, Prepared, PreparedEncoder, make_job
from xdm_ft.experiment.results import Outcome, ResultsFile, save
from xdm_ft.experiment.resume import RECORDS
from xdm_ft.experiment.summary import protocol_of
from xdm_ft.experiment.work import NOTHING, Work
from xdm_ft.features.cache import Features
from xdm_ft.images.dataset import ImageDataset
from xdm_ft.protocol.splits import LEFT_OUT, SELECTION_SPLIT, Split, mean_course, with_validation
from xdm_ft.recipe.method import MethodItem
from xdm_ft.recipe.search import at_the_edge
from xdm_ft.runtime.progress import Progress, progress
from xdm_ft.runtime.randomness import Stream, permutation
from xdm_ft.runtime.tensors import Criteria, Score
from xdm_ft.runtime.watchdog import wait_for_everyone
from xdm_ft.storage.names import (
    address_in,
    images_file,
    method_folder,
    model_folder,
    reference_beside,
    reference_file,
)
from xdm_ft.storage.run_directory import RunDirectory
from xdm_ft.storage.tensorboard import sub_run
from xdm_ft.storage.tensors import Arrays
from xdm_ft.training import Job, Predictor, Selected, Trained
from xdm_ft.training.selection import BY_DOMAIN, RuleImages, best_finish, split_of
from xdm_ft.weights.prompts import expand_templates

logger = logging.getLogger("xdm_ft")
WARNING_LENGTH = 160  # characters of a failure, at most: it may list the rows of a batch
LARGEST = 16_000_000  # bytes of a model's probabilities: thousands of heads on DomainNet would fill the disk


def left_to_train(context: RunContext, results: ResultsFile) -> tuple[list[Piece], Work]:
    """Returns the pieces of all planned models without a record, and the work on the others.

    Extra models of `cross_domain` are trained first. Raises `UserError` if a folder for the models can not be written.
    """
    plan = context.plan
    planned = {key: model for key, model in plan.by_key.items() if not model.skipped}
    wanted = planned.keys() - results.records.keys()
    if not wanted:
        return [], NOTHING
    if context.accelerator.is_main_process:
        folders = sorted({_folder_on_disk(plan, planned[key]) for key in wanted})
        folders += sorted({f"events/{sub_run(*key).rpartition('/')[0]}" for key in wanted})
        context.directory.require_writable(["state", *folders])
    # also the models that may share a chunk of heads with a wanted one
    groups = {results.chunk_group(key) for key in wanted}
    pieces = planned_pieces(context, [key for key in planned if results.chunk_group(key) in groups], wanted, results)
    done = [model for key, model in planned.items() if key not in wanted]
    return pieces, Work(len(done), sum(cost(one.item, one.training, one.split, one.steps) for one in done))


def planned_pieces(
    context: RunContext, keys: Sequence[ModelKey], wanted: Collection[ModelKey], results: ResultsFile
) -> list[Piece]:
    """Returns the pieces of the wanted models. All models in `keys` determine the chunks of heads."""
    plan, groups = context.plan, dict[tuple[str, int], list[Job]]()
    external = cross_domain_values(context, keys, results)
    for key in keys:
        job = make_job(plan, context.prepared, plan.by_key[key], external.get(key, {}))
        groups.setdefault(results.chunk_group(key), []).append(job)
    items = {group: plan.by_key[jobs[0].key].item for group, jobs in groups.items()}
    made = [Group(items[group], jobs, plan.criteria) for group, jobs in groups.items()]
    return pieces_of(made, wanted, device_of(plan.recipe.cluster, context.accelerator.device))


def _folder_on_disk(plan: Plan, model: PlannedModel) -> str:
    """Returns the folder with the model's files, or with the file that it may share with other heads."""
    return method_folder(model.item.label) if _shares_files(plan, model.item) else model.key.folder


def _shares_files(plan: Plan, item: MethodItem) -> bool:
    """Returns whether heads that train together share files: thousands of small ones are slow."""
    return plan.is_large and item.trainable is False and not item.is_solver


def keep_common_files(context: RunContext, results: ResultsFile) -> None:
    """Writes the records of skipped models, and the test images and references that several models share."""
    plan = context.plan
    if not context.accelerator.is_main_process:
        return
    skipped = [
        Record(
            model.key,
            hparams(plan.recipe, model.item, model.training),
            "skipped",
            model.skipped,
            **model.item.of_records,
        )
        for model in plan.models
        if model.skipped
    ]
    if skipped:
        results.add(save((Outcome(RECORDS, record) for record in skipped), context.directory))
    keep_test_images(plan.dataset, plan.splits, context.directory)
    keep_references(plan, context.prepared, plan.splits, context.directory)


def keep_test_images(dataset: ImageDataset, splits: Iterable[Split], directory: RunDirectory) -> None:
    """Writes the test images that predictions refer to, once for all models with the same test domains."""
    for split in splits:
        file = images_file(split.test_domains)
        if not directory.verify_or_warn(file, "it will be written again"):
            arrays = test_images(dataset, split.evaluation["test"].numpy())
            directory.write_arrays(file, arrays, {"class_names": json.dumps(dataset.class_names)})


def measure(context: RunContext, piece: Piece, trained: Trained, predictor: Predictor) -> Outcome:
    """Returns a planned model's record, with its weights and its predictions on the test images."""
    plan, planned, key = context.plan, context.plan.by_key[trained.job.key], trained.job.key
    trained = _finished(plan, planned, trained, predictor)
    record = _unmeasured(plan, planned, trained)
    if trained.failure is not None:
        short = textwrap.shorten(trained.failure, WARNING_LENGTH, placeholder=" … (the rest is in results.json)")
        logger.warning("%s: %s", key, short)
        return Outcome(RECORDS, dataclasses.replace(record, status="failed", reason=trained.failure))
    folder = model_folder(*key, piece.shared_file(key)) if _shares_files(plan, piece.item) else key.folder
    weights, predictions, picks = {}, [], {}
    by_state: dict[int, tuple[dict[str, Tensor], Pick]] = {}  # rules that picked the same weights share them
    for rule, selected in trained.selected.items():
        if id(selected.state) not in by_state:
            logits = _logits(trained.job, selected, predictor)
            broken = [name for name, values in logits.items() if not values.isfinite().all()]
            if broken:
                reason = f"the logits of {', '.join(broken)} images are not finite at step {selected.step}"
                return Outcome(RECORDS, dataclasses.replace(record, status="failed", reason=reason))
            file = address_in(folder, rule)
            is_own = selected.state is trained.selected[plan.rules[0]].state  # other rules are for comparison
            pick = _pick(plan, planned, selected, logits, file, is_own)
            measured = {"metrics": pick.to_json()["metrics"]}
            metadata = weights_metadata(plan, context.prepared, planned, rule, selected, measured, pick.temperature)
            weights[file] = selected.state, metadata
            by_state[id(selected.state)] = logits, pick
        logits, pick = by_state[id(selected.state)]
        picks[rule] = dataclasses.replace(pick, value=_value(plan, trained.job, rule, selected, logits))
        predictions.append(_prediction(plan, planned, rule, logits["test"]))
    rule = plan.rules[0]
    done = dataclasses.replace(record, selected=picks, **_of_head(trained.job, planned, picks))
    references = {}
    if rule in picks and piece.is_end_to_end:
        references = own_reference(plan, planned.split, predictor, trained.selected[rule], picks[rule].weights)
    return Outcome(RECORDS, done, weights, {folder: arrays_of(predictions)}, references)


def _logits(job: Job, selected: Selected, predictor: Predictor) -> dict[str, Tensor]:
    return {name: predictor.logits(selected.state, rows) for name, rows in job.split.evaluation.items()}


def _finished(plan: Plan, planned: PlannedModel, trained: Trained, predictor: Predictor) -> Trained:
    """Returns the model after its method's finish. Each rule selects among the finished weights as it did the step."""
    job, metric = trained.job, plan.recipe.protocol.metric
    if not getattr(planned.item.algorithm.cls, "varied_by_finish", ()) or trained.failure is not None:
        return trained  # solvers lack this attribute
    algorithm, start = job.new_method(), predictor.starting_weights()
    assert isinstance(algorithm, Algorithm)
    images = {name: _images(plan, name, rows) for name, rows in job.split.evaluation.items()}

    def measured(selected: Selected) -> dict[str, float]:
        logits = _logits(job, selected, predictor)
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
        planned.key,
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
    solver = job.new_method() if item.is_solver else None
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
    method = trained.job.new_method()
    if method.needs_text and not isinstance(method, Algorithm):
        return 0
    return sum(parameter.numel() for parameter in method.parameters() if parameter.requires_grad)


def restarted(trained: Trained) -> dict[str, Any] | None:
    """Returns the number of restarts of a training that could not be resumed, and their reasons; None without any."""
    if not trained.restarts:
        return None
    return {"times": len(trained.restarts), "reasons": list(trained.restarts)}


def _pick(
    plan: Plan, planned: PlannedModel, selected: Selected, logits: Mapping[str, Tensor], file: str, is_own: bool
) -> Pick:
    """Returns the pick without its value. `is_own`: the recipe's own rule picked these weights; they get a temperature.

    The NLL is that of logits divided by it, on its images, or else on those of a validation domain.
    """
    evaluation, labels = planned.split.evaluation, plan.annotations.labels
    metrics = {name: _score(plan, rows, logits[name]) for name, rows in evaluation.items()}
    validated = [name for name in (BY_DOMAIN, SELECTION_SPLIT["val_domain"]) if name in evaluation]
    divisor = nll = None
    if is_own and BY_DOMAIN in evaluation:
        divisor = temperature(logits[BY_DOMAIN], labels[evaluation[BY_DOMAIN]])
    if validated:
        nll = validation_nll(logits[validated[0]], labels[evaluation[validated[0]]], divisor)
    return Pick(
        selected.step, file, metrics, dict(selected.hparams), selected.curve or None,
        flags(plan, planned, selected) or None, temperature=divisor, validation_nll=nll,
    )  # fmt: skip


def _score(plan: Plan, rows: Tensor, logits: Tensor) -> Score:
    about, names = plan.annotations, (plan.dataset.class_names, plan.dataset.domain_names)
    return score(logits, about.labels[rows], about.domains[rows], *names, worst_of=about.worst_of[rows])


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
    # values in `external_values` were measured on other models, so the logits of this one can not give them
    value = job.external_values[rule].get(selected.step) if rule in job.external_values else selected.value
    if value is None:
        name = split_of(rule)
        value = _images(plan, name, job.split.evaluation[name]).value(logits[name])
    return value if math.isfinite(value) else None


def _images(plan: Plan, split: str, rows: Tensor) -> RuleImages:
    """Returns the images of a split, on which selection measures the protocol's metric."""
    metric, classes = plan.recipe.protocol.metric, len(plan.dataset.class_names)
    return RuleImages(split, rows, plan.annotations, metric, classes)


def _prediction(plan: Plan, planned: PlannedModel, rule: str, logits: Tensor) -> Prediction:
    rows = planned.split.evaluation["test"]
    values = per_image(plan.recipe.protocol.metric, logits, plan.annotations.labels[rows])
    predicted = logits.argmax(-1).numpy().astype(np.int64)
    # other rules are for comparison: their probabilities would only multiply the size of the file
    probabilities = _probabilities(logits) if rule == plan.rules[0] else None
    images = HeldOutImages.of(plan.dataset, rows.numpy())
    return Prediction(*planned.key[:3], rule, images, predicted, values, probabilities)


def _probabilities(logits: Tensor) -> np.ndarray:
    """Returns float32 [n,C], or those of the predicted classes, [n], if all would take more than `LARGEST` bytes."""
    found = logits.double().softmax(-1).float()
    kept: np.ndarray = (found if found.nbytes <= LARGEST else found.amax(-1)).numpy()
    return kept


FEW = 10  # images: the mean of fewer says much about each of them


def weights_metadata(
    plan: Plan,
    prepared: Prepared,
    planned: PlannedModel,
    rule: str,
    selected: Selected,
    measured: Mapping[str, Any],
    temperature: float | None,
) -> dict[str, str]:
    """Returns the metadata of weights. Every value is JSON; equal runs give equal texts, wherever they write.

    `rule` is the selection rule that picked the weights. `measured` is what is known of their quality. `temperature`
    divides their logits for calibrated probabilities; None: not known.
    """
    item = planned.item
    described = {
        "class_names": plan.dataset.class_names,
        "encoder": _encoder(plan, prepared.for_method(item), item, selected),
        "head": {"name": item.head.name, "settings": item.head.kwargs()},
        "few_images": _few_images(plan, planned),
        "class_means": getattr(item.algorithm.cls, "class_means", False),  # algorithms that take steps lack it
        "method": {
            "label": item.label,
            "test_domains": planned.split.test_domains,
            "train_domains": planned.split.train_domains,
            "seed": planned.key.seed,
            "trial": planned.key.trial,
            "steps": planned.steps,
            "hparams": hparams(plan.recipe, item, planned.training) | selected.hparams,
        },
        # whether the head reads L2-normalised features
        "normalize": prepared.for_method(item).encoder.normalize or item.reads_normalized,
        "preprocessing": prepared.for_method(item).encoder.preprocessing.model_dump(mode="json"),
        "prompts": _prompts(plan, planned),
        "protocol": {
            **plan.recipe.protocol.model_dump(mode="json"),
            "selected_by": rule,
            "description": protocol_of(plan, prepared, rule),
        },
        "results": measured,
        "step": selected.step,
        "temperature": temperature,
    }
    return {key: json.dumps(value, allow_nan=False) for key, value in described.items()}


def _few_images(plan: Plan, planned: PlannedModel) -> dict[str, int]:
    """Returns {class: number of training images}, where it is below `FEW`."""
    counts = plan.annotations.labels[torch.cat(planned.split.train)].bincount(minlength=len(plan.dataset.class_names))
    return {name: n for name, n in zip(plan.dataset.class_names, counts.tolist(), strict=True) if 0 < n < FEW}


def _encoder(plan: Plan, prepared: PreparedEncoder, item: MethodItem, selected: Selected) -> dict[str, Any]:
    """Describes the encoder: its block of the recipe, which builds it, and what its weights are.

    "in_this_file": "all" of its weights, a "part", whose others are those of the named encoder, or None.
    """
    recipe, is_trained = plan.recipe, any(name.startswith("encoder.") for name in selected.state)
    whole = is_trained and not item.is_cut
    return {
        "label": item.encoder_label,  # of several encoders
        "settings": item.encoder.block.model_dump(mode="json"),
        "identity": prepared.encoder.identity(),
        "width": prepared.width,
        "pretraining": prepared.encoder.pretraining,
        "trainable": item.trainable if isinstance(item.trainable, bool) else item.trainable.model_dump(mode="json"),
        "in_this_file": "all" if whole else "part" if is_trained else None,
        # of what is frozen; random weights are drawn from the seed
        "xxh3": None if whole else prepared.weights,
        "seed": None if whole else recipe.protocol.seeds[0],
        "precision": recipe.training.mixed_precision if is_trained else recipe.features.precision,
    }


def _prompts(plan: Plan, planned: PlannedModel) -> list[str] | None:
    """Returns the templates of the class embeddings that the head was computed or started from; None if it was not."""
    if not planned.item.reads_text:
        return None
    return expand_templates(planned.item.block.prompts or planned.item.encoder.kwargs()["prompts"])


ROWS_AT_ONCE = 4096
MOST_TRAINING, MOST_VALIDATION = 5000, 1000  # images whose features one more pass of a trained encoder computes


def keep_references(plan: Plan, prepared: Prepared, splits: Iterable[Split], directory: RunDirectory) -> None:
    """Writes the reference of each split under each frozen encoder whose features the run has.

    All models on these features with the same test domains share it, whatever their method and seed: it is made of the
    first seed's split. Without validation images of training domains, a part of the training images takes their place.
    """
    protocol = plan.recipe.protocol
    for label, own in prepared.encoders.items():
        for split in splits if own.features is not None else ():
            file = reference_file(split.test_domains, label)
            if own.features is not None and not directory.verify_or_warn(file, "it will be written again"):
                validated = with_validation(plan.dataset, split, protocol.val_fraction, protocol.seeds[0])
                _keep(plan, own.features, validated, file, directory)


def _keep(plan: Plan, features: Features, split: Split, file: str, directory: RunDirectory) -> None:
    training, validation = torch.cat(split.train).sort().values.numpy(), split.evaluation["train_val"].numpy()
    labels, class_names = plan.dataset.labels, plan.dataset.class_names
    with progress("training features", 2 * len(training) + len(validation), "images", directory.main) as bar:
        read = partial(_blocks, features, labels, bar)
        try:
            reference = fit(partial(read, training), partial(read, validation), len(class_names))
        except ValueError as error:
            logger.warning("%s: not written: %s with finite features", directory.path / file, error)
            return
    about = {"images": len(training), "validation_images": len(validation), "train_domains": split.train_domains}
    directory.write_arrays(file, reference.arrays(), {key: json.dumps(value) for key, value in about.items()})


def own_reference(
    plan: Plan, split: Split, predictor: Predictor, selected: Selected, weights: str
) -> dict[str, Arrays]:
    """Returns {file: arrays} of the reference of a model that has trained its encoder.

    It costs a forward pass of at most `MOST_TRAINING` training and `MOST_VALIDATION` validation images, which are drawn
    by their number alone. All processes compute the features together.
    """
    protocol, labels = plan.recipe.protocol, plan.dataset.labels
    split = with_validation(plan.dataset, split, protocol.val_fraction, protocol.seeds[0])
    parts = []
    for pool, most in ((torch.cat(split.train), MOST_TRAINING), (split.evaluation["train_val"], MOST_VALIDATION)):
        drawn = permutation(0, 0, Stream.TRAINING_FEATURES, len(pool))[:most]
        rows = pool.sort().values[drawn.sort().values]
        parts.append(_finite(predictor.features(selected.state, rows).numpy(), labels[rows.numpy()]))
    training, validation = parts
    try:
        reference = fit(lambda: [training], lambda: [validation], len(plan.dataset.class_names))
    except ValueError as error:
        logger.warning("%s: distances are not known: %s with finite features", weights, error)
        return {}
    return {reference_beside(weights): reference.arrays()}


def _blocks(
    features: Features, labels: np.ndarray, bar: Progress, rows: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the finite features of these rows, with their labels."""
    for first in range(0, len(rows), ROWS_AT_ONCE):
        some = rows[first : first + ROWS_AT_ONCE]
        z = features[torch.from_numpy(some).to(features.device)].cpu().numpy()
        yield _finite(z, labels[some])
        bar.advance(len(some))


def _finite(z: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the features [n,K] that are finite, with their labels. Training reports the others."""
    finite = np.isfinite(z).all(1)
    return z[finite], labels[finite]


MEASURED = "cross_domain"  # kind of the lines that hold the values of extra models
Measured = dict[str, dict[str, dict[int, float]]]


def cross_domain_values(
    context: RunContext, wanted: Collection[ModelKey], results: ResultsFile
) -> dict[ModelKey, ExternalValues]:
    """Trains the missing extra models. Returns `Job.external_values` of each wanted model: their mean metric.

    Returns an empty dict if the recipe selects by another rule.
    """
    extra = [model for model in context.plan.extra if any(key in wanted for key in model.serves)]
    if not extra:
        return {}
    jobs = [make_job(context.plan, context.prepared, model, {}) for model in extra]
    before = _measured_values(context)
    missing = {job.key for job in jobs if _extra_name(job) not in before}
    wait_for_everyone(context.accelerator)  # all processes must read the same lines before one of them appends
    alike: dict[tuple[tuple[str, int], tuple[str, ...]], list[tuple[PlannedModel, Job]]] = {}
    for model, job in zip(extra, jobs, strict=True):
        # the models that it serves are of one method, seed and trial, so of one group too
        group = results.chunk_group(model.serves[0])
        alike.setdefault((group, tuple(job.split.evaluation)), []).append((model, job))
    metric = context.plan.recipe.protocol.metric
    groups = [
        Group(models[0][0].item, [job for _, job in models], Criteria(parts, metric))
        for (_, parts), models in alike.items()
    ]
    pieces = pieces_of(groups, missing, device_of(context.plan.recipe.cluster, context.accelerator.device))
    if pieces:
        logger.info("%s; %d are missing", extra_models(context.plan), len(missing))
        do_pieces(context, pieces, _measure_extra, results, what="extra models")
    measured, courses = _measured_values(context), dict[ModelKey, list[Mapping[int, float]]]()
    for model, job in zip(extra, jobs, strict=True):
        for part, key in zip(LEFT_OUT, model.serves, strict=False):  # a model serves one planned model, or two
            courses.setdefault(key, []).append(measured[_extra_name(job)][part])
    return {key: {"cross_domain": mean_course(of_model)} for key, of_model in courses.items()}


def _measure_extra(context: RunContext, piece: Piece, trained: Trained, predictor: Predictor) -> Outcome:
    """Returns the line of an extra model, with its finite values of the metric: {evaluation split: {step: value}}."""
    job = trained.job
    if trained.failure is not None:
        logger.warning("%s without %s: %s", job.method, ", ".join(job.test_domains), trained.failure)
    course = {} if trained.failure else trained.course
    defined = {
        part: {step: value for step, value in course.get(part, {}).items() if math.isfinite(value)}
        for part in job.split.evaluation
    }
    return Outcome(MEASURED, {"model": _extra_name(job), "values": defined})


def _measured_values(context: RunContext) -> Measured:
    """Returns {extra model: {evaluation split: {step: metric}}}, from the lines of all processes."""
    return {
        line["model"]: {
            part: {int(step): value for step, value in course.items()} for part, course in line["values"].items()
        }
        for line in context.directory.lines(MEASURED)
    }


def _extra_name(job: Job) -> str:
    return json.dumps([*job.key, job.setup.steps])  # unlike joined names, these are distinct for distinct models
