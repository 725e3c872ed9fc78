"""From a trained model to one in use: model directories, loading, prediction, evaluation at a new site, ONNX.

`ModelParts` is what a model consists of, `Classifier` the module that they make: pixels → logits. `choose.py` reads
them from a run directory, `directory.py` from and to a model directory, `hub.py` from a hub repository; `predictor.py`
computes with them.

`ModelConfig` is config.json of a model directory: all that loading needs besides the tensors, and how the model was
made. It may come from anyone: what the rest of the code reads has its type and range here. Parts that a run writes with
further keys are dicts with typed ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import AfterValidator, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor, nn
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from xdm_ft.cut import Trainable
from xdm_ft.encoders import Encoder
from xdm_ft.evaluation.expected_site import Rate, Unknown
from xdm_ft.evaluation.intervals import NewSite, Scale
from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER, HIGHEST, LOWEST
from xdm_ft.evaluation.neighbours import Reference
from xdm_ft.features.extract import frozen_copy
from xdm_ft.features.given import GIVEN, GivenFeatures
from xdm_ft.features.key import weights_digest
from xdm_ft.heads import Head
from xdm_ft.image_files.bags import BagPool, BagUnit
from xdm_ft.images import Range
from xdm_ft.images.loader import DTYPES
from xdm_ft.images.transforms import MAX_SIDE, Preprocessing, PreprocessingOverrides
from xdm_ft.recipe.components import find, settings_model
from xdm_ft.results.measured import NUMBERS
from xdm_ft.runtime.errors import UserError, plural, signed
from xdm_ft.runtime.settings import Block
from xdm_ft.storage.lines import one_line

FORMAT: Literal[1] = 1  # of config.json; raise it when a reader of this one could misread the file
ModelPrecision = Literal["fp32", "bf16", "fp16"]
MAX_NLL = 1e9  # far above that of any model, and its square is finite
Signed = Annotated[float, Field(ge=-MAX_NLL, le=MAX_NLL)]
Count = Annotated[int, Field(ge=0)]
Temperature = Annotated[float, Field(ge=LOWEST, le=HIGHEST)]
_OPEN = ConfigDict(extra="allow", allow_inf_nan=False)  # other keys are kept


def _different(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise ValueError("two classes have the same name")
    return names


def _readable(preprocessing: Preprocessing) -> Preprocessing:
    if not 1 <= preprocessing.size <= MAX_SIDE:
        raise ValueError(f"size {preprocessing.size} is not in 1…{MAX_SIDE} pixels")
    return preprocessing


def _metric(name: str) -> str:
    if name not in HIGHER_IS_BETTER:
        raise ValueError(f"no metric {name}")
    return name


MetricName = Annotated[str, AfterValidator(_metric)]


class EncoderSettings(TypedDict):
    """Constructor keywords of an encoder, without preprocessing."""

    __pydantic_config__ = _OPEN  # type: ignore[misc]
    model: str
    weights: NotRequired[str | None]  # only if a name says where they are
    kwargs: NotRequired[dict[str, Any]]
    pool: NotRequired[BagPool]  # of a model that reads bags
    unit: NotRequired[BagUnit]


class EncoderIdentity(TypedDict):
    """`Encoder.identity` in the run."""

    __pydantic_config__ = _OPEN  # type: ignore[misc]
    component: str
    model: str
    versions: dict[str, str]  # of libraries


class MethodConfig(TypedDict):
    """The model in its run."""

    __pydantic_config__ = _OPEN  # type: ignore[misc]
    label: str
    train_domains: list[str]
    test_domains: list[str]
    seed: Count
    trial: NotRequired[Count]
    steps: NotRequired[Count]
    hparams: NotRequired[dict[str, Any]]


class ProtocolConfig(TypedDict):
    """The block `protocol` of the recipe, and its description in one line."""

    __pydantic_config__ = _OPEN  # type: ignore[misc]
    description: str
    metric: NotRequired[MetricName]


class ChosenByConfig(TypedDict):
    """Why a final fit is of its method: the values of all methods on held-out sets, or by the selection rule."""

    __pydantic_config__ = _OPEN  # type: ignore[misc]
    selection: str
    metric: str
    values: dict[str, float]
    at: NotRequired[list[dict[str, Any]]]  # the method that the other held-out sets choose for each; []: by validation


class ResultsConfig(TypedDict):
    """Metrics of this model, or how a final fit was chosen and its estimate."""

    __pydantic_config__ = _OPEN  # type: ignore[misc]
    images: NotRequired[dict[str, Count]]  # of a final fit: {domain: number of training images}
    chosen_by: NotRequired[ChosenByConfig]


class PartConfig(Block):
    """What was trained of an encoder, in a file of its own; all other weights are those of the named encoder."""

    xxh3: str  # of the tensors in the file
    named_xxh3: str  # of the weights of the named encoder, as `features.key.weights_digest`


class EncoderConfig(Block):
    """The encoder, and where its weights are."""

    name: str  # component, see `xdm-ft ls encoders`
    settings: EncoderSettings
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None  # random weights (weights: null) are drawn from it
    file: Literal["encoder.safetensors"] | None  # all of them, in this directory; None: they are not
    part: PartConfig | None = None  # encoder_part.safetensors in this directory; None: no part is by itself
    xxh3: str  # of the weights, as `features.key.weights_digest`
    width: Annotated[int, Field(ge=1)]  # K, size of its features
    trained: Trainable  # how much of it was trained
    precision: ModelPrecision  # in which the run computed features; of what was trained, in which it trained
    pretraining: str  # one line: weights and corpus
    identity: EncoderIdentity | None  # the key of cached features; None: not portable

    @property
    def named_xxh3(self) -> str:
        """The checksum of the weights that a name, or a file of the user, must give."""
        return self.xxh3 if self.part is None else self.part.named_xxh3

    @property
    def reads_features(self) -> bool:
        """Whether the model reads features that were computed elsewhere, and no images."""
        return self.name == GIVEN

    @property
    def reads_bags(self) -> bool:
        """Whether the features are bags, which are pooled."""
        return self.reads_features and {"pool", "unit"} <= self.settings.keys()

    @property
    def needs_weights(self) -> bool:
        """Whether the weights are in a file of the user."""
        return self.file is None and "weights" not in self.settings and not self.reads_features


class HeadConfig(Block):
    """The class head."""

    name: str
    settings: dict[str, Any]


class AtHeldOut(Block):
    """The results on one held-out set: a domain, or all test domains of an official split. Means over seeds."""

    domains: Annotated[tuple[str, ...], Field(min_length=1)]
    method: str | None = None  # that the other held-out sets choose; None: the one that was named, or validation chose
    value: float  # of the metric
    interval: tuple[float, float] | None  # 95%, over seeds and groups of images; None: cannot be estimated
    seeds: Count  # with one seed the interval is over images alone
    images: Count
    groups: Count | None  # number of patients, slides or sequences; None: images assumed independent
    accuracies: dict[str, float]  # {domain: accuracy}


class ExpectedPerformance(Block):
    """What to expect of a model at a new site, see `export/expected.py`. No number is of this model itself."""

    source: Literal["leave one domain out", "official test"]
    data: str  # name of the data set in the recipe
    method: str
    selection: str  # the rule that picked steps and trials; oracle: by labels of the held-out domains
    metric: MetricName
    mean: float  # over seeds, held-out sets averaged within a seed
    std: float | None  # over seeds (ddof 1)
    stderr: float | None  # std / √seeds
    seeds: Count
    held_out: Annotated[tuple[AtHeldOut, ...], Field(min_length=1)]
    worst: tuple[str, float]  # the domain with the worst value, and that value
    others: dict[MetricName, float]  # {metric: mean}, not divided by a temperature
    numbers: dict[str, float]  # those of `results.measured.NUMBERS` that are known
    new_site: tuple[float, float] | None  # 95% prediction interval for the metric at one new site
    scale: Scale = "plain"  # of `center` and `spread`
    center: Signed | None = None  # of `new_site`, as the two below; None with fewer than three held-out sets
    # standard deviation
    spread: Annotated[float, Field(ge=0, le=MAX_NLL)] | None = None
    freedom: Annotated[int, Field(ge=1, le=1_000_000)] | None = None  # degrees of freedom of its t distribution
    one_more_domain: Signed | None = None  # what it adds to the metric, see `evaluation.intervals`; None: unknown
    notes: tuple[str, ...]  # what limits these numbers

    @property
    def at_new_site(self) -> NewSite | None:
        """The distribution of the metric at a new site; None: unknown."""
        if self.center is None or self.spread is None or self.freedom is None:
            return None
        return NewSite(self.center, self.spread, self.freedom, self.scale)

    @model_validator(mode="after")
    def _possible(self) -> ExpectedPerformance:
        """Refuses values that the metrics cannot have."""
        values = {"mean": self.mean, "std": self.std, "stderr": self.stderr, "worst": self.worst[1]}
        if self.scale == "plain":
            values |= {"center": self.center, "spread": self.spread}
        elif self.metric != "accuracy":
            raise ValueError("scale: logit is for an accuracy")
        values |= {", ".join(site.domains): site.value for site in self.held_out}
        of_metric: list[tuple[str, str, float | None]] = [(self.metric, name, value) for name, value in values.items()]
        of_metric += [(name, name, value) for name, value in self.others.items()]
        of_metric += [(NUMBERS[name].unit, name, value) for name, value in self.numbers.items() if name in NUMBERS]
        for metric, name, value in of_metric:
            most = MAX_NLL if metric == "nll" else 1.0
            if value is not None and not -1e-6 <= value <= most + 1e-6:  # of rounding
                raise ValueError(f"{name}: {value} is not in 0…{most:g}, as {metric} is")
        if len({value is None for value in (self.center, self.spread, self.freedom)}) > 1:
            raise ValueError("of center, spread and freedom, one is null and another is not")
        return self


class AtRandom(Block):
    """What random images of a site show, which neither adapted the head nor decided whether to keep it."""

    images: Annotated[int, Field(ge=1)]
    metric: MetricName = "accuracy"  # that decides, see `training.adaptation`
    before: Annotated[float, Field(ge=0, le=1)]
    after: Annotated[float, Field(ge=0, le=1)]
    interval: tuple[Signed, Signed]  # 95%, of after − before

    def to_text(self) -> str:
        """The gain in points, as a clause."""
        low, high = (signed(100 * end) for end in self.interval)
        unit = "points" if self.metric == "accuracy" else f"points of {self.metric.replace('_', ' ')}"
        return (
            f"{signed(100 * (self.after - self.before))} {unit} ({low} to {high}) on {plural(self.images, 'image')} "
            f"chosen at random, from {100 * self.before:.1f} to {100 * self.after:.1f}%"
        )


class AdaptedConfig(Block):
    """How the head was adapted to one site by labelled images there, as `xdm-ft adapt` does."""

    model: str  # which one was adapted, as a clause
    labels: Annotated[int, Field(ge=1)]  # labelled images
    groups: Count | None  # of them; None: images assumed independent
    before: Count  # images that the model classified correctly
    after: Count  # the same in cross-validation for the adapted head
    metric: MetricName = "accuracy"  # that decided
    metric_before: Rate | None = None  # its values, as of `before` and `after`
    metric_after: Rate | None = None
    p: Rate | None = None  # against no gain
    recentred: bool  # whether features were shifted by the mean of the site's images
    at_random: AtRandom | None = None  # None: no such image had a label


class ModelConfig(Block):
    """A model, without its tensors."""

    format: Literal[1] = FORMAT
    xdm_ft: str  # version that wrote it
    class_names: Annotated[
        tuple[str, ...], Field(min_length=1), AfterValidator(_different)
    ]  # in the order of the logits
    renamed: dict[str, str] = {}  # name of a class in the data → in `class_names`, where they differ
    encoder: EncoderConfig
    preprocessing: Annotated[Preprocessing, AfterValidator(_readable)]
    # what becomes 0…255 of images wider than 8 bits; absent: the range of their types
    intensity: Annotated[Range | None, Field(exclude_if=lambda intensity: intensity is None)] = None
    normalize: bool  # whether the head reads L2-normalised features
    head: HeadConfig
    members: tuple[Count, ...] = ()  # seeds of the heads of an ensemble; (): a single head
    wise_ft: Annotated[float, Field(ge=0, le=1)] | None = (
        None  # share of the trained weights in their mean with the zero-shot ones; None: no mean
    )
    temperature: Temperature = 1.0  # the logits are divided by it
    fitted_temperature: Temperature | None = None  # on validation parts of the training domains; None: unknown
    method: MethodConfig
    prompts: list[str] | None = None  # templates of the class embeddings that the head started from
    protocol: ProtocolConfig
    few_images: dict[str, Count] = {}  # class → number of training images, where it is below ten
    class_means: bool = False  # whether the head holds the mean feature of each class
    from_text: bool = False  # whether the head is, or started from, the class embeddings
    interpolated: bool = False  # whether the weights are a mean with those of zero-shot, by their method
    step: Count
    results: ResultsConfig
    chosen: str  # one line: which model of the run this is, and why
    audit: str | None = None  # what `xdm-ft audit` found in the run's data; None: they were not audited
    reference_xxh3: str | None = None  # of the tensors of reference.safetensors; None: distances are not known
    site_xxh3: str | None = None  # of the tensors of site.safetensors; None: nothing is known of new sites
    unknown: Unknown | None = None  # None: nothing is known of images of no class
    adapted: AdaptedConfig | None = None  # to one site; None: to none
    training_images_xxh3: str | None = None  # of the tensor of training_images.safetensors, which may be left out
    expected: ExpectedPerformance | None = None  # at a new site; None: the run has no test result of this method

    @property
    def metric(self) -> str:
        """The metric of the run's protocol."""
        return self.protocol.get("metric", "accuracy")


