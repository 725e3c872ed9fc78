"""The comparisons of a run as reports show them: beside a row, in sections of their own, and what they could find."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from xdm_ft.core import ALPHA, DomainSet, set_name
from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER, IN_PERCENT
from xdm_ft.report import MAX_UNFOLDED_ROWS, Cell, Section, Table, cells, make_section, words
from xdm_ft.report.charts import FULL_WIDTH, INK, SERIES, Figure, Mark, Row, SeriesStyle, points
from xdm_ft.report.words import EMPTY, axis_value, oracle_mark, p_value, scale
from xdm_ft.results import verdicts
from xdm_ft.results.run import Run
from xdm_ft.results.table import BETTER, NO_VERDICT, WORSE, Comparison
from xdm_ft.results.verdicts import Family
from xdm_ft.runtime.errors import join_names, plural, printable

NAMED = 3  # held-out sets, methods or encoders, at most, that a sentence names
HERE = "95% here (unadjusted)", "p here (Holm)", "here"
ELSEWHERE = "95% elsewhere (unadjusted)", "p elsewhere (Holm)", "elsewhere"


def further(run: Run, rule: str) -> list[Comparison]:
    """Returns the comparisons that are not shown beside a row, such as those between encoders."""
    beside = run.beside_rows(rule)
    return [row for row in run.comparisons_of(rule) if beside.get(row.first) != row]


def between_encoders(row: Comparison, run: Run) -> bool:
    """Returns whether both sides are one method under two encoders."""
    first, second = run.recipe.item(row.first), run.recipe.item(row.second)
    return first.own_label == second.own_label and first.encoder_label != second.encoder_label


def here_words(row: Comparison, metric: str) -> str:
    """Returns the verdict on these domains as a cell."""
    verdict = f"{row.here} {row.where}" if row.is_found and row.sets == 1 else row.here
    if row.equal_within is None:
        return verdict
    points = round(100 * row.equal_within, 6)  # 100 · 0.07 is 7.000000000000001
    margin = f"{points:g} point{'' if points == 1 else 's'}" if metric in IN_PERCENT else f"{row.equal_within:g}"
    return f"{verdict}, equal within {margin}"


def versus_columns(
    rows: Sequence[Comparison | None], names: Sequence[str | None], metric: str, word: str = "versus"
) -> dict[str, list[str]]:
    """Returns {head: a cell per row} of the differences to `names`; None: a row is compared with nothing.

    The head names what all are compared with; if rows differ in that, a second column names it.
    """
    differences = [EMPTY if row is None else scale(row.difference, metric, signed=True) for row in rows]
    distinct = {name for name in names if name is not None}
    if len(distinct) == 1:
        return {f"{word} {distinct.pop()}": differences}
    return {"difference": differences, word: [name or EMPTY for name in names]}


def reference_name(row: Comparison | None, run: Run) -> str | None:
    """Returns what a row is compared with, without the encoder, which is the row's own."""
    return None if row is None else run.recipe.item(row.second).own_label


def verdict_cells(rows: Sequence[Comparison | None], metric: str) -> tuple[tuple[str, ...], list[list[Cell]]]:
    """Returns the header and, for each row, the cells of intervals, p and verdicts; here alone if all have one set."""
    header = HERE + ELSEWHERE if any(row and row.sets > 1 for row in rows) else HERE

    def line(row: Comparison | None) -> list[Cell]:
        if row is None:
            return [Cell(EMPTY)] * len(header)
        made = []
        here = row.on_these, row.p_here, here_words(row, metric)
        for estimate, p, verdict in (here, (row.on_others, row.p_elsewhere, row.elsewhere)):
            ends = estimate and estimate.interval()
            holm = None if p is None else p.holm
            interval = Cell(words.between(metric, ends, signed=True), ends.low) if ends else Cell("not estimated")
            made += [interval, Cell(p_value(holm), holm), Cell(verdict)]
        return made[: len(header)]

    return header, list(map(line, rows))


