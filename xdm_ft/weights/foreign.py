"""Architectures that others wrote: what they may not name, how large they may be, and that no code comes with them."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from xdm_ft.runtime.errors import UserError, printable

_CODE = ("trust_remote_code", "auto_map")  # keys that ask for the code of a repository
TEXT_CONFIG = "text_config.json"  # beside an architecture that names it: of a text side that transformers builds
_OWN_SOURCES = {"hf_model_name": ("", TEXT_CONFIG), "hf_tokenizer_name": ("",)}  # key → what it may be, if it is there
_LIMITS = (
    (r"(layers?|depths?|blocks?|stages?|experts?|repeats?)$", 1_000),  # the deepest public models have some hundred
    (r"(intermediate_size|mlp_dim)$", 65_536),
    (r"(width|dims?|hidden_sizes?|d_model|channels?|planes)$", 65_536),
    (r"ratio", 256),
    (r"(image_size|img_size|resolution)$", 4_096),
    (r"patch_size$", 4_096),
    (r"context_length$", 16_384),
    (r"heads?$", 1 << 20),
    (r"(sizes?|classes|labels|embeddings|tokens|queries|positions?)$", 1 << 20),
)
"""Part of a key → the largest number it may have; of a list of layers, their sum. The first one that fits counts."""
_LAYERS, _HIDDEN, _WIDTH, _RATIO, _IMAGE, _PATCH, _, _HEADS, _ROWS = range(len(_LIMITS))
MAX_WEIGHTS = 1 << 35  # about, 137 GB in float32; of the largest public vision models 2 · 10¹⁰
# What is estimated of public models with attention is up to 5 times what they have, of others up to 110 times. A file
# has 2 or 4 bytes per weight.
PER_BYTE, PER_BYTE_OF_CONVOLUTIONS, FREE_WEIGHTS = 8, 64, 1 << 27
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
        own = _OWN_SOURCES.get(place.rpartition(".")[2])
        if (own is not None and value is not None and value not in own) or (
            isinstance(value, str) and (re.search(r"[/\\:]", value) or value.startswith(("~", ".")))
        ):
            raise UserError(
                f'{where}: {place}: "{printable(str(value))[:80]}" names another source, and a model directory holds '
                "all that its architecture needs; do not use this model, or export it again if it is yours"
            )


def check_sizes(document: Any, where: str, file: Path | None = None) -> None:
    """Raises `UserError` if an architecture is larger than any model: building it would take minutes and all memory.

    Sizes are known by the ends of their keys, which timm, open_clip and transformers have in common. The number of
    weights is estimated as that of a transformer. `file` holds the weights, if it is known: then it may not be many
    times as large. `where` begins the message.
    """
    largest, patch = [0.0] * len(_LIMITS), math.inf
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
        patch = min(patch, *map(abs, numbers)) if kind == _PATCH else patch
    width = largest[_WIDTH]
    hidden = max(largest[_HIDDEN], largest[_RATIO] * width) or 4 * width
    positions = (largest[_IMAGE] / max(patch, 1)) ** 2
    # of each layer four projections for attention, and two of its MLP; of each position, word or class one vector
    weights = max(largest[_LAYERS] * (4 * width**2 + 2 * width * hidden), max(largest[_ROWS], positions) * width)
    most = MAX_WEIGHTS
    if file is not None:
        per_byte = PER_BYTE if largest[_HEADS] else PER_BYTE_OF_CONVOLUTIONS
        most = min(most, FREE_WEIGHTS + per_byte * file.stat().st_size)
    if weights > most:
        raise UserError(f"{where}: it has about {weights:.0e} weights; at most {most:.0e} are built")


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
