"""The base class of every typed block of a recipe, the type of search ranges, and lists of one.

Each block is defined in the package that reads it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from datetime import date
from typing import Annotated, Any, NamedTuple, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationInfo, field_validator

from xdm_ft.runtime.errors import one_form

SearchRanges = Mapping[str, Mapping[str, tuple[float, ...]]]
"""Constructor keyword → {`log_uniform` or `uniform`: (low, high)} or {`choice`: values}, as in `search.space`."""


Name = Annotated[str, AfterValidator(one_form)]
"""A name of a class, a domain or a row, as names of the data are compared."""
LARGEST = 2**32 - 1  # of an integer without a bound of its own: the largest seed of NumPy's and others' generators


class Block(BaseModel):
    """Strict and frozen: unknown keys are refused, values must have the declared type, floats must be finite, integers
    at most `LARGEST`; true and false are no numbers."""

    # protected_namespaces: pydantic reserves names that begin with model_, which a component may give to a setting
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _numbers(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields[str(info.field_name)]
        kinds = set(_leaves(field.annotation))
        numbers, any_kind = kinds & {int, float}, kinds & {bool, Any, True, False}
        bounded = any(hasattr(rule, "le") or hasattr(rule, "lt") for rule in field.metadata)
        for number in value if isinstance(value, list | tuple) else [value]:
            if isinstance(number, bool) and numbers and not any_kind:
                raise ValueError(f"must be a number, not {str(number).lower()}")
            is_large = isinstance(number, int | float) and abs(number) > LARGEST
            if is_large and numbers == {int} and not bounded:
                raise ValueError(f"must be at most {LARGEST}")
        return value


class Problem(NamedTuple):
    """Why values of a block do not go together. A block yields its own: its keys and their rules are in one place."""

    key: str  # dotted, in the recipe
    text: str
    causes: tuple[str, ...] = ()  # other dotted keys that the rule depends on


def _leaves(annotation: Any) -> Iterator[Any]:
    """Yields the types that an annotation is made of, and the values of literals."""
    arguments = [part for part in get_args(annotation) if isinstance(part, Hashable)]
    if not arguments:
        yield annotation
    for part in arguments:
        yield from _leaves(part)


def _one_or_many(value: Any) -> Any:
    return (value,) if isinstance(value, str | int | float | date) else value


OneOrMany = BeforeValidator(_one_or_many)
"""Marks a setting that is a list: a single text, number or boolean stands for a list of one."""
