"""What is left of the accuracy when the most important features are removed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from xdm_ft.report.finished import Run
from xdm_ft.report.page.analysed import Model, bounded, by_set, mean_cell, not_measured, with_part
from xdm_ft.report.page.figures import SERIES, svg
from xdm_ft.report.page.panel import Cell, Figure, Panel
from xdm_ft.report.page.styles import WIDTH, Style, legend_below, legend_height
from xdm_ft.report.table_rows import EMPTY

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

ORDERS = {
    "score": ("importance score", Style(SERIES[0], "o", "-")),
    "gradient_norm": ("gradient norm", Style(SERIES[1], "s", "--")),
    "random": ("random", Style(SERIES[2], "^", ":")),
}
MOST_FIGURES = 16


def panel(run: Run) -> Panel | None:
    """Curves per method of class and domain accuracy, and a table of the areas below them; None if not measured."""
    found = with_part(run, "importance")
    if not found:
        return None
    images = sorted({model["importance"]["images"] for model in found})
    about = (
        "Accuracy on validation images of the training domains after the top x% of the features of each image are set "
        "to 0: by the importance score, by the size of the gradient, or at random. The lower a curve and its area, the "
        "more the removed features mattered."
    )
    notes = [
        f"{_range(images)} images per model",
        "the score knows the true label: with a linear head it removes exactly what speaks for that class, so accuracy "
        "falls fast with any head, even one of random weights. Compare models by the curve at random",
    ]
    if any(model.get("domain_head") == "fitted" for model in found):
        notes.append("methods without a domain head get a linear one, fitted on their training features")
    figures = [_figure(i, *group) for i, group in enumerate(_groups(found)[:MOST_FIGURES])]
    header = ["method", "held out", *(f"{kind}: {ORDERS[o][0]}" for kind in ("class", "domain") for o in ORDERS)]
    rows = [
        [Cell(method), Cell(where), *_areas(own, "class"), *_areas(own, "domain")]
        for (method, where), own in by_set(found).items()
    ]
    last = max(model["importance"]["shares"][-1] for model in found)
    caption = f"Area under each curve of accuracy, at most {last:g}. Lower: what was removed mattered more."
    return Panel(
        "importance",
        "Importance of features",
        about,
        figures,
        [bounded(rows, caption, header)],
        notes=[*notes, *not_measured(run)],
    )


def _range(values: list[int]) -> str:
    return f"{values[0]}" if len(values) == 1 else f"{values[0]} to {values[-1]}"


def _groups(found: list[Model]) -> list[tuple[str, list[Model], str]]:
    """(methods, models, kind of accuracy) of every figure.

    Methods with equal curves share one: with a frozen encoder all fitted domain heads are the same.
    """
    groups: dict[str, tuple[list[str], list[Model], str]] = {}
    for method in dict.fromkeys(model["method"] for model in found):
        own = [model for model in found if model["method"] == method]
        for kind in ("class", "domain"):
            curves = [(model["test_domains"], model["importance"].get(kind)) for model in own]
            if any(of_model for _, of_model in curves):
                groups.setdefault(json.dumps([kind, curves]), ([], own, kind))[0].append(method)
    return [(", ".join(methods), own, kind) for methods, own, kind in groups.values()]


def _areas(found: list[Model], kind: str) -> list[Cell]:
    areas = [(model["importance"].get("area") or {}).get(kind) or {} for model in found]
    return [mean_cell((of.get(order) for of in areas), ".3f") for order in ORDERS]


def _curves(found: list[Model], kind: str, order: str) -> list[tuple[list[float], list[float | None]]]:
    """(shares, accuracies) of every model that has this curve, in percent."""
    curves = []
    for model in found:
        values = (model["importance"].get(kind) or {}).get(order)
        if values:
            shares = [100 * share for share in model["importance"]["shares"]]
            curves.append((shares, [None if value is None else 100 * value for value in values]))
    return curves


def _figure(number: int, method: str, found: list[Model], kind: str) -> Figure:
    curves = {order: _curves(found, kind, order) for order in ORDERS}
    curves = {order: own for order, own in curves.items() if own}

    def draw(figure: Canvas) -> None:
        axes = figure.subplots()
        for order, own in curves.items():
            label, look = ORDERS[order]
            for shares, values in own if len(own) > 1 else ():
                axes.plot(shares, _gaps(values), color=look.colour, linewidth=0.6, alpha=0.5)
            axes.plot(own[0][0], _gaps(_mean(own)), look.marker, ls=look.line, color=look.colour, ms=4, label=label)
        axes.set_xlabel("features removed in %")
        axes.set_ylabel(f"{kind} accuracy in %")
        axes.set_ylim(bottom=0)
        legend_below(figure, axes)

    halves = [f"{ORDERS[order][0]} {_at_half(own)}" for order, own in curves.items()]
    alt = f"{kind.capitalize()} accuracy of {method} against the share of removed features; {', '.join(halves)}."
    sets = [where for _, where in by_set(found)]
    several = f"Thin lines: {len(sets)} held-out sets; with markers: their mean."
    caption = f"{method}: {kind} accuracy. {several if len(sets) > 1 else f'Held out: {sets[0]}.'}"
    name = f"importance-{number}-{kind}"
    return Figure(name, svg(name, draw, WIDTH, 2.5 + legend_height(len(curves))), alt, caption)


def _gaps(values: list[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def _mean(curves: list[tuple[list[float], list[float | None]]]) -> list[float | None]:
    """Point by point; None where no curve has a value. Curves of one run have the same shares."""
    columns = [[v for v in column if v is not None] for column in zip(*(values for _, values in curves), strict=True)]
    return [sum(column) / len(column) if column else None for column in columns]


def _at_half(curves: list[tuple[list[float], list[float | None]]]) -> str:
    """Accuracy without any removal, and at the share nearest to one half."""
    shares, means = curves[0][0], _mean(curves)
    half = min(range(len(shares)), key=lambda i: abs(shares[i] - 50))
    values = [EMPTY if value is None else f"{value:.1f}" for value in (means[0], means[half])]
    return f"from {values[0]}% to {values[1]}% with {shares[half]:g}% removed"
