"""The top of the page: the finding in one sentence, a few numbers, and what to do next."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from xdm_ft.evaluation.metrics import HIGHER_IS_BETTER
from xdm_ft.evaluation.records import SummaryRow
from xdm_ft.report.comparisons import beside_rows, here_words
from xdm_ft.report.finished import Run
from xdm_ft.report.page.analysed import not_measured
from xdm_ft.report.page.numbers import ECE, between, held_out_sets, mean_interval, own_models, set_name
from xdm_ft.report.page.places import named
from xdm_ft.report.sentence import sentence
from xdm_ft.report.table_rows import metric_words, scaled, with_unit
from xdm_ft.runtime.errors import plural


@dataclass(frozen=True)
class Number:
    """A number of the headline."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Step:
    """Something to do next, and its command."""

    what: str
    command: str


@dataclass(frozen=True)
class Headline:
    sentence: str
    numbers: Sequence[Number]
    protocols: Sequence[str]
    choice: str  # why the numbers are of this method; "": there is no choice
    models: str  # where the models are
    next: Sequence[Step]


def headline(run: Run) -> Headline:
    protocols = list(dict.fromkeys(row.protocol for row in run.own_rows))
    trained = bool(run.records)
    return Headline(
        sentence=sentence(run),
        numbers=list(_numbers(run)),
        protocols=protocols,
        choice=str(run.choice) if run.choice is not None and len(run.choice.values) > 1 else "",
        models=f"{plural(len(run.records), 'trained model')} in {named(run.path) / 'models'}, one folder each."
        if trained
        else "",
        next=list(_next_steps(run)) if trained else [],
    )


def _numbers(run: Run) -> Iterator[Number]:
    chosen = next((row for row in run.rows if (row.method, row.selection) == (run.chosen, run.rule)), None)
    if chosen is not None and chosen.mean is not None:
        yield from _of_method(run, chosen)
    counts = Counter(entry["status"] for entry in run.results["runs"])
    if counts:
        faults = [f"{counts[status]} {status}" for status in ("failed", "skipped") if counts[status]]
        seeds = len({record.seed for record in run.records})
        of = f"{plural(len({record.method for record in run.records}), 'method')}, {plural(seeds, 'seed')}"
        yield Number("models trained", f"{counts['ok']}", "; ".join([of, *faults]))


def _of_method(run: Run, row: SummaryRow) -> Iterator[Number]:
    metric, words = run.metric, metric_words(run.metric)
    assert row.mean is not None
    interval = mean_interval(run, row)
    where = "95% interval over seeds and test images: " + between(metric, interval) if interval else ""
    sets = held_out_sets(run)
    on = f"on {set_name(sets[0])}" if len(sets) == 1 else f"the mean over {len(sets)} held-out domains"
    yield Number(f"test {words} of {row.method}, {on}", with_unit(metric, row.mean), where)
    versus = beside_rows(run.results, row.selection).get(row.method)
    if versus is not None:
        p = f", Holm's p {versus.p_here.holm:.2g}" if versus.p_here and versus.p_here.holm is not None else ""
        difference = scaled(versus.difference, metric, True)
        yield Number(f"difference to {versus.second} in {words}", difference, here_words(versus, metric) + p)
    known = {name: point["mean"] for name, point in row.per_test_domain.items() if point["mean"] is not None}
    if len(known) > 1:
        worst = (min if HIGHER_IS_BETTER[metric] else max)(known, key=lambda name: known[name])
        yield Number(f"worst held-out domain: {worst}", with_unit(metric, known[worst]), f"test {words} there")
    if metric != "ece" and (ece := own_models(run).mean(row.method, ECE).mean) is not None:
        yield Number("calibration error (ECE)", with_unit("ece", ece), "how far confidence and accuracy are apart")


def _next_steps(run: Run) -> Iterator[Step]:
    path = shlex.quote(str(named(run.path)))
    yield Step("Take a model home: one directory that loads anywhere.", f"xdm-ft export {path} my_model")
    yield Step("Predict the classes of new images with it.", "xdm-ft predict my_model IMAGES --out predictions.csv")
    yield Step("Measure it on labelled images of a new site.", "xdm-ft evaluate my_model SITE")
    if run.analysis is None or not_measured(run):
        yield Step("Measure what the paper measures, for this page.", f"xdm-ft analyse {path}")
