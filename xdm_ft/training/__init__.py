"""Training: the head bank (many heads on cached features), the end-to-end loop (one model), solvers, selection."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Annotated, Any, Literal, ParamSpec, Protocol, TypeVar

import torch
from pydantic import BeforeValidator, Field, ValidationInfo
from torch import Tensor

from xdm_ft.algorithms import Algorithm, LossAverage, Setup, Solver
from xdm_ft.augmentations import NO_AUGMENTATION, Augmentations
from xdm_ft.averaging import Averaging
from xdm_ft.core import ModelKey, OfModel
from xdm_ft.protocol.samplers import MAX_STEPS, BatchSampler, SamplerName, sampler
from xdm_ft.protocol.splits import Split
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.settings import Block, Problem
from xdm_ft.sharpness import Sharpness

P = ParamSpec("P")
R = TypeVar("R")
ClassWeights = Literal["none", "balanced"]
MixedPrecision = Literal["no", "bf16", "fp16"]
"""The precision of a trainable encoder's computation; no: float32."""
MAX_GRAPHS = 256  # of one compiled function: kinds of heads, their numbers, phases


class Schedule(Block):
    """The learning-rate schedule: a factor of `lr` and `encoder_lr` at every step."""

    name: Annotated[
        Literal["constant", "cosine"], Field(description="factor after the warm-up; cosine: falls from 1 to 0")
    ] = "constant"
    warmup_steps: Annotated[int, Field(ge=0, description="first steps, in which the factor rises linearly")] = 0

    def factor(self, step: int, steps: int) -> float:
        """Returns the factor of the learning rates at `step` (0…steps−1).

        The warm-up rises linearly, (step + 1) / (warmup_steps + 1), so that no step is wasted on a learning rate of 0.
        Cosine then falls as ½[1 + cos(π t / T)] after t of the T remaining steps, from 1 to 0 after the last one
        (Loshchilov & Hutter 2017; torch's `CosineAnnealingLR` with T_max = T).
        """
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.name == "constant":
            return 1.0
        return 0.5 * (1 + math.cos(math.pi * (step - self.warmup_steps) / (steps - self.warmup_steps)))


ADAMW_DECAY = 0.01  # of torch.optim.AdamW: without a decay it is Adam


def _default_decay(value: float | None, info: ValidationInfo) -> float:
    if value is not None:
        return value
    # info.data holds the fields that are declared above this one: `optimizer` must stay above `weight_decay`
    return ADAMW_DECAY if info.data.get("optimizer") == "adamw" else 0.0


