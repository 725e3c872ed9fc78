"""config.json of a model directory: all that loading needs besides the tensors, and how the model was made."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from xdm_ft.data._transforms import Preprocessing
from xdm_ft.encoders._trainable import Trainable
from xdm_ft.evaluation.calibration import HIGHEST, LOWEST
from xdm_ft.settings import Block

FORMAT: Literal[1] = 1  # of config.json; raise it when an earlier version could misread the file
ModelPrecision = Literal["fp32", "bf16", "fp16"]


def _different(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise ValueError("two classes have the same name")
    return names


class PartConfig(Block):
    """What was trained of an encoder, in a file of its own; all other weights are those of the named encoder."""

    xxh3: str  # of the tensors in the file
    named_xxh3: str  # of the weights of the named encoder, as `features.cache_key.weights_digest`


class EncoderConfig(Block):
    """The encoder, and where its weights are."""

    name: str  # component, see `xdm-ft ls encoders`
    settings: dict[str, Any]  # constructor keywords without preprocessing; `weights` only if a name says where they are
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None  # random weights (weights: null) are drawn from it
    file: Literal["encoder.safetensors"] | None  # all of them, in this directory; None: they are not
    part: PartConfig | None = None  # encoder_part.safetensors in this directory; None: no part is by itself
    xxh3: str  # of the weights, as `features.cache_key.weights_digest`
    width: Annotated[int, Field(ge=1)]  # K, size of its features
    trained: Trainable  # how much of it was trained
    precision: ModelPrecision  # in which the run computed features; of what was trained, in which it trained
    pretraining: str  # one line: weights and corpus
    identity: dict[str, Any] | None  # as `Encoder.identity` in the run: the key of cached features; None: not portable

    @property
    def named_xxh3(self) -> str:
        """The checksum of the weights that a name, or a file of the user, must give."""
        return self.xxh3 if self.part is None else self.part.named_xxh3


class HeadConfig(Block):
    """The class head."""

    name: str
    settings: dict[str, Any]


class AtHeldOut(Block):
    """The results on one held-out set: a domain, or all test domains of an official split. Means over seeds."""

    domains: tuple[str, ...]
    value: float  # of the metric
    interval: tuple[float, float] | None  # 95%, over seeds and groups of images; None: can not be estimated
    seeds: int  # with one seed the interval is over images alone
    images: int
    groups: int | None  # number of patients, slides or sequences; None: images assumed independent
    accuracies: dict[str, float]  # {domain: accuracy}


class Expected(Block):
    """What to expect of a model at a new site, see `export/promise.py`. No number is of this model itself."""

    source: Literal["leave one domain out", "official test"]
    data: str  # name of the data set in the recipe
    method: str
    selection: str  # the rule that picked steps and trials; oracle: by labels of the held-out domains
    metric: str
    mean: float  # over seeds, held-out sets averaged within a seed
    std: float | None  # over seeds (ddof 1)
    stderr: float | None  # std / √seeds
    seeds: int
    held_out: tuple[AtHeldOut, ...]
    worst: tuple[str, float]  # the domain with the worst value, and that value
    others: dict[str, float]  # {metric: mean}, not divided by a temperature
    calibrated: dict[str, float] | None  # ece and nll after each model's own fitted temperature; None: unknown
    new_site: tuple[float, float] | None  # 95% prediction interval for the metric at one new site
    spread: float | None  # standard deviation behind `new_site`; None with fewer than three held-out sets
    freedom: int | None  # degrees of freedom of its t distribution
    notes: tuple[str, ...]  # what limits these numbers


class ModelConfig(Block):
    """A model, without its tensors."""

    format: Literal[1] = FORMAT
    xdm_ft: str  # version that wrote it
    class_names: Annotated[tuple[str, ...], AfterValidator(_different)]  # in the order of the logits
    renamed: dict[str, str] = {}  # name of a class in the data → in `class_names`, where they differ
    encoder: EncoderConfig
    preprocessing: Preprocessing
    normalize: bool  # whether the head reads L2-normalised features
    head: HeadConfig
    members: tuple[int, ...] = ()  # seeds of the heads of an ensemble; (): a single head
    wise_ft: float | None = None  # share of the trained weights in their mean with the zero-shot ones; None: no mean
    temperature: Annotated[float, Field(ge=LOWEST, le=HIGHEST)] = 1.0  # the logits are divided by it
    fitted_temperature: float | None = None  # on validation parts of the training domains; None: unknown
    method: dict[str, Any]  # label, domains, seed, trial, steps, hparams
    prompts: list[str] | None = None  # templates of the class embeddings that the head started from
    protocol: dict[str, Any]
    few_images: dict[str, int] = {}  # class → number of training images below ten, if the head holds class means
    step: int
    results: dict[str, Any]  # metrics of this model, or how a final fit was chosen and its estimate
    chosen: str  # one line: which model of the run this is, and why
    reference_xxh3: str | None = None  # of the tensors of reference.safetensors; None: distances are not known
    expected: Expected | None = None  # at a new site; None: the run has no test result of this method
