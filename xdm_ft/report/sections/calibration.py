"""Whether the probabilities are right, before and after temperature scaling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xdm_ft.report.analysed import by_set, method_looks, models, not_measured
from xdm_ft.report.charts import Figure, Line, Look, Mark, Row, curves, points
from xdm_ft.report.finished import Run
from xdm_ft.report.section import Cell, Section, count_cell, long_table, mean_cell, mean_of, texts
from xdm_ft.report.words import listed, number
from xdm_ft.runtime.errors import plural

MAX_FIGURES = 12
FEWEST_IMAGES = 10  # per seed, of a bin that is drawn
ROLES = {"test": ("held-out", -0.15, "o"), "validation": ("validation", 0.15, "s")}


@dataclass(frozen=True)
class OnDomain:
    """What was measured of a method on one domain, per seed."""

    method: str
    where: str  # held-out set
    domain: str
    temperatures: list[float | None]
    seeds: list[Mapping[str, Any]]

    @property
    def role(self) -> str:
        return str(self.seeds[0]["role"])

    def mean(self, key: str) -> float | None:
        return mean_of(seed[key] for seed in self.seeds)

    def bins(self, key: str) -> list[tuple[float, float]]:
        """Returns (confidence, accuracy) in percent of the bins of all seeds together that have enough images."""
        points = []
        for same in zip(*(seed.get(key) or () for seed in self.seeds), strict=False):
            known = [one for one in same if one["n"] and one["confidence"] is not None and one["accuracy"] is not None]
            n = sum(one["n"] for one in known)
            if n >= FEWEST_IMAGES * len(self.seeds):
                x, y = (100 * sum(one["n"] * one[k] for one in known) / n for k in ("confidence", "accuracy"))
                points.append((x, y))
        return points


def section(run: Run) -> Section | None:
    """ECE per method, reliability per held-out domain, a table of all domains; None if it was not measured."""
    measured = list(_measured(run))
    if not measured:
        return None
    tested = [one for one in measured if one.role == "test"]
    domains = list(dict.fromkeys((one.where, one.domain) for one in tested))[:MAX_FIGURES]
    of_domains = [[one for one in tested if (one.where, one.domain) == domain] for domain in domains]
    header = ["method", "held out", "domain", "images of", "images", "temperature"]
    header += ["ECE before (%)", "ECE after (%)", "NLL before", "NLL after"]
    caption = "Before and after temperature scaling, per method and domain, mean ± standard deviation over seeds."
    return Section(
        id="calibration",
        title="Calibration and temperature",
        about="A calibrated model is right in 80% of the cases in which it says 80%. One temperature per model, fitted "
        "on validation images of its training domains, is applied everywhere. The expected calibration error (ECE) is "
        "the mean distance of accuracy from confidence.",
        figures=[
            *_errors(run, measured),
            *(_reliability(run, f"calibration-{i}", o) for i, o in enumerate(of_domains)),
        ],
        tables=[long_table(caption, header, [_row(one) for one in measured])],
        notes=[
            *_helped(measured),
            "on a held-out domain the temperature can help or harm: only labels of that domain can tell",
            f"the temperature changes no decision; bins with fewer than {FEWEST_IMAGES} images per seed are not drawn",
            *not_measured(run),
        ],
    )


def _measured(run: Run) -> Iterator[OnDomain]:
    for (method, where), own in by_set(models(run, "calibration")).items():
        parts = [model["calibration"] for model in own]
        for domain in dict.fromkeys(domain for part in parts for domain in part.get("domains") or ()):
            known = [part for part in parts if domain in part["domains"]]
            seeds = [part["domains"][domain] for part in known]
            yield OnDomain(method, where, domain, [part["temperature"] for part in known], seeds)


def _row(one: OnDomain) -> list[Cell]:
    return [
        *texts(one.method, one.where, one.domain, one.role),
        count_cell(one.seeds[0]["n"]),
        mean_cell(one.temperatures, ".2f"),
        *(mean_cell((_percent(seed[key]) for seed in one.seeds), ".1f") for key in ("ece", "ece_scaled")),
        *(mean_cell((seed[key] for seed in one.seeds), ".3f") for key in ("nll", "nll_scaled")),
    ]


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _before_and_after(measured: Sequence[OnDomain], method: str, role: str) -> tuple[float, float] | None:
    """Returns the method's ECE in %, the mean over domains of this role; None if it is not known."""
    own = [one for one in measured if (one.method, one.role) == (method, role)]
    before, after = (mean_of(_percent(one.mean(key)) for one in own) for key in ("ece", "ece_scaled"))
    return None if before is None or after is None else (before, after)


def _helped(measured: Sequence[OnDomain]) -> Iterator[str]:
    methods = dict.fromkeys(one.method for one in measured)
    pairs = [pair for method in methods if (pair := _before_and_after(measured, method, "test")) is not None]
    if pairs:
        lower = sum(after < before for before, after in pairs)
        yield f"here it lowers the ECE on held-out domains for {lower} of {plural(len(pairs), 'method')}"


def _errors(run: Run, measured: Sequence[OnDomain]) -> list[Figure]:
    """ECE before and after: the mean over held-out domains and over validation parts, per method."""
    styles, rows, told = method_looks(run), [], []
    for method in dict.fromkeys(one.method for one in measured):
        marks = []
        for role, (words, shift, _) in ROLES.items():
            if (pair := _before_and_after(measured, method, role)) is not None:
                marks.append(Mark(f"{words}, before", pair[0], pair, shift))
                marks.append(Mark(f"{words}, after", pair[1], None, shift))
                told += [f"{method} {pair[0]:.1f} → {pair[1]:.1f}"] if role == "test" else []
        rows += [Row(method, marks, colour=styles[method].colour)] if marks else []
    series = {
        f"{words}, {when}": Look("", marker, hollow=when == "before", width=1)
        for words, _, marker in ROLES.values()
        for when in ("before", "after")
    }
    alt = f"ECE in % on held-out domains before → after temperature scaling: {listed(told)}."
    caption = "ECE before (hollow) and after (filled) temperature scaling, mean over domains and seeds."
    legend = {one: one for one in series}
    limits = (0, None)
    name, axis = "calibration-ece", "ECE in %"
    chart = points(name, alt, caption, lambda: rows, axis, series, legend, limits, count=len(rows))
    return [chart] if rows else []


def _reliability(run: Run, name: str, measured: Sequence[OnDomain]) -> Figure:
    """Accuracy against confidence of all methods on one held-out domain, before and after."""
    styles, domain = method_looks(run), measured[0].domain
    sides = {
        title: [Line(one.method, styles[one.method]._replace(width=1), one.bins(key)) for one in measured]
        for title, key in (("before scaling", "reliability"), ("after scaling", "reliability_scaled"))
    }
    told = [
        f"{one.method} {' → '.join(number(one.mean(key), 'ece') for key in ('ece', 'ece_scaled'))}" for one in measured
    ]
    alt = f"Reliability on {domain}, before and after temperature scaling; ECE in %: {listed(told)}."
    caption = f"{domain}, never seen in training. On the dotted line confidence is right; below it, it is too high."
    return curves(name, alt, caption, sides, ("confidence in %", "accuracy in %"), diagonal=True, height=2.1)
