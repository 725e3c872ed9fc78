"""Name → class, with "did you mean". A component's name is the stem of the module that holds it.

A folder (one of `FOLDERS`) is a package. Every plain module in it holds one public class, the component; base classes
and helpers are in the package's `__init__` and in modules whose name begins with `_`.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any, get_type_hints

from pydantic import create_model
from pydantic.fields import FieldInfo

from xdm_ft.errors import UserError, did_you_mean
from xdm_ft.settings import Block

FOLDERS = {
    "methods": "algorithms",
    "heads": "heads",
    "sharpness": "sharpness",
    "averaging": "averaging",
    "data": "data",
    "encoders": "encoders",
}
BEHIND = ("sharpness", "averaging")  # folders of what a method's name may have behind a +


def names(folder: str) -> list[str]:
    """The names of the components in `xdm_ft/<folder>/`, without importing them."""
    package = importlib.import_module(f"xdm_ft.{folder}")
    modules = pkgutil.iter_modules(package.__path__)
    return sorted(module.name for module in modules if not module.ispkg and not module.name.startswith("_"))


def method_parts() -> dict[str, str]:
    """Name → folder of everything that an item of `methods` may name, the algorithms first."""
    return {name: folder for folder in ("algorithms", *BEHIND, "heads") for name in names(folder)}


def find(folder: str, name: str) -> type[Any]:
    """The class behind a name. Raises `UserError` with the nearest known name."""
    known = names(folder)
    if name not in known:
        raise UserError(f'no "{name}" in {folder}{did_you_mean(name, known)}')
    module = importlib.import_module(f"xdm_ft.{folder}.{name}")
    classes = [
        member
        for key, member in vars(module).items()
        if inspect.isclass(member) and member.__module__ == module.__name__ and not key.startswith("_")
        and not inspect.isabstract(member) and member.__mro__[1] is not tuple
    ]  # fmt: skip
    if len(classes) != 1:
        raise ImportError(f"{module.__name__} must hold one public class, found {[c.__name__ for c in classes]}")
    return classes[0]


def settings_model(cls: type[Any], common: type[Block] = Block, prefix: str = "") -> type[Block]:
    """A strict block with the fields of `common` and the constructor keywords of `cls` (those after `*`).

    `prefix` stands before the names of the latter (`sam.`), where `common` may have fields of the same names.
    """
    hints = get_type_hints(cls.__init__, include_extras=True)
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(cls.__init__).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            default = ... if parameter.default is inspect.Parameter.empty else parameter.default
            fields[f"{prefix}{name}"] = (hints[name], default)
    return create_model(f"{cls.__name__}Settings", __base__=common, **fields)


def describe(model: type[Block]) -> dict[str, FieldInfo]:
    """Key → type, default and meaning."""
    return dict(model.model_fields)
