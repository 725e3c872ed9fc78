"""What a run directory holds of earlier runs, and whether a recipe resumes or grows them."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xdm_ft.evaluation.looks import Look, looks_of
from xdm_ft.evaluation.records import Entries, ModelKey, Record, record_in, with_encoder
from xdm_ft.experiment.plan import Plan
from xdm_ft.features import FeatureSettings
from xdm_ft.protocol.splits import AUTO, LOOKS
from xdm_ft.recipe.settings import Recipe
from xdm_ft.recipe.text import RecipeText, parse
from xdm_ft.report.comparisons import all_comparisons
from xdm_ft.report.finished import encoder_label, final_fits_of
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.progress import progress
from xdm_ft.runtime.watchdog import wait_for_everyone
from xdm_ft.storage.checkpoint import differences
from xdm_ft.storage.lines import Damaged
from xdm_ft.storage.names import predictions_in
from xdm_ft.storage.results_file import INPUTS, unverified_facts
from xdm_ft.storage.run_directory import RunDirectory

if TYPE_CHECKING:
    from accelerate import Accelerator


logger = logging.getLogger("xdm_ft")
GROWN_FROM = "grown_from"  # key of results.json: the generations of earlier recipes
Values = Mapping[str, Any]
FINAL_FITS = (False, True, "all_seeds")  # values of protocol.final_fit; each trains what those before it train


@dataclass(frozen=True)
class Generation:
    """What determines the models that one recipe of a run directory planned, given all that can not change."""

    methods: tuple[str, ...]  # labels, sorted
    seeds: tuple[int, ...]
    trials: int

    @classmethod
    def of(cls, recipe: Values) -> Generation:
        return cls(tuple(sorted(labels_of(recipe))), tuple(recipe["protocol"]["seeds"]), recipe["search"]["trials"])

    @classmethod
    def from_json(cls, found: Values) -> Generation:
        return cls(tuple(found["methods"]), tuple(found["seeds"]), found["trials"])

    def to_json(self) -> dict[str, Any]:
        return {"methods": list(self.methods), "seeds": list(self.seeds), "trials": self.trials}

    def plans(self, key: ModelKey) -> bool:
        method, _, seed, trial = key
        return method in self.methods and seed in self.seeds and trial < self.trials


def grown_from(results: Values, recipe: Values) -> tuple[Generation, ...]:
    """Returns the generations before that of `recipe`, given the results.json that it resumes. The first comes first.

    They follow from results.json alone, so a kill before it holds the new recipe changes nothing.
    """
    earlier = tuple(Generation.from_json(found) for found in results.get(GROWN_FROM, ()))
    last = Generation.of(results["recipe"])
    return earlier if last == Generation.of(recipe) else (*earlier, last)


def generation(key: ModelKey, earlier: Sequence[Generation]) -> int:
    """Returns the number of the generation that planned the model; `len(earlier)` is the present one."""
    return next((number for number, one in enumerate(earlier) if one.plans(key)), len(earlier))


def label_of(item: Values) -> str:
    """Returns the name in results of an item of `methods`, as a resolved recipe holds it."""
    return str(item["label"] or item["name"])


def labels_of(recipe: Values) -> dict[str, Any]:
    """Returns {label in results: item of `methods`} of a resolved recipe: one per item and encoder."""
    items = {label_of(item): item for item in recipe["methods"]}
    if "encoders" not in recipe:
        return items
    encoders = map(encoder_label, recipe["encoders"])
    return {with_encoder(label, encoder): item for encoder in encoders for label, item in items.items()}


def comparable(recipe: Values) -> dict[str, Any]:
    """Returns the recipe without the keys that change no number of a model.

    These are report, output, cluster and analyse, and the keys of features except precision, views and cut.
    """
    kept = {key: value for key, value in recipe.items() if key not in ("report", "output", "cluster", "analyse")}
    features = recipe.get("features")
    if isinstance(features, dict):
        kept["features"] = {key: features.get(key) for key in ("precision", "views", "cut")}
    return kept


def of_method(recipe: Values, label: str) -> dict[str, Any]:
    """Returns the part of a resolved recipe that models of one method depend on, which growing does not change."""
    kept = comparable(recipe)
    kept["protocol"] = {key: value for key, value in kept["protocol"].items() if key not in ("seeds", "final_fit")}
    kept["search"] = {key: value for key, value in kept["search"].items() if key != "trials"}
    kept["methods"] = [labels_of(recipe)[label]]
    return kept


def refused_changes(before: Values, now: Values) -> list[str]:
    """Returns the differences between two recipes that keep the second one from growing the first.

    Each one is a dotted key, with the reason where the key alone would not name it. The values may come from an edited
    file and hold anything.
    """
    before, now = comparable(before), comparable(now)
    found = []
    for key in differences(before, now):
        block, _, name = key.rpartition(".")
        old, new = (recipe.get(block) if block else recipe for recipe in (before, now))
        if key in _GROWING and isinstance(old, dict) and isinstance(new, dict):
            found += _GROWING[key](old.get(name), new.get(name))
        else:
            found.append(key)
    return found


def _methods(before: Any, now: Any) -> list[str]:
    try:
        old, new = ({label_of(item): item for item in items} for items in (before, now))
    except (KeyError, TypeError):  # of an edited file
        return ["methods"]
    missing = [f"methods: no {label}" for label in old if label not in new]
    shared = [label for label in old if label in new]
    return missing + [key for label in shared for key in differences(old[label], new[label], f"methods.{label}")]


def _seeds(before: Any, now: Any) -> list[str]:
    """`auto` begins with the seeds of its first look, and may go on to those of its last one."""
    before, now = ([*range(n)] if seeds == AUTO else seeds for seeds, n in ((before, LOOKS[0]), (now, LOOKS[-1])))
    # the order of the seeds is that of heads in their chunks, and the first one makes an encoder's random weights
    if isinstance(before, list) and isinstance(now, list) and now[: len(before)] == before:
        return []
    return ["protocol.seeds: new ones must follow those of the run"]


def _trials(before: Any, now: Any) -> list[str]:
    """A draw depends on trial and key alone, by either sampler, so earlier trials stay as they were."""
    grows = isinstance(before, int) and isinstance(now, int) and before < now
    return [] if grows else [f"search.trials: {now}, was {before}"]


def _final_fit(before: Any, now: Any) -> list[str]:
    known = before in FINAL_FITS and now in FINAL_FITS  # not in an edited file
    return [] if known and FINAL_FITS.index(before) < FINAL_FITS.index(now) else ["protocol.final_fit"]


def _augmentation(before: Any, now: Any) -> list[str]:
    """Null: each method has its default, which is that of the run's methods (`resume.keeping_choices`)."""
    return [] if now is None else ["data.train_augmentation"]


