"""The images on which the models of one split are measured: all of them, or a sample of stated size."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from xdm_ft.algorithms import Algorithm, Method, Setup
from xdm_ft.algorithms.linear_probe import LinearProbe
from xdm_ft.algorithms.xdomainmix import XDomainMix
from xdm_ft.analysis.augmented import (
    BATCH_SIZE,
    QUANTILES,
    augmented_in_encoder,
    halves,
    mixed_features,
    xdomainmix_features,
)
from xdm_ft.analysis.divergence import published_mmd_of_batches, unbiased_mmd2
from xdm_ft.analysis.embedding import embedding
from xdm_ft.analysis.importance import removal_curves
from xdm_ft.analysis.invariance import Invariance, covariance_distance, risk_variance
from xdm_ft.evaluation.calibration import reliability, temperature
from xdm_ft.evaluation.metrics import confidences, expected_calibration_error, per_image_nll
from xdm_ft.evaluation.records import ModelKey, Record
from xdm_ft.experiment.plan import Plan, PlannedModel
from xdm_ft.experiment.prepare import Prepared, make_job
from xdm_ft.experiment.results import inputs
from xdm_ft.experiment.work import run_forked
from xdm_ft.heads import Head
from xdm_ft.heads.linear import Linear
from xdm_ft.images.loader import ImageRows, image_loader, loaded
from xdm_ft.images.transforms import evaluation_transform
from xdm_ft.protocol.splits import with_validation
from xdm_ft.report.finished import Run
from xdm_ft.runtime.errors import UserError, plural
from xdm_ft.runtime.machine import own_cores
from xdm_ft.runtime.progress import Progress, progress, pulse
from xdm_ft.runtime.randomness import Stream, permutation
from xdm_ft.runtime.tensors import Annotations, Batch, Task
from xdm_ft.storage.digests import json_digest
from xdm_ft.storage.lines import Damaged
from xdm_ft.storage.run_directory import RunDirectory
from xdm_ft.training.end_to_end.inputs import WORKERS_DIED, worker_count
from xdm_ft.training.end_to_end.model import EndToEnd
from xdm_ft.training.end_to_end.prediction import DTYPES, precision_of
from xdm_ft.version import __version__

if TYPE_CHECKING:
    from accelerate import Accelerator


logger = logging.getLogger("xdm_ft")


class Limits(NamedTuple):
    """The most images of each part of a split that are measured."""

    training: int
    validation: int
    test: int
    augmented: int  # training images, half of them with original features, half with augmented ones


FROZEN = Limits(20_000, 20_000, 20_000, 2000)
TRAINED = Limits(1536, 768, 768, 1024)  # every model encodes its own images


@dataclasses.dataclass(frozen=True)
class Images:
    """Images of one part of a split."""

    rows: Tensor  # int64 [n], in the data set
    y: Tensor  # int64 [n]
    domain: Tensor  # int64 [n], numbered as in the data set
    n: int  # images of the part, of which these are a sample

    def where(self, kept: Tensor) -> Images:
        """Returns the images at which bool [n] is true."""
        return dataclasses.replace(self, rows=self.rows[kept], y=self.y[kept], domain=self.domain[kept])


@dataclasses.dataclass(frozen=True)
class SplitImages:
    """The images to measure of one split."""

    training: Images
    validation: Images
    test: Images
    domain_of: Tensor  # number of a domain in the data set → 0…D−1 of the training domains, −1 for others
    train_domains: tuple[str, ...]
    own_validation: bool  # False: the validation images are training images, as the split has none of its own

    def counts(self) -> dict[str, int]:
        """Returns the numbers of images for analysis.json."""
        return {
            "training": self.training.n,
            "used": len(self.training.rows),
            "validation": self.validation.n,
            "validation_used": len(self.validation.rows),
            "test": self.test.n,
            "test_used": len(self.test.rows),
        }


def split_images(plan: Plan, model: PlannedModel, limits: Limits) -> SplitImages:
    """Returns the images to measure of a model's split, which depend on the split alone."""
    annotations, split = plan.annotations, model.split
    validated = with_validation(plan.dataset, split, plan.recipe.protocol.val_fraction, model.key.seed)
    return SplitImages(
        training=_sample(torch.cat(split.train), annotations, limits.training),
        validation=_sample(validated.evaluation["train_val"], annotations, limits.validation),
        test=_sample(split.evaluation["test"], annotations, limits.test),
        domain_of=split.domain_of,
        train_domains=split.train_domains,
        own_validation="train_val" in split.evaluation,
    )


