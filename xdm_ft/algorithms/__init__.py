"""One file per method: its loss, and nothing else.

A method is an `Algorithm` (a loss, trained by either engine) or a `Solver` (finds its head directly from features, for
example by L-BFGS, or takes it from the text encoder). The file's stem is the method's name in a recipe. The keyword
arguments of the class's constructor are its recipe keys, each annotated
`Annotated[type, Field(…, description="meaning")]`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, final

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from xdm_ft.core import Batch, InputPartners, Losses, Samples, Task
from xdm_ft.encoders import Encoder
from xdm_ft.heads import Head
from xdm_ft.heads.linear import Linear
from xdm_ft.runtime.randomness import Stream
from xdm_ft.runtime.settings import SearchRanges

LossAverage = Literal["domain", "sample"]
HeadInit = Literal["random", "zero_shot"]
START = "anchored_"  # of the names of buffers that hold an anchored head as it starts
PickRule = Annotated[
    Literal["protocol", "cross_domain"],
    Field(
        description="images that pick the point of the path. protocol: those of the selection rule; cross_domain: the "
        "training domains, each left out once (needs two)"
    ),
]
"""The keyword `pick` of solvers that offer several candidates."""


@dataclass(frozen=True)
class Setup:
    """The constructor argument of every method, besides its own settings."""

    task: Task
    width: int  # K, the size of the features
    steps: int  # total number of training steps
    seed: int
    loss_average: LossAverage = "domain"
    head_init: HeadInit = "random"
    text_weight: Tensor | None = None  # float [C,K]: L2-normalised class embeddings × logit scale; None: no text side
    class_weight: Tensor | None = None  # float32 [C]: factor of the class losses; None: 1 for every class
    anchor: Tensor | None = None  # float32 [C]: a_c of `pull`; None: nothing pulls the head back
    head: Callable[[int, int, int, int], Head] = Linear  # (width, outputs, seed, stream) → the class head


def normalised_sample_weight(
    domain: Tensor,
    num_domains: int,
    loss_average: LossAverage,
    weight: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Returns the factor of each sample in the mean loss of a batch: [B], sum 1.

    `sample`: all factors are equal. `domain`: the mean is taken per domain, then over the domains present, as in the
    paper's L_erm and L_d, 1/N Σ_i 1/n_i Σ_j ℓ. With `weight` [B] the means over samples are weighted, Σ w ℓ / Σ w (as
    torch's cross-entropy with class weights); every domain still has the same factor.
    """
    if loss_average == "sample":
        weight = domain.new_ones(domain.shape, dtype=dtype) if weight is None else weight
        return weight / weight.sum()
    members = _members(domain, num_domains, weight, dtype)
    count = members.sum(0)  # n_i, or their sum of weights, [D]
    present = count > 0
    # not 1 / 0: a domain without samples has members of 0, and 0 · ∞ is NaN
    return members @ torch.where(present, count, 1).reciprocal() / present.sum()


