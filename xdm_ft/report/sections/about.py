"""How to read the tables of a run, and what it was made of: its data, environment and recipe.

glossary.toml holds the words. results.md and the page have those that their tables need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

import numpy as np

from xdm_ft.core import ORACLE
from xdm_ft.protocol.site_class import imbalance
from xdm_ft.report import Section, Table, cells, make_section
from xdm_ft.report.words import in_unit
from xdm_ft.results.run import Run
from xdm_ft.runtime.errors import plural
from xdm_ft.runtime.terminal import glossary

MAX_CLASSES = 60  # that have a column each; of more, each domain has its number of classes and images
GLOSSARY = glossary()


def _is_measured(name: str) -> Callable[[Run], bool]:
    return lambda run: any(getattr(record, name) is not None for record in run.every)


def _is_selected_by(rule: str) -> Callable[[Run], bool]:
    return lambda run: any(row.selection == rule for row in run.rows)


def _is_searched(run: Run) -> bool:
    return any(record.trial > 0 for record in run.every)


def _is_compared(run: Run) -> bool:
    return bool(run.comparisons)


NEEDS: dict[str, Callable[[Run], bool]] = {
    "draws × gradients": lambda run: any(row.budget["gradient_evaluations"] is not None for row in run.rows),
    "mixed steps": _is_measured("mixed_steps"),
    "comparison": _is_compared,
    "verdicts": _is_compared,
    "equal within": lambda run: bool(run.recipe.report.margin),
    "look": lambda run: len(run.looks) > 1,
    **{rule: _is_selected_by(rule) for rule in ("train_val", "val_domain", "cross_domain", ORACLE)},
    "selected hyper-parameters": _is_searched,
    "trained parameters": _is_measured("trained_parameters"),
    "peak memory": _is_measured("peak_memory"),
    "encoders": lambda run: run.recipe.several_encoders,
    **dict.fromkeys(("analysis", "training", "data", "shipping"), lambda run: False),  # words of other tables
    "labels": lambda run: "label_curve" in run.results,
    "published numbers": lambda run: any(row.spread_as_published for row in run.rows),
    "failed, skipped": lambda run: any(record.status != "ok" for record in run.every),
    "at the edge of its range": _is_searched,
    "held out together": lambda run: bool(run.recipe.protocol.together or run.recipe.protocol.folds),
}
"""{group or word: whether tables of these results need it}; those that are not here are always needed"""


def how_to_read(run: Run) -> dict[str, str]:
    """Returns {word: what it means} that the tables of a run need, the first on its numbers; {} without a table."""
    metrics = dict.fromkeys(row.metric for row in run.rows)
    if not metrics:
        return {}

    def is_needed(name: str) -> bool:
        return name not in NEEDS or NEEDS[name](run)

    tested_on = f" of {run.results['tested_on']}"
    numbers = {"numbers": f"{', '.join(map(in_unit, metrics))} on test images{tested_on}."}
    groups = [texts for group, texts in GLOSSARY.items() if is_needed(group)]
    return numbers | {word: text for texts in groups for word, text in texts.items() if is_needed(word)}


def reading(run: Run) -> Section | None:
    rows = [cells(*item) for item in how_to_read(run).items()]
    table = Table("Words and numbers.", ["word", "meaning"], rows, sortable=False)
    return make_section("reading", tables=[table]) if rows else None


def data(run: Run) -> Section | None:
    """Faults of the data hold names of image files, which stand in the report only with `report.images`."""
    saved = run.results["data"]
    classes = list(saved["classes"])
    counts = {domain: np.array(of_classes) for domain, of_classes in saved["images"].items()}  # {domain: [C]}

    header, rows = ["domain", "all", *classes], []
    caption = "Images per domain and class."
    if len(classes) > MAX_CLASSES:
        header = ["domain", "images", "classes with images", "smallest class", "largest class"]
        caption = "Images per domain."
    for domain, of in counts.items():
        present, numbers = of[of > 0], [int(of.sum()), *map(int, of)]
        if len(classes) > MAX_CLASSES:
            numbers = [numbers[0], len(present), int(present.min(initial=of.max())), int(of.max())]
        rows.append(cells(domain, *numbers))

    of_methods = [finding for finding in run.results["findings"] if finding.startswith("methods: ")]  # no fault of data
    faults = [finding for finding in run.results["findings"] if finding not in of_methods]
    words = f"{run.results['recipe']['data']['name']}, {plural(run.results['environment']['data']['images'], 'image')}"
    if "groups" in saved:
        divided = ", ".join(saved["divided"])
        words += f" in {plural(saved['groups'], 'group')} (patients, slides or sequences)"
        words += f", of which the split divides {divided}" if divided else ", which no split divides"
    if small := saved.get("small_domains"):
        became = "left out" if run.recipe.data_common.small_domains == "drop" else "joined to one domain"
        words += f"; too small to be held out, and {became}: {', '.join(small)}"
    number = plural(len(faults), "fault") if faults else "No fault"
    # a fault names image files, and a page may be handed on to others
    if not run.recipe.report.images:
        faults = list(map(_without_files, faults))
    tables = [Table(caption, header, rows)] if rows else []
    counted = np.array([*counts.values()], np.int64).reshape(-1, len(classes))
    rare = imbalance(counted, [*counts], classes, run.metric, run.recipe.weighs_classes)
    return make_section("data", tables=tables, notes=[*faults, *of_methods, *rare], data=words, faults=number)


def _without_files(fault: str) -> str:
    """Returns a fault without the names of image files."""
    subject, _, found = fault.partition(": ")
    if subject in ("left out", "intensity"):
        return fault.partition(", the first: ")[0]
    return f"{subject}: {found.partition(': ')[0] if subject == 'groups' else 'details are in results.json'}"


def environment(run: Run) -> Section:
    def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
        for key, value in tree.items():
            if isinstance(value, Mapping):
                yield from flat(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", str(value)

    shown = {key: value for key, value in run.results["environment"].items() if key not in ("encoders", "code")}
    rows = [cells(*item) for item in flat(shown)]
    return make_section(
        "environment", tables=[Table("Environment of the run.", ["what", "value"], rows, sortable=False)]
    )


def recipe(run: Run) -> Section:
    import yaml

    def without_folders(value: Any) -> Any:
        """Returns the value with `…/` and the name for every text that is an absolute path, or one in a home folder."""
        if isinstance(value, Mapping):
            return {key: without_folders(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [without_folders(inner) for inner in value]
        is_path = isinstance(value, str) and value.startswith(("/", "~/")) and "\n" not in value
        return f"…/{PurePath(value).name}" if is_path else value

    shown = without_folders(run.recipe.resolved())
    complete = "A file with this text makes the same models."
    if shown != run.recipe.resolved():
        complete = (
            "Paths of the machine that made the run are shortened to their last name; recipe.yaml in the run directory "
            "has them whole."
        )
    text = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True, width=100).rstrip("\n")
    return make_section("recipe", code=text, complete=complete)
