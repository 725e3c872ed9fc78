"""Trains the planned models and turns each one into its record, with its weights, predictions and references."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping
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
from xdm_ft.experiment.pieces import Engines, Model, Request, cost
from xdm_ft.experiment.plan import Plan, PlannedModel, drawn_value, extra_models, hparams, searched
from xdm_ft.experiment.prepare import ExternalValues, Prepared, PreparedEncoder, make_job
from xdm_ft.experiment.results import Outcome, ResultsFile
from xdm_ft.experiment.resume import RECORDS
from xdm_ft.experiment.summary import protocol_of
from xdm_ft.experiment.train import NOTHING, DoneModels, train
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
    folder_among_heads,
    images_file,
    method_folder,
    model_folder,
    reference_beside,
    reference_file,
)
from xdm_ft.storage.run_directory import RunDirectory
from xdm_ft.storage.tensorboard import sub_run
from xdm_ft.storage.tensors import Arrays
from xdm_ft.training import Job, Selected, Trained
from xdm_ft.training.selection import BY_DOMAIN, RuleImages, best_finish, rule_images, split_of
from xdm_ft.weights.prompts import expand_templates

logger = logging.getLogger("xdm_ft")
WARNING_LENGTH = 160  # characters of a failure, at most: it may list the rows of a batch
LARGEST = 16_000_000  # bytes of a model's probabilities: thousands of heads on DomainNet would fill the disk


def train_models(engines: Engines, results: ResultsFile) -> None:
    """Trains every planned model without a record, and saves its record, weights and predictions."""
    plan, accelerator = engines.plan, engines.accelerator
    if accelerator.is_main_process:
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
    external = cross_domain_values(engines, {key for key in planned if results.chunk_group(key) in groups}, results)
    done = [model for key, model in planned.items() if key not in wanted]
    costs = (cost(one.item, one.training, one.split, one.steps, one.item.trainable is not False) for one in done)
    train_planned(engines, planned, external, wanted, results, DoneModels(len(done), sum(costs)))


def _folder_on_disk(plan: Plan, model: PlannedModel) -> str:
    """Returns the folder with the model's files, or with the file that it may share with other heads."""
    shares = plan.is_large and model.item.trainable is False and not model.item.is_solver
    return method_folder(model.item.label) if shares else model_folder(*model.key)


def keep_test_images(dataset: ImageDataset, splits: Iterable[Split], directory: RunDirectory) -> None:
    """Writes the test images that predictions refer to, once for all models with the same test domains."""
    for split in splits:
        file = images_file(split.test_domains)
        if not directory.verify_or_warn(file, "it will be written again"):
            arrays = test_images(dataset, split.evaluation["test"].numpy())
            directory.write_arrays(file, arrays, {"class_names": json.dumps(dataset.class_names)})


