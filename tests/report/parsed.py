"""A page as html.parser reads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "link", "img", "br"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    text: str = ""


@dataclass
class Table:
    caption: str = ""
    rows: list[list[str]] = field(default_factory=list)  # the first one is the header

    def by_first(self) -> dict[str, dict[str, str]]:
        """{first cell: {title of a column: cell}}"""
        return {row[0]: dict(zip(self.rows[0], row, strict=True)) for row in self.rows[1:]}


class Page(HTMLParser):
    """Elements in their order. Fails where an end tag does not fit."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[Element] = []
        self.tables: list[Table] = []
        self._open: list[Element] = []
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)
        self.close()
        assert not self._open, f"{self._open[-1].tag} is not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"{tag} has an attribute twice: {names}"
        self.elements.append(Element(tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append(self.elements[-1])
        if tag == "table":
            self.tables.append(Table())
        elif tag == "tr":
            self.tables[-1].rows.append([])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        element = self._open.pop()
        assert element.tag == tag, f"{element.tag} ends with {tag}"
        if tag == "caption":
            self.tables[-1].caption = element.text.strip()
        elif tag in ("th", "td"):
            self.tables[-1].rows[-1].append(element.text.strip())

    def handle_data(self, data: str) -> None:
        note = any(element.attributes.get("class") == "note" for element in self._open)
        for element in self._open:
            if not (note and element.tag in ("th", "td")):  # cells without their second line
                element.text += data

    def all(self, tag: str) -> list[Element]:
        return [element for element in self.elements if element.tag == tag]

    def table(self, begin: str) -> Table:
        return next(table for table in self.tables if table.caption.startswith(begin))
