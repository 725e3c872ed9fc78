"""How long a run takes on this machine, and what its cuts and encoders cost.

A step of one chunk of each method and a batch of each encoder are timed, and multiplied by the plan. Heads are timed
on made-up features of the right width, so that nothing has to be extracted. Nothing is written, no model is kept, and
random numbers of the run stay as they were.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from xdm_ft.cut.cut import Below
from xdm_ft.encoders import Encoder, TextEncoder
from xdm_ft.evaluation.records import ModelKey
from xdm_ft.experiment.cluster import device_of
from xdm_ft.experiment.pieces import SOLVER_PASSES
from xdm_ft.experiment.plan import Plan, PlannedModel
from xdm_ft.experiment.prepare import Prepared, PreparedEncoder, RecipeCut, counted_unhashed, cuts_of, make_job
from xdm_ft.experiment.summary import trained_words
from xdm_ft.experiment.work import one_thread
from xdm_ft.features import FeatureSettings, Precision
from xdm_ft.features.cache import Features
from xdm_ft.features.extract import cached_images, frozen_copy
from xdm_ft.images.decode import UnreadableImage
from xdm_ft.images.loader import DTYPES
from xdm_ft.images.transforms import evaluation_transform
from xdm_ft.runtime.errors import plural
from xdm_ft.runtime.machine import cores, cpu_has_bf16, keep_freed_memory, own_cores
from xdm_ft.runtime.progress import duration
from xdm_ft.runtime.tensors import Batch, Criteria
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
Models = Sequence[PlannedModel]
SMALL_SECONDS = 30.0  # a run that surely takes no longer is not measured
MEASURING_SECONDS = 2.0  # for the heads of all methods together
SECONDS_PER_MODEL = 0.01  # to test a model and to write its files
TIMING_SECONDS = 0.1  # of a batch, which is repeated so long
DECODED_IMAGES = 4  # that are timed
ENCODED_IMAGES = {"cpu": 4, "cuda": 64}  # at most, in the batch that is timed
MADE_UP_ROWS = 1024  # distinct made-up features
MEASURED_STEPS = (0.95, 0.05, 0.5)  # shares of a training: a step late in it may do more than one in a warm-up
MUCH_FASTER = 2.0  # times; extraction in another precision is then worth a word
MAX_NAMED = 5  # methods that the first line of a resumed run names
# a generous bound, for runs that need no measurement: seconds of the fixed cost of a head's step and of an image that
# is decoded, operations per second
STEP, IMAGE, SPEED = 2e-3, 5e-3, 1e10


@dataclass(frozen=True)
class Estimate:
    """The time that extraction and training will take; None if it was not measured: too little work, or a problem."""

    device: str  # and the number of cores or processes
    features: float | None = None  # seconds of extraction
    training: float | None = None  # seconds of training
    problem: str | None = None  # why it could not be measured
    features_in_bf16: float | None = None  # seconds of extraction, where it would be at least twice as fast

    @property
    def seconds(self) -> float | None:
        return None if self.features is None or self.training is None else self.features + self.training

    def text(self) -> str:
        if self.problem is not None:
            return f"the time could not be measured ({self.problem})"
        if self.seconds is None or self.features is None or self.training is None:
            return "less than a minute"
        parts = [("features", self.features), ("training", self.training)]
        several = ", ".join(f"{what} {_duration(s)}" for what, s in parts if s > 0.05 * self.seconds)
        text = f"about {_duration(self.seconds)}"
        text += f" ({several})" if "," in several and self.seconds > 100 else ""
        if self.features_in_bf16 is not None:
            fast, slow = _duration(self.features_in_bf16), _duration(self.features)
            text += f"; features.precision=bf16 would take {fast} instead of {slow} for features on this processor"
        return text

    def to_json(self) -> dict[str, Any]:
        """Seconds are null where they were not measured: because of `problem`, or as all takes less than a minute."""
        seconds = {"seconds": self.seconds, "features_seconds": self.features, "training_seconds": self.training}
        seconds["features_seconds_in_bf16"] = self.features_in_bf16
        return {"device": self.device, **seconds, "problem": self.problem, "text": self.text()}


def _duration(seconds: float) -> str:
    """Tens of seconds, as an estimate is not better than that."""
    return duration(max(10.0, round(seconds, -1)))


def estimate(plan: Plan, encoders: Encoders, accelerator: Accelerator, known: Collection[ModelKey] = ()) -> Estimate:
    """Returns the time for all models of the plan but those that are `known`. Takes a few seconds at most.

    A problem that prevents the measurement does not end the run: the estimate names it.
    """
    where = machine(accelerator)
    models = [model for model in plan.models if not model.skipped and model.key not in known]
    models += [model for model in plan.extra if any(key not in known for key in model.serves)]
    works = [
        _Work(plan, label, encoder, accelerator, [model for model in models if model.item.encoder_label == label])
        for label, encoder in encoders.items()
    ]
    if sum(work.bound() for work in works) < SMALL_SECONDS:
        return Estimate(where)
    keep_freed_memory()  # as the run will do
    on_cpu = accelerator.device.type == "cpu"
    try:
        with torch.random.fork_rng():
            features, in_bf16 = sum(work.features() for work in works), None
            is_slow = plan.recipe.features.precision == "fp32" and on_cpu and features > SMALL_SECONDS
            if is_slow and cpu_has_bf16():
                in_bf16 = sum(work.features("bf16") for work in works)
            training = sum(work.training() for work in works)
    except Exception as error:  # the run itself reports what is wrong, if it is wrong there too
        return Estimate(where, problem=f"{type(error).__name__}: {error}")
    is_faster = in_bf16 is not None and features >= MUCH_FASTER * in_bf16
    return Estimate(where, features, training, features_in_bf16=in_bf16 if is_faster else None)


def machine(accelerator: Accelerator) -> str:
    """Returns the device of a run, with the number of cores and of launched processes."""
    device, ranks = accelerator.device, accelerator.num_processes
    if device.type == "cpu":
        name = f"cpu ({plural(cores(), 'core')})"
    else:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return name + (f", {ranks} processes" if ranks > 1 else "")


def first_line(plan: Plan, encoders: Encoders, accelerator: Accelerator, known: Collection[ModelKey]) -> str:
    """Returns what a run says first: device, number of models and the time for those that are not `known`."""
    planned = [model.key for model in plan.models if not model.skipped]
    left = Counter(key.method for key in planned if key not in known)
    if not left:
        return f"{machine(accelerator)}: nothing is left to train"
    count, of_methods = plural(len(planned), "model"), ""
    if left.total() < len(planned):
        named = [f"{label}: {plural(n, 'model')}" for label, n in left.items()]
        named[MAX_NAMED:] = [f"{len(named) - MAX_NAMED} more methods"] if len(named) > MAX_NAMED else []
        count, of_methods = f"{left.total()} of {count}", f" ({', '.join(named)})"
    time = estimate(plan, encoders, accelerator, known)
    return f"{time.device}: {count} to train{of_methods}, {time.text()}"


class ImageSeconds(NamedTuple):
    """Seconds for one image in a batch: to be decoded by one process, and through an encoder."""

    decode: float
    below: float  # through what is frozen, which may be the whole encoder
    forward: float = 0.0  # through what trains
    train: float = 0.0  # forward and backward

    def cached(self) -> ImageSeconds:
        """The same, when activations are read from the cache. The time of reading is not counted."""
        return self._replace(decode=0.0, below=0.0)

    def step(self, device: torch.device, gradients: int = 1) -> float:
        """Seconds of a training step per image; `gradients`: forward and backward passes of a step."""
        return self._beside_decoding(self.below + gradients * self.train, device)

    def prediction(self, device: torch.device) -> float:
        return self._beside_decoding(self.below + self.forward, device)

    def _beside_decoding(self, encode: float, device: torch.device) -> float:
        """All cores decode: on a CPU, decoding and the encoder share them."""
        decode = self.decode / own_cores()
        return encode + decode if device.type == "cpu" else max(encode, decode)


def frozen_seconds(plan: Plan, encoder: Encoder, precision: Precision, accelerator: Accelerator) -> ImageSeconds:
    """Measures an encoder, or the part of it below a cut, as an extraction uses it."""
    decode, pixels = _decode(plan, encoder)
    model = frozen_copy(encoder, precision, accelerator.device)
    return ImageSeconds(decode, _forward(model, pixels.to(DTYPES[precision]), accelerator))


def trained_seconds(plan: Plan, encoder: Encoder, accelerator: Accelerator) -> ImageSeconds:
    """Measures a copy of a whole encoder as it trains."""
    decode, pixels = _decode(plan, encoder)
    model = copy.deepcopy(encoder).to(accelerator.device).train()
    _as_it_trains(model)
    return ImageSeconds(decode, 0.0, _forward(model, pixels, accelerator), _train(model, pixels, accelerator))


def cut_seconds(plan: Plan, below: Below, accelerator: Accelerator) -> ImageSeconds:
    """Measures a copy of a cut encoder as it trains."""
    decode, pixels = _decode(plan, below)
    part = copy.deepcopy(below).to(accelerator.device).cut
    _as_it_trains(part.encoder)
    part.freeze()
    part.train_above()
    with torch.no_grad(), accelerator.autocast():
        activations = part.below(pixels.to(accelerator.device)).float()
    lower, upper = _forward(part.below, pixels, accelerator), _forward(part.above, activations, accelerator)
    return ImageSeconds(decode, lower, upper, _train(part.above, activations, accelerator))


def _as_it_trains(encoder: nn.Module) -> None:
    if is_cnn(encoder):
        encoder.to(memory_format=torch.channels_last)


def _decode(plan: Plan, encoder: Encoder) -> tuple[float, Tensor]:
    """Returns the seconds to decode and transform an image, and a few images, float32 [n,3,S,S]."""
    dataset, preprocessing = plan.dataset, encoder.preprocessing
    transform, images, seconds = evaluation_transform(preprocessing), list[Tensor](), list[float]()

    def read(row: int) -> None:
        images.append(transform(dataset.draft(row, preprocessing.least_side)))

    for row in np.linspace(0, len(dataset) - 1, 4 * DECODED_IMAGES).astype(int).tolist():
        try:
            seconds += [seconds_of(partial(read, row), 0.0)] if len(images) < DECODED_IMAGES else []
        except UnreadableImage:  # extraction reports it
            continue
    if not images:
        raise ValueError("none of the images that were tried decodes")
    return min(seconds), torch.stack(images)


def _batch(inputs: Tensor, accelerator: Accelerator) -> Tensor:
    """Returns `inputs` [n,…], repeated to the batch that is timed."""
    count = max(2, ENCODED_IMAGES.get(accelerator.device.type, 4))  # batch norm needs two
    repeated = inputs.repeat(-(-count // len(inputs)), *[1] * (inputs.ndim - 1))
    return repeated[:count].to(accelerator.device)


def _forward(model: Callable[[Tensor], Tensor], inputs: Tensor, accelerator: Accelerator) -> float:
    x = _batch(inputs, accelerator)
    with torch.inference_mode(), accelerator.autocast():
        model(x)  # the first call of a size allocates
        return seconds_of(lambda: model(x), TIMING_SECONDS) / len(x)


def _train(model: Callable[[Tensor], Tensor], inputs: Tensor, accelerator: Accelerator) -> float:
    x = _batch(inputs, accelerator)

    def step() -> None:
        with accelerator.autocast():
            z = model(x)
        z.float().square().mean().backward()

    step()
    return seconds_of(step, TIMING_SECONDS) / len(x)


@dataclass(frozen=True)
class _Work:
    """The work of a run under one encoder."""

    plan: Plan
    label: str | None  # of the encoder
    encoder: Encoder
    accelerator: Accelerator
    models: Models  # of this encoder

    def bound(self) -> float:
        """Returns the seconds that the work takes at most, by its number of steps and images: a generous bound."""
        classes, width = len(self.plan.dataset.class_names), self.encoder.width
        parameters = sum(parameter.numel() for parameter in self.encoder.parameters())
        # of an image through the encoder: a parameter is used at every fourth pixel of a row and column
        operations = 2.0 * parameters * max(1, self.encoder.preprocessing.size // 4) ** 2
        seconds = sum(missing for _, missing in self._missing) * (IMAGE + operations / SPEED)
        for model in self.models:
            images, steps = SOLVER_PASSES * sum(map(len, model.split.train)), 1
            if not model.item.is_solver:
                images, steps = model.training.images_per_step(len(model.split.train)) * model.steps, 2 * model.steps
            seconds += STEP * steps + 12 * images * width * classes / SPEED
            seconds += images * (IMAGE + 6 * operations / SPEED) if model.item.trainable is not False else 0.0
        return seconds

    @cached_property
    def _cuts(self) -> list[RecipeCut]:
        recipe, device = self.plan.recipe, device_of(self.plan.recipe.cluster, self.accelerator.device)
        items = [item for item in recipe.served if item.encoder_label == self.label]
        return cuts_of(recipe, self.encoder, items, counted_unhashed(recipe, self.plan.dataset, device))

    @cached_property
    def _missing(self) -> list[tuple[Encoder, int]]:
        """Encoders and parts below cuts, with the number of images that the cache lacks; equal ones count each."""
        recipe, dataset = self.plan.recipe, self.plan.dataset
        missing: list[tuple[Encoder, int]] = []
        if any(item.trainable is False and item.encoder_label == self.label for item in recipe.served):
            device = device_of(recipe.cluster, self.accelerator.device)
            counts = cached_images(self.encoder, dataset.decoder, recipe.features, recipe.train_augmentation, device)
            missing.append((self.encoder, sum(max(0, len(dataset) - count) for count in counts)))
        missing += [(cut.below, cut.activations.missing) for cut in self._cuts if cut.is_cached]
        return [(encoder, count) for encoder, count in missing if count]

    def features(self, precision: Precision | None = None) -> float:
        """Returns the seconds to compute what the cache lacks: features, and activations of cuts."""
        seconds, precision = 0.0, precision or self.plan.recipe.features.precision
        for encoder, count in self._missing:
            image = frozen_seconds(self.plan, encoder, precision, self.accelerator)
            seconds += count * image.prediction(self.accelerator.device)
        return seconds / self.accelerator.num_processes

    def training(self) -> float:
        seconds = SECONDS_PER_MODEL * len(self.models)
        seconds += self._heads([model for model in self.models if model.item.trainable is False])
        if models := [model for model in self.models if model.item.trainable is True]:
            seconds += self._end_to_end(models, trained_seconds(self.plan, self.encoder, self.accelerator))
        for cut in self._cuts:
            if models := [model for model in self.models if model.item.trainable in cut.serves]:
                image = cut_seconds(self.plan, cut.below, self.accelerator)
                seconds += self._end_to_end(models, image.cached() if cut.is_cached else image)
        return seconds

    def _end_to_end(self, models: Models, image: ImageSeconds) -> float:
        """All processes train each model together."""
        device, rules, seconds = self.accelerator.device, self.plan.rules, 0.0
        for model in models:
            sizes = {name: len(rows) for name, rows in model.split.evaluation.items()}
            evaluations = len(evaluation_steps(model.steps, model.training.evaluate_every))
            predicted = evaluations * sum(sizes.get(name, 0) for name in {split_of(rule) for rule in rules})
            predicted += len(rules) * sum(sizes.values())
            trained = model.training.images_per_step(len(model.split.train)) * model.steps
            seconds += trained * image.step(device, 2 if model.item.sharpness else 1)
            seconds += predicted * image.prediction(device)
        return seconds / self.accelerator.num_processes

    def _heads(self, models: Models) -> float:
        """The queue of heads: processes take the longest chunk first."""
        labels = dict.fromkeys(model.item.label for model in models)
        with one_thread():  # as in the forks that train them
            pieces = [
                seconds
                for label in labels
                for seconds in self._pieces([model for model in models if model.item.label == label], len(labels))
            ]
        forks = 1 if self.accelerator.device.type != "cpu" else own_cores()
        return max(sum(pieces) / (forks * self.accelerator.num_processes), max(pieces)) if pieces else 0.0

    def _pieces(self, group: Models, methods: int) -> list[float]:
        """Returns the seconds of the pieces of work of one method's models. One chunk is measured for all."""
        first, device = group[0], self.accelerator.device
        if first.item.is_solver:
            return [self._solver(model) for model in group]
        prepared = self._made_up()
        jobs = [make_job(self.plan, prepared, model, {}) for model in group[: max_heads(device)]]
        largest = max(chunks(jobs, device), key=len)
        features = prepared.for_method(first.item).features_of(largest[0])
        data = CachedData(features, self.plan.annotations.to(features.device))
        step_seconds, evaluation_seconds = head_seconds(largest, data, self.plan.criteria, MEASURING_SECONDS / methods)
        evaluations = len(evaluation_steps(first.steps, first.training.evaluate_every))
        mean_steps = sum(model.steps for model in group) / len(group)
        number = -(-len(group) // len(largest))
        chunk = mean_steps * step_seconds + evaluations * evaluation_seconds
        return [chunk * len(group) / (number * len(largest))] * number

    def _solver(self, model: PlannedModel) -> float:
        """Of linear_probe: its passes over all images, and the matrices of its coordinates in float64."""
        if model.item.algorithm.cls.needs_text:
            return 0.0
        rows, width = sum(map(len, model.split.train)), self.encoder.width
        few = min(rows, MADE_UP_ROWS)
        x, head = torch.randn(few, width), torch.randn(len(self.plan.dataset.class_names), width)
        wide = x.double()
        one_pass = seconds_of(lambda: (head @ x.T).softmax(0) @ x, 0.0) / few
        gram = seconds_of(lambda: wide.T @ wide, 0.0) / few
        return SOLVER_PASSES * (STEP + rows * one_pass) + (rows + 5 * width) * gram

    def _made_up(self) -> Prepared:
        """Returns what a job needs of the prepared inputs, with made-up features and class embeddings."""
        encoder, classes = self.encoder, len(self.plan.dataset.class_names)
        items = [model.item for model in self.models]
        prompts = {item.block.prompts for item in items if item.reads_text}
        assert not prompts or isinstance(encoder, TextEncoder), "checked with the recipe"
        inputs = PreparedEncoder(
            encoder,
            weights="",
            features=_MadeUp(encoder.width, self.plan.recipe.features.views, self.accelerator.device),
            text_weights={one: torch.randn(classes, encoder.width) for one in prompts},
            activations={},
        )
        return Prepared({item.encoder_label: inputs for item in items}, unreadable={}, content="")


def head_seconds(jobs: Sequence[Job], data: CachedData, criteria: Criteria, seconds: float) -> tuple[float, float]:
    """Measures for about `seconds`; returns the seconds of a step of a chunk of heads, and of an evaluation."""
    bank, means, started = Bank(jobs, data.features.device), list[float](), time.perf_counter()
    for share in MEASURED_STEPS:
        first = int(share * len(bank.factors))
        began = time.perf_counter()
        batch = next(batches(jobs, data, first))
        draws = (time.perf_counter() - began) / min(BLOCK_STEPS, len(bank.factors) - first)  # rows of many steps

        def work(batch: Batch = batch, first: int = first) -> None:
            bank.optimizer.reset()  # it counts its steps, and is not made for more than the training has
            step(bank, batch, first)

        work()  # a first call may compile, or allocate
        means.append(draws + seconds_of(work, 0.1 * seconds))
        if time.perf_counter() - started > seconds:
            break
    validation = BankValidation(jobs, data, criteria)
    return sum(means) / len(means), seconds_of(lambda: validation.values(bank.template, bank.main), 0.0)


def seconds_of(work: Callable[[], object], seconds: float) -> float:
    """Returns the median time of at least one call of `work`, and of more until `seconds` have passed.

    Not the shortest time: what else the machine does now will slow the run too. Not the mean: a call that waits for a
    core which another program holds may take many times as long as the others.
    """
    started, times = time.perf_counter(), list[float]()
    while not times or time.perf_counter() - started < seconds:
        began = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


class _MadeUp(Features):
    """Random features of any number of rows, a few of them distinct."""

    def __init__(self, width: int, views: int, device: torch.device) -> None:
        super().__init__([torch.randn(MADE_UP_ROWS, width)], device=device)
        self.views = views

    def _read(self, positions: Tensor, end: int) -> Tensor:
        return super()._read(positions % MADE_UP_ROWS, MADE_UP_ROWS)


@dataclass(frozen=True)
class CutCost:
    """A cut, and the seconds of a step above it. Equal images are counted as different ones."""

    encoder: str | None  # label
    cut: RecipeCut
    images: int  # of a step
    device: torch.device
    seconds: ImageSeconds | None  # None: it could not be measured
    problem: str | None = None  # why it could not be measured

    def text(self) -> list[str]:
        serves = ", ".join(map(trained_words, self.cut.serves))
        line = f"{'' if self.encoder is None else f'{self.encoder}, '}{serves}: {self.cut.text()}"
        if self.seconds is None:
            return [line, f"its saving could not be measured ({self.problem})"]
        found = self._measured(self.seconds)
        share = f"{100 * found['share_below']:.0f}% of the encoder's forward pass lies below"
        computed, cached = (found[f"{way}_step_seconds"] for way in ("computed", "cached"))
        step = f"a step of {self.images} images: computed {computed:.3g} s, cached {cached:.3g} s"
        return [line, f"{share}; {step} (without reading)"]

    def _measured(self, one: ImageSeconds) -> dict[str, Any]:
        whole = one.below + one.forward
        speeds = {"whole": 1 / whole, "below": 1 / one.below, "above_forward_backward": 1 / one.train}
        return {
            "share_below": one.below / whole,
            "images_per_second": speeds,
            "step_images": self.images,
            "computed_step_seconds": self.images * one.step(self.device),
            "cached_step_seconds": self.images * one.cached().step(self.device),
        }

    def to_json(self) -> dict[str, Any]:
        """Seconds and shares are null if they could not be measured."""
        cut, unknown = self.cut, dict.fromkeys(("share_below", "images_per_second"))
        steps = {"step_images": self.images, "computed_step_seconds": None, "cached_step_seconds": None}
        return {
            "encoder": self.encoder,
            "trainable": [trained_words(trainable) for trainable in cut.serves],
            "before": cut.below.cut.name,
            "shape": cut.below.cut.shape,
            "activations": cut.activations.all,
            "bytes": cut.bytes,
            "missing_bytes": cut.missing_bytes,
            "is_cached": cut.is_cached,
            "why_computed": cut.why_computed or None,
            **(unknown | steps if self.seconds is None else self._measured(self.seconds)),
            "problem": self.problem,
        }


def cut_costs(plan: Plan, encoders: Encoders, accelerator: Accelerator) -> list[CutCost]:
    """Returns the costs of all cuts of the plan's recipe, measured on a few of its images. Writes nothing."""
    recipe, costs = plan.recipe, list[CutCost]()
    images = recipe.training.images_per_step(max(len(split.train) for split in plan.splits))
    count = counted_unhashed(recipe, plan.dataset, device_of(recipe.cluster, accelerator.device))
    for label, encoder in encoders.items():
        items = [item for item in recipe.served if item.encoder_label == label]
        for cut in cuts_of(recipe, encoder, items, count):
            seconds, problem = None, None
            try:
                with torch.random.fork_rng():
                    seconds = cut_seconds(plan, cut.below, accelerator)
            except Exception as error:  # the run itself reports what is wrong, if it is wrong there too
                problem = f"{type(error).__name__}: {error}"
            costs.append(CutCost(label, cut, images, accelerator.device, seconds, problem))
    return costs


def encoder_costs(
    prepared: Prepared, settings: FeatureSettings, images: int, accelerator: Accelerator, before: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns `environment.encoders` of results.json, what each of several encoders costs: {} for one encoder.

    `before`: what an earlier process of this run has measured, which is kept.
    """
    if None in prepared.encoders:
        return {}
    known = before.get("encoders", {})
    costs = {}
    for label, inputs in prepared.encoders.items():
        encoder, identity = inputs.encoder, inputs.encoder.identity()
        stored = (1 + settings.views) * encoder.width * DTYPES[settings.precision].itemsize
        costs[label] = known.get(label) or {
            "component": identity["component"],
            "model": identity.get("model"),
            "pretraining": encoder.pretraining,
            "width": encoder.width,
            "parameters": sum(one.numel() for one in encoder.parameters() if one.requires_grad),  # without a text side
            "ms_per_image": round(1e3 * _seconds_per_image(encoder, settings.precision, accelerator), 3),
            "feature_bytes": None if inputs.features is None else images * stored,
        }
    return {"encoders": costs}


def _seconds_per_image(encoder: Encoder, precision: Precision, accelerator: Accelerator) -> float:
    """Returns the time of an image's forward pass in a batch, without decoding, measured on black images."""
    size = encoder.preprocessing.size
    black = torch.zeros(2, 3, size, size, dtype=DTYPES[precision]).contiguous(memory_format=torch.channels_last)
    return _forward(frozen_copy(encoder, precision, accelerator.device), black, accelerator)
