"""Tables and the page of a run, made from the files of its directory alone.

Here: what reports are made of, sections of figures, tables and notes; sections.toml has their titles and explanations.
Texts are plain: each renderer (text, Markdown, LaTeX, HTML) escapes what it writes.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from xdm_ft.report.charts import Figure
from xdm_ft.report.words import EMPTY, number, significant
from xdm_ft.runtime.terminal import packaged_texts

if TYPE_CHECKING:
    from PIL.Image import Image

SIDE = 96  # pixels of the longer side of a small image, at most


MAX_ROWS = 240  # of a table with a row per model
MAX_UNFOLDED_ROWS = 12
PARTS = ("results", "verdicts", "mistakes", "confidence", "data", "diagnostics")
"""The parts of the page in their order. All are open except the last one, which has all other sections."""
TEXTS = packaged_texts("report/sections.toml")


@dataclass(frozen=True)
class Cell:
    """A cell of a table."""

    text: str
    value: float | None = None  # by which its column sorts; None: by the text
    note: str = ""  # a second, smaller line


@dataclass(frozen=True)
class Table:
    """A table. The cells of its first column are headers of their rows."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    labels: int = 1  # number of columns, the first ones, that say what a row is
    sortable: bool = True
    folded: bool = False  # shown on the page behind a line that opens it


@dataclass(frozen=True)
class Thumbnail:
    """A small image."""

    jpeg: bytes
    alt: str
    caption: Sequence[str] = ()  # lines

    @classmethod
    def of(cls, image: Image, alt: str, caption: Sequence[str] = (), side: int = SIDE) -> Thumbnail:
        """Returns an RGB image, which it shrinks, with sides of at most `side`."""
        from PIL import Image as images

        image.thumbnail((side, side))
        bare = images.new("RGB", image.size)  # without comments and other metadata, which Pillow would write too
        bare.paste(image)
        out = io.BytesIO()
        bare.save(out, "JPEG", quality=80, optimize=True)
        return cls(out.getvalue(), alt, caption)

    @property
    def uri(self) -> str:
        return f"data:image/jpeg;base64,{base64.b64encode(self.jpeg).decode()}"


@dataclass(frozen=True)
class Section:
    """A part of a report."""

    id: str  # anchor, unique in the report
    title: str
    about: str  # how to read it: one or two sentences
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    part: str = PARTS[-1]  # of the page
    thumbnails: Mapping[str, Sequence[Thumbnail]] = field(default_factory=dict)  # {line that opens them: images}
    code: str = ""  # lines of text in fixed width
    caption: str = ""  # of its tables in LaTeX; without it, the title and their own captions


def make_section(
    id_: str,
    figures: Sequence[Figure] = (),
    tables: Sequence[Table] = (),
    notes: Iterable[str] = (),
    thumbnails: Mapping[str, Sequence[Thumbnail]] = {},
    code: str = "",
    **values: object,
) -> Section:
    """Returns a section with its texts of sections.toml, whose names in braces are `values`; its notes come first."""
    texts = TEXTS[id_]
    title, about, caption = (texts.get(name, "").format(**values) for name in ("title", "about", "caption"))
    notes = [*filter(None, (note.format(**values) for note in texts.get("notes", ()))), *notes]
    return Section(id_, title, about, figures, tables, notes, texts.get("part", PARTS[-1]), thumbnails, code, caption)


def cells(*values: str | int | Cell) -> list[Cell]:
    """Returns texts, and counts, which sort by their value; what is a cell stays."""
    made = []
    for value in values:
        if isinstance(value, str):
            value = Cell(value)
        made.append(value if isinstance(value, Cell) else Cell(str(value), value))
    return made


def metric_cell(value: float | None, metric: str) -> Cell:
    return Cell(number(value, metric), value)


def mean_cell(values: Iterable[float | None], form: str = "") -> Cell:
    """Returns the mean over seeds in the format `form` (default: 4 digits), with their standard deviation (ddof 1)."""
    defined = [value for value in values if value is not None]
    if not defined:
        return Cell(EMPTY)
    mean, spread = fmean(defined), stdev(defined) if len(defined) > 1 else None
    note = "" if spread is None else f"± {f'{spread:{form}}' if form else significant(spread, 2)}"
    return Cell(f"{mean:{form}}" if form else significant(mean, 4), mean, note)


def long_table(caption: str, header: Sequence[str], rows: Sequence[Sequence[Cell]], labels: int = 1) -> Table:
    """Returns a table of the first `MAX_ROWS` rows, which says so if there are more; a long one is folded."""
    more = f" The first {MAX_ROWS} of {len(rows)} rows." if len(rows) > MAX_ROWS else ""
    return Table(caption + more, header, rows[:MAX_ROWS], labels, folded=len(rows) > MAX_UNFOLDED_ROWS)
