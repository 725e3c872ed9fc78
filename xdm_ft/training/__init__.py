"""Training: the head bank (many heads on cached features), the loop (one model end to end), schedules, selection."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from xdm_ft.algorithms import Algorithm, LossAverage, Setup, Solver
from xdm_ft.averaging import Averaging
from xdm_ft.evaluation.records import Identity
from xdm_ft.protocol.samplers import BatchSampler, SamplerName, sampler
from xdm_ft.protocol.splits import Split
from xdm_ft.settings import Block
from xdm_ft.sharpness import Sharpness

Precision = Literal["no", "bf16", "fp16"]
"""What a trainable encoder computes in; no: float32."""


class Schedule(Block):
    """The learning rate over the steps, as a factor of `lr` and `encoder_lr`."""

    name: Annotated[
        Literal["constant", "cosine"], Field(description="cosine falls from 1 to 0, reached as the last step ends")
    ] = "constant"
    warmup_steps: Annotated[int, Field(ge=0, description="steps of linear increase from 0 before that")] = 0


class Training(Block):
    """How models are trained, by either engine."""

    batch_size: Annotated[int, Field(ge=1, description="images per training domain, or in all (pooled)")] = 32
    sampler: Annotated[
        SamplerName,
        Field(
            description="per_domain: batch_size from every training domain; class_balanced: so, each of the domain's "
            "classes as often as the others; pooled: from all images together"
        ),
    ] = "per_domain"
    steps: Annotated[int | None, Field(ge=1, description="training steps; null: from epochs")] = None
    epochs: Annotated[float | None, Field(gt=0, description="passes over the training images (pooled only)")] = None
    optimizer: Annotated[Literal["sgd", "adam", "adamw"], Field(description="as in torch.optim")] = "adam"
    amsgrad: Annotated[bool, Field(description="AMSGrad's largest second moment, of adam and adamw")] = False
    lr: Annotated[float, Field(gt=0, description="learning rate of heads")] = 1e-3
    encoder_lr: Annotated[float, Field(gt=0, description="learning rate of a trainable encoder")] = 5e-5
    weight_decay: Annotated[float, Field(ge=0, description="L2 penalty (sgd, adam) or decoupled decay (adamw)")] = 0.0
    momentum: Annotated[float, Field(ge=0, lt=1, description="of sgd")] = 0.9
    beta1: Annotated[float, Field(ge=0, lt=1, description="of adam and adamw: decay of the mean gradient")] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1, description="of adam and adamw: decay of the mean square")] = 0.999
    schedule: Annotated[Schedule, Field(description="course of the learning rate")] = Schedule()
    clip_norm: Annotated[
        float | None, Field(gt=0, description="gradient norm that encoder and class head are clipped to; null: none")
    ] = None
    accumulation: Annotated[int, Field(ge=1, description="micro-batches per step (end to end only)")] = 1
    mixed_precision: Annotated[
        Precision | None,
        Field(
            description="autocast of a trainable encoder (end to end only); null: what `accelerate launch "
            "--mixed_precision` says, else no"
        ),
    ] = None
    evaluate_every: Annotated[
        int | None, Field(ge=1, description="steps between evaluations; null: a twentieth of the steps")
    ] = None
    patience: Annotated[
        int | None,
        Field(
            ge=1,
            description="evaluations in a row without a better value by the recipe's selection rule, after which a "
            "model stops; null: never",
        ),
    ] = None
    loss_average: Annotated[
        LossAverage, Field(description="domain: mean per domain, then over domains (the paper); sample: batch mean")
    ] = "domain"
    class_weights: Annotated[
        Literal["none", "balanced"],
        Field(
            description="of class losses; balanced: a class with n_c of n training images weighs n / (classes · n_c), "
            "and means are weighted, Σ w ℓ / Σ w"
        ),
    ] = "none"

    def images_per_step(self, domains: int) -> int:
        """With so many training domains."""
        return self.batch_size * (1 if self.sampler == "pooled" else domains)


RuleValues = dict[str, dict[int, float]]
"""{rule: {step: value of the selection metric}}; a step is the number of steps taken."""


@dataclass(frozen=True)
class Job:
    """One model to train. `make(setup)` builds its method, always the same way."""

    method: str  # label in results
    test_domains: tuple[str, ...]
    seed: int
    trial: int
    split: Split
    setup: Setup
    make: Callable[[Setup], Algorithm | Solver]
    sharpness: Sharpness | None
    training: Training  # with what a search drew of it
    averaging: Averaging | None = None
    normalized: bool = False  # it reads L2-normalised features, whatever the encoder gives (cached ones only)
    known: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """`RuleValues` of the rules whose values are not measured on this model's own images but came from other models."""

    @property
    def key(self) -> Identity:
        return self.method, self.test_domains, self.seed, self.trial

    def sampler(self, labels: Tensor) -> BatchSampler:
        """The rows of its batches; `labels` int64 [N] are those of all images."""
        training = self.training
        return sampler(training.sampler, self.split.train, training.batch_size, self.seed, labels)


@dataclass(frozen=True)
class Selected:
    """The step that one selection rule picked, and the weights there."""

    step: int  # number of steps taken; of averaged weights, the last that counts
    state: dict[str, Tensor]  # parameters and buffers on the CPU: `head.weight`, …; end to end also `encoder.…`
    hparams: dict[str, float] = field(default_factory=dict)  # what a solver varied, or how weights were averaged
    curve: list[dict[str, float | None]] = field(default_factory=list)  # as `best_finish` measured it
    value: float | None = None  # what the rule saw of it; None: nothing, as of averaged weights


@dataclass(frozen=True)
class Trained:
    """What an engine returns for a job."""

    job: Job
    selected: dict[str, Selected]  # selection rule → what it picked
    mixed_steps: int | None
    seconds: float
    failure: str | None = None  # why there is no model, e.g. a NaN loss at a step
    course: RuleValues = field(default_factory=dict)
    stopped_at: int | None = None  # steps after which patience ended; None where it did not
    restarts: tuple[str, ...] = ()  # why the training started again, each time that it did
