"""xdm_ft: fine-tuning foundation models for domain generalization. `import xdm_ft` loads no heavy library."""

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
    """Trains and compares all methods of a recipe, as `xdm-ft run` does, and returns the results.

    `recipe` is a file, the name of a packaged recipe, or nested dicts. Overrides change it:
    `run("demo", training={"steps": 10})` merges a block key by key, and `run("demo", **{"training.steps": 10})`
    replaces the value of a dotted key; `**{"xdomainmix.warmup_steps": 300}` sets a key of methods, as on the command
    line. `run("demo").table()` returns a list of flat dicts for `pandas.DataFrame`.
    Progress is logged to the logger "xdm_ft", or shown on standard error.

    The run directory is `<output.dir>/<name>/`, as on the command line. An interrupted run resumes there; a finished
    run trains nothing again. Raises `UserError` for faults that the caller can repair: recipe, data, weights, disk.
    """
    from xdm_ft.experiment import run as run_recipe
    from xdm_ft.recipe.read import check
    from xdm_ft.recipe.text import recipe_of

    return run_recipe(check(recipe_of(recipe, overrides)))
