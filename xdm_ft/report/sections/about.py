"""What the run was made of: its data, environment and recipe; and how to read the reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from xdm_ft.evaluation.records import set_name
from xdm_ft.report.finished import Run
from xdm_ft.report.manual import how_to_read
from xdm_ft.report.section import Cell, Section, Table, count_cell, texts
from xdm_ft.report.words import without_folders
from xdm_ft.runtime.errors import plural

MAX_CLASSES = 60  # that have a column each; of more, each domain has its number of classes and images


def data(run: Run) -> Section | None:
    """Faults of the data hold names of image files, which stand in the report only with `report.images`."""
    counts, classes = _counts(run)
    faults = [str(line) for line in run.results.get("findings", ())]
    total = run.results["environment"].get("data", {}).get("images")
    if not counts and total is None:
        return None
    about = f"{run.results['recipe']['data']['name']}" + (f", {plural(total, 'image')}" if total is not None else "")
    groups = run.results.get("data", {}).get("groups")
    if groups is not None:
        about += f" in {plural(groups, 'group')} (patients, slides or sequences), which no split divides"
    complete = "data" in run.results or sum(int(of.sum()) for of in counts.values()) == total
    only = "" if complete else " Only held-out domains are counted: this run did not keep the others."
    briefly = [line.partition(":")[0] + ": details are in results.json" for line in faults]
    return Section(
        id="data",
        title="Data",
        about=f"{about}. {plural(len(faults), 'fault') if faults else 'No fault'} of the data was found.{only}",
        tables=[_table(counts, classes)] if counts else [],
        notes=faults if run.shows_images else briefly,
    )


def _counts(run: Run) -> tuple[dict[str, np.ndarray], list[str]]:
    """Returns the images of every class per domain, {domain: [C]}, and the names of the classes."""
    kept = run.results.get("data")
    if kept is not None:
        return {domain: np.array(of) for domain, of in kept["images"].items()}, list(kept["classes"])
    counts = {}
    for held in run.held_out_sets:
        record = next(record for record in run.records if record.test_domains == held)
        counts[set_name(held)] = np.bincount(run.images(record).labels, minlength=len(run.class_names))
    return counts, run.class_names


def _table(counts: Mapping[str, np.ndarray], classes: list[str]) -> Table:
    if len(classes) > MAX_CLASSES:
        header = ["domain", "images", "classes with images", "smallest class", "largest class"]
        rows = [[Cell(domain), *map(count_cell, _sizes(of))] for domain, of in counts.items()]
        return Table("Images per domain.", header, rows)
    rows = [[Cell(domain), *(count_cell(int(n)) for n in (of.sum(), *of))] for domain, of in counts.items()]
    return Table("Images per domain and class.", ["domain", "all", *classes], rows)


def _sizes(of_classes: np.ndarray) -> tuple[int, int, int, int]:
    present = of_classes[of_classes > 0]
    return int(of_classes.sum()), len(present), int(present.min(initial=of_classes.max())), int(of_classes.max())


def reading(run: Run) -> Section | None:
    words = how_to_read(run.results)
    about = "What the numbers of report.html and results.md mean. The command xdm-ft explain prints it too."
    table = Table("Words and numbers.", ["word", "meaning"], [texts(*item) for item in words.items()], sortable=False)
    return Section("reading", "How to read the numbers", about, tables=[table], folded=True) if words else None


def environment(run: Run) -> Section:
    without_encoders = {key: value for key, value in run.results["environment"].items() if key != "encoders"}
    rows = [texts(key, value) for key, value in _flat(without_encoders)]
    about = "Software, hardware, and the checksums of data and weights that the models were trained with."
    table = Table("Environment of the run.", ["what", "value"], rows, sortable=False)
    return Section("environment", "Environment", about, tables=[table], folded=True)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def recipe(run: Run) -> Section:
    import yaml

    made, shown = run.results["recipe"], without_folders(run.results["recipe"])
    text = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True, width=100).rstrip("\n")
    about = "Every key of the recipe with its value, defaults included. A file with this text makes the same models."
    if shown != made:
        about = (
            "Every key of the recipe with its value, defaults included. Paths of the machine that made the run are "
            "shortened to their last name; recipe.yaml in the run directory has them whole."
        )
    return Section("recipe", "Recipe", about, code=text, folded=True)
