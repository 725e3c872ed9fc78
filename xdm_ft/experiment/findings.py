"""Findings: the result of one check and, for a fault, its remedy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xdm_ft.runtime.errors import UserError, printable


@dataclass(frozen=True)
class Finding:
    """One line of a report. A finding with a remedy is a fault."""

    what: str
    found: str
    remedy: str | None = None

    def __str__(self) -> str:
        if self.remedy is None:
            return printable(f"ok     {self.what}: {self.found}")
        return "\n".join([printable(f"FAULT  {self.what}: {self.found}"), printable(f"       → {self.remedy}")])

    @property
    def line(self) -> str:
        return printable(f"{self.what}: {self.found}" + (f" → {self.remedy}" if self.remedy else ""))


def fault(what: str, error: UserError) -> Iterator[Finding]:
    """Yields one fault per line of the error's text. The remedy is the text behind the last semicolon of a line."""
    for line in str(error).splitlines():
        found, semicolon, remedy = line.rpartition("; ")
        yield Finding(what, found, remedy) if semicolon else Finding(what, line, "repair this and run again")
