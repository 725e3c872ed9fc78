"""One file per data set. The file's stem is its name in a recipe; the keywords of its constructor are recipe keys."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from xdm_ft.runtime.errors import UserError

if TYPE_CHECKING:
    from xdm_ft.images import ImageDataset


def load_dataset(block: Mapping[str, Any]) -> ImageDataset:
    """Returns the data set of a run, from the block `data` of its recipe as results.json has it.

    Downloads nothing. Raises `UserError` if the data are not there any more."""
    from xdm_ft.images import ImageDataset

    name = str(block["name"])
    try:
        module = importlib.import_module(f"xdm_ft.data.{name}")
    except ModuleNotFoundError as error:
        raise UserError(f'data.name: this version has no data set "{name}"') from error
    cls = next(
        member
        for member in vars(module).values()
        if inspect.isclass(member) and issubclass(member, ImageDataset) and member.__module__ == module.__name__
        and not inspect.isabstract(member)
    )  # fmt: skip
    keys = get_type_hints(cls.__init__, include_extras=True)
    try:  # JSON has dictionaries in place of blocks such as data.columns
        settings = {key: TypeAdapter(keys[key]).validate_python(block[key]) for key in block if key in keys}
    except ValidationError as error:
        raise UserError(f"data: {error.errors()[0]['msg']}") from error
    dataset: ImageDataset = cls(**settings | ({"download": False} if "download" in keys else {}))
    return dataset


def rows_by_name(dataset: ImageDataset, names: Mapping[str, int]) -> dict[str, int]:
    """Returns {name: its row now} of the images that still exist. `names` is {name in the data: its row in the run}."""
    size = len(dataset)
    same = {name: row for name, row in names.items() if row < size and dataset.name_in_data(row) == name}
    if len(same) == len(names):
        return same
    every = {dataset.name_in_data(row): row for row in range(size)}  # files were added or removed
    return {name: every[name] for name in names if name in every}
