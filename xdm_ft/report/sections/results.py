"""The table of methods and held-out domains, its intervals, other metrics, costs, seeds averaged, labels of a site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np
from scipy.special import ndtr

from xdm_ft.core import ORACLE, Interval, set_name
from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER
from xdm_ft.report import Cell, Section, Table, cells, make_section, metric_cell, words
from xdm_ft.report.charts import FULL_WIDTH, SERIES, Figure, Line, Mark, Row, SeriesStyle, curves, looks, points
from xdm_ft.report.words import EMPTY, axis_value, budget_text, each_once, in_unit, oracle_mark, with_spread
from xdm_ft.results.measured import MEASURES, NUMBERS, Picked, costs
from xdm_ft.results.model import group_by
from xdm_ft.results.run import MAX_SETS, Run, encoders_of
from xdm_ft.results.table import SummaryRow
from xdm_ft.runtime.errors import join_names, plural

TRAINING = (
    "draws × gradients",
    "mixed steps",
)  # columns, and the beginning of a note, that the page has in Diagnostics
UNEQUAL = "trained with different numbers of gradients"


def results(run: Run, rule: str, with_intervals: bool = False) -> Section:
    """The results under a rule: a table per protocol, metric and kind of ±, which no column mixes.

    `with_intervals`: beside each mean its 95% interval.
    """
    order = [item.label for item in run.recipe.methods]
    rows = [row for row in run.rows if row.selection == rule]
    rows.sort(key=lambda row: order.index(row.method))
    notes = each_once((row.method, note) for row in rows for note in (row.reason, *(row.flags or ())))
    means = {row.method: row.mean for row in rows if row.mean is not None}
    best_row = (max if HIGHER_IS_BETTER[rows[0].metric] else min)(means, key=lambda method: means[method], default=None)
    chosen_by_it = run.choice is not None and bool(run.choice.at)  # the same values have chosen it
    if len(rows) > 1 and rule != ORACLE and (best_row != run.chosen or chosen_by_it):
        luck = words.scale(luck_of_the_best([row.stderr for row in rows if row.stderr]), rows[0].metric)
        if float(luck):
            unit = words.unit_of_difference(rows[0].metric)
            best = f"If all rows were equally good, the best by test value would be about {luck} {unit} too good"
            notes = [f"{best}; the quoted value is not.", *notes]
    evaluations = {row.method: row.budget["gradient_evaluations"] for row in rows}
    in_steps = [row for row in rows if (taken := evaluations[row.method]) and taken["high"] > 0]
    budgets = group_by(in_steps, lambda row: budget_text({"budget": row.budget}))
    if len(budgets) > 1:
        parts = (f"{budget}: {', '.join(row.method for row in of)}" for budget, of in budgets.items())
        notes.append(f"{UNEQUAL}: {'; '.join(parts)}")

    own = rule == run.recipe_rule
    groups = group_by(
        rows, lambda row: (row.protocol, row.metric, row.split, (row.spread_as_published or {}).get("kind", ""))
    )
    return make_section(
        "results",
        _dot_plot(run) if own else [],
        [_table(run, group, with_intervals) for group in groups.values()],
        notes,
        rule=rule,
        remark=f" — {words.CHEATING}" if rule == ORACLE else " (the recipe's rule)" if own else "",
        unit=in_unit(rows[0].metric),
        tested_on=run.results["tested_on"],
        better="Higher" if HIGHER_IS_BETTER[rows[0].metric] else "Lower",
        methods=plural(len(rows), "method"),
        held_out=join_names(list(dict.fromkeys(domain for row in rows for domain in row.per_test_domain))),
        seeds=plural(max(row.n for row in rows), "seed"),
        paper_rule=f"{rule} — {words.CHEATING}" if rule == ORACLE else rule,
    )


def on_the_page(run: Run, section: Section) -> tuple[Section, Section]:
    """Returns the results of the recipe's rule as the page shows them, and what it shows below Diagnostics instead.

    That is how methods were trained and selected. Of many domains, the mean stands before them.
    """
    rule, domains = run.recipe_rule, {domain for row in run.recipe_rows for domain in row.per_test_domain}

    def columns(table: Table, moved: bool) -> Table:
        kept = [i for i, title in enumerate(table.header) if not i or (title in TRAINING) == moved]
        if len(domains) > MAX_SETS:
            kept.sort(key=lambda i: table.header[i] in domains)
        rows = [[row[i] for i in kept] for row in table.rows]
        return replace(table, header=[table.header[i] for i in kept], rows=rows)

    chosen = f"{run.choice}." if run.choice is not None and len(run.choice.values) > 1 else ""
    unequal = [note for note in section.notes if note.startswith(UNEQUAL)]
    moved = [replace(columns(table, True), caption="What training took.") for table in section.tables]
    training = make_section(
        "training", tables=[table for table in moved if len(table.header) > 1], notes=unequal, rule=rule, chosen=chosen
    )
    title = section.title.replace(f", selection: {rule} (the recipe's rule)", " by method")
    tables = [columns(table, False) for table in section.tables]
    return replace(section, title=title, tables=tables, notes=[n for n in section.notes if n not in unequal]), training


def luck_of_the_best(errors: Sequence[float]) -> float:
    """Returns the expected maximum of independent normal errors with these standard deviations; 0 for fewer than two.

    It is ∫ x dΠᵢ Φ(x/σᵢ). Errors that rows share, as those of common test images, and true differences make it smaller.
    """
    if len(errors) < 2:
        return 0.0
    x = np.linspace(-8, 8, 4001) * max(errors)
    below = ndtr(x[:, None] / np.array(errors)).prod(1)  # the share of tables whose errors are all below x
    return float(np.sum((x[1:] + x[:-1]) / 2 * np.diff(below)))


def _table(run: Run, rows: Sequence[SummaryRow], with_intervals: bool) -> Table:
    mark, metric = oracle_mark(rows[0].selection), rows[0].metric
    domains = list(dict.fromkeys(domain for row in rows for domain in row.per_test_domain))
    measured = (entry for entry in run.results["runs"] if entry.get("mixed_steps") is not None)
    mixed = group_by(measured, lambda entry: str(entry["method"]))  # steps that used augmented features
    has_budgets, has_mixed = any(row.budget for row in rows), any(row.method in mixed for row in rows)
    several = len(domains) != 1  # the mean of one domain is that domain's
    header = [f"method{mark}", *(domains if several else ())]
    ends = {row.method: row.interval for row in rows if with_intervals and row.interval is not None}
    error = " ± stderr" * any(row.stderr is not None for row in rows)
    header += [f"{'mean' if several else domains[0]}{error}{mark}"]
    header += ["95% interval"] * bool(ends) + ["seeds"]
    header += [TRAINING[0]] * has_budgets + [TRAINING[1]] * has_mixed
    lines = []
    for row in rows:
        of_domains = domains if several else ()
        means = [metric_cell(row.per_test_domain.get(domain, {}).get("mean"), metric) for domain in of_domains]
        mean = Cell(with_spread(row.to_json(), row.stderr), row.mean)
        steps = [entry["mixed_steps"] for entry in mixed.get(row.method, ())]
        more = [budget_text({"budget": row.budget})] * has_budgets
        more += [words.range_text(min(steps), max(steps)) if steps else EMPTY] * has_mixed
        end = [words.between(metric, ends[row.method]) if row.method in ends else EMPTY] * bool(ends)
        lines.append(cells(row.method, *means, mean, *end, row.n, *more))
    return Table(f"Protocol: {rows[0].protocol}", header, lines)


ANY = "a held-out domain"  # of more than can be told apart


def _dot_plot(run: Run) -> list[Figure]:
    rows = [row for row in run.drawn_rows if row.mean is not None]
    domains = list(dict.fromkeys(domain for row in rows for domain in row.per_test_domain))
    if not rows or len(rows) * len(domains) < 2:
        return []

    several, many = len(domains) > 1, len(domains) > MAX_SETS
    drawn = []
    for row in rows:
        marks = []
        for i, domain in enumerate(domains):
            value = row.per_test_domain.get(domain, {}).get("mean")
            if value is not None and many:
                marks.append(Mark(ANY, axis_value(run.metric, value)))
            elif value is not None:
                shift = 0.6 * (i / (len(domains) - 1) - 0.5) if several else 0.0
                end = domain_interval(row, domain)
                ends = None if end is None else [axis_value(run.metric, one) for one in end]
                marks.append(Mark(domain, axis_value(run.metric, value), ends, shift))
        if several and row.mean is not None:
            marks.append(Mark("mean", axis_value(run.metric, row.mean)))
        drawn.append(Row(row.method, marks))
    caption = "The dot has its 95% interval over seeds and test images."
    if several:
        caption = (
            "One dot per held-out domain, with its 95% interval over seeds and test images. The bar is the mean over "
            "the domains. Compare methods within a domain."
        )
    if many:
        caption = "One ring per held-out domain. The bar is the mean over the domains."
    series = {ANY: SeriesStyle(SERIES[0], hollow=True)} if many else looks(domains)
    figure = points(
        "results",
        f"Dot plot of test {in_unit(run.metric)} by method and held-out domain",
        caption,
        drawn,
        f"test {in_unit(run.metric)}" + ("" if several else f" on {words.short(domains[0], 18)}"),
        series | {"mean": SeriesStyle("", "|", size=18)},
        {name: words.short(name, 18) for name in (*series, "mean")} if several else {},
        row_height=max(0.22, 0.05 * len(series)),
        width=FULL_WIDTH,
    )
    return [figure]


def intervals(run: Run) -> Section | None:
    """The 95% intervals of the numbers of the first table; None without predictions that show them."""
    domains = list(dict.fromkeys(domain for row in run.recipe_rows for domain in row.per_test_domain))
    rows = []
    of_domains = domains if len(domains) > 1 else []
    for row in run.recipe_rows:
        ends = [row.interval, *(domain_interval(row, domain) for domain in of_domains)]
        if any(ends):
            shown = [Cell(words.between(run.metric, end), end.low) if end else Cell(EMPTY) for end in ends]
            rows.append(cells(row.method, *shown))
    caption = f"95% intervals of test {words.metric_words(run.metric)}, over seeds and test images."
    table = Table(caption, ["method", *(["mean", *domains] if of_domains else domains)], rows)
    return make_section("intervals", tables=[table]) if rows else None


def domain_interval(row: SummaryRow, domain: str) -> Interval | None:
    """Returns the interval on one column of the summary; None if it is not known."""
    low, high = (row.per_test_domain.get(domain, {}).get(end) for end in Interval._fields)
    return None if low is None or high is None else Interval(low, high)


# --------------------------------------------------------------------------------------------- other metrics, and costs


def all_metrics(run: Run, rule: str) -> Section | None:
    """The other metrics of every method."""
    methods = [row.method for row in run.rows if row.selection == rule]
    if not run.records or not methods:
        return None
    models = Picked(run.every, rule, run.metric)
    tables = [metric_table([([method], models, method) for method in methods], ["method"], rule)]
    if rule == run.recipe_rule:
        numbers = run.measured_if_known.numbers
        tables += _numbers_table({method: numbers(method, run.held_out_sets) for method in methods})
    names = {measure.score: words.metric_words(measure.name) for measure in MEASURES}
    lower = ", ".join(name for score, name in names.items() if not HIGHER_IS_BETTER.get(score, True))
    losses = ", ".join(name for score, name in names.items() if score not in words.IN_PERCENT)
    return make_section("metrics", tables=tables, not_in_percent=losses, lower=lower)


def metric_table(rows: Sequence[tuple[Sequence[str], Picked, str]], labels: Sequence[str], rule: str) -> Table:
    """Returns a row per (labels, models, method)."""
    lines = []
    for texts, models, method in rows:
        line = cells(*texts)
        for measure in MEASURES:
            mean, _, stderr, _ = models.mean(method, measure)
            error = "" if mean is None or stderr is None else f" ± {words.scale(stderr, measure.score)}"
            line.append(Cell(words.number(mean, measure.score) + error, mean))
        lines.append(line)
    header = [*labels[:-1], f"{labels[-1]}{oracle_mark(rule)}", *(words.metric_words(m.name) for m in MEASURES)]
    return Table("Every metric of the picked models.", header, lines, labels=len(labels))


def _numbers_table(values: Mapping[str, Mapping[str, float]]) -> list[Table]:
    known = {name: number for name, number in NUMBERS.items() if any(name in of for of in values.values())}
    rows = [
        cells(method, *(metric_cell(of.get(name), number.unit) for name, number in known.items()))
        for method, of in values.items()
    ]
    header = ["method", *(number.words for number in known.values())]
    return [Table("More of the predictions of the picked models.", header, rows)] if known else []


def cost(run: Run) -> Section | None:
    """What models and encoders cost.

    Selection values stand here, and not among the test results, for one who picks a cut by them.
    """
    by_method, values = costs(run.records), run.selection_values
    shown = {row.method: by_method[row.method] for row in run.recipe_rows if row.method in by_method}
    if not shown:
        return None
    rows = []
    for method, (parameters, seconds, memory) in shown.items():
        texts = words.count_text(parameters), words.seconds_text(seconds), words.bytes_text(memory)
        spent = map(Cell, texts, (parameters, seconds, memory))
        rows.append(cells(method, metric_cell(values.get(method), run.metric), *spent))
    header = ["method", "selection value", "trained parameters", "seconds", "peak memory"]
    tables = [Table("The mean cost of one model.", header, rows)]

    rows = []
    for label, encoder in encoders_of(run.results).items():
        model = f"{encoder['component']} {encoder['model'] or ''}".rstrip()
        parameters, ms, size = (encoder[key] for key in ("parameters", "ms_per_image", "feature_bytes"))
        index = encoder["robustness_index"]
        of_encoder = (
            words.count_text(parameters),
            EMPTY if ms is None else f"{ms:.3g}",
            words.bytes_text(size),
            EMPTY if index is None else f"{index:z.2f}",
        )
        spent = map(Cell, of_encoder, (parameters, ms, size, index))
        rows.append(cells(label, model, encoder["pretraining"], encoder["width"], *spent))
    if rows:
        header = ["encoder", "model", "pre-training", "width", "parameters"]
        header += ["ms per image", "features on disk", "robustness index"]
        caption = (
            "The encoders. Milliseconds to encode one image on the machine of the run; bytes of all cached features."
        )
        tables.append(Table(caption, header, rows, labels=3))

    missing = [method for method, spent in shown.items() if spent.peak_memory is None]
    shared = "their models trained together and share their memory, so a model has no peak of its own"
    remark = "they are a part of the test images" if run.rule == ORACLE else "test images are not in it"
    notes = [f"{', '.join(missing)}: {shared}"] if missing else []
    return make_section("cost", tables=tables, notes=notes, unit=in_unit(run.metric), rule=run.rule, where=remark)


# ------------------------------------------------------------------------------------------------------ seeds averaged


def averaged(run: Run) -> Section | None:
    """Each method's models of all seeds as one model, whose logits are the mean of theirs, under the recipe's rule.

    None if the recipe does not ask for it, or no method has two complete seeds.
    """
    if not run.recipe.report.seeds_averaged:
        return None
    held_out, pools = run.held_out_sets, run.measured.pools
    rows, notes = [], []
    for row in run.recipe_rows:
        of_sets = [pools.get((row.method, held)) for held in held_out]
        if row.n < 2 or None in of_sets:
            continue
        if not all(pool.every_class for pool in of_sets if pool):
            reason = "probabilities of all classes were not kept, as they take too much space"
            notes.append(f"{row.method}: no row: {reason}")
            continue
        values = [pool.averaged for pool in of_sets if pool]
        defined = [value for value in values if value is not None]
        mean = fmean(defined) if len(defined) == len(values) else None
        shown = [metric_cell(value, run.metric) for value in (*(values if len(values) > 1 else ()), mean, row.mean)]
        gain = None if mean is None or row.mean is None else mean - row.mean
        difference = EMPTY if gain is None else words.scale(gain, run.metric, signed=True)
        rows.append(cells(f"{row.method}, seeds averaged", row.n, *shown, difference))
    if not rows and not notes:
        return None
    sets = [*map(set_name, held_out), "mean"] if len(held_out) > 1 else [*map(set_name, held_out)]
    header = [f"method{oracle_mark(run.recipe_rule)}", "seeds", *sets, "mean of its seeds", "difference"]
    table = Table("Seeds averaged.", header, rows)
    return make_section("averaged", tables=[table], notes=notes)


# ------------------------------------------------------------------------------------------------ labels of a new site

HOW = {None: "none", "label": "as xdm-ft label does", "random": "at random"}


def label_curve(run: Run) -> Section | None:
    """What few labels of a new site bring; None if the recipe does not ask for it."""
    curve = run.results.get("label_curve")
    if curve is None:
        return None
    measured, domains = curve["points"], list(curve["points"][0]["past_gains"])
    metric = curve.get("metric", "accuracy")  # as in runs of before curves had one
    rows = []
    for point in measured:
        gains = [point["past_gains"].get(domain) for domain in domains]
        shown = [Cell(EMPTY if gain is None else words.scale(gain, metric, signed=True), gain) for gain in gains]
        ends = point["interval"]
        interval = Cell(words.between(metric, [*ends.values()], signed=True), ends["low"]) if ends else Cell(EMPTY)
        gain = Cell(words.scale(point["gain"], metric, signed=True), point["gain"])
        value = metric_cell(point.get("value", point.get("accuracy")), metric)
        rows.append(cells(HOW[point["chosen"]], point["labels"], value, gain, interval, *shown))
    header = ["images chosen", "labels", words.metric_words(metric), "gain", "95% interval", *domains]
    table = Table(
        f"{in_unit(metric).capitalize()}; gains in points, the mean and those of each domain.", header, rows, labels=2
    )

    lines = []
    for choice, look in looks(("label", "random")).items():
        of = [point for point in measured if point["chosen"] in (None, choice)]
        thin = [
            [(point["labels"], 100 * point["past_gains"][domain]) for point in of if domain in point["past_gains"]]
            for domain in domains
        ]
        band = [
            (point["labels"], *(100 * end for end in point["interval"].values())) for point in of if point["interval"]
        ]
        line = Line(HOW[choice], look, [(point["labels"], 100 * point["gain"]) for point in of])
        lines.append(line._replace(thin=thin, band=[(0, 0, 0), *band] if band else ()) if choice == "label" else line)
    figure = curves(
        "label-curve",
        f"Gain in {words.metric_words(metric)} against the number of labelled images of a new site",
        "Thick: the mean over domains, with its 95% interval; thin: each domain.",
        {"": lines},
        ("labelled images of the site", "gain in points"),
        limits={"xmin": 0},
        width=FULL_WIDTH,
        height=2.6,
    )
    other = run.chosen not in (None, curve["method"])
    prefers = f"{run.chosen} is chosen, whose models cannot be adapted" if other else ""
    fewer = any(len(point["past_gains"]) < len(domains) for point in measured)
    return make_section(
        "label-curve",
        [figure],
        [table],
        method=curve["method"],
        prefers=prefers,
        fewer="a mean without some domains is of those whose half has enough images" if fewer else "",
    )
