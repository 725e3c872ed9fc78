"""Trains the planned models and turns each one into its record, with its weights, predictions and references."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import textwrap
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xdm_ft.algorithms import Algorithm, Method, Solver
from xdm_ft.core import Criteria, DomainSet, ModelKey, Score
from xdm_ft.evaluation.metrics import per_image, score, temperature, validation_nll
from xdm_ft.evaluation.neighbours import fit
from xdm_ft.evaluation.predictions import HeldOutImages, Prediction, arrays_of, test_images
from xdm_ft.experiment.pieces import Piece, RunContext, cost, do_pieces, pieces_of
from xdm_ft.experiment.plan import Plan, PlannedModel, drawn_value, extra_models, find_searched, hparams
from xdm_ft.experiment.prepare import ExternalValues, make_job
from xdm_ft.experiment.results import RECORDS, Outcome, RunResults, lines_of, protocol_of, save
from xdm_ft.experiment.resume import Values, refuse_mixed_rows
from xdm_ft.experiment.work import NOTHING, WorkDone
from xdm_ft.features.cache import Features
from xdm_ft.model_sources.prompts import expand_templates
from xdm_ft.protocol.splits import LEFT_OUT, SELECTION_SPLIT, Split, mean_course, with_validation
from xdm_ft.recipe.method import MethodItem
from xdm_ft.recipe.search import at_the_edge
from xdm_ft.results.model import Pick, Record
from xdm_ft.runtime.progress import Progress, progress
from xdm_ft.runtime.randomness import Stream, permutation
from xdm_ft.runtime.watchdog import from_main, wait_for_everyone
from xdm_ft.storage.names import (
    address_in,
    images_file,
    method_folder,
    model_folder,
    predictions_in,
    reference_beside,
    reference_file,
)
from xdm_ft.storage.run_directory import FILE_KEY
from xdm_ft.storage.tensorboard import sub_run
from xdm_ft.storage.tensors import tensors_checksum, tensors_of
from xdm_ft.training import Job, Predictor, Selected, Trained
from xdm_ft.training.selection import BY_DOMAIN, RuleImages, best_finish, split_of

logger = logging.getLogger("xdm_ft")
WARNING_LENGTH = 160  # characters of a failure, at most: it may list the rows of a batch
LARGEST = 16_000_000  # bytes of a model's probabilities: thousands of heads on DomainNet would fill the disk
FEW = 10  # images: the mean of fewer says much about each of them
ROWS_AT_ONCE = 4096
MAX_TRAINING, MAX_VALIDATION = 5000, 1000  # images whose features one more pass of a trained encoder computes
Files = dict[str, tuple[Mapping[str, Tensor], Mapping[str, str]]]  # as `Outcome.files`
SITE_METRICS = {field.name for field in dataclasses.fields(Score)} - {"accuracy", "n", "per_domain"}
MEASURED = "cross_domain"  # kind of the lines that hold the values of extra models


def left_to_train(context: RunContext, results: RunResults) -> tuple[list[Piece], WorkDone]:
    """Returns the pieces of all planned models without a record, and the work on the others.

    Extra models of `cross_domain` are trained first. Raises `UserError` if a folder for the models cannot be written.
    """
    plan = context.plan
    planned = {key: model for key, model in plan.by_key.items() if not model.skipped}
    wanted = planned.keys() - results.records.keys()
    if not wanted:
        return [], NOTHING
    refuse_mixed_rows(label for label in results.edited if any(key.method == label for key in wanted))
    if context.accelerator.is_main_process:
        # with the model's files, or with the file that it may share with other heads
        shared = {key for key in wanted if _shares_files(plan, planned[key].item)}
        folders = sorted({method_folder(key.method) if key in shared else key.folder for key in wanted})
        folders += sorted({f"events/{sub_run(*key).rpartition('/')[0]}" for key in wanted})
        context.directory.require_writable(["state", *folders])
    # also the models that may share a chunk of heads with a wanted one
    wanted_groups = {results.chunk_group(key) for key in wanted}
    keys = [key for key in planned if results.chunk_group(key) in wanted_groups]
    external, groups = cross_domain_values(context, keys, results), dict[tuple[str, int], list[Job]]()
    for key in keys:
        job = make_job(plan, context.prepared, planned[key], external.get(key, {}))
        groups.setdefault(results.chunk_group(key), []).append(job)
    pieces = list[Piece]()
    for jobs in groups.values():
        pieces += pieces_of(context, planned[jobs[0].key].item, jobs, plan.criteria, wanted)
    done = [model for key, model in planned.items() if key not in wanted]
    return pieces, WorkDone(
        len(done), sum(cost(model.item, model.training, model.split, model.steps) for model in done)
    )


def _shares_files(plan: Plan, item: MethodItem) -> bool:
    """Returns whether heads that train together share files: thousands of small ones are slow."""
    return plan.is_large and item.trainable is False and not item.is_solver


def keep_common_files(context: RunContext, results: RunResults) -> None:
    """Writes the records of skipped models, and the test images and references that several models share."""
    plan, common = context.plan, dict[DomainSet, dict[str, str]]()
    if context.accelerator.is_main_process:
        skipped = [
            Record(
                model.key,
                hparams(model.item, model.training),
                "skipped",
                model.skipped,
                fold=model.split.fold,
                **model.item.record_fields,
            )
            for model in plan.models
            if model.skipped
        ]
        if skipped:
            results.add(save((Outcome(RECORDS, record) for record in skipped), context.directory))
        for split in plan.splits:
            files = keep_test_images(context, split) | keep_references(context, split, results.known_files)
            common[split.test_domains] = files
    results.common = from_main(context.accelerator, common)


def keep_test_images(context: RunContext, split: Split) -> dict[str, str]:
    """Writes the test images that predictions refer to, and returns {file: checksum}."""
    dataset, directory, file = context.plan.dataset, context.directory, images_file(split.test_domains)
    tensors = tensors_of(test_images(dataset, split.evaluation["test"].numpy(), split.fold is not None))
    metadata = {"class_names": json.dumps(dataset.class_names)}
    files = {file: tensors_checksum(tensors, {**metadata, FILE_KEY: file})}
    if not directory.verify_or_warn(file, files, "it will be written again"):
        directory.write_tensors(file, tensors, metadata)
    return files


def measure(context: RunContext, piece: Piece, trained: Trained, predictor: Predictor) -> Outcome:
    """Returns a planned model's record, with its weights and its predictions on the test images."""
    plan, key, job = context.plan, trained.job.key, trained.job
    planned, item = plan.by_key[key], plan.by_key[key].item
    method = job.new_method()  # once: drawing its weights takes a good part of the time of a small head
    trained = _finish(plan, trained, method, predictor)
    steps = planned.steps if trained.stopped_at is None else trained.stopped_at
    record = Record(
        key,
        hparams=hparams(item, planned.training),
        status="ok",
        fold=planned.split.fold,
        mixed_steps=trained.mixed_steps,
        gradient_evaluations=item.gradient_evaluations(steps, len(planned.split.train)),
        stopped_at=trained.stopped_at,
        train_seconds=round(trained.seconds, 3),
        trained_parameters=trained_parameters(trained, method),
        peak_memory=trained.peak_memory,
        restarted=restarts(trained),
        **item.record_fields,
    )
    if trained.failure is not None:
        short = textwrap.shorten(trained.failure, WARNING_LENGTH, placeholder=" … (the rest is in results.json)")
        logger.warning("%s: %s", key, short)
        return Outcome(RECORDS, dataclasses.replace(record, status="failed", reason=trained.failure))
    folder = model_folder(*key, piece.shared_file(key)) if _shares_files(plan, item) else key.folder
    files, predictions, picks = Files(), [], dict[str, Pick]()
    by_state: dict[int, tuple[dict[str, Tensor], Pick]] = {}  # rules that picked the same weights share them
    test, recipe_rule = planned.split.evaluation["test"], plan.rules[0]
    for rule, selected in trained.selected.items():
        if id(selected.state) not in by_state:
            logits = {name: predictor.logits(selected.state, rows) for name, rows in job.split.evaluation.items()}
            broken = [name for name, values in logits.items() if not values.isfinite().all()]
            if broken:
                reason = f"the logits of {', '.join(broken)} images are not finite at step {selected.step}"
                return Outcome(RECORDS, dataclasses.replace(record, status="failed", reason=reason))
            file = address_in(folder, rule)
            # other rules are for comparison
            pick = _pick(plan, planned, selected, logits, file, selected.state is trained.selected[recipe_rule].state)
            measured = {"metrics": pick.to_json()["metrics"]}
            metadata = weights_metadata(context, planned, rule, selected, measured, pick.temperature)
            files[file] = selected.state, metadata
            by_state[id(selected.state)] = logits, pick
        logits, pick = by_state[id(selected.state)]
        # values in `external_values` were measured on other models, so the logits of this one cannot give them
        external = job.external_values.get(rule)
        value = selected.value if external is None else external.get(selected.step)
        if value is None:  # of averaged weights, which have none yet
            name = split_of(rule)
            value = _rule_images(plan, name, job.split.evaluation[name]).value(logits[name])
        # JSON has no NaN: an undefined value is null in results.json
        picks[rule] = dataclasses.replace(pick, value=value if math.isfinite(value) else None)
        probabilities = None
        if rule == recipe_rule:  # those of others would only multiply the size of the file
            softmax = logits["test"].double().softmax(-1).float()
            probabilities = (softmax if softmax.nbytes <= LARGEST else softmax.amax(-1)).numpy()
        values = _per_image(plan, planned, logits["test"])
        predicted = logits["test"].argmax(-1).numpy().astype(np.int64)
        images = HeldOutImages.of(plan.dataset, test.numpy())
        predictions.append(Prediction(*key[:3], rule, images, predicted, values, probabilities))
    tuned = max((len(pick.curve) for pick in picks.values() if pick.curve), default=1)
    tuned = max(tuned, method.candidates) if isinstance(method, Solver) else tuned
    done = dataclasses.replace(
        record,
        selected=picks,
        tuned_settings=tuned if tuned > 1 else None,
        training_features=sum(map(len, planned.split.train)) if item.head.cls.training_features else None,
    )
    files[predictions_in(folder)] = tensors_of(arrays_of(predictions)), {}
    if recipe_rule in picks and piece.is_end_to_end:
        files |= own_reference(
            plan, planned.split, predictor, trained.selected[recipe_rule], picks[recipe_rule].weights
        )
    return Outcome(RECORDS, done, files)


