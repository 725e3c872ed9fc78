"""Whether a recipe resumes or grows the run in its directory, and the recipe in a run directory."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xdm_ft.core import ALPHA, ModelKey
from xdm_ft.experiment.plan import Plan
from xdm_ft.features import FeatureSettings
from xdm_ft.recipe.method import with_encoder
from xdm_ft.recipe.settings import Recipe
from xdm_ft.recipe.text import RecipeText, parse
from xdm_ft.results.run import recipe_of
from xdm_ft.runtime.errors import UserError, join_names, plural
from xdm_ft.runtime.watchdog import wait_for_everyone
from xdm_ft.storage import digest, json_digest
from xdm_ft.storage.checkpoint import differences
from xdm_ft.storage.lines import Damaged
from xdm_ft.storage.results_file import unverified_facts
from xdm_ft.storage.run_directory import RESULTS, RunDirectory
from xdm_ft.version import code_of

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger("xdm_ft")
Values = Mapping[str, Any]
GROWN_FROM = "grown_from"  # key of results.json: the generations of earlier recipes
FINAL_FITS = (False, True, "all_seeds")  # values of protocol.final_fit; each trains what those before it train
NEW_DIRECTORY = "set name or output.dir, or delete the directory"
MAX_CHANGES = 10  # differences of a refused recipe that the message names


@dataclass(frozen=True)
class Generation:
    """What determines the models that one recipe of a run directory planned, given all that cannot change."""

    methods: tuple[str, ...]  # labels, sorted
    seeds: tuple[int, ...]
    trials: int

    @classmethod
    def of(cls, recipe: Recipe) -> Generation:
        labels = sorted(item.label for item in recipe.methods)
        return cls(tuple(labels), tuple(recipe.protocol.seeds), recipe.search.trials)

    def to_json(self) -> dict[str, Any]:
        return {"methods": list(self.methods), "seeds": list(self.seeds), "trials": self.trials}

    def plans(self, key: ModelKey) -> bool:
        return key.method in self.methods and key.seed in self.seeds and key.trial < self.trials


def grown_from(results: Values, before: Recipe, recipe: Recipe) -> tuple[Generation, ...]:
    """Returns the generations before that of `recipe`, given the results.json that it resumes, and its recipe `before`.

    They follow from results.json alone, so a kill before it holds the new recipe changes nothing.
    """
    earlier = tuple(
        Generation(tuple(entry["methods"]), tuple(entry["seeds"]), entry["trials"])
        for entry in results.get(GROWN_FROM, ())
    )
    last = Generation.of(before)
    return earlier if last == Generation.of(recipe) else (*earlier, last)


def label_of(item: Values) -> str:
    """Returns the label of an item of `methods`, resolved and as JSON."""
    return str(item["label"] or item["name"])


def labels_of(recipe: Values) -> dict[str, Any]:
    """Returns {label in results: item of `methods`} of a resolved recipe: one per item and encoder."""
    items = {label_of(item): item for item in recipe["methods"]}
    if "encoders" not in recipe:
        return items
    encoders = [str(block["label"] or block["model"]) for block in recipe["encoders"]]
    return {with_encoder(label, encoder): item for encoder in encoders for label, item in items.items()}


def comparable(recipe: Values) -> dict[str, Any]:
    """Returns the recipe without the keys that change no number of a model.

    These are report, output, cluster, analyse, label_curve, and the keys of features except precision, views and cut.
    """
    without = "report", "output", "cluster", "analyse", "label_curve"
    kept = {key: value for key, value in recipe.items() if key not in without}
    features = recipe.get("features")
    if isinstance(features, dict):
        kept["features"] = {key: features.get(key) for key in ("precision", "views", "cut")}
    return kept


def of_method(recipe: Values, label: str) -> dict[str, Any]:
    """Returns the part of a resolved recipe that models of one method depend on, which growing does not change."""
    kept = comparable(recipe) | {"name": None}  # the directory may have been renamed
    kept["protocol"] = {key: value for key, value in kept["protocol"].items() if key not in ("seeds", "final_fit")}
    kept["search"] = {key: value for key, value in kept["search"].items() if key != "trials"}
    kept["methods"] = [labels_of(recipe)[label]]
    return kept


def row_digest(recipe: Recipe, label: str) -> str:
    """Returns the checksum of what the recipe says of the models of a row, which growing does not change."""
    return json_digest(of_method(resolved_for(recipe, label), label))


def resolved_for(recipe: Recipe, label: str) -> dict[str, Any]:
    """Returns the resolved recipe with the row's own augmentation: the recipe's becomes null when it gains methods that
    have another default."""
    item = next(item for item in recipe.methods if item.label == label)
    return recipe.with_augmentation(recipe.augmentation_of(item)).resolved()


def refused_changes(before: Values, now: Values) -> list[str]:
    """Returns the differences between two recipes that keep the second one from growing the first.

    Each one is a dotted key, with the reason where the key alone would not name it. The values may come from an edited
    file and hold anything.
    """
    before, now = comparable(before), comparable(now)
    refused = list[str]()
    for key in differences(before, now):
        block, _, name = key.rpartition(".")
        old, new = (recipe.get(block) if block else recipe for recipe in (before, now))
        if isinstance(old, dict) and isinstance(new, dict):
            refused += _refused_values(key, old.get(name), new.get(name))
        else:
            refused.append(key)
    return refused


def _refused_values(key: str, old: Any, new: Any) -> list[str]:
    """Returns the reasons to refuse a change of one key, of which few may grow; [] if there is none."""
    if key == "name" and isinstance(old, str) and isinstance(new, str):
        return []  # the directory was renamed
    if key == "data.train_augmentation" and new is None:
        return []  # each method has its default, which is that of the run's methods (`inherit_choices`)
    if key == "methods":
        try:
            before, now = ({label_of(item): item for item in items} for items in (old, new))
        except (KeyError, TypeError):  # of an edited file
            return [key]
        missing = [f"methods: no {label}" for label in before if label not in now]
        shared = [label for label in before if label in now]
        return missing + [path for label in shared for path in differences(before[label], now[label], f"{key}.{label}")]
    if key == "protocol.seeds":
        # their order is that of heads in their chunks, and the first one makes an encoder's random weights
        grows = isinstance(old, list) and isinstance(new, list) and new[: len(old)] == old
        return [] if grows else [f"{key}: new ones must follow those of the run, {old}"]
    if key == "search.trials":
        # a draw depends on trial and key alone, by either sampler, so earlier trials stay as they were
        grows = isinstance(old, int) and isinstance(new, int) and old < new
        return [] if grows else [f"{key}: {new}, was {old}"]
    if key == "protocol.final_fit" and old in FINAL_FITS and new in FINAL_FITS:
        return [] if FINAL_FITS.index(old) < FINAL_FITS.index(new) else [key]
    return [key]


def code_of_rows(recipe: Recipe, known: Mapping[str, str], trained: Collection[str] = ()) -> dict[str, str]:
    """Returns {label: checksum of the code of the row's components and augmentations}; of `trained` rows that in
    `known`, if it is there.

    `known`: `environment.code` of results.json.
    """
    code = {
        item.label: digest(
            *(part.code() for part in item.parts), *(code_of(type(of)) for of in recipe.augmentation_of(item))
        )
        for item in recipe.methods
    }
    return code | {label: known[label] for label in code if label in trained and label in known}


def edited_rows(recipe: Recipe, code: Mapping[str, str]) -> list[str]:
    """Returns the labels of rows whose code is no longer that of `code`."""
    return [label for label, now in code_of_rows(recipe, {}).items() if code.get(label, now) != now]


def refuse_mixed_rows(labels: Iterable[str]) -> None:
    """Raises `UserError` if there are rows whose new models would have other code than their earlier ones."""
    if mixed := [*labels]:
        raise UserError(
            f"methods: the code of {join_names(mixed)} has changed since its models trained, and one row must not mix "
            "two methods; undo the edit, or set another name"
        )


def growth(before: Recipe, plan: Plan, looks: int = 0) -> str:
    """Describes in one line what the plan adds to the run of the recipe `before`; "" if it adds nothing.

    `looks`: at the run so far. Another one costs some of α.
    """
    old, protocol = Generation.of(before), plan.recipe.protocol
    added = [model.key for model in plan.models if not model.skipped and not old.plans(model.key)]
    seeds = [seed for seed in protocol.seeds if seed not in old.seeds]
    trials = [*range(old.trials, plan.recipe.search.trials)]
    by_method = Counter(key.method for key in added if key.method not in old.methods)
    parts = [f"{label} ({plural(count, 'model')})" for label, count in by_method.items()]
    more = [key for key in added if key.method in old.methods]
    if count := sum(key.seed in seeds for key in more):
        parts.append(f"seed{_numbers(seeds)} ({plural(count, 'model')}{' of the other methods' if by_method else ''})")
    if count := sum(key.seed not in seeds for key in more):
        parts.append(f"trial{_numbers(trials)} ({plural(count, 'model')})")
    if protocol.final_fit != before.protocol.final_fit:
        parts.append("the final fit")
    new_look = looks and (by_method or seeds)
    price = f"; the next look has α = {ALPHA / 2 ** (looks + 1):g} (xdm-ft explain look)" if new_look else ""
    return f"grows by {', '.join(parts)}{price}" if parts else ""


def _numbers(numbers: Sequence[int]) -> str:
    """Returns " 4", "s 4, 5" or "s 4 to 9", to follow a noun."""
    first, last = numbers[0], numbers[-1]
    text = ", ".join(map(str, numbers))
    if len(numbers) > 3 and list(numbers) == [*range(first, last + 1)]:
        text = f"{first} to {last}"
    return f"{'s' if len(numbers) > 1 else ''} {text}"


@contextmanager
def open_run_directory(recipe: Recipe, accelerator: Accelerator) -> Iterator[RunDirectory]:
    """Yields the run directory `<output.dir>/<name>/`, locked. Writes recipe.yaml if the run begins or grows.

    Raises `UserError` if it holds another recipe's run, or if recipe.yaml is not what a run wrote.
    """
    main = bool(accelerator.is_main_process)
    with RunDirectory(Path(recipe.output.dir) / recipe.name, str(accelerator.process_index), main) as directory:
        if main:
            # before the look at its files: two runs that begin at once would both find an empty folder
            directory.lock(", or set output.dir")
            grows = True
            if directory.is_begun:
                runs = list[tuple[Any, Any]]()
                now = recipe.resolved()
                results = directory.results(lambda run: runs.append((run.get("method"), run.get("status"))))
                before = None if results is None else recipe_of(directory.path / RESULTS, results)
                written = written_recipe(directory.path, None if results is None else results["recipe"]).values
                if changed := refused_changes(written if before is None else before.resolved(), now):
                    more = [f"{len(changed) - MAX_CHANGES} more"] if len(changed) > MAX_CHANGES else []
                    raise UserError(
                        f"{directory.path}: holds the run of another recipe; {NEW_DIRECTORY}. It differs in",
                        *(f"  {change}" for change in [*changed[:MAX_CHANGES], *more]),
                    )
                grows = comparable(written) != comparable(now)
                if results is not None and before is not None and grows:
                    old, new = ((of.protocol.seeds, of.search.trials, of.protocol.final_fit) for of in (before, recipe))
                    if old != new:
                        edited = edited_rows(recipe, results["environment"]["code"])
                        refuse_mixed_rows(label for label in edited if (label, "ok") in runs)
                # `export` runs this file: it must not undo what results.json says was compared
                grows = grows or written.get("report") != now["report"]
            if grows:
                directory.write_text("recipe.yaml", recipe.as_yaml())
        wait_for_everyone(accelerator)
        # behind the barrier, as it looks at the lock file that the main process makes
        directory.begin()
        if main:
            directory.require_writable(["events", "models", "test_images", "training_features"])
        yield directory


def written_recipe(run: Path, recipe: Values | None) -> RecipeText:
    """Returns the recipe.yaml of a run directory, checked against the recipe in its results.json, if there is one.

    The version of xdm_ft that ran wrote both; a later one may know more keys. recipe.yaml may grow that recipe: a run
    that has begun to grow may have been killed before it wrote results.json. Raises `UserError` if it is missing,
    damaged or was edited.
    """
    path, remedy = run / "recipe.yaml", "delete the run directory, or set output.dir"
    if not path.exists():
        raise UserError(f"{path}: is missing, so the recipe of this run is unknown; {remedy}")
    try:
        if not path.is_file():
            raise UserError("it is not a file")
        written = parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, ValueError, UserError) as error:
        raise UserError(f"{path}: is damaged ({error}); {remedy}") from error
    if recipe is None:
        return written
    if changed := refused_changes(recipe, written.values):
        raise UserError(
            f"{path}: was edited or damaged: it differs from the recipe in results.json "
            f"({', '.join(changed[:5])}); undo the edit, or run a copy under another name"
        )
    return written


def inherit_choices(recipe: Recipe) -> Recipe:
    """Returns the recipe with the final fit of the run in its directory and, where it sets none, its augmentation, and
    the precision and batch size of its features, whose defaults depend on the machine.

    An override may have added the final fit.
    """
    try:
        file = Path(recipe.output.dir) / recipe.name / RESULTS
        before = recipe_of(file, unverified_facts(file))
    except (Damaged, KeyError, TypeError, UserError):  # `open_run_directory` reports what is wrong
        return recipe
    final_fit, augmentation = before.protocol.final_fit, before.data_common.train_augmentation
    given = recipe.features.model_dump(include=recipe.features.model_fields_set)
    features = FeatureSettings.model_validate(before.features.model_dump(include={"precision", "batch_size"}) | given)
    if features.precision != recipe.features.precision:
        logger.info("features.precision: %s, as when this run started", features.precision)
    recipe = dataclasses.replace(recipe, features=features)
    kept = recipe.with_augmentation(augmentation) if recipe.data_common.train_augmentation is None else recipe
    labels = [item.label for item in before.methods]
    begun = [item for item in recipe.methods if item.label in labels]
    if any(kept.augmentation_of(item) != recipe.augmentation_of(item) for item in begun):
        logger.info("data.train_augmentation: %s for all methods, as when this run started", augmentation)
        recipe = kept
    protocol = recipe.protocol.model_copy(update={"final_fit": final_fit})
    fits_more = FINAL_FITS.index(final_fit) > FINAL_FITS.index(recipe.protocol.final_fit)
    return dataclasses.replace(recipe, protocol=protocol) if fits_more else recipe
