"""How invariant features and risks are over the training domains: the paper's two measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from xdm_ft.report.analysed import Model, by_set, method_looks, models, not_measured
from xdm_ft.report.charts import MUTED, Figure
from xdm_ft.report.finished import Run
from xdm_ft.report.published import paper_table
from xdm_ft.report.section import Cell, Section, long_table, mean_cell, mean_of
from xdm_ft.report.sections.divergence import Bar, bars
from xdm_ft.report.words import EMPTY, listed, significant

ALL = "all methods"


class Measure(NamedTuple):
    name: str  # of the figure
    title: str
    axis: str
    part: str  # of analysis.json
    key: str

    def value(self, model: Model) -> float | None:
        return (model.get(self.part) or {}).get(self.key)

    def chance(self, model: Model) -> float | None:
        """How much of the value is chance, as covariances of few images differ."""
        return (model.get(self.part) or {}).get(f"{self.key}_noise")


PAPER = Measure(
    "invariance-representation", "representation (paper's formula)", "distance of covariances",
    "representation_invariance", "paper",
)  # fmt: skip
CODE = Measure(
    "invariance-representation-code", "representation (published code)", "distance of means and covariances",
    "representation_invariance", "published_code",
)  # fmt: skip
RISK = Measure(
    "invariance-prediction", "prediction (variance of the risk)", "variance of the risk",
    "prediction_invariance", "risk_variance",
)  # fmt: skip
MEASURES = (PAPER, CODE, RISK)


def section(run: Run) -> Section | None:
    """Bars of both measurements per method and a table of all values; None without analysis."""
    measured = [model for model in models(run) if any(measure.value(model) is not None for measure in MEASURES)]
    if not measured:
        return None
    notes = [
        "distances grow with the scale of the features: they compare no two encoders, and features that shrink look "
        "better"
    ]
    columns = {measure.title: measure.value for measure in MEASURES}
    if any(measure.chance(model) is not None for measure in MEASURES for model in measured):
        notes.append("covariances of few images differ by chance: a dotted tick shows about how much of a bar that is")
        columns |= {f"by chance: {measure.title}": measure.chance for measure in (PAPER, CODE)}
    rows = [
        [Cell(method), Cell(where), *(mean_cell(map(value, own)) for value in columns.values()), _risks(own)]
        for (method, where), own in by_set(measured).items()
    ]
    caption = "Invariance over the training domains, mean ± standard deviation over seeds."
    table = long_table(caption, ["method", "held out", *columns, "risk per training domain"], rows)
    return Section(
        id="invariance",
        title="Invariance",
        about="How different the training domains are to the models: the distance of same-class features between "
        "domains (representation), and the variance of the mean cross entropy over domains (prediction). Lower is more "
        "invariant, but not more accurate: features that are all equal have distance 0.",
        figures=[figure for measure in MEASURES for figure in _figure(run, measured, measure)],
        tables=[table, *paper_table(run, "representation invariance", "prediction invariance")],
        notes=[*notes, *((run.analysis or {}).get("notes") or ()), *not_measured(run)],
    )


def _figure(run: Run, measured: Sequence[Model], measure: Measure) -> list[Figure]:
    values: dict[str, dict[str, float]] = {}
    for (method, where), own in by_set(measured).items():
        if (value := mean_of(map(measure.value, own))) is not None:
            values.setdefault(method, {})[where] = value
    if len(values) > 1 and len({tuple(of_method.items()) for of_method in values.values()}) == 1:
        values = {ALL: next(iter(values.values()))}
    rows = []
    for method, of_method in values.items():
        chance = mean_of(measure.chance(model) for model in measured if method in (model["method"], ALL))
        colour = MUTED if method == ALL else method_looks(run)[method].colour
        rows.append(Bar(method, colour, of_method, chance=chance))
    told = listed([f"{row.label} {significant(row.mean)}" for row in rows if row.mean is not None])
    alt = f"Bars of {measure.title}, mean over held-out domains: {told}."
    one_set = len({where for of_method in values.values() for where in of_method}) == 1
    markers = "" if one_set else ": the bar is the mean over held-out domains, a marker is one of them"
    return [bars(measure.name, alt, f"{measure.title.capitalize()}{markers}.", rows, measure.axis)] if rows else []


def _risks(own: Sequence[Model]) -> Cell:
    """Returns the mean cross entropy of every training domain, over seeds."""
    risks = [(model.get("prediction_invariance") or {}).get("risk") or {} for model in own]
    domains = dict.fromkeys(domain for of_model in risks for domain in of_model)
    means = {domain: mean_of(of_model.get(domain) for of_model in risks) for domain in domains}
    return Cell("; ".join(f"{domain} {risk:.3f}" for domain, risk in means.items() if risk is not None) or EMPTY)
