"""How long a run takes on this machine, and what its cuts and encoders cost.

A step of one chunk of each method and a batch of each encoder are timed by the wall, and multiplied by the plan;
processes side by side divide the time. What other programs do meanwhile counts: an estimate is right within a factor of
two. Heads are timed on made-up features of the right width, so that nothing has to be extracted. Nothing is written, no
model is kept, and random numbers of the run stay as they were.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from xdm_ft.algorithms import Solver
from xdm_ft.core import Criteria, ModelKey
from xdm_ft.cut.cut import Below
from xdm_ft.encoders import Encoder
from xdm_ft.evaluation.neighbours import sampled_robustness
from xdm_ft.experiment.cluster import device_of
from xdm_ft.experiment.pieces import SOLVER_PASSES
from xdm_ft.experiment.plan import Plan, PlannedModel, augmentation_line, unsearched_line
from xdm_ft.experiment.prepare import Prepared, PreparedEncoder, cuts_of, make_job
from xdm_ft.experiment.results import trained_words
from xdm_ft.experiment.work import one_thread
from xdm_ft.features import FeatureSettings, Precision
from xdm_ft.features.cache import Features
from xdm_ft.features.extract import cached_images, frozen_copy
from xdm_ft.images import ImageDataset
from xdm_ft.images.decode import UnreadableImage
from xdm_ft.images.loader import DTYPES
from xdm_ft.images.transforms import evaluation_transform
from xdm_ft.runtime.errors import UserError, plural
from xdm_ft.runtime.machine import cores, on_gpu, own_cores, retain_freed_memory
from xdm_ft.runtime.progress import duration
from xdm_ft.training import Job
from xdm_ft.training.bank.data import BLOCK_STEPS, BankValidation, CachedData, batches
from xdm_ft.training.bank.step import Bank, step
from xdm_ft.training.bank.train import chunks, max_heads
from xdm_ft.training.end_to_end.model import is_cnn
from xdm_ft.training.selection import evaluation_steps, split_of

if TYPE_CHECKING:
    from accelerate import Accelerator

Encoders = Mapping[str | None, Encoder]
"""By their labels in results, as `build_encoders` returns them."""
SMALL_SECONDS = 30.0  # a run that surely takes no longer is not measured
SECONDS_PER_MODEL = 0.01  # to test a model and to write its files
TIMING_SECONDS = 0.1  # of a batch or a step, which is repeated so long
DECODED_IMAGES = 4  # that are timed
ENCODED_IMAGES = {"cpu": 4, "cuda": 64}  # in the batch that is timed: two at least, which batch norm needs
MADE_UP_ROWS = 1024  # distinct made-up features
MEASURED_STEP = 0.95  # share of a training: a step in a warm-up may do less
MAX_NAMED = 5  # methods that the first line of a resumed run names
# a generous bound, for runs that need no measurement: seconds of the fixed cost of a head's step and of an image that
# is decoded, operations per second
STEP, IMAGE, SPEED = 2e-3, 5e-3, 1e10
# of a GPU, where a CPU would take long: operations per second of an encoder in float32. Assumed: small GPUs do as many
GPU_SPEED, GPU_ADVICE = 1e13, 600.0


def tens(seconds: float) -> str:
    """Returns the time in words, of at least 10 s, as precise as an estimate is."""
    return duration(max(10.0, round(seconds, -1)))


@dataclass(frozen=True)
class TimeEstimate:
    """The time that extraction and training will take; None if it was not measured: too little work, or a problem."""

    device: str  # and the number of cores or processes
    features: float | None = None  # seconds of extraction
    training: float | None = None  # seconds of training
    problem: str | None = None  # why it could not be measured
    with_gpu: float | None = None  # seconds, computed; None: not computed, as there is a GPU

    @property
    def seconds(self) -> float | None:
        return None if self.features is None or self.training is None else self.features + self.training

    def text(self) -> str:
        if self.problem is not None:
            return f"the time could not be measured ({self.problem})"
        if self.features is None or self.training is None:
            return "less than a minute"
        total = self.features + self.training
        parts = list[str]()
        if total > 100 and min(self.features, self.training) > 0.05 * total:
            parts.append(f"features {tens(self.features)}, training {tens(self.training)}")
        if self.with_gpu is not None and total > max(GPU_ADVICE, 2 * self.with_gpu):
            parts.append(f"computed for a GPU of {GPU_SPEED / 1e12:g} TFLOP/s: {tens(self.with_gpu)}")
        return f"about {tens(total)}" + (f" ({'; '.join(parts)})" if parts else "")

    def to_json(self) -> dict[str, Any]:
        """Seconds are null where they were not measured: because of `problem`, or as all takes less than a minute."""
        return {
            "device": self.device,
            "seconds": self.seconds,
            "features_seconds": self.features,
            "training_seconds": self.training,
            "problem": self.problem,
            "text": self.text(),
        }


def estimate(
    plan: Plan, encoders: Encoders, accelerator: Accelerator, trained: Collection[ModelKey] = ()
) -> TimeEstimate:
    """Returns the time for all models of the plan but those that are `trained`. Takes a few seconds at most.

    A problem that prevents the measurement does not end the run: the estimate names it.
    """
    device = machine(accelerator)
    models = [model for model in plan.models if not model.skipped and model.key not in trained]
    models += [model for model in plan.extra if any(key not in trained for key in model.needed_by)]
    works = [
        EncoderWorkload(
            plan, label, encoder, accelerator, [model for model in models if model.item.encoder_label == label]
        )
        for label, encoder in encoders.items()
    ]
    if sum(work.bound() for work in works) < SMALL_SECONDS:
        return TimeEstimate(device)
    retain_freed_memory()  # as the run will do
    try:
        with torch.random.fork_rng():
            features, training = sum(work.features() for work in works), sum(work.training() for work in works)
    except Exception as error:  # the run itself reports what is wrong, if it is wrong there too
        return TimeEstimate(device, problem=f"{type(error).__name__}: {error}")
    has_gpu = accelerator.device.type != "cpu"
    saved = sum(work.encoding - max(work.decoding, work.operations / GPU_SPEED) for work in works)
    return TimeEstimate(device, features, training, with_gpu=None if has_gpu else features + training - saved)


def machine(accelerator: Accelerator) -> str:
    """Returns the device of a run, with the number of cores and of launched processes."""
    device, ranks = accelerator.device, accelerator.num_processes
    if device.type == "cpu":
        name = f"cpu ({plural(cores(), 'core')})"
    else:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return name + (f", {ranks} processes" if ranks > 1 else "")


def first_lines(
    plan: Plan, encoders: Encoders, accelerator: Accelerator, trained: Collection[ModelKey]
) -> Iterator[str]:
    """Yields what a run says first: of device, models and time; of rows that a search or an augmentation leaves out."""
    yield first_line(plan, encoders, accelerator, trained)
    if line := unsearched_line(plan.recipe):
        yield line
    if len({plan.recipe.augmentation_of(item) for item in plan.recipe.methods}) > 1:
        yield augmentation_line(plan.recipe)


def first_line(plan: Plan, encoders: Encoders, accelerator: Accelerator, trained: Collection[ModelKey]) -> str:
    """Returns device, number of models and the time for those that are not `trained`."""
    planned = [model.key for model in plan.models if not model.skipped]
    left = Counter(key.method for key in planned if key not in trained)
    if not left:
        return f"{machine(accelerator)}: nothing of the estimate is left to train"
    count, of_methods = plural(len(planned), "model"), ""
    if left.total() < len(planned):
        named = [f"{label}: {plural(n, 'model')}" for label, n in left.items()]
        named[MAX_NAMED:] = [f"{len(named) - MAX_NAMED} more methods"] if len(named) > MAX_NAMED else []
        count, of_methods = f"{left.total()} of {count}", f" ({', '.join(named)})"
    time = estimate(plan, encoders, accelerator, trained)
    return f"{time.device}: {count} to train{of_methods}, {time.text()}"


def training_time(plan: Plan, encoder: Encoder, accelerator: Accelerator, models: Sequence[PlannedModel]) -> str:
    """Returns the time to train models of one method, by which features are read from the cache."""
    try:
        with torch.random.fork_rng():
            work = EncoderWorkload(plan, models[0].item.encoder_label, encoder, accelerator, models)
            return f"about {tens(work.training())}"
    except Exception as error:  # the training reports what is wrong, if it is wrong there too
        return f"time not measured ({type(error).__name__})"


def heads_time(
    plan: Plan, encoder: Encoder, device: torch.device, groups: Iterable[tuple[Sequence[PlannedModel], int]]
) -> str:
    """Returns the time to train groups of heads on cached features, each so many times, in one process."""
    with torch.random.fork_rng(), one_thread():
        seconds = [n * sum(pieces_seconds(plan, encoder, device, models, threads=own_cores())) for models, n in groups]
    return f"about {tens(sum(seconds))}"


class ImageSeconds(NamedTuple):
    """Seconds for one image in a batch: to be decoded by one process, and through an encoder."""

    decode: float
    below: float  # through what is frozen, which may be the whole encoder
    forward: float = 0.0  # through what trains
    train: float = 0.0  # forward and backward
    speed: float = 0.0  # operations per second of a forward pass

    def cached(self) -> ImageSeconds:
        """The same, when activations are read from the cache. The time of reading is not counted."""
        return self._replace(decode=0.0, below=0.0)

    def total(self, device: torch.device, *, gradients: int = 0) -> float:
        """Seconds per image of a training step with so many forward and backward passes; 0: of a prediction.

        All cores decode: on a CPU, decoding and the encoder share them.
        """
        encode = self.below + (gradients * self.train if gradients else self.forward)
        decode = self.decode / own_cores()
        return encode + decode if device.type == "cpu" else max(encode, decode)


def image_seconds(
    plan: Plan, encoder: Encoder, accelerator: Accelerator, frozen_in: Precision | None = None
) -> ImageSeconds:
    """Measures a copy of an encoder as it trains, or above a cut if it is a `Below`, on a few images of the plan.

    `frozen_in`: as an extraction in this precision uses it. Raises `ValueError` if no image decodes.
    """
    dataset, preprocessing, device = plan.dataset, encoder.preprocessing, accelerator.device
    transform, images, decoding = evaluation_transform(preprocessing), list[Tensor](), list[float]()
    for row in np.linspace(0, len(dataset) - 1, 4 * DECODED_IMAGES).astype(int).tolist():
        if len(images) < DECODED_IMAGES:
            began = time.perf_counter()
            try:
                images.append(transform(dataset.draft(row, preprocessing.least_side)))
            except UnreadableImage:  # extraction reports it
                continue
            decoding.append(time.perf_counter() - began)
    if not images:
        raise ValueError("none of the images that were tried decodes")
    decode, count = min(decoding), ENCODED_IMAGES.get(device.type, 4)
    x = torch.stack(images).repeat(-(-count // len(images)), 1, 1, 1)[:count].to(device)  # [B,3,S,S]

    if frozen_in is not None:
        frozen = frozen_copy(encoder, frozen_in, device)
        below = _forward(frozen, x.to(DTYPES[frozen_in]), accelerator)
        return ImageSeconds(decode, below, speed=_operations(frozen, x.to(DTYPES[frozen_in])) / below)
    model = copy.deepcopy(encoder).to(device).train()
    full_encoder = model.cut.encoder if isinstance(model, Below) else model
    if is_cnn(full_encoder):
        full_encoder.to(memory_format=torch.channels_last)
    below = operations = 0.0
    above: Callable[[Tensor], Tensor] = model
    if isinstance(model, Below):
        cut, above = model.cut, model.cut.above
        cut.freeze()
        cut.train_above()
        below, operations = _forward(cut.below, x, accelerator), _operations(cut.below, x)
        with torch.no_grad(), accelerator.autocast():
            x = cut.below(x).float()  # [B,…], the activations

    def train() -> None:
        with accelerator.autocast():
            z = above(x)
        z.float().square().mean().backward()

    train()  # the first call allocates
    seconds = seconds_of(train, TIMING_SECONDS) / len(x)
    forward = _forward(above, x, accelerator)
    operations += _operations(above, x)
    return ImageSeconds(decode, below, forward, seconds, speed=operations / (below + forward))


def _operations(model: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Returns the operations of a forward pass, per image of the batch."""
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        model(x)
    return counted.get_total_flops() / len(x)


