"""What the run was made of: its data, environment and recipe; and how to read the reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

import numpy as np

from xdm_ft.evaluation.records import set_name
from xdm_ft.report.finished import Run
from xdm_ft.report.manual import how_to_read
from xdm_ft.report.section import Section, Table, cells
from xdm_ft.runtime.errors import plural

MAX_CLASSES = 60  # that have a column each; of more, each domain has its number of classes and images


def data(run: Run) -> Section | None:
    """Faults of the data hold names of image files, which stand in the report only with `report.images`."""
    saved = run.results.get("data")
    classes = run.class_names if saved is None else list(saved["classes"])
    counts: dict[str, np.ndarray] = {}  # {domain: [C]}
    if saved is not None:
        counts = {domain: np.array(of_classes) for domain, of_classes in saved["images"].items()}
    else:
        for record in run.records:
            if set_name(record.test_domains) not in counts:
                labels = run.images(record).labels
                counts[set_name(record.test_domains)] = np.bincount(labels, minlength=len(classes))
    total = run.results["environment"].get("data", {}).get("images")
    if not counts and total is None:
        return None

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

    faults = [str(line) for line in run.results.get("findings", ())]
    about = f"{run.results['recipe']['data']['name']}" + (f", {plural(total, 'image')}" if total is not None else "")
    groups = run.results.get("data", {}).get("groups")
    if groups is not None:
        about += f" in {plural(groups, 'group')} (patients, slides or sequences), which no split divides"
    complete = saved is not None or sum(int(of.sum()) for of in counts.values()) == total
    only = "" if complete else " Only held-out domains are counted: this run did not keep the others."
    about += f". {plural(len(faults), 'fault') if faults else 'No fault'} of the data was found.{only}"
    if not run.shows_images:
        faults = [line.partition(":")[0] + ": details are in results.json" for line in faults]
    tables = [Table(caption, header, rows)] if rows else []
    return Section("data", "Data", about, tables=tables, notes=faults)


def reading(run: Run) -> Section | None:
    words = how_to_read(run.results)
    about = "What the numbers of report.html and results.md mean. The command xdm-ft explain prints it too."
    table = Table("Words and numbers.", ["word", "meaning"], [cells(*item) for item in words.items()], sortable=False)
    return Section("reading", "How to read the numbers", about, tables=[table], folded=True) if words else None


def environment(run: Run) -> Section:
    def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
        for key, value in tree.items():
            if isinstance(value, Mapping):
                yield from flat(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", str(value)

    without_encoders = {key: value for key, value in run.results["environment"].items() if key != "encoders"}
    about = "Software, hardware, and the checksums of data and weights that the models were trained with."
    rows = [cells(*item) for item in flat(without_encoders)]
    table = Table("Environment of the run.", ["what", "value"], rows, sortable=False)
    return Section("environment", "Environment", about, tables=[table], folded=True)


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

    shown = without_folders(run.results["recipe"])
    about = "Every key of the recipe with its value, defaults included. "
    if shown == run.results["recipe"]:
        about += "A file with this text makes the same models."
    else:
        about += (
            "Paths of the machine that made the run are shortened to their last name; recipe.yaml in the run directory "
            "has them whole."
        )
    text = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True, width=100).rstrip("\n")
    return Section("recipe", "Recipe", about, code=text, folded=True)
