"""The reports in a run directory: results.md, results.csv, models.parquet, and report.html with plots/.

reports.json holds the checksum of each one as it was written, and of what it was made from: a report that is damaged,
or of another run, is written again. report.html is one
self-contained page, from the files of the run directory alone. Its template escapes every text, except the SVG of
figures and the page's own style and script.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple
from xml.sax.saxutils import escape, quoteattr

import numpy as np

from xdm_ft.core import ORACLE, DomainSet, set_name, sets_noun
from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER, IN_PERCENT
from xdm_ft.report import PARTS, SIDE, Section, Thumbnail
from xdm_ft.report.csv import MANY_MODELS, csv_rows, csv_text, parquet_of
from xdm_ft.report.headline import UNSEEN, details, sentence
from xdm_ft.report.markup import markdown
from xdm_ft.report.sections import brief_sections, sections
from xdm_ft.report.sections.results import on_the_page
from xdm_ft.report.words import between, metric_words, path_in_command, scale
from xdm_ft.results import Runs, selected_by_set, values_by_set
from xdm_ft.results.run import Run
from xdm_ft.runtime.errors import UserError, plural, printable
from xdm_ft.storage import digest
from xdm_ft.storage.atomic import replace_text
from xdm_ft.storage.lines import Damaged, read_object, with_checksum
from xdm_ft.storage.run_directory import (
    ANALYSIS,
    AUDIT,
    MARKDOWN,
    MODELS,
    PAGE,
    REPORTS,
    RESULTS,
    TABLE,
    RunDirectory,
)
from xdm_ft.version import __version__

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger("xdm_ft")
PLOTS = "plots"
WIDE = 7  # columns; a table of more may break numbers and words to fit on paper
PIXELS_PER_INCH = 96
ON_PAPER = {"--ink": "#1b1f24", "--muted": "#57606a", "--rule": "#dfe3e8", "--paper": "#ffffff",
            "--blue": "#0072b2", "--wine": "#882255"}  # fmt: skip
"""The page's colours in light mode. Files in plots/ have them: other programs know no CSS variables."""


def write_page(run: Run) -> list[Section]:
    """Writes report.html and the figures as plots/*.svg into the run directory, each file atomically.

    Returns the sections of the page. Images of the data and names of their files stand in the page only if the recipe's
    `report.images` is true. Raises `UserError` if a file of the run is damaged, or if the page cannot be written.
    """
    shown = list(sections(run))
    figures = [figure for section in shown for figure in section.figures]
    drawn = {figure.name: figure.svg() for figure in figures}
    text = html(run, shown, drawn)
    for figure in figures:
        svg = re.sub(r"var\((--\w+)\)", lambda variable: ON_PAPER[variable[1]], drawn[figure.name])
        svg = re.sub(r""" data-points=("[^"]*"|'[^']*')""", "", svg, count=1)  # for the script of the page
        style = f"background: {ON_PAPER['--paper']}; font-family: sans-serif"
        size = f'<svg width="{72 * figure.width:g}pt" height="{72 * figure.height:g}pt" style="{style}"'
        svg = _with_start(svg, size, f"<title>{escape(printable(figure.alt))}</title>")
        replace_text(run.path / PLOTS / f"{figure.name}.svg", f'<?xml version="1.0" encoding="utf-8"?>\n{svg}\n')
    replace_text(run.path / PAGE, text)
    for path in (run.path / PLOTS).glob("*.svg"):  # of an earlier page: they would contradict this one
        if path.stem not in drawn:
            path.unlink()
    return shown


def _read_packaged(file: str) -> str:
    return files("xdm_ft.report").joinpath(file).read_text(encoding="utf-8")


