"""The finding of a run as one sentence in plain words. It never claims more than the verdicts of the summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

from xdm_ft.errors import printable
from xdm_ft.evaluation.comparison import EQUAL, NO_VERDICT
from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER
from xdm_ft.evaluation.new_site import Bounds, new_site, seeds_by_set, within_bounds
from xdm_ft.evaluation.records import SummaryRow
from xdm_ft.evaluation.runs import Held, Runs
from xdm_ft.evaluation.trials import picked_trials
from xdm_ft.report.encoders import Against, against, pairs_of, split_row
from xdm_ft.report.finished import ORACLE, Run
from xdm_ft.report.table_rows import IN_PERCENT, metric_words, reference_of, scaled, with_unit

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
    compared = [row for row in rows if row.versus_erm is not None and row.method in values]
    expected, versus = _expected(run, chosen, len(values)), _versus(run, chosen, compared)
    return expected + versus + _between_encoders(run, chosen) + _left_out(rows, values.keys()) + "."


def _expected(run: Run, chosen: SummaryRow, methods: int) -> str:
    """The number, where it holds, and who chose the method."""
    held_out, metric = _held_out(run), run.metric
    assert chosen.mean is not None, "`selection_values` leaves out methods without an estimate"
    value = f"{with_unit(metric, chosen.mean)} {metric_words(metric)}"
    who = printable(chosen.method) + (", chosen on validation images" if methods > 1 else "")
    if run.results.get("tested_on", UNSEEN) != UNSEEN:
        return f"On its test images, which are of {printable(run.results['tested_on'])}, expect {value} with {who}"
    if len(held_out) == 1:
        domains = ", ".join(printable(name) for name in held_out[0])
        only = "it alone" if len(held_out[0]) == 1 else "these alone"
        return f"On {domains}, never trained on, expect {value} with {who} (measured on {only}; others may differ)"
    return f"On a domain never seen, expect {value} with {who}{_interval(run, chosen.method)}"


def _interval(run: Run, method: str) -> str:
    """The prediction interval of one new domain, in brackets; empty if too few domains were held out to know it."""
    held_out, metric = _held_out(run), run.metric
    own = [one for one in picked_trials(run.records, run.rule, metric) if one.method == method]
    runs = Runs(method, run.rule, metric, held_out, tuple(own))
    values = runs.values
    site = new_site([np.array([values[held, s] for s in seeds]) for held, seeds in seeds_by_set(runs).items()])
    if site is None:
        return ""
    half = site.half_width()
    low, high = within_bounds(metric, site.mean - half, site.mean + half)
    ends = _between(metric, (low, high))
    return f" (one new domain alone: {f'anything from {ends}' if (low, high) == (0, 1) else f'{ends}, at 95%'})"


def _versus(run: Run, chosen: SummaryRow, compared: Sequence[SummaryRow]) -> str:
    """How the chosen method, and the others, compare with ERM; empty if nothing was compared."""
    others = [row for row in compared if row is not chosen and _belongs(run, row, chosen)]
    tally = Counter(_verdict(row).replace(NO_VERDICT, "without a verdict") for row in others)
    if chosen.versus_erm is None:
        if len(others) > 1:
            over = f" over {sets} domains" if (sets := len(_held_out(run))) > 1 else ""
            if set(tally) == {EQUAL}:
                return f"; none of the {len(others)} other methods is distinguishable from it{over}"
            return f"; of {len(others)} other methods compared with it{over}: {_counts(tally)}"
        return f"; {_about(run, others[0], printable(others[0].method))}" if others else ""
    text, verdict = f"; {_about(run, chosen, 'it')}", _verdict(chosen)
    if not others or {_verdict(row) for row in others} == {NO_VERDICT} == {verdict}:
        return text
    the_others = "the other method" if len(others) == 1 else f"the {len(others)} other methods"
    if {_verdict(row) for row in others} == {verdict}:
        return f"{text}, like {the_others}"
    if len(others) == 1:
        return f"{text}; {printable(others[0].method)} is {next(iter(tally))}"
    return f"{text}; of {the_others}: {_counts(tally)}"


def _belongs(run: Run, row: SummaryRow, chosen: SummaryRow) -> bool:
    """Whether a sentence on the chosen method may count the row: it was compared with it, or under its encoder."""
    if chosen.versus_erm is None:
        return reference_of(row.to_json(), run.results) == chosen.method
    return split_row(row.method, run.results)[1] == split_row(chosen.method, run.results)[1]


def _about(run: Run, row: SummaryRow, name: str) -> str:
    """The difference of one method and its verdict, with the reason if there is none."""
    versus = row.versus_erm
    assert versus is not None
    seen = Against(
        reference_of(row.to_json(), run.results) or "erm", versus["difference"], versus["verdict"], versus["note"]
    )
    return f"{name} is {_difference(run, seen)}"


def _between_encoders(run: Run, chosen: SummaryRow) -> str:
    """How the encoder of the chosen method compares with the others under that method; empty for one encoder."""
    method, own = split_row(chosen.method, run.results)
    pairs = [pair for pair in pairs_of(run.results, run.rule) if pair["method"] == method]
    seen = [against(pair, own) for pair in pairs if own in (pair["first"], pair["second"])] if own else []
    if not seen:
        return ""
    start = f"; under {printable(method)}, {printable(own)}"
    if len(seen) > NAMED:
        tally = Counter(one.verdict.replace(NO_VERDICT, "without a verdict") for one in seen)
        return f"{start} was compared with {len(seen)} other encoders: {_counts(tally)}"
    return f"{start} is " + ", and ".join(_difference(run, one) for one in seen)


def _difference(run: Run, seen: Against) -> str:
    """A difference in points, what it is against, and its verdict, with the reason if there is none."""
    over = "over" if HIGHER_IS_BETTER[run.metric] and seen.difference > 0 else "against"
    lower = "" if HIGHER_IS_BETTER[run.metric] else " (lower is better)"
    notes = [note for note in seen.note.split("; ") if note.startswith(f"{NO_VERDICT}: ")]
    verdict = f"{NO_VERDICT} ({notes[0].partition(': ')[2]})" if notes else f"{seen.verdict}{_where(run, seen.verdict)}"
    return f"{scaled(seen.difference, run.metric, signed=True)} {over} {printable(seen.other)}{lower}, {verdict}"


def _where(run: Run, verdict: str) -> str:
    """Where a verdict holds. "better" and "worse" say it themselves if there is one held-out set."""
    if len(sets := _held_out(run)) > 1:
        return f" over {len(sets)} domains"
    return " there" if verdict == EQUAL else ""


def _verdict(row: SummaryRow) -> str:
    assert row.versus_erm is not None
    return str(row.versus_erm["verdict"])


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
