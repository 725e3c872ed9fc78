"""Growing: a run directory accepts a recipe with more methods, seeds or trials, or a final fit, than its earlier one.

Only the new models are trained. Which heads share a chunk affects their rounding, so each model keeps the chunk that
the recipe which first planned it gave it: models of a method share chunks only within their generation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xdm_ft.evaluation.records import Identity, with_encoder
from xdm_ft.experiment.plan import Plan
from xdm_ft.protocol.splits import AUTO, LOOKS
from xdm_ft.report.table_rows import encoder_label
from xdm_ft.storage.checkpoint import differences

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

    def plans(self, key: Identity) -> bool:
        method, _, seed, trial = key
        return method in self.methods and seed in self.seeds and trial < self.trials


def grown_from(results: Values, recipe: Values) -> tuple[Generation, ...]:
    """Returns the generations before that of `recipe`, given the results.json that it resumes. The first comes first.

    They follow from results.json alone, so a kill before it holds the new recipe changes nothing.
    """
    earlier = tuple(Generation.from_json(found) for found in results.get(GROWN_FROM, ()))
    last = Generation.of(results["recipe"])
    return earlier if last == Generation.of(recipe) else (*earlier, last)


def generation(key: Identity, earlier: Sequence[Generation]) -> int:
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
