"""Random search: the range of each searched hyper-parameter, and its draw in every trial.

A draw depends only on the trial and the key. So it is the same on every machine and for every method, held-out domain
and seed: hyper-parameters that methods have in common are drawn identically.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from typing import Annotated, Literal
from zlib import crc32

import torch
from pydantic import Field, model_validator

from xdm_ft.recipe import components
from xdm_ft.runtime.randomness import Stream, uniform
from xdm_ft.runtime.settings import Block, OneOrMany, Problem

Value = float | int | str | bool
_Bounds = tuple[float, float]
EDGE = 0.05  # share of a range that counts as its edge, at either end


class Distribution(Block):
    """The distribution of a hyper-parameter: exactly one of the three keys is given."""

    log_uniform: _Bounds | None = Field(default=None, description="[low, high], uniform in the logarithm")
    uniform: _Bounds | None = Field(default=None, description="[low, high]")
    choice: Annotated[tuple[Value, ...], OneOrMany, Field(min_length=1)] | None = Field(
        default=None, description="values of equal probability"
    )

    @model_validator(mode="after")
    def _one_of_them(self) -> Distribution:
        given = [name for name in ("log_uniform", "uniform", "choice") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError("give exactly one of log_uniform, uniform, choice")
        bounds = self.log_uniform or self.uniform
        if bounds is not None and not (math.isfinite(bounds[0]) and bounds[0] < bounds[1] < math.inf):
            raise ValueError("low must be below high")
        if self.log_uniform is not None and self.log_uniform[0] <= 0:
            raise ValueError("log_uniform needs a low above 0")
        return self

    @property
    def bounds(self) -> _Bounds | None:
        return self.log_uniform or self.uniform

    def at(self, u: float) -> Value:
        """Returns the value at the quantile u in [0, 1)."""
        if self.choice is not None:
            return self.choice[int(u * len(self.choice))]
        assert self.bounds is not None
        low, high = self.bounds
        if self.log_uniform is not None:
            return math.exp(math.log(low) + u * (math.log(high) - math.log(low)))
        return low + u * (high - low)

    def quantile_of(self, value: float) -> float:
        """Returns the quantile of a value: 0 at the low end of the range, 1 at the high end."""
        assert self.bounds is not None
        low, high = self.bounds
        if self.log_uniform is not None:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return (value - low) / (high - low)


def _powers(low: float, high: float) -> Distribution:
    return Distribution(log_uniform=(10**low, 10**high))


_TRAINING_RANGES: dict[str, dict[str, Distribution]] = {
    "frozen": {"lr": _powers(-4, -1), "weight_decay": _powers(-6, -2)},
    "domainbed": {
        "encoder_lr": _powers(-5, -3.5),
        "lr": _powers(-5, -3.5),
        "weight_decay": _powers(-6, -2),
        "batch_size": Distribution(log_uniform=(2**3, 2**5.5)),
    },
}
"""{preset: ranges of keys of `training`}. `frozen` is for heads on cached features.