def _sample(rows: Tensor, annotations: Annotations, most: int) -> Images:
    """Returns the images, or of more than `most` about as many of every domain, drawn by their number alone."""
    rows, n = rows.sort().values, len(rows)
    domains = annotations.domains[rows].unique()
    if n > most:
        per_domain = max(2, most // len(domains))
        of_domains = [rows[annotations.domains[rows] == domain] for domain in domains]
        drawn = [own[permutation(0, 0, Stream.ANALYSIS, len(own))[:per_domain]] for own in of_domains]
        rows = torch.cat(drawn).sort().values
    return Images(rows, annotations.labels[rows], annotations.domains[rows], n)


STRENGTHS = (1.0, 0.1, 0.01, 1e-3)  # penalties of the logistic regression, of which validation images pick one


def fitted(
    train_domains: tuple[str, ...], training: tuple[Tensor, Tensor], validation: tuple[Tensor, Tensor]
) -> Linear | None:
    """Returns a linear head that predicts the domain of features; None for a single domain.

    It is the linear probe of the training features that predicts most validation images right, the more penalised one
    of several. All domains weigh the same. `training` and `validation` are features float32 [n,K] and domains int64
    [n], 0…D−1.
    """
    (z, domain), (z_held, domain_held) = training, validation
    if len(domain.unique()) < 2:
        return None
    names = tuple(train_domains)
    solver = LinearProbe(Setup(Task(names, names), z.shape[1], steps=0, seed=0), strengths=STRENGTHS)
    rows = torch.arange(len(z))
    found, most = None, -1
    for candidate in solver.solve(z, Batch(z, domain, domain, rows, rows)):
        logits = z_held @ candidate.head["weight"].T + candidate.head["bias"]
        right = int((logits.argmax(1) == domain_held).sum())
        if right > most:
            found, most = candidate, right
        pulse.beat()
    assert found is not None
    head = Linear(z.shape[1], len(names), 0, 0)
    head.load_state_dict(found.head)
    return head.eval()


BATCH = 32  # images that an encoder sees at once
Features = Callable[[Tensor], Tensor]
"""rows int64 [n] → features float32 [n,K] on the CPU, as the class head reads them."""


@dataclass(frozen=True)
class TrainedModel:
    """A model of a run, with the weights that the recipe's own rule picked."""

    record: Record
    method: Method  # on the CPU, in eval mode
    features: Features
    encoder: OwnEncoder | None  # None: it is frozen
    batch_size: int  # images of a training step, among which augmentations find partners

    @property
    def algorithm(self) -> Algorithm | None:
        """The method, if it is trained by steps; None for a solver."""
        return self.method if isinstance(self.method, Algorithm) else None

    @torch.no_grad()
    def logits(self, z: Tensor) -> Tensor:
        """Returns logits float32 [n,C] of features [n,K]."""
        return self.method.logits(z)


class OwnEncoder:
    """The encoder of a model that was trained end to end.

    It is in eval mode, in the training's precision, on the accelerator's device, and uses no other process.
    """

    def __init__(self, model: EndToEnd, images: ImageRows, accelerator: Accelerator) -> None:
        self.model, self.images, self.accelerator = model, images, accelerator

    @torch.no_grad()
    def features(self, rows: Tensor) -> Tensor:
        """As `Features`."""
        encoder, found = self.model.encoder, [torch.empty(0, self.model.encoder.width)]
        for x in self._batches(rows, BATCH):
            with self._precision():
                z = encoder(x)
            found.append(z.float().cpu())
        return torch.cat(found)

    def augmented(self, rows: Tensor, y: Tensor, domain: Tensor, batch_size: int) -> Tensor:
        """Returns features float32 [n,K] of images that are augmented as in training, batch by batch."""
        annotations = (values.to(self.accelerator.device).split(batch_size) for values in (y, domain))
        annotated = zip(self._batches(rows, batch_size), *annotations, strict=True)
        with self._precision():
            return augmented_in_encoder(self.model.algorithm, self.model.encoder, annotated)

    def _batches(self, rows: Tensor, size: int) -> Iterator[Tensor]:
        """Yields the images of the rows, [B,3,H,W] on the device."""
        device, split = self.accelerator.device, [some.tolist() for some in rows.split(size)]
        workers = min(worker_count(self.accelerator), len(split))
        loader = image_loader(self.images, workers, device, batch_sampler=split)
        for x, _ in loaded(loader, *WORKERS_DIED):
            yield x.to(device, non_blocking=True)
            pulse.beat()

    def _precision(self) -> torch.autocast:
        precision = precision_of(self.accelerator)
        device = self.accelerator.device.type
        return torch.autocast(device, dtype=DTYPES.get(precision), enabled=precision != "no")


def read_model(
    plan: Plan,
    prepared: Prepared,
    planned: PlannedModel,
    record: Record,
    directory: RunDirectory,
    accelerator: Accelerator,
) -> TrainedModel:
    """Returns the model of a record. Raises `UserError` if its weights are damaged."""
    file = record.selected[plan.recipe.protocol.selection].weights
    try:
        state, _ = directory.tensors(file)
    except (Damaged, FileNotFoundError) as error:
        problem = f"{directory.path / file}: is damaged ({error})"
        raise UserError(f"{problem}; run the run's recipe again to train this model again") from error
    job = make_job(plan, prepared, planned, {})
    method, batch = job.make(job.setup), job.training.images_per_step(len(job.split.train))
    own = prepared.of(planned.item)
    if is_frozen(planned):
        features = own.features_of(job)
        method.load_state_dict(state)
        return TrainedModel(record, method.eval(), lambda rows: features[rows.to(features.device)].cpu(), None, batch)
    assert isinstance(method, Algorithm)
    model = EndToEnd(copy.deepcopy(own.encoder), method, "frozen")
    model.load_weights(state)
    preprocessing = own.encoder.preprocessing
    images = ImageRows(plan.dataset, evaluation_transform(preprocessing), preprocessing.least_side)
    head = copy.deepcopy(method).cpu().eval()
    trained = OwnEncoder(model.to(accelerator.device).eval(), images, accelerator)
    return TrainedModel(record, head, trained.features, trained, batch)


def is_frozen(planned: PlannedModel) -> bool:
    """Returns whether a model reads cached features of the frozen encoder."""
    return planned.item.trainable is False


class Encoded(NamedTuple):
    """Images with their features. Images whose features are not finite are left out."""

    z: Tensor  # float32 [n,K]
    y: Tensor  # int64 [n]
    domain: Tensor  # int64 [n]: 0…D−1 of the training domains; of test images as in the data set
    rows: Tensor  # int64 [n]


class Seen:
    """The features of the images of a split. Models on a frozen encoder share it; it is computed when it is needed."""

    def __init__(self, images: SplitImages, features: Features, num_classes: int) -> None:
        self.images, self.features, self.num_classes = images, features, num_classes
        self.num_domains = len(images.train_domains)

    @cached_property
    def training(self) -> Encoded:
        return self._encoded(self.images.training, self.images.domain_of)

    @cached_property
    def validation(self) -> Encoded:
        return self._encoded(self.images.validation, self.images.domain_of)

    @cached_property
    def test(self) -> Encoded:
        return self._encoded(self.images.test, None)

    @cached_property
    def representation(self) -> Invariance:
        z, y, domain, _ = self.validation
        return covariance_distance(z, y, domain, self.num_classes, self.num_domains)

    @cached_property
    def domain_head(self) -> Linear | None:
        """A linear domain head for a model without one of its own; None with one training domain."""
        of_training, of_validation = ((part.z, part.domain) for part in (self.training, self.validation))
        return fitted(self.images.train_domains, of_training, of_validation)

    def _encoded(self, images: Images, domain_of: Tensor | None) -> Encoded:
        z = self.features(images.rows)
        kept = torch.isfinite(z).all(1)
        images = images.where(kept)
        domain = images.domain if domain_of is None else domain_of[images.domain]
        return Encoded(z[kept], images.y, domain, images.rows)


Json = dict[str, Any]


def calibration(model: TrainedModel, seen: Seen, domain_names: Sequence[str], of_run: float | None) -> Json:
    """Returns ECE, NLL and reliability of the validation images of each training domain, and of the test images.

    `of_run` is the temperature in results.json; None: it is fitted on the validation images here, as runs of earlier
    versions have none. Validation images that also trained the model do not count. A domain that both trains and tests
    appears twice, with its validation images under "NAME (validation)".
    """
    held, test = seen.validation, seen.test
    if not seen.images.own_validation:
        held = Encoded(*(field[:0] for field in held))
    logits = model.logits(held.z)
    value = temperature(logits, held.y) if of_run is None else of_run
    names, found = seen.images.train_domains, dict[str, Json]()
    of_test = dict(_by_domain(test, model.logits(test.z)))
    tested = {domain_names[number] for number in of_test}
    for number, part in _by_domain(held, logits):
        name = f"{names[number]} (validation)" if names[number] in tested else names[number]
        found[name] = _fit("validation", *part, value)
    for number, part in of_test.items():
        found[domain_names[number]] = _fit("test", *part, value)
    return {"temperature": value, "domains": found}


def _by_domain(images: Encoded, logits: Tensor) -> Iterator[tuple[int, tuple[Tensor, np.ndarray]]]:
    for number in images.domain.unique().tolist():
        own = images.domain == number
        yield number, (logits[own], images.y[own].numpy())


def _fit(role: str, logits: Tensor, labels: np.ndarray, value: float | None) -> Json:
    plain, scaled = _measured(logits, labels), None if value is None else _measured(logits / value, labels)
    names = ("ece", "nll", "reliability")
    after = {f"{name}_scaled": None if scaled is None else scaled[name] for name in names}
    return {"role": role, "n": len(labels), **plain, **after}


def _measured(logits: Tensor, labels: np.ndarray) -> Json:
    y = logits.new_tensor(labels).long()
    right = (logits.argmax(1) == y).numpy()
    bins = reliability(logits, labels)
    return {
        "ece": expected_calibration_error(confidences(logits), right),
        "nll": float(per_image_nll(logits, y).mean()),
        "reliability": [{"confidence": one.confidence, "accuracy": one.accuracy, "n": one.images} for one in bins],
    }


FEWEST = 8  # images that an embedding, a removal curve or a divergence needs


def entry(model: TrainedModel, seen: Seen, limits: Limits, domain_names: Sequence[str], first: bool, rule: str) -> Json:
    """Returns the measures of a model. Those that take long are null unless it is its method's `first` seed."""
    record = model.record
    of_model: Json = {
        "method": record.method,
        "test_domains": list(record.test_domains),
        "seed": record.seed,
        "trial": record.trial,
        "representation_invariance": seen.representation._asdict(),
        "prediction_invariance": prediction_invariance(model, seen),
        "calibration": calibration(model, seen, domain_names, record.selected[rule].temperature),
        "domain_head": None,
        "importance": None,
        "embedding": None,
        "divergence": divergence(model, seen, limits.augmented),
    }
    if first and len(seen.validation.z) >= FEWEST:
        head, origin = domain_head(model, seen)
        of_model |= {
            "domain_head": origin,
            "importance": importance(model, seen, head),
            "embedding": embeddings(model, seen, head),
        }
    return of_model


def domain_head(model: TrainedModel, seen: Seen) -> tuple[Head | None, str | None]:
    """Returns the model's own domain head, or a fitted one, and which of both it is."""
    if isinstance(model.method, XDomainMix):
        return model.method.domain_head, "own"
    head = seen.domain_head
    return head, None if head is None else "fitted"


def prediction_invariance(model: TrainedModel, seen: Seen) -> Json:
    """Returns the risks of the training domains, on validation images as in the authors' code, and their variance."""
    z, y, domain, _ = seen.validation
    losses = torch.from_numpy(per_image_nll(model.logits(z), y)) if len(z) else torch.zeros(0)
    found = risk_variance(losses, domain, seen.num_domains)
    return {"risk_variance": found.variance, "risk": dict(zip(seen.images.train_domains, found.risks, strict=True))}


def importance(model: TrainedModel, seen: Seen, domain_head: Head | None) -> Json:
    z, y, domain, _ = seen.validation
    found = removal_curves(z, y, domain, model.method.logits, domain_head)
    return {
        "shares": found.shares,
        "images": found.images,
        "class": found.of_class,
        "domain": found.of_domain,
        "area": {"class": found.area_of_class, "domain": found.area_of_domain},
    }


def embeddings(model: TrainedModel, seen: Seen, domain_head: Head | None) -> Json:
    every = seen.validation
    # augmentations take partners from a batch of consecutive images, which are sorted here
    mixed = Encoded(*(field[permutation(0, 0, Stream.ANALYSIS_ORDER, len(every.z))] for field in every))
    augmented = next(iter(augmentations(model, mixed, QUANTILES[-1:])), (None, None))[1]
    z, y, domain, _ = mixed
    pairs = embedding(
        z, y, domain, model.method.logits, domain_head, augmented, seen.num_classes, seen.num_domains, seed=0
    )
    planes = {name: {"map": pair.map._asdict(), "pca": pair.pca._asdict()} for name, pair in pairs.items()}
    return {"pairs": planes}


def divergence(model: TrainedModel, seen: Seen, most: int) -> list[Json] | None:
    """Returns how far augmented training features are from original ones, per level; None without augmentation.

    The unbiased MMD² compares one half of the images with augmented features of the other half; the published measure
    compares that half with itself, as the authors' code does.
    """
    if not augments(model):
        return None
    every = seen.training
    if len(every.z) < 2 * BATCH_SIZE:
        return None
    parts = (half[: most // 2] for half in halves(len(every.z), seed=0))
    original, other = (Encoded(*(field[part] for field in every)) for part in parts)
    found = []
    for quantile, augmented in augmentations(model, other, QUANTILES):
        unbiased = unbiased_mmd2(original.z, augmented)
        published = published_mmd_of_batches(other.z, augmented, BATCH_SIZE)
        found.append(
            {
                "quantile": quantile,
                "published_mmd": published,
                "batch_size": BATCH_SIZE,
                "unbiased_mmd2": unbiased.value,
                "stderr": unbiased.stderr,
                "n": unbiased.n,
                "bandwidths": unbiased.bandwidths,
            }
        )
    return found


def augments(model: TrainedModel) -> bool:
    """Returns whether the method trains on augmented features or inputs."""
    algorithm = model.algorithm
    if algorithm is None:
        return False
    own = type(algorithm)
    in_encoder = model.encoder is not None and own.stage_modules is not Algorithm.stage_modules
    return isinstance(algorithm, XDomainMix) or own.on_inputs is not Algorithm.on_inputs or in_encoder


def augmentations(
    model: TrainedModel, images: Encoded, quantiles: Sequence[float]
) -> Iterator[tuple[float | None, Tensor]]:
    """Yields the augmented features [n,K] of shuffled images: of XDomainMix per quantile of τ_d, of others once."""
    if not augments(model):
        return
    algorithm = model.algorithm
    assert algorithm is not None
    z, y, domain, rows = images
    if isinstance(algorithm, XDomainMix):
        for quantile in quantiles:
            yield quantile, xdomainmix_features(algorithm, z, y, domain, quantile, model.batch_size)
    elif model.encoder is None:
        yield None, mixed_features(algorithm, z, y, domain, model.batch_size)
    else:
        yield None, model.encoder.augmented(rows, y, domain, model.batch_size)


KIND = "analysis"  # of the lines that hold entries
DIGITS = 6  # significant digits of a number: rounding errors of other machines are beyond them


def finished_entries(directory: RunDirectory, wanted: Mapping[ModelKey, str]) -> dict[ModelKey, Json]:
    """Returns the entries of analysis.json and of an interrupted analysis, of which nothing has changed.

    `wanted`: {model: digest of all that its entry depends on}.
    """
    try:
        before = directory.analysis() or {}
    except Damaged as error:
        logger.warning("%s: is damaged (%s); it is written again", directory.path / "analysis.json", error)
        before = {}
    found = {}
    for one in (*before.get("models", ()), *directory.lines(KIND)):
        key = ModelKey(one["method"], tuple(one["test_domains"]), one["seed"], one["trial"])
        if wanted.get(key) == one.get("inputs"):
            found[key] = one
    return found


def document(
    run: Run,
    plan: Plan,
    entries: Sequence[Json],
    images: Mapping[tuple[tuple[str, ...], int, bool], SplitImages],
    notes: Sequence[str],
) -> Json:
    """Returns the content of analysis.json, without its checksum."""
    counts: dict[str, dict[str, int]] = {}  # of the first seed
    # if the recipe trains the encoder, those of models that do: solvers read cached features, of more images
    for group, of_split in sorted(images.items(), key=lambda item: item[0][2] == plan.recipe.trains_encoders):
        counts.setdefault(",".join(group[0]), of_split.counts())
    return {
        "schema": 1,
        "selection": run.own_rule,
        "seed": plan.recipe.protocol.seeds[0],
        "images": counts,
        "notes": [*_notes(plan, entries, images), *notes],
        "models": list(entries),
    }


def _notes(
    plan: Plan, entries: Sequence[Json], images: Mapping[tuple[tuple[str, ...], int, bool], SplitImages]
) -> Iterator[str]:
    held = "validation images of the training domains"
    if any(not of_split.own_validation for of_split in images.values()):
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
    for used, limits, what in ((True, FROZEN, "on cached features"), (False, TRAINED, "that trains its encoder")):
        if any(frozen == used for *_, frozen in images):
            yield (
                f"images of a model {what}: at most {limits.training} for training, {limits.validation} for validation "
                f"and {limits.test} for testing, of more a sample with about as many of every domain"
            )
    if len(plan.recipe.protocol.seeds) > 1:
        yield "importance and embeddings: the first seed of each method and held-out domain"
    if any(one["domain_head"] == "fitted" for one in entries):
        yield (
            "a method without a domain head gets a linear one, fitted on training features; validation images pick "
            "its penalty"
        )
    if divergences := [one["divergence"] for one in entries if one["divergence"]]:
        n = sorted({level["n"] for levels in divergences for level in levels})
        sizes = str(n[0]) if len(n) == 1 else f"{n[0]} to {n[-1]}"
        yield (
            "divergence: of training images, augmented by the trained model in batches of a training step; the "
            f"unbiased MMD² compares original features of one half with augmented ones of the other, {sizes} of each; "
            f"the published measure batches of {divergences[0][0]['batch_size']} with their own augmented features"
        )
    if plan.recipe.search.trials > 1:
        yield f"search: of {plural(plan.recipe.search.trials, 'trial')} the one that the rule picked"


def plain(value: Any) -> Any:
    """Returns a value as JSON has it: lists, texts and rounded numbers; what is not finite becomes None."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


Group = tuple[tuple[str, ...], int, bool]
"""Test domains, seed, and whether the encoder is frozen: models of a group are measured on the same images."""


class Subject(NamedTuple):
    """A model to measure."""

    record: Record
    planned: PlannedModel
    frozen: bool  # whether it reads cached features
    first: bool  # of the seeds of its method and test domains
    inputs: str  # digest of all that its entry depends on

    @property
    def group(self) -> Group:
        return self.record.test_domains, self.record.seed, self.frozen

    @property
    def limits(self) -> Limits:
        return FROZEN if self.frozen else TRAINED


def analyse(
    run: Run,
    plan: Plan,
    prepared: Prepared,
    directory: RunDirectory,
    accelerator: Accelerator,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Measures the models that the recipe's own rule picked, writes analysis.json, and returns its content.

    `directory` is locked, and `plan` has no unreadable images. One process calls this, whatever their number: it
    computes without the others. Raises `UserError` if a weights file is damaged.
    """
    tasks = _tasks(run, plan, prepared)
    wanted = {task.record.key: task.inputs for task in tasks}
    known = finished_entries(directory, wanted)
    missing = [task for task in tasks if task.record.key not in known]
    images = {task.group: split_images(plan, task.planned, task.limits) for task in tasks}
    if missing:
        with progress("analysis", len(tasks), "models") as bar:
            bar.skip(len(tasks) - len(missing))
            Measuring(plan, prepared, directory, accelerator, images, bar).all(missing)
        known = finished_entries(directory, wanted)
    found = document(run, plan, [known[task.record.key] for task in tasks], images, notes)
    directory.write_analysis(found)
    return found


def _tasks(run: Run, plan: Plan, prepared: Prepared) -> list[Subject]:
    """Returns the models to measure, in the order of results.json."""
    planned = {model.key: model for model in plan.models}
    order = {seed: place for place, seed in enumerate(plan.recipe.protocol.seeds)}
    first: dict[tuple[str, tuple[str, ...]], ModelKey] = {}
    for record in sorted(run.picked, key=lambda record: order[record.seed]):
        first.setdefault((record.method, record.test_domains), record.key)
    same, found = [__version__, inputs(plan.dataset, prepared)], []
    for record in run.picked:
        is_first = record.key == first[record.method, record.test_domains]
        model = planned[record.key]
        depends_on = [*same, record.key, is_first, record.selected[run.own_rule].to_json()]
        found.append(Subject(record, model, is_frozen(model), is_first, json_digest(depends_on)))
    return found


@dataclass(frozen=True)
class Measuring:
    """Measures models, and appends a line for each one."""

    plan: Plan
    prepared: Prepared
    directory: RunDirectory
    accelerator: Accelerator
    images: Mapping[Group, SplitImages]
    bar: Progress

    def all(self, tasks: Sequence[Subject]) -> None:
        """Models on cached features are measured in forked processes, one group after the other in each of them."""
        pieces: dict[Group, list[Subject]] = {}
        for task in sorted(tasks, key=lambda task: not task.first):  # the longest first
            pieces.setdefault(task.group, []).append(task)
        frozen = [piece for piece in pieces.values() if piece[0].frozen]
        begun, done = self.bar.done, get_context("fork").Value("i", 0)

        def work(number: int) -> None:
            with self.directory.in_fork(number) as own:
                for place, piece in enumerate(frozen):
                    if own.take(f"{KIND}-{place}"):
                        for _ in self._measured(piece, own):
                            with done.get_lock():
                                done.value += 1
                            if number == 0:
                                self.bar.advance(begun + done.value - self.bar.done)

        if frozen:
            # a CUDA context can not be used in a forked process
            forks = 1 if self.accelerator.device.type != "cpu" else own_cores()
            run_forked(work, min(forks, len(frozen)))
            self.bar.advance(begun + done.value - self.bar.done)
        for piece in pieces.values():
            if not piece[0].frozen:
                for _ in self._measured(piece, self.directory):
                    self.bar.advance()

    def _measured(self, piece: Sequence[Subject], directory: RunDirectory) -> Iterator[None]:
        """Measures models of one group, and yields after each line."""
        shared: dict[tuple[str | None, bool], Seen] = {}
        dataset, rule = self.plan.dataset, self.plan.recipe.protocol.selection
        for task in piece:
            model = read_model(self.plan, self.prepared, task.planned, task.record, directory, self.accelerator)
            seen = Seen(self.images[task.group], model.features, len(dataset.class_names))
            if task.frozen:  # models on the same features share what follows from them
                seen = shared.setdefault((task.planned.item.encoder_label, task.planned.item.reads_normalized), seen)
            found = entry(model, seen, task.limits, dataset.domain_names, task.first, rule)
            directory.append(KIND, plain(found | {"inputs": task.inputs}))
            yield
