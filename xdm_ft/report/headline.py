"""The finding of a run in plain sentences, and the last screen: the table in short, the sentence, and what to do next.

On a terminal the last screen fits the terminal's size: domains, methods and notes that find no room are in results.md.
Output to a file or pipe has every method and domain.
"""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from xdm_ft.core import ORACLE
from xdm_ft.evaluation.intervals import LEVELS, MAX_WIDTH, gain_words, rank_words
from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER
from xdm_ft.report import comparisons, words
from xdm_ft.report.comparisons import NAMED
from xdm_ft.report.words import (
    EMPTY,
    in_unit,
    number,
    with_unit,
)
from xdm_ft.results import new_site_of, one_more_domain, values_by_set
from xdm_ft.results.run import MAX_SETS, Run
from xdm_ft.results.table import BETTER, EQUAL, NO_VERDICT, UNDECLARED, UNKNOWN, WORSE, Comparison, SummaryRow
from xdm_ft.results.trials import MethodChoice
from xdm_ft.runtime.errors import join_names, plural, printable
from xdm_ft.runtime.terminal import write
from xdm_ft.storage.run_directory import ANALYSIS, MARKDOWN, PAGE

if TYPE_CHECKING:
    from rich.text import Text

UNSEEN = "domains never trained on"  # `tested_on` of a run whose test domains train no model
SHOWN_LABELS = 20  # of the label curve


def sentence(run: Run) -> str:
    """Returns in plain sentences what to expect on new data, with which method, and its verdict.

    It is one line of plain text, with escapes for control characters in names, and never claims more than the verdicts
    of the summary. `choose_method` says which method. `details` has the rest.
    """
    if not run.records:
        statuses = Counter(entry["status"] for entry in run.results["runs"])
        return f"No model has been trained: {_list_names(statuses)}." if statuses else "No model has been trained yet."
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
    chosen = _chosen(run)
    of_encoders = _between_encoders(run, chosen)
    parts = [_expected(run, chosen), _verdict_in_short(run, chosen)]
    parts += [f"{text[0].upper()}{text[1:]}." for text in (_from_zero_shot(run, chosen), of_encoders) if text]
    return " ".join(filter(None, parts))


def details(run: Run) -> str:
    """Returns what stands below `sentence` on the page and in results.md; empty where there is nothing to expect.

    Where a new site ranks, intervals at two levels, the verdicts of all methods and encoders, and methods that do not
    count.
    """
    if not run.records or run.rule == ORACLE or run.choice is None:
        return ""
    chosen, metric = _chosen(run), run.metric
    parts = []
    if run.results["tested_on"] == UNSEEN:
        runs = run.quoted
        means = [float(values.mean()) for values in values_by_set(runs).values()]
        ranks = rank_words(metric, runs.held_out, means, partial(with_unit, metric))
        parts.append(f"{ranks[0].upper()}{ranks[1:]}")
        if (site := new_site_of(runs)) is not None:  # enough domains were held out to know prediction intervals
            texts = [_interval(metric, site.between(metric, level)) for level in LEVELS]
            shown = ", ".join(f"{text} at {level:.0%}" for text, level in zip(texts, LEVELS, strict=True))
            parts.append(f"One new site alone: {shown}")
        gain = one_more_domain(runs, run.results["data"]["images"])
        if gain is not None:
            words_of_gain = gain_words(metric, gain)
            parts.append(f"{words_of_gain[0].upper()}{words_of_gain[1:]}")
    if len(run.choice.values) > 1:
        parts.append(_who_chose(run.choice))
    parts.append(_versus(run, chosen, [*run.choice.values]))
    missing = [
        printable(row.method) for row in run.rows if row.selection == run.rule and row.method not in run.choice.values
    ]
    if missing:
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        parts.append(f"Not counted, for lack of results: {', '.join(missing[:NAMED])}{more}")
    return "".join(f"{part}. " for part in parts if part).rstrip()


def _chosen(run: Run) -> SummaryRow:
    return next(row for row in run.rows if (row.method, row.selection) == (run.chosen, run.rule))


