"""Parts of the features in two dimensions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from xdm_ft.report.finished import Run
from xdm_ft.report.page.analysed import Model, bounded, by_set, mean_cell, not_measured, with_part
from xdm_ft.report.page.embedding_figures import Labels, Plot, overlaid, side_by_side
from xdm_ft.report.page.numbers import set_name
from xdm_ft.report.page.panel import Cell, Figure, Panel
from xdm_ft.report.table_rows import EMPTY

SPECIFIC = {"class_specific_vs_generic": "class", "domain_specific_vs_generic": "domain"}
"""{pair of specific and generic features: what its points are labelled by}"""
AUGMENTED = "original_vs_augmented"
MAPS = {"map": "learned map", "pca": "PCA"}
MOST_MODELS = 4  # shown as figures


def panel(run: Run) -> Panel | None:
    """Scatter plots of the first models, and the silhouettes of all; None if no embedding was made."""
    found = with_part(run, "embedding")
    if not found:
        return None
    about = (
        "Each point is a part of one image's feature in two dimensions: by a map of two linear layers that was trained "
        "to tell classes (or domains) on other images, and by PCA, which knows no labels. If the specific part "
        "separates the labels better than the generic one, its silhouette is higher."
    )
    notes = [
        "silhouette: 1 for groups far apart, 0 for mixed ones, below 0 where points are nearer to another group",
        "which features are specific is chosen for each image with its true label, so both parts carry the label, even "
        "with a head of random weights",
        "distances have no unit, and two dimensions hold few groups: a mixed plot does not say that features are mixed",
    ]
    shown = _one_per_method_first(found)[:MOST_MODELS]
    figures = [_figure(run, i, *group) for i, group in enumerate(_groups(shown))]
    header = ["method", "held out"]
    header += [f"{part}, {title}" for kind in SPECIFIC.values() for title in MAPS.values() for part in _parts(kind)]
    header += [f"original against augmented, {title}" for title in MAPS.values()]
    rows = [[Cell(method), Cell(where), *_silhouettes(own)] for (method, where), own in by_set(found).items()]
    caption = "Silhouettes: of classes and of domains among the points of each part; of original against augmented."
    if len(found) > len(shown):
        caption += f" Plots are of {len(shown)} of {len(found)} models."
    title = "Parts of the features in two dimensions"
    return Panel(
        "embeddings",
        title,
        about,
        figures,
        [bounded(rows, caption, header)],
        folded=True,
        notes=[*notes, *not_measured(run)],
    )


def _parts(kind: str) -> tuple[str, str]:
    return f"{kind}-specific", f"{kind}-generic"


def _one_per_method_first(found: Sequence[Model]) -> list[Model]:
    """The first model of every method, then the others."""
    first = {model["method"]: model for model in reversed(found)}
    ahead = [model for model in found if model is first[model["method"]]]
    return ahead + [model for model in found if model is not first[model["method"]]]


def _plots(model: Model, pair: str) -> dict[str, Plot]:
    """{title of a map: its points}"""
    pairs = model["embedding"].get("pairs") or {}
    return {title: plot for key, title in MAPS.items() if (plot := (pairs.get(pair) or {}).get(key))}


def _silhouettes(found: Sequence[Model]) -> Iterator[Cell]:
    for pair in SPECIFIC:
        for title in MAPS.values():
            for part in (0, 1):
                yield mean_cell((_of_labels(_plots(model, pair).get(title), part) for model in found), "z.2f")
    for title in MAPS.values():
        yield mean_cell(((_plots(model, AUGMENTED).get(title) or {}).get("silhouette") for model in found), "z.2f")


def _of_labels(plot: Any, part: int) -> float | None:
    found: float | None = ((plot or {}).get("silhouette_of_labels") or (None, None))[part]
    return found


def _groups(shown: Sequence[Model]) -> list[tuple[str, str, Model]]:
    """(methods and held-out domains, pair, first model) of every figure; models with equal points share one."""
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


def _figure(run: Run, number: int, who: str, pair: str, model: Model) -> Figure:
    plots, name = _plots(model, pair), f"embedding-{number}"
    if pair == AUGMENTED:
        known = [f"{title} {_text(plot.get('silhouette'))}" for title, plot in plots.items()]
        caption = f"{who}: original and augmented features. Silhouettes of the two: {', '.join(known)}."
        return Figure(name, overlaid(name, plots), f"Scatter plots of {caption}", caption)
    kind, parts = SPECIFIC[pair], _parts(SPECIFIC[pair])
    known = [
        f"{title} {_text(_of_labels(plot, 0))} specific, {_text(_of_labels(plot, 1))} generic"
        for title, plot in plots.items()
    ]
    measured = f"Silhouettes: {'; '.join(known)}."
    alt = f"{parts[0].capitalize()} and {parts[1]} features of {who}, by {kind}. {measured}"
    labels: Labels = run.class_names if kind == "class" else _train_domains(model)
    return Figure(name, side_by_side(name, plots, parts, labels), alt, f"{who}: marked by {kind}. {measured}")


def _train_domains(model: Model) -> list[str]:
    return list((model.get("prediction_invariance") or {}).get("risk") or ())


def _text(value: float | None) -> str:
    return EMPTY if value is None else f"{value:.2f}"
