"""CONTRIBUTING.md lists every hook that some method replaces, and which methods do."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from test_contract import METHODS

from xdm_ft.algorithms import Algorithm, Method, Solver

CONTRIBUTING = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"
EVERY_METHOD_HAS = {"source", "loss", "search_ranges"}
HOOKS = {name for c in (Method, Algorithm) for name in vars(c) if not name.startswith("_")} - EVERY_METHOD_HAS


def replaced_by(cls: type[Any]) -> set[str]:
    """Hooks that its own file or an abstract base of several methods replaces, in the class or for an instance."""
    shared = [c for c in cls.__mro__ if inspect.isabstract(c) and not issubclass(Algorithm, c) and c is not Solver]
    own = [c for c in cls.__mro__ if c.__module__ == cls.__module__ or c in shared]
    return {name for c in own for name in [*vars(c), *re.findall(r"self\.(\w+) = ", inspect.getsource(c))]} & HOOKS


def test_the_table_of_hooks_is_what_the_code_does() -> None:
    section = CONTRIBUTING.read_text(encoding="utf-8").partition("### Hooks of a method")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| .* \| ([\w, ]+) \|$", section, flags=re.MULTILINE)
    assert len(rows) > 10
    in_the_code = {cls.__name__: replaced_by(cls) for cls in METHODS.values()}
    in_the_table = {name: {hook for hook, methods in rows if name in methods.split(", ")} for name in in_the_code}
    assert in_the_table == in_the_code
