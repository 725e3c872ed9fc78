"""The finding of a run as one sentence in plain words. It never claims more than the verdicts of the summary."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial

from xdm_ft.evaluation.intervals import (
    LEVELS,
    Bounds,
    gain_words,
    new_site_of,
    one_more_domain,
    rank_words,
    values_by_set,
)
from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER
from xdm_ft.evaluation.records import Held, Runs, SummaryRow
from xdm_ft.evaluation.trials import picked_trials
from xdm_ft.evaluation.verdicts import EQUAL, NO_VERDICT, UNKNOWN, Comparison
from xdm_ft.report.comparisons import beside_rows, between_encoders, further
from xdm_ft.report.finished import ORACLE, Run, split_row
from xdm_ft.report.words import IN_PERCENT, metric_words, scaled, with_unit
from xdm_ft.runtime.errors import printable

UNSEEN = "domains never trained on"  # `tested_on` of a run whose test domains train no model
NAMED = 3  # methods, or encoders, at most, that the sentence names


def sentence(run: Run) -> str:
    """Returns what to expect on new data of the method that validation prefers, and how it compares with ERM.

    It is one line of plain text, with escapes for control characters in names. `choose_method` says which method; test
    results choose nothing. The number is its mean over the held-out domains.
    """
    if not run.records:
        tried = Counter(entry["status"] for entry in run.results["runs"])
        return f"No model has been trained: {_counts(tried)}." if tried else "No model has been trained yet."
    if run.rule == ORACLE:
        return (
            "Labels of the held-out domains selected every number here (oracle), so none of them says what to expect "
            "on new data."
        )
    rows = [row for row in run.rows if row.selection == run.rule]
    if run.choice is None:
        return (
            "There is no number to expect on new data: no method has both a selection value and a test result for "
            "every one of its models."
        )
    values = run.choice.values
    chosen = next(row for row in rows if row.method == run.chosen)
    compared = [row for row in beside_rows(run.results, run.rule).values() if row.first in values]
    expected, versus = _expected(run, chosen, len(values)), _versus(run, chosen, compared)
    return expected + versus + _between_encoders(run, chosen) + _left_out(rows, values.keys()) + "."


def _expected(run: Run, chosen: SummaryRow, methods: int) -> str:
    """Where a new site ranks among the held-out ones, the number, where it holds, and who chose the method."""
    held_out, metric = _held_out(run), run.metric
    assert chosen.mean is not None, "`selection_values` leaves out methods without an estimate"
    value = f"{with_unit(metric, chosen.mean)} {metric_words(metric)}"
    who = printable(chosen.method) + (", chosen on validation images" if methods > 1 else "")
    if run.results.get("tested_on", UNSEEN) != UNSEEN:
        return f"On its test images, which are of {printable(run.results['tested_on'])}, expect {value} with {who}"
    own = [one for one in picked_trials(run.records, run.rule, metric) if one.method == chosen.method]
    runs = Runs(chosen.method, run.rule, metric, held_out, tuple(own))
    means = [float(values.mean()) for values in values_by_set(runs).values()]
    ranks = rank_words(metric, held_out, means, partial(with_unit, metric)).capitalize()
    if len(held_out) == 1:
        domains = ", ".join(printable(name) for name in held_out[0])
        return f"{ranks}; on {domains}, never trained on, expect {value} with {who}"
    gain = one_more_domain(runs, run.results.get("data", {}).get("images", ()))
    details = [*_interval(runs), *([] if gain is None else [gain_words(metric, gain)])]
    return f"{ranks}; on average expect {value} with {who}" + (f" ({'; '.join(details)})" if details else "")


def _interval(runs: Runs) -> list[str]:
    """The prediction intervals of one new site; empty if too few domains were held out to know them."""
    site = new_site_of(runs)
    if site is None:
        return []
    ends = (f"{_between(runs.metric, site.between(runs.metric, level))} at {level:.0%}" for level in LEVELS)
    return [f"one new site alone: {', '.join(ends)}"]


def _versus(run: Run, chosen: SummaryRow, compared: Sequence[Comparison]) -> str:
    """How the chosen method, and the others, compare with their references; empty if nothing was compared."""
    own = next((row for row in compared if row.first == chosen.method), None)
    others = [row for row in compared if row is not own and _belongs(run, row, chosen, own)]
    tally = Counter(_verdict(row) for row in others)
    if own is None:
        if len(others) > 1:
            return f"; of {len(others)} other methods compared with it: {_counts(tally)}"
        return f"; {printable(others[0].first)} is {_difference(run, others[0])}" if others else ""
    text = f"; it is {_difference(run, own)}"
    if not others or {_verdict(row) for row in others} == {_verdict(own)} == {_verdict_words(NO_VERDICT)}:
        return text
    the_others = "the other method" if len(others) == 1 else f"the {len(others)} other methods"
    if {*tally} == {_verdict(own)}:
        return f"{text}, like {the_others}"
    if len(others) == 1:
        return f"{text}; {printable(others[0].first)} is {_difference(run, others[0])}"
    return f"{text}; of {the_others}: {_counts(tally)}"


def _belongs(run: Run, row: Comparison, chosen: SummaryRow, own: Comparison | None) -> bool:
    """Whether a sentence on the chosen method may count the row: it was compared with it, or under its encoder."""
    if own is None:
        return row.second == chosen.method
    return split_row(row.first, run.results)[1] == split_row(chosen.method, run.results)[1]


def _between_encoders(run: Run, chosen: SummaryRow) -> str:
    """How the encoder of the chosen method compares with the others under that method; empty for one encoder."""
    method, own = split_row(chosen.method, run.results)
    pairs = [row for row in further(run.results, run.rule) if between_encoders(row, run.results)]
    seen = [row for row in pairs if row.first == chosen.method]
    seen += [row.turned() for row in pairs if row.second == chosen.method]
    if not seen or own is None:
        return ""
    start = f"; under {printable(method)}, {printable(own)}"
    if len(seen) > NAMED:
        return f"{start} was compared with {len(seen)} other encoders: {_counts(Counter(map(_verdict, seen)))}"
    named = [dataclasses.replace(row, second=split_row(row.second, run.results)[1] or row.second) for row in seen]
    return f"{start} is " + ", and ".join(_difference(run, row) for row in named)


def _difference(run: Run, row: Comparison) -> str:
    """A difference in points, what it is against, and its verdicts, with the reason if there is none."""
    over = "over" if HIGHER_IS_BETTER[run.metric] and row.difference > 0 else "against"
    lower = "" if HIGHER_IS_BETTER[run.metric] else " (lower is better)"
    return f"{scaled(row.difference, run.metric, signed=True)} {over} {printable(row.second)}{lower}, {_words(row)}"


def _words(row: Comparison) -> str:
    """Both verdicts: "better here" is on these domains, "elsewhere" on new ones."""
    if row.here == NO_VERDICT:
        reasons = [note.partition(": ")[2] for note in row.note.split("; ") if note.startswith(f"{NO_VERDICT}: ")]
        return f"{NO_VERDICT} ({reasons[0]})" if reasons else NO_VERDICT
    if row.sets == 1 or not row.is_found:
        return f"{row.here} {row.where}" if row.sets == 1 else f"{row.here} here"
    return f"{row.here} here and elsewhere" if row.elsewhere == row.here else f"{row.here} here, {UNKNOWN} elsewhere"


def _verdict(row: Comparison) -> str:
    return _verdict_words(row.here) if row.sets == 1 or not row.is_found else _words(row).replace(",", " and")


def _verdict_words(here: str) -> str:
    return {NO_VERDICT: "without a verdict", EQUAL: f"with {EQUAL}"}.get(here, here)


def _left_out(rows: Sequence[SummaryRow], known: Collection[str]) -> str:
    """Names the methods that could not be chosen, because models of theirs are missing."""
    missing = [printable(row.method) for row in rows if row.method not in known]
    if not missing:
        return ""
    more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
    return f"; not counted, for lack of results: {', '.join(missing[:NAMED])}{more}"


def _held_out(run: Run) -> tuple[Held, ...]:
    return tuple(dict.fromkeys(record.test_domains for record in run.records))


def _counts(tally: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in tally.items())


def _between(metric: str, ends: Bounds) -> str:
    if metric in IN_PERCENT:
        return f"{100 * ends[0]:.0f} to {100 * ends[1]:.0f}%"
    return f"{ends[0]:.2f} to {ends[1]:.2f}"
