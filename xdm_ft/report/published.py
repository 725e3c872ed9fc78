"""Published numbers, in tables beside ours.

published_results.csv holds the numbers of Liu et al. 2024, Cross-Domain Feature Augmentation for Domain Generalization
(IJCAI), each with its encoder and metric. The paper reports means over held-out domains, no single domains. Its
encoders and settings may differ from ours, so its numbers have tables of their own, with the encoder in the header.
"""

from __future__ import annotations

import csv
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

from xdm_ft.core import ORACLE
from xdm_ft.recipe.method import MethodItem
from xdm_ft.report import Cell, Section, Table, cells, make_section
from xdm_ft.report.words import EMPTY, trained_words, with_spread
from xdm_ft.results.run import Run
from xdm_ft.results.summary import (
    BENCHMARKS,
    benchmark_of,
    domainbed_folders,
    images_tested,
)
from xdm_ft.results.table import SummaryRow

if TYPE_CHECKING:
    pass

SOURCE = "Liu et al. 2024 (IJCAI)"
FROZEN = "ViT-B/16 CLIP, frozen encoder"
COMPARABLE = (
    "additional domain generalization results",  # the main table and two more data sets
    "sharpness-aware methods",
    FROZEN,
    "ablation",
    "domain head (no discard)",
)
"""Tables of the paper that report performance on unseen domains. Its other tables measure features and risks."""
METRICS = {
    "test accuracy %": "accuracy",
    "mean held-out-domain accuracy %": "accuracy",
    "worst-region test accuracy %": "worst_domain_accuracy",
}
"""{name of a published metric: our name}"""


class Published(NamedTuple):
    """A row of published_results.csv; numbers as printed in the paper."""

    table: str
    dataset: str
    method: str
    encoder: str
    metric: str
    mean: str
    spread: str  # "" if the paper gives none


@cache
def read_published() -> tuple[Published, ...]:
    """All rows of published_results.csv."""
    text = files("xdm_ft.report").joinpath("published_results.csv").read_text(encoding="utf-8")
    return tuple(Published(**row) for row in csv.DictReader(text.splitlines()))


def _model(item: MethodItem) -> str:
    return str(getattr(item.encoder.block, "model", "unknown encoder"))


def published_name(item: MethodItem) -> str | None:
    """Returns the paper's name for the method of a recipe's item; None if it has no such ablation."""
    keys = item.block.model_dump()
    # the paper's SAM and SAGM are those of ERM
    plain = item.block.name.removeprefix("erm+")
    if plain.partition("+")[0] != "xdomainmix":
        return plain
    if keys.get("other_partner", "other_class_other_domain") != "other_class_other_domain":
        return None
    switches = (  # the ablations switch these
        keys.get("mix_class_specific", True),
        keys.get("mix_class_generic", True),
        keys.get("p_discard", 0.2) > 0,
        keys.get("domain_head_augmented", False),
    )
    if switches == (True, True, True, False):
        return plain
    ablations = {
        (True, False, False, False): "mix csds",
        (False, True, False, False): "mix cgds",
        (True, True, False, False): "mix csds + mix cgds",
        (True, True, False, True): "domain head trained with augmented features",
    }
    return ablations.get(switches) if plain == "xdomainmix" else None


