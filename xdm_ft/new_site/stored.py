"""`site.safetensors` of a model directory: what is needed to judge the model at a site without labels.

The shipped model has seen all labelled images, so other heads measure: the reference head, with the model's method and
settings, and a bank of ERM heads, both trained on a part of the images of each domain. All of them read standardised
features. No image's feature is stored, but for the mean feature of each class.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field, ValidationError, model_validator
from torch import Tensor

from xdm_ft.evaluation.expected_site import (
    FEWEST_CLASSES,
    MIN_DOMAINS,
    AccuracyEstimates,
    ExpectedAccuracy,
    Unknown,
    UnknownShare,
    Validated,
    energy,
    expect,
    parts_at,
)
from xdm_ft.evaluation.predictions import effective_number
from xdm_ft.export import MetricName, ModelConfig, first_fault
from xdm_ft.export.directory import AGAIN, SITE, read_described
from xdm_ft.export.predictor import Model
from xdm_ft.results.run import is_run
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.settings import Block
from xdm_ft.storage.lines import Damaged, OtherVersion, json_object, one_line
from xdm_ft.storage.tensors import Sizes

Share = Annotated[float, Field(ge=0, le=1)]
SINGLE, DOUBLE = ("heads", "mean", "deviation", "class_means"), ("shares", "accuracies", "agreements")
ABOUT = "about"  # name of the tensor with the JSON document, in bytes
FAILS = "does not tell images of no class well enough (AUROC {:.2f} at held-out domains)"
HEADS, MAX_TEXT = range(3, 65), 1 << 24  # how many a file may hold: two heads have one agreement, which makes no line


class RiskAt(Block):
    """A threshold of the confidence for a risk, at one held-out domain, by the heads that never saw it."""

    threshold: Share | None  # the lowest whose answers there are shown to have at most the risk; None: there is none
    tried: Share | None  # the largest of the other domains' thresholds; None: one of them has none
    risk: Share | None  # of the answers here at `tried`; None: there are none
    answered: Share  # share of the images here that `tried` answers


class AtDomain(Block):
    """What heads that never saw a domain show on it."""

    accuracy: Share  # of the reference head without it
    images: Annotated[int, Field(ge=1)]
    parts: tuple[Share, Share, Share] | None  # the three estimates of that accuracy; None: the heads agree everywhere
    error: Annotated[float, Field(ge=-1, le=1)] | None  # their median minus the accuracy
    distance: Annotated[float, Field(ge=0)]  # median of its images from the training images of the others
    risks: dict[str, RiskAt]  # by the risk: "0.05"


class Bought(Block):
    """What a budget of `label` buys at the held-out domains, on average over draws of their images."""

    budget: Annotated[int, Field(ge=1)]
    images: Annotated[int, Field(ge=1)]  # of them that are random
    half_width: Share  # of the 95% interval of the accuracy
    threshold: Share  # share of draws in which a threshold for at most 10% wrong answers is found
    gain: Annotated[float, Field(ge=-1, le=1)] | None  # of adapting with the other images; None: no label curve says
    metric: MetricName = "accuracy"  # of the gain


class About(Block):
    """The numbers of the file."""

    format: Literal[1] = 1
    heads: str  # one line: what the reference head is, and on which images it is
    temperature: Annotated[float, Field(gt=0)]  # of the reference head, fitted on its validation images
    offset: Annotated[float, Field(ge=-1, le=1)]  # `Validated.offset`
    threshold: Share | None  # ATC's; None: above every confidence
    images: Annotated[int, Field(ge=1)]  # validation images
    domains: dict[str, AtDomain]
    budgets: tuple[Bought, ...]

    @model_validator(mode="after")
    def _of_same_risks(self) -> About:
        risks = [of.risks.keys() for of in self.domains.values()]
        if any(of != risks[0] for of in risks) or not all(_is_risk(risk) for risk in (risks[0] if risks else ())):
            raise ValueError("domains: risks must be numbers between 0 and 1, the same ones at each domain")
        return self


def _is_risk(text: str) -> bool:
    try:
        return 0 < float(text) < 1
    except ValueError:
        return False


@dataclass(frozen=True)
class Heads:
    """Linear heads that read (z − mean) / deviation of features z as the model's head reads them."""

    weights: Tensor  # float32 [M,C,K+1]: the bank, the reference head last; bias last
    mean: Tensor  # float32 [K], of training features
    deviation: Tensor  # float32 [K], above 0

    def logits(self, z: Tensor) -> Tensor:
        """Features [n,K] → logits float32 [M,n,C]."""
        standard = (z - self.mean) / self.deviation
        return torch.einsum("nk,mck->mnc", standard, self.weights[..., :-1]) + self.weights[:, None, :, -1]