def _who_chose(choice: MethodChoice) -> str:
    if not choice.at:
        return f"Validation images chose {printable(choice.method)}"
    counts = Counter(choice.at.values()).most_common()
    by = ", ".join(
        f"{printable(name)} by {count}{f' of {len(choice.at)}' * (not number)}"
        for number, (name, count) in enumerate(counts)
    )
    few = "; one other domain alone is thin ground for a choice" if len(choice.at) == 2 else ""
    return (
        f"{printable(choice.method)} is chosen by its results on domains held out; the quoted value is from choices "
        f"that did not see the domain ({by}){few}"
    )


def _interval(metric: str, ends: tuple[float, float]) -> str:
    if metric in words.IN_PERCENT:
        return f"{100 * ends[0]:.0f} to {100 * ends[1]:.0f}%"
    return f"{ends[0]:.2f} to {ends[1]:.2f}"


def _expected(run: Run, chosen: SummaryRow) -> str:
    """The number, the interval where one new site lies in 95 of 100 cases, and the method."""
    by_set = [float(values.mean()) for values in values_by_set(run.quoted).values()]
    assert run.choice is not None and chosen.mean is not None, "a method without a mean is not chosen"
    mean = fmean(by_set) if run.choice.at else chosen.mean
    metric, who, sets = run.metric, printable(chosen.method), run.held_out_sets
    of_metric = "" if metric == "accuracy" else f" {words.metric_words(metric)}"
    value = f"{with_unit(metric, mean)}{of_metric}"
    if run.results["tested_on"] != UNSEEN:
        return f"On test images of {printable(run.results['tested_on'])}, {who} reaches {value}."
    if len(sets) == 1:
        on, noun = join_names([printable(name) for name in sets[0]]), plural(len(sets[0]), "domain").split()[1]
        what = f"a {noun}" if len(sets[0]) == 1 else noun
        return f"On {on}, {what} that no model was trained on, {who} reaches {value}."
    site = new_site_of(run.quoted)
    if site is None:
        return f"On a new domain expect about {value}; {len(by_set)} held-out domains give no interval. Method: {who}."
    ends = site.between(metric, LEVELS[-1])
    if metric not in words.IN_PERCENT or ends[1] - ends[0] <= MAX_WIDTH:
        about = f"{100 * mean:.0f}%{of_metric}" if metric in words.IN_PERCENT else value
        guess = 0.5 if metric == "auroc" else None
        if metric == "balanced_accuracy":
            guess = _guess(run)
        guessing = "" if guess is None or guess < ends[0] else f"; guessing reaches {with_unit(metric, guess)}"
        return f"On a new domain expect about {about} ({_interval(metric, ends)}{guessing}). Method: {who}."
    reached = _interval(metric, (min(by_set), max(by_set)))
    if {*run.choice.at.values()} - {chosen.method}:
        who = "the method that the others choose"
    return (
        f"On {len(by_set)} held-out domains {who} reaches {reached}{of_metric}; they are too few, or too different, to "
        f"say what a new one will give ({_interval(metric, ends)})."
    )


def _guess(run: Run) -> float:
    """Returns the balanced accuracy of one class for all images: 1 / the classes present, a mean over held-out sets."""
    present = {domain: sum(n > 0 for n in of_classes) for domain, of_classes in run.results["data"]["images"].items()}
    return fmean(fmean(1 / present[name] for name in held) for held in values_by_set(run.quoted))


def _verdict_in_short(run: Run, chosen: SummaryRow) -> str:
    """The verdict on the chosen method, or on those that were compared with it; empty if nothing was compared."""
    assert run.choice is not None
    compared = _under_its_encoder(run, chosen, [*run.choice.values])
    own = next((row for row in compared if row.first == chosen.method), None)
    rows = [row for row in compared if row.second == (own.second if own else chosen.method)]
    if not rows and len(compared) == 1:  # the one that the recipe declares
        return f"{_arrow(run, compared[0])}: {_words(compared[0])}."
    if not rows:
        return f"Of {plural(len(compared), 'comparison')}{_counts(compared)}." if compared else ""
    none_is_better = len(rows) > 1 and all(row.here in (EQUAL, WORSE) for row in rows)
    if none_is_better and (own is None or own.here == EQUAL):
        encoder, reference = run.recipe.item(chosen.method).encoder_label, printable(rows[0].second)
        beside = sum(run.recipe.item(name).encoder_label == encoder for name in run.choice.values) - 1
        if len(rows) < beside:
            return f"None of the {len(rows)} rows compared with {reference} clearly beats it."
        return f"No method clearly beats {reference}."
    if own is not None:
        return f"{_arrow(run, own)}: {_words(own)}."
    if len(rows) == 1:
        return f"{_arrow(run, rows[0])}: {_words(rows[0])}."
    better = [printable(row.first) for row in rows if row.here == BETTER]
    if better and len(better) <= NAMED:
        return f"Better here than {printable(chosen.method)}: {', '.join(better)}."
    return f"Of {len(rows)} other methods{_counts(rows)}."


