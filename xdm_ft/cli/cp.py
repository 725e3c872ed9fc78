"""`xdm-ft cp`: copies a packaged recipe to a file that you can edit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from xdm_ft.cli.answer import Answer
from xdm_ft.recipe.text import copy_recipe
from xdm_ft.runtime.errors import printable


@dataclass(frozen=True)
class Copied(Answer):
    file: Path

    def text(self) -> str:
        return printable(f"wrote {self.file}")


def copy(recipe: str, file: str) -> Copied:
    return Copied(copy_recipe(recipe, file))