class SeenByHeads(NamedTuple):
    """What heads make of some images."""

    p: np.ndarray  # calibrated probabilities of the reference head, float64 [n,C]
    predicted: np.ndarray  # classes by all heads, the reference head's last, int64 [M,n]

    @classmethod
    def of(cls, logits: Tensor, temperature: float) -> SeenByHeads:
        return cls((logits[-1].double() / temperature).softmax(-1).numpy(), logits.argmax(-1).numpy())

    def only(self, rows: np.ndarray) -> SeenByHeads:
        return SeenByHeads(self.p[rows], self.predicted[:, rows])


@dataclass(frozen=True)
class Stored:
    """The contents of the file."""

    about: About
    heads: Heads
    class_means: Tensor  # float32 [C,K], of training features; 0 for a class without images
    shares: np.ndarray  # float64 [C], of the classes in training
    accuracies: np.ndarray  # float64 [M] of all heads on the validation images
    agreements: np.ndarray  # float64 [M(M−1)/2]
    unknown: Unknown | None = None  # which images belong to no class, as config.json has it

    @property
    def known(self) -> Validated:
        return Validated(self.accuracies, self.agreements, self.about.images, self.about.offset)

    @property
    def past_errors(self) -> dict[str, float]:
        return {name: of.error for name, of in self.about.domains.items() if of.error is not None}

    @property
    def past_values(self) -> dict[str, float]:
        return {name: of.accuracy for name, of in self.about.domains.items()}

    def seen(self, z: Tensor) -> SeenByHeads:
        return SeenByHeads.of(self.heads.logits(z), self.about.temperature)

    def is_unknown(self, z: Tensor) -> np.ndarray:
        """Returns which images belong to no class, bool [n], by the last head of the bank; none if it cannot tell."""
        if self.unknown is None or not self.unknown.works:
            return np.zeros(len(z), bool)
        last = replace(self.heads, weights=self.heads.weights[-2:-1])
        above: np.ndarray = energy(last.logits(z)[0].double().numpy()) > self.unknown.threshold
        return above

    def unknown_share(self, is_unknown: np.ndarray, sizes: np.ndarray) -> UnknownShare | None:
        """Returns the share of images of no class; None: it cannot be said. `sizes`: numbers of images of groups."""
        if self.unknown is None or not self.unknown.works:
            return None
        return self.unknown.share(float(is_unknown.mean()), effective_number(sizes))

    def parts(self, seen: SeenByHeads, shares: np.ndarray) -> AccuracyEstimates | None:
        """Returns the three estimates of the accuracy, as `parts_at`, at a site with these class shares [C]."""
        threshold = math.inf if self.about.threshold is None else self.about.threshold
        return parts_at(seen.p, seen.predicted, self.known, shares, threshold)

    def expect(self, parts: AccuracyEstimates, images: float, n: int) -> ExpectedAccuracy:
        """Returns the expected accuracy at a site of `n` images, of which `images` is the effective number."""
        return expect(parts, self.past_errors, self.past_values, images, n=n)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors of the file."""
        about = json.dumps(self.about.model_dump(mode="json"), allow_nan=False).encode()
        return {
            ABOUT: torch.from_numpy(np.frombuffer(about, np.uint8).copy()),
            "heads": self.heads.weights.half(),
            "mean": self.heads.mean,
            "deviation": self.heads.deviation,
            "class_means": self.class_means,
            "shares": torch.from_numpy(self.shares),
            "accuracies": torch.from_numpy(self.accuracies),
            "agreements": torch.from_numpy(self.agreements),
        }


def without_site(config: ModelConfig) -> str | None:
    """Returns why no site file is made of such a model, in one line; None: it can be made."""
    if config.adapted is not None:
        return "it was adapted to one site already; use the model it came from"
    if config.encoder.trained is not False:
        return "its encoder was trained, and only models whose encoder is frozen can"
    if config.members:
        return "it is an ensemble; export one model"
    if config.wise_ft is not None or config.interpolated:
        return "it is a mean of weights (WiSE-FT); export a model without it"
    return None


def refuse_run(folder: str, otherwise: str = "") -> None:
    """Raises `UserError` for a run directory, whose models have no site file. `otherwise`: another remedy."""
    path = Path(folder).expanduser()
    if is_run(path):
        remedy = f"export a model of it first: xdm-ft export {shlex.quote(folder)} DIR{otherwise}"
        raise UserError(f"{folder}: is a run directory; {remedy}")


def read_stored(folder: Path, config: ModelConfig) -> Stored:
    """Reads the file of a model directory. Raises `UserError` if there is none, or if it is damaged."""
    path = folder / SITE
    reason = without_site(config)
    if reason is not None:
        raise UserError(f"{folder}: the model cannot be assessed or adapted, nor tell unknown images: {reason}")
    if config.site_xxh3 is None:
        raise UserError(f"{folder}: has no {SITE}, which tells of new sites; export it again, without --no-site")
    classes, width = len(config.class_names), config.encoder.width
    tensors = read_described(path, config.site_xxh3, wanted_sizes(classes, width))
    try:
        return replace(_check_stored(tensors), unknown=config.unknown)
    except ValidationError as error:
        raise UserError(f"{path}: {OtherVersion(first_fault(error)[:200]).fault}; {AGAIN}") from error
    except (Damaged, ValueError, RecursionError) as error:
        raise UserError(f"{path}: is damaged ({one_line(error)[:200]}); {AGAIN}") from error


def read_unknown(model: Model, name: str) -> Stored:
    """Reads the file of a model for `predict --unknown`. Raises `UserError` if the model cannot tell unknown images."""
    refuse_run(name)
    stored = read_stored(model.folder, model.config)
    if stored.unknown is None:
        few = f"{FEWEST_CLASSES} classes and {MIN_DOMAINS} domains are needed"
        raise UserError(f"--unknown: {name} cannot tell images of no class; {few}")
    if not stored.unknown.works:
        raise UserError(f"--unknown: {name} {FAILS.format(stored.unknown.auroc)}; leave it out")
    return stored


def wanted_sizes(classes: int, width: int) -> Sizes:
    """Returns the sizes of the file's tensors for a model of so many classes, whose features have this width."""
    return {
        "heads": (HEADS, classes, width + 1),
        "mean": (width,),
        "deviation": (width,),
        "class_means": (classes, width),
        "shares": (classes,),
        "accuracies": (HEADS,),
        "agreements": (range(HEADS.stop**2),),
        ABOUT: (range(MAX_TEXT),),
    }


