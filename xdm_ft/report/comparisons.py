"""The comparisons of a run as reports show them: beside a row, or in a table of their own, and what they could find."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from scipy.special import stdtrit

from xdm_ft.evaluation.looks import Look
from xdm_ft.evaluation.records import split_label, with_encoder
from xdm_ft.evaluation.verdicts import (
    ALPHA,
    BETTER,
    EQUAL,
    NO_VERDICT,
    UNKNOWN,
    WORSE,
    Comparison,
    Family,
    PValue,
    more_seeds,
)
from xdm_ft.report.finished import items, several_encoders, split_row
from xdm_ft.report.section import Cell
from xdm_ft.report.words import EMPTY, IN_PERCENT, between, p_value, scaled
from xdm_ft.runtime.errors import plural

HERE = "95% here (unadjusted)", "p here (Holm)", "here"
ELSEWHERE = "95% elsewhere (unadjusted)", "p elsewhere (Holm)", "elsewhere"
Results = Mapping[str, Any]
LITTLE = 0.9  # more seeds that leave so much of the smallest difference are no use


def all_comparisons(results: Results) -> list[Comparison]:
    """Returns the comparisons under all selection rules; those of an earlier version as far as it kept them."""
    if "comparisons" in results:
        return [Comparison.from_json(entry) for entry in results["comparisons"]]
    rows = [
        _earlier(results, row["selection"], row["method"], _earlier_reference(row, results), row["versus_erm"])
        for row in results["summary"]
        if row["versus_erm"]
    ]
    pairs = []
    for pair in results.get("encoder_pairs", ()):
        first, second = (with_encoder(pair["method"], pair[side]) for side in ("first", "second"))
        pairs.append(_earlier(results, pair["selection"], first, second, pair))
    return [*rows, *pairs]


def comparisons_of(results: Results, rule: str) -> list[Comparison]:
    """Returns the comparisons under a selection rule."""
    return [row for row in all_comparisons(results) if row.selection == rule]


def beside_rows(results: Results, rule: str) -> dict[str, Comparison]:
    """Returns {label of a row: the comparison that is shown beside it}: its first one under its own encoder."""
    shown = dict[str, Comparison]()
    for row in comparisons_of(results, rule):
        if split_row(row.first, results)[1] == split_row(row.second, results)[1]:
            shown.setdefault(row.first, row)
    return shown


def further(results: Results, rule: str) -> list[Comparison]:
    """Returns the comparisons that are not shown beside a row, such as those between encoders."""
    beside = beside_rows(results, rule)
    return [row for row in comparisons_of(results, rule) if beside.get(row.first) != row]


def between_encoders(row: Comparison, results: Results) -> bool:
    """Returns whether both sides are one method under two encoders."""
    (first, encoder), (second, other) = split_row(row.first, results), split_row(row.second, results)
    return first == second and encoder != other


def here_words(row: Comparison, metric: str) -> str:
    """Returns the verdict on these domains as a cell."""
    words = f"{row.here} {row.where}" if row.is_found and row.sets == 1 else row.here
    if row.equal_within is None:
        return words
    points = round(100 * row.equal_within, 6)
    margin = f"{points:g} point{'' if points == 1 else 's'}" if metric in IN_PERCENT else f"{row.equal_within:g}"
    return f"{words}, equal within {margin}"


def difference_text(row: Comparison | None, metric: str) -> str:
    return EMPTY if row is None else scaled(row.difference, metric, signed=True)


def reference_names(rows: Iterable[Comparison | None], results: Results) -> list[str | None]:
    """Returns what each row is compared with, without the encoder, which is the row's own; None: with nothing."""
    return [None if row is None else split_row(row.second, results)[0] for row in rows]


def header_of(rows: Iterable[Comparison | None]) -> tuple[str, ...]:
    """Returns the heads of the columns of `cells_of`."""
    return HERE + ELSEWHERE if any(row and row.sets > 1 for row in rows) else HERE


def cells_of(row: Comparison | None, metric: str, header: Sequence[str]) -> list[Cell]:
    """Returns a cell for each column of `header_of`."""
    if row is None:
        return [Cell(EMPTY)] * len(header)
    cells = []
    for estimate, p, words in (
        (row.on_these, row.p_here, here_words(row, metric)),
        (row.on_others, row.p_elsewhere, row.elsewhere),
    ):
        ends = estimate and estimate.interval()
        holm = None if p is None else p.holm
        interval = Cell(between(metric, ends, signed=True), ends.low) if ends else Cell("not estimated")
        cells += [interval, Cell(p_value(holm), holm), Cell(words)]
    return cells[: len(header)]


# ------------------------------------------------------------------------------------------------ what they could find