_GROWING = {
    "data.train_augmentation": _augmentation,
    "methods": _methods,
    "protocol.seeds": _seeds,
    "search.trials": _trials,
    "protocol.final_fit": _final_fit,
}
"""{dotted key that may grow: function (earlier value, new value) → the reasons to refuse the new value}"""


def growth(before: Values, plan: Plan) -> str:
    """Describes in one line what the plan adds to the run of the recipe `before`; "" if it adds nothing."""
    old, parts = Generation.of(before), []
    added = [model.key for model in plan.models if not model.skipped and not old.plans(model.key)]
    of_methods = Counter(label for label, *_ in added if label not in old.methods)
    parts += [f"{label} ({_models(count)})" for label, count in of_methods.items()]
    more = [key for key in added if key[0] in old.methods]
    seeds = [seed for seed in plan.recipe.protocol.seeds if seed not in old.seeds]
    if count := sum(seed in seeds for _, _, seed, _ in more):
        parts.append(f"seed{'s' if len(seeds) > 1 else ''} {_numbers(seeds)} ({_models(count)} of the other methods)")
    trials = [*range(old.trials, plan.recipe.search.trials)]
    if count := sum(seed not in seeds for _, _, seed, _ in more):
        parts.append(f"trial{'s' if len(trials) > 1 else ''} {_numbers(trials)} ({_models(count)})")
    if plan.recipe.protocol.final_fit != before["protocol"]["final_fit"]:
        parts.append("the final fit")
    return f"grows by {', '.join(parts)}" if parts else ""


def _models(count: int) -> str:
    return f"{count} model{'' if count == 1 else 's'}"


def _numbers(numbers: Sequence[int]) -> str:
    first, last = numbers[0], numbers[-1]
    if len(numbers) > 3 and list(numbers) == [*range(first, last + 1)]:
        return f"{first} to {last}"
    return ", ".join(map(str, numbers))