`domainbed` has DomainBed's default ranges for images that are not tiny (Gulrajani & Lopez-Paz 2021), with one draw for
lr and encoder_lr. DomainBed also draws dropout and annealing steps; here they keep the recipe's values.
"""


@cache
def preset_ranges(preset: str) -> dict[str, Distribution]:
    """Returns the ranges of a preset: KEY of `training`, and METHOD.KEY from the `search_ranges` of every component."""
    if preset == "none":
        return {}
    of_components = {
        f"{name}.{key}": Distribution.model_validate(range_)
        for name, folder in components.method_parts().items()
        for key, range_ in components.find(folder, name).search_ranges.items()
    }
    return {**_TRAINING_RANGES[preset], **of_components}


LOW_RANK_RANGES = {"domainbed": {"encoder_lr": _powers(-4, -2.5)}}
"""{preset: ranges that replace those of the preset for low-rank updates}, which start at 0 and need higher rates."""

DATA_RANGES: dict[tuple[str, str], dict[str, Distribution]] = {
    ("domainbed", "domainnet"): {"batch_size": Distribution(log_uniform=(2**3, 2**5))}
}
"""{(preset, data set): ranges that replace those of the preset on that data set}"""

TRAINING_KEYS = (
    "lr", "encoder_lr", "layer_decay", "weight_decay", "momentum", "beta1", "beta2", "batch_size", "clip_norm",
    "patience",
)  # fmt: skip
"""Keys of `training` that a search may vary."""

METHOD_KEYS = ("anchor",)
"""Keys of every item of `methods` that a search may vary."""


class Search(Block):
    """Random search: each method × held-out domain × seed is trained `trials` times; the selection rule picks one."""

    trials: int = Field(
        default=1,
        ge=1,
        le=10_000,
        description="number of trials; the first uses the recipe's own values, so 1 means no search",
    )
    preset: Literal["none", "frozen", "domainbed"] = Field(
        default="none",
        description="ready-made ranges. frozen: for heads on cached features; domainbed: DomainBed's defaults",
    )
    space: dict[str, Distribution] = Field(
        default={},
        description="KEY or METHOD.KEY → {log_uniform: [low, high]}, {uniform: [low, high]} or "
        f"{{choice: [values]}}; KEY: {', '.join((*TRAINING_KEYS, *METHOD_KEYS))}. Overrides the preset's range. "
        "Settings that a method sets itself are not searched",
    )
    sampler: Literal["random", "sobol"] = Field(
        default="random", description="independent draws, or a scrambled Sobol sequence (more even)"
    )

    @property
    def distributions(self) -> dict[str, Distribution]:
        return {**preset_ranges(self.preset), **self.space} if self.trials > 1 else {}

    def for_data(self, name: str) -> Search:
        """Returns a copy whose `space` also holds the preset's ranges for the data set `name`."""
        ranges = DATA_RANGES.get((self.preset, name), {}) if self.trials > 1 else {}
        return self.model_copy(update={"space": {**ranges, **self.space}})

    def for_low_rank(self) -> Search:
        """Returns a copy whose `space` also holds the preset's ranges for low-rank updates of the encoder."""
        ranges = LOW_RANK_RANGES.get(self.preset, {}) if self.trials > 1 else {}
        return self.model_copy(update={"space": {**ranges, **self.space}})

    def problems(self) -> Iterator[Problem]:
        """Yields settings that draw nothing, or the same in every trial."""
        if self.space and self.trials == 1:
            problem = "1 never uses search.space, because the first trial has the recipe's own values; raise it"
            yield Problem("search.trials", problem, ("search.space",))
        if self.preset != "none" and self.trials == 1:
            problem = (
                f"1 never uses the preset {self.preset}, because the first trial has the recipe's own values; raise it"
            )
            yield Problem("search.trials", problem, ("search.preset",))
        if self.trials > 1 and not self.distributions:
            problem = f"{self.trials} would train each model {self.trials} times with the same settings"
            remedy = "set search.preset (frozen or domainbed), or ranges in search.space"
            yield Problem("search.trials", f"{problem}; {remedy}", ("search.preset", "search.space"))

    def quantile(self, key: str, trial: int) -> float:
        """Returns the uniform draw in [0, 1) of a key in a trial."""
        return _quantiles(self.sampler, key, self.trials)[trial - 1]

    def drawn(self, trial: int) -> dict[str, Value]:
        """Returns {key: value} for a trial, 0 … trials − 1. Trial 0 draws nothing: it has the recipe's own values."""
        if trial == 0:
            return {}
        # DomainBed has one learning rate for the whole network, so encoder_lr takes the draw of lr
        common_draw = (
            {"encoder_lr": "lr"} if self.preset == "domainbed" and not {"lr", "encoder_lr"} & {*self.space} else {}
        )
        return {
            key: distribution.at(self.quantile(common_draw.get(key, key), trial))
            for key, distribution in self.distributions.items()
        }


@lru_cache(maxsize=256)
def _quantiles(sampler: str, key: str, trials: int) -> list[float]:
    """Returns the draws of a key in the trials 1 … `trials` − 1. More trials change none."""
    # not `hash`, which differs between processes
    name = crc32(key.encode())
    if sampler == "random":
        draws: list[float] = uniform(name, torch.arange(1, trials), Stream.SEARCH, 0).tolist()
        return draws
    # one sequence per key: searching one more key does not change the draws of the others
    points = torch.quasirandom.SobolEngine(1, scramble=True, seed=name).draw(trials - 1, dtype=torch.float64)
    # below 1, where a choice has no value; torch's points are multiples of 2⁻³⁰
    return [min(point, 1 - 2**-30) for point in points[:, 0].tolist()]


def at_the_edge(search: Search, key: str, value: Value | None) -> bool:
    """Returns whether a drawn number is at an edge of its range, so that a better value may lie outside.

    The edges are the outer EDGE of a range; for an integer setting also its lowest and highest number; and the lowest
    and highest of three or more choices (of two numbers, each would be an edge). Texts and booleans have no order.
    """
    distribution = search.distributions.get(key)
    if distribution is None or isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if distribution.choice is not None:
        numbers = [choice for choice in distribution.choice if isinstance(choice, int | float)]
        numbers = [number for number in numbers if not isinstance(number, bool)]
        return len({*numbers}) > 2 and not min(numbers) < value < max(numbers)
    if distribution.log_uniform is not None and value <= 0:  # 0 switches a setting off, and has no logarithm
        return False
    assert distribution.bounds is not None
    low, high = distribution.bounds
    if isinstance(value, int) and not round(low) < value < round(high):  # draws of integer settings are rounded
        return True
    return not EDGE <= distribution.quantile_of(value) <= 1 - EDGE


def settings_of(values: Mapping[str, Value], component: str) -> dict[str, Value]:
    """Returns the drawn values of one component, without its name: {KEY: value} from {METHOD.KEY: value}."""
    return {key.partition(".")[2]: value for key, value in values.items() if key.startswith(f"{component}.")}