def what_it_finds(results: Results, rule: str, metric: str) -> list[str]:
    """Returns lines that stand below a table: the smallest difference that it finds, what limits it, and its look.

    Results of an earlier version have none: it kept no degrees of freedom.
    """
    if "comparisons" not in results:
        return []
    rows = comparisons_of(results, rule)
    looks = [Look(**entry) for entry in results.get("looks", ())]
    alpha = looks[-1].alpha if looks else ALPHA
    family = Family.of(rows, alpha)
    if family is None:
        reasons = (note for row in rows for note in row.note.split("; ") if note.startswith(NO_VERDICT))
        return [f"no difference can be found; {reason}" for reason in [*reasons][:1]]
    lines = [_smallest_here(family, metric, results)]
    if (smallest := family.elsewhere()) is not None:
        alone = family.elsewhere(1) if family.count > 1 else None
        hint = f"; declare one comparison (report.compare): {_size(alone, metric)}" if alone is not None else ""
        lines.append(
            f"with {family.sets} domains nothing below {_size(smallest, metric)} can be shown for new ones{hint}"
        )
    if alpha != ALPHA:
        spent = math.fsum(look.alpha for look in looks)
        lines.append(f"look {len(looks)} at this run, at α = {alpha:g}; {spent:g} is spent in all")

    # the pairs of `report.compare` as labels of rows, as `Recipe.declared` does
    encoders = several_encoders(results)
    methods = {method for method, encoder in (split_label(label, encoders) for label in items(results)) if encoder}
    declared: list[list[str]] = []
    for pair in results["recipe"].get("report", {}).get("compare", ()):
        under_each = [[with_encoder(method, encoder) for method in pair] for encoder in encoders]
        declared += under_each if pair[0] in methods else [list(pair)]
    if looks and sorted(looks[0].compare) != sorted(declared):
        was = ", ".join(" − ".join(pair) for pair in looks[0].compare) or "nothing"
        lines.append(f"report.compare was changed after the first look, which declared {was}")
    return lines


def forecast(results: Results, metric: str, seeds: int, declared: int) -> list[str]:
    """Returns what a run of this plan with so many seeds will find, by the variances of an earlier one; [] if unknown.

    `declared`: number of comparisons that it declares; 0: all are in the family.
    """
    rule = results["recipe"].get("protocol", {}).get("selection", "")
    family = Family.of(comparisons_of(results, rule), ALPHA)
    if family is None or family.seeds is None:
        return []
    family = replace(family, count=declared or family.count)
    size = _size(family.here(seeds), metric)
    return [f"{plural(seeds, 'seed')} will find {size} {_among(family.count)} with 80% probability"]


def _among(count: int) -> str:
    return f"among {plural(count, 'comparison')}" if count > 1 else "in one comparison"


def _size(difference: float, metric: str) -> str:
    return f"{scaled(difference, metric)}{' points' if metric in IN_PERCENT else ''}"


def _smallest_here(family: Family, metric: str, results: Results) -> str:
    """The smallest difference here, what limits it and what would help."""
    now, seeds = family.here(), family.seeds
    who = "test images alone" if seeds is None else plural(seeds, "seed")
    line = f"{who} find{'s' if seeds == 1 else ''} {_size(now, metric)} {_among(family.count)} with 80% probability"
    if family.other is not None:
        other = "not paired" if family.rows[0].paired else "paired"
        line += f" ({_size(family.other, metric)} if {other} by seed; from 10 common seeds on rows are paired)"
    if seeds is None:
        return f"{line}; more test images would help"
    more = more_seeds(seeds)
    then = family.here(more)
    if family.images_limit and then > LITTLE * now:
        return f"{line}; the test images, or their groups, are the limit: more seeds are useless"
    spent = math.fsum(run.get("train_seconds") or 0.0 for run in results["runs"])
    seconds = (more - seeds) * spent / max(len({run["seed"] for run in results["runs"]}), 1)
    duration = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
    cost = f" ({duration} of training more)" if seconds else ""
    limit = "the test images, or their groups, limit most" if family.images_limit else "the seeds are the limit"
    return f"{line}; {limit}; {more} seeds: {_size(then, metric)}{cost}"


# ------------------------------------------------------------------------------------------ results of earlier versions


def _earlier(results: Results, rule: str, first: str, second: str, versus: Mapping[str, Any]) -> Comparison:
    """Returns a comparison that an earlier version wrote. Its verdict was about new domains too, where it had several.

    Its intervals give back the errors, with the degrees of freedom that it had for domains, and a normal one for seeds
    and images.
    """
    held_out = {tuple(run["test_domains"]) for run in results["runs"]}
    word, _, where = versus["verdict"].partition(" ")
    is_found = word in (BETTER, WORSE)
    images, domains = (
        None if versus[key] is None else (versus[key]["high"] - versus[key]["low"]) / 2
        for key in ("seeds_and_images", "domains")
    )
    p = None if versus["p"] is None else PValue(versus["p"], versus["p_holm"])
    return Comparison(
        selection=rule,
        first=first,
        second=second,
        sets=len(held_out),
        domains=sum(map(len, held_out)),
        paired=True,
        difference=versus["difference"],
        error=None if images is None else images / 1.959964,  # the normal quantile that it used
        error_elsewhere=None if domains is None else domains / float(stdtrit(len(held_out) - 1, 0.975)),
        p_here=p,
        p_elsewhere=p if len(held_out) > 1 else None,
        note=versus["note"],
        here=word if is_found else NO_VERDICT if versus["verdict"] == NO_VERDICT else EQUAL,
        elsewhere=word if is_found and not where else UNKNOWN,
    )


def _earlier_reference(row: Mapping[str, Any], results: Results) -> str:
    """Returns what a row was compared with. The earliest versions named it in the note, if there were several."""
    versus = row["versus_erm"]
    if "reference" in versus:
        return str(versus["reference"])
    for note in str(versus["note"]).split("; "):
        if note.startswith("compared with "):
            return note.removeprefix("compared with ")
    for other in results["summary"]:
        is_reference = other["versus_erm"] is None and other["mean"] is not None
        is_erm = items(results).get(other["method"], {}).get("name") == "erm"
        if is_reference and is_erm and split_row(other["method"], results)[1] == split_row(row["method"], results)[1]:
            return str(other["method"])
    return "erm"
