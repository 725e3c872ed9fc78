"""Numbers of the page as text, and the intervals of a summary's rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from xdm_ft.evaluation.records import Held, SummaryRow, set_name
from xdm_ft.evaluation.verdicts import Interval
from xdm_ft.report.finished import Run
from xdm_ft.report.measures import Measure, Picked
from xdm_ft.report.pooled import interval
from xdm_ft.report.table_rows import IN_PERCENT, each_once, in_unit, metric_words, scaled

ECE = Measure("ece", "ece")


def axis_label(metric: str, what: str = "test") -> str:
    return f"{what} {in_unit(metric)}"


def axis_value(metric: str, value: float) -> float:
    """The value in the unit of `axis_label`."""
    return 100 * value if metric in IN_PERCENT else value


def between(metric: str, interval: Sequence[float], signed: bool = False) -> str:
    return f"{scaled(interval[0], metric, signed)} to {scaled(interval[1], metric, signed)}"


def held_out_sets(run: Run) -> list[Held]:
    """The sets of domains that were held out together, in the order of the run."""
    return list(dict.fromkeys(record.test_domains for record in run.records))


def mean_interval(run: Run, row: SummaryRow) -> Interval | None:
    """The 95% interval over seeds and test images of a row's mean; None if it is not known.

    It needs every seed in every held-out domain, and predictions, which rules other than the recipe's own lack.
    """
    if row.selection != run.own_rule or row.mean is None or row.reason is not None:
        return None
    pools = [run.pools.of[row.method, held] for held in held_out_sets(run) if (row.method, held) in run.pools.of]
    return interval(pools, run.metric)


def domain_interval(run: Run, method: str, domain: str) -> Interval | None:
    """As `mean_interval`, of a method on one column of the summary; None for one of several domains tested together."""
    held = next((held for held in held_out_sets(run) if set_name(held) == domain), None)
    if held is None or (method, held) not in run.pools.of:
        return None
    return interval([run.pools.of[method, held]], run.metric)


def own_models(run: Run) -> Picked:
    """The models that the recipe's own rule picked."""
    return Picked(run, run.own_rule)


def points(metric: str) -> str:
    """The unit of a difference."""
    return "percentage points" if metric in IN_PERCENT else metric_words(metric)


def noted(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Each note once, behind the methods that have it. `pairs` are (method, note); an empty note is none."""
    return [f"{methods}: {note}" for methods, note in each_once(pairs)]
