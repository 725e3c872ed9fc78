"""Library versions that features depend on."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version

_version = cache(version)  # of torch: 30 ms each time, for its metadata are long


def versions(*libraries: str) -> dict[str, str]:
    """The versions of `libraries`, and of those that the features of every encoder depend on."""
    return {name: _version(name) for name in ("torch", "torchvision", "pillow", *libraries)}