def published_section(run: Run, rule: str) -> Section | None:
    """Returns the published numbers beside ours: a table per published encoder and metric.

    None for a rule that is not the recipe's own, for oracle, and if our metric or test domains differ from the
    published ones.
    """
    dataset = benchmark_of(run.recipe.data, images_tested(run.every))
    if dataset is None or rule != run.recipe_rule or rule == ORACLE:
        return None
    # WILDS: the official test set. DomainBed's means are over all domains, so the run must have held out each in turn
    tests_as_published = run.recipe.protocol.name == "official"
    if benchmark := domainbed_folders().get(dataset):
        held_out = {record.test_domains for record in run.every}
        alone = {benchmark.canonical(held[0]) for held in held_out if len(held) == 1}
        tests_as_published = alone == {*benchmark.domain_folders}
    if not tests_as_published:
        return None

    pairs: dict[tuple[Any, ...], list[tuple[SummaryRow, Published | None]]] = {}
    unpublished: list[tuple[tuple[Any, ...], SummaryRow]] = []
    for row in run.recipe_rows:
        item = run.recipe.item(row.method)
        trained = trained_words(item.record_fields["trainable"]).replace("end to end", "fine-tuned")
        ours = f"{_model(item)}, {trained}"
        convention = (row.spread_as_published or {}).get("kind")
        name, own = published_name(item), (ours, convention, row.protocol)
        lines = [line for line in read_published() if line.table in COMPARABLE and METRICS[line.metric] == row.metric]
        lines = [line for line in lines if (line.dataset, line.method) == (dataset, name)]
        for line in lines:
            encoder = f"{line.encoder}, {'frozen' if line.table == FROZEN else 'fine-tuned'}"
            pairs.setdefault((encoder, line.metric, *own), []).append((row, line))
        if not lines:  # such as a method of the user's own
            unpublished.append((own, row))
    if not pairs:
        return None
    convention, protocol = BENCHMARKS[dataset]
    tables = []
    for (encoder, metric, ours, kind, ours_protocol), beside in pairs.items():
        first = beside[0][0]
        alike = [row for own, row in unpublished if own == (ours, kind, ours_protocol) and row.metric == first.metric]
        order = [row.method for row in run.recipe_rows]
        beside = sorted([*beside, *((row, None) for row in alike)], key=lambda pair: order.index(pair[0].method))
        our_protocol = ours_protocol.partition("; ± is")[0]  # the ± of this table is another one
        caption = (
            f"Published: {SOURCE}: {dataset}; {encoder}; {metric}; {protocol}; the paper does not say what its ± is; "
            f"its benchmark prints the {convention.kind}. Ours: {ours}; {first.metric.replace('_', ' ')} over "
            f"{', '.join(first.per_test_domain)}; ± is here {'the ' + kind if kind else 'unknown'}; {our_protocol}."
        )
        rows = []
        for row, theirs in beside:
            renamed = theirs and row.method not in (theirs.method, f"erm+{theirs.method}")
            method = row.method + (f" (published: {theirs.method})" if theirs and renamed else "")
            ours_as_published = with_spread(row.to_json(), (row.spread_as_published or {}).get("value"))
            rows.append(cells(method, _number(theirs), ours_as_published, theirs.table if theirs else EMPTY))
        header = ("method", f"published: {encoder}", f"ours: {ours}", "table of the paper")
        tables.append(Table(caption, header, rows, sortable=False))
    return make_section("published", tables=tables, source=SOURCE)


def _number(line: Published | None) -> Cell:
    if line is None:
        return Cell(EMPTY)
    return Cell(line.mean + (f" ± {line.spread}" if line.spread else ""), float(line.mean))


def paper_table(run: Run, *tables: str) -> list[Table]:
    """Returns a table with a column per named table of the paper, of the same data set; [] for other data sets."""
    dataset = benchmark_of(run.recipe.data, images_tested(run.every))
    lines = [line for line in read_published() if line.dataset == dataset and line.table in tables]
    if not lines:
        return []
    columns = {table: {line.method: line for line in lines if line.table == table} for table in tables}
    metrics = [next((line.metric for line in by_method.values()), table) for table, by_method in columns.items()]
    rows = [
        cells(method, *(_number(by_method.get(method)) for by_method in columns.values()))
        for method in dict.fromkeys(line.method for line in lines)
    ]

    methods = dict.fromkeys(record.method for record in run.records)
    models = {method: _model(run.recipe.item(method)) for method in methods}
    trained = {method: run.recipe.item(method).record_fields["trainable"] for method in methods}
    kind = lines[0].encoder.partition(" ")[0]
    comparable = all(trained[method] is True and model.startswith(kind) for method, model in models.items())
    words = "The paper does not say which images it measured: compare the order of methods, not the numbers."
    if not comparable:
        ours = "; ".join(
            dict.fromkeys(f"{models[method]}, {trained_words(trainable)}" for method, trainable in trained.items())
        )
        words = f"Not comparable with this run, whose encoder is {ours}."
    caption = f"Published: {' and '.join(tables)} on {dataset}; {SOURCE}; {lines[0].encoder}, fine-tuned. {words}"
    return [Table(caption, ["method", *metrics], rows, folded=not comparable)]