def domain_means(
    per_sample: Tensor, domain: Tensor, num_domains: int, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the mean of per-sample values [B] in every domain [D], and which domains have samples, bool [D].

    The mean of a domain without samples is 0. With `weight` [B] the mean is Σ w v / Σ w, and samples of weight 0 do not
    count.
    """
    members = _members(domain, num_domains, weight, per_sample.dtype)
    count = members.sum(0)  # [D]
    present = count > 0
    return (per_sample @ members) / torch.where(present, count, 1), present


def _members(domain: Tensor, num_domains: int, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns [B,D]: a sample's weight (default 1) in the column of its domain, 0 elsewhere."""
    members = (domain[:, None] == torch.arange(num_domains, device=domain.device)).to(dtype)
    return members if weight is None else members * weight[:, None]


def text_confidence(probability: Tensor, y: Tensor, num_classes: int) -> Tensor:
    """Returns CLAP's a_c, float32 [C]: the mean of the zero-shot `probability` [n] of their own class over a class's
    images; 0 for a class without images. `y` int64 [n].
    """
    members = F.one_hot(y, num_classes).T.double()  # index_add is not deterministic on GPUs
    return (members @ probability.double() / members.sum(1).clamp(min=1)).float()


@torch.no_grad()
def pull(
    parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], gradients: Mapping[str, Tensor], scale: float = 1.0
) -> Tensor | float:
    """Returns mean_c a_c (‖w_c − w_c⁰‖² + (b_c − b_c⁰)²) / ‖w_c⁰‖², and adds `scale` × its gradient to `gradients`.

    w⁰, b⁰ are the class head's start. The division gives all heads one unit: a linear head holds s·t, a cosine head t
    alone, and no b. For a random start the divisor is the mean of ‖w_c⁰‖². With a_c of `text_confidence` it is CLAP
    (Silva-Rodríguez et al. 2024, A Closer Look at the Few-Shot Adaptation of Large Vision-Language Models), whose code
    pulls to class embeddings that are not normalised. All tensors are a method's, or those of H stacked ones, [H,…];
    then so is the result. 0 without an anchor.

    It is a part of the total loss, outside all weights of domains and samples. Its gradient is written out, since
    autograd would take twice as long.
    """
    total: Tensor | float = 0.0
    for name, start in buffers.items():
        if name.startswith(START):
            parameter, anchor = f"head.{name.removeprefix(START)}", buffers["anchor"]  # a_c / ‖w_c⁰‖² / C, [...,C]
            way = parameters[parameter] - start  # [...,C,K], of a bias [...,C]
            of_rows = way.ndim > anchor.ndim
            gradients[parameter].addcmul_(way, anchor[..., None] if of_rows else anchor, value=2 * scale)
            square = way.mul_(way)
            total = total + ((square.sum(-1) if of_rows else square) * anchor).sum(-1)
    return total


