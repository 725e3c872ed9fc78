"""Component names → classes. A component's name is the name of its module, so adding a component is adding a file.

Every module in a folder of `FOLDERS` holds one public class, the component. Base classes are in the package's
`__init__`; modules whose names begin with `_` are no components.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import create_model

from xdm_ft.runtime.errors import UserError, did_you_mean
from xdm_ft.runtime.settings import Block
from xdm_ft.version import code_of

FOLDERS = {
    "methods": "algorithms",
    "heads": "heads",
    "sharpness": "sharpness",
    "averaging": "averaging",
    "data": "data",
    "encoders": "encoders",
    "augmentations": "augmentations",
}
ADD_ONS = ("sharpness", "averaging")  # folders of the components that a method's name may add: erm+sam, erm+swad


def names(folder: str) -> list[str]:
    """Returns the names of the components in `xdm_ft/<folder>/`, without importing them."""
    package = importlib.import_module(f"xdm_ft.{folder}")
    modules = pkgutil.iter_modules(package.__path__)
    return sorted(module.name for module in modules if not module.ispkg and not module.name.startswith("_"))


def method_parts() -> dict[str, str]:
    """Returns {name: folder} of all components that an item of `methods` may name, algorithms first."""
    return {name: folder for folder in ("algorithms", *ADD_ONS, "heads") for name in names(folder)}


def find(folder: str, name: str) -> type[Any]:
    """Returns the class of a component. Raises `UserError` with the nearest known name if there is none."""
    if name not in (allowed := names(folder)):
        raise UserError(f'no "{name}" in {folder}{did_you_mean(name, allowed)}')
    module = importlib.import_module(f"xdm_ft.{folder}.{name}")
    # abstract classes and NamedTuples beside the component are not components
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
    """Returns a strict block with the fields of `common` and the keyword-only arguments of `cls`'s constructor.

    A component that is a block has its own. `prefix`, such as `sam.`, is put before the names of the arguments, as
    `common` may have fields of the same names.
    """
    if issubclass(cls, Block):
        return cls
    hints = get_type_hints(cls.__init__, include_extras=True)  # extras: the Field(…) inside Annotated
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(cls.__init__).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            default = ... if parameter.default is inspect.Parameter.empty else parameter.default
            fields[f"{prefix}{name}"] = (hints[name], default)
    return create_model(f"{cls.__name__}Settings", __base__=common, **fields)


@dataclass(frozen=True)
class Component:
    """A component named in a recipe: its class and the settings for its constructor."""

    name: str
    cls: type[Any]
    block: Block  # common keys and the component's own
    keys: tuple[str, ...]  # of the constructor
    prefix: str = ""  # of these names in the block, such as `sam.`; the keys of an algorithm have none

    def kwargs(self) -> dict[str, Any]:
        """Returns the keywords for the constructor."""
        return {key: getattr(self.block, f"{self.prefix}{key}") for key in self.keys}

    def settings(self) -> dict[str, Any]:
        """Returns the same values under their names in a recipe and in results."""
        return {f"{self.prefix}{key}": value for key, value in self.kwargs().items()}

    def code(self) -> str:
        return code_of(self.cls)

    def build(self, *args: Any) -> Any:
        return self.cls(*args, **self.kwargs())
