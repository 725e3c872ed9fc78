"""Library versions that features depend on."""

from __future__ import annotations

from importlib.metadata import version


def versions(*libraries: str) -> dict[str, str]:
    """The versions of `libraries`, and of those that the features of every encoder depend on."""
    return {name: version(name) for name in ("torch", "torchvision", "pillow", *libraries)}