def _finish(plan: Plan, trained: Trained, method: Method, predictor: Predictor) -> Trained:
    """Returns the model after its method's finish. Each rule selects among the finished weights as it did the step."""
    job = trained.job
    if not isinstance(method, Algorithm) or not method.varied_by_finish or trained.failure is not None:
        return trained
    start = predictor.starting_weights()
    images = {name: _rule_images(plan, name, rows) for name, rows in job.split.evaluation.items()}

    def measured(selected: Selected) -> dict[str, float]:
        logits = {name: predictor.logits(selected.state, rows) for name, rows in job.split.evaluation.items()}
        return {name: images[name].value(z) if z.isfinite().all() else math.nan for name, z in logits.items()}

    picked = {}
    for rule, selected in trained.selected.items():
        best = best_finish(selected, method.finish(start, selected.state), rule, plan.criteria, measured)
        if best is not None:
            picked[rule] = best
        elif rule == plan.rules[0]:
            metric, varied = plan.recipe.protocol.metric, " and ".join(method.varied_by_finish.values())
            reason = f"{metric} on the images of {rule} is undefined for every {varied}"
            return dataclasses.replace(trained, selected={}, failure=reason)
    return dataclasses.replace(trained, selected=picked)


def _per_image(plan: Plan, planned: PlannedModel, logits: Tensor) -> np.ndarray | None:
    """Returns `metrics.per_image` of the test images; of a fold those of each domain, nan where it has none."""
    metric, labels, test = plan.recipe.protocol.metric, plan.annotations.labels, planned.split.evaluation["test"]
    if metric != "auroc" or planned.split.fold is None:
        return per_image(metric, logits, labels[test])
    values = np.full(len(test), np.nan)
    for rows in planned.split.sites(plan.dataset).values():
        inside = torch.isin(test, rows)
        of_site = per_image(metric, logits[inside], labels[test[inside]])
        values[inside.numpy()] = np.nan if of_site is None else of_site
    return values


