"""Whether the probabilities are right, before and after temperature scaling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xdm_ft.report.finished import Run
from xdm_ft.report.page.analysed import bounded, by_set, mean, mean_cell, not_measured, with_part
from xdm_ft.report.page.calibration_figures import FEWEST, Bins, Dumbbell, dumbbells, reliability
from xdm_ft.report.page.panel import Cell, Figure, Panel
from xdm_ft.report.page.styles import listed, method_styles
from xdm_ft.report.table_rows import EMPTY
from xdm_ft.runtime.errors import plural

MOST_FIGURES = 12


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
        return mean(seed[key] for seed in self.seeds)

    def bins(self, key: str) -> Bins:
        """(confidence, accuracy) in percent of the bins of all seeds together that have enough images."""
        found = []
        for same in zip(*(seed.get(key) or () for seed in self.seeds), strict=False):
            known = [one for one in same if one["n"] and one["confidence"] is not None and one["accuracy"] is not None]
            n = sum(one["n"] for one in known)
            if n >= FEWEST * len(self.seeds):
                x, y = (100 * sum(one["n"] * one[k] for one in known) / n for k in ("confidence", "accuracy"))
                found.append((x, y))
        return found


def panel(run: Run) -> Panel | None:
    """ECE per method, reliability per held-out domain, a table of all domains; None if it was not measured."""
    found = list(_measured(run))
    if not found:
        return None
    about = (
        "A calibrated model is right in 80% of the cases in which it says 80%. One temperature per model, fitted on "
        "validation images of its training domains, is applied everywhere. The expected calibration error (ECE) is the "
        "mean distance of accuracy from confidence."
    )
    notes = [
        *_found(found),
        "on a held-out domain the temperature can help or harm: only labels of that domain can tell",
        f"the temperature changes no decision; bins with fewer than {FEWEST} images per seed are not drawn",
    ]
    tested = [one for one in found if one.role == "test"]
    figures = [] if (errors := _errors(run, found)) is None else [errors]
    for number, domain in enumerate(list(dict.fromkeys((one.where, one.domain) for one in tested))[:MOST_FIGURES]):
        figures.append(_reliability(run, number, [one for one in tested if (one.where, one.domain) == domain]))
    header = ["method", "held out", "domain", "images of", "images", "temperature"]
    header += ["ECE before (%)", "ECE after (%)", "NLL before", "NLL after"]
    caption = "Before and after temperature scaling, per method and domain, mean ± standard deviation over seeds."
    table = bounded([_row(one) for one in found], caption, header)
    return Panel(
        "calibration", "Calibration and temperature", about, figures, [table], notes=[*notes, *not_measured(run)]
    )


def _measured(run: Run) -> Iterator[OnDomain]:
    for (method, where), own in by_set(with_part(run, "calibration")).items():
        parts = [model["calibration"] for model in own]
        for domain in dict.fromkeys(domain for part in parts for domain in part.get("domains") or ()):
            known = [part for part in parts if domain in part["domains"]]
            seeds = [part["domains"][domain] for part in known]
            yield OnDomain(method, where, domain, [part["temperature"] for part in known], seeds)


def _row(one: OnDomain) -> list[Cell]:
    images = one.seeds[0]["n"]
    return [
        Cell(one.method),
        Cell(one.where),
        Cell(one.domain),
        Cell(one.role),
        Cell(str(images), images),
        mean_cell(one.temperatures, ".2f"),
        *(mean_cell((_percent(seed[key]) for seed in one.seeds), ".1f") for key in ("ece", "ece_scaled")),
        *(mean_cell((seed[key] for seed in one.seeds), ".3f") for key in ("nll", "nll_scaled")),
    ]


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _before_and_after(found: Sequence[OnDomain], method: str, role: str) -> tuple[float, float] | None:
    """The method's ECE in % before and after scaling, the mean over domains of this role; None if it is not known."""
    own = [one for one in found if (one.method, one.role) == (method, role)]
    before, after = (mean(_percent(one.mean(key)) for one in own) for key in ("ece", "ece_scaled"))
    return None if before is None or after is None else (before, after)


def _found(found: Sequence[OnDomain]) -> Iterator[str]:
    methods = dict.fromkeys(one.method for one in found)
    known = [pair for method in methods if (pair := _before_and_after(found, method, "test")) is not None]
    if known:
        lower = sum(after < before for before, after in known)
        yield f"here it lowers the ECE on held-out domains for {lower} of {plural(len(known), 'method')}"


def _errors(run: Run, found: Sequence[OnDomain]) -> Figure | None:
    """ECE before and after: the mean over held-out domains and over validation parts, per method."""
    looks, rows = method_styles(run), []
    for method in dict.fromkeys(one.method for one in found):
        pairs = ((role, _before_and_after(found, method, role)) for role in ("test", "validation"))
        if means := {role: pair for role, pair in pairs if pair is not None}:
            rows.append(Dumbbell(method, looks[method].colour, means))
    if not rows:
        return None
    known = [f"{row.method} {_arrow(*row.means['test'])}" for row in rows if "test" in row.means]
    alt = f"ECE in % on held-out domains before → after temperature scaling: {listed(known)}."
    caption = "ECE before (hollow) and after (filled) temperature scaling, mean over domains and seeds."
    return Figure("calibration-ece", dumbbells("calibration-ece", rows), alt, caption)


def _reliability(run: Run, number: int, found: Sequence[OnDomain]) -> Figure:
    """Accuracy against confidence of all methods on one held-out domain, before and after."""
    looks, domain = method_styles(run), found[0].domain
    lines = [(one.method, looks[one.method], one.bins("reliability"), one.bins("reliability_scaled")) for one in found]
    known = [f"{one.method} {_arrow(_percent(one.mean('ece')), _percent(one.mean('ece_scaled')))}" for one in found]
    alt = f"Reliability on {domain}, before and after temperature scaling; ECE in %: {listed(known)}."
    caption = f"{domain}, never seen in training. On the dotted line confidence is right; below it, it is too high."
    name = f"calibration-{number}"
    return Figure(name, reliability(name, lines), alt, caption)


def _arrow(before: float | None, after: float | None) -> str:
    return " → ".join(EMPTY if value is None else f"{value:.1f}" for value in (before, after))