def from_zero_shot_words(run: Run, method: str, versus: Mapping[tuple[str, DomainSet], Comparison]) -> str:
    """Returns on which held-out sets fine-tuning helps and harms, by the verdicts of `Run.from_zero_shot`.

    Where none is clear, it says so, with the differences; "" if there is no verdict on the method.
    """
    rows = {held: row for (of, held), row in versus.items() if of == method}
    if all(row.here == NO_VERDICT for row in rows.values()):
        return ""
    clear = {
        verb: [printable(set_name(held)) for held, row in rows.items() if row.here == word]
        for verb, word in (("helps", BETTER), ("harms", WORSE))
    }
    if any(clear.values()):
        parts = [f"{verb} on {join_names(names, NAMED)}" for verb, names in clear.items() if names]
        others = len(rows) - sum(map(len, clear.values()))
        return f"fine-tuning {', but '.join(parts)}" + (f"; not clear on {others} more" if others else "")
    selection, zero_shot = next((row.selection, row.second) for row in rows.values())
    mean = [of for row in run.comparisons_of(selection) for of in (row, row.swapped()) if row.is_found]
    verdict = next((row.here for row in mean if (row.first, row.second) == (method, zero_shot)), "")
    differences = [
        f"{printable(set_name(h))} {scale(row.difference, run.metric, signed=True)}" for h, row in rows.items()
    ]
    told = f"{verdict} than zero-shot on the mean, clearly on no single domain"
    told = told if verdict else "not clearly better than zero-shot"
    return f"fine-tuning is {told} ({join_names(differences, NAMED)})"


def from_zero_shot_table(run: Run, versus: Mapping[tuple[str, DomainSet], Comparison]) -> Table:
    rows = [replace(row, second=set_name(held)) for (_, held), row in versus.items()]
    each = "Each verdict is on one domain alone, corrected for all of them (Holm)."
    caption = f"The picked points less zero-shot, in {words.unit_of_difference(run.metric)}. {each}"
    return comparison_table(caption, run.metric, rows, rows[0].selection, ("method", "held out"))


# ------------------------------------------------------------------------------------------------------------ sections

MAX_WIDTH = 3.0
"""An interval over few domains can be so wide that nothing else is seen: the axis ends at this many times the largest
of the other numbers."""
SIDES = "method", "versus"
LOOKS = {
    "elsewhere": SeriesStyle(SERIES[1]),
    "here": SeriesStyle(SERIES[0], width=3.2),
    "difference": SeriesStyle(INK, "D"),
}


def differences(run: Run, rule: str) -> Section | None:
    """The differences of the rows to what they are compared with: a forest plot and its numbers."""
    beside = run.beside_rows(rule)
    shown = {method: beside[method] for method in run.drawn_methods if method in beside}
    if not shown:
        return None
    names = {method: reference_name(row, run) for method, row in shown.items()}
    reference = "the reference" if len({*names.values()}) > 1 else next(iter(names.values()))
    notes = words.each_once(
        (method, row.note and f"versus {names[method]}: {row.note}") for method, row in shown.items()
    )
    notes += power_lines(run, rule)
    return _section("differences", run, rule, shown, notes, f"Differences to {reference}", reference)


def encoders_compared(run: Run, rule: str) -> Section | None:
    """The comparisons between encoders under one method; None if there are none."""
    return _others("encoders-compared", run, rule, True)


def further_comparisons(run: Run, rule: str) -> Section | None:
    """The other comparisons; None if there are none."""
    return _others("further", run, rule, False)


def _others(id_: str, run: Run, rule: str, of_encoders: bool) -> Section | None:
    rows = [row for row in further(run, rule) if between_encoders(row, run) == of_encoders]
    seconds = [(of_encoders and run.recipe.item(row.second).encoder_label) or row.second for row in rows]
    shown = {f"{row.first} − {second}": row for row, second in zip(rows, seconds, strict=True)}
    notes = words.each_once((label, row.note) for label, row in shown.items())
    return _section(id_, run, rule, shown, notes, "First − second,") if shown else None