def _check_stored(tensors: Mapping[str, Tensor]) -> Stored:
    """Raises `Damaged` or `ValueError` unless the tensors fit each other."""
    about, heads = tensors[ABOUT], len(tensors["heads"])
    if about.dtype != torch.uint8 or not all(tensors[name].is_floating_point() for name in (*SINGLE, *DOUBLE)):
        raise Damaged("a tensor has another type")
    if len(tensors["accuracies"]) != heads or len(tensors["agreements"]) != heads * (heads - 1) // 2:
        raise Damaged(f"accuracies or agreements are not those of {heads} heads")
    document = About.model_validate(json_object(about.numpy().tobytes()))
    if not (tensors["deviation"] > 0).all() or not math.isclose(float(tensors["shares"].sum()), 1, abs_tol=1e-6):
        raise Damaged("deviations must be above 0, and class shares must have the sum 1")
    weights, mean, deviation, means = (tensors[name].float() for name in SINGLE)
    shares, accuracies, agreements = (tensors[name].double().numpy() for name in DOUBLE)
    if any(values.min() < 0 or values.max() > 1 for values in (shares, accuracies, agreements)):
        raise Damaged(f"{', '.join(DOUBLE)}: must be from 0 to 1")
    return Stored(document, Heads(weights, mean, deviation), means, shares, accuracies, agreements)
