"""`xdm-ft cp`."""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path

from xdm_ft.cli import CommandResult
from xdm_ft.recipe.text import find_recipe
from xdm_ft.storage.atomic import Together, disk_errors


def main(arguments: argparse.Namespace) -> CommandResult:
    """Copies a recipe to a new file, or into a folder. Raises `UserError` if the file exists or cannot be written."""
    source, file = find_recipe(arguments.recipe), Path(arguments.file)
    file = file / source.name if file.is_dir() else file
    with disk_errors(file):
        os.stat(file.parent)  # a folder that is missing may be a mistyped name
    with Together(new=True) as files:
        files.add(file, partial(Path.write_bytes, data=source.read_bytes()))
        files.replace()
    return CommandResult({"file": file}, [f"wrote {file}"])