class Training(Block):
    """How models are trained, by either engine."""

    batch_size: Annotated[
        int, Field(ge=1, le=1_000_000, description="images per training domain; in total if pooled")
    ] = 32
    sampler: Annotated[
        SamplerName,
        Field(
            description="per_domain: batch_size images from every training domain; class_balanced: the same, with "
            "equal numbers per class in a domain; pooled: batch_size images from all domains together"
        ),
    ] = "per_domain"
    steps: Annotated[int | None, Field(ge=1, le=MAX_STEPS, description="training steps; null: from epochs")] = None
    epochs: Annotated[
        float | None, Field(gt=0, le=1_000_000, description="passes over the training images (pooled only)")
    ] = None
    optimizer: Annotated[Literal["sgd", "adam", "adamw"], Field(description="as in torch.optim")] = "adam"
    amsgrad: Annotated[bool, Field(description="adam and adamw: use the largest second moment so far")] = False
    lr: Annotated[float, Field(gt=0, description="learning rate of heads")] = 1e-3
    encoder_lr: Annotated[float, Field(gt=0, description="learning rate of a trainable encoder")] = 5e-5
    layer_decay: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            description="factor of encoder_lr per block of the encoder, counted from the end (ELECTRA, BEiT); 1: none",
        ),
    ] = 1.0
    weight_decay: Annotated[float, BeforeValidator(_default_decay)] = Field(
        default=None,
        validate_default=True,
        ge=0,
        description="sgd, adam: L2 penalty of all parameters (as in DomainBed); adamw: decoupled decay of weights "
        f"alone, not of biases, norms and temperatures; null: {ADAMW_DECAY} for adamw, else 0",
    )
    momentum: Annotated[float, Field(ge=0, lt=1, description="sgd: momentum")] = 0.9
    beta1: Annotated[float, Field(ge=0, lt=1, description="adam and adamw: decay of the mean gradient")] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1, description="adam and adamw: decay of the mean square")] = 0.999
    schedule: Annotated[Schedule, Field(description="learning rate over the steps")] = Schedule()
    clip_norm: Annotated[
        float | None, Field(gt=0, description="largest gradient norm of encoder and class head; null: no clipping")
    ] = None
    accumulation: Annotated[int, Field(ge=1, le=1_000_000, description="micro-batches per step (end to end only)")] = 1
    mixed_precision: Annotated[
        MixedPrecision | None,
        BeforeValidator(lambda value: "no" if value is False else value),  # what YAML reads where `no` is written
        Field(
            description="autocast of a trainable encoder (end to end only). null: the value of `accelerate launch "
            "--mixed_precision`, or no; bf16 also works on CPUs that compute in it (`xdm-ft doctor` tells)"
        ),
    ] = None
    tf32: Annotated[
        bool,
        Field(
            description="on a GPU: compute float32 products and convolutions in TF32, with 10 bits of mantissa instead "
            "of 23; faster, less precise; the protocol line says so"
        ),
    ] = False
    compile: Annotated[
        bool,
        Field(
            description="compile a trainable encoder and the steps of heads on cached features (not XDomainMix's, "
            "which have their own kernels) with torch.compile; rounding differs, and the first steps take long"
        ),
    ] = False
    profile: Annotated[
        bool,
        Field(description="write a trace of five steps per method (torch's profiler) into `profiles/` of the run"),
    ] = False
    evaluate_every: Annotated[
        int | None, Field(ge=1, description="steps between evaluations; null: a twentieth of the steps")
    ] = None
    patience: Annotated[
        int | None,
        Field(
            ge=1,
            description="a model stops after this number of evaluations in a row without a better value by the "
            "recipe's selection rule; null: never",
        ),
    ] = None
    loss_average: Annotated[
        LossAverage, Field(description="domain: mean per domain, then over domains (as the paper); sample: batch mean")
    ] = "domain"
    class_weights: Annotated[
        ClassWeights,
        Field(
            description="weights of the class losses; balanced: w = n / (classes · n_c) for a class with n_c of n "
            "training images, and means are Σ w ℓ / Σ w"
        ),
    ] = "none"

    def decays(self, axes: int) -> bool:
        """Returns whether `weight_decay` acts on a parameter with this number of axes.

        AdamW's acts on weights alone, which have two axes or more: matrices, convolutions, embeddings. Biases, scales
        of norms and temperatures have fewer.
        """
        return axes >= 2 or self.optimizer != "adamw"

    def images_per_step(self, domains: int) -> int:
        """Returns the size of a step's batch, given the number of training domains."""
        return self.batch_size * (1 if self.sampler == "pooled" else domains)

    def problems(self, trains_encoders: bool) -> Iterator[Problem]:
        """Yields the settings that do not go together, or that have no effect unless an encoder trains."""
        if self.steps is not None and self.epochs is not None:
            yield Problem("training.epochs", "both steps and epochs are given; keep one")
        elif self.steps is None and self.epochs is None:
            yield Problem("training.steps", "give steps or epochs")
        if self.epochs is not None and self.sampler != "pooled":
            problem = f"an epoch needs sampler: pooled; {self.sampler} draws with replacement, give steps"
            yield Problem("training.epochs", problem, ("training.sampler",))
        if self.steps is not None and self.schedule.warmup_steps >= self.steps:
            problem = f"{self.schedule.warmup_steps} must be less than training.steps ({self.steps}); lower it"
            yield Problem("training.schedule.warmup_steps", problem, ("training.steps",))
        if self.amsgrad and self.optimizer == "sgd":
            problem = "is only for adam and adamw; leave it out, or use one of them"
            yield Problem("training.amsgrad", problem, ("training.optimizer",))
        # "no" says what a frozen encoder does anyway, so it is no fault
        for key in ("mixed_precision", "accumulation", "layer_decay"):
            if not trains_encoders and getattr(self, key) not in (type(self).model_fields[key].default, "no"):
                problem = "has no effect with a frozen encoder; leave it out (for precision set features.precision)"
                yield Problem(f"training.{key}", problem, ("encoder.trainable",))