def _from_zero_shot(run: Run, chosen: SummaryRow) -> str:
    """Where fine-tuning helps and harms; empty where a verdict beside the row of the chosen method says it."""
    beside, rows = run.beside_rows(run.rule).get(chosen.method), run.from_zero_shot(run.rule)
    if beside is not None and beside.sets == 1 and beside.is_found and beside in rows.values():
        return ""
    return comparisons.from_zero_shot_words(run, chosen.method, rows)


def _arrow(run: Run, row: Comparison) -> str:
    """Both values of a comparison as the table has them, or the difference where a side has no value there."""
    values = {of.method: of.mean for of in run.rows if of.selection == run.rule}
    first, second = values.get(row.first), values.get(row.second)
    lower = "" if HIGHER_IS_BETTER[run.metric] else " (lower is better)"
    if first is None or second is None:
        signed = words.scale(row.difference, run.metric, signed=True)
        over = "over" if signed.startswith("+") else "against"
        return f"{printable(row.first)} is {signed} {over} {printable(row.second)}{lower}"
    before, after = (f"{printable(name)} {words.scale(value, run.metric)}" for name, value in (
        (row.second, second), (row.first, first)))  # fmt: skip
    return f"{before} → {after}{lower}"


def _under_its_encoder(run: Run, chosen: SummaryRow, methods: Sequence[str]) -> list[Comparison]:
    """Returns the declared comparisons beside the rows that count, under the encoder of the chosen method."""
    encoder = run.recipe.item(chosen.method).encoder_label
    beside = run.beside_rows(run.rule).values()
    declared = [row for row in beside if not row.note.startswith(UNDECLARED)]
    return [row for row in declared if row.first in methods and run.recipe.item(row.first).encoder_label == encoder]


def _versus(run: Run, chosen: SummaryRow, methods: Sequence[str]) -> str:
    """How the chosen method, and the others, compare with their references; empty if nothing was compared."""
    compared = _under_its_encoder(run, chosen, methods)
    own = next((row for row in compared if row.first == chosen.method), None)
    if own is None:  # others were compared with it
        others = [row for row in compared if row.second == chosen.method]
        if len(others) > 1:
            return f"Of {len(others)} other methods{_counts(others)}"
        return f"{printable(others[0].first)} is {_difference(run, others[0])}" if others else ""
    others = [row for row in compared if row is not own]
    text, verdicts = f"It is {_difference(run, own)}", Counter(map(_verdict, others))
    if not others or {*verdicts} == {_verdict(own)} == {"without a verdict"}:
        return text
    the_others = "the other method" if len(others) == 1 else f"the {len(others)} other methods"
    if {*verdicts} == {_verdict(own)}:
        named = {row.second for row in others} == {own.second}
        return f"{text}, like {the_others}{'' if named else _against(others)}"
    if len(others) == 1:
        return f"{text}; {printable(others[0].first)} is {_difference(run, others[0])}"
    return f"{text}; of {the_others}{_counts(others)}"


def _between_encoders(run: Run, chosen: SummaryRow) -> str:
    """How the encoder of the chosen method compares with the others under that method; empty for one encoder."""
    method, encoder = run.recipe.item(chosen.method).own_label, run.recipe.item(chosen.method).encoder_label
    further = comparisons.further(run, run.rule)
    pairs = [row for row in further if comparisons.between_encoders(row, run)]
    rows = [row for row in pairs if row.first == chosen.method]
    rows += [row.swapped() for row in pairs if row.second == chosen.method]
    if not rows or encoder is None:
        return ""
    start = f"Under {printable(method)}, {printable(encoder)}"
    if len(rows) > NAMED:
        return f"{start} was compared with {len(rows)} other encoders: {_list_names(Counter(map(_verdict, rows)))}"
    named = [dataclasses.replace(row, second=run.recipe.item(row.second).encoder_label or row.second) for row in rows]
    return f"{start} is " + ", and ".join(_difference(run, row) for row in named)


