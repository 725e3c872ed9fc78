"""matplotlib figures as SVG that belongs to a page: its text is text, and its colours follow light and dark mode."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from xdm_ft.runtime.errors import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, MUTED, RULE, PAPER = "#010101", "#020202", "#030303", "#040404"
"""Stand for text, secondary text, grid lines and the background. `svg` replaces them by the page's CSS variables."""
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999933", "#882255")
"""Okabe and Ito's palette without black and yellow, and two of Tol's: apart in any kind of colour vision, on light and
on dark. Use markers or line styles as well, so that colour is never the only difference."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
ON_PAPER = {"--ink": "#1b1f24", "--muted": "#57606a", "--rule": "#dfe3e8", "--paper": "#ffffff"}
"""The page's colours in light mode. Files in plots/ have them: other programs know no CSS variables."""
_VARIABLES = {INK: "--ink", MUTED: "--muted", RULE: "--rule", PAPER: "--paper"}
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.parse_math": False,  # names with $ are no formulas
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "grid.color": RULE,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "figure.facecolor": "none",
}


def svg(name: str, draw: Callable[[Figure], None], width: float, height: float) -> str:
    """Returns the SVG of a figure of width × height inches (of 96 px) that `draw` fills.

    `name` is unique in the page: ids inside the SVG are made of it. The same figure gives the same text.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with ExitStack() as stack:
        stack.enter_context(rc_context(_SETTINGS | {"svg.hashsalt": name}))
        stack.enter_context(warnings.catch_warnings())
        # The font that measures a name may lack its letters. The reader's fonts draw it.
        warnings.filterwarnings("ignore", r"Glyph .* missing from", UserWarning)
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]  # without the XML declaration and the document type
    text = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    text = re.sub(r"font: [^;\"]*?(\d+(?:\.\d+)?)px [^;\"]*", r"font-size: \1px", text)
    text = re.sub(r"font-family: [^;\"]*; ?", "", text)  # that of the page
    text = re.sub(r"<g[^>]*>\s*(?:<use [^>]*/>\s*)+</g>", _with_one_style, _with_own_ids(text, name))
    return re.sub(r"\n\s*", "\n", _rounded(text))


def _with_own_ids(text: str, name: str) -> str:
    """matplotlib numbers ids from 1 in every figure. Those that something refers to get the name, the others go."""
    used = dict.fromkeys(re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", text))
    own = {old: f"{name}-{number}" for number, old in enumerate(used)}
    text = re.sub(r" id=\"([^\"]*)\"", lambda found: f' id="{own[found[1]]}"' if found[1] in own else "", text)
    return re.sub(r"(url\(#|href=\"#)([^)\"]+)", lambda found: found[1] + own[found[2]], text)


def _with_one_style(group: re.Match[str]) -> str:
    """matplotlib repeats the style at each of the markers of a line. The group gets it, which halves the text."""
    found = set(re.findall(r"<use [^>]*?( style=\"[^\"]*\")", group[0]))
    if len(found) != 1 or " style=" in group[0].partition(">")[0]:
        return group[0]
    style = found.pop()
    return group[0].replace(style, "").replace("<g", f"<g{style}", 1)


def _rounded(text: str) -> str:
    """Two decimals of a point are enough: numbers in tags are half the size then. Text between tags stays."""
    return re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), text)


def short(name: str, most: int = 22) -> str:
    """Returns a name for a label of a plot: on one line, its middle left out if it is longer than `most`."""
    text = printable(name)
    return text if len(text) <= most else f"{text[: most * 2 // 3]}…{text[len(text) - most // 3 + 1 :]}"


def look(number: int) -> tuple[str, str]:
    """Returns colour and marker of a series: of 64 numbers no two are equal, and of 8 no two share either."""
    return SERIES[number % len(SERIES)], MARKERS[(number + number // len(SERIES)) % len(MARKERS)]
