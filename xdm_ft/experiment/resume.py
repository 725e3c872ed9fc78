"""Resuming: opens the run directory, reads what the interrupted run finished, and refuses another recipe or data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xdm_ft.errors import UserError
from xdm_ft.evaluation.records import Identity, Record
from xdm_ft.experiment.heartbeat import wait_for_everyone
from xdm_ft.recipe.read import Recipe
from xdm_ft.recipe.text import RecipeText, parse
from xdm_ft.storage.checkpoint import differences
from xdm_ft.storage.checksummed import INPUTS
from xdm_ft.storage.run_directory import PREDICTIONS, RunDirectory

if TYPE_CHECKING:
    from accelerate import Accelerator

RECORDS = "records"  # kind of the lines that hold records of models
INPUT_WORDS = {
    "data.content": "images",
    "data.images": "the number of images",
    "data.annotations": "labels, domains or splits of the data",
    "encoder": "the encoder's weights",
    "features": "weights, libraries or settings that determine features",
}


@contextmanager
def opened(recipe: Recipe, accelerator: Accelerator) -> Iterator[RunDirectory]:
    """Yields the run directory `<output.dir>/<name>/`, locked. Raises `UserError` if it holds another recipe's run."""
    path = Path(recipe.output.dir) / recipe.name
    main = bool(accelerator.is_main_process)
    with RunDirectory(path, str(accelerator.process_index), main) as directory:
        if main:
            directory.lock()
            if directory.is_begun:
                _refuse_other_recipe(directory, recipe)
            else:
                directory.write_text("recipe.yaml", recipe.as_yaml())
        wait_for_everyone(accelerator)
        directory.begin()
        if main:
            directory.require_writable(["events", "models", "test_images"])
        yield directory


def _refuse_other_recipe(directory: RunDirectory, recipe: Recipe) -> None:
    """Raises `UserError` if the run was started with another recipe, or if its recipe.yaml is not what it wrote."""
    given, results = comparable(recipe.resolved()), directory.results()
    written = written_recipe(directory.path, results)
    changed = differences(comparable(written.values), given)
    if changed:
        raise UserError(
            f"{directory.path}: holds the run of another recipe (differs in {', '.join(changed[:5])}); "
            "set name or output.dir, or delete the directory"
        )


def written_recipe(run: Path, results: Mapping[str, Any] | None) -> RecipeText:
    """Returns the recipe.yaml of a run directory, checked against the recipe in its results.json, if there is one.

    Raises `UserError` if it is missing, damaged or was edited.
    """
    path, remedy = run / "recipe.yaml", "delete the run directory, or set output.dir"
    if not path.exists():
        raise UserError(f"{path}: is missing, so the recipe of this run is unknown; {remedy}")
    try:
        if not path.is_file():
            raise UserError("it is no file")
        written = parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, ValueError, UserError) as error:
        raise UserError(f"{path}: is damaged ({error}); {remedy}") from error
    changed = [] if results is None else differences(comparable(results["recipe"]), comparable(written.values))
    if changed:
        raise UserError(
            f"{path}: was edited or is damaged: it differs from the recipe in results.json "
            f"({', '.join(changed[:5])}); undo the edit, or run the edited copy under another name"
        )
    return written


def comparable(recipe: dict[str, Any]) -> dict[str, Any]:
    """Returns the recipe without the keys that change no number: output, and features except precision and views."""
    kept = {key: value for key, value in recipe.items() if key != "output"}
    features = recipe.get("features")
    if isinstance(features, dict):
        kept["features"] = {"precision": features.get("precision"), "views": features.get("views", 0)}
    return kept


@dataclass(frozen=True)
class Earlier:
    """What the interrupted run finished."""

    records: dict[Identity, Record] = field(default_factory=dict)  # of models whose files are intact
    final_fit: dict[str, Any] | None = None
    environment: dict[str, Any] | None = None  # None: results.json was not written yet

    def refuse_other_inputs(self, path: Path, inputs: dict[str, Any]) -> None:
        """Raises `UserError` if models of the run directory `path` were trained on other inputs than `inputs`."""
        if self.environment is None:
            return
        changed = differences({key: self.environment[key] for key in INPUTS if key in self.environment}, inputs)
        if changed:
            named = [what for key, what in INPUT_WORDS.items() if any(one.startswith(key) for one in changed)]
            if len(named) > 1 and any(one.startswith("encoder") for one in changed):
                named.remove(INPUT_WORDS["features"])  # they follow from the weights
            raise UserError(
                f"{path}: {' and '.join(named)} have changed since this run started ({', '.join(changed)}); "
                "set name or output.dir, or delete the directory"
            )


def earlier(directory: RunDirectory, accelerator: Accelerator) -> Earlier:
    """Reads what the interrupted run finished. Models that failed or whose files are damaged are left out, so that they
    are trained again. Raises `UserError` if results.json is damaged, or an earlier version wrote it."""
    results = directory.results() or {"runs": []}
    # lines are written for every model, results.json only now and then
    path = directory.path / "results.json"
    known = {record.key: record for record in records_in(path, results["runs"])} | recorded(directory)
    whole = {key: record for key, record in known.items() if _is_whole(record, directory)}
    final = results.get("final_fit")
    if final is not None and not ("weights" in final and directory.is_intact(final["weights"])):
        final = None
    wait_for_everyone(accelerator)  # all processes must have read before the main one writes
    return Earlier(whole, final, results.get("environment"))


def records_in(path: Path, entries: Iterable[Any]) -> Iterator[Record]:
    """Yields the records of JSON values that were read from `path`. Raises `UserError` if one is not a record."""
    for entry in entries:
        try:
            yield Record.from_json(entry)
        except (KeyError, TypeError, AttributeError) as error:
            what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise UserError(
                f"{path}: holds a record of another version ({what}); set another name or output.dir"
            ) from error


def recorded(directory: RunDirectory) -> dict[Identity, Record]:
    """Returns the records in the lines of all processes, including those of failed and skipped models."""
    known: dict[Identity, Record] = {}
    for record in records_in(directory.path / "state" / RECORDS, directory.lines(RECORDS)):
        # the lines of one process are in order, those of two are not: a model that failed may have been trained again
        if record.status == "ok" or record.key not in known or known[record.key].status != "ok":
            known[record.key] = record
    return known


def _is_whole(record: Record, directory: RunDirectory) -> bool:
    """Returns whether the model was trained without failure and all of its files are intact."""
    files = [f"{directory.model_folder(*record.key)}/{PREDICTIONS}"]
    files += [pick.weights for pick in record.selected.values()]
    return record.status == "ok" and all(directory.is_intact(file) for file in dict.fromkeys(files))
