"""Charts as SVG that belongs to a page: its text is text, and its colours follow light and dark mode.

A `Figure` draws nothing before it is asked for its SVG, so that reports without figures never import matplotlib.
"""

from __future__ import annotations

import io
import json
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from xml.sax.saxutils import quoteattr

import numpy as np

from xdm_ft.report.words import short
from xdm_ft.runtime.errors import join_names, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

INK, MUTED, RULE, PAPER = "#010101", "#020202", "#030303", "#040404"
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999933", "#882255")
"""Okabe and Ito's palette without black and yellow, and two of Tol's: apart in any kind of colour vision, on light and
on dark. Use markers or line styles as well, so that colour is never the only difference."""
VARIABLES = {INK: "--ink", MUTED: "--muted", RULE: "--rule", PAPER: "--paper", SERIES[0]: "--blue", SERIES[7]: "--wine"}
"""Colours that `Figure.svg` replaces by CSS variables: of text, secondary text, grid lines and the background, and two
of series that a dark page makes lighter."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1)), (0, (1, 3)), (0, (8, 3)))
WIDTH = 3.6  # inches: on a phone of 390 px such a figure is not scaled down, and two stand side by side on a desk
FULL_WIDTH = 8.6  # inches of a figure that has a row of the page for itself
PHONE_WIDTH = 4.8  # inches: a phone shows a wider figure drawn anew, in `WIDTH`
SERIES_ID = "xdm-series-"  # and the number of a series: the id of all that is drawn of it
MAX_POINTS, MAX_THIN_POINTS = 120, 60  # of a line, of a thin line
MAX_THIN_LINES = 6  # per line of a method
MAX_MARKERS = 9  # of a line
MANY_ROWS = 10  # from here on, the rows of a small figure are low
MAX_DECADES = 5  # labels of a logarithmic axis, about
MAX_X_NAMES = 6  # on an axis of `curves`
DARKEST = 0.8  # opacity of a share of 100%: text on it can be read in light and in dark mode
XY = tuple[float, float]


@dataclass(frozen=True)
class Figure:
    """A plot."""

    name: str  # of its file in plots/, without the ending, and of its ids: unique in the page, of a–z, 0–9, _ and -
    alt: str  # what it shows, with the main numbers, for those who do not see it
    caption: str
    draw: Callable[[Canvas], Sequence[Pointed] | None]  # returns what the page shows under the pointer
    width: float = WIDTH  # inches of 96 px
    height: float = 2.5
    phone: Figure | None = None  # the same, for a phone

    def svg(self) -> str:
        """Returns the SVG. The same figure gives the same text.

        Its attribute `data-points` is JSON: of each series its name, the name of the button that hides it, and
        [x, y, text] of its points in units of the SVG.
        """
        from matplotlib import rc_context, rc_params_from_file
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure as Canvas

        style: Any = rc_params_from_file(Path(__file__).with_name("page.mplstyle"), use_default_template=False)
        # the salt: ids repeat in every process, and differ between the figures of a page
        with rc_context({**style, "svg.hashsalt": self.name}), warnings.catch_warnings():
            # The font that measures a name may lack its letters. The reader's fonts draw it.
            warnings.filterwarnings("ignore", r"Glyph .* missing from", UserWarning)
            canvas = Canvas(figsize=(self.width, self.height), layout="constrained")
            FigureCanvasSVG(canvas)
            pointed = self.draw(canvas)
            out = io.StringIO()
            canvas.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
            text = _for_the_page(out.getvalue(), self.name)
            if not pointed:
                return text
            series = [_on_the_page(canvas, self.height, of_series) for of_series in pointed]
        return text.replace("<svg", f"<svg data-points={quoteattr(json.dumps(series, separators=(',', ':')))}", 1)


class Pointed(NamedTuple):
    """The points of a series, and what the page shows when the pointer is on them."""

    axes: Axes
    name: str
    button: str  # which hides the series; "": none does
    points: Sequence[XY]
    texts: Sequence[str]


def _on_the_page(canvas: Canvas, height: float, series: Pointed) -> list[Any]:
    """Returns [name, button, [[x, y, text], …]] in units of the SVG, points of 1/72 inch from the top left."""
    pixels = 72 / canvas.dpi * series.axes.transData.transform(np.reshape(series.points, (-1, 2)))
    places = zip(pixels, series.texts, strict=True)
    shown = [[round(x, 1), round(72 * height - y, 1), printable(text)] for (x, y), text in places if np.isfinite(x + y)]
    return [printable(series.name), printable(series.button), shown]


class SeriesStyle(NamedTuple):
    """How the points and lines of a series look."""

    colour: str  # "": that of their row
    marker: str = "o"
    line: Any = "-"  # a matplotlib line style
    size: float = 5
    hollow: bool = False
    width: float = 1.4  # of lines


def looks(names: Iterable[str]) -> dict[str, SeriesStyle]:
    """Returns {name: its look}. No two of the first 64 share colour, marker and line; no two of 8 colour or marker."""
    made = {}
    for i, name in enumerate(dict.fromkeys(names)):
        marker = MARKERS[(i + i // len(SERIES)) % len(MARKERS)]
        made[name] = SeriesStyle(SERIES[i % len(SERIES)], marker, LINES[i % len(LINES)])
    return made


# --------------------------------------------------------------------------------------------------------------- charts


class Mark(NamedTuple):
    """A point of a row, and a line through it."""

    series: str
    x: float | None
    ends: Sequence[float] | None = None
    shift: float = 0.0  # below the middle of its row


class Row(NamedTuple):
    """A row of `points`: "not defined" without marks and bar."""

    label: str
    marks: Sequence[Mark]
    bar: float | None = None
    colour: str = INK
    right: str = ""  # text at its right end


def points(
    name: str,
    title: str,
    caption: str,
    rows: Sequence[Row],
    axis: str,
    series: Mapping[str, SeriesStyle],
    legend: Mapping[str, str] | None = None,  # {series: its words}
    limits: tuple[float | None, float | None] | None = None,
    zero: bool = False,  # a line at 0
    limit: float | None = None,  # a value that can hardly be exceeded, marked by a line
    row_height: float = 0.3,
    width: float = WIDTH,
) -> Figure:
    """A horizontal row per label, with a bar, points and intervals. Bars begin at 0, so lengths can be compared."""
    legend = legend or {}
    names = [_row_name(row.label, 22 if width <= PHONE_WIDTH else 38) for row in rows]

    def draw(canvas: Canvas) -> None:
        axes = canvas.subplots()
        for position, row in enumerate(rows):
            if row.bar is None and not row.marks:
                axes.text(0, position, " not defined", va="center", fontsize=8)
            if row.bar is not None:
                axes.barh(position, row.bar, height=0.62, color=row.colour, alpha=0.35, edgecolor=row.colour)
            for mark in row.marks:
                look, y = series[mark.series], position + mark.shift
                colour = look.colour or row.colour
                if mark.ends is not None:
                    axes.plot(mark.ends, [y, y], color=colour, linewidth=look.width)
                if mark.x is not None:
                    axes.plot(mark.x, y, **_marker(look, colour))
        for label, words in legend.items():
            axes.plot([], [], **_marker(series[label], series[label].colour or INK), label=words)
        if limit is not None:
            axes.axvline(limit, color=INK, linewidth=1, linestyle="--", label="limit")
        if zero:
            axes.axvline(0, color=INK, linewidth=0.8)
        axes.set_yticks(range(len(rows)), names)
        # downwards: the first row is on top
        axes.set_ylim(len(rows) - 0.5, -0.5)
        if limits is not None:
            axes.set_xlim(*limits)
        axes.locator_params(axis="x", nbins=5)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(axis)
        if any(row.right for row in rows):
            right = axes.secondary_yaxis("right")
            right.set_yticks(range(len(rows)), [row.right for row in rows])
            right.tick_params(length=0)
            right.spines["right"].set_visible(False)
        _legend_below(canvas, axes)

    alts = []
    for row in rows:
        values = [f"{mark.series} {mark.x:.4g}" for mark in row.marks if mark.x is not None]
        text = ", ".join(values) if row.bar is None else f"{row.bar:.4g}"
        alts.append(f"{row.label}: {text or 'not defined'} {row.right}".rstrip())
    if len(rows) > MANY_ROWS and width <= PHONE_WIDTH:
        row_height = min(row_height, 0.2)
    tall = max(row_height, 0.34) if any("\n" in name for name in names) else row_height
    height = 0.75 + tall * len(rows) + _legend_height(len(legend) + (limit is not None), width)
    alt = f"{title}. {join_names(alts, sign='; ')}."
    if width <= PHONE_WIDTH:
        return Figure(name, alt, caption, draw, width, height)
    phone = points(f"{name}-phone", title, caption, rows, axis, series, legend, limits, zero, limit, row_height)
    return Figure(name, alt, caption, draw, width, height, phone)


def _row_name(label: str, longest: int) -> str:
    """Returns the name of a row; one that is too long is broken before a sign, and each of its two lines cut."""
    text = printable(label)
    sign = next((sign for sign in (" − ", " @ ") if sign in text), None)
    if sign is None or len(text) <= longest:
        return short(text, longest)
    first, second = text.split(sign, 1)
    return f"{short(first, longest)}\n{short(sign.lstrip() + second, longest)}"


def _marker(look: SeriesStyle, colour: str) -> dict[str, Any]:
    edge = 2 if look.marker == "|" else 1 if look.hollow else 0
    fill = "none" if look.hollow else "full"
    return {"marker": look.marker, "ls": "", "color": colour, "ms": look.size, "mew": edge, "fillstyle": fill}


class Line(NamedTuple):
    """A line with markers, or the points of a scatter plot, and what belongs to it."""

    label: str  # "": not in the legend
    look: SeriesStyle
    points: Sequence[XY]
    thin: Sequence[Sequence[XY]] = ()  # such as a line per model, whose mean are the `points`
    band: Sequence[tuple[float, float, float]] = ()  # (x, lowest, highest)
    rings: Sequence[XY] = ()
    bars: Sequence[XY] = ()  # behind the line
    ends: Sequence[tuple[float, float, float]] = ()  # (x, lowest, highest) of intervals, as vertical lines
    button: str = ""  # which hides the line; "": none does
    texts: Sequence[str] = ()  # of each point of a scatter, for the pointer; curves show their values


def curves(
    name: str,
    title: str,
    caption: str,
    panels: Mapping[str, Sequence[Line]],  # {title: its lines}, beside and below each other
    axes_labels: tuple[str, str],
    per_row: int = 4,  # panels
    diagonal: bool = False,  # a line where x = y in %, and axes of equal scale
    x_names: Sequence[str] = (),  # of the whole numbers 0, 1, … of x
    logarithmic_y: bool = False,
    limits: Mapping[str, float] = {},  # of `Axes.set`: xmin, xmax, ymin, ymax
    width: float = WIDTH,
    height: float = 2.5,
) -> Figure:
    """Lines over a common x. Long lines are thinned evenly."""
    every = [line for lines in panels.values() for line in lines]

    def at(x: float) -> str:
        return x_names[int(x)] if x_names else f"{x:.4g}"

    def draw(canvas: Canvas) -> list[Pointed]:
        pointed, columns = list[Pointed](), min(len(panels), per_row)
        rows = -(-len(panels) // columns)
        sides = canvas.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat
        for unused in sides[len(panels) :]:
            unused.remove()
        for position, (axes, (heading, lines)) in enumerate(zip(sides, panels.items(), strict=False)):
            if diagonal:
                axes.plot([0, 100], [0, 100], color=MUTED, linewidth=0.9, linestyle=":")
                axes.set_aspect("equal")
            for line in lines:
                _draw_line(axes, line, f"{SERIES_ID}{len(pointed)}")
                shown = _thin(line.points, MAX_POINTS) if line.label else []
                texts = [f"{axes_labels[0]} {at(x)}: {y:.4g}" for x, y in shown]
                pointed.append(Pointed(axes, line.label, line.button, shown, texts))
            # narrow panels have no room for more
            axes.set_title(heading if width / columns > 2 else short(heading))
            if position + columns >= len(panels):
                axes.set_xlabel(axes_labels[0])
                axes.tick_params(labelbottom=True)
            if position % columns == 0:
                axes.set_ylabel(axes_labels[1])
        first = sides[0]
        if logarithmic_y:
            drawn = [y for line in every for points_of in (line.points, *line.thin) for _, y in points_of]
            logarithmic(first, "y", drawn)
        # values that differ by rounding alone would look like a curve
        elif np.ptp(first.get_ylim()) < 1e-9:
            first.set_ylim(first.get_ylim()[0] - 1, first.get_ylim()[1] + 1)
        if x_names:
            ticks = range(0, len(x_names), -(-len(x_names) // MAX_X_NAMES))
            first.set_xticks(ticks, [x_names[tick] for tick in ticks])
        first.set_xlim(limits.get("xmin"), limits.get("xmax"))
        first.set_ylim(limits.get("ymin"), limits.get("ymax"))
        _legend_below(canvas, first)
        return pointed

    alts = []
    for line in (line for line in every if line.label and line.points):
        (x, y), (last_x, last_y) = line.points[0], line.points[-1]
        alts.append(f"{line.label} from {y:.4g} at {at(x)} to {last_y:.4g} at {at(last_x)}")
    phone = None
    if width > PHONE_WIDTH:
        narrow = min(2, len(panels))
        rows = -(-len(panels) // narrow)
        low = 0.4 + rows * (0.5 + 0.85 * WIDTH / narrow) if diagonal else height
        phone = curves(f"{name}-phone", title, caption, panels, axes_labels, narrow, diagonal, x_names, logarithmic_y,
                       limits, height=low)  # fmt: skip
    height += _legend_height(sum(bool(line.label) for line in next(iter(panels.values()))), width)
    alt = f"{title}. {join_names(alts, sign='; ') or caption}"
    return Figure(name, alt, caption, draw, width, height, phone)


def _draw_line(axes: Axes, line: Line, gid: str) -> None:
    """Draws a line. All that belongs to it has the id `gid`."""
    colour = line.look.colour
    if line.bars:
        axes.bar(*_columns(line.bars), width=5, color=colour, alpha=0.25)
    if line.band:
        steps, low, high = zip(*_thin(line.band, MAX_THIN_POINTS), strict=True)
        axes.fill_between(steps, low, high, color=colour, alpha=0.08, linewidth=0, gid=gid)
        for edge in (low, high):
            axes.plot(steps, edge, color=colour, ls=line.look.line, linewidth=0.7, gid=gid)
    for thin in line.thin[:MAX_THIN_LINES]:
        axes.plot(*_columns(_thin(thin, MAX_THIN_POINTS)), color=colour, linewidth=0.6, alpha=0.5, gid=gid)
    if line.ends:
        axes.vlines(*zip(*line.ends, strict=True), color=colour, linewidth=1.2, gid=gid)
    if line.rings:
        axes.plot(*_columns(line.rings), "o", color=INK, ms=6, mew=1, fillstyle="none", ls="", zorder=5, gid=gid)
    shown = _thin(line.points, MAX_POINTS)
    style = {"ls": line.look.line, "marker": line.look.marker, "ms": line.look.size - 1, "linewidth": line.look.width}
    every = max(1, -(-len(shown) // MAX_MARKERS))
    axes.plot(*_columns(shown), color=colour, markevery=every, label=short(line.label) or None, gid=gid, **style)


def scatter(
    name: str,
    alt: str,
    caption: str,
    grid: Sequence[Sequence[tuple[str, Sequence[Line]]]],  # rows of (title or label of y, points)
    x_label: str = "",
    framed: bool = False,  # boxes with titles instead of axes: positions have no unit
    x_names: Sequence[str] | None = None,  # at 0, 1, …
    logarithmic_x: bool = False,
    width: float = WIDTH,
    height: float = 2.6,
) -> Figure:
    """Plots of points, which share x and, in a row, y."""

    def draw(canvas: Canvas) -> list[Pointed]:
        pointed = list[Pointed]()
        share_x: Any = False if framed else "col"
        all_axes = canvas.subplots(len(grid), len(grid[0]), squeeze=False, sharex=share_x, sharey="row")
        for axes, (title, clouds) in zip(all_axes.flat, (cell for row in grid for cell in row), strict=True):
            for cloud in clouds:
                style = _marker(cloud.look, cloud.look.colour)
                gid = f"{SERIES_ID}{len(pointed)}"
                axes.plot(*_columns(cloud.points), alpha=0.8, label=short(cloud.label) or None, gid=gid, **style)
                pointed.append(
                    Pointed(axes, cloud.label, cloud.button, cloud.points if cloud.texts else (), cloud.texts)
                )
            if framed:
                axes.set_title(title, fontsize=8)
                axes.set_xticks([])
                axes.set_yticks([])
                for side in axes.spines.values():
                    side.set_visible(True)
            else:
                axes.set_ylabel(title, fontsize=8)
        last = all_axes[-1][0]
        if not framed:
            last.set_xlabel(x_label)
            if x_names is not None:
                last.set_xticks(range(len(x_names)), [short(value, 10) for value in x_names])
                last.set_xlim(-0.5, len(x_names) - 0.5)
            elif logarithmic_x:
                logarithmic(last, "x", [x for _, clouds in grid[0] for cloud in clouds for x, _ in cloud.points])
            else:
                last.locator_params(axis="x", nbins=5)
        _legend_below(canvas, all_axes[0][0])
        return pointed

    height += _legend_height(sum(bool(cloud.label) for cloud in grid[0][0][1]), width)
    return Figure(name, alt, caption, draw, width, height)


MAX_WRITTEN, MAX_NAMED = 10, 40  # classes whose cells hold numbers, and whose rows have names
HEAT_COLUMNS = 4


def heat_maps(
    name: str,
    alt: str,
    shares: Mapping[str, np.ndarray],
    names: Sequence[str],
    title: str = "",
    axes_labels: tuple[str, str] = ("predicted class", "true class"),
    caption: str = "",
    small: bool = False,  # a single one that stands beside others
) -> Figure:
    """Matrices of shares as one colour of growing opacity, which suits a light and a dark page.

    A single one has names and numbers; several are small, without them. `shares`: {title: [C,C]}.
    """
    single = len(shares) == 1 and not title
    columns = min(len(shares), HEAT_COLUMNS)
    rows = -(-len(shares) // columns)

    def draw(canvas: Canvas) -> None:
        if title:
            canvas.suptitle(short(title, 40), fontsize=9, x=0.02, ha="left", weight="bold")
        for position, (heading, matrix) in enumerate(shares.items(), 1):
            axes = canvas.add_subplot(rows, columns, position)
            axes.set_title(short(heading, 30 if single else 14), fontsize=9 if single else 8)
            pixels = np.empty((*matrix.shape, 4))
            pixels[..., :3] = [int(SERIES[0][i : i + 2], 16) / 255 for i in (1, 3, 5)]
            pixels[..., 3] = DARKEST * matrix
            axes.imshow(pixels, interpolation="none")
            axes.grid(visible=False)
            axes.tick_params(length=0)
            axes.set_xticks([])
            axes.set_yticks([])
            if not single:
                continue
            axes.set_xlabel(axes_labels[0])
            axes.set_ylabel(axes_labels[1])
            if len(names) <= MAX_NAMED:
                size = (7 if small else 8) if len(names) <= 20 else 5
                labels = [short(name, 14) for name in names]
                axes.set_xticks(range(len(names)), labels, rotation=90, fontsize=size)
                axes.set_yticks(range(len(names)), labels, fontsize=size)
            if len(names) <= MAX_WRITTEN:
                # smaller shares would be written as 0
                for i, j in zip(*np.nonzero(matrix >= 0.005), strict=True):
                    axes.text(j, i, f"{100 * matrix[i, j]:.0f}", ha="center", va="center", fontsize=6 if small else 7.5)

    size = ((2.75, 2.7) if small else (3.6, 3.5)) if single else (max(2.0, 1.15 * columns), 0.3 + 1.3 * rows)
    return Figure(name, alt, caption, draw, *size)


# -------------------------------------------------------------------------------------------------------- axes, legends


def logarithmic(axes: Axes, which: Literal["x", "y"], values: Sequence[float]) -> None:
    """Makes an axis logarithmic, with a few labels as plain text: matplotlib's are formulas, which the page has not.

    Zeros stand at the beginning of the axis, apart from the other values, which are above 0.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axis, set_scale = getattr(axes, f"{which}axis"), getattr(axes, f"set_{which}scale")
    positive = [value for value in values if value > 0]
    first, last = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    zeros = [0.0] if len(positive) < len(values) else []
    if zeros:
        set_scale("symlog", linthresh=min(positive), linscale=0.7)
    else:
        set_scale("log")
    decades = [10.0**power for power in range(first, last + 1, max(1, -(-(last - first) // MAX_DECADES)))]
    # those below the smallest value would touch the label of 0
    axis.set_major_locator(FixedLocator([*zeros, *(value for value in decades if value >= min(positive) or not zeros)]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def _legend_below(canvas: Canvas, axes: Axes) -> None:
    """Puts the legend below the figure, where it covers no point."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        columns = _legend_columns(canvas.get_figwidth())
        canvas.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8, handlelength=3)


def _legend_columns(width: float) -> int:
    return 4 if width >= FULL_WIDTH else 2


def _legend_height(entries: int, width: float) -> float:
    """Returns the inches that a legend takes."""
    return 0.2 * -(-entries // _legend_columns(width)) + 0.1 if entries else 0.0


def _thin(values: Sequence[Any], most: int) -> list[Any]:
    """Returns at most `most` values, evenly, with the first and the last one."""
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def _columns(pairs: Sequence[XY]) -> tuple[list[float], list[float]]:
    return [x for x, _ in pairs], [y for _, y in pairs]


# ------------------------------------------------------------------------------------------------------------------ SVG


def _for_the_page(text: str, name: str) -> str:
    text = text[text.index("<svg") :]  # without the XML declaration and the document type
    text = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    text = re.sub(r"font: [^;\"]*?(\d+(?:\.\d+)?)px [^;\"]*", r"font-size: \1px", text)
    text = re.sub(r"font-family: [^;\"]*; ?", "", text)  # that of the page

    # not an id: the thin lines of a series have it too
    text = re.sub(rf" id=\"{SERIES_ID}(\d+)\"", r' data-series="\1"', text)
    # matplotlib numbers ids from 1 in every figure. Those that something refers to get the name, the others go
    used = dict.fromkeys(re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", text))
    new_ids = {old: f"{name}-{position}" for position, old in enumerate(used)}
    text = re.sub(r" id=\"([^\"]*)\"", lambda m: f' id="{new_ids[m[1]]}"' if m[1] in new_ids else "", text)
    text = re.sub(r"(url\(#|href=\"#)([^)\"]+)", lambda m: m[1] + new_ids[m[2]], text)

    def with_one_style(group: re.Match[str]) -> str:
        """matplotlib repeats the style at each of the markers of a line. The group gets it, which halves the text."""
        style = set(re.findall(r"<use [^>]*?( style=\"[^\"]*\")", group[0]))
        if len(style) != 1 or " style=" in group[0].partition(">")[0]:
            return group[0]
        only = style.pop()
        return group[0].replace(only, "").replace("<g", f"<g{only}", 1)

    text = re.sub(r"<g[^>]*>\s*(?:<use [^>]*/>\s*)+</g>", with_one_style, text)
    # two decimals of a point are enough: numbers in tags are half the size then; text between tags stays
    text = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), text)
    return re.sub(r"\n\s*", "\n", text)
