"""The base class of every typed block of a recipe, the type of search ranges, and lists of one.

Each block is defined in the package that reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

from xdm_ft.runtime.errors import one_form

SearchRanges = Mapping[str, Mapping[str, tuple[float, ...]]]
"""Constructor keyword → {`log_uniform` or `uniform`: (low, high)} or {`choice`: values}, as in `search.space`."""


Name = Annotated[str, AfterValidator(one_form)]
"""A name of a class, a domain or a row, as names of the data are compared."""


class Block(BaseModel):
    """Strict and frozen: unknown keys are refused, values must have the declared type, floats must be finite."""

    # protected_namespaces: pydantic reserves names that begin with model_, which a component may give to a setting
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


class Problem(NamedTuple):
    """Why values of a block do not go together. A block yields its own: its keys and their rules are in one place."""

    key: str  # dotted, in the recipe
    text: str
    causes: tuple[str, ...] = ()  # other dotted keys that the rule depends on


def _one_or_many(value: Any) -> Any:
    return (value,) if isinstance(value, str | int | float | date) else value


OneOrMany = BeforeValidator(_one_or_many)
"""Marks a setting that is a list: a single text, number or boolean stands for a list of one."""
