"""`xdm-ft cp`."""

from __future__ import annotations

import argparse
from pathlib import Path

from xdm_ft.cli import Answer
from xdm_ft.recipe.text import find_recipe
from xdm_ft.runtime.errors import UserError


def main(arguments: argparse.Namespace) -> Answer:
    """Copies a recipe to a new file, or into a folder. Raises `UserError` if the file exists or cannot be written."""
    source, file = find_recipe(arguments.recipe), Path(arguments.file)
    file = file / source.name if file.is_dir() else file
    try:
        with file.open("x", encoding="utf-8") as copy:
            copy.write(source.read_text(encoding="utf-8"))
    except FileExistsError as error:
        raise UserError(f"{file}: exists already; choose another name") from error
    except OSError as error:
        raise UserError(f"{file}: cannot be written: {error.strerror}") from error
    return Answer({"file": file}, [f"wrote {file}"])
