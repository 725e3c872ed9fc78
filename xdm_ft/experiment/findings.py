"""What a check found, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xdm_ft.errors import UserError


@dataclass(frozen=True)
class Finding:
    """One line of the report. With a remedy it is a fault."""

    what: str
    found: str
    remedy: str | None = None

    def __str__(self) -> str:
        if self.remedy is None:
            return f"ok     {self.what}: {self.found}"
        return f"FAULT  {self.what}: {self.found}\n       → {self.remedy}"

    @property
    def line(self) -> str:
        return f"{self.what}: {self.found}" + (f" → {self.remedy}" if self.remedy else "")


def fault(what: str, error: UserError) -> Iterator[Finding]:
    """A message to the user says at its end, behind the last semicolon, what to do."""
    for line in str(error).splitlines():
        found, semicolon, remedy = line.rpartition("; ")
        yield Finding(what, found, remedy) if semicolon else Finding(what, line, "mend what it names and run again")