def trained_parameters(trained: Trained, method: Method) -> int:
    """Returns the number of values that training changes: none of a head that the text encoder gives."""
    if trained.parameters is not None:
        return trained.parameters
    if method.needs_text and not isinstance(method, Algorithm):
        return 0
    return sum(parameter.numel() for parameter in method.parameters() if parameter.requires_grad)


def restarts(trained: Trained) -> dict[str, Any] | None:
    """Returns the number of restarts of a training that could not be resumed, and their reasons; None without any."""
    return {"times": len(trained.restarts), "reasons": list(trained.restarts)} if trained.restarts else None


def _pick(
    plan: Plan, planned: PlannedModel, selected: Selected, logits: Mapping[str, Tensor], file: str, is_own: bool
) -> Pick:
    """Returns the pick without its value. `is_own`: the recipe's own rule picked these weights; they get a temperature.

    The NLL is that of logits divided by it, on its images, or else on those of a validation domain.
    """
    evaluation, dataset, annotations = planned.split.evaluation, plan.dataset, plan.annotations
    labels, names = annotations.labels, (dataset.class_names, dataset.domain_names)
    metric, metrics = plan.recipe.protocol.metric, dict[str, Score]()
    for name, rows in evaluation.items():
        at, worst_of = annotations.domains[rows], annotations.worst_of[rows]
        by_domain = {str(metric)} - {"accuracy"}
        if name == "test" and planned.split.fold is not None:
            by_domain = SITE_METRICS
        metrics[name] = score(logits[name], labels[rows], at, *names, worst_of=worst_of, by_domain=by_domain)
    divisor = nll = None
    if is_own and BY_DOMAIN in evaluation:
        divisor = temperature(logits[BY_DOMAIN], labels[evaluation[BY_DOMAIN]])
    for name in (BY_DOMAIN, SELECTION_SPLIT["val_domain"]):
        if name in evaluation and nll is None:
            nll = validation_nll(logits[name], labels[evaluation[name]], divisor)
    reasons = flags(plan, planned, selected)
    several = len(labels[evaluation["test"]].unique()) > 1
    if several and not planned.item.is_text and len(logits["test"].argmax(1).unique()) == 1:
        reasons.append("collapsed (one class for all test images)")
    return Pick(
        selected.step, file, metrics, dict(selected.hparams), selected.curve or None,
        reasons or None, temperature=divisor, validation_nll=nll,
    )  # fmt: skip