def _difference(run: Run, row: Comparison) -> str:
    """A difference in points, what it is against, and its verdicts, with the reason if there is none."""
    signed = words.scale(row.difference, run.metric, signed=True)
    over = "over" if HIGHER_IS_BETTER[run.metric] and signed.startswith("+") else "against"
    lower = "" if HIGHER_IS_BETTER[run.metric] else " (lower is better)"
    return f"{signed} {over} {printable(row.second)}{lower}, {_words(row)}"


def _words(row: Comparison) -> str:
    """Both verdicts: "better here" is on these domains, "elsewhere" on new ones."""
    if row.here == NO_VERDICT:
        reasons = [note.partition(": ")[2] for note in row.note.split("; ") if note.startswith(f"{NO_VERDICT}: ")]
        return f"{NO_VERDICT} ({reasons[0]})" if reasons else NO_VERDICT
    if row.sets == 1 or not row.is_found:
        return f"{row.here} {row.where}" if row.sets == 1 else f"{row.here} here"
    return f"{row.here} here and elsewhere" if row.elsewhere == row.here else f"{row.here} here, {UNKNOWN} elsewhere"


def _verdict(row: Comparison) -> str:
    """The verdicts of a method that is counted, not named."""
    if row.sets > 1 and row.is_found:
        return _words(row).replace(",", " and")
    return {NO_VERDICT: "without a verdict", EQUAL: f"with {EQUAL}"}.get(row.here, row.here)


def _against(rows: Sequence[Comparison]) -> str:
    """What the rows are compared with."""
    return " against " + join_names(list(dict.fromkeys(printable(row.second) for row in rows)), NAMED)


def _counts(rows: Sequence[Comparison]) -> str:
    """What the rows are compared with, and how many have which verdict."""
    return f"{_against(rows)}: {_list_names(Counter(map(_verdict, rows)))}"


def _list_names(tally: Counter[str]) -> str:
    return ", ".join(f"{count} {noun}" for noun, count in tally.items())


# ------------------------------------------------------------------------------------------------------ the last screen

UNBOUNDED = 1 << 16
GAP = 2  # spaces between columns
MIN_WIDTH = 5  # characters of a domain's column: those of a value
MAX_NAME = 24  # characters of a method's name
MAX_NOTES = 3  # on a terminal
MIN_METHODS = 3  # rows that are shown even if the terminal is lower
PROMPT = 1  # lines of the terminal that stay for the shell
STYLES = {"better": "green", "worse": "red", "failed": "red", "skipped": "yellow"}  # by the first word of a cell


class Column(NamedTuple):
    header: str
    cells: Sequence[str]
    gap: int = GAP  # spaces before it
    left: bool = False  # whether the cells are aligned left

    @property
    def width(self) -> int:
        return max(map(_length, (self.header, *self.cells)))

    def text(self, cell: str) -> str:
        fill = " " * (self.width - _length(cell))
        return " " * self.gap + (_on_terminal(cell) + fill if self.left else fill + _on_terminal(cell))


def show_headline(run: Run) -> None:
    """Prints the last screen to standard output. Colours follow rich: only on a terminal, not if NO_COLOR is set."""
    from rich.console import Console
    from rich.text import Text

    console = Console(file=sys.stdout)
    is_terminal, size = console.is_terminal, console.size
    if not is_terminal:
        console.width = UNBOUNDED  # rich assumes 80 columns there and would fold the text
    above = [Text(_on_terminal(_title(run)), style="bold")]
    smallest = comparisons.power_lines(run, run.recipe_rule)
    below = [Text(), Text(_on_terminal(sentence(run)), style="bold")]
    below += [Text(_on_terminal(f"{line[0].upper()}{line[1:]}."), style="dim") for line in smallest]
    below += [Text(_on_terminal(note), style="yellow") for note in _notes(run, MAX_NOTES if is_terminal else None)]
    below += [Text()]
    for purpose, text in _files(run):
        below.append(Text(f"{purpose:<8} ", style="dim").append(_on_terminal(text), style="not dim"))
    rows = run.recipe_rows
    if is_terminal:
        used = sum(len(console.render_lines(part, pad=False)) for part in (*above, *below)) + PROMPT
        rows = _most_important(run, size.height - used - 1)  # 1: the header
    table = _table(run, rows, size.width if is_terminal else None) if rows else []
    hidden = len(run.recipe_rows) - len(rows)
    more = [Text(f"and {hidden} more in results.md", style="dim")] if hidden else []
    # not printed by rich: `write` makes one line of a full disk, where rich would raise
    with console.capture() as captured:
        for part in (*above, *table, *more, *below):
            console.print(part)
    write(captured.get())


