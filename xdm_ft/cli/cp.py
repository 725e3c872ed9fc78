"""`xdm-ft cp`."""

from __future__ import annotations

import argparse

from xdm_ft.cli.answer import Answer
from xdm_ft.cli.arguments import complete_with, recipe_names

HELP = "copy a packaged recipe to a file that you can edit"
EXAMPLES = ("xdm-ft cp clip_folder mine.yaml",)


def add_arguments(verb: argparse.ArgumentParser) -> None:
    complete_with(verb.add_argument("recipe", metavar="RECIPE"), recipe_names)
    verb.add_argument("file", metavar="FILE")


def main(arguments: argparse.Namespace) -> Answer:
    from xdm_ft.recipe.text import copy_recipe

    file = copy_recipe(arguments.recipe, arguments.file)
    return Answer({"file": file}, [f"wrote {file}"])