SINGLE = "head"  # name of the head in a weights file; those of an ensemble are `members.<seed>`


@dataclass(frozen=True)
class ModelParts:
    """What a model consists of."""

    config: ModelConfig
    encoder: Encoder  # float32, on the CPU
    heads: Mapping[str, Head]
    """`head`: the class head, of an ensemble of linear heads their mean; `members.<seed>`: the heads of an ensemble."""
    reference: Reference | None = None  # of the encoder's features of training images; None: distances are not known
    training_images: np.ndarray | None = None  # their checksums, uint8 [n,16]; None: unknown
    trained_names: tuple[str, ...] = ()  # names of the encoder's tensors that were trained
    site: Mapping[str, Tensor] | None = None  # tensors of site.safetensors, see `new_site/stored.py`
    checksum: str = ""  # of the config.json that was read; "": the model was not read from a model directory

    @property
    def training_features(self) -> int:
        """The number of training images whose features the heads hold."""
        heads = [head for head in self.heads.values() if head.training_features]
        return max((len(head.get_buffer(str(head.training_features))) for head in heads), default=0)


class Classifier(nn.Module):
    """Preprocessed pixels [B,3,H,W] → logits float32 [B,C], as one plain module in eval mode.

    The logits of an ensemble are the mean of its heads' logits. All logits are divided by the temperature.
    """

    def __init__(
        self, parts: ModelParts, precision: ModelPrecision | None = None, device: torch.device | str = "cpu"
    ) -> None:
        """`precision` None: that of the run. A frozen encoder is cast to it; one that was trained runs in autocast."""
        super().__init__()
        config, device = parts.config, torch.device(device)
        self.precision: ModelPrecision = config.encoder.precision if precision is None else precision
        self.autocast = DTYPES[self.precision] if config.encoder.trained and self.precision != "fp32" else None
        self.encoder = frozen_copy(parts.encoder, "fp32" if config.encoder.trained else self.precision, device)
        heads = {name: head.to(device).eval().requires_grad_(False) for name, head in parts.heads.items()}
        self.head = heads.pop(SINGLE, None)
        self.members = nn.ModuleList(heads.values())
        self.normalize, self.temperature = config.normalize, config.temperature
        self.eval()

    def forward(self, pixels: Tensor) -> Tensor:
        return self.logits(self.head_input(self.encoded(pixels)))

    def encoded(self, pixels: Tensor) -> Tensor:
        """float32 features z [B,K] of the encoder."""
        with torch.autocast(pixels.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            z: Tensor = self.encoder(pixels)
        return z.float()

    def head_input(self, z: Tensor) -> Tensor:
        """Features of the encoder, as the head reads them: L2-normalised or as they are."""
        return F.normalize(z, dim=-1) if self.normalize else z

    def logits(self, z: Tensor) -> Tensor:
        """Features z [B,K] as the head reads them → logits [B,C]."""
        logits: Tensor = self.member_logits(z).mean(0) if self.head is None else self.head(z)
        return logits / self.temperature

    def member_logits(self, z: Tensor) -> Tensor:
        """Logits [S,B,C] of the heads of an ensemble, before the temperature."""
        return torch.stack([member(z) for member in self.members])


def probabilities(logits: Tensor) -> Tensor:
    """float32 [...,C], as runs compute them: in float64, since float32 rounds small ones. Apple's GPUs have none."""
    logits = logits.cpu() if logits.device.type == "mps" else logits
    return logits.double().softmax(-1).float()


def build_encoder(name: str, settings: Mapping[str, Any], preprocessing: Preprocessing, seed: int | None) -> Encoder:
    """Builds an encoder from its settings in a file. Raises `UserError` if they are wrong or its weights are missing.

    The global generator of torch is left as it was: random weights are drawn from `seed`.
    """
    try:
        if name == GIVEN:
            return GivenFeatures(**settings_model(GivenFeatures).model_validate(settings).model_dump())
        cls = find("encoders", name)
        overrides = PreprocessingOverrides(**preprocessing.model_dump())
        block = settings_model(cls).model_validate({**settings, "preprocessing": overrides})
    except ValidationError as error:
        raise UserError(f"encoder.settings: {first_fault(error)}") from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0 if seed is None else seed)
        encoder: Encoder = cls(**{key: getattr(block, key) for key in type(block).model_fields})
    return encoder


