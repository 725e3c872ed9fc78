"""Recipes: YAML text with line numbers → typed, frozen settings, all faults at once, before any data is read."""

from xdm_ft.recipe.blocks import Recipe
from xdm_ft.recipe.read import load

__all__ = ["Recipe", "load"]
