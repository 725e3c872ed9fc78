"""Errors about `encoder.kwargs`, the model's own arguments."""

from __future__ import annotations

from typing import Any

from xdm_ft.errors import UserError


def refuse_reserved(kwargs: dict[str, Any], reserved: tuple[str, ...]) -> None:
    """Raises `UserError` if `kwargs` has keys that the encoder class sets itself."""
    taken = sorted(set(kwargs) & set(reserved))
    if taken:
        raise UserError(f"encoder.kwargs: {', '.join(taken)} can not be set here; leave it out")


def wrong_kwargs(model: str, kwargs: dict[str, Any], error: Exception) -> UserError:
    return UserError(f'encoder.kwargs: {kwargs} do not fit "{model}" ({" ".join(str(error).split())[:160]})')
