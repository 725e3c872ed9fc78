"""Analyses a run: loads its models and measures them (`xdm_ft.analysis`), and writes analysis.json.

Each model's entry is appended to a file of JSON lines when it is done, so that an interrupted analysis loses at most
the models that were being measured. Entries of an earlier analysis.json are kept if nothing that they depend on has
changed.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from xdm_ft.algorithms import Algorithm, Method
from xdm_ft.algorithms.xdomainmix import XDomainMix
from xdm_ft.analysis import Encoded
from xdm_ft.analysis.augmented import (
    BATCH_SIZE,
    QUANTILES,
    augment_in_encoder,
    augments,
    halves,
    mix_features,
    xdomainmix_features,
)
from xdm_ft.analysis.calibration import calibration
from xdm_ft.analysis.divergence import divergence
from xdm_ft.analysis.embedding import embedding
from xdm_ft.analysis.importance import fit_domain_head, removal_curves
from xdm_ft.analysis.invariance import Invariance, covariance_distance, risk_variance
from xdm_ft.analysis.reconstruction import COLUMNS, SIDE, Autoencoder, reconstructions, write_png
from xdm_ft.core import ModelKey
from xdm_ft.evaluation.metrics import per_image_nll
from xdm_ft.experiment.pieces import RunContext
from xdm_ft.experiment.plan import Plan, PlannedModel
from xdm_ft.experiment.prepare import Prepared, make_job
from xdm_ft.experiment.results import inputs
from xdm_ft.experiment.work import run_forked
from xdm_ft.heads import Head
from xdm_ft.heads.linear import Linear
from xdm_ft.images.loader import DTYPES, ImageRows, image_loader, iterate_batches
from xdm_ft.images.transforms import evaluation_transform
from xdm_ft.protocol.splits import with_validation
from xdm_ft.results.model import Record
from xdm_ft.results.run import Run
from xdm_ft.runtime.errors import plural
from xdm_ft.runtime.machine import own_cores
from xdm_ft.runtime.progress import Progress, progress, pulse
from xdm_ft.runtime.randomness import Stream, permutation
from xdm_ft.storage import Json, json_digest
from xdm_ft.storage.atomic import replace_file
from xdm_ft.storage.lines import Damaged
from xdm_ft.storage.names import file_name
from xdm_ft.storage.run_directory import RunDirectory
from xdm_ft.training.end_to_end.inputs import WORKERS_DIED, worker_count
from xdm_ft.training.end_to_end.model import EndToEnd
from xdm_ft.version import __version__

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger("xdm_ft")
KIND = "analysis"  # of the lines that hold entries
DIGITS = 6  # significant digits of a number: rounding errors of other machines are beyond them
MIN_IMAGES = 8  # that an embedding or a removal curve needs
ENCODER_BATCH = 32  # images that an encoder sees at once
RECONSTRUCTION = "reconstruction"  # folder in the run directory
RECONSTRUCTION_SAMPLE = 240  # training images per held-out set, on whose features the heads are fitted
Group = tuple[tuple[str, ...], int, bool]
"""Test domains, seed, and whether the encoder is frozen: models of a group are measured on the same images."""


class Limits(NamedTuple):
    """The most images of each part of a split that are measured."""

    training: int
    validation: int
    test: int
    augmented: int  # training images, half of them with original features, half with augmented ones


FROZEN = Limits(20_000, 20_000, 20_000, 2000)
TRAINED = Limits(1536, 768, 768, 1024)  # every model encodes its own images


class SampledPart(NamedTuple):
    """Images of one part of a split: `rows`, a sample of its n."""

    rows: Tensor  # int64, in the data set
    y: Tensor
    domain: Tensor  # 0…D−1 of the training domains; of test images as in the data set
    n: int


@dataclass(frozen=True)
class SplitImages:
    """The images to measure of one split."""

    training: SampledPart
    validation: SampledPart
    test: SampledPart
    train_domains: tuple[str, ...]
    own_validation: bool  # False: the validation images are training images, as the split has none of its own


def split_images(plan: Plan, model: PlannedModel, limits: Limits) -> SplitImages:
    """Returns the images to measure of a model's split, which depend on the split alone.

    Of more than the limit, a part has about as many of every domain, drawn by their number alone.
    """
    split, labels, of_row = model.split, plan.annotations.labels, plan.annotations.domains

    def sample(rows: Tensor, most: int, domain_of: Tensor | None) -> SampledPart:
        rows, n = rows.sort().values, len(rows)
        if n > most:
            domains = of_row[rows].unique()
            of_domains = [rows[of_row[rows] == domain] for domain in domains]
            per_domain = max(2, most // len(domains))
            drawn = [images[permutation(0, 0, Stream.ANALYSIS, len(images))[:per_domain]] for images in of_domains]
            rows = torch.cat(drawn).sort().values
        domain = of_row[rows]
        return SampledPart(rows, labels[rows], domain if domain_of is None else domain_of[domain], n)

    validated = with_validation(plan.dataset, split, plan.recipe.protocol.val_fraction, model.key.seed)
    return SplitImages(
        training=sample(torch.cat(split.train), limits.training, split.domain_of),
        validation=sample(validated.evaluation["train_val"], limits.validation, split.domain_of),
        test=sample(split.evaluation["test"], limits.test, None),
        train_domains=split.train_domains,
        own_validation="train_val" in split.evaluation,
    )


@dataclass(frozen=True)
class TrainedModel:
    """A model of a run, with the weights that the recipe's own rule picked."""

    record: Record
    method: Method  # on the CPU, in eval mode
    features: Callable[[Tensor], Tensor]
    """rows int64 [n] → features float32 [n,K] on the CPU, as the class head reads them."""
    encoder: OwnEncoder | None  # None: it is frozen
    batch_size: int  # images of a training step, among which augmentations find partners

    @torch.no_grad()
    def logits(self, z: Tensor) -> Tensor:
        """Returns logits float32 [n,C] of features [n,K]."""
        return self.method.logits(z)

    def augmented(
        self, images: Encoded, quantiles: Sequence[float] = QUANTILES
    ) -> Iterator[tuple[float | None, Tensor]]:
        """Yields augmented features [n,K] of shuffled images: of XDomainMix per quantile of τ_d, of others once."""
        if not augments(self.method, self.encoder is not None):
            return
        assert isinstance(self.method, Algorithm)
        z, y, domain, rows = images
        if isinstance(self.method, XDomainMix):
            for quantile in quantiles:
                yield quantile, xdomainmix_features(self.method, z, y, domain, quantile, self.batch_size)
        elif self.encoder is None:
            yield None, mix_features(self.method, z, y, domain, self.batch_size)
        else:
            yield None, self.encoder.augmented(rows, y, domain, self.batch_size)