def _forward(model: Callable[[Tensor], Tensor], x: Tensor, accelerator: Accelerator) -> float:
    """Returns the seconds of a forward pass, per image of the batch."""
    with torch.inference_mode(), accelerator.autocast():
        model(x)  # the first call of a size allocates
        return seconds_of(lambda: model(x), TIMING_SECONDS) / len(x)


class EncoderWorkload:
    """The work of a run under one encoder."""

    def __init__(
        self,
        plan: Plan,
        label: str | None,  # of the encoder
        encoder: Encoder,
        accelerator: Accelerator,
        models: Sequence[PlannedModel],  # of this encoder
    ) -> None:
        self.plan, self.encoder, self.accelerator, self.models = plan, encoder, accelerator, models
        # of encoders, in what was estimated: seconds, those of decoding among them, and operations
        self.encoding, self.decoding, self.operations = 0.0, 0.0, 0.0
        recipe, dataset, device = plan.recipe, plan.dataset, device_of(plan.recipe.cluster, accelerator.device)
        items = [item for item in recipe.runnable_methods if item.encoder_label == label]
        self.cuts = cuts_of(recipe, encoder, items, dataset, device)
        # encoders and parts below cuts, with the number of images that the cache lacks; equal ones count each
        self.missing: list[tuple[Encoder, int]] = [
            (cut.below, cut.missing) for cut in self.cuts if cut.is_cached and cut.missing
        ]
        if recipe.has_images and any(map(recipe.reads_features, items)):
            augmentations = recipe.cached_augmentations(item for item in items if item.trainable is False)
            counts = cached_images(encoder, dataset.decoder, recipe.features, augmentations, device)
            if missing := sum(max(0, len(dataset) - count) for count in counts):
                self.missing.append((encoder, missing))

    def bound(self) -> float:
        """Returns the seconds that the work takes at most, by its number of steps and images: a generous bound."""
        classes, width = len(self.plan.dataset.class_names), self.encoder.width
        parameters = sum(parameter.numel() for parameter in self.encoder.parameters())
        # of an image through the encoder: a parameter is used at every fourth pixel of a row and column
        operations = 2.0 * parameters * max(1, self.encoder.preprocessing.size // 4) ** 2
        seconds = sum(missing for _, missing in self.missing) * (IMAGE + operations / SPEED)
        for model in self.models:
            images, steps = SOLVER_PASSES * sum(map(len, model.split.train)), 1
            if not model.item.is_solver:
                images, steps = model.training.images_per_step(len(model.split.train)) * model.steps, 2 * model.steps
            seconds += STEP * steps + 12 * images * width * classes / SPEED
            seconds += 2 * model.item.algorithm.cls.inverses * width**3 / SPEED if model.item.is_solver else 0.0
            seconds += images * (IMAGE + 6 * operations / SPEED) if model.item.trainable is not False else 0.0
        return seconds

    def features(self) -> float:
        """Returns the seconds to compute what the cache lacks: features, and activations of cuts."""
        seconds, precision = 0.0, self.plan.recipe.features.precision
        for encoder, count in self.missing:
            seconds += self._seconds(count, image_seconds(self.plan, encoder, self.accelerator, precision))
        return seconds

    def _seconds(self, count: float, image: ImageSeconds, gradients: int = 0) -> float:
        """Returns the seconds for so many images, which the processes share, and counts what a GPU would do."""
        count /= self.accelerator.num_processes
        decode = image.decode / own_cores()
        seconds = count * image.total(self.accelerator.device, gradients=gradients)
        self.encoding, self.decoding = self.encoding + seconds, self.decoding + count * decode
        self.operations += image.speed * (seconds - count * decode)
        return seconds

    def training(self) -> float:
        """Returns the seconds to train all models."""
        heads, plan, accelerator = dict[str, list[PlannedModel]](), self.plan, self.accelerator
        for model in self.models:
            if model.item.trainable is False:
                heads.setdefault(model.item.label, []).append(model)
        # the queue of heads: processes take the longest piece first
        pieces = list[float]()
        forks = 1 if accelerator.device.type != "cpu" else own_cores()
        with one_thread():  # as in the forks that train them
            for models in heads.values():
                alone = forks if len(self.models) == 1 else 1
                pieces += pieces_seconds(plan, self.encoder, accelerator.device, models, alone)
        seconds = max(sum(pieces) / (forks * accelerator.num_processes), max(pieces, default=0.0))

        groups = [(self.encoder, [model for model in self.models if model.item.trainable is True], False)]
        for cut in self.cuts:
            above = [model for model in self.models if model.item.trainable in cut.serves]
            on_images = [model for model in above if plan.recipe.trains_on_images(model.item)]
            groups.append((cut.below, on_images, False))
            groups.append((cut.below, [model for model in above if model not in on_images], cut.is_cached))
        for encoder, models, is_cached in groups:
            if models:
                image = image_seconds(plan, encoder, accelerator)
                image = image.cached() if is_cached else image
                seconds += sum(self._end_to_end(model, image) for model in models)
        return SECONDS_PER_MODEL * len(self.models) + seconds

    def _end_to_end(self, model: PlannedModel, image: ImageSeconds) -> float:
        rules = self.plan.rules
        sizes = {name: len(rows) for name, rows in model.split.evaluation.items()}
        evaluations = len(evaluation_steps(model.steps, model.training.evaluate_every))
        predicted = evaluations * sum(sizes.get(name, 0) for name in {split_of(rule) for rule in rules})
        predicted += len(rules) * sum(sizes.values())
        trained = model.training.images_per_step(len(model.split.train)) * model.steps
        seconds = self._seconds(trained, image, gradients=2 if model.item.sharpness else 1)
        return seconds + self._seconds(predicted, image)


def pieces_seconds(
    plan: Plan, encoder: Encoder, device: torch.device, models: Sequence[PlannedModel], threads: int = 1
) -> list[float]:
    """Returns the seconds of each piece of models that differ in splits and seeds alone, in one process.

    One piece is measured, on made-up features, so that none has to be extracted. `threads`: of a solver.
    """
    item, shape = models[0].item, (len(plan.dataset.class_names), encoder.width)
    if item.is_solver:
        rows = [sum(map(len, model.split.train)) for model in models]
        # a pick on unseen domains solves once more without each
        solved = 1 + len(models[0].split.train) * item.picks_across_domains
        return [solved * solver_seconds(item.algorithm.cls, shape, sum(rows) / len(rows) / threads)] * len(rows)
    x = torch.randn(MADE_UP_ROWS, encoder.width)
    features = _MadeUp([x], device=device)
    features.views = plan.recipe.features.views if plan.recipe.augmentation_of(item) else 0
    texts = {item.block.prompts: torch.randn(shape)} if item.reads_text else {}
    likely = {item.block.prompts: torch.rand(len(plan.dataset))} if plan.recipe.reads_confidence(item) else {}
    made_up = PreparedEncoder(encoder, "", features, texts, activations={}, own_probability=likely)
    prepared = Prepared({item.encoder_label: made_up}, unreadable={}, content="")
    evaluation = models[0].split.evaluation  # rules that have no images, as in a final fit, read nothing
    unread = {rule: dict[int, float]() for rule in plan.rules if not len(evaluation.get(split_of(rule), ()))}
    jobs = [make_job(plan, prepared, model, unread) for model in models[: max_heads(device)]]
    largest = max(chunks(jobs, device), key=len)
    data = CachedData(made_up.features_of(largest[0]), plan.annotations.to(device))
    step_seconds, evaluation_seconds = head_seconds(largest, data, plan.criteria)
    evaluations = len(evaluation_steps(models[0].steps, models[0].training.evaluate_every))
    mean_steps = sum(model.steps for model in models) / len(models)
    chunk = mean_steps * step_seconds + evaluations * evaluation_seconds
    number = -(-len(models) // len(largest))
    return [chunk * len(models) / (number * len(largest))] * number


def solver_seconds(solver: type[Solver], shape: tuple[int, int], rows: float) -> float:
    """Returns the seconds of a solver with a head [C,K] on so many images per thread, of which few are measured."""
    if solver.needs_text:  # its head is the class embeddings, which are computed before training
        return 0.0
    x, head, matrices = torch.randn(MADE_UP_ROWS, shape[1]), torch.randn(shape), solver.inverses
    one_pass = seconds_of(lambda: (head @ x.T).double().log_softmax(0).exp().float() @ x, 0.0) / MADE_UP_ROWS
    seconds = SOLVER_PASSES * (STEP + rows * one_pass)
    if matrices:
        wide, eye = x.double(), torch.eye(shape[1], dtype=torch.float64)
        inverse = partial(torch.linalg.solve_triangular, eye, eye, upper=False)
        seconds += rows / MADE_UP_ROWS * seconds_of(lambda: wide.T @ wide, 0.0)
        seconds += matrices * (seconds_of(lambda: torch.linalg.cholesky(eye), 0.0) + seconds_of(inverse, 0.0))
        seconds += 2 * SOLVER_PASSES * seconds_of(lambda: head.double() @ eye, 0.0)  # coordinates, there and back
    return seconds


class _MadeUp(Features):
    """Random features of any number of rows, a few of them distinct."""

    def _read(self, positions: Tensor, end: int) -> Tensor:
        return super()._read(positions % MADE_UP_ROWS, MADE_UP_ROWS)


def head_seconds(jobs: Sequence[Job], data: CachedData, criteria: Criteria) -> tuple[float, float]:
    """Returns the seconds of a step of a chunk of heads, and of an evaluation."""
    bank = Bank(jobs, data.features.device)
    first = int(MEASURED_STEP * len(bank.factors))

    def work() -> None:
        bank.optimizer.reset()  # it counts its steps, and is not made for more than the training has
        step(bank, batch, first)

    began = clock()
    batch = next(batches(jobs, data, first))
    draws = (clock() - began) / min(BLOCK_STEPS, len(bank.factors) - first)  # rows of many steps
    work()  # a first call may compile, or allocate
    validation = BankValidation(jobs, data, criteria)
    evaluation = seconds_of(lambda: validation.values(bank.template, bank.main), 0.0)
    return draws + seconds_of(work, TIMING_SECONDS), evaluation


def seconds_of(work: Callable[[], object], seconds: float) -> float:
    """Returns the median time by `clock` of at least one call of `work`, and of more until `seconds` have passed."""
    started, times = time.perf_counter(), list[float]()
    while not times or time.perf_counter() - started < seconds:
        began = clock()
        work()
        times.append(clock() - began)
    return statistics.median(times)


def clock() -> float:
    """Returns the seconds of the wall, after all work of a GPU."""
    if on_gpu():
        torch.cuda.synchronize()
    return time.perf_counter()


class CutCost(NamedTuple):
    """A cut, and the seconds of a step above it: as JSON, and for a reader."""

    document: dict[str, Any]
    lines: list[str]


def cut_costs(plan: Plan, encoders: Encoders, accelerator: Accelerator) -> list[CutCost]:
    """Returns the costs of all cuts of the plan's recipe, measured on a few of its images. Writes nothing.

    Equal images are counted as different ones. Seconds and shares are null if they could not be measured.
    """
    recipe, device, costs = plan.recipe, accelerator.device, list[CutCost]()
    images = recipe.training.images_per_step(max(len(split.train) for split in plan.splits))
    for label, encoder in encoders.items():
        items = [item for item in recipe.runnable_methods if item.encoder_label == label]
        for cut in cuts_of(recipe, encoder, items, plan.dataset, device_of(recipe.cluster, device)):
            share = speeds = computed = cached = problem = None
            try:
                with torch.random.fork_rng():
                    image = image_seconds(plan, cut.below, accelerator)
            except Exception as error:  # the run itself reports what is wrong, if it is wrong there too
                problem = f"{type(error).__name__}: {error}"
                measured = f"its saving could not be measured ({problem})"
            else:
                full = image.below + image.forward
                share = image.below / full
                speeds = {"whole": 1 / full, "below": 1 / image.below, "above_forward_backward": 1 / image.train}
                computed = images * image.total(device, gradients=1)
                cached = images * image.cached().total(device, gradients=1)
                measured = (
                    f"{100 * share:.0f}% of the encoder's forward pass lies below; a step of {images} images: computed "
                    f"{computed:.3g} s, cached {cached:.3g} s (without reading)"
                )
            serves = [trained_words(trainable) for trainable in cut.serves]
            document = {
                "encoder": label,
                "trainable": serves,
                "before": cut.below.cut.name,
                "shape": cut.below.cut.shape,
                "activations": cut.activations,
                "bytes": cut.bytes,
                "missing_bytes": cut.missing_bytes,
                "is_cached": cut.is_cached,
                "why_computed": cut.why_computed or None,
                "share_below": share,
                "images_per_second": speeds,
                "step_images": images,
                "computed_step_seconds": computed,
                "cached_step_seconds": cached,
                "problem": problem,
            }
            name = "" if label is None else f"{label}, "
            costs.append(CutCost(document, [f"{name}{', '.join(serves)}: {cut.text()}", measured]))
    return costs


def encoder_costs(
    prepared: Prepared,
    settings: FeatureSettings,
    dataset: ImageDataset,
    accelerator: Accelerator,
    before: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns `environment.encoders` of results.json, what each of several encoders costs and how robust its
    features are: {} for one encoder.

    `before`: what an earlier process of this run has measured, which is kept. The time is that of a forward pass in a
    batch, without decoding, measured on black images. The robustness index is that of a sample of the images.
    """
    if None in prepared.encoders:
        return {}
    costs, device, dtype = (
        dict[str | None, Any](before.get("encoders", {})),
        accelerator.device,
        DTYPES[settings.precision],
    )
    for label, inputs in prepared.encoders.items():
        encoder, identity, size = inputs.encoder, inputs.encoder.identity(), inputs.encoder.preprocessing.size
        if label in costs:
            continue
        black = torch.zeros(ENCODED_IMAGES.get(device.type, 4), 3, size, size, dtype=dtype, device=device)
        black = black.contiguous(memory_format=torch.channels_last)
        seconds = _forward(frozen_copy(encoder, settings.precision, device), black, accelerator)
        costs[label] = {
            "component": identity["component"],
            "model": identity.get("model"),
            "pretraining": encoder.pretraining,
            "width": encoder.width,
            "parameters": sum(p.numel() for p in encoder.parameters() if p.requires_grad),  # without a text side
            "ms_per_image": round(1e3 * seconds, 3),
            "feature_bytes": None
            if inputs.features is None
            else len(dataset) * (1 + inputs.features.views) * encoder.width * dtype.itemsize,
            "robustness_index": None if inputs.features is None else _robustness_index(inputs.features, dataset),
        }
    return {"encoders": {label: costs[label] for label in prepared.encoders}}


def _robustness_index(features: Features, dataset: ImageDataset) -> float | None:
    readable = np.setdiff1d(np.arange(len(dataset)), [*features.unreadable])
    try:
        return sampled_robustness(features, readable, dataset.labels, dataset.domains).index
    except UserError:  # features that are not finite: the models that read them fail by themselves
        return None