def _title(run: Run) -> str:
    name = run.recipe.name
    if not run.recipe_rows:
        return str(name)
    on = f" on {run.results['tested_on']}" if "tested_on" in run.results else ""
    if run.recipe_rule == ORACLE:
        return f"{name}: {in_unit(run.metric)}{on}; selection: {ORACLE} — {words.CHEATING}"
    seeds = {row.n for row in run.recipe_rows if row.stderr is not None}
    return f"{name}: {in_unit(run.metric)}{on}" + (f", ± standard error ({max(seeds)} seeds)" if seeds else "")


def _table(run: Run, rows: Sequence[SummaryRow], width: int | None) -> list[Text]:
    """The lines of the headline table, at most `width` characters long if the names of methods let it."""
    from rich.text import Text

    def cut(names: Sequence[str | None]) -> list[str]:
        """Returns the names cut to half of MAX_NAME, or to more if different names would become equal."""
        full, most = [name or EMPTY for name in names], MAX_NAME // 2
        while width is not None and len({_cut(name, most) for name in full}) < len({*full}):
            most += 1
        return full if width is None else [_cut(name, most) for name in full]

    items = [run.recipe.item(row.method) for row in rows]
    methods, encoders = [item.own_label for item in items], [item.encoder_label for item in items]
    if any(encoders):  # a column each, which share the width
        names = [Column("method", cut(methods), gap=0, left=True), Column("encoder", cut(encoders))]
    else:
        full = list(methods) if width is None else [_cut(method, MAX_NAME) for method in methods]
        names = [Column("method", full, gap=0, left=True)]

    domains = {name for row in run.recipe_rows for name in row.per_test_domain}
    several = len(domains) != 1  # the mean of one domain is that domain's
    mean = "mean" if several else cut([*domains])[0]
    means = [words.with_spread(row.to_json(), row.stderr) for row in rows]
    after = [Column(f"{mean}{words.oracle_mark(run.recipe_rule)}", means)]
    if beside := run.beside_rows(run.recipe_rule):
        compared = [beside.get(row.method) for row in rows]
        references = [comparisons.reference_name(row, run) for row in compared]
        references = [name and short for name, short in zip(references, cut(references), strict=True)]
        versus = comparisons.versus_columns(compared, references, run.metric, "vs").items()
        after += [Column(head, cells, left=i > 0) for i, (head, cells) in enumerate(versus)]
        here = [comparisons.here_words(row, run.metric) if row else EMPTY for row in compared]
        after.append(Column("here", here, left=True))
        if any(row.sets > 1 for row in beside.values()):
            after.append(Column("elsewhere", [row.elsewhere if row else EMPTY for row in compared], left=True))

    room = None if width is None else width - sum(column.gap + column.width for column in (*names, *after))
    columns = [*names, *(_domains(run, rows, room) if several else ()), *after]
    lines = [Text("".join(column.text(column.header) for column in columns).rstrip(), style="bold")]
    for i in range(len(rows)):
        line = Text()
        for column in columns:
            line.append(column.text(column.cells[i]), style=STYLES.get(column.cells[i].partition(" ")[0], ""))
        line.rstrip()
        lines.append(line)
    return lines


def _domains(run: Run, rows: Sequence[SummaryRow], room: int | None) -> list[Column]:
    """A column per held-out domain, its name cut where it must be; if they need more than `room`, the worst domain."""
    names = list(dict.fromkeys(name for row in run.recipe_rows for name in row.per_test_domain))
    means = [{name: row.per_test_domain.get(name, {}).get("mean") for name in names} for row in rows]
    full = [Column(name, [number(of_row[name], run.metric) for of_row in means]) for name in names]
    widest = max((column.width for column in full), default=0)
    cuts = ((width, gap) for width in range(widest, MIN_WIDTH - 1, -1) for gap in (GAP, 1))
    for shown in (full, *([Column(_cut(c.header, width), c.cells, gap) for c in full] for width, gap in cuts)):
        width = sum(column.gap + column.width for column in shown)
        fits = len(names) <= MAX_SETS if room is None else width <= room
        # two domains must not be cut to one name
        if fits and (shown is full or len({column.header for column in shown}) == len(names)):
            return shown

    cells, sign = [], 1 if HIGHER_IS_BETTER[run.metric] else -1
    for of_row in means:
        signed = {name: sign * mean for name, mean in of_row.items() if mean is not None}
        name = min(signed, key=lambda name: signed[name], default=None)
        cells.append(EMPTY if name is None else f"{_cut(name, 12)} {number(of_row[name], run.metric)}")
    worst = Column("worst domain", cells)
    return [worst] if room is None or worst.gap + worst.width <= room else []