def train_planned(
    engines: Engines,
    planned: Mapping[ModelKey, PlannedModel],
    external: Mapping[ModelKey, ExternalValues],
    wanted: Collection[ModelKey],
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
            jobs = [make_job(engines.plan, engines.prepared, model, external.get(model.key, {})) for model in models]
            requests.append(Request(models[0].item, jobs, engines.plan.criteria, wanted))

    train(engines, requests, partial(_measured, planned), results, what="training", done=done)


def _measured(planned: Mapping[ModelKey, PlannedModel], engines: Engines, model: Model) -> Outcome:
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
    # values in `external_values` were measured on other models, so the logits of this one can not give them
    value = job.external_values[rule].get(selected.step) if rule in job.external_values else selected.value
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
        "encoder": _encoder(plan, prepared.of(item), item, selected),
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
        "normalize": prepared.of(item).encoder.normalize or item.reads_normalized,
        "preprocessing": prepared.of(item).encoder.preprocessing.model_dump(mode="json"),
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


def own_reference(plan: Plan, split: Split, model: Model, selected: Selected, weights: str) -> dict[str, Arrays]:
    """Returns {file: arrays} of the reference of a model that has trained its encoder; {} if it is frozen.

    It costs a forward pass of at most `MOST_TRAINING` training and `MOST_VALIDATION` validation images, which are drawn
    by their number alone. All processes compute the features together.
    """
    if model.features is None:
        return {}
    protocol, labels = plan.recipe.protocol, plan.dataset.labels
    split = with_validation(plan.dataset, split, protocol.val_fraction, protocol.seeds[0])
    parts = []
    for pool, most in ((torch.cat(split.train), MOST_TRAINING), (split.evaluation["train_val"], MOST_VALIDATION)):
        drawn = permutation(0, 0, Stream.TRAINING_FEATURES, len(pool))[:most]
        rows = pool.sort().values[drawn.sort().values]
        parts.append(_finite(model.features(selected, rows).numpy(), labels[rows.numpy()]))
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
    engines: Engines, wanted: Collection[ModelKey], results: ResultsFile
) -> dict[ModelKey, ExternalValues]:
    """Trains the missing extra models. Returns `Job.external_values` of each wanted model: their mean metric.

    Returns an empty dict if the recipe selects by another rule.
    """
    extra = [model for model in engines.plan.extra if any(key in wanted for key in model.serves)]
    if not extra:
        return {}
    jobs = [make_job(engines.plan, engines.prepared, model, {}) for model in extra]
    before = _measured_values(engines)
    missing = {job.key for job in jobs if _extra_name(job) not in before}
    wait_for_everyone(engines.accelerator)  # all processes must read the same lines before one of them appends
    alike: dict[tuple[tuple[str, int], tuple[str, ...]], list[tuple[PlannedModel, Job]]] = {}
    for model, job in zip(extra, jobs, strict=True):
        # the models that it serves are of one method, seed and trial, so of one group too
        group = results.chunk_group(model.serves[0])
        alike.setdefault((group, tuple(job.split.evaluation)), []).append((model, job))
    metric = engines.plan.recipe.protocol.metric
    requests = [
        Request(models[0][0].item, [job for _, job in models], Criteria(parts, metric), missing)
        for (_, parts), models in alike.items()
        if any(job.key in missing for _, job in models)
    ]
    if requests:
        logger.info("%s; %d are missing", extra_models(engines.plan), len(missing))
        train(engines, requests, _measure_extra, results, what="extra models")
    measured, courses = _measured_values(engines), dict[ModelKey, list[Mapping[int, float]]]()
    for model, job in zip(extra, jobs, strict=True):
        for part, key in zip(LEFT_OUT, model.serves, strict=False):  # a model serves one planned model, or two
            courses.setdefault(key, []).append(measured[_extra_name(job)][part])
    return {key: {"cross_domain": mean_course(of_model)} for key, of_model in courses.items()}


def _measure_extra(engines: Engines, model: Model) -> Outcome:
    """Returns the line of an extra model, with its finite values of the metric: {evaluation split: {step: value}}."""
    trained, job = model.trained, model.trained.job
    if trained.failure is not None:
        logger.warning("%s without %s: %s", job.method, ", ".join(job.test_domains), trained.failure)
    course = {} if trained.failure else trained.course
    defined = {
        part: {step: value for step, value in course.get(part, {}).items() if math.isfinite(value)}
        for part in job.split.evaluation
    }
    return Outcome(MEASURED, {"model": _extra_name(job), "values": defined})


def _measured_values(engines: Engines) -> Measured:
    """Returns {extra model: {evaluation split: {step: metric}}}, from the lines of all processes."""
    return {
        line["model"]: {
            part: {int(step): value for step, value in course.items()} for part, course in line["values"].items()
        }
        for line in engines.directory.lines(MEASURED)
    }


def _extra_name(job: Job) -> str:
    return json.dumps([*job.key, job.setup.steps])  # unlike joined names, these are distinct for distinct models
