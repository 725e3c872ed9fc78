"""What the run was made of: its data, environment and recipe; and how to read the page."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from xdm_ft.report.finished import Run
from xdm_ft.report.how_to_read import how_to_read
from xdm_ft.report.markdown import flat, without_encoders
from xdm_ft.report.page import numbers
from xdm_ft.report.page.panel import Cell, Panel, Table
from xdm_ft.report.page.places import without_folders
from xdm_ft.runtime.errors import plural

CLASSES = 60  # classes, at most, that have a column each; of more, each domain has its number of classes and images


def data(run: Run, images: bool) -> Panel | None:
    """`images`: whether names of image files may stand in the page, which the faults of the data hold."""
    counts, classes = _counts(run)
    faults = [str(line) for line in run.results.get("findings", ())]
    total = run.results["environment"].get("data", {}).get("images")
    if not counts and total is None:
        return None
    block = run.results["recipe"]["data"]
    about = f"{block['name']}" + (f", {plural(total, 'image')}" if total is not None else "")
    groups = run.results.get("data", {}).get("groups")
    if groups is not None:
        about += f" in {plural(groups, 'group')} (patients, slides or sequences), which no split divides"
    complete = "data" in run.results or sum(int(of.sum()) for of in counts.values()) == total
    only = "" if complete else " Only held-out domains are counted: this run did not keep the others."
    tables = [_table(counts, classes)] if counts else []
    return Panel(
        id="data",
        title="Data",
        about=f"{about}. {plural(len(faults), 'fault') if faults else 'No fault'} of the data was found.{only}",
        tables=tables,
        notes=faults if images else [line.partition(":")[0] + ": details are in results.json" for line in faults],
    )


def _counts(run: Run) -> tuple[dict[str, np.ndarray], list[str]]:
    """Images of every class per domain, {domain: [C]}, and the names of the classes."""
    kept = run.results.get("data")
    if kept is not None:
        return {domain: np.array(of) for domain, of in kept["images"].items()}, list(kept["classes"])
    found = {}
    for held in numbers.held_out_sets(run):
        record = next(record for record in run.records if record.test_domains == held)
        found[numbers.set_name(held)] = np.bincount(run.images(record).labels, minlength=len(run.class_names))
    return found, run.class_names


def _table(counts: Mapping[str, np.ndarray], classes: list[str]) -> Table:
    if len(classes) > CLASSES:
        header = ["domain", "images", "classes with images", "smallest class", "largest class"]
        rows = [[Cell(domain), *map(_count, _sizes(of))] for domain, of in counts.items()]
        return Table("Images per domain.", header, rows)
    rows = [[Cell(domain), _count(int(of.sum())), *(_count(int(n)) for n in of)] for domain, of in counts.items()]
    return Table("Images per domain and class.", ["domain", "all", *classes], rows)


def _sizes(of: np.ndarray) -> tuple[int, int, int, int]:
    present = of[of > 0]
    return int(of.sum()), len(present), int(present.min(initial=of.max())), int(of.max())


def _count(value: int) -> Cell:
    return Cell(f"{value}", value)


def reading(run: Run) -> Panel | None:
    paragraphs = how_to_read(run.results)
    if not paragraphs:
        return None
    rows = [[Cell(one.title), Cell(one.text)] for one in paragraphs]
    about = "What the numbers of this page and of results.md mean. The command xdm-ft explain prints it too."
    table = Table("Words and numbers.", ["word", "meaning"], rows, sortable=False)
    return Panel(id="reading", title="How to read the numbers", about=about, tables=[table], folded=True)


def environment(run: Run) -> Panel | None:
    rows = [[Cell(key), Cell(str(value))] for key, value in flat(without_encoders(run.results["environment"]))]
    about = "Software, hardware, and the checksums of data and weights that the models were trained with."
    table = Table("Environment of the run.", ["what", "value"], rows, sortable=False)
    return Panel(id="environment", title="Environment", about=about, tables=[table], folded=True)


def recipe(run: Run) -> Panel | None:
    import yaml

    made, shown = run.results["recipe"], without_folders(run.results["recipe"])
    text = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True, width=100).rstrip("\n")
    about = "Every key of the recipe with its value, defaults included. A file with this text makes the same models."
    if shown != made:
        about = (
            "Every key of the recipe with its value, defaults included. Paths of the machine that made the run are "
            "shortened to their last name; recipe.yaml in the run directory has them whole."
        )
    return Panel(id="recipe", title="Recipe", about=about, code=text, folded=True)