def _most_important(run: Run, lines: int) -> list[SummaryRow]:
    """The rows that fit in so many lines, in the recipe's order.

    First come the method that held-out domains prefer, the references, and methods with a verdict; then the others.
    """
    if len(run.recipe_rows) <= lines:
        return run.recipe_rows
    beside = run.beside_rows(run.recipe_rule)

    def rank(row: SummaryRow) -> int:
        comparison = beside.get(row.method)
        if row.method == run.chosen:
            return 0
        has_verdict = comparison is not None and comparison.is_found
        return 1 if has_verdict or (comparison is None and row.mean is not None) else 2

    fitting = max(MIN_METHODS, lines - 1)  # one line says how many there are besides
    kept = {row.method for row in sorted(run.recipe_rows, key=rank)[:fitting]}
    return [row for row in run.recipe_rows if row.method in kept]


def _notes(run: Run, most: int | None) -> list[str]:
    """What went wrong: methods with failed, skipped or missing models, each reason once; at most `most` lines."""
    notes = words.each_once((row.method, row.reason) for row in run.recipe_rows)
    fits = run.final_fits.items()
    notes += [f"final fit of {method}: {fit['reason']}" for method, fit in fits if fit["status"] == "failed"]
    if most is not None:
        # two lines of a terminal of 80 columns
        notes = [_cut(" ".join(note.split()), 2 * 78) for note in notes]
        if len(notes) > most:
            notes = [*notes[: most - 1], f"{plural(len(notes) - most + 1, 'more note')} in results.md"]
    return notes


def _files(run: Run) -> Iterator[tuple[str, str]]:
    """Where the files are, and the next command: (what, text) of each line."""
    if (run.path / PAGE).exists():
        yield "page", str(run.path / PAGE)
    yield "tables", f"{run.path / MARKDOWN} (what the words mean: xdm-ft explain)"
    if (run.path / ANALYSIS).exists():  # it is not read: a damaged one must not spoil the last screen of a run
        yield "measures", f"{run.path / ANALYSIS} (what they mean: xdm-ft explain analysis)"
    if "label_curve" in run.results:
        yield "labels", _labels(run.results["label_curve"])
    if run.records:
        yield "models", str(run.path / "models")
    failed = any(entry["status"] == "failed" for entry in run.results["runs"])
    if failed:
        yield "next", "repair the cause and run the same command: only failed models train"
    if run.records and run.recipe_rule != ORACLE:
        yield "export" if failed else "next", f"xdm-ft export {shlex.quote(str(run.path))} DIR"


def _labels(curve: Mapping[str, Any]) -> str:
    """What few labels of a new site bring: the mean gain, and those of the domains that were the site."""
    by_label = [point for point in curve["points"] if point["chosen"] == "label"]
    point = next((point for point in by_label if point["labels"] == SHOWN_LABELS), by_label[0])
    metric = curve.get("metric", "accuracy")  # as in runs of before curves had one
    gains = join_names([words.scale(gain, metric, signed=True) for gain in point["past_gains"].values()])
    points = f"{words.scale(point['gain'], metric, signed=True)} points of {words.metric_words(metric)}"
    return f"{point['labels']} of a new site bring {curve['method']} {points} (by domain: {gains})"


def _cut(name: str, width: int) -> str:
    """Returns the name in at most `width` characters: its end is replaced by "…"."""
    from rich.cells import set_cell_size

    name = printable(name)
    return name if _length(name) <= width else set_cell_size(name, max(1, width - 1)).rstrip() + "…"


def _length(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(_on_terminal(text))


def _on_terminal(text: str) -> str:
    return words.encode_text(text, sys.stdout.encoding or "utf-8")
