"""config.json of a model directory: all that loading needs besides the tensors, and how the model was made.

It may come from anyone: what the rest of the code reads has its type and range here. Parts that a run writes with
further keys are dicts with typed ones.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, ConfigDict, Field, model_validator
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from xdm_ft.cut.trainable import Trainable
from xdm_ft.evaluation.calibration import HIGHEST, LOWEST
from xdm_ft.evaluation.intervals import NewSite, Scale
from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER
from xdm_ft.images.transforms import Preprocessing
from xdm_ft.runtime.settings import Block

FORMAT: Literal[1] = 1  # of config.json; raise it when an earlier version could misread the file
ModelPrecision = Literal["fp32", "bf16", "fp16"]
MAX_SIDE = 4096  # pixels of an image that an encoder reads
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


Metric = Annotated[str, AfterValidator(_metric)]


class EncoderSettings(TypedDict):
    """Constructor keywords of an encoder, without preprocessing."""

    __pydantic_config__ = _OPEN  # type: ignore[misc]
    model: str
    weights: NotRequired[str | None]  # only if a name says where they are
    kwargs: NotRequired[dict[str, Any]]


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


class ResultsConfig(TypedDict):
    """Metrics of this model, or how a final fit was chosen and its estimate."""

    __pydantic_config__ = _OPEN  # type: ignore[misc]
    images: NotRequired[dict[str, Count]]  # of a final fit: {domain: number of training images}


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


class HeadConfig(Block):
    """The class head."""

    name: str
    settings: dict[str, Any]


class AtHeldOut(Block):
    """The results on one held-out set: a domain, or all test domains of an official split. Means over seeds."""

    domains: Annotated[tuple[str, ...], Field(min_length=1)]
    value: float  # of the metric
    interval: tuple[float, float] | None  # 95%, over seeds and groups of images; None: can not be estimated
    seeds: Count  # with one seed the interval is over images alone
    images: Count
    groups: Count | None  # number of patients, slides or sequences; None: images assumed independent
    accuracies: dict[str, float]  # {domain: accuracy}


class Expected(Block):
    """What to expect of a model at a new site, see `export/expected.py`. No number is of this model itself."""

    source: Literal["leave one domain out", "official test"]
    data: str  # name of the data set in the recipe
    method: str
    selection: str  # the rule that picked steps and trials; oracle: by labels of the held-out domains
    metric: Metric
    mean: float  # over seeds, held-out sets averaged within a seed
    std: float | None  # over seeds (ddof 1)
    stderr: float | None  # std / √seeds
    seeds: Count
    held_out: Annotated[tuple[AtHeldOut, ...], Field(min_length=1)]
    worst: tuple[str, float]  # the domain with the worst value, and that value
    others: dict[Metric, float]  # {metric: mean}, not divided by a temperature
    calibrated: dict[Metric, float] | None  # ece and nll after each model's own fitted temperature; None: unknown
    new_site: tuple[float, float] | None  # 95% prediction interval for the metric at one new site
    scale: Scale = "plain"  # of `center` and `spread`; earlier versions had this one alone
    center: Signed | None = None  # None: `mean`
    # standard deviation behind `new_site`; None with fewer than three held-out sets
    spread: Annotated[float, Field(ge=0, le=MAX_NLL)] | None = None
    freedom: Annotated[int, Field(ge=1, le=1_000_000)] | None = None  # degrees of freedom of its t distribution
    one_more_domain: Signed | None = None  # what it adds to the metric, see `evaluation.intervals`; None: unknown
    notes: tuple[str, ...]  # what limits these numbers

    @property
    def at_new_site(self) -> NewSite | None:
        """The distribution of the metric at a new site; None: unknown."""
        if self.spread is None or self.freedom is None:
            return None
        return NewSite(self.mean if self.center is None else self.center, self.spread, self.freedom, self.scale)

    @model_validator(mode="after")
    def _possible(self) -> Expected:
        """Refuses values that the metrics can not have."""
        values = {"mean": self.mean, "std": self.std, "stderr": self.stderr, "worst": self.worst[1]}
        if self.scale == "plain":
            values |= {"center": self.center, "spread": self.spread}
        elif self.metric != "accuracy" or self.center is None:
            raise ValueError("scale: logit is for an accuracy and needs a center")
        values |= {", ".join(site.domains): site.value for site in self.held_out}
        of_metric: list[tuple[str, str, float | None]] = [(self.metric, name, value) for name, value in values.items()]
        of_metric += [(name, name, value) for name, value in [*self.others.items(), *(self.calibrated or {}).items()]]
        for metric, name, value in of_metric:
            most = MAX_NLL if metric == "nll" else 1.0
            if value is not None and not -1e-6 <= value <= most + 1e-6:  # of rounding
                raise ValueError(f"{name}: {value} is not in 0…{most:g}, as {metric} is")
        if self.calibrated is not None and not {"nll", "ece"} <= self.calibrated.keys():
            raise ValueError("calibrated: nll or ece is missing")
        if (self.spread is None) != (self.freedom is None):
            raise ValueError("of spread and freedom, one is null and the other is not")
        return self


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
    step: Count
    results: ResultsConfig
    chosen: str  # one line: which model of the run this is, and why
    reference_xxh3: str | None = None  # of the tensors of reference.safetensors; None: distances are not known
    training_images_xxh3: str | None = None  # of the tensor of training_images.safetensors, which may be left out
    expected: Expected | None = None  # at a new site; None: the run has no test result of this method
