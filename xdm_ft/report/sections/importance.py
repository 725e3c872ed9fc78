"""What is left of the accuracy when the most important features are removed."""

from __future__ import annotations

import json
from collections.abc import Sequence

from xdm_ft.report.analysed import Model, by_set, models, not_measured
from xdm_ft.report.charts import SERIES, Figure, Line, Look, curves
from xdm_ft.report.finished import Run
from xdm_ft.report.section import Cell, Section, long_table, mean_cell, mean_of
from xdm_ft.report.words import EMPTY, range_text

ORDERS = {
    "score": ("importance score", Look(SERIES[0], "o", "-")),
    "gradient_norm": ("gradient norm", Look(SERIES[1], "s", "--")),
    "random": ("random", Look(SERIES[2], "^", ":")),
}
MAX_FIGURES = 16
KINDS = "class", "domain"


def section(run: Run) -> Section | None:
    """Curves per method of class and domain accuracy, and a table of the areas below them; None if not measured."""
    measured = models(run, "importance")
    if not measured:
        return None
    images = [model["importance"]["images"] for model in measured]
    notes = [
        f"{range_text(min(images), max(images))} images per model",
        "the score knows the true label: with a linear head it removes exactly what speaks for that class, so accuracy "
        "falls fast with any head, even one of random weights. Compare models by the curve at random",
    ]
    if any(model.get("domain_head") == "fitted" for model in measured):
        notes.append("methods without a domain head get a linear one, fitted on their training features")
    header = ["method", "held out", *(f"{kind}: {words}" for kind in KINDS for words, _ in ORDERS.values())]
    rows = [
        [Cell(method), Cell(where), *(cell for kind in KINDS for cell in _areas(own, kind))]
        for (method, where), own in by_set(measured).items()
    ]
    last = max(model["importance"]["shares"][-1] for model in measured)
    caption = f"Area under each curve of accuracy, at most {last:g}. Lower: what was removed mattered more."
    return Section(
        id="importance",
        title="Importance of features",
        about="Accuracy on validation images of the training domains after the top x% of the features of each image "
        "are set to 0: by the importance score, by the size of the gradient, or at random. The lower a curve and its "
        "area, the more the removed features mattered.",
        figures=[_figure(i, *group) for i, group in enumerate(_groups(measured)[:MAX_FIGURES])],
        tables=[long_table(caption, header, rows)],
        notes=[*notes, *not_measured(run)],
    )


def _groups(measured: Sequence[Model]) -> list[tuple[str, list[Model], str]]:
    """Returns (methods, models, kind of accuracy) of every figure.

    Methods with equal curves share one: with a frozen encoder all fitted domain heads are the same.
    """
    groups: dict[str, tuple[list[str], list[Model], str]] = {}
    for method in dict.fromkeys(model["method"] for model in measured):
        own = [model for model in measured if model["method"] == method]
        for kind in KINDS:
            by_model = [(model["test_domains"], model["importance"].get(kind)) for model in own]
            if any(values for _, values in by_model):
                groups.setdefault(json.dumps([kind, by_model]), ([], own, kind))[0].append(method)
    return [(", ".join(methods), own, kind) for methods, own, kind in groups.values()]


def _areas(own: Sequence[Model], kind: str) -> list[Cell]:
    areas = [(model["importance"].get("area") or {}).get(kind) or {} for model in own]
    return [mean_cell((area.get(order) for area in areas), ".3f") for order in ORDERS]


def _figure(number: int, method: str, own: Sequence[Model], kind: str) -> Figure:
    lines, told = [], []
    for order, (words, look) in ORDERS.items():
        values = [values for model in own if (values := (model["importance"].get(kind) or {}).get(order))]
        if not values:
            continue
        shares = [100 * share for share in own[0]["importance"]["shares"]]  # the same for all models of a run
        means = [mean_of(column) for column in zip(*values, strict=True)]
        thin = [_points(shares, one) for one in values] if len(values) > 1 else []
        lines.append(Line(words, look, _points(shares, means), thin))
        half = min(range(len(shares)), key=lambda i: abs(shares[i] - 50))
        first, later = (EMPTY if value is None else f"{100 * value:.1f}" for value in (means[0], means[half]))
        told.append(f"{words} from {first}% to {later}% with {shares[half]:g}% removed")
    sets = [where for _, where in by_set(own)]
    several = f"Thin lines: {len(sets)} held-out sets; with markers: their mean."
    return curves(
        f"importance-{number}-{kind}",
        f"{kind.capitalize()} accuracy of {method} against the share of removed features; {', '.join(told)}.",
        f"{method}: {kind} accuracy. {several if len(sets) > 1 else f'Held out: {sets[0]}.'}",
        {"": lines},
        ("features removed in %", f"{kind} accuracy in %"),
        limits={"ymin": 0},
    )


def _points(shares: Sequence[float], values: Sequence[float | None]) -> list[tuple[float, float]]:
    return [(share, 100 * value) for share, value in zip(shares, values, strict=True) if value is not None]
