"""The base of every typed block of a recipe. Each block lives in the layer that reads it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Block(BaseModel):
    """Strict and frozen: unknown keys are refused, values keep the type written beside them, floats are finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)
