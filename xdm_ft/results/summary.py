"""Summarises one record per trained model to one row per method and selection rule: `summary` of results.json.

A summary of a growing run is a look at it. Each look spends a part of the error rate, so that growing until a verdict
comes is not free: it has new complete seeds or methods and a comparison with a p value. The first one has α = 0.05, the
k-th 0.05/2^k: 7.5% in all. What a look has found stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from xdm_ft.core import ALPHA, ORACLE, set_name
from xdm_ft.evaluation.estimates import Spread
from xdm_ft.evaluation.predictions import Prediction
from xdm_ft.recipe.components import Component
from xdm_ft.recipe.method import split_label, with_encoder
from xdm_ft.results import Runs
from xdm_ft.results.measured import RunMeasures, measure, pick_by_rule
from xdm_ft.results.model import TEST, Point, Record, Status, group_by
from xdm_ft.results.table import NO_VERDICT, UNKNOWN, Comparison, InterimLook, SummaryRow
from xdm_ft.results.verdicts import Pair, compared, judge

if TYPE_CHECKING:
    from xdm_ft.image_files.domainbed import BenchmarkFolders


def look_at(runs: Iterable[Runs], compare: Sequence[Sequence[str]] = ()) -> InterimLook:
    """Returns a look at these methods; its α is that of a first one."""
    varying, methods = dict[str, list[int]](), list[str]()
    for of_method in runs:
        if complete := of_method.complete_seeds:
            methods.append(of_method.method)
            if not of_method.deterministic:
                varying[of_method.method] = complete
    seeds = sorted({seed for complete in varying.values() for seed in complete})
    missing = {method: lacking for method, complete in varying.items() if (lacking := sorted({*seeds} - {*complete}))}
    return InterimLook(seeds, sorted(methods), missing, ALPHA, [list(pair) for pair in compare])


def place_of(now: InterimLook, before: Sequence[InterimLook]) -> tuple[int, InterimLook]:
    """Returns the number of a look, from 1 on, and the look with its α.

    A summary of what the last look saw is that look again.
    """
    if before and all(getattr(before[-1], name) == getattr(now, name) for name in ("seeds", "methods", "missing")):
        return len(before), before[-1]
    number = len(before) + 1
    return number, replace(now, alpha=ALPHA if number == 1 else ALPHA / 2**number)


def with_earlier_verdicts(rows: Iterable[Comparison], before: Sequence[InterimLook]) -> list[Comparison]:
    """Returns the comparisons with what earlier looks have found."""
    here: dict[tuple[str, ...], tuple[int, str]] = {}
    elsewhere: dict[tuple[str, ...], str] = {}
    for number, look in enumerate(before, 1):
        for selection, first, second, word, word_elsewhere in look.found:
            here.setdefault((selection, first, second), (number, word))
            if word_elsewhere != UNKNOWN:
                elsewhere.setdefault((selection, first, second), word_elsewhere)
    kept = []
    for row in rows:
        key = (row.selection, row.first, row.second)
        if key in here:
            number, word = here[key]
            note = "; ".join(note for note in row.note.split("; ") if not note.startswith(NO_VERDICT))
            row = replace(row, here=word, look=number, elsewhere=elsewhere.get(key, row.elsewhere), note=note)
        kept.append(row)
    return kept


_CHEATING = "(oracle: picked on the test domain)"
_PICKED_ON = {
    "train_val": "on the validation images of the training domains, the mean over these",
    "val_domain": "on the validation domain",
    "cross_domain": "of extra models on the further training domain that each holds out, the mean over these",
    ORACLE: _CHEATING,
}


def protocol_line(
    *, data: str, split: str, notes: Iterable[str], selection: str, metric: str, augmentation: str, draws: int
) -> str:
    """Returns the line above a table. Numbers under different lines are not comparable.

    `data` is name and size of the data set, `split` how test and validation images were split off, `notes` are
    sentences on groups, encoder and loss, whose duplicates are dropped, and `draws` counts draws of hyper-parameters
    per method, held-out domain and seed.
    """
    words = metric.replace("_", " ")
    parts = [
        data,
        split,
        *dict.fromkeys(notes),
        f"step picked by {words} {_PICKED_ON[selection]}",
        f"test {words}",
        "no augmentation" if augmentation == "none" else f"augmentation {augmentation}",
        f"{draws} hyper-parameter draw{'s' if draws != 1 else ''}",
        "± is the standard error over seeds (ddof 1), held-out domains averaged within a seed",
    ]
    return " ".join("; ".join(parts).split())


class Summary(NamedTuple):
    """What results.json says of all models of a run."""

    rows: list[SummaryRow]  # `summary`
    comparisons: list[Comparison]  # between these rows
    looks: list[InterimLook] = []  # the last one made these comparisons
    measured: RunMeasures | None = None


def summarise(
    records: Sequence[Record],
    predictions: Callable[[Sequence[Runs]], Iterable[Prediction]],
    *,
    methods: Sequence[str],
    rules: Mapping[str, str],
    metric: str,
    references: Mapping[str, str],
    compare: Sequence[tuple[str, str]] = (),
    encoders: Sequence[str] = (),
    deterministic: Collection[str] = (),
    augmentations: Mapping[str, str] | None = None,
    class_weights: Mapping[str, str] | None = None,
    convention: Convention | None = None,
    look: tuple[int, float] = (1, ALPHA),
    before: Sequence[InterimLook] = (),
    margin: float | None = None,
    average: bool = False,
    edited: Collection[str] = (),
) -> Summary:
    """Returns one row per selection rule and method, the comparisons between them, and what predictions come to.

    Methods without a record have no row. The comparisons under a rule are those of `compare`, of each method with its
    reference, and of each method under all pairs of encoders. They are one family of verdicts, or those of `compare`
    alone, if it holds any. A seed counts only if it has every held-out domain. Each rule picks one of several trials.

    Args:
        records: of all models.
        predictions: picked models → their predictions, in the order that `measure` needs; they are read once and not
            kept. Where some are missing, a comparison has no errors and no verdict, and its note says so.
        methods: labels of the recipe's methods.
        rules: {selection rule: its protocol line}, the recipe's own first.
        metric: the metric to summarise.
        references: method → the method that it is compared with, for methods that are compared.
        compare: pairs of methods that the recipe declares (`report.compare`).
        encoders: labels of several encoders, which each method is compared between; none for one encoder.
        deterministic: the methods of which all seeds would give the same model.
        augmentations: {method: augmentation of the images that it trains on}; missing: none.
        class_weights: {method: weights of its class losses}; missing: none.
        convention: how the data set's benchmark measures spread; None if it has no convention.
        look: number and significance level of this look.
        before: the looks before it, whose verdicts stay.
        margin: half of the range in which rows are equal, in the metric's unit.
        average: whether the seeds of a method are averaged to one model, too.
        edited: methods whose code has changed since their models trained.
    """
    trials_of = group_by(records, lambda record: record.method)
    runs_of = pick_by_rule(records, rules, metric, methods, deterministic)
    pairs = {rule: _pairs(of, references, compare, encoders) for rule, of in runs_of.items()}
    runs = [of for by_method in runs_of.values() for of in by_method.values()]
    measured, without = measure(
        metric, runs, predictions(runs), average, [pair for of in pairs.values() for pair in of.values()]
    )
    rows, comparisons = list[SummaryRow](), list[Comparison]()
    for rule, by_method in runs_of.items():
        cheats = "oracle reads labels of the test domains" if rule == ORACLE else ""
        found = {names: made for names, pair in pairs[rule].items() if (made := compared(pair, without, cheats))}
        family = [names in compare if compare else True for names in found]
        judged = judge(metric, [*found.values()], family, alpha=look[1], look=look[0], margin=margin)
        comparisons += with_earlier_verdicts(judged, before)
        for method, of in by_method.items():
            values = of.values
            means = [float(np.mean([values[held, seed] for held in of.held_out])) for seed in of.complete_seeds]
            gradients = [r.gradient_evaluations for r in of.records if r.gradient_evaluations is not None]
            row = SummaryRow(
                method=method,
                encoder=of.records[0].encoder,
                trainable=of.records[0].trainable,
                augmentation=(augmentations or {}).get(method, "none"),
                class_weights=(class_weights or {}).get(method),
                selection=rule,
                metric=metric,
                split=TEST,
                **Spread.of(means)._asdict(),
                interval=measured.interval(of),
                spread_as_published=convention and {"kind": convention.kind, "value": convention.value(means)},
                per_test_domain=_per_test_domain(of, measured),
                protocol=rules[rule],
                budget={
                    "draws": len({record.trial for record in trials_of[method]}),
                    "gradient_evaluations": {"low": min(gradients), "high": max(gradients)} if gradients else None,
                },
                failed=_count(of, "failed") or None,
                skipped=_count(of, "skipped") or None,
                reason="; ".join(_gaps(of)) or None,
                flags=[
                    *_flags(of, trials_of[method]),
                    *(["its code has changed since its models trained"] * (method in edited)),
                ]
                or None,
            )
            rows.append(row)
    return Summary(rows, comparisons, measured=measured)


def _pairs(
    runs: Mapping[str, Runs],
    references: Mapping[str, str],
    compare: Sequence[tuple[str, str]],
    encoders: Sequence[str],
) -> dict[tuple[str, str], Pair]:
    """Returns what is compared under a rule, {labels: both sides}."""
    # a pair that is declared the other way round would count twice in Holm's correction
    plain = [(method, other) for method, other in references.items() if (other, method) not in compare]
    wanted = dict.fromkeys([*compare, *plain, *encoder_pairs([*runs], encoders)])
    return {names: Pair(*(runs[name] for name in names)) for names in wanted if {*names} <= runs.keys()}


def _flags(runs: Runs, trials: Sequence[Record]) -> Iterator[str]:
    """Yields what to know of the picks of a method, and reasons to doubt them. `trials`: all of its records."""
    picked = [record for record in runs.records if runs.rule in record.selected]
    if runs.rule != ORACLE and any(record.hparams.get("pick") == "cross_domain" for record in picked):
        yield "its point was picked on training domains that it had not seen, each left out once"
    picks = [record.selected[runs.rule] for record in picked]
    for flag, count in Counter(flag for pick in picks for flag in pick.flags or ()).items():
        yield f"{flag} in {count} of {len(picks)} picks"
    drawn = [record for record in trials if record.trial > 0]
    if failed := [record.reason for record in drawn if record.status == "failed"]:
        yield f"{len(failed)} of {len(drawn)} drawn trials failed, the first: {failed[0]}"


def _per_test_domain(runs: Runs, measured: RunMeasures) -> dict[str, Point]:
    """Mean and std of each held-out set, over all seeds that have it, and the ends of its interval if it is known.

    If there is one set of several domains (official split), each domain has its accuracy. Other metrics are known only
    for all test images together. Of several sets the mean is that of the columns, so each set has one.
    """
    by_domain: dict[str, list[float]] = {}
    order = {held: position for position, held in enumerate(runs.held_out)}
    defined = (record for record in runs.records if record.test_domains in order)
    for record in sorted(defined, key=lambda record: order[record.test_domains]):
        score, value, held = runs.score(record), runs.value(record), record.test_domains
        if score is None or value is None:
            continue
        columns = {set_name(held): value}
        if len(held) > 1 and len(runs.held_out) == 1 and runs.metric in ("accuracy", "worst_domain_accuracy"):
            # for worst_domain_accuracy the columns show the accuracies whose minimum it is
            columns = {domain: entry["accuracy"] for domain, entry in score.per_domain.items()}
        for domain, of_domain in columns.items():
            by_domain.setdefault(domain, []).append(of_domain)
    points = dict[str, Point]()
    ends = {set_name(held): measured.interval(runs, held) for held in runs.held_out}
    for domain, values in by_domain.items():
        spread, interval = Spread.of(values), ends.get(domain)
        points[domain] = {"mean": spread.mean, "std": spread.std, **(interval._asdict() if interval else {})}
    return points


def _count(runs: Runs, status: Status) -> int:
    """Returns the number of models with a status."""
    return len({record.model or record.key for record in runs.records if record.status == status})


def _gaps(runs: Runs) -> Iterator[str]:
    """Yields the reasons for missing values; nothing if none is missing."""
    models = {record.model or record.key: record for record in runs.records if record.test_domains in runs.held_out}
    planned = len(runs.folds or runs.held_out) * len(runs.planned_seeds)
    done = sum(runs.value(record) is not None for record in models.values())
    failed, skipped = _count(runs, "failed"), _count(runs, "skipped")
    unpicked = sum(record.status == "ok" and runs.rule not in record.selected for record in models.values())
    if not runs.held_out and any(runs.score(record) for record in runs.records):
        yield f"{runs.metric} is not defined on the images of any held-out set"
    for status, count in (("failed", failed), ("skipped", skipped)):
        if count:
            why = dict.fromkeys(str(record.reason) for record in runs.records if record.status == status)
            yield f"{count} of {planned} runs {status}: {'; '.join(why)}"
    if unpicked:
        yield f"{runs.rule} could pick no step of {unpicked} of {planned} runs: {runs.metric} is not defined"
    # the rest has no record: runs of an interrupted experiment
    if missing := planned - done - failed - skipped - unpicked:
        yield f"{missing} of {planned} runs are missing"
    if done and done < planned:
        seeds = f"{len(runs.complete_seeds)} of {len(runs.planned_seeds)} seeds"
        yield f"the mean counts the {seeds} that have every held-out domain"


class Convention(NamedTuple):
    """How a benchmark measures the spread over n seeds. Held-out domains are averaged within a seed first."""

    kind: str  # in words, for tables
    ddof: int
    of_the_mean: bool  # a standard error: the standard deviation divided by √n

    def value(self, means: Sequence[float]) -> float | None:
        """Returns the spread in the unit of the metric; None for fewer than two seeds."""
        if len(means) < 2:
            return None
        return float(np.std(means, ddof=self.ddof) / (len(means) ** 0.5 if self.of_the_mean else 1))


DOMAINBED = Convention("standard error over seeds, ddof 0 (DomainBed)", ddof=0, of_the_mean=True)
"""np.std(values) / √n, as `format_mean` in domainbed/scripts/collect_results.py computes it."""
WILDS = Convention("standard deviation over seeds, ddof 1 (WILDS)", ddof=1, of_the_mean=False)
"""The standard deviation over replicates that WILDS leaderboards print, as in examples/evaluate.py of wilds."""


class Compared(NamedTuple):
    """What decides which ERM a row is compared with."""

    label: str
    is_plain_erm: bool  # ERM without add-ons, with any class head
    encoder: str | None  # its label; None in a run of one encoder
    head: tuple[Hashable, ...]  # kind of class head, then its settings
    cut: object  # how much of the encoder trains: equal ones are the same cut; False: nothing
    augmentation: str = "none"  # of the images that it trains on
    class_weights: str = "none"  # of its class losses
    from_text: bool = False  # whether its head starts at, or is computed from, class embeddings


LINEAR = ("linear",)


def erm_of_each(rows: Sequence[Compared]) -> dict[str, str]:
    """Returns {label of a row: label of the ERM that it is compared with}, all under the same encoder.

    Among the plain ERMs of its class head they are those of its cut, of these those of its augmentation, then of its
    class weights, then of its start, then the first; a step that would leave none is skipped. ERM itself is compared
    with the first plain ERM that has a linear head on the frozen encoder, without augmentation and class weights, which
    says what more training gains; if there is none, with the first of a linear head. A row is left out if the recipe
    has no such ERM.
    """
    references = {}
    for row in rows:
        # of ERM, any start: the first one
        wanted = row
        if row.is_plain_erm:
            wanted = row._replace(head=LINEAR, cut=False, augmentation="none", class_weights="none")
        erms = [erm for erm in rows if erm.is_plain_erm and (erm.encoder, erm.head) == (wanted.encoder, wanted.head)]
        steps = "cut", "augmentation", "class_weights", "from_text"
        for name in steps[:3] if row.is_plain_erm else steps:
            erms = [erm for erm in erms if getattr(erm, name) == getattr(wanted, name)] or erms
        if erms and erms[0].label != row.label:
            references[row.label] = erms[0].label
    return references


def encoder_pairs(labels: Sequence[str], encoders: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the rows (labels) of each method under each two encoders, in the order of both, if both are there."""
    methods = dict.fromkeys(method for method, encoder in (split_label(label, encoders) for label in labels) if encoder)
    pairs = [
        (with_encoder(method, first), with_encoder(method, second))
        for method in methods
        for first, second in combinations(encoders, 2)
    ]
    return [pair for pair in pairs if {*pair} <= {*labels}]