class OwnEncoder:
    """The encoder of a model that was trained end to end.

    It is in eval mode, in the training's precision, on the accelerator's device, and uses no other process.
    """

    def __init__(self, model: EndToEnd, images: ImageRows, accelerator: Accelerator) -> None:
        self.model, self.images, self.accelerator = model, images, accelerator

    @torch.no_grad()
    def features(self, rows: Tensor) -> Tensor:
        encoder, blocks = self.model.encoder, [torch.empty(0, self.model.encoder.width)]
        for x in self._batches(rows, ENCODER_BATCH):
            with self._precision():
                z = encoder(x)
            blocks.append(z.float().cpu())
        return torch.cat(blocks)

    def augmented(self, rows: Tensor, y: Tensor, domain: Tensor, batch_size: int) -> Tensor:
        """Returns features float32 [n,K] of images that are augmented as in training, batch by batch."""
        annotations = (values.to(self.accelerator.device).split(batch_size) for values in (y, domain))
        annotated = zip(self._batches(rows, batch_size), *annotations, strict=True)
        with self._precision():
            return augment_in_encoder(self.model.algorithm, self.model.encoder, annotated)

    def _batches(self, rows: Tensor, size: int) -> Iterator[Tensor]:
        """Yields the images of the rows, [B,3,H,W] on the device."""
        device, split = self.accelerator.device, [some.tolist() for some in rows.split(size)]
        workers = min(worker_count(self.accelerator), len(split))
        loader = image_loader(self.images, workers, device, batch_sampler=split)
        for x, _ in iterate_batches(loader, *WORKERS_DIED):
            yield x.to(device, non_blocking=True)
            pulse.beat()

    def _precision(self) -> torch.autocast:
        precision = self.accelerator.mixed_precision
        device = self.accelerator.device.type
        return torch.autocast(device, dtype=DTYPES.get(precision), enabled=precision != "no")


