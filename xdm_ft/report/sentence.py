"""The finding of a run as one sentence in plain words. It never claims more than the verdicts of the summary."""

from __future__ import annotations

import dataclasses
from collections import Counter
from functools import partial

from xdm_ft.evaluation.intervals import LEVELS, gain_words, new_site_of, one_more_domain, rank_words, values_by_set
from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER
from xdm_ft.evaluation.records import Runs, SummaryRow
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
        statuses = Counter(entry["status"] for entry in run.results["runs"])
        return f"No model has been trained: {_counts(statuses)}." if statuses else "No model has been trained yet."
    if run.rule == ORACLE:
        return (
            "Labels of the held-out domains selected every number here (oracle), so none of them says what to expect "
            "on new data."
        )
    if run.choice is None:
        return (
            "There is no number to expect on new data: no method has both a selection value and a test result for "
            "every one of its models."
        )
    rows = [row for row in run.rows if row.selection == run.rule]
    chosen = next(row for row in rows if row.method == run.chosen)
    missing = [printable(row.method) for row in rows if row.method not in run.choice.values]
    more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
    left_out = f"; not counted, for lack of results: {', '.join(missing[:NAMED])}{more}" if missing else ""
    return f"{_expected(run, chosen)}{_versus(run, chosen)}{_between_encoders(run, chosen)}{left_out}."


def _expected(run: Run, chosen: SummaryRow) -> str:
    """Where a new site ranks among the held-out ones, the number, where it holds, and who chose the method."""
    assert chosen.mean is not None and run.choice is not None, "`selection_values` leaves out methods without a mean"
    held_out, metric = tuple(run.held_out_sets), run.metric
    value = f"{with_unit(metric, chosen.mean)} {metric_words(metric)}"
    who = printable(chosen.method) + (", chosen on validation images" if len(run.choice.values) > 1 else "")
    if run.results.get("tested_on", UNSEEN) != UNSEEN:
        return f"On its test images, which are of {printable(run.results['tested_on'])}, expect {value} with {who}"
    picked = picked_trials(run.records, run.rule, metric)
    records = tuple(record for record in picked if record.method == chosen.method)
    runs = Runs(chosen.method, run.rule, metric, held_out, records)
    means = [float(values.mean()) for values in values_by_set(runs).values()]
    ranks = rank_words(metric, held_out, means, partial(with_unit, metric)).capitalize()
    if len(held_out) == 1:
        domains = ", ".join(printable(name) for name in held_out[0])
        return f"{ranks}; on {domains}, never trained on, expect {value} with {who}"

    details = []
    if (site := new_site_of(runs)) is not None:  # enough domains were held out to know prediction intervals
        ends = [site.between(metric, level) for level in LEVELS]
        texts = [f"{low:.2f} to {high:.2f}" for low, high in ends]
        if metric in IN_PERCENT:
            texts = [f"{100 * low:.0f} to {100 * high:.0f}%" for low, high in ends]
        shown = ", ".join(f"{text} at {level:.0%}" for text, level in zip(texts, LEVELS, strict=True))
        details.append(f"one new site alone: {shown}")
    gain = one_more_domain(runs, run.results.get("data", {}).get("images", ()))
    if gain is not None:
        details.append(gain_words(metric, gain))
    return f"{ranks}; on average expect {value} with {who}" + (f" ({'; '.join(details)})" if details else "")


def _versus(run: Run, chosen: SummaryRow) -> str:
    """How the chosen method, and the others, compare with their references; empty if nothing was compared."""
    assert run.choice is not None
    compared = [row for row in beside_rows(run.results, run.rule).values() if row.first in run.choice.values]
    own = next((row for row in compared if row.first == chosen.method), None)
    if own is None:  # others were compared with it
        others = [row for row in compared if row.second == chosen.method]
        if len(others) > 1:
            return f"; of {len(others)} other methods compared with it: {_counts(Counter(map(_verdict, others)))}"
        return f"; {printable(others[0].first)} is {_difference(run, others[0])}" if others else ""
    encoder = split_row(chosen.method, run.results)[1]
    others = [row for row in compared if row is not own and split_row(row.first, run.results)[1] == encoder]
    text, verdicts = f"; it is {_difference(run, own)}", Counter(map(_verdict, others))
    if not others or {*verdicts} == {_verdict(own)} == {_verdict_words(NO_VERDICT)}:
        return text
    the_others = "the other method" if len(others) == 1 else f"the {len(others)} other methods"
    if {*verdicts} == {_verdict(own)}:
        return f"{text}, like {the_others}"
    if len(others) == 1:
        return f"{text}; {printable(others[0].first)} is {_difference(run, others[0])}"
    return f"{text}; of {the_others}: {_counts(verdicts)}"


def _between_encoders(run: Run, chosen: SummaryRow) -> str:
    """How the encoder of the chosen method compares with the others under that method; empty for one encoder."""
    method, encoder = split_row(chosen.method, run.results)
    pairs = [row for row in further(run.results, run.rule) if between_encoders(row, run.results)]
    rows = [row for row in pairs if row.first == chosen.method]
    rows += [row.turned() for row in pairs if row.second == chosen.method]
    if not rows or encoder is None:
        return ""
    start = f"; under {printable(method)}, {printable(encoder)}"
    if len(rows) > NAMED:
        return f"{start} was compared with {len(rows)} other encoders: {_counts(Counter(map(_verdict, rows)))}"
    named = [dataclasses.replace(row, second=split_row(row.second, run.results)[1] or row.second) for row in rows]
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


def _counts(tally: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in tally.items())
