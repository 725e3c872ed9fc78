"""The base of every typed block of a recipe. Each block lives in the layer that reads it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Block(BaseModel):
    """Strict and frozen: unknown keys are refused, values keep the type that is written beside them."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