IN_TURN = "pacs", "vlcs", "officehome", "terraincognita", "domainnet"  # DomainBed's data sets
PROTOCOL = "each domain held out in turn, picked on validation images of the training domains, 3 runs"
BENCHMARKS: dict[str, tuple[Convention, str]] = {
    "camelyon17": (WILDS, "official split, picked on the validation domain, 10 runs"),
    "fmow": (WILDS, "official split, picked on the validation domain, 3 runs"),
    **dict.fromkeys(IN_TURN, (DOMAINBED, PROTOCOL)),
}
"""{data set: the kind of its ±, and the protocol of the paper on it}"""


def benchmark_of(data: Component, tested: set[tuple[str, int]]) -> str | None:
    """Returns the name of the published data set that a run was tested on, or None.

    `data`, of the recipe, may name it. `tested` holds (held-out domain, number of its test images): a folder or table
    is one of DomainBed's five data sets if each of these domains has its name and number of images.
    """
    if data.name in BENCHMARKS:
        return data.name
    if data.name == "hub":
        from xdm_ft.data.hub import KNOWN

        for known, (repository, _) in KNOWN.items():
            if data.kwargs()["repository"] in (known, repository):
                return known
    for dataset, cls in domainbed_folders().items():
        for counts in cls.published.values():
            sizes = set(zip(cls.domain_folders, counts, strict=True))
            if tested and {(cls.canonical(domain), n) for domain, n in tested} <= sizes:
                return dataset
    return None


def domainbed_folders() -> dict[str, type[BenchmarkFolders]]:
    from xdm_ft.data.domainnet import DomainNet
    from xdm_ft.data.officehome import OfficeHome
    from xdm_ft.data.pacs import Pacs
    from xdm_ft.data.terraincognita import TerraIncognita
    from xdm_ft.data.vlcs import Vlcs

    return dict(zip(IN_TURN, (Pacs, Vlcs, OfficeHome, TerraIncognita, DomainNet), strict=True))


def images_tested(records: Iterable[Record]) -> set[tuple[str, int]]:
    """{(held-out domain, number of its test images)}"""
    return {
        (domain, score["n"])
        for record in records
        for pick in record.selected.values()
        for domain, score in pick.metrics[TEST].per_domain.items()
        if isinstance(score, dict) and "n" in score  # not checked as the file is read: there may be thousands
    }
