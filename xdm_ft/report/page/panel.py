"""What a panel of the page is made of. Texts are plain: the template escapes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """A plot."""

    name: str  # of its file in plots/, without the ending, and of its ids: unique in the page, of a–z, 0–9, _ and -
    svg: str  # from `figures.svg`
    alt: str  # what it shows, in one or two sentences with the main numbers, for those who do not see it
    caption: str = ""


@dataclass(frozen=True)
class Cell:
    """A cell of a table: its text, the value by which its column sorts (None: by the text), a second, smaller line."""

    text: str
    value: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A table. The cells of its first column are headers of their rows."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    sortable: bool = True
    folded: bool = False  # shown behind a line that opens it


@dataclass(frozen=True)
class Thumbnail:
    """A small image."""

    jpeg: bytes
    alt: str
    caption: Sequence[str] = ()  # lines


@dataclass(frozen=True)
class Panel:
    """A section of the page."""

    id: str  # anchor, unique in the page
    title: str
    about: str  # how to read it: one or two sentences
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    folded: bool = False  # shown behind a summary line that opens it
    notes: Sequence[str] = ()  # a list below the figures and tables
    thumbnails: Sequence[Thumbnail] = ()
    code: str = ""  # lines of text in fixed width