def flags(plan: Plan, planned: PlannedModel, selected: Selected) -> list[str]:
    """Returns the reasons to doubt a pick: a better one may lie beyond the last step or beyond a searched range."""
    reasons = []
    if not planned.item.is_solver and planned.item.averaging is None and selected.step == planned.steps:
        reasons.append("last step picked")
    values, item = hparams(planned.item, planned.training), plan.item(planned.item.label)
    for key, _ in find_searched(plan.recipe, item):
        if at_the_edge(plan.recipe.search_of(item), key, drawn_value(values, key)):
            reasons.append(f"{key} at the edge of its range")
    return reasons


def _rule_images(plan: Plan, split: str, rows: Tensor) -> RuleImages:
    """Returns the images of a split, on which selection measures the protocol's metric."""
    return RuleImages(split, rows, plan.annotations, plan.recipe.protocol.metric)


def weights_metadata(
    context: RunContext,
    planned: PlannedModel,
    rule: str,
    selected: Selected,
    measured: Values,
    temperature: float | None,
) -> dict[str, str]:
    """Returns the metadata of weights. Every value is JSON; equal runs give equal texts, wherever they write.

    `rule` is the selection rule that picked the weights. `measured` is what is known of their quality. `temperature`
    divides their logits for calibrated probabilities; None: not known.
    """
    plan, recipe, item, split = context.plan, context.plan.recipe, planned.item, planned.split
    of_item = context.prepared.for_method(item)
    encoder, class_names = of_item.encoder, plan.dataset.class_names
    counts = plan.annotations.labels[torch.cat(split.train)].bincount(minlength=len(class_names)).tolist()
    trains_encoder = any(name.startswith("encoder.") for name in selected.state)
    is_full = trains_encoder and not item.is_cut
    templates = item.block.prompts or item.encoder.kwargs().get("prompts") if item.reads_text else None
    described = {
        "class_names": class_names,
        "encoder": {
            "label": item.encoder_label,  # of several encoders
            "settings": item.encoder.block.model_dump(mode="json"),  # which build it
            "identity": encoder.identity(),
            "width": encoder.width,
            "pretraining": encoder.pretraining,
            "trainable": item.trainable if isinstance(item.trainable, bool) else item.trainable.model_dump(mode="json"),
            # "part": its other weights are those of the named encoder
            "in_this_file": "all" if is_full else "part" if trains_encoder else None,
            # of what is frozen; random weights are drawn from the seed
            "xxh3": None if is_full else of_item.weights,
            "seed": None if is_full else recipe.protocol.seeds[0],
            "precision": recipe.training.mixed_precision if trains_encoder else recipe.features.precision,
        },
        "head": {"name": item.head.name, "settings": item.head.kwargs()},
        # {class: number of training images}, where it is small
        "few_images": {name: n for name, n in zip(class_names, counts, strict=True) if 0 < n < FEW},
        "class_means": getattr(item.algorithm.cls, "class_means", False),  # algorithms that take steps lack it
        "from_text": item.reads_text,
        "interpolated": bool(item.varied_by_finish),
        "method": {
            "label": item.label,
            "test_domains": split.test_domains,
            "train_domains": split.train_domains,
            "seed": planned.key.seed,
            "trial": planned.key.trial,
            "steps": planned.steps,
            "hparams": hparams(item, planned.training) | selected.hparams,
        },
        # whether the head reads L2-normalised features
        "normalize": encoder.normalize or item.reads_normalized,
        "preprocessing": encoder.preprocessing.model_dump(mode="json"),
        **({} if plan.dataset.intensity is None else {"intensity": plan.dataset.intensity.model_dump(mode="json")}),
        # templates of the class embeddings that the head was computed or started from
        "prompts": None if templates is None else expand_templates(templates),
        "protocol": {
            **recipe.protocol.model_dump(mode="json"),
            "selected_by": rule,
            "description": protocol_of(plan, context.prepared, rule),
        },
        "results": measured,
        "step": selected.step,
        "temperature": temperature,
    }
    return {key: json.dumps(value, allow_nan=False) for key, value in described.items()}