def load_trained(encoder: Encoder, trained: Mapping[str, Tensor], complete: bool = False) -> None:
    """Replaces the tensors of an encoder that were trained: some of them, or the `complete` state.

    Raises `ValueError` if the encoder does not have these tensors, or has others beside a complete state.
    """
    try:
        # the whole state in both cases, as torch then refuses names that the encoder lacks
        encoder.load_state_dict(dict(trained) if complete else encoder.state_dict() | dict(trained))
    except RuntimeError as error:
        raise ValueError(one_line(error)) from error


def check_encoder(encoder: Encoder, xxh3: str, weights: object, of: Path) -> None:
    """Raises `UserError` if the encoder's weights are not those that the head was trained on."""
    actual = weights_digest(encoder)
    if actual != xxh3:
        raise UserError(
            f"{of}: the encoder's weights ({weights}, xxh3 {actual}) differ from those that trained the model "
            f"(xxh3 {xxh3}), so predictions would be wrong; give the same weights, or export with --with-encoder"
        )


def check_identity(encoder: Encoder, identity: Mapping[str, Any] | None, source: str) -> None:
    """Raises `UserError` if the text of an encoder's identity is not that of the encoder that was built.

    Nothing is raised for a text of other versions of the libraries, which may have described it in other words.
    """
    if identity is None or identity["versions"] != encoder.identity()["versions"]:
        return
    if different := encoder.differences(identity):
        raise UserError(
            f"{source}: encoder.identity: {', '.join(different)[:120]}: not that of the encoder that its settings "
            "build; do not use this model, or export it again if it is yours"
        )