class Method(nn.Module, ABC):
    """The base of all methods: the class head, and the properties that `xdm-ft ls methods` and the plan read."""

    source: str = ""  # one line: paper and equation
    search_ranges: SearchRanges = {}  # constructor keyword → range, for the presets of a search
    min_domains: int = 1  # training domains needed; with fewer the method becomes a `skipped` row
    two_domains_if: Mapping[str, object] = {}  # constructor keyword → value with which it needs two training domains
    needs_text: bool = False  # whether it needs the text side of the encoder
    reads_soft_labels: bool = False  # whether its class loss reads the data's, by `Algorithm.class_target`
    has_kernels: bool = False  # whether a bank is faster by kernels of its own than `torch.compile` makes it

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.task = setup.task
        self.head = setup.head(setup.width, setup.task.num_classes, setup.seed, Stream.INIT)
        if setup.head_init == "zero_shot":
            assert setup.text_weight is not None, "the plan refuses head_init: zero_shot without a text side"
            self.head.start_from_text(setup.text_weight)

    @final
    def logits(self, z: Tensor) -> Tensor:
        """Features z [B,K] → logits [B,C], in training, evaluation, selection and export.

        It is final: another map from features to logits is another head.
        """
        logits: Tensor = self.head(z)
        return logits

    @final
    def stacked_logits(self, z: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """Returns the logits [n,H,C] of H models on the same features z [n,K]; `state`: name → values [H,…]."""
        of_head = {name.removeprefix("head."): value for name, value in state.items() if name.startswith("head.")}
        return self.head.stacked_logits(z, of_head)

    @staticmethod
    def gradients_per_step(num_domains: int) -> int:
        """Returns how many gradients of the parameters one step computes; 0 for a method without training steps."""
        return 0


class Finish(NamedTuple):
    """Weights that `Algorithm.finish` offers to selection."""

    varied: dict[str, float]  # a value for each name in `varied_by_finish`
    state: dict[str, Tensor]
    selectable: bool = True  # False: measured for the curve only


class Algorithm(Method):
    """A method that is a loss. It owns its class head and its other modules; it never sees an optimizer or a loop.

    `loss` is a pure function of its arguments, the parameters, the buffers and the seed. It runs under
    `torch.func.vmap` over stacked heads, so it has no data-dependent Python branches and no in-place change of state.
    Numeric settings that may differ between heads are buffers (`persistent=False` if the settings determine them). In a
    bank `step` is a tensor, int64 [], so that a GPU need not wait: no Python branch reads it, but `phase` does.
    A method that is more than a loss replaces `on_inputs` (with `input_partners`), `stage_modules` or `update`.
    """

    auxiliary: tuple[str, ...] = ()  # names of child modules trained by `Losses.auxiliary`
    first_selectable_step: int = 1  # earlier steps cannot be selected
    # name of a quantity that `finish` varies → its meaning, for messages; empty: the trained weights are kept
    varied_by_finish: Mapping[str, str] = {}
    # "batch": the loss compares samples or domains of the whole batch; "part": of one part of it (the samples of one
    # process or micro-batch); "sample": it compares nothing and is a weighted mean over samples
    loss_over: Literal["batch", "part", "sample"] = "batch"
    # one line: why a batch cannot be split into parts (processes, micro-batches), and what to do; "": it can
    parts_reason: str = ""
    # one line: why the method equals ERM, or trains nothing, with a frozen encoder, and what to do; "": it does not
    frozen_reason: str = ""
    # one line: why the method cannot train what lies above a cut of the encoder, and what to do; "": it can
    cut_reason: str = ""
    # one line: why the method cannot train on pooled batches, and what to do; "": it can
    pooled_reason: str = ""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.loss_average = setup.loss_average
        self.seed: Tensor
        # a buffer: heads of one bank have different seeds, and a bank stacks buffers, not attributes
        self.register_buffer("seed", torch.tensor(setup.seed, dtype=torch.int64))
        self.class_weight: Tensor | None
        self.register_buffer("class_weight", setup.class_weight)
        self.is_anchored = setup.anchor is not None
        if setup.anchor is not None:
            start = {name: getattr(self.head, name).detach().clone() for name in self.head.per_class}
            square = start[self.head.per_class[0]].square().sum(1)  # ‖w_c⁰‖², [C]
            # a random row's own length means nothing
            square = square.mean() if setup.head_init == "random" else square
            # not in the state dict, as the settings determine them
            self.register_buffer("anchor", setup.anchor / square / len(setup.anchor), persistent=False)
            for name, value in start.items():
                self.register_buffer(f"{START}{name}", value, persistent=False)

    @staticmethod
    def gradients_per_step(num_domains: int) -> int:
        return 1

    def phase(self, step: int) -> str:
        """Returns the name of the function that computes the losses at `step`: `loss`, or that of a warm-up."""
        return "loss"

    @abstractmethod
    def loss(self, z: Tensor, batch: Batch, step: int | Tensor) -> Losses:
        """Returns the losses at `step` (counted from 0) of features z, float32 [B,K]; cached features are `batch.x`."""

    def loss_at_perturbed(
        self, z: Tensor, batch: Batch, step: int | Tensor, first_pass_draws: Mapping[str, Tensor]
    ) -> Losses:
        """Returns the losses at the perturbed weights of a sharpness-aware step.

        `first_pass_draws` are those of the first pass's `Losses`. Masks belong there: they depend on the weights, so
        that the second pass would compute others. Random draws repeat by themselves; here they are not computed twice.
        """
        return self.loss(z, batch, step)

    def forward(
        self,
        z: Tensor,
        batch: Batch,
        step: int | Tensor,
        first_pass_draws: Mapping[str, Tensor] | None = None,
        phase: str | None = None,
    ) -> Losses:
        """Calls `loss_at_perturbed` if the first pass has made draws, else the function of the phase, in float32 or
        better. The engine adds `pull`.

        Engines call this. `phase`: that of `step`, if `step` is a tensor.
        """
        with torch.autocast(z.device.type, enabled=False):
            z = z if z.dtype == torch.float64 else z.float()
            if first_pass_draws:
                return self.loss_at_perturbed(z, batch, step, first_pass_draws)
            losses: Losses = getattr(self, phase or self.phase(int(step)))(z, batch, step)
            return losses

    def on_inputs(self, batch: Batch, step: int | Tensor) -> Batch:
        """Returns the batch to train on at `step`: it may replace images or cached features, and set soft `targets`.

        Pure like `loss` (mapped over heads by `torch.func.vmap`), and independent of the parameters, so that both
        passes of a sharpness-aware step train on the same inputs. Draws are keyed by `batch.position`. A batch may come
        in parts, so this function compares no samples: `input_partners` chooses partners, which come with the batch.
        """
        return batch

    def input_partners(self, drawn: Samples, training: Samples, steps: Tensor) -> InputPartners | None:
        """Returns the partner that `on_inputs` mixes each sample with; None: the method mixes no inputs.

        `drawn` holds the whole batches of `steps` (int64 [S]); its fields and the result's are [S,B]. `training` holds
        all training samples [n]. The engines call this when they draw batches, and set `partner`, `partner_y` and
        `has_partner` of the batches accordingly.
        """
        return None

    def stage_modules(self, encoder: Encoder) -> dict[str, nn.Module]:
        """Returns modules to place after modules of the encoder: {name of the encoder's module: module}.

        They run in training only. Each is called with the output of the encoder's module, the batch and the step, and
        returns the tensor that replaces this output. Its random draws are a function of the seed, the step and
        `batch.position`. Its parameters are initialised from the seed, and every step uses all of them. `Losses.total`
        trains them from `encoder.unfreeze_at` on, with the heads' learning rate `lr`, as they start untrained like a
        head. They are saved with the weights under `stages.…`. Buffers are not allowed: a step of several passes would
        change them more than once.
        """
        return {}

    def update(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        step: int,
    ) -> Iterator[int | None]:
        """Yields the inner steps of one training step: the number of a domain, or None for the whole batch (default).

        At each of them the engine takes a step of its optimizer, which keeps its state, on these samples. In between
        this function may change the `parameters` in place. `buffers` are the algorithm's. In a bank the first axis of
        every parameter and buffer is that of the heads.
        """
        yield None

    def finish(self, start: Mapping[str, Tensor], end: Mapping[str, Tensor]) -> Iterable[Finish]:
        """Yields weights to keep in place of the trained ones. Called only if `varied_by_finish` is not empty.

        `start` are the weights that the training started from, `end` those that selection picked: `head.…`, and with a
        trained encoder also `encoder.…`. The rule that picked the step then picks one of the yielded weights, the first
        of equally good ones. results.json has the metric of each under `curve`.
        """
        raise NotImplementedError

    def mixed_steps(self, steps: int) -> int | None:
        """Returns how many of the first `steps` steps used augmented features; None: the method has none."""
        return None

    def resets_optimizer(self, step: int) -> bool:
        """Returns whether the optimizer resets its moments before the update of `step`, counted from 0."""
        return False

    def parts_add_up(self, pooled: bool) -> bool:
        """Returns whether a batch's mean loss is the mean of its parts' mean losses, weighted by the parts' sizes.

        It is not if a sample's factor depends on other samples: class weights are normalised over the batch, and a mean
        over domains divides by the number of samples per domain, which differs between the parts of a `pooled` batch.
        """
        return self.class_weight is None and not (pooled and self.loss_average == "domain")

    def class_target(self, batch: Batch) -> Tensor:
        """Returns the target of the class loss's cross-entropy: `batch.y` [B], or with soft labels t [B,C]
        w_c t_c / Σ_c w_c t_c, w the class weights; 0 where the sum is 0.

        `average` multiplies each sample's loss by the sum, so the product is the loss with class weights.
        """
        if batch.targets is None or self.class_weight is None:
            return batch.y if batch.targets is None else batch.targets
        weighted = batch.targets.to(self.class_weight.dtype) * self.class_weight
        total = weighted.sum(1, keepdim=True)
        return weighted / torch.where(total > 0, total, 1)

    def sample_weight(self, batch: Batch) -> Tensor | None:
        """Returns each sample's class weight, [B]; for soft labels t it is Σ_c w_c t_c. None: no class weights."""
        if self.class_weight is None:
            return None
        if batch.targets is None:
            return self.class_weight[batch.y]
        return batch.targets.to(self.class_weight.dtype) @ self.class_weight

    def average(self, class_losses: Tensor, batch: Batch) -> Tensor:
        """Returns the mean of class losses [B], by `loss_average` and `class_weights`."""
        return class_losses @ self.normalised_sample_weight(batch, self.sample_weight(batch), class_losses.dtype)

    def normalised_sample_weight(self, batch: Batch, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Returns each sample's factor in a mean loss, [B], by `loss_average`."""
        return normalised_sample_weight(batch.domain, self.task.num_domains, self.loss_average, weight, dtype)

    def by_domain(self, class_losses: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns `domain_means` of class losses [B], by `class_weights`."""
        return domain_means(class_losses, batch.domain, self.task.num_domains, self.sample_weight(batch))


class Candidate(NamedTuple):
    """One class head that a solver offers to selection."""

    step: int  # its index in the solver's path, from 0
    head: dict[str, Tensor]  # its state dict; of a linear head weight, float32 [C,K], and bias, float32 [C]
    hparams: dict[str, float | None]  # the hyper-parameters that the solver varied, e.g. {"l2": 1e-3}

    @classmethod
    def linear(cls, step: int, weight: Tensor, bias: Tensor, hparams: dict[str, float | None]) -> Candidate:
        return cls(step, {"weight": weight, "bias": bias}, hparams)

    @property
    def state(self) -> dict[str, Tensor]:
        """The state dict of the solver with this head, on the CPU."""
        return {f"head.{name}": value.cpu() for name, value in self.head.items()}


class Solver(Method):
    """A method that finds its head directly from frozen features; the selection rule picks one of its candidates."""

    head_kind: str = "linear"  # file stem in heads/ of the head that it computes
    takes_text: bool = False  # whether it uses class embeddings if the encoder has them
    normalized: bool = False  # whether its head needs L2-normalised features, whatever `encoder.normalize` is
    inverses: int = 0  # [K,K] matrices that it inverts, roughly
    candidates: int = 1  # number of candidates that `solve` yields
    keeps_curve: bool = False  # whether results.json has the metric of every candidate on every split
    class_means: bool = False  # whether its head holds means over the training images of a class
    weighs_images: bool = False  # whether it reads `image_weight`
    pick: PickRule = "protocol"  # a setting of solvers that offer several candidates
    threads: int = 1  # that `solve` may use on a CPU, each torch operation on one; results do not depend on it

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.setup = setup

    def image_weight(self, batch: Batch) -> Tensor:
        """Returns each image's factor in a mean over all, float64 [n], by `loss_average` and `class_weights`."""
        of_class, setup = self.setup.class_weight, self.setup
        weight = None if of_class is None else of_class.to(batch.y.device).double()[batch.y]
        return normalised_sample_weight(
            batch.domain, setup.task.num_domains, setup.loss_average, weight, dtype=torch.float64
        )

    @abstractmethod
    def solve(self, z: Tensor, batch: Batch) -> Iterable[Candidate]:
        """Yields candidates, from all training features z [n,K]; `batch` holds their y and domain. Deterministic."""