def _render(template: str, **values: Any) -> str:
    """Returns a page. Control characters in names are shown as escapes."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    def visible(value: Any) -> Any:
        # not isinstance: Markup is a str too, which `printable` would make plain text, and jinja2 escape
        return printable(value) if type(value) is str else value

    # strict: a misspelt name in the template is an error, not an empty place on the page
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=visible
    )
    style = Markup(_read_packaged("page.css"))
    return environment.from_string(_read_packaged(template)).render(style=style, **values)


def sheet(title: str, about: str, thumbnails: Sequence[Thumbnail], width: str = "8.5rem") -> str:
    """Returns a page of small images, in columns of at least this CSS width."""
    return _render("sheet.html.j2", title=title, about=about, thumbnails=thumbnails, width=width)


GAP = 4  # pixels between the two images of a pair


def copies_sheet(pairs: Iterable[tuple[Mapping[str, Any], Image, Image]], title: str) -> str:
    """Returns copies.html. `pairs`: entries of `copies.pairs` of audit.json with their RGB images, which it shrinks."""
    from PIL import Image as images

    thumbnails = []
    for number, (pair, *both) in enumerate(pairs, 1):
        for image in both:
            image.thumbnail((SIDE, SIDE))
        beside = images.new("RGB", (2 * SIDE + GAP, max(image.height for image in both)), "white")
        for image, left in zip(both, (0, SIDE + GAP), strict=True):
            beside.paste(image, (left, 0))
        straddles = ", in training and test" if pair["straddles"] else ""
        first_line = f"{number}: {'copy' if pair['sure'] else 'similar'}, score {pair['score']:.2f}{straddles}"
        caption = first_line, pair["first"], pair["second"]
        thumbnails.append(Thumbnail.of(beside, f"pair {number}", caption, side=2 * SIDE + GAP))
    about = "The most similar pairs, those in training and test first. Delete one image of each copy."
    return sheet(title, about, thumbnails, width="12.5rem")


def html(run: Run, shown: Sequence[Section], drawn: dict[str, str]) -> str:
    """Returns the page of a run. `drawn`: the SVG of each figure."""
    from markupsafe import Markup

    # the page's Content-Security-Policy allows the script with this checksum and no other, such as one in a name
    script = _read_packaged("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # what no reader may use: results.md has it
    shown = [section for section in shown if section.id != f"differences-{ORACLE}"]
    panels = list(shown)
    if (i := next((i for i, section in enumerate(shown) if section.id == "results"), None)) is not None:
        panels[i], training = on_the_page(run, shown[i])
        panels.insert(i + 1, training)
    counts = Counter(entry["status"] for entry in run.results["runs"])
    faults = "".join(f"; {counts[status]} {status}" for status in ("failed", "skipped") if counts[status])
    models = f"{plural(len(run.records), 'trained model')} in models/ of the run directory, one folder each{faults}."
    return _render(
        "page.html.j2",
        name=run.recipe.name,
        sentence=sentence(run),
        details=details(run),
        numbers=list(_numbers(run)),
        models=models,
        next=list(_next_steps(run)) if run.records else [],
        parts={part: [section for section in panels if section.part == part] for part in PARTS},
        script=Markup(script),
        script_hash=f"sha256-{digest}",
        WIDE=WIDE,
        made_by=f"Made by xdm-ft {__version__} from the files of the run directory alone.",
        # as an image with a name, for screen readers; its size is left to the page
        drawn=lambda figure: Markup(
            _with_start(
                drawn.get(figure.name) or figure.svg(), f'<svg role="img" aria-label={quoteattr(printable(figure.alt))}'
            )
        ),
        # columns of figures are so wide that none of them is cut off
        least_width=lambda panel: round(0.8 * PIXELS_PER_INCH * max(figure.width for figure in panel.figures)),
        figure_width=lambda figure: round(figure.width * PIXELS_PER_INCH),
        number_columns=lambda table: [
            any(cell.value is not None for cell in column) for column in zip(*table.rows, strict=True)
        ],
        lines=lambda text: Markup("\n").join(printable(line) for line in text.split("\n")),
    )


def _with_start(svg: str, start: str, inside: str = "") -> str:
    """Returns the SVG with another start of its first tag, without width and height, and `inside` behind that tag."""
    end = svg.index(">") + 1
    tag = re.sub(r' (?:width|height)="[^"]*"', "", svg[:end]).replace("<svg", start, 1)
    return tag + inside + svg[end:]


# ----------------------------------------------------------------------------------------------------- top of the page


MAX_SITES = 40  # held-out sets with a number of their own


class Fall(NamedTuple):
    """The metric where selection looked, and on held-out images."""

    validation: float | None  # None: not known of every model
    held_out: float

    def text(self, metric: str, unit: str = "") -> str:
        before = "" if self.validation is None else f"{scale(self.validation, metric)} → "
        return f"{before}{scale(self.held_out, metric)}{unit}"


def fall_of(runs: Runs) -> tuple[Fall, dict[DomainSet, Fall]]:
    """Returns the mean over held-out sets, and each of them."""
    before, after = selected_by_set(runs), values_by_set(runs)
    falls = {held: Fall(before[held], float(after[held].mean())) for held in runs.held_out}
    known = [fall.validation for fall in falls.values() if fall.validation is not None]
    mean = fmean(fall.held_out for fall in falls.values())
    return Fall(fmean(known) if len(known) == len(falls) else None, mean), falls


def _numbers(run: Run) -> Iterator[tuple[str, str, str]]:
    """Yields (label, value, note) of the quoted mean, then of each held-out set: from validation to held-out images."""
    metric, rows = run.metric, {row.method: row for row in run.rows if row.selection == run.rule}
    if run.choice is None or (row := rows[run.choice.method]).mean is None:
        return
    quoted, falls = fall_of(run.quoted)
    notes = []
    if quoted.validation is not None:
        difference, points = quoted.held_out - quoted.validation, " points" if metric in IN_PERCENT else ""
        side = "lower" if difference < 0 else "higher"
        notes.append(f"{scale(abs(difference), metric)}{points} {side} than on validation images")
    versus = run.beside_rows(run.rule).get(row.method)
    if versus is not None and versus.second in rows and rows[versus.second].mean is not None:
        notes.append(f"{versus.second}: {fall_of(run.runs_of(versus.second))[0].text(metric)}")
    who = row.method
    if {*run.choice.at.values()} - {who}:
        notes.append(f"the row of {who} has {scale(row.mean, metric)}, of results that chose it")
        who = "the method that the other domains choose"
    elif not run.choice.at and row.interval:
        notes.append(f"95% interval over seeds and test images, not for a new site: {between(metric, row.interval)}")
    sets, tested = [*falls], "held-out" if run.results["tested_on"] == UNSEEN else "test"
    on = f"on {set_name(sets[0])}" if len(sets) == 1 else f"the mean over {len(sets)} {sets_noun(sets)}"
    what = f"{tested} images" if quoted.validation is None else f"from validation to {tested} images"
    worst_first = sorted(sets, key=lambda held: falls[held].held_out, reverse=not HIGHER_IS_BETTER[metric])
    if len(sets) > MAX_SITES:
        notes.append(f"the {MAX_SITES} worst are shown")
    unit = "%" if metric in IN_PERCENT else ""
    yield f"{metric_words(metric)} of {who}, {what}, {on}", quoted.text(metric, unit), "; ".join(notes)
    for held in (held for held in sets if len(sets) > 1 and held in worst_first[:MAX_SITES]):
        yield set_name(held) + " (worst)" * (held == worst_first[0]), falls[held].text(metric), ""


def _next_steps(run: Run) -> Iterator[tuple[str, str]]:
    """Yields (what, command) of each thing to do next."""
    path = path_in_command(run.path)
    images = "images" if run.recipe.has_images else "features"
    yield "Export a model: one directory that loads anywhere.", f"xdm-ft export {path} my_model"
    yield f"Predict the classes of new {images}.", f"xdm-ft predict my_model {images.upper()} --out predictions.csv"
    yield "Is it good enough at a new site? No labels needed.", f"xdm-ft assess my_model {images.upper()}"
    yield f"Measure it on labelled {images} of a new site.", "xdm-ft evaluate my_model SITE"
    if run.audit is None:
        yield "Audit the data: copies, twin domains, label errors.", f"xdm-ft audit {path}"
    if run.analysis is None or run.not_measured:
        yield "Add diagnostics: calibration, invariance, embeddings.", f"xdm-ft analyse {path}"


def write_reports(directory: RunDirectory, run: Run) -> list[Path]:
    """Writes results.md, results.csv, models.parquet of a large run, report.html and plots/, and returns their paths.

    Raises `UserError`.
    """
    _write_tables(directory, run)
    _write_page(directory, run)
    paths = [run.path / name for name in (MARKDOWN, TABLE, MODELS, PAGE, PLOTS)]
    return [path for path in paths if path.exists()]  # a page without a plot makes no plots/


def refresh_reports(directory: RunDirectory, run: Run) -> None:
    """Writes the reports if one is missing, older than what they are made from, or not as it was written.

    The page only if the recipe wants it. A fault of ours in the page is logged with its traceback: the results of a run
    do not depend on it. Raises `UserError` for faults of the disk.
    """
    page = run.recipe.report.page
    try:
        written = read_object(run.path / REPORTS)
        sources = _sources_of(run)
        times = [(run.path / name).stat().st_mtime_ns for name in written if name not in sources]
        changed = [(run.path / name).stat().st_mtime_ns for name in sources]
        complete = {*sources, *_tables_of(run), *([PAGE] if page else [])} <= {*written}
        if complete and _digests(run.path, written) == written and max(changed) <= min(times):
            return
    except (Damaged, OSError):
        pass  # reports.json is damaged; a report is missing, or a folder
    _write_tables(directory, run)
    try:
        if page:
            _write_page(directory, run)
    except UserError:
        raise
    except Exception:
        remedy = f"the results are whole; `xdm-ft report {run.path}` tries it again"
        logger.exception("%s: cannot be drawn, because of a fault in xdm_ft; %s", run.path / PAGE, remedy)


def _write_tables(directory: RunDirectory, run: Run) -> None:
    """Writes what results.json alone makes."""
    directory.write_text(MARKDOWN, markdown(run, brief_sections(run)))
    directory.write_text(TABLE, csv_text(row for row in csv_rows(run) if row["selection"] in run.published_rules))
    if MODELS in _tables_of(run):
        directory.write_bytes(MODELS, parquet_of(run.records))
    digests = _digests(run.path, (*_tables_of(run), *_sources_of(run)))
    directory.write_text(REPORTS, json.dumps(with_checksum(digests), indent=1) + "\n")


def _write_page(directory: RunDirectory, run: Run) -> None:
    """Writes the page, and results.md with the tables of all its sections; measured.safetensors, if it was lost."""
    directory.write_text(MARKDOWN, markdown(run, write_page(run)))
    if run.measured_if_known.of:
        run.measured.write(directory)
    plots = [f"{PLOTS}/{path.name}" for path in sorted((run.path / PLOTS).glob("*.svg"))]
    digests = _digests(run.path, (*_tables_of(run), PAGE, *plots, *_sources_of(run)))
    directory.write_text(REPORTS, json.dumps(with_checksum(digests), indent=1) + "\n")


def _tables_of(run: Run) -> tuple[str, ...]:
    return (MARKDOWN, TABLE, MODELS) if len(run.records) >= MANY_MODELS else (MARKDOWN, TABLE)


def _sources_of(run: Run) -> list[str]:
    return [name for name in (RESULTS, ANALYSIS, AUDIT) if (run.path / name).exists()]


def _digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Returns {file, relative to the run directory: checksum of its bytes}."""
    return {name: digest(np.fromfile(folder / name, np.uint8)) for name in names}
