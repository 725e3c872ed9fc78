"""Architectures that others wrote: what they may not name, how large they may be, and that no code comes with them."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from xdm_ft.errors import UserError, printable

_CODE = ("trust_remote_code", "auto_map")  # keys that ask for the code of a repository
_LIMITS = (
    (r"(layers?|depths?|blocks?|stages?|experts?|repeats?)$", 1_000),  # the deepest public models have some hundred
    (r"(width|dims?|hidden_sizes?|intermediate_size|d_model|channels?|planes)$", 65_536),
    (r"ratio", 256),
    (r"(image_size|img_size|resolution)$", 4_096),
    (r"context_length$", 16_384),
    (r"(heads?|sizes?|classes|labels|embeddings|tokens|queries|positions?)$", 1 << 20),
)
"""Part of a key → the largest number it may have; of a list of layers, their sum. The first one that fits counts."""
_LAYERS, _WIDTH, _RATIO, *_, _ROWS = range(len(_LIMITS))
MAX_WEIGHTS = 1 << 35  # about, 137 GB in float32; of the largest public vision models 2 · 10¹⁰
_PROMPT = threading.RLock()


def _values(document: Any) -> Iterator[tuple[str, Any]]:
    """Yields (path of keys, value) of every value that is no dict; of a list, the list and then its items."""
    rest = [("", document)]
    while rest:  # a recursive function would end at a thousand brackets
        place, value = rest.pop()
        if isinstance(value, dict):
            rest += [(f"{place}.{name}".removeprefix("."), inner) for name, inner in value.items()]
        else:
            yield place, value
            rest += [(place, inner) for inner in value] if isinstance(value, list | tuple) else []


def refuse_sources(document: Any, where: str) -> None:
    """Raises `UserError` if an architecture asks for code, or names a repository, a folder or an address.

    It is called with decoded JSON, where an escaped letter is the letter. `where` names the file.
    """
    for place, value in _values(document):
        if any(name in place.split(".") for name in _CODE):
            raise UserError(f"{where}: {place} asks for code of a repository, which is never run")
        if isinstance(value, str) and (re.search(r"[/\\:]", value) or value.startswith(("~", "."))):
            raise UserError(
                f'{where}: {place}: "{printable(value)[:80]}" names another source, and a model directory holds all '
                "that its architecture needs; do not use this model, or export it again if it is yours"
            )


def check_sizes(document: Any, where: str) -> None:
    """Raises `UserError` if an architecture is larger than any model: building it would take minutes and all memory.

    Sizes are known by the ends of their keys, which timm, open_clip and transformers have in common. `where` begins
    the message.
    """
    largest = [1.0] * len(_LIMITS)
    for place, value in _values(document):
        numbers = [one for one in (value if isinstance(value, list | tuple) else [value]) if _is_number(one)]
        kind = next((kind for kind, (name, _) in enumerate(_LIMITS) if re.search(name, place)), None)
        if kind is None or not numbers:
            continue
        limit = _LIMITS[kind][1]
        size = sum(map(abs, numbers)) if kind == _LAYERS else max(map(abs, numbers))
        if not size <= limit:  # NaN too
            shown = str(value)[:60]
            raise UserError(f"{where}: {place} is {shown}, more than any model has; it may be {limit:,} at most")
        largest[kind] = max(largest[kind], size)
    width = largest[_WIDTH]
    weights = max(largest[_LAYERS] * width**2 * largest[_RATIO], largest[_ROWS] * width)
    if weights > MAX_WEIGHTS:
        raise UserError(f"{where}: it has about {weights:.0e} weights; at most {MAX_WEIGHTS:.0e} are built")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@contextmanager
def no_remote_code() -> Iterator[None]:
    """Context in which transformers does not ask whether to run a repository's code, but raises `ValueError`.

    Not all calls of the library are ours: open_clip builds its text tower without `trust_remote_code`, and the library
    then asks on a terminal.
    """
    try:
        from transformers import dynamic_module_utils
    except ImportError:  # nothing can ask
        yield
        return
    with _PROMPT:  # of two threads, the first one to leave would switch it on again
        before = dynamic_module_utils.TIME_OUT_REMOTE_CODE
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
        try:
            yield
        finally:
            dynamic_module_utils.TIME_OUT_REMOTE_CODE = before


def asks_for_code(error: BaseException) -> bool:
    """Returns whether a library has refused to run a repository's code."""
    return "trust_remote_code" in str(error) or "custom code" in str(error)
