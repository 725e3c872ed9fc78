"""How invariant features and risks are over the training domains: the paper's two measurements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from xdm_ft.report.finished import Run
from xdm_ft.report.page.analysed import (
    Model,
    bounded,
    by_set,
    mean,
    mean_cell,
    models,
    not_measured,
    of_the_paper,
    significant,
)
from xdm_ft.report.page.bars import Bar, bars
from xdm_ft.report.page.figures import MUTED
from xdm_ft.report.page.panel import Cell, Figure, Panel
from xdm_ft.report.page.styles import Style, listed, method_styles
from xdm_ft.report.table_rows import EMPTY

ALL = "all methods"


class Measure(NamedTuple):
    name: str  # of the figure
    title: str
    axis: str
    value: Callable[[Model], float | None]
    chance: Callable[[Model], float | None]  # how much of it is chance, as covariances of few images differ


def _part(part: str, key: str) -> Callable[[Model], float | None]:
    return lambda model: (model.get(part) or {}).get(key)


MEASURES = (
    Measure(
        "invariance-representation",
        "representation (paper's formula)",
        "distance of covariances",
        _part("representation_invariance", "paper"),
        _part("representation_invariance", "paper_noise"),
    ),
    Measure(
        "invariance-representation-code",
        "representation (published code)",
        "distance of means and covariances",
        _part("representation_invariance", "published_code"),
        _part("representation_invariance", "published_code_noise"),
    ),
    Measure(
        "invariance-prediction",
        "prediction (variance of the risk)",
        "variance of the risk",
        _part("prediction_invariance", "risk_variance"),
        lambda model: None,
    ),
)


def panel(run: Run) -> Panel | None:
    """Bars of both measurements per method and a table of all values; None without analysis."""
    found = [model for model in models(run) if any(measure.value(model) is not None for measure in MEASURES)]
    if not found:
        return None
    about = (
        "How different the training domains are to the models: the distance of same-class features between domains "
        "(representation), and the variance of the mean cross entropy over domains (prediction). Lower is more "
        "invariant, but not more accurate: features that are all equal have distance 0."
    )
    notes = [
        "distances grow with the scale of the features: they compare no two encoders, and features that shrink look "
        "better"
    ]
    chance = any(measure.chance(model) is not None for measure in MEASURES for model in found)
    if chance:
        notes.append("covariances of few images differ by chance: a dotted tick shows about how much of a bar that is")
    columns = {measure.title: measure.value for measure in MEASURES}
    if chance:
        columns |= {f"by chance: {measure.title}": measure.chance for measure in MEASURES[:2]}
    header = ["method", "held out", *columns, "risk per training domain"]
    rows = [
        [Cell(method), Cell(where), *(mean_cell(map(of, own)) for of in columns.values()), _risks(own)]
        for (method, where), own in by_set(found).items()
    ]
    table = bounded(rows, "Invariance over the training domains, mean ± standard deviation over seeds.", header)
    figures = [figure for measure in MEASURES if (figure := _figure(run, found, measure)) is not None]
    published = of_the_paper(run, "representation invariance", "prediction invariance")
    notes += (run.analysis or {}).get("notes") or ()
    return Panel("invariance", "Invariance", about, figures, [table, *published], notes=[*notes, *not_measured(run)])


def _figure(run: Run, found: Sequence[Model], measure: Measure) -> Figure | None:
    values: dict[str, dict[str, float]] = {}
    for (method, where), own in by_set(found).items():
        value = mean(map(measure.value, own))
        if value is not None:
            values.setdefault(method, {})[where] = value
    if not values:
        return None
    if len(values) > 1 and len({tuple(of_method.items()) for of_method in values.values()}) == 1:
        values = {ALL: next(iter(values.values()))}
    looks = method_styles(run) | {ALL: Style(MUTED, "o", "-")}
    rows = []
    for method, of_method in values.items():
        chance = mean(measure.chance(model) for model in found if method in (model["method"], ALL))
        rows.append(Bar(method, looks[method].colour, of_method, chance=chance))
    numbers = listed([f"{row.label} {significant(row.mean)}" for row in rows if row.mean is not None])
    alt = f"Bars of {measure.title}, mean over held-out domains: {numbers}."
    caption = f"{measure.title.capitalize()}: the bar is the mean over held-out domains, a marker is one of them."
    if len({where for of_method in values.values() for where in of_method}) == 1:
        caption = f"{measure.title.capitalize()}."
    return Figure(measure.name, bars(measure.name, rows, measure.axis), alt, caption)


def _risks(found: Sequence[Model]) -> Cell:
    """The mean cross entropy of every training domain, over seeds."""
    risks = [(model.get("prediction_invariance") or {}).get("risk") or {} for model in found]
    means = {domain: mean(of.get(domain) for of in risks) for domain in dict.fromkeys(d for of in risks for d in of)}
    return Cell("; ".join(f"{domain} {risk:.3f}" for domain, risk in means.items() if risk is not None) or EMPTY)
