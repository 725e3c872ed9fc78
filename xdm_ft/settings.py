"""The base class of every typed block of a recipe, and the type of search ranges.

Each block is defined in the package that reads it.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict

SearchRanges = Mapping[str, Mapping[str, tuple[float, ...]]]
"""Constructor keyword → {`log_uniform` or `uniform`: (low, high)} or {`choice`: values}, as in `search.space`."""


class Block(BaseModel):
    """Strict and frozen: unknown keys are refused, values must have the declared type, floats must be finite."""

    # protected_namespaces: pydantic reserves names that begin with model_, which a component may give to a setting
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)
