"""Says at once that a recipe's run is finished already: loading torch and checking the run's files take much longer."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from xdm_ft.recipe.text import RecipeText

logger = logging.getLogger("xdm_ft")


def say_if_finished(text: RecipeText) -> None:
    """Logs a line, in the main process, if the run directory that the recipe names holds a finished run.

    Whether its files are intact, and the recipe the same, is checked later.
    """
    name, output = text.values.get("name"), text.values.get("output")
    folder = output.get("dir", "output") if isinstance(output, dict) else "output"
    if os.environ.get("RANK", "0") != "0" or not isinstance(name, str) or not isinstance(folder, str):
        return
    path = Path(folder) / name
    # `state` is removed when a run ends; os.path, because pathlib raises errors for names that are too long
    if all(os.path.isfile(path / file) for file in ("results.json", "results.md")) and not os.path.exists(
        path / "state"
    ):
        logger.info("%s: a finished run is here", path)
