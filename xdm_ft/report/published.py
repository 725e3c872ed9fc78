"""The published numbers, and a table of them beside ours.

published_results.csv holds those of Liu et al. 2024, Cross-Domain Feature Augmentation for Domain Generalization
(IJCAI): accuracies and other measurements, each with its encoder and metric. The paper tells means over held-out
domains only, none of one domain. They were made with other encoders and settings than ours may be, so they have a table
of their own, whose columns say what they are.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

from xdm_ft.evaluation.conventions import DOMAINBED, WILDS, Convention
from xdm_ft.report.table_rows import ORACLE, Results, Sheet, Summary, items, own_rule, with_spread

if TYPE_CHECKING:
    from xdm_ft.data._benchmarks import BenchmarkFolders

SOURCE = "Liu et al. 2024 (IJCAI)"
FROZEN = "ViT-B/16 CLIP, frozen encoder"
COMPARABLE = (
    "additional domain generalization results",  # the main table, and two data sets more
    "sharpness-aware methods",
    FROZEN,
    "ablation",
    "domain head (no discard)",
)
"""Tables that tell performance on unseen domains. The others measure features and risks, which a summary has not."""
METRICS = {
    "test accuracy %": "accuracy",
    "mean held-out-domain accuracy %": "accuracy",
    "worst-region test accuracy %": "worst_domain_accuracy",
}
"""A published metric → ours."""


class Published(NamedTuple):
    """A row of the file; numbers as they are printed."""

    table: str
    dataset: str
    method: str
    encoder: str
    metric: str
    mean: str
    spread: str  # "" where none is told


class Benchmark(NamedTuple):
    """What the paper says of its protocol on a data set."""

    convention: Convention
    protocol: str


_DOMAINBED = Benchmark(
    DOMAINBED, "each domain held out in turn, picked on validation images of the training domains, 3 runs"
)
BENCHMARKS = {
    "camelyon17": Benchmark(WILDS, "official split, picked on the validation domain, 10 runs"),
    "fmow": Benchmark(WILDS, "official split, picked on the validation domain, 3 runs"),
    **dict.fromkeys(("pacs", "vlcs", "officehome", "terraincognita", "domainnet"), _DOMAINBED),
}


@cache
def published() -> tuple[Published, ...]:
    """All rows of the file."""
    text = files("xdm_ft.report").joinpath("published_results.csv").read_text(encoding="utf-8")
    return tuple(Published(**row) for row in csv.DictReader(text.splitlines()))


def benchmark_of(data: Mapping[str, Any], tested: set[tuple[str, int]]) -> str | None:
    """Which published data set the images are: by the recipe's `data` block, else by the (domain, images) `tested` on.

    A folder or table is one of DomainBed's five if every held-out domain has its name and exactly its images.
    """
    name = data.get("name")
    if name in BENCHMARKS:
        return str(name)
    if name == "hub":
        from xdm_ft.data.hub import KNOWN

        for known, (repository, _) in KNOWN.items():
            if data["repository"] in (known, repository):
                return known
    return _by_counts(tested)


def _domainbed() -> dict[str, type[BenchmarkFolders]]:
    from xdm_ft.data.domainnet import DomainNet
    from xdm_ft.data.officehome import OfficeHome
    from xdm_ft.data.pacs import Pacs
    from xdm_ft.data.terraincognita import TerraIncognita
    from xdm_ft.data.vlcs import Vlcs

    four = {"pacs": Pacs, "vlcs": Vlcs, "officehome": OfficeHome, "terraincognita": TerraIncognita}
    return {**four, "domainnet": DomainNet}


def _tests_as_published(dataset: str, results: Results) -> bool:
    """Whether the run was tested on what the published number is of.

    On the official test set; or, as published means are over all held-out domains and none of one domain was published,
    on every domain of the data set in turn.
    """
    benchmark = _domainbed().get(dataset)
    if benchmark is None:
        return bool(results["recipe"]["protocol"]["name"] == "official")
    held_out = {tuple(run["test_domains"]) for run in results["runs"]}
    return {benchmark.canonical(domain) for held in held_out if len(held) == 1 for domain in held} == {
        *benchmark.domain_folders
    }


def images_tested(runs: Iterable[Mapping[str, Any]]) -> set[tuple[str, int]]:
    """The held-out domains of the runs of results.json, with the number of their test images."""
    return {
        (domain, score["n"])
        for run in runs
        for selected in run.get("selected", {}).values()
        for domain, score in selected["metrics"]["test"]["per_domain"].items()
    }


def _by_counts(tested: set[tuple[str, int]]) -> str | None:
    for name, cls in _domainbed().items():
        for counts in cls.published.values():
            known = set(zip(cls.domain_folders, counts, strict=True))
            if tested and {(cls.canonical(domain), n) for domain, n in tested} <= known:
                return name
    return None


def published_name(item: Mapping[str, Any]) -> str | None:
    """What the file calls the method of a recipe's item, whatever its label; None for a switch it does not have."""
    name = str(item["name"])
    plain = name.removeprefix("erm+")
    if plain.partition("+")[0] != "xdomainmix":
        return plain
    specific, generic = item.get("mix_class_specific", True), item.get("mix_class_generic", True)
    augmented = item.get("domain_head_augmented", False)
    if item.get("other_partner", "other_class_other_domain") != "other_class_other_domain":
        return None
    switches = (specific, generic, item.get("p_discard", 0.2) > 0, augmented)
    if switches == (True, True, True, False):
        return plain
    ablation = {
        (True, False, False, False): "mix csds",
        (False, True, False, False): "mix cgds",
        (True, True, False, False): "mix csds + mix cgds",
        (True, True, False, True): "domain head trained with augmented features",
    }
    return ablation.get(switches) if plain == "xdomainmix" else None