def read_weights(context: RunContext, record: Record) -> dict[str, Tensor]:
    """Returns the weights that the recipe's own rule picked. Raises `UserError` if they are damaged."""
    weights = record.selected[context.plan.recipe.protocol.selection].weights
    return context.directory.require_tensors(weights, record.files)[0]


def read_model(context: RunContext, planned: PlannedModel, record: Record) -> TrainedModel:
    """Returns the model of a record. Raises `UserError` if its weights are damaged."""
    plan, prepared, state = context.plan, context.prepared, read_weights(context, record)
    job, inputs = make_job(plan, prepared, planned, {}), prepared.for_method(planned.item)
    method, batch = job.new_method(), job.training.images_per_step(len(job.split.train))
    if planned.item.trainable is False:
        features = inputs.features_of(job)
        method.load_state_dict(state)
        return TrainedModel(record, method.eval(), lambda rows: features[rows.to(features.device)].cpu(), None, batch)
    assert isinstance(method, Algorithm)
    # a copy: the weights of the next model are loaded into the same prepared encoder
    model = EndToEnd(copy.deepcopy(inputs.encoder), method, "frozen", normalized=job.normalized)
    model.load_weights(state)
    # a copy, as `model.to` below moves the method too, and features are kept on the CPU
    head, preprocessing = copy.deepcopy(method).cpu().eval(), inputs.encoder.preprocessing
    images = ImageRows(plan.dataset, evaluation_transform(preprocessing), preprocessing.least_side)
    encoder = OwnEncoder(model.to(context.accelerator.device).eval(), images, context.accelerator)
    return TrainedModel(record, head, encoder.features, encoder, batch)


class SplitFeatures:
    """The features of the images of a split. Models on a frozen encoder share it; it is computed when it is needed."""

    def __init__(self, images: SplitImages, features: Callable[[Tensor], Tensor], num_classes: int) -> None:
        self.images, self.features, self.num_classes = images, features, num_classes
        self.num_domains = len(images.train_domains)

    @cached_property
    def training(self) -> Encoded:
        return self._finite(self.images.training)

    @cached_property
    def validation(self) -> Encoded:
        return self._finite(self.images.validation)

    @cached_property
    def test(self) -> Encoded:
        return self._finite(self.images.test)

    def _finite(self, part: SampledPart) -> Encoded:
        z = self.features(part.rows)
        return Encoded(z, part.y, part.domain, part.rows).at(torch.isfinite(z).all(1))

    @cached_property
    def representation(self) -> Invariance:
        z, y, domain, _ = self.validation
        return covariance_distance(z, y, domain, self.num_classes, self.num_domains)

    @cached_property
    def domain_head(self) -> Linear | None:
        """A linear domain head for a model without one of its own; None with one training domain."""
        training, validation = ((part.z, part.domain) for part in (self.training, self.validation))
        return fit_domain_head(self.images.train_domains, training, validation)


