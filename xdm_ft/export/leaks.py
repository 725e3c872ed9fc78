"""What a model's files must not tell others: paths of this machine, and names of image files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from xdm_ft.export.onnx import check_installed
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage.checksummed import Damaged, read_tensors

_IMAGE = re.compile(
    r"[^\s\"'`(,;:/\\]+\.(?:jpe?g|png|tiff?|bmp|gif|webp|p[bgpn]m|jp2|avif|heic|dcm|svs|ndpi|mrxs|nii)\b", re.IGNORECASE
)
# a slash at the beginning of a word: not that of and/or, https://, </p>
_ABSOLUTE = re.compile(r"(?:^|[\s\"'`(\[{=:,;>|])((?:file:/*|~[\w.-]*)?/(?!/)[^\s\"'`<>|,;()\[\]{}]+)")
_WINDOWS = re.compile(r"\b[A-Za-z]:\\\w[^\s\"']*|\\\\\w+\\[^\s\"']+")


class Leak(NamedTuple):
    place: str  # in the file: a key, a line
    text: str


def leaks_in(path: Path) -> list[Leak]:
    """Returns all leaks of a .json, .safetensors, .onnx or text file. Tensors are not read, but their names are.

    Raises `UserError` if the file can not be read, or if it is an ONNX file and `onnx` is not installed.
    """
    readers = {".json": _json_texts, ".safetensors": _safetensors_texts, ".onnx": _onnx_texts}
    try:
        texts = list(readers.get(path.suffix, _lines)(path))
    except (OSError, ValueError, RecursionError, Damaged) as error:
        reason = " ".join(str(error).split())[:160]
        raise UserError(f"{path}: can not be read ({reason}); export the model again") from error
    return [Leak(place, found) for place, text in texts for found in leaks_of(text)]


def leaks_of(text: str) -> Iterator[str]:
    """Yields the names of image files and the absolute paths in a text.

    An absolute path has two components or more (/data/site), or exists on this machine (/data).
    """
    yield from _IMAGE.findall(text)
    yield from _WINDOWS.findall(text)
    for found in _ABSOLUTE.findall(text):
        if not found.startswith("/") or "/" in found[1:].rstrip("/") or _exists(found):
            yield found
    home = str(Path("~").expanduser())
    if home.count("/") > 1 and home in text:
        yield home


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:  # too long for a name
        return False


def _json_texts(path: Path) -> Iterator[tuple[str, str]]:
    def walk(value: Any, place: str) -> Iterator[tuple[str, str]]:
        if isinstance(value, dict):
            for key, inner in value.items():
                yield place, key
                yield from walk(inner, f"{place}.{key}" if place else key)
        elif isinstance(value, list):
            for number, inner in enumerate(value):
                yield from walk(inner, f"{place}[{number}]")
        elif isinstance(value, str):
            yield place, value

    return walk(json.loads(path.read_text(encoding="utf-8")), "")


def _safetensors_texts(path: Path) -> Iterator[tuple[str, str]]:
    tensors, metadata = read_tensors(path)
    yield from (("a tensor's name", name) for name in tensors)
    for key, value in metadata.items():
        yield from (("a key of the metadata", key), (f"metadata {key}", value))


def _onnx_texts(path: Path) -> Iterator[tuple[str, str]]:
    check_installed()
    import onnx
    from google.protobuf.message import DecodeError

    def walk(message: Any, place: str) -> Iterator[tuple[str, str]]:
        for field, value in message.ListFields():
            inside = f"{place}.{field.name}" if place else field.name
            for inner in [value] if isinstance(value, str | bytes) or not hasattr(value, "__len__") else value:
                if field.message_type is not None:
                    yield from walk(inner, inside)
                elif isinstance(inner, str):
                    yield inside, inner
                elif isinstance(inner, bytes) and field.name != "raw_data":  # the values of a tensor
                    yield inside, inner.decode(errors="replace")

    try:
        return walk(onnx.load(path, load_external_data=False), "")
    except DecodeError as error:
        raise Damaged("it is no ONNX file") from error


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return ((f"line {number}", line) for number, line in enumerate(lines, start=1))
