"""One file per method: its loss, and nothing else.

A method is `Algorithm` (a loss, trained by either engine) or `Solver` (a head found directly from features, for
example by L-BFGS, or read off the text encoder). The file's stem is its name in a recipe, and the keyword arguments of
its class's constructor are its recipe keys: each one annotated `Annotated[type, Field(…, description="meaning")]`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, final

import torch
from torch import Tensor, nn

from xdm_ft.encoders import Encoder
from xdm_ft.heads import Head
from xdm_ft.heads.linear import Linear
from xdm_ft.randomness import Stream
from xdm_ft.settings import SearchRanges
from xdm_ft.tensors import Batch, InputPartners, Losses, Samples, Task

LossAverage = Literal["domain", "sample"]
HeadInit = Literal["random", "zero_shot"]


@dataclass(frozen=True)
class Setup:
    """What every algorithm is given by the engine, beside its own settings."""

    task: Task
    width: int  # K, the size of the features
    steps: int  # training steps in all
    seed: int
    loss_average: LossAverage = "domain"
    head_init: HeadInit = "random"
    text_weight: Tensor | None = None  # float [C,K]: L2-normalised class embeddings × logit scale; None without text
    class_weight: Tensor | None = None  # float32 [C]: what samples weigh by their class; None: all the same
    head: Callable[[int, int, int, int], Head] = Linear  # (width, outputs, seed, stream) → the class head


def mean_weights(
    domain: Tensor,
    num_domains: int,
    loss_average: LossAverage,
    weight: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """What each sample of a batch counts in its mean loss, [B] that sums to 1.

    All alike (`sample`), or by the mean per domain and then over the domains present: the paper's L_erm and L_d, 1/N
    Σ_i 1/n_i Σ_j ℓ. With `weight` [B] the means over samples are weighted, Σ w ℓ / Σ w (torch's cross-entropy with
    class weights), and domains still count alike.
    """
    if loss_average == "sample":
        weight = domain.new_ones(domain.shape, dtype=dtype) if weight is None else weight
        return weight / weight.sum()
    members = _members(domain, num_domains, weight, dtype)
    count = members.sum(0)  # n_i, or their sum of weights, [D]
    present = count > 0
    return members @ torch.where(present, count, 1).reciprocal() / present.sum()


def mean_loss(
    per_sample: Tensor, domain: Tensor, num_domains: int, loss_average: LossAverage, weight: Tensor | None = None
) -> Tensor:
    """Mean of per-sample losses [B] as `mean_weights` says."""
    return per_sample @ mean_weights(domain, num_domains, loss_average, weight, per_sample.dtype)


def domain_means(
    per_sample: Tensor, domain: Tensor, num_domains: int, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mean of per-sample values [B] in every domain, [D], 0 where it has no sample; and where it has one, bool [D].

    With `weight` [B] it is Σ w v / Σ w, and a sample of weight 0 is none.
    """
    members = _members(domain, num_domains, weight, per_sample.dtype)
    count = members.sum(0)  # [D]
    present = count > 0
    return (per_sample @ members) / torch.where(present, count, 1), present