NEW_DIRECTORY = "set name or output.dir, or delete the directory"
NAMED_CHANGES = 10  # differences, at most, that a refused recipe is told
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
            if not directory.is_begun or _grows(directory, recipe):
                directory.write_text("recipe.yaml", recipe.as_yaml())
        wait_for_everyone(accelerator)
        directory.begin()
        if main:
            directory.require_writable(["events", "models", "test_images", "training_features"])
        yield directory


def keeping_choices(recipe: Recipe) -> Recipe:
    """Returns the recipe with the final fit of the run in its directory and, where it sets none, its augmentation, and
    the precision and batch size of its features, whose defaults depend on the machine.

    With `protocol.seeds: auto` it has the seeds of the first look that has all seeds of the run. An override, or an
    export by an earlier version, may have added the final fit. Earlier versions trained all methods without
    augmentation if one of them read what is cached.
    """
    try:
        before = unverified_facts(Path(recipe.output.dir) / recipe.name / "results.json")["recipe"]
        final_fit, augmentation = before["protocol"]["final_fit"], before["data"].get("train_augmentation")
        more = FINAL_FITS.index(final_fit) > FINAL_FITS.index(recipe.protocol.final_fit)
        labels = labels_of(before)
        seeds = before["protocol"]["seeds"]
        begun_looks = [count for count in LOOKS if [*range(count)][: len(seeds)] == seeds]
        recipe = recipe.with_seeds(begun_looks[0]) if recipe.auto_seeds and begun_looks else recipe
        given = recipe.features.model_dump(include=recipe.features.model_fields_set)
        of_run = {key: before["features"][key] for key in ("precision", "batch_size")}
        features = FeatureSettings.model_validate(of_run | given)
        if features.precision != recipe.features.precision:
            logger.info("features.precision: %s, as when this run started", features.precision)
        recipe = dataclasses.replace(recipe, features=features)
        kept = recipe.with_augmentation(augmentation) if recipe.data_common.train_augmentation is None else recipe
    except (Damaged, KeyError, TypeError, ValueError, AttributeError):  # `opened` reports what is wrong with it
        return recipe
    begun = [item for item in recipe.methods if item.label in labels]
    if any(kept.augmentation_of(item) != recipe.augmentation_of(item) for item in begun):
        logger.info("data.train_augmentation: %s for all methods, as when this run started", augmentation)
        recipe = kept
    protocol = recipe.protocol.model_copy(update={"final_fit": final_fit})
    return dataclasses.replace(recipe, protocol=protocol) if more else recipe


def _grows(directory: RunDirectory, recipe: Recipe) -> bool:
    """Returns whether the recipe differs from recipe.yaml in more than what changes no number.

    Raises `UserError` if it does not grow the recipe of the run, or if recipe.yaml is not what a run wrote.
    """
    given, results = recipe.written(), directory.results(lambda run: None)
    written = written_recipe(directory.path, results).values
    changed = refused_changes(written if results is None else results["recipe"], given)
    if changed:
        more = [f"{len(changed) - NAMED_CHANGES} more"] if len(changed) > NAMED_CHANGES else []
        raise UserError(
            f"{directory.path}: holds the run of another recipe; {NEW_DIRECTORY}. It differs in",
            *(f"  {change}" for change in [*changed[:NAMED_CHANGES], *more]),
        )
    return comparable(written) != comparable(given)


