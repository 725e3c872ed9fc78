"""Panels → HTML. Every text is escaped, except the SVG of figures and the page's own style and script."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any
from xml.sax.saxutils import quoteattr

from xdm_ft.report.page.figures import ON_PAPER
from xdm_ft.report.page.headline import Headline
from xdm_ft.report.page.panel import Figure, Panel, Thumbnail
from xdm_ft.runtime.errors import printable
from xdm_ft.version import __version__

PIXELS_PER_POINT = 96 / 72
WIDE = 9  # columns; a table of more may break numbers and words to fit on paper


def html(name: str, headline: Headline, panels: Sequence[Panel]) -> str:
    """Returns the page. Control characters in names are shown as escapes. Raises `ValueError` if two ids are equal."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    _refuse_equal([panel.id for panel in panels], "panels")
    _refuse_equal([figure.name for panel in panels for figure in panel.figures], "figures")

    def visible(value: Any) -> Any:
        return printable(value) if type(value) is str else value

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=visible
    )
    style, script = _packaged("page.css"), _packaged("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.from_string(_packaged("page.html.j2")).render(
        name=name,
        headline=headline,
        panels=panels,
        style=Markup(style),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
        WIDE=WIDE,
        made_by=f"Made by xdm-ft {__version__} from the files of the run directory alone.",
        drawn=lambda figure: Markup(_named(figure)),
        figure_width=lambda figure: round(_points(figure)[0] * PIXELS_PER_POINT),
        data_uri=_data_uri,
        number_columns=lambda table: [
            any(cell.value is not None for cell in column) for column in zip(*table.rows, strict=True)
        ],
        lines=lambda text: Markup("\n").join(printable(line) for line in text.split("\n")),
    )


def plot_file(figure: Figure) -> str:
    """Returns the text of a figure's own SVG file, with the colours of light mode."""
    width, height = _points(figure)
    text = re.sub(r"var\((--\w+)\)", lambda found: ON_PAPER[found[1]], figure.svg)
    size = (
        f'<svg width="{width}pt" height="{height}pt" style="background: {ON_PAPER["--paper"]}; font-family: sans-serif"'
    )
    title = f"<title>{_xml(figure.alt)}</title>"
    return '<?xml version="1.0" encoding="utf-8"?>\n' + _opened(text, size, title) + "\n"


def _named(figure: Figure) -> str:
    """The SVG as an image with a name, for screen readers; its size is left to the page."""
    return _opened(figure.svg, f'<svg role="img" aria-label={quoteattr(printable(figure.alt))}', "")


def _opened(svg: str, start: str, inside: str) -> str:
    """The SVG with another start of its first tag, and `inside` behind it. Its own width and height are left out."""
    end = svg.index(">") + 1
    tag = re.sub(r' (?:width|height)="[^"]*"', "", svg[:end]).replace("<svg", start, 1)
    return tag + inside + svg[end:]


def _points(figure: Figure) -> tuple[float, float]:
    found = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', figure.svg)
    if found is None:
        raise ValueError(f"{figure.name}: its SVG has no size")
    return float(found[1]), float(found[2])


def _xml(text: str) -> str:
    from xml.sax.saxutils import escape

    return escape(printable(text))


def _data_uri(image: Thumbnail) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(image.jpeg).decode()}"


def _packaged(file: str) -> str:
    return files("xdm_ft.report.page").joinpath(file).read_text(encoding="utf-8")


def _refuse_equal(names: Sequence[str], what: str) -> None:
    wrong = [name for name in names if not re.fullmatch(r"[a-z][a-z0-9_-]*", name) or names.count(name) > 1]
    if wrong:
        raise ValueError(f"{what} need ids of a–z, 0–9, _ and -, each its own: {', '.join(wrong)}")
