"""The keys that overrides can set, read from the sources: importing the classes takes seconds, and a Tab key waits."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]
BLOCKS = {
    "data": "recipe.settings.DataCommon",
    "encoder": "recipe.method.EncoderCommon",
    "protocol": "protocol.splits.Protocol",
    "features": "features.FeatureSettings",
    "training": "training.Training",
    "search": "recipe.search.Search",
    "report": "report.ReportSettings",
    "output": "recipe.settings.Output",
    "cluster": "recipe.settings.Cluster",
}
METHOD = "recipe.method.MethodCommon"
COMPONENTS = {"data": "data", "encoder": "encoders"}
PARTS = ("algorithms", "sharpness", "averaging", "heads")  # folders of what an item of `methods` names


def override_keys(recipe: Mapping[str, Any]) -> Iterator[str]:
    """Yields the dotted keys that overrides of a recipe, given as plain values, can set."""
    yield from ("name", "methods", "encoders", "analyse")
    for block, place in BLOCKS.items():
        yield from (f"{block}.{key}" for key in _block_keys(*place.rsplit(".", 1)))
        chosen = recipe.get(block)
        if block in COMPONENTS and isinstance(chosen, dict):
            yield from (f"{block}.{key}" for key in component_keys(COMPONENTS[block], str(chosen.get("name"))))
    for part in dict.fromkeys(_parts(recipe.get("methods"))):
        for folder in PARTS:
            yield from (f"{part}.{key}" for key in component_keys(folder, part))
        if (PACKAGE / "algorithms" / f"{part}.py").is_file():
            yield from (f"{part}.{key}" for key in _block_keys(*METHOD.rsplit(".", 1)) if key != "name")


def keys_meant(word: str, recipe: Mapping[str, Any], blocks: Sequence[str], methods: Iterable[str]) -> str:
    """Returns the end of a message about an unknown top-level key: all keys that end with the nearest known word.

    `blocks` are the known top-level keys, `methods` what METHOD.KEY may begin with.
    """
    ending = {name: [name] for name in (*blocks, *methods)}
    for key in override_keys(recipe):
        if "." in key:
            ending.setdefault(key.rpartition(".")[2], []).append(key)
    close = difflib.get_close_matches(word, ending, n=1)
    if not close:
        return f"; known: {', '.join(blocks)}"
    return "; did you mean " + " or ".join(f'"{key}"' for key in ending[close[0]]) + "?"


def _parts(methods: Any) -> Iterator[str]:
    """Yields the names of the components in the unchecked value of `methods`."""
    for item in methods if isinstance(methods, list) else str(methods).split(","):
        found = item if isinstance(item, dict) else {"name": item}
        yield from str(found.get("name")).strip().split("+")
        yield str(found.get("head", "linear"))


def component_keys(folder: str, name: str) -> list[str]:
    """Returns the keys that a component's constructor takes, with dots in blocks; [] if there is no such component."""
    module = f"{folder}.{name}"
    if name.startswith("_") or not (PACKAGE / folder / f"{name}.py").is_file():
        return []
    public = [node for node in _tree(module).body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    found = (_constructor(module, node) for node in public if not _is_abstract(node))
    for own, constructor in filter(None, found):
        arguments = constructor.args.kwonlyargs
        return [key for one in arguments for key in _expanded(own, one.arg, one.annotation)]
    return []


def _is_abstract(node: ast.ClassDef) -> bool:
    """Returns whether the class is not the component of its module, as in `components.find`."""
    return any(ast.unparse(base) in ("NamedTuple", "ABC") for base in node.bases)


def _constructor(module: str, node: ast.ClassDef) -> tuple[str, ast.FunctionDef] | None:
    for one in node.body:
        if isinstance(one, ast.FunctionDef) and one.name == "__init__":
            return module, one
    inherited = (_constructor(*base) for base in _bases(module, node))
    return next((one for one in inherited if one is not None), None)


def _block_keys(module: str, name: str) -> Iterator[str]:
    """Yields the keys of a block; those of a block inside it with a dot."""
    found = _class(module, name)
    if found is None:
        return
    for base in _bases(*found):
        yield from _block_keys(base[0], base[1].name)
    for one in found[1].body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and one.target.id != "model_config":
            yield from _expanded(found[0], one.target.id, one.annotation)


def _expanded(module: str, name: str, annotation: ast.expr | None) -> Iterator[str]:
    """Yields the name of a setting; if it is a block, its keys instead."""
    kind = _type(annotation)
    if _is_block(module, kind):
        yield from (f"{name}.{key}" for key in _block_keys(module, kind))
    else:
        yield name


def _type(annotation: ast.expr | None) -> str:
    """Returns the T of T, `T | None` and `Annotated[T, …]`; "" if it is no single name."""
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Annotated":
        return _type(annotation.slice.elts[0]) if isinstance(annotation.slice, ast.Tuple) else ""
    if isinstance(annotation, ast.BinOp):
        return _type(annotation.left)
    return annotation.id if isinstance(annotation, ast.Name) else ""


def _is_block(module: str, name: str) -> bool:
    found = _class(module, name)
    return found is not None and any(base.name == "Block" for _, base in _bases(*found))


def _bases(module: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
    """Yields (module, class) of the bases that are classes of this package."""
    for base in node.bases:
        if isinstance(base, ast.Name) and (found := _class(module, base.id)) is not None:
            yield found


def _class(module: str, name: str) -> tuple[str, ast.ClassDef] | None:
    """Returns the class that a module calls `name`, with the module that defines it; None if it is not of ours."""
    for node in _tree(module).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom) and name in (alias.name for alias in node.names):
            origin = (node.module or "").partition("xdm_ft.")[2]
            return _class(origin, name) if origin else None
    return None


@cache
def _tree(module: str) -> ast.Module:
    path = PACKAGE.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))