def written_recipe(run: Path, results: Mapping[str, Any] | None) -> RecipeText:
    """Returns the recipe.yaml of a run directory, checked against the recipe in its results.json, if there is one.

    Its `protocol.seeds: auto` is replaced by the seeds in results.json. It may grow that recipe: a run that has begun
    to grow may have been killed before it wrote results.json. Raises `UserError` if it is missing, damaged or was
    edited.
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
    changed = [] if results is None else refused_changes(results["recipe"], written.values)
    if changed:
        raise UserError(
            f"{path}: was edited or is damaged: it differs from the recipe in results.json "
            f"({', '.join(changed[:5])}); undo the edit, or run the edited copy under another name"
        )
    if results is not None and written.values["protocol"]["seeds"] == AUTO:
        written.values["protocol"]["seeds"] = results["recipe"]["protocol"]["seeds"]
    return written


@dataclass(frozen=True)
class Earlier:
    """What earlier runs in the directory finished."""

    records: dict[ModelKey, Record] = field(default_factory=dict)  # of models whose files are intact
    final_fits: dict[str, dict[str, Any]] = field(default_factory=dict)  # {method: final fit}, with intact weights
    environment: dict[str, Any] | None = None  # None: results.json was not written yet
    recipe: dict[str, Any] | None = None  # of results.json
    generations: tuple[Generation, ...] = ()  # of the recipes before the present one
    looks: list[Look] = field(default_factory=list)  # at the results so far

    def refuse_other_inputs(self, path: Path, inputs: dict[str, Any], remedy: str = NEW_DIRECTORY) -> None:
        """Raises `UserError` if models of the run directory `path` were trained on other inputs than `inputs`."""
        if self.environment is None:
            return
        before = {key: self.environment[key] for key in INPUTS if key in self.environment}
        changed = differences(*_shared(before, inputs))
        if changed:
            named = [what for key, what in INPUT_WORDS.items() if any(one.startswith(key) for one in changed)]
            if len(named) > 1 and any(one.startswith("encoder") for one in changed):
                named.remove(INPUT_WORDS["features"])  # they follow from the weights
            raise UserError(
                f"{path}: {' and '.join(named)} have changed since this run started ({', '.join(changed)}); {remedy}"
            )


def _shared(before: Any, now: Any) -> tuple[Any, Any]:
    """Returns the parts of both that both have: a run that grows may read features or a cut for the first time."""
    if not isinstance(before, dict) or not isinstance(now, dict):
        return before, now
    pairs = {key: _shared(before[key], now[key]) for key in before if key in now}
    return {key: pair[0] for key, pair in pairs.items()}, {key: pair[1] for key, pair in pairs.items()}


def earlier(directory: RunDirectory, recipe: Recipe, accelerator: Accelerator) -> Earlier:
    """Reads what earlier runs in the directory finished, for a run of `recipe`.

    Models that failed or whose files are damaged are left out, so that they are trained again. Raises `UserError` if
    results.json is damaged, or an earlier version wrote it.
    """
    found = directory.results(record_in(directory.path / "results.json"))
    results = {"runs": []} if found is None else found
    # lines are written for every model, results.json only now and then
    known = {record.key: record for record in results["runs"]} | recorded(directory)
    whole = set[ModelKey]()
    with progress("checking", len(known), "models", bool(accelerator.is_main_process)) as bar:
        for record in sorted(known.values(), key=lambda one: one.folder):  # heads that share a file in a row
            if _is_whole(record, directory):
                whole.add(record.key)
            bar.advance()
    records = {key: record for key, record in known.items() if key in whole}
    final_fits = final_fits_of(results)
    final_fits = {
        method: fit
        for method, fit in final_fits.items()
        if "weights" in fit and directory.verify_or_warn(fit["weights"])
    }
    wait_for_everyone(accelerator)  # all processes must have read before the main one writes
    generations = () if found is None else grown_from(found, recipe.resolved())
    looks = [] if found is None else looks_of(found, all_comparisons(found | {"runs": Entries(found["runs"])}))
    return Earlier(records, final_fits, results.get("environment"), results.get("recipe"), generations, looks)


def recorded(directory: RunDirectory) -> dict[ModelKey, Record]:
    """Returns the records in the lines of all processes, including those of failed and skipped models."""
    known: dict[ModelKey, Record] = {}
    for record in map(record_in(directory.path / "state" / RECORDS), directory.lines(RECORDS)):
        # the lines of one process are in order, those of two are not: a model that failed, or whose files were damaged,
        # may have been trained again
        before = known.get(record.key)
        if before is None or before.status != "ok" or (record.status == "ok" and _replaces(record, before, directory)):
            known[record.key] = record
    return known


def _replaces(record: Record, other: Record, directory: RunDirectory) -> bool:
    """Returns whether a record counts instead of another of the same model.

    Heads of a large run may lie elsewhere after they were trained again on another kind of device.
    """
    return record.folder == other.folder or not _is_whole(other, directory, "its model was trained again")


def _is_whole(record: Record, directory: RunDirectory, remedy: str | None = None) -> bool:
    """Returns whether the model was trained without failure and all of its files are intact."""
    files = [predictions_in(record.folder), *(pick.weights for pick in record.selected.values())]
    return record.status == "ok" and all(directory.verify_or_warn(file, remedy) for file in dict.fromkeys(files))
