"""Prints docs/reference.md, which is made from the code: keys of recipes, methods, verbs and functions of Python.

python tools/reference.py > docs/reference.md
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

import xdm_ft
from xdm_ft import xdomainmix
from xdm_ft.augmentations import Augmentations
from xdm_ft.cli.ls import listing
from xdm_ft.cli.parser import parser
from xdm_ft.recipe.check import BLOCKS, COMPONENTS
from xdm_ft.recipe.components import ADD_ONS, find, names, settings_model
from xdm_ft.recipe.method import ListedEncoder, MethodCommon
from xdm_ft.recipe.text import KEYS, in_yaml
from xdm_ft.runtime.settings import Block

ABOUT = """# Reference

```
xdm-ft validate demo                  # a recipe with every key, its value and its meaning
xdm-ft ls methods xdomainmix          # one method with its keys
```

Made from the code by `tools/reference.py`: [keys of recipes](#recipe-keys), [methods](#methods), [verbs](#verbs),
[functions of Python](#python)."""
IN_RECIPES = """\
On the command line `BLOCK.KEY=value` sets a key of a block, and `METHOD.KEY=value` one of a method. A key that is
"needed" has no default. `columns.label` is the key `label` of a block `columns`; only in an item of `methods` a name
such as `sam.rho` is one key."""
IN_METHODS = """\
z are the features [B,K], c is the class head, ℓ the cross-entropy, y the class, d the domain. The docstring of the
class, for example in `xdm_ft/algorithms/coral.py`, has the other symbols."""
IN_PYTHON = """\
The examples are one session. It begins with `import numpy as np`, `import torch`, `import xdm_ft` and, for the last
part, `from xdm_ft.xdomainmix import *`."""
ALONE = {
    "name": ("text", "needed", "names the run, and its directory in `output.dir`"),
    "analyse": ("true, false", "false", "measure the models at the end of the run, as `xdm-ft analyse` does"),
    "label_curve": (
        "true, false",
        "false",
        "measure what few labels of a new site bring: each held-out domain is the site once",
    ),
}
"""The keys without a block: {key: (values, default, meaning)}."""
OF_PARTS = {"data": ("data",), "encoder": ("encoders",), "methods": ("algorithms", *ADD_ONS, "heads")}
"""{block: the folders of components whose keys it takes}"""
SIGNS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
KINDS = {
    bool: "true, false",
    int: "integer",
    float: "number",
    str: "text",
    Path: "path",
    type(None): "null",
    Any: "any",
}
Row = tuple[str, str, str, str]  # key, values, default, meaning


# ---- Markdown


def escaped(text: str) -> str:
    """Returns text in which Markdown reads no signs but those of code."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(r"[\\<>*~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\\g<0>", part) for part in parts[::2]]
    return "".join(parts)


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    heads = [*heads]
    yield from ("", f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}")
    for row in rows:
        cells = [cell.replace("|", "\\|") for cell in row]  # in code too: a table is split first
        yield f"| {' | '.join(cells)} |"


def code(text: str) -> str:
    return f"`{text}`" if text else ""


# ---- keys of recipes


def bounds_of(rules: Iterable[Any]) -> str:
    """Returns the bounds of a number, such as "≥ 0 and ≤ 1"."""
    found = [f"{sign} {getattr(rule, name)}" for rule in rules for name, sign in SIGNS.items() if hasattr(rule, name)]
    return " and ".join(found)


def values_of(annotation: Any, bounds: str = "") -> str:
    """Returns what a setting's type allows."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        rules = [rule for extra in arguments[1:] for rule in getattr(extra, "metadata", [extra])]
        return values_of(arguments[0], bounds_of(rules) or bounds)
    if origin is Literal:
        return ", ".join(in_yaml(value) for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(values_of(argument, bounds) for argument in arguments))
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"list of {values_of(arguments[0], bounds)}"
    if origin is tuple:
        kinds = [values_of(argument, bounds) for argument in arguments]
        return f"{len(kinds)} × {kinds[0]}" if len({*kinds}) == 1 else f"[{', '.join(kinds)}]"
    if origin is dict:
        return f"{{{values_of(arguments[0])}: {values_of(arguments[1])}}}"
    if isinstance(annotation, type) and issubclass(annotation, Block):
        return f"{{{', '.join(annotation.model_fields)}}}"
    if annotation is Augmentations:
        return "text, {text: settings} or a list of them"
    return f"{KINDS[annotation]} {bounds}".strip() if annotation in (int, float) else KINDS[annotation]


def plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def blocks_in(annotation: Any) -> Iterator[tuple[str, type[Block]]]:
    """Yields the blocks that a type holds, each with the part of the key before it: of a mapping `KEY.`."""
    if isinstance(annotation, type) and issubclass(annotation, Block):
        yield "", annotation
    inside = "KEY." if get_origin(annotation) is dict else ""
    for argument in get_args(annotation):
        yield from ((f"{inside}{before}", block) for before, block in blocks_in(argument))


def rows_of(fields: Mapping[str, FieldInfo], about: str = "", default: Block | None = None) -> Iterator[Row]:
    """Yields a row per setting, and after it those of the blocks in it.

    `about`: the meaning of settings that have none. `default`: the block that holds the defaults.
    """
    for key, field in fields.items():
        value = getattr(default, key) if default is not None else field.default
        if default is None and field.is_required():
            shown = "needed"
        elif default is None and field.default_factory is not None:
            shown = "of the machine"
        else:
            shown = "as below" if isinstance(value, Block) else code(in_yaml(plain(value)))
        blocks = [*blocks_in(field.annotation)]
        meaning = field.description or (first_paragraph(blocks[0][1]) if blocks else about)
        assert meaning, f"{key}: no description"
        yield f"`{key}`", escaped(values_of(field.annotation, bounds_of(field.metadata))), shown, meaning
        for before, block in blocks:
            inner = rows_of(block.model_fields, first_paragraph(block), value if isinstance(value, block) else None)
            yield from ((f"`{key}.{before}{row[0][1:]}", *row[1:]) for row in inner)


def merged(tables: Mapping[str, Iterable[Row]]) -> Iterator[tuple[str, ...]]:
    """Yields the rows of several tables, equal ones once, with the names of their tables as the second cell."""
    owners: dict[Row, list[str]] = {}
    for name, rows in tables.items():
        for row in rows:
            owners.setdefault(row, []).append(name)
    for (key, *rest), named in owners.items():
        yield key, ", ".join(named), *rest[:-1], escaped(rest[-1])


def of_components(folders: Iterable[str]) -> Iterator[tuple[str, Iterator[Row]]]:
    """Yields (name, rows of its own keys) of all components of these folders."""
    for folder in folders:
        for name in names(folder):
            prefix = f"{name}." if folder in (*ADD_ONS, "heads", "augmentations") else ""
            fields = settings_model(find(folder, name)).model_fields.items()
            yield name, rows_of({f"{prefix}{key}": field for key, field in fields})


def keys_table(parts: Mapping[str, Iterable[Row]]) -> Iterator[str]:
    """Returns the lines of a table of settings; a column says whose they are, unless they are those of one block."""
    rows = [*merged(parts)]
    if len(parts) == 1:
        return table(("Key", "Values", "Default", "Meaning"), ((key, *rest) for key, _, *rest in rows))
    return table(("Key", "Of", "Values", "Default", "Meaning"), rows)


def recipe_keys() -> Iterator[str]:
    models = BLOCKS | {name: common for name, (_, common) in COMPONENTS.items()} | {"methods": MethodCommon}
    assert {*KEYS} == {*models, *ALONE, "encoders"}, "each key of a recipe has its table"
    yield from ("", "## Recipe keys", "", IN_RECIPES)
    yield from table(("Key", "Values", "Default", "Meaning"), ((f"`{key}`", *rest) for key, rest in ALONE.items()))
    for name in (key for key in KEYS if key in models):
        common = models[name]
        own = [*rows_of(common.model_fields)]
        if name == "methods":  # `trainable` is written as that of the encoder, where its keys are listed
            own = [row for row in own if not row[0].startswith("`trainable.")]
        parts: dict[str, Iterable[Row]] = {"all": own}
        yield from ("", f"### {name}", "", escaped(first_paragraph(common)))
        if name == "encoder":
            fields = ListedEncoder.model_fields.items()
            parts["items of `encoders`"] = rows_of({key: of for key, of in fields if key not in common.model_fields})
            yield from ("", "`encoders` is a list of such blocks, in place of `encoder`.")
        yield from keys_table(parts | dict(of_components(OF_PARTS.get(name, ()))))
    yield from ("", "### Augmentations", "", "Keys of an entry of `train_augmentation`: `{blur: {sigma: [0.1, 2.0]}}`.")
    yield from keys_table(dict(of_components(["augmentations"])))
    yield from ("", "### Data sets, encoders and augmentations")
    for folder in ("data", "encoders", "augmentations"):
        about = ((code(name), escaped(first_paragraph(find(folder, name)))) for name in names(folder))
        yield from table((f"`{folder.removesuffix('s')}`", "Meaning"), about)


# ---- methods


def first_line(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").split("\n")[0]


def first_paragraph(thing: Any) -> str:
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())


def methods() -> Iterator[str]:
    yield from ("", "## Methods", "", IN_METHODS)
    listings = {entry.name.removeprefix("…+"): entry for entry in listing("methods").document}
    for title, folder, written in (
        ("Algorithms", "algorithms", "{}"),
        ("Sharpness-aware steps", "sharpness", "ALGORITHM+{}"),
        ("Averages of weights", "averaging", "ALGORITHM+{}"),
        ("Class heads", "heads", "head: {}"),
    ):
        yield from ("", f"### {title}")
        for name in names(folder):
            cls, listed = find(folder, name), listings.get(name)
            about = first_line(importlib.import_module(cls.__module__))
            yield from ("", f"`{written.format(name)}`: {escaped(about)}", "", f"> {escaped(first_paragraph(cls))}", "")
            trains = f" Works on: {listed.works_on}." if listed is not None else ""
            holds = f" {listed.holds[0].upper()}{listed.holds[1:]}." if listed is not None and listed.holds else ""
            yield f"Source: {escaped(cls.source)}.{trains}{holds}"


# ---- verbs


def written_as(action: argparse.Action) -> str:
    """Returns an argument or option as it is written: `--seed SEED`."""
    choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else None
    value = str(action.metavar or choices or action.dest.upper())
    value = f"{value} …" if action.nargs in ("+", "*") else value
    if not action.option_strings:
        return f"[{value}]" if action.nargs in ("?", "*") else value
    return " ".join([", ".join(action.option_strings), *([value] if action.nargs != 0 else [])])


def row_of(action: argparse.Action) -> tuple[str, str]:
    """Returns an argument and its meaning."""
    assert action.help, f"{action.dest}: no help"
    default = f" (default: {action.default})" if isinstance(action.default, str) else ""
    needed = "needed: " if action.required and action.option_strings else ""
    return code(written_as(action)), escaped(f"{needed}{action.help.replace('%%', '%')}{default}")


def verbs() -> Iterator[str]:
    subparsers = parser()._subparsers
    assert subparsers is not None
    choices: Mapping[str, argparse.ArgumentParser] = subparsers._group_actions[0].choices  # type: ignore[assignment]
    shown = {name: [a for a in verb._actions if a.dest != "help"] for name, verb in choices.items()}
    options: dict[tuple[str, str], list[str]] = {}
    for name, actions in shown.items():
        for action in actions:
            if action.option_strings:
                options.setdefault(row_of(action), []).append(name)
    several = {row: named for row, named in options.items() if len(named) > 1}
    yield from ("", "## Verbs", "", "### Options of several verbs")
    rows = (
        (option, "all" if len(named) == len(shown) else ", ".join(named), meaning)
        for (option, meaning), named in several.items()
    )
    yield from table(("Option", "Of", "Meaning"), rows)
    for name, actions in shown.items():
        positional = " ".join(written_as(action) for action in actions if not action.option_strings)
        about = choices[name].description or ""
        yield from ("", f"### {name}", "", f"`xdm-ft {name} {positional}".rstrip() + f"`: {escaped(about)}.")
        own = [row for row in map(row_of, actions) if row not in several]
        if own:
            yield from table(("Argument", "Meaning"), own)


# ---- Python


class Text(str):
    """An annotation that a signature shows without quotes."""

    def __repr__(self) -> str:
        return str(self)


def signature(thing: Any) -> str:
    """Returns the arguments and the result of a function, on one line if it is short."""
    found = inspect.signature(thing)
    parts = list[str]()
    for parameter in found.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        parts.append(str(parameter.replace(annotation=Text(parameter.annotation))))
    end = f") -> {found.return_annotation}"
    short = f"({', '.join(parts)}{end}"
    return short if len(short) < 90 else "\n    ".join(["(", *(f"{part}," for part in parts)]) + f"\n{end}"


def entry(name: str, thing: Any) -> Iterator[str]:
    """Yields what a function returns, or all about a class, and the example."""
    text, example, rest = (inspect.getdoc(thing) or "").partition(">>> ")
    about, call = text.strip(), f"({', '.join(thing._fields)})" if hasattr(thing, "_fields") else ""
    if inspect.isfunction(thing):
        about, call = first_paragraph(thing), signature(thing)
    yield from ("", "```python", f"{name}{call}", "```", "", escaped(about))
    if example:
        yield from ("", "```python", f"{example}{rest}", "```")


def python() -> Iterator[str]:
    yield from ("", "## Python", "", escaped((xdm_ft.__doc__ or "").split("\n\n")[1].strip()), "", IN_PYTHON)
    for name in ("run", "open", "load", "Results", "Model", "UserError"):
        thing = getattr(xdm_ft, name)
        yield from ("", f"### {name}", *entry(f"xdm_ft.{name}", thing))
        for of_class, member in vars(thing).items() if inspect.isclass(thing) else ():
            if inspect.isfunction(member) and not of_class.startswith("_"):
                yield from entry(f"{name}.{of_class}", member)
            elif isinstance(member, property):
                yield from ("", f"`{name}.{of_class}`: {escaped(first_paragraph(member.fget))}")
    yield from ("", "### xdomainmix", "", escaped(first_paragraph(xdomainmix)))
    for name in xdomainmix.__all__:
        yield from entry(f"xdm_ft.xdomainmix.{name}", getattr(xdomainmix, name))


if __name__ == "__main__":
    print("\n".join([ABOUT, *recipe_keys(), *methods(), *verbs(), *python()]))