def entry(
    model: TrainedModel, seen: SplitFeatures, limits: Limits, domain_names: Sequence[str], first: bool, rule: str
) -> Json:
    """Returns the measures of a model. Those that take long are null unless it is its method's `first` seed."""
    record, train_domains = model.record, seen.images.train_domains
    z, y, domain, _ = seen.validation
    losses = torch.from_numpy(per_image_nll(model.logits(z), y)) if len(z) else torch.zeros(0)
    # images that also trained the model do not show how well its probabilities fit
    validation = seen.validation if seen.images.own_validation else seen.validation.at(torch.arange(0))
    temperature = record.selected[rule].temperature
    divergences = None  # of augmented training features from original ones, per level
    if augments(model.method, model.encoder is not None) and len(seen.training.z) >= 2 * BATCH_SIZE:
        halves_of_training = halves(len(seen.training.z), seed=0)
        original, other = (seen.training.at(half[: limits.augmented // 2]) for half in halves_of_training)
        divergences = [
            divergence(original.z, other.z, augmented, quantile, BATCH_SIZE)
            for quantile, augmented in model.augmented(other)
        ]
    values: Json = {
        "method": record.method,
        "test_domains": list(record.test_domains),
        "seed": record.seed,
        "trial": record.trial,
        "representation_invariance": seen.representation._asdict(),
        "prediction_invariance": risk_variance(losses, domain, train_domains),
        "calibration": calibration(model.logits, validation, seen.test, train_domains, domain_names, temperature),
        "domain_head": None,
        "importance": None,
        "embedding": None,
        "divergence": divergences,
    }
    if first and len(z) >= MIN_IMAGES:
        has_own = isinstance(model.method, XDomainMix)
        domain_head: Head | None = model.method.domain_head if has_own else seen.domain_head  # type: ignore[assignment]
        values["domain_head"] = "own" if has_own else None if domain_head is None else "fitted"
        values["importance"] = removal_curves(z, y, domain, model.method.logits, domain_head)
        # augmentations take partners from a batch of consecutive images, which are sorted here
        shuffled = seen.validation.at(permutation(0, 0, Stream.ANALYSIS_ORDER, len(z)))
        augmented = next(iter(model.augmented(shuffled, QUANTILES[-1:])), (None, None))[1]
        heads = model.method.logits, domain_head
        values["embedding"] = embedding(shuffled, *heads, augmented, seen.num_classes, seen.num_domains, seed=0)
    return values


class MeasureTask(NamedTuple):
    """A model to measure."""

    record: Record
    planned: PlannedModel
    group: Group
    limits: Limits
    first: bool  # of the seeds of its method and test domains
    inputs: str  # digest of all that its entry depends on


def analyse(run: Run, context: RunContext, notes: Sequence[str] = ()) -> None:
    """Measures the models that the recipe's own rule picked, and writes analysis.json.

    The directory is locked, and the plan has no unreadable images. One process calls this, whatever their number: it
    computes without the others. Raises `UserError` if a weights file is damaged.
    """
    plan, directory = context.plan, context.directory
    # the models to measure, in the order of results.json
    planned, tasks = {model.key: model for model in plan.models}, list[MeasureTask]()
    of_run, seeds = [__version__, inputs(plan.dataset, context.prepared)], plan.recipe.protocol.seeds
    first: dict[tuple[str, tuple[str, ...]], ModelKey] = {}
    for record in sorted(run.picked, key=lambda record: seeds.index(record.seed)):
        first.setdefault((record.method, record.test_domains), record.key)
    for record in run.picked:
        is_first = record.key == first[record.method, record.test_domains]
        pick = record.selected[run.recipe_rule]
        depends_on = [*of_run, record.key, is_first, pick.to_json(), record.files.get(pick.weights)]
        model, frozen = planned[record.key], planned[record.key].item.trainable is False
        group, limits = (record.test_domains, record.seed, frozen), FROZEN if frozen else TRAINED
        tasks.append(MeasureTask(record, model, group, limits, is_first, json_digest(depends_on)))

    wanted = {task.record.key: task.inputs for task in tasks}
    finished = _finished_entries(directory, wanted)
    missing = [task for task in tasks if task.record.key not in finished]
    images = {task.group: split_images(plan, task.planned, task.limits) for task in tasks}
    if missing:
        with progress("analysis", len(tasks), "models") as bar:
            bar.skip(len(tasks) - len(missing))
            _measure(context, images, missing, bar)
        finished = _finished_entries(directory, wanted)
    entries = [finished[task.record.key] for task in tasks]

    # numbers of images, of the first seed: if the recipe trains the encoder, those of models that do, as solvers read
    # cached features, of more images
    counts: dict[str, dict[str, int]] = {}
    for (held_out, _, _), split in sorted(images.items(), key=lambda item: item[0][2] == plan.recipe.trains_encoders):
        of_split = dict[str, int]()
        for name, part in (("training", split.training), ("validation", split.validation), ("test", split.test)):
            used = "used" if name == "training" else f"{name}_used"
            of_split |= {name: part.n, used: len(part.rows)}
        counts.setdefault(",".join(held_out), of_split)
    analysis = {
        "schema": 1,
        "selection": run.recipe_rule,
        "seed": seeds[0],
        "images": counts,
        "notes": [*_notes(plan, entries, images), *notes],
        "models": entries,
    }
    directory.write_analysis(analysis)


def _finished_entries(directory: RunDirectory, wanted: Mapping[ModelKey, str]) -> dict[ModelKey, Json]:
    """Returns the entries of analysis.json and of an interrupted analysis, of which nothing has changed.

    `wanted`: {model: digest of all that its entry depends on}.
    """
    try:
        before = directory.analysis() or {}
    except Damaged as error:
        logger.warning("%s: is damaged (%s); it is written again", directory.path / "analysis.json", error)
        before = {}
    entries = {}
    for entry_of_model in (*before.get("models", ()), *directory.lines(KIND)):
        method, held_out, seed, trial = (entry_of_model[name] for name in ("method", "test_domains", "seed", "trial"))
        key = ModelKey(method, tuple(held_out), seed, trial)
        if wanted.get(key) == entry_of_model.get("inputs"):
            entries[key] = entry_of_model
    return entries


def _measure(
    context: RunContext, images: Mapping[Group, SplitImages], tasks: Sequence[MeasureTask], bar: Progress
) -> None:
    """Measures models, and appends a line for each one.

    Those on cached features are measured in forked processes, one group after the other in each of them.
    """
    groups: dict[Group, list[MeasureTask]] = {}
    for task in sorted(tasks, key=lambda task: not task.first):  # the longest first
        groups.setdefault(task.group, []).append(task)
    frozen = [tasks for (*_, is_frozen), tasks in groups.items() if is_frozen]
    begun, done = bar.done, get_context("fork").Value("i", 0)

    def measure_groups(number: int) -> None:
        with context.directory.in_fork(number) as directory:
            for position, group in enumerate(frozen):
                if directory.claim(f"{KIND}-{position}"):
                    for _ in _measure_group(replace(context, directory=directory), images, group):
                        with done.get_lock():
                            done.value += 1
                        # forks count in shared memory: the bar on the terminal is that of the first process
                        if number == 0:
                            bar.advance(begun + done.value - bar.done)

    if frozen:
        # a CUDA context cannot be used in a forked process
        forks = 1 if context.accelerator.device.type != "cpu" else own_cores()
        run_forked(measure_groups, min(forks, len(frozen)))
        bar.advance(begun + done.value - bar.done)
    for (*_, is_frozen), own_encoders in groups.items():
        for _ in _measure_group(context, images, own_encoders) if not is_frozen else ():
            bar.advance()


def _measure_group(
    context: RunContext, images: Mapping[Group, SplitImages], group: Sequence[MeasureTask]
) -> Iterator[None]:
    """Measures models of one group, and yields after each line."""
    plan = context.plan
    shared: dict[tuple[str | None, bool], SplitFeatures] = {}
    for task in group:
        item = task.planned.item
        model = read_model(context, task.planned, task.record)
        seen = SplitFeatures(images[task.group], model.features, len(plan.dataset.class_names))
        if model.encoder is None:  # models on the same features share what follows from them
            seen = shared.setdefault((item.encoder_label, item.reads_normalized), seen)
        rule = plan.recipe.protocol.selection
        values = entry(model, seen, task.limits, plan.dataset.domain_names, task.first, rule)
        weights = task.record.files.get(task.record.selected[rule].weights)
        facts = {"normalized": item.reads_normalized, "weights": weights, "inputs": task.inputs}
        context.directory.append(KIND, plain(values | facts))
        yield


def plain(value: Any) -> Any:
    """Returns a value as JSON has it: lists, texts and rounded numbers; what is not finite becomes None."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _notes(plan: Plan, entries: Sequence[Json], images: Mapping[Group, SplitImages]) -> Iterator[str]:
    held = "validation images of the training domains"
    if any(not split.own_validation for split in images.values()):
        held = "a part of the training images, as the split has no validation images of its training domains"
    yield f"invariances, importance and embeddings are measured on {held}"
    if on_features := [item for item in plan.recipe.methods if item.trainable is False]:
        which = " that leave it frozen" if plan.recipe.trains_encoders else ""
        under = " under one encoder" if len(plan.recipe.encoders) > 1 else ""
        alike = " and normalise them alike" if len({item.reads_normalized for item in on_features}) > 1 else ""
        yield (
            "frozen encoder: the features, and so the representation invariance, are the same for all methods"
            f"{which}{under}{alike}"
        )
    for used, limits, mode in ((True, FROZEN, "on cached features"), (False, TRAINED, "that trains its encoder")):
        if any(frozen == used for *_, frozen in images):
            yield (
                f"images of a model {mode}: at most {limits.training} for training, {limits.validation} for "
                f"validation and {limits.test} for testing; larger sets are sampled, about equally from every "
                "domain"
            )
    if len(plan.recipe.protocol.seeds) > 1:
        yield "importance and embeddings: the first seed of each method and held-out domain"
    if any(values["domain_head"] == "fitted" for values in entries):
        yield (
            "a method without a domain head gets a linear one, fitted on training features with a penalty "
            "picked on validation images"
        )
    if divergences := [values["divergence"] for values in entries if values["divergence"]]:
        n = sorted({level["n"] for levels in divergences for level in levels})
        sizes = str(n[0]) if len(n) == 1 else f"{n[0]} to {n[-1]}"
        yield (
            "divergence: unbiased MMD² between original and augmented features of different training images, "
            f"{sizes} of each; published: batches of {divergences[0][0]['batch_size']} with their own augmented "
            "features"
        )
    if plan.recipe.search.trials > 1:
        yield f"search: the one of {plural(plan.recipe.search.trials, 'trial')} that the rule picked"


def write_reconstructions(
    plan: Plan, prepared: Prepared, autoencoder: Autoencoder, run_directory: Path, device: torch.device
) -> Json:
    """Writes a file per held-out set, of the first seed's split, and returns what stands in the files.

    A file has a row per training image and a column per `COLUMNS`, and no text. A set with fewer than two training
    domains or classes, or without partners, has none. Raises `UserError` if a file cannot be written.
    """
    autoencoder.encoder.to(device)
    autoencoder.decoder.to(device)
    pixels = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0), "size": SIDE}  # the networks read pixels in 0…1
    preprocessing = prepared.for_method(plan.recipe.methods[0]).encoder.preprocessing.model_copy(update=pixels)
    images = ImageRows(plan.dataset, evaluation_transform(preprocessing), preprocessing.least_side)
    limits, seed = Limits(RECONSTRUCTION_SAMPLE, 0, 0, 0), plan.recipe.protocol.seeds[0]
    planned = {model.split.test_domains: model for model in plan.models if model.key.seed == seed}
    splits, sets = {held: split_images(plan, model, limits) for held, model in planned.items()}, []
    with progress(RECONSTRUCTION, sum(len(split.training.rows) for split in splits.values()), "images") as bar:
        for held_out, split in splits.items():
            path = run_directory / RECONSTRUCTION / f"{file_name(*held_out)}.png"
            rows, y, domain, _ = split.training
            training = Encoded(torch.empty(len(rows), 0), y, domain, rows)
            training = training.at(permutation(0, 0, Stream.ANALYSIS_ORDER, len(rows)))
            names = plan.dataset.class_names, split.train_domains
            drawn = reconstructions(autoencoder, lambda row: images[row][0], training, *names, device, bar)
            if len(drawn):
                replace_file(path, partial(write_png, drawn))
            else:
                path.unlink(missing_ok=True)  # of an earlier version of the run
            file = str(path.relative_to(run_directory)) if len(drawn) else None
            sets.append({"test_domains": list(held_out), "images": len(drawn), "file": file})
    return {"folder": run_directory / RECONSTRUCTION, "columns": list(COLUMNS), "sets": sets}