def published_sheets(rows: Sequence[Summary], results: Results) -> Iterator[Sheet]:
    """What was published for the methods of one of our tables: a table per published encoder and metric.

    None under another rule than the recipe's own, under oracle, or where our metric or our test domains are not the
    published ones.
    """
    first = rows[0]
    dataset = benchmark_of(results["recipe"].get("data", {}), images_tested(results["runs"]))
    if dataset is None or first["selection"] != own_rule(results) or first["selection"] == ORACLE:
        return
    if not _tests_as_published(dataset, results):
        return
    methods = items(results)
    found: dict[tuple[str, str], list[tuple[Summary, Published]]] = {}
    for row in rows:
        name = published_name(methods[row["method"]]) if row["method"] in methods else None
        for line in published():
            comparable = line.table in COMPARABLE and METRICS[line.metric] == row["metric"]
            if comparable and (line.dataset, line.method) == (dataset, name):
                found.setdefault((_encoder(line), line.metric), []).append((row, line))
    for (encoder, metric), pairs in found.items():
        yield _beside(dataset, encoder, metric, pairs, results)


def _encoder(line: Published) -> str:
    return f"{line.encoder}, {'frozen' if line.table == FROZEN else 'fine-tuned'}"


def _beside(
    dataset: str, encoder: str, metric: str, pairs: Sequence[tuple[Summary, Published]], results: Results
) -> Sheet:
    convention, protocol = BENCHMARKS[dataset]
    ours, first = _our_encoder(results), pairs[0][0]
    spread = first.get("spread_as_published")
    about = (
        (
            "Published",
            f"{SOURCE}: {dataset}; {encoder}; {metric}; {protocol}; the paper does not say what its ± is, its "
            f"benchmark prints the {convention.kind}",
        ),
        (
            "Ours",
            f"{ours}; {first['metric'].replace('_', ' ')} over {', '.join(first['per_test_domain'])}; "
            f"± is here the {spread['kind'] if spread else 'spread that is not known'}; {_without_spread(first)}",
        ),
    )
    header = ("method", f"published: {encoder}", f"ours: {ours}", "table of the paper")
    cells = []
    for row, line in pairs:
        method = row["method"] if row["method"] in (line.method, f"erm+{line.method}") else _renamed(row, line)
        as_published = row.get("spread_as_published", {}).get("value")
        number = line.mean + (f" ± {line.spread}" if line.spread else "")
        cells.append((method, number, with_spread(row, as_published), line.table))
    return Sheet("Published (other encoder or protocol) beside ours", about, header, tuple(cells))


def _renamed(row: Summary, line: Published) -> str:
    return f"{row['method']} (published: {line.method})"


def _without_spread(row: Summary) -> str:
    """Our protocol line up to what its ± is, which is another one here."""
    return str(row["protocol"]).partition("; ± is")[0]


def _our_encoder(results: Results) -> str:
    encoder = results["recipe"].get("encoder", {})
    return f"{encoder.get('model', 'unknown encoder')}, {'fine-tuned' if encoder.get('trainable') else 'frozen'}"