def build_head(config: HeadConfig, width: int, classes: int, state: Mapping[str, Tensor]) -> Head:
    """Builds a class head with these weights. Raises `ValueError` if they do not fit."""
    cls = find("heads", config.name)
    with torch.random.fork_rng(devices=[]):  # torch's layers draw initial weights, which are replaced at once
        try:
            settings_model(cls).model_validate(config.settings)
            with torch.device("meta"):  # sizes alone: those of a wrong config may be larger than the memory
                sizes = cls(width, classes, 0, 0, **config.settings).state_dict()
            if any(name not in state or sizes[name].numel() > state[name].numel() for name in sizes):
                raise ValueError("a head of other sizes")
            head: Head = cls(width, classes, 0, 0, **config.settings)
            head.load_state_dict(dict(state))
        except ValidationError as error:
            raise ValueError(f"head.settings: {first_fault(error)}") from error
        except (RuntimeError, TypeError) as error:
            raise ValueError(one_line(error)) from error
    return head


def first_fault(error: ValidationError) -> str:
    """Returns where a value is wrong, and why, on one line."""
    fault = error.errors()[0]
    key, problem = ".".join(map(str, fault["loc"])), fault["msg"].removeprefix("Value error, ")
    return " ".join(": ".join(filter(None, (key, problem))).split())


def with_prefix(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Returns the tensors whose names begin with `prefix.`, without it."""
    start = f"{prefix}."
    return {name.removeprefix(start): value for name, value in state.items() if name.startswith(start)}