def _section(
    id_: str,
    run: Run,
    rule: str,
    shown: Mapping[str, Comparison],
    notes: list[str],
    caption: str,
    reference: str | None = None,
) -> Section:
    """Returns a forest plot of the comparisons and their numbers. `reference`: what all are compared with."""
    title, sides = (f"difference to {reference}", SIDES) if reference else ("difference", ("first", "second"))
    caption = f"{caption} in {words.unit_of_difference(run.metric)}."
    return make_section(
        id_,
        [_forest(id_, title, run.metric, shown)],
        [comparison_table(caption, run.metric, shown.values(), rule, sides)],
        notes,
        reference=reference,
        metric=words.metric_words(run.metric),
        side="Right" if HIGHER_IS_BETTER[run.metric] else "Left",
    )


def comparison_table(caption: str, metric: str, rows: Iterable[Comparison], rule: str, sides: tuple[str, str]) -> Table:
    rows = list(rows)
    header, tested = verdict_cells(rows, metric)
    lines = []
    for row, line in zip(rows, tested, strict=True):
        difference = Cell(scale(row.difference, metric, signed=True), row.difference)
        lines.append(cells(row.first, row.second, difference, *line))
    titles = [f"{sides[0]}{oracle_mark(rule)}", sides[1], "difference", *header]
    return Table(caption, titles, lines, labels=2, folded=len(lines) > MAX_UNFOLDED_ROWS)


def _forest(name: str, what: str, metric: str, shown: Mapping[str, Comparison]) -> Figure:
    """Returns the plot of differences, a row per label; `what` they are stands below the axis."""
    rows, narrow, wide = [], list[float](), list[float]()
    for label, row in shown.items():
        here = [axis_value(metric, end) for end in row.on_these.interval()] if row.on_these else None
        elsewhere = [axis_value(metric, end) for end in row.on_others.interval()] if row.on_others else None
        difference = axis_value(metric, row.difference)
        narrow += [difference, *(here or ())]
        wide += elsewhere or ()
        marks = Mark("elsewhere", None, elsewhere, 0.22), Mark("here", None, here), Mark("difference", difference)
        rows.append(Row(label, marks, right=row.here))

    # the ends of the axis, around 0 and every difference
    largest = max(map(abs, narrow))
    # one point on either side if all differences are 0
    limit = min(max(map(abs, [*narrow, *wide])), MAX_WIDTH * largest) or axis_value(metric, 0.01)
    low, high = max(min(0.0, *narrow, *wide), -limit), min(max(0.0, *narrow, *wide), limit)
    margin = 0.05 * (high - low) or limit
    has_here = any(row.on_these for row in shown.values())
    of_these = "Thick blue line: 95% interval here, with other seeds and test images. " if has_here else ""
    which = "; where the blue one is wider, rely on that" if has_here else ""
    of_elsewhere = f"Thin orange line: 95% interval elsewhere, on new domains{which}. " if wide else ""
    caption = f"Diamond: the difference. {of_these}{of_elsewhere}At the right the verdict here."
    axis, limits = f"{what} in {words.unit_of_difference(metric)}", (low - margin, high + margin)
    title = f"Forest plot of the {what}"
    return points(name, title, caption, rows, axis, LOOKS, limits=limits, zero=True, row_height=0.2, width=FULL_WIDTH)


# ------------------------------------------------------------------------------------------------ what they could find


