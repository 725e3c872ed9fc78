"""xdm_ft: fine-tuning foundation models for domain generalization. Importing this package loads nothing heavy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from xdm_ft.errors import UserError
from xdm_ft.version import __version__

if TYPE_CHECKING:
    from xdm_ft.experiment.results import Results

__all__ = ["UserError", "__version__", "run"]


def run(recipe: str | os.PathLike[str] | Mapping[str, Any], **overrides: Any) -> Results:
    """Trains and compares everything that a recipe lists, as `xdm-ft run` does; returns what was measured.

    `recipe` is a file, the name of a recipe that comes with the package, or a recipe as nested dicts. Overrides change
    it: `run("demo", training={"steps": 10})` merges a block key by key, and `run("demo", **{"training.steps": 10})`
    sets a dotted key, whose value replaces what was there. `run("demo").table()` is a list of flat dicts, as
    `pandas.DataFrame` takes it. Progress is on standard error or in the log of the logger "xdm_ft".

    The run directory is `<output.dir>/<name>/`, as on the command line: an interrupted run resumes there, and a
    finished one trains nothing again. Raises `UserError` for what the caller can mend: recipe, data, weights, disk.
    """
    from xdm_ft.experiment import run as run_recipe
    from xdm_ft.recipe.read import check
    from xdm_ft.recipe.text import recipe_of

    return run_recipe(check(recipe_of(recipe, overrides)))
