"""What a verb returns: its result as data, for `--json`, and as text, for a reader."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from typing import Any, ClassVar

from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.terminal import show


class Answer:
    """The result of a verb: a subclass is a dataclass of values, and makes its text from them alone.

    Values are fractions, seconds and bytes, and names are as they are in the data: only the text rounds and escapes.
    """

    shown_with_error: ClassVar[bool] = False
    """Whether the text is shown even if there is an error; what `--json` prints always is."""

    @property
    def error(self) -> UserError | None:
        """A fault that leaves a result. Its lines go to standard error, after the text if `shown_with_error`."""
        return None

    @property
    def status(self) -> int:
        """The exit status of the verb."""
        return 0 if self.error is None else 2

    def text(self) -> str:
        raise NotImplementedError

    def show(self) -> None:
        """Prints the text to standard output."""
        show(self.text())

    def to_json(self) -> dict[str, Any] | list[Any]:
        """Returns what `as_json` can write: by default the fields."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]


def as_json(document: Any) -> str:
    """Returns the text of a JSON document that ends with a newline. NaN and ±∞, which JSON lacks, become null.

    Dataclasses become objects, and paths texts. Everything but ASCII is escaped, so that also a path that is not UTF-8
    can be read back (`os.fsencode`), and the text is the same in every locale.
    """
    return json.dumps(_plain(document), indent=2, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value
