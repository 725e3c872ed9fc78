"""Parts of the features in two dimensions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from xdm_ft.evaluation.records import set_name
from xdm_ft.report.analysed import Model, by_set, models, not_measured
from xdm_ft.report.charts import SERIES, Cloud, Figure, Look, looks, scatter
from xdm_ft.report.finished import Run
from xdm_ft.report.section import Cell, Section, long_table, mean_cell
from xdm_ft.report.words import EMPTY

SPECIFIC = {"class_specific_vs_generic": "class", "domain_specific_vs_generic": "domain"}
"""{pair of specific and generic features: what its points are labelled by}"""
AUGMENTED = "original_vs_augmented"
MAPS = {"map": "learned map", "pca": "PCA"}
MAX_MODELS = 4  # shown as figures
MAX_POINTS = 400  # of a plot
MAX_NAMES = 10  # labels that have a place in the legend: of more, colours say nothing
Plot = Mapping[str, Any]  # "points" [[x,y],…], "kind" [0 or 1,…], "label" [number,…]


def section(run: Run) -> Section | None:
    """Scatter plots of the first models, and the silhouettes of all; None if no embedding was made."""
    measured = models(run, "embedding")
    if not measured:
        return None
    shown = _one_per_method_first(measured)[:MAX_MODELS]
    header = ["method", "held out"]
    header += [f"{part}, {title}" for kind in SPECIFIC.values() for title in MAPS.values() for part in _parts(kind)]
    header += [f"original against augmented, {title}" for title in MAPS.values()]
    rows = [[Cell(method), Cell(where), *_silhouettes(own)] for (method, where), own in by_set(measured).items()]
    caption = "Silhouettes: of classes and of domains among the points of each part; of original against augmented."
    if len(measured) > len(shown):
        caption += f" Plots are of {len(shown)} of {len(measured)} models."
    return Section(
        id="embeddings",
        title="Parts of the features in two dimensions",
        about="Each point is a part of one image's feature in two dimensions: by a map of two linear layers that was "
        "trained to tell classes (or domains) on other images, and by PCA, which knows no labels. If the specific part "
        "separates the labels better than the generic one, its silhouette is higher.",
        figures=[_figure(run, f"embedding-{i}", *group) for i, group in enumerate(_groups(shown))],
        tables=[long_table(caption, header, rows)],
        folded=True,
        notes=[
            "silhouette: 1 for groups far apart, 0 for mixed ones, below 0 where points are nearer to another group",
            "which features are specific is chosen for each image with its true label, so both parts carry the label, "
            "even with a head of random weights",
            "distances have no unit, and two dimensions hold few groups: a mixed plot does not say that features are "
            "mixed",
            *not_measured(run),
        ],
    )


def _parts(kind: str) -> tuple[str, str]:
    return f"{kind}-specific", f"{kind}-generic"


def _one_per_method_first(measured: Sequence[Model]) -> list[Model]:
    """Returns the first model of every method, then the others."""
    first = {model["method"]: model for model in reversed(measured)}
    return sorted(measured, key=lambda model: model is not first[model["method"]])


def _plots(model: Model, pair: str) -> dict[str, Plot]:
    """Returns {title of a map: its points}."""
    pairs = model["embedding"].get("pairs") or {}
    return {title: plot for key, title in MAPS.items() if (plot := (pairs.get(pair) or {}).get(key))}


def _silhouettes(own: Sequence[Model]) -> Iterator[Cell]:
    for pair in SPECIFIC:
        for title in MAPS.values():
            for part in (0, 1):
                yield mean_cell((_of_labels(_plots(model, pair).get(title), part) for model in own), "z.2f")
    for title in MAPS.values():
        yield mean_cell(((_plots(model, AUGMENTED).get(title) or {}).get("silhouette") for model in own), "z.2f")


def _of_labels(plot: Any, part: int) -> float | None:
    value: float | None = ((plot or {}).get("silhouette_of_labels") or (None, None))[part]
    return value


def _groups(shown: Sequence[Model]) -> list[tuple[str, str, Model]]:
    """Returns (methods and held-out domains, pair, first model) of every figure; models with equal points share one."""
    groups: dict[str, tuple[list[str], str, Model]] = {}
    for model in shown:
        for pair in (*SPECIFIC, AUGMENTED):
            if plots := _plots(model, pair):
                key = json.dumps([model["test_domains"], pair, plots])
                groups.setdefault(key, ([], pair, model))[0].append(model["method"])
    return [
        (f"{', '.join(methods)}, held out {set_name(model['test_domains'])}", pair, model)
        for methods, pair, model in groups.values()
    ]


def _figure(run: Run, name: str, who: str, pair: str, model: Model) -> Figure:
    plots = _plots(model, pair)
    if pair == AUGMENTED:
        told = ", ".join(f"{title} {_text(plot.get('silhouette'))}" for title, plot in plots.items())
        caption = f"{who}: original and augmented features. Silhouettes of the two: {told}."
        panels = [(title, _original_and_augmented(plot)) for title, plot in plots.items()]
        return scatter(name, f"Scatter plots of {caption}", caption, [panels], framed=True, height=2.1)
    kind, parts = SPECIFIC[pair], _parts(SPECIFIC[pair])
    told = "; ".join(
        f"{title} {_text(_of_labels(plot, 0))} specific, {_text(_of_labels(plot, 1))} generic"
        for title, plot in plots.items()
    )
    names = run.class_names if kind == "class" else [*((model.get("prediction_invariance") or {}).get("risk") or ())]
    grid = [[(f"{parts[i]}\n{title}", _by_label(plot, i, names)) for i in (0, 1)] for title, plot in plots.items()]
    alt = f"{parts[0].capitalize()} and {parts[1]} features of {who}, by {kind}. Silhouettes: {told}."
    caption = f"{who}: marked by {kind}. Silhouettes: {told}."
    return scatter(name, alt, caption, grid, framed=True, height=1.9 * len(plots))


def _thinned(plot: Plot) -> list[tuple[Any, int, int]]:
    """Returns (point, kind, label) of at most `MAX_POINTS` points, evenly."""
    labels = plot.get("label") or [0] * len(plot["points"])
    rows = list(zip(plot["points"], plot["kind"], labels, strict=True))
    return rows[:: max(1, -(-len(rows) // MAX_POINTS))]


def _original_and_augmented(plot: Plot) -> list[Cloud]:
    styles = Look(SERIES[0], "o", size=3), Look(SERIES[1], "^", size=3, hollow=True)
    return [
        Cloud(label, styles[kind], [(x, y) for (x, y), own, _ in _thinned(plot) if own == kind])
        for kind, label in enumerate(("original", "augmented"))
    ]


def _by_label(plot: Plot, kind: int, names: Sequence[str]) -> list[Cloud]:
    numbers = sorted({label for _, _, label in _thinned(plot)})
    styles = looks(map(str, range(max(numbers) + 1)))
    clouds = []
    for number in numbers:
        points = [(x, y) for (x, y), own, label in _thinned(plot) if (own, label) == (kind, number)]
        name = names[number] if number < len(names) else str(number)
        label = name if len(numbers) <= MAX_NAMES else ""
        clouds.append(Cloud(label, styles[str(number)]._replace(size=3), points))
    return clouds


def _text(value: float | None) -> str:
    return EMPTY if value is None else f"{value:.2f}"
