"""Recipes: YAML text → typed, frozen settings. All faults are reported together, before any data is read."""