def keep_references(context: RunContext, split: Split, known: Mapping[str, str]) -> dict[str, str]:
    """Writes the reference of a split under each frozen encoder whose features the run has, unless it is as `known`.

    All models on these features with the same test domains share it, whatever their method and seed: it is made of the
    first seed's split. Without validation images of training domains, a part of the training images takes their place.
    Returns {file: checksum}.
    """
    plan, directory, labels = context.plan, context.directory, context.plan.dataset.labels
    protocol, classes = plan.recipe.protocol, len(plan.dataset.class_names)

    def blocks(features: Features, rows: np.ndarray, bar: Progress) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for first in range(0, len(rows), ROWS_AT_ONCE):
            some = rows[first : first + ROWS_AT_ONCE]
            yield _finite(features[torch.from_numpy(some).to(features.device)].cpu().numpy(), labels[some])
            bar.advance(len(some))

    frozen = {label: of.features for label, of in context.prepared.encoders.items() if of.features is not None}
    files = dict[str, str]()
    for label, features in frozen.items():
        file = reference_file(split.test_domains, label)
        if file in known and directory.verify_or_warn(file, known, "it will be written again"):
            files[file] = known[file]
            continue
        split = with_validation(plan.dataset, split, protocol.val_fraction, protocol.seeds[0])
        training, validation = torch.cat(split.train).sort().values.numpy(), split.evaluation["train_val"].numpy()
        # 2: once for the means of the classes, once for the covariance around them
        with progress("training features", 2 * len(training) + len(validation), "images", directory.main) as bar:
            read = partial(blocks, features, bar=bar)
            try:
                reference = fit(partial(read, training), partial(read, validation), classes)
            except ValueError as error:
                logger.warning("%s: not written: %s with finite features", directory.path / file, error)
                continue
        counts = {"images": len(training), "validation_images": len(validation), "train_domains": split.train_domains}
        metadata = {key: json.dumps(value) for key, value in counts.items()}
        files[file] = directory.write_arrays(file, reference.arrays(), metadata)
    return files


