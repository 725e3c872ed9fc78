"""Recipes: YAML text → typed, frozen settings. All faults are reported together, before any data is read."""

from xdm_ft.recipe.blocks import Recipe
from xdm_ft.recipe.read import load

__all__ = ["Recipe", "load"]
