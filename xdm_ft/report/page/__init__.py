"""report.html: one self-contained page of a run, from the files of its directory alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from xdm_ft.report.finished import Run
from xdm_ft.report.page import (
    about_run,
    calibration,
    confusion,
    costs,
    curves,
    differences,
    divergence,
    embeddings,
    headline,
    importance,
    invariance,
    metrics,
    mistakes,
    published,
    reliability,
    results,
    risk_coverage,
    search,
    wise_ft,
)
from xdm_ft.report.page.panel import Panel
from xdm_ft.report.page.render import html, plot_file
from xdm_ft.storage.atomic import replace_text
from xdm_ft.storage.run_directory import PAGE

PLOTS = "plots"


def write_page(run: Run) -> None:
    """Writes report.html and the figures as plots/*.svg into the run directory, each file atomically.

    Images of the data and names of their files stand in the page only if the recipe's `report.images` is true. Raises
    `UserError` if a file of the run is damaged, or if the page can not be written.
    """
    images = bool(run.results["recipe"].get("report", {}).get("images", False))
    panels = [panel for make in _panels(images) if (panel := make(run)) is not None]
    figures = [figure for panel in panels for figure in panel.figures]
    text = html(str(run.results["recipe"]["name"]), headline.headline(run), panels)
    for figure in figures:
        replace_text(run.path / PLOTS / f"{figure.name}.svg", plot_file(figure))
    replace_text(run.path / PAGE, text)
    for path in (run.path / PLOTS).glob("*.svg"):  # of an earlier page: they would contradict this one
        if path.stem not in {figure.name for figure in figures}:
            path.unlink()


def _panels(images: bool) -> tuple[Callable[[Run], Panel | None], ...]:
    """The panels in the order of the page. Each returns None if it has nothing to show."""
    return (
        results.panel,
        differences.panel,
        differences.further_panel,
        metrics.panel,
        costs.panel,
        confusion.panel,
        confusion.others,
        reliability.panel,
        risk_coverage.panel,
        partial(mistakes.panel, images=images),
        search.panel,
        wise_ft.panel,
        curves.panel,
        calibration.panel,
        invariance.panel,
        divergence.panel,
        importance.panel,
        embeddings.panel,
        published.panel,
        partial(about_run.data, images=images),
        about_run.reading,
        about_run.environment,
        about_run.recipe,
    )