def own_reference(plan: Plan, split: Split, predictor: Predictor, selected: Selected, weights: str) -> Files:
    """Returns the file of the reference of a model that has trained its encoder.

    It costs a forward pass of at most `MAX_TRAINING` training and `MAX_VALIDATION` validation images, which are drawn
    by their number alone. All processes compute the features together.
    """
    protocol, labels = plan.recipe.protocol, plan.dataset.labels
    split = with_validation(plan.dataset, split, protocol.val_fraction, protocol.seeds[0])
    parts = []
    for pool, most in ((torch.cat(split.train), MAX_TRAINING), (split.evaluation["train_val"], MAX_VALIDATION)):
        drawn = permutation(0, 0, Stream.TRAINING_FEATURES, len(pool))[:most]
        rows = pool.sort().values[drawn.sort().values]
        parts.append(_finite(predictor.features(selected.state, rows).numpy(), labels[rows.numpy()]))
    training, validation = parts
    try:
        reference = fit(lambda: [training], lambda: [validation], len(plan.dataset.class_names))
    except ValueError as error:
        logger.warning("%s: distances are not known: %s with finite features", weights, error)
        return {}
    return {reference_beside(weights): (tensors_of(reference.arrays()), {})}


def _finite(z: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the features [n,K] that are finite, with their labels. Training reports the others."""
    finite = np.isfinite(z).all(1)
    return z[finite], labels[finite]


def cross_domain_values(
    context: RunContext, wanted: Collection[ModelKey], results: RunResults
) -> dict[ModelKey, ExternalValues]:
    """Trains the missing extra models. Returns `Job.external_values` of each wanted model: their mean metric.

    Returns an empty dict if the recipe selects by another rule.
    """
    plan = context.plan
    extra = [model for model in plan.extra if any(key in wanted for key in model.needed_by)]
    if not extra:
        return {}

    def read_values() -> dict[str, dict[str, dict[int, float]]]:
        """Returns {extra model: {evaluation split: {step: metric}}}, from the lines of all processes."""
        return {
            line["model"]: {
                part: {int(step): v for step, v in course.items()} for part, course in line["values"].items()
            }
            for line in lines_of(context.directory, MEASURED, plan.recipe, lambda line: json.loads(line["model"])[0])
        }

    jobs = [make_job(plan, context.prepared, model, {}) for model in extra]
    before = read_values()
    missing = {job.key for job in jobs if _extra_name(job) not in before}
    wait_for_everyone(context.accelerator)  # all processes must read the same lines before one of them appends
    alike: dict[tuple[tuple[str, int], tuple[str, ...]], list[tuple[PlannedModel, Job]]] = {}
    for model, job in zip(extra, jobs, strict=True):
        # the models that it serves are of one method, seed and trial, so of one group too
        group = results.chunk_group(model.needed_by[0])
        alike.setdefault((group, tuple(job.split.evaluation)), []).append((model, job))
    pieces = list[Piece]()
    for (_, parts), pairs in alike.items():
        item, criteria = pairs[0][0].item, Criteria(parts, plan.recipe.protocol.metric)
        pieces += pieces_of(context, item, [job for _, job in pairs], criteria, missing)
    if pieces:
        logger.info("%s; %d are missing", extra_models(plan), len(missing))
        do_pieces(context, pieces, _measure_extra, results, activity="extra models")
    measured, courses = read_values(), {key: list[Mapping[int, float]]() for model in extra for key in model.needed_by}
    for model, job in zip(extra, jobs, strict=True):
        for part, key in zip(LEFT_OUT, model.needed_by, strict=False):  # a model serves one planned model, or two
            if part in model.split.evaluation:
                courses[key].append(measured[_extra_name(job)][part])
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


def _extra_name(job: Job) -> str:
    return json.dumps([*job.key, job.setup.steps])  # unlike joined names, these are distinct for distinct models
