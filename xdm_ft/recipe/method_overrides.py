"""Overrides that begin with a method: `METHOD.KEY=VALUE` changes items of `methods`."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from xdm_ft.recipe import components
from xdm_ft.recipe.faults import Faults
from xdm_ft.recipe.text import RecipeText, dotted

BLOCK = "trainable"  # the setting of a method that may be a block of keys


def split_name(name: str) -> tuple[str, list[str]]:
    """Returns algorithm and add-ons: xdomainmix+sam+swad → (xdomainmix, [sam, swad]). sam alone means erm+sam."""
    first, *add_ons = name.split("+")
    if first in components.names("algorithms") or not any(first in components.names(f) for f in components.ADD_ONS):
        return first, add_ons
    return "erm", [first, *add_ons]


def with_method_overrides(faults: Faults, blocks: Collection[str]) -> dict[str, Any]:
    """Returns the recipe's values, with every override `METHOD.KEY=VALUE` put into the items of `methods` it names.

    METHOD is a component (every item that uses it), the name of an item as it is written, or a label. The label wins
    over the written name, and this one over the component. Names of `blocks` are no methods. An override that names
    none stays as it is, for `check` to refuse; adds a fault for every override that may mean two.
    """
    text, items = faults.text, _items(faults.text.values.get("methods"))
    assigned = sorted({str(k[0]) for k in text.overridden if k[0] not in blocks and k[:1] not in text.lines})
    names = method_names(text.values.get("methods"))
    unknown = set[str]()
    changes: list[tuple[int, int, str, str, Any]] = []  # rank, index in `items`, key of the item, override, value
    for override, value in (one for first in assigned for one in _written(text, first)):
        key, first = tuple(override.split(".")), override.partition(".")[0]
        named = [name for name in names if f"{override}.".startswith(f"{name}.")]  # labels may contain dots
        if not named and {*first.split("+")} <= components.method_parts().keys():
            named = [first]
        if not named:
            unknown.add(first)
        elif len(named) > 1:
            faults.add(key, f"may mean {' or '.join(named)}; choose a label without a dot")
        elif override == named[0]:
            faults.add(key, f"is a method, not a value; write {override}.KEY=VALUE")
        else:
            places, problem = _places(items, named[0], override.removeprefix(f"{named[0]}."))
            if problem:
                faults.add(key, problem)
            changes += [(rank, i, own, override, value) for rank, i, own in places]
    for _, i, own, override, value in sorted(changes, key=lambda change: change[0]):
        path = tuple(own.split(".")) if own.startswith(f"{BLOCK}.") else (own,)
        items[i] = _with(items[i], path, value)
        text.mark_overridden(("methods", i, *path))
        text.written_as[("methods", i, *path)] = override
    values = {key: value for key, value in text.values.items() if key in unknown or key not in assigned}
    return values | {"methods": items} if items else values


def method_names(methods: Any) -> list[str]:
    """Returns what METHOD may be, given the unchecked value of `methods`: components, names and labels of items."""
    written = [name for item in _items(methods) for key in ("name", "label") if (name := _text(item, key))]
    return list(dict.fromkeys([*components.method_parts(), *written]))


def _written(text: RecipeText, first: str) -> Iterator[tuple[str, Any]]:
    """Yields the dotted key and value of every setting below `first`; `trainable={…}`, written as a whole, is one."""
    whole = {name for key in text.overridden if (name := dotted(key)).endswith(f".{BLOCK}")}

    def below(name: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict) and value and name not in whole:
            for key, inner in value.items():
                yield from below(f"{name}.{key}", inner)
        else:
            yield name, value

    return below(first, text.values[first])


def _with(block: Any, path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Returns a copy of a block in which the key at `path` has the value; what is no block on the way is replaced."""
    first, *rest = path
    own = block if isinstance(block, dict) else {}
    return {**own, first: _with(own.get(first), tuple(rest), value) if rest else value}


def _items(methods: Any) -> list[Any]:
    """Returns the unchecked items of `methods`, names as blocks; [] if it is neither a list nor a text of names."""
    if isinstance(methods, str):  # methods=erm,xdomainmix
        methods = [name.strip() for name in methods.split(",") if name.strip()]
    listed = methods if isinstance(methods, list) else []
    return [{"name": item} if isinstance(item, str) else item for item in listed]


def _text(item: Any, key: str) -> str:
    """Returns the text at `key` of an unchecked item, or ""."""
    value = item.get(key) if isinstance(item, dict) else None
    return value if isinstance(value, str) else ""


def _parts_of(item: Any) -> list[str]:
    """Returns the names of the known components that an unchecked item of `methods` names."""
    first, add_ons = split_name(_text(item, "name"))
    return [name for name in (first, *add_ons, _text(item, "head")) if name in components.method_parts()]


def _places(items: list[Any], name: str, setting: str) -> tuple[list[tuple[int, int, str]], str]:
    """Returns (rank, index, key) of each item that `name.setting` changes, and what is wrong with it, or ""."""
    using = [i for i, item in enumerate(items) if name in (*_parts_of(item), _text(item, "name"))]
    labelled = [i for i, item in enumerate(items) if name == _text(item, "label") and i not in using]
    if using and labelled:
        return [], f"{name} is the label of methods.{labelled[0]}, and another item uses it; choose another label"
    if not using and not labelled:
        return [], f"no item of methods uses {name}; add it to one, or leave this out"
    folder = components.method_parts().get(name)
    if folder and using:
        return [(0, i, setting if folder == "algorithms" else f"{name}.{setting}") for i in using], ""
    found = []
    for i in using or labelled:
        keys = _keys_of(items[i], setting)
        if len(keys) > 1:
            return [], f"is a key of {' and '.join(keys)}; write {' or '.join(f'{name}.{k}.{setting}' for k in keys)}"
        rank = 2 if name == _text(items[i], "label") else 1
        found.append((rank, i, next(iter(keys.values()), setting)))
    return found, ""


def _keys_of(item: Any, setting: str) -> dict[str, str]:
    """Returns {component: key in the item} of the components that `setting`, with or without their name, may mean."""
    found: dict[str, str] = {}
    for name in _parts_of(item):
        folder, own = components.method_parts()[name], setting.removeprefix(f"{name}.")
        if own in components.settings_model(components.find(folder, name)).model_fields:
            found[name] = own if folder == "algorithms" else f"{name}.{own}"
    return found
