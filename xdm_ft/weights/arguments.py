"""Errors about `encoder.model`, `encoder.weights` and `encoder.kwargs` that timm and open_clip have in common."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from xdm_ft.runtime.errors import UserError


def refuse_reserved(kwargs: dict[str, Any], reserved: tuple[str, ...]) -> None:
    """Raises `UserError` if `kwargs` has keys that the encoder class sets itself."""
    taken = sorted(set(kwargs) & set(reserved))
    if taken:
        raise UserError(f"encoder.kwargs: {', '.join(taken)} can not be set here; leave it out")


def unknown_model(library: ModuleType, name: str, known: Sequence[str]) -> UserError:
    close = difflib.get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else f"{library.__name__}.list_models() lists them"
    return UserError(f'encoder.model: {library.__name__} {library.__version__} has no model "{name}"; {hint}')


def check_hub_weights(model: str, weights: str | None) -> None:
    """Raises `UserError` unless `weights` are those of the hub repository or folder `model`."""
    if weights != "pretrained":
        raise UserError(
            f'encoder.weights: {weights or "null"}: the model "{model}" includes its weights; write weights: pretrained'
        )


def wrong_kwargs(model: str, kwargs: dict[str, Any], error: Exception) -> UserError:
    reason = " ".join(str(error).split())[:160]
    return UserError(f'encoder.kwargs: {kwargs} do not fit "{model}" ({reason}); check their names and values')
