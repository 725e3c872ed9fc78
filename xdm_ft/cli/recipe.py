"""The recipe that the arguments of a verb name."""

from __future__ import annotations

import argparse
import json
from contextlib import suppress

from xdm_ft.cli.arguments import KEYS
from xdm_ft.recipe import check
from xdm_ft.recipe.settings import Recipe
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage.atomic import replace_text
from xdm_ft.storage.cache_root import cache_root


def load_recipe(arguments: argparse.Namespace) -> Recipe:
    """Returns the checked recipe, and leaves its keys for the Tab key. Raises `UserError`."""
    recipe = check.load(arguments.recipe, arguments.overrides)
    with suppress(UserError, OSError):  # without a cache folder that can be written, Tab offers no keys
        path, text = cache_root() / KEYS, json.dumps(check.known_keys())
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_text(path, text)
    return recipe