def _members(domain: Tensor, num_domains: int, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A sample's weight, 1 by default, in its domain's column, else 0: [B,D]."""
    members = (domain[:, None] == torch.arange(num_domains, device=domain.device)).to(dtype)
    return members if weight is None else members * weight[:, None]


class Method(nn.Module, ABC):
    """What every method has: a class head, and what `xdm-ft ls methods` and the plan ask of it."""

    source: str = ""  # one line: paper and equation
    search_ranges: SearchRanges = {}  # constructor keyword → range, for the presets of a search
    min_domains: int = 1  # training domains needed; with fewer the method becomes a `skipped` row
    needs_text: bool = False  # needs the text side of the encoder

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.task = setup.task
        self.head = setup.head(setup.width, setup.task.num_classes, setup.seed, Stream.INIT)
        if setup.head_init == "zero_shot":
            assert setup.text_weight is not None, "the plan refuses head_init: zero_shot without a text side"
            self.head.start_from_text(setup.text_weight)

    @final
    def logits(self, z: Tensor) -> Tensor:
        """Features z [B,K] → logits [B,C]: what training, evaluation, selection and export call.

        A method with another map from features to logits brings another head.
        """
        logits: Tensor = self.head(z)
        return logits

    @final
    def stacked_logits(self, z: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """Logits [n,H,C] of H models on the same features z [n,K]; `state`: name in this model → values [H,…]."""
        own = {name.removeprefix("head."): value for name, value in state.items() if name.startswith("head.")}
        return self.head.stacked_logits(z, own)

    @staticmethod
    def gradients_per_step(num_domains: int) -> int:
        """Gradients of the parameters that one step takes, by number of training domains; 0 where there is no step."""
        return 0


class Finish(NamedTuple):
    """Weights that `Algorithm.finish` offers to selection."""

    varied: dict[str, float]  # a value for each name in `varied_by_finish`
    state: dict[str, Tensor]
    selectable: bool = True  # else it is measured for the curve alone


class Algorithm(Method):
    """A method that is a loss. It owns its class head and whatever else it needs; it never sees an optimizer or a loop.

    `loss` is a pure function of its arguments, the parameters, the buffers and the seed: it runs under
    `torch.func.vmap` over stacked heads, so it has no data-dependent Python branches and no in-place change of state.
    Numeric settings that may differ between heads are buffers; what depends on `step` alone may branch in Python.

    What is more than a loss goes through one of three doors: `on_inputs` (with `input_partners`), `stage_modules` and
    `update`.
    """

    auxiliary: tuple[str, ...] = ()  # names of child modules trained by `Losses.auxiliary`
    first_selectable_step: int = 1  # earlier steps can not be selected
    # name of what `finish` varies → its meaning, for messages; empty: trained weights are kept as they are
    varied_by_finish: Mapping[str, str] = {}
    # what the loss compares: samples or domains of the whole "batch", those of one "part" of it, which a process or
    # micro-batch has, or nothing: then it is a weighted mean over each "sample"
    loss_over: Literal["batch", "part", "sample"] = "batch"
    # one line: why a batch can not be cut into parts (processes, micro-batches), and what to do; "" where it can
    parts_reason: str = ""
    # one line: why the method does nothing beyond ERM with a frozen encoder, and what to do; "" where it does
    frozen_reason: str = ""
    # one line: why the method can not train on pooled batches, and what to do; "" where it can
    pooled_reason: str = ""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.loss_average = setup.loss_average
        self.seed: Tensor
        self.register_buffer("seed", torch.tensor(setup.seed, dtype=torch.int64))
        self.class_weight: Tensor | None
        self.register_buffer("class_weight", setup.class_weight)

    @staticmethod
    def gradients_per_step(num_domains: int) -> int:
        return 1

    @abstractmethod
    def loss(self, z: Tensor, batch: Batch, step: int) -> Losses:
        """The losses of features z [B,K] (float32, `batch.x` where cached) at `step`, counted from 0."""

    def second_pass(self, z: Tensor, batch: Batch, step: int, held: Mapping[str, Tensor]) -> Losses:
        """`loss` at perturbed weights, with what the first pass `held` (`Losses.held`): masks, which no draw fixes."""
        return self.loss(z, batch, step)

    def forward(self, z: Tensor, batch: Batch, step: int, held: Mapping[str, Tensor] | None = None) -> Losses:
        """What the engines call: `loss`, or `second_pass` where something is held; no less than float32 anywhere."""
        with torch.autocast(z.device.type, enabled=False):
            z = z if z.dtype == torch.float64 else z.float()
            return self.second_pass(z, batch, step, held) if held else self.loss(z, batch, step)

    def on_inputs(self, batch: Batch, step: int) -> Batch:
        """The batch to train on at `step`: its images, or its cached features, may be others, and have soft `targets`.

        Pure like `loss` (mapped over heads by `torch.func.vmap`), and independent of the parameters: both passes of a
        sharpness-aware step see the same inputs. Draws are keyed by `batch.place`. Samples are not compared here, since
        a batch may come in parts: partners are chosen by `input_partners` and come with the batch.
        """
        return batch

    def input_partners(self, drawn: Samples, training: Samples, steps: Tensor) -> InputPartners | None:
        """The samples that `on_inputs` mixes those of the batches of several steps with; None: it mixes with none.

        `drawn` holds the whole batches of `steps` (int64 [S]), its fields and the result's are [S,B]; `training` holds
        all training samples [n]. The engines ask as they draw batches, and give their parts `partner`, `partner_y` and
        `has_partner`.
        """
        return None

    def stage_modules(self, encoder: Encoder) -> dict[str, nn.Module]:
        """Modules to place behind modules of the encoder, by the name of the module there. At work in training only.

        Each is called with that module's output, the batch and the step, and returns what takes the output's place.
        What it draws is a function of the seed, the step and `batch.place`. Its parameters start as a function of the
        seed, and each is used at every step. `Losses.total` trains them from `encoder.unfreeze_at` on, with the heads'
        learning rate `lr`, since they start untrained like a head; they are saved with the weights under `stages.…`.
        Buffers are refused: the passes of a step would change them more than once.
        """
        return {}

    def update(self, parameters: Mapping[str, Tensor], inner_step: Callable[[int | None], None], step: int) -> None:
        """Takes one step: changes the `parameters` in place.

        `inner_step(domain)` takes a step with the engine's optimizer, whose state is kept, on the batch's samples of
        one domain; `inner_step(None)` takes one on the whole batch, which is all that a plain step is. In a bank every
        parameter has the heads as an axis before its own.
        """
        inner_step(None)

    def finish(self, start: Mapping[str, Tensor], end: Mapping[str, Tensor]) -> Iterable[Finish]:
        """Yields weights to keep in place of the trained ones; asked only where `varied_by_finish` names something.

        `start` and `end` are the weights that the training started from and those that selection picked: `head.…`, and
        where the encoder was trained too also `encoder.…`. The rule that picked the step then picks among what is
        yielded, the first of equally good ones, and the metric of all of it is in results.json under `curve`.
        """
        raise NotImplementedError

    def mixed_steps(self, steps: int) -> int | None:
        """How many of the first `steps` steps used augmented features; None where the method has none."""
        return None

    def resets_optimizer(self, step: int) -> bool:
        """Whether the optimizer forgets its moments before the update of `step`, counted from 0."""
        return False

    def parts_add_up(self, pooled: bool) -> bool:
        """Whether the mean loss of a batch is that of the means of its parts, weighted by their sizes.

        Not where a sample's weight follows from the others': those of classes are normalised over the batch, and a mean
        over domains counts their samples, of which the parts of a `pooled` batch differ.
        """
        return self.class_weight is None and not (pooled and self.loss_average == "domain")

    def sample_weight(self, batch: Batch) -> Tensor | None:
        """What the batch's samples weigh by their class, [B]; of soft labels Σ_c w_c t_c. None: all the same."""
        if self.class_weight is None:
            return None
        return (
            self.class_weight[batch.y]
            if batch.targets is None
            else batch.targets.to(self.class_weight.dtype) @ self.class_weight
        )

    def average(self, class_losses: Tensor, batch: Batch) -> Tensor:
        """The mean of class losses [B], as `loss_average` and `class_weights` say."""
        return class_losses @ self.mean_weights(batch, self.sample_weight(batch), class_losses.dtype)

    def mean_weights(self, batch: Batch, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
        """What each sample counts in a mean loss, [B]."""
        return mean_weights(batch.domain, self.task.num_domains, self.loss_average, weight, dtype)

    def by_domain(self, class_losses: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The means of class losses [B] in the domains, as `domain_means`, as `class_weights` say."""
        return domain_means(class_losses, batch.domain, self.task.num_domains, self.sample_weight(batch))


class Candidate(NamedTuple):
    """One linear head that a solver offers to selection."""

    step: int  # its place in the solver's path, from 0
    weight: Tensor  # float32 [C,K]
    bias: Tensor  # float32 [C]
    hparams: dict[str, float]  # what distinguishes it, e.g. {"l2": 1e-3}

    @property
    def state(self) -> dict[str, Tensor]:
        """That of its solver, whose head is linear, on the CPU."""
        return {"head.weight": self.weight.cpu(), "head.bias": self.bias.cpu()}


class Solver(Method):
    """A method that finds its head directly from frozen features; the protocol's rule picks among its candidates."""

    normalized: bool = False  # its head is meant for L2-normalised features, whatever `encoder.normalize` says

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.setup = setup

    @abstractmethod
    def solve(self, z: Tensor, batch: Batch) -> Iterable[Candidate]:
        """Candidates from all training features z [n,K]; `batch` holds their y and domain. Deterministic."""