def power_lines(run: Run, rule: str) -> list[str]:
    """Returns lines that stand below a table: the smallest difference that it finds, what limits it, and its look."""
    rows, looks, metric = run.comparisons_of(rule), run.looks, run.metric
    alpha = looks[-1].alpha if looks else ALPHA
    family = Family.of(rows, alpha)
    if family is None:
        reasons = (note for row in rows for note in row.note.split("; ") if note.startswith(NO_VERDICT))
        return [f"no difference can be found; {reason}" for reason in [*reasons][:1]]
    lines = [_smallest_here(family, run)]
    if (smallest := family.elsewhere()) is not None:
        alone = family.elsewhere(1) if family.count > 1 else None
        hint = f"; if report.compare declares one comparison, {_size(alone, metric)}" if alone is not None else ""
        lines.append(
            f"on new domains, {family.sets} held-out ones show no difference below {_size(smallest, metric)}{hint}"
        )
    if alpha != ALPHA:
        spent = math.fsum(look.alpha for look in looks)
        lines.append(f"look {len(looks)} at this run, at α = {alpha:g}; {spent:g} is spent in all")

    if looks and sorted(looks[0].compare) != sorted(map(list, run.recipe.declared)):
        was = ", ".join(" − ".join(pair) for pair in looks[0].compare) or "nothing"
        lines.append(f"the recipe's report.compare was changed after the first look, which declared {was}")
    return lines


def forecast(run: Run, seeds: int, declared: int) -> list[str]:
    """Returns what a run of this plan with so many seeds will find, by the variances of an earlier one; [] if unknown.

    `declared`: number of comparisons that it declares; 0: all are in the family.
    """
    family = Family.of(run.comparisons_of(run.recipe_rule), ALPHA)
    if family is None or family.seeds is None:
        return []
    family = replace(family, count=declared or family.count)
    size, among = _size(family.detectable_here(seeds), run.metric), _among(family.count)
    return [f"{plural(seeds, 'seed')} will find {size} {among} in four of five runs"]


def _among(count: int) -> str:
    return f"among {plural(count, 'comparison')}" if count > 1 else "in one comparison"


def _size(difference: float, metric: str) -> str:
    return f"{scale(difference, metric)}{' points' if metric in IN_PERCENT else ''}"


def _smallest_here(family: Family, run: Run) -> str:
    """The smallest difference here, what limits it and what would help."""
    now, seeds, metric = family.detectable_here(), family.seeds, run.metric
    who = "test images alone" if seeds is None else plural(seeds, "seed")
    line = f"smallest difference that this table would have found: {_size(now, metric)} (in four of five runs, {who}, "
    line += f"{plural(family.count, 'comparison')})"
    if (changed := family.detectable_if_pairing_changed) is not None:
        other = "not paired" if family.rows[0].paired else "paired"
        line += f", {_size(changed, metric)} if {other} by seed; from 10 common seeds on rows are paired"
    if seeds is None:
        return f"{line}; more test images would help"
    more = verdicts.more_seeds(seeds)
    then = family.detectable_here(more)
    if family.images_limit and then > 0.9 * now:  # so little gain is none
        return f"{line}; the test images, or their groups, limit it: more seeds would not help"
    seconds = (more - seeds) * _wall_seconds(run) / max(len({record.seed for record in run.every}), 1)
    duration = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
    cost = f" ({duration} more training)" if seconds else ""
    limit = "the test images, or their groups, limit it most" if family.images_limit else "the seeds limit it"
    return f"{line}; {limit}; {more} seeds: {_size(then, metric)}{cost}"


def _wall_seconds(run: Run) -> float:
    """Returns the time of all trainings. Frozen heads are trained side by side, on a CPU by `threads`."""
    of = run.results["environment"]
    workers = of["processes"] * (of["threads"] if of["device"] == "cpu" else 1)
    frozen, alone = list[tuple[str, float]](), 0.0
    for record in run.every:
        seconds = record.train_seconds or 0.0
        if record.trainable is False:
            frozen.append((record.method, seconds))
        else:
            alone += seconds
    pieces = len(set(frozen))  # heads that train together have equal seconds
    return alone + math.fsum(seconds for _, seconds in frozen) / max(1, min(workers, pieces))