def compile_function(function: Callable[P, R], **options: Any) -> Callable[P, R]:
    """Returns the function, compiled at its first call and for each new shape; `options`: those of torch.compile.

    Raises `UserError` if torch is too old; a call does if this machine lacks a compiler.
    """
    import torch._dynamo.config as config
    from torch._dynamo.exc import BackendCompilerFailed

    if not hasattr(config, "trace_autograd_ops"):
        raise UserError(
            f"training.compile: needs torch 2.11 or later, and this is {torch.__version__}; update torch, or set "
            "training.compile=false"
        )
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns of a GPU that is not asked for
    compiled_function = torch.compile(function, **options)

    @wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        try:
            # a step takes gradients inside
            with config.patch(trace_autograd_ops=True, recompile_limit=MAX_GRAPHS):
                return compiled_function(*arguments, **named)
        except BackendCompilerFailed as error:
            reason = (str(error.inner_exception).strip().splitlines() or [type(error.inner_exception).__name__])[0]
            raise UserError(
                f"training.compile: torch.compile fails here ({reason}); install a C++ compiler (g++), or set "
                "training.compile=false"
            ) from error

    return call


def balanced_class_weight(labels: Tensor, num_classes: int) -> Tensor:
    """Returns w_c = n / (C n_c), float32 [num_classes], for `labels` int64 [n] of which n_c are class c.

    C is the number of classes that occur; the weight of any other class is 0. As scikit-learn's
    class_weight="balanced": every class has the same sum of weights, and their mean over the images is 1.
    """
    count = labels.bincount(minlength=num_classes)
    present = count > 0
    weight = len(labels) / (present.sum() * count.clamp(min=1).double())
    return torch.where(present, weight, 0.0).float()


RuleValues = dict[str, dict[int, float]]
"""{selection rule: {number of steps taken: value of the selection metric}}"""


@dataclass(frozen=True)
class Job(OfModel):
    """One model to train, as an engine gets it."""

    key: ModelKey
    split: Split
    setup: Setup
    make: Callable[[Setup], Algorithm | Solver]  # builds its method; each call returns an equal one
    sharpness: Sharpness | None
    training: Training  # with the values that a search drew for it
    averaging: Averaging | None = None
    normalized: bool = False  # whether cached features are L2-normalised before training
    augmentations: Augmentations = NO_AUGMENTATION  # of its training images
    external_values: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """`RuleValues` of rules that use other models' values: nothing is measured on this model's images."""

    def new_method(self) -> Algorithm | Solver:
        """Returns its method before training."""
        return self.make(self.setup)

    def new_algorithm(self) -> Algorithm:
        """Returns its method before training, which is trained by gradient steps."""
        method = self.new_method()
        assert isinstance(method, Algorithm), f"{self.method} has no gradient steps"
        return method

    def sampler(self, labels: Tensor) -> BatchSampler:
        """Returns the sampler of its batches, which draws rows on the device of all images' `labels` (int64 [N])."""
        training, pools = self.training, [pool.to(labels.device) for pool in self.split.train]
        return sampler(training.sampler, pools, training.batch_size, self.seed, labels)


ScalarSink = Callable[[int, list[tuple[Job, dict[str, float]]]], None]
"""Receives, at each evaluation, the number of steps taken and {scalar: value} of each model that was evaluated."""


@dataclass(frozen=True)
class Selected:
    """The step that one selection rule picked, and the weights after it."""

    step: int  # number of steps taken; for averaged weights, the last step of the average
    state: dict[str, Tensor]  # parameters and buffers on the CPU: `head.weight`, …; end to end also `encoder.…`
    hparams: dict[str, float | None] = field(default_factory=dict)  # what a solver varied, or the steps of an average
    curve: list[dict[str, float | None]] = field(default_factory=list)  # measurements of `best_finish`
    value: float | None = None  # value of the metric by which the rule picked it; None for averaged weights


@dataclass(frozen=True)
class Trained:
    """The result of a job, which an engine returns."""

    job: Job
    selected: dict[str, Selected]  # by selection rule
    mixed_steps: int | None
    seconds: float
    failure: str | None = None  # why there is no model, e.g. a NaN loss at a step
    course: RuleValues = field(default_factory=dict)
    stopped_at: int | None = None  # number of steps after which patience ended the training; None: it did not
    restarts: tuple[str, ...] = ()  # the reason of each restart from the beginning
    parameters: int | None = None  # number of trained values; None: those of the method's own modules
    peak_memory: int | None = None  # bytes; None: not known, or several models shared it


class Predictor(Protocol):
    """What trained weights make of images. `state`: a `Selected.state` of the job, or weights of the same names."""

    def logits(self, state: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        """Returns float32 [n,C] for the images `rows`, int64 [n], on the CPU."""

    def features(self, state: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        """Returns float32 [n,K], which the head reads, on the CPU."""

    def starting_weights(self) -> dict[str, Tensor]:
        """Returns the weights before training: those of the head, and of the encoder if it is trained too."""
