"""The base of every typed block of a recipe, which lives in the layer that reads it; the type of search ranges."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict

SearchRanges = Mapping[str, Mapping[str, tuple[float, ...]]]
"""Constructor keyword → {`log_uniform` or `uniform`: (low, high)} or {`choice`: values}, as in `search.space`."""


class Block(BaseModel):
    """Strict and frozen: unknown keys are refused, values keep the type written beside them, floats are finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)
