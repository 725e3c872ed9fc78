"""Which method and which held-out domains have figures of their own: a page has room for some."""

from __future__ import annotations

from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER
from xdm_ft.evaluation.records import Held
from xdm_ft.report.finished import Run
from xdm_ft.report.page import numbers

SETS = 12  # held-out sets, at most


def shown_method(run: Run) -> str | None:
    """The method that the selection rule chose; without one (oracle, no selection values) the first of the recipe."""
    drawn = [row.method for row in run.own_rows if any(key[0] == row.method for key in run.pools.of)]
    return run.chosen if run.chosen in drawn else next(iter(drawn), None)


def shown_sets(run: Run, method: str | None) -> list[Held]:
    """The held-out sets that are drawn, in the run's order: all, or those where the method does worst."""
    known = [
        held for held in numbers.held_out_sets(run) if (pool := run.pools.of.get((method or "", held))) and pool.read
    ]
    if len(known) <= SETS:
        return known
    models, sign = numbers.own_models(run), 1 if HIGHER_IS_BETTER[run.metric] else -1

    def value(held: Held) -> float:
        found = models.headline(method or "", held).mean
        return float("inf") if found is None else sign * found

    worst = sorted(known, key=value)[:SETS]
    return [held for held in known if held in worst]


def which_sets(run: Run, sets: list[Held]) -> str:
    """A sentence if some sets are not drawn, else nothing."""
    every = len(numbers.held_out_sets(run))
    return f" Of {every} held-out sets, the {len(sets)} with the worst results are drawn." if len(sets) < every else ""
