"""That a run directory belongs to the recipe that wants to write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from xdm_ft.errors import UserError
from xdm_ft.recipe.read import Recipe
from xdm_ft.storage.checkpoint import differences


def refuse_other_recipe(written: Path, recipe: Recipe) -> None:
    """`written` is the run directory's recipe.yaml. Raises `UserError` where another recipe's run lies there."""
    remedy = "delete the run directory, or set output.dir"
    try:
        before = yaml.safe_load(written.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{written}: is missing, which says what the rest belongs to; {remedy}") from error
    except (yaml.YAMLError, OSError, ValueError, RecursionError) as error:
        raise UserError(f"{written}: is damaged; {remedy}") from error
    if not isinstance(before, dict):
        raise UserError(f"{written}: is damaged; {remedy}")
    changed = differences(comparable(before), comparable(yaml.safe_load(recipe.as_yaml())))
    if changed:
        raise UserError(
            f"{written.parent}: holds the run of another recipe (differs in {', '.join(changed[:5])}); "
            "set name or output.dir, or delete the directory"
        )


def comparable(recipe: dict[str, Any]) -> dict[str, Any]:
    """Where results and features are kept, and how fast features come, changes no number."""
    kept = {key: value for key, value in recipe.items() if key != "output"}
    features = recipe.get("features")
    if isinstance(features, dict):
        kept["features"] = {"precision": features.get("precision"), "views": features.get("views", 0)}
    return kept
