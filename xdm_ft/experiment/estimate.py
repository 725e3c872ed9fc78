"""How long a run will take on this machine: measured on a few steps of each method and a few images, times the plan.

Heads are timed on made-up features of the right width, so that nothing has to be extracted. Nothing is written, no
model is kept, and random numbers of the run stay as they were.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from xdm_ft.encoders import Encoder, TextEncoder
from xdm_ft.evaluation.records import ModelKey
from xdm_ft.experiment.cluster_connection import device_of
from xdm_ft.experiment.image_times import CutPasses, ImageTimes
from xdm_ft.experiment.pieces import SOLVER_PASSES
from xdm_ft.experiment.plan import Plan, PlannedModel
from xdm_ft.experiment.prepare import Prepared, PreparedEncoder, RecipeCut, counted_unhashed, cuts_of, make_job
from xdm_ft.experiment.work import one_thread
from xdm_ft.features import Precision
from xdm_ft.features.cache import Features
from xdm_ft.features.extract import cached_images, frozen_copy
from xdm_ft.runtime.errors import plural
from xdm_ft.runtime.machine import cores, cpu_has_bf16, keep_freed_memory, own_cores
from xdm_ft.runtime.progress import duration
from xdm_ft.training.bank.data import CachedData
from xdm_ft.training.bank.timing import seconds_of, timed
from xdm_ft.training.bank.train import chunks, most_heads
from xdm_ft.training.selection import evaluation_steps, split_of

if TYPE_CHECKING:
    from accelerate import Accelerator

Models = Sequence[PlannedModel]
SMALL_SECONDS = 30.0  # a run that surely takes no longer is not measured
MEASURING_SECONDS = 2.0  # for the heads of all methods together, and as much for the encoder
SECONDS_PER_MODEL = 0.01  # to test a model and to write its files
MADE_UP = 1024  # distinct made-up features
MUCH_FASTER = 2.0  # times; extraction in another precision is then worth a word
NAMED = 5  # methods, at most, that the first line of a resumed run names
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
        several = ", ".join(f"{what} {duration(rounded(s))}" for what, s in parts if s > 0.05 * self.seconds)
        text = f"about {duration(rounded(self.seconds))}"
        text += f" ({several})" if "," in several and self.seconds > 100 else ""
        if self.features_in_bf16 is not None:
            fast, slow = (duration(rounded(seconds)) for seconds in (self.features_in_bf16, self.features))
            text += f"; features.precision=bf16 would take {fast} instead of {slow} for features on this processor"
        return text

    def to_json(self) -> dict[str, Any]:
        """Seconds are null where they were not measured: because of `problem`, or as all takes less than a minute."""
        seconds = {"seconds": self.seconds, "features_seconds": self.features, "training_seconds": self.training}
        seconds["features_seconds_in_bf16"] = self.features_in_bf16
        return {"device": self.device, **seconds, "problem": self.problem, "text": self.text()}


def rounded(seconds: float) -> float:
    """Tens of seconds, as an estimate is not better than that."""
    return max(10.0, round(seconds, -1))


Encoders = Mapping[str | None, Encoder]
"""By their labels in results, as `build_encoders` returns them."""


def estimate(plan: Plan, encoders: Encoders, accelerator: Accelerator, known: Collection[ModelKey] = ()) -> Estimate:
    """Returns the time for all models of the plan but those that are `known`. Takes a few seconds at most.

    A problem that prevents the measurement does not end the run: the estimate names it.
    """
    where = machine(accelerator)
    wanted: list[PlannedModel] = []
    wanted += [model for model in plan.models if not model.skipped and model.key not in known]
    wanted += [model for model in plan.extra if any(key not in known for key in model.serves)]
    of_encoders = [
        _Measured(plan, label, encoder, accelerator, [model for model in wanted if model.item.encoder_label == label])
        for label, encoder in encoders.items()
    ]
    if sum(measured.at_most for measured in of_encoders) < SMALL_SECONDS:
        return Estimate(where)
    keep_freed_memory()  # as the run will do
    precision, on_cpu = plan.recipe.features.precision, accelerator.device.type == "cpu"
    try:
        with torch.random.fork_rng():
            features, in_bf16 = sum(measured.features(precision) for measured in of_encoders), None
            if precision == "fp32" and on_cpu and features > SMALL_SECONDS and cpu_has_bf16():
                in_bf16 = sum(measured.features("bf16") for measured in of_encoders)
            training = sum(measured.training() for measured in of_encoders)
            much_faster = in_bf16 is not None and features >= MUCH_FASTER * in_bf16
            return Estimate(where, features, training, features_in_bf16=in_bf16 if much_faster else None)
    except Exception as error:  # the run itself reports what is wrong, if it is wrong there too
        return Estimate(where, problem=f"{type(error).__name__}: {error}")


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
    left = Counter(key[0] for key in planned if key not in known)
    if not left:
        return f"{machine(accelerator)}: nothing is left to train"
    count, of_methods = plural(len(planned), "model"), ""
    if left.total() < len(planned):
        named = [f"{label}: {plural(n, 'model')}" for label, n in left.items()]
        named[NAMED:] = [f"{len(named) - NAMED} more methods"] if len(named) > NAMED else []
        count, of_methods = f"{left.total()} of {count}", f" ({', '.join(named)})"
    found = estimate(plan, encoders, accelerator, known)
    return f"{found.device}: {count} to train{of_methods}, {found.text()}"


@dataclass(frozen=True)
class _Measured:
    plan: Plan
    label: str | None  # of the encoder
    encoder: Encoder
    accelerator: Accelerator
    models: Models  # of this encoder

    @property
    def at_most(self) -> float:
        """Seconds that the work takes at most, by its number of steps and images: a generous bound."""
        classes, width = len(self.plan.dataset.class_names), self.encoder.width
        seconds = 0.0
        for model in self.models:
            trains_encoder, rows = self._trains_encoder(model), sum(map(len, model.split.train))
            images, steps = SOLVER_PASSES * rows, 1
            if not model.item.is_solver:
                images, steps = model.training.images_per_step(len(model.split.train)) * model.steps, 2 * model.steps
            seconds += STEP * steps + 12 * images * width * classes / SPEED
            if trains_encoder:
                seconds += images * (IMAGE + 6 * self._operations / SPEED)
        missing = self._missing + sum(cut.activations.missing for cut in self._cuts if cut.is_cached)
        return seconds + missing * (IMAGE + self._operations / SPEED)

    @property
    def _operations(self) -> float:
        """Of an image through the encoder, at most: a parameter is used at every fourth pixel of a row and column."""
        parameters = sum(parameter.numel() for parameter in self.encoder.parameters())
        return 2.0 * parameters * max(1, self.encoder.preprocessing.size // 4) ** 2

    @cached_property
    def _missing(self) -> int:
        """The number of features that are not in the cache. Equal images are taken for different ones."""
        recipe = self.plan.recipe
        device = device_of(recipe.cluster, self.accelerator.device)
        if not any(item.trainable is False and item.encoder_label == self.label for item in recipe.served):
            return 0
        found = cached_images(
            self.encoder, self.plan.dataset.decoder, recipe.features, recipe.train_augmentation, device
        )
        return sum(max(0, len(self.plan.dataset) - count) for count in found)

    @cached_property
    def _cuts(self) -> list[RecipeCut]:
        recipe = self.plan.recipe
        device = device_of(recipe.cluster, self.accelerator.device)
        items = [item for item in recipe.served if item.encoder_label == self.label]
        return cuts_of(recipe, self.encoder, items, counted_unhashed(recipe, self.plan.dataset, device))

    @property
    def _times(self) -> ImageTimes:
        return ImageTimes(self.plan.dataset, self.accelerator, MEASURING_SECONDS)

    def _trains_encoder(self, model: PlannedModel) -> bool:
        return model.item.trainable is not False

    def features(self, precision: Precision) -> float:
        """Seconds to compute in this precision what the cache lacks: features, and activations of cuts."""
        settings, seconds = self.plan.recipe.features, 0.0
        wanted: list[tuple[Encoder, int]] = [(self.encoder, self._missing)]
        wanted += [(cut.below, cut.activations.missing) for cut in self._cuts if cut.is_cached]
        for encoder, missing in wanted:
            if missing:
                model = frozen_copy(encoder, precision, self.accelerator.device)
                decode, passes = self._times.whole(model, settings.batch_size, trains=False)
                seconds += missing * self._times.beside(decode, passes.forward)
        return seconds / self.accelerator.num_processes

    def training(self) -> float:
        heads = [model for model in self.models if not self._trains_encoder(model)]
        seconds = SECONDS_PER_MODEL * len(self.models) + self._heads(heads)
        whole = [model for model in self.models if model.item.trainable is True]
        if whole:
            encoder = copy.deepcopy(self.encoder).to(self.accelerator.device).train()
            decode, passes = self._times.whole(encoder, self.plan.recipe.training.batch_size, trains=True)
            seconds += self._end_to_end(whole, CutPasses(decode, 0.0, passes))
        for cut in self._cuts:
            above = [model for model in self.models if model.item.trainable in cut.serves]
            if above:
                one = self._times.cut(cut.below, self.plan.recipe.training.batch_size)
                seconds += self._end_to_end(above, one.cached() if cut.is_cached else one)
        return seconds

    def _end_to_end(self, models: Models, one: CutPasses) -> float:
        """All processes train each model together."""
        seconds = 0.0
        for model in models:
            evaluation, rules = model.split.evaluation, self.plan.rules
            every = len(evaluation_steps(model.steps, model.training.evaluate_every))
            looks = sum(len(evaluation.get(name, ())) for name in {split_of(rule) for rule in rules})
            looked_at = every * looks + len(rules) * sum(map(len, evaluation.values()))
            images = model.training.images_per_step(len(model.split.train)) * model.steps
            seconds += images * self._times.step(one, 2 if model.item.sharpness else 1)
            seconds += looked_at * self._times.beside(one.decode, one.below + one.above.forward)
        return seconds / self.accelerator.num_processes

    def _heads(self, models: Models) -> float:
        """The queue of heads: processes take the longest chunk first."""
        if not models:
            return 0.0
        device = self.accelerator.device
        with one_thread():  # as in the forks that train them
            pieces = [seconds for group in self._by_method(models) for seconds in self._pieces(group, len(models))]
        forks = 1 if device.type != "cpu" else own_cores()
        return max(sum(pieces) / (forks * self.accelerator.num_processes), max(pieces))

    @staticmethod
    def _by_method(models: Models) -> list[list[PlannedModel]]:
        found: dict[str, list[PlannedModel]] = {}
        for model in models:
            found.setdefault(model.item.label, []).append(model)
        return [*found.values()]

    def _pieces(self, group: Models, models: int) -> list[float]:
        """Seconds of the pieces of work of one method's models, all taken for as long as those that are measured."""
        plan, some = self.plan, group[: most_heads(self.accelerator.device)]
        prepared = self._made_up()
        if group[0].item.is_solver:
            return [self._solver(model) for model in group]
        jobs = [make_job(plan, prepared, model, {}) for model in some]
        largest = max(chunks(jobs, self.accelerator.device), key=len)
        features = prepared.of(group[0].item).features_of(largest[0])
        data = CachedData(features, plan.annotations.to(features.device))
        methods = len({model.item.label for model in self.models})
        took = timed(largest, data, plan.criteria, MEASURING_SECONDS / methods)
        every = len(evaluation_steps(group[0].steps, group[0].training.evaluate_every))
        mean_steps = sum(model.steps for model in group) / len(group)
        number = -(-len(group) // len(largest))
        whole = (mean_steps * took.step + every * took.evaluation) * len(group) / (number * len(largest))
        return [whole] * number

    def _solver(self, model: PlannedModel) -> float:
        """Of linear_probe: its passes over all images, and the matrices of its coordinates in float64."""
        if model.item.algorithm.cls.needs_text:
            return 0.0
        rows, width = sum(map(len, model.split.train)), self.encoder.width
        few = min(rows, MADE_UP)
        x, head = torch.randn(few, width), torch.randn(len(self.plan.dataset.class_names), width)
        wide = x.double()
        one_pass = seconds_of(lambda: (head @ x.T).softmax(0) @ x, 0.0) / few
        gram = seconds_of(lambda: wide.T @ wide, 0.0) / few
        return SOLVER_PASSES * (STEP + rows * one_pass) + (rows + 5 * width) * gram

    def _made_up(self) -> Prepared:
        """What a job needs of the prepared inputs, with made-up features and class embeddings."""
        plan, encoder = self.plan, self.encoder
        classes = len(plan.dataset.class_names)
        items = [model.item for model in self.models]
        prompts = {item.block.prompts for item in items if item.reads_text}
        assert not prompts or isinstance(encoder, TextEncoder), "checked with the recipe"
        own = PreparedEncoder(
            encoder,
            weights="",
            features=_MadeUp(encoder.width, plan.recipe.features.views, self.accelerator.device),
            text_weights={of: torch.randn(classes, encoder.width) for of in prompts},
            activations={},
        )
        return Prepared({item.encoder_label: own for item in items}, unreadable={}, content="")


class _MadeUp(Features):
    """Random features of any number of rows, a few of them distinct."""

    def __init__(self, width: int, views: int, device: torch.device) -> None:
        super().__init__([torch.randn(MADE_UP, width)], device=device)
        self.views = views

    def _read(self, positions: Tensor, end: int) -> Tensor:
        return super()._read(positions % MADE_UP, MADE_UP)
