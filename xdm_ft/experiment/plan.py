"""The plan of a run: the splits, and one model per method × held-out domain × seed × trial."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from xdm_ft.core import Annotations, Criteria, ModelKey, Task, set_name
from xdm_ft.evaluation.metrics import is_defined
from xdm_ft.features.cache import cache_folder
from xdm_ft.features.hashes import extremes_of, hash_files
from xdm_ft.images import ImageDataset, Range
from xdm_ft.images.decode import NAMED_AT_MOST
from xdm_ft.images.facts import automatic
from xdm_ft.protocol.samplers import steps_of
from xdm_ft.protocol.site_class import images_per_class
from xdm_ft.protocol.small_domains import JOINED, without_small_domains
from xdm_ft.protocol.splits import LEFT_OUT, Split, all_domains, also_measuring, rules_of, splits, without
from xdm_ft.recipe.components import Component
from xdm_ft.recipe.method import MethodItem, draw_item, draw_training, unfreeze_problem
from xdm_ft.recipe.search import TRAINING_KEYS, Distribution
from xdm_ft.recipe.settings import Recipe
from xdm_ft.runtime.errors import UserError, did_you_mean, join_names, plural
from xdm_ft.storage import digest
from xdm_ft.training import Training
from xdm_ft.training.selection import BY_DOMAIN, LOSS_SPLIT, defined_domains

logger = logging.getLogger("xdm_ft")
MAX_MODELS = 200  # in a run where each head has files and curves of its own


@dataclass(frozen=True)
class PlannedModel:
    """A model to train. Each one becomes a record in results.json, unless it is an extra one of `cross_domain`."""

    key: ModelKey
    item: MethodItem  # with the settings of this trial, as `training`
    training: Training
    split: Split
    steps: int
    skipped: str | None = None  # the reason if it cannot be trained
    needed_by: tuple[ModelKey, ...] = ()
    """Of an extra model: for each of its evaluation splits, in order, the planned model that needs it. It has one more
    held-out domain, on which it is measured, and is not kept."""


@dataclass(frozen=True)
class Plan:
    recipe: Recipe
    dataset: ImageDataset
    models: tuple[PlannedModel, ...]
    extra: tuple[PlannedModel, ...]
    rules: tuple[str, ...]  # selection rules, the recipe's own first
    notes: tuple[str, ...]  # remarks on splits and labels, for the protocol line

    @cached_property
    def by_key(self) -> dict[ModelKey, PlannedModel]:
        return {model.key: model for model in self.models}

    def item(self, label: str) -> MethodItem:
        """Returns the recipe's method of this label, without settings that a trial drew."""
        return next(item for item in self.recipe.methods if item.label == label)

    @property
    def is_large(self) -> bool:
        """Whether heads that train together share files and curves. TensorBoard is slow with a curve for each."""
        return len(self.models) + len(self.extra) > MAX_MODELS

    def without(self, unreadable: Collection[int]) -> Plan:
        """Returns a plan whose splits do not contain the unreadable images."""
        return make_plan(self.recipe, self.dataset, unreadable) if unreadable else self

    @property
    def skipped(self) -> dict[str, dict[str, MethodItem]]:
        """{reason: {label: method with models that are skipped for it}}."""
        reasons: dict[str, dict[str, MethodItem]] = {}
        for model in self.models:
            if model.skipped is not None:
                reasons.setdefault(model.skipped, {})[model.item.label] = model.item
        return reasons

    @property
    def splits(self) -> list[Split]:
        """The splits of the first seed. Other seeds draw other validation images, but test the same ones."""
        first = self.models[0].key.seed
        by_domains = {model.split.test_domains: model.split for model in self.models if model.key.seed == first}
        return list(by_domains.values())

    @property
    def splits_of_all_seeds(self) -> list[Split]:
        return list({id(model.split): model.split for model in self.models}.values())

    @property
    def annotations(self) -> Annotations:
        return annotations_of(self.dataset)

    @cached_property
    def annotations_digest(self) -> str:
        return annotations_digest(self.dataset)

    @property
    def criteria(self) -> Criteria:
        return Criteria(self.rules, self.recipe.protocol.metric)


def annotations_of(dataset: ImageDataset) -> Annotations:
    """Returns the annotations as tensors. The worst group is taken over domains, unless the data set defines groups."""
    worst_of = dataset.domains if dataset.worst_of is None else dataset.worst_of
    needed = map(torch.as_tensor, (dataset.labels, dataset.domains, worst_of))
    optional = (dataset.groups, dataset.soft_labels)
    return Annotations(*needed, *(None if values is None else torch.as_tensor(values) for values in optional))


def annotations_digest(dataset: ImageDataset, with_soft_labels: bool = True) -> str:
    """Returns the checksum of the names, labels, domains, groups and splits of all images, and of soft labels if there
    are any.
    """
    names = json.dumps([dataset.class_names, dataset.domain_names])
    annotations = (dataset.labels, dataset.domains, dataset.groups, dataset.splits)
    return digest(
        names,
        *("-" if values is None else json.dumps(np.asarray(values).tolist()) for values in annotations),
        *([dataset.soft_labels] if with_soft_labels and dataset.soft_labels is not None else []),
    )


def read_data(recipe: Recipe) -> ImageDataset:
    """Reads the recipe's data set, and renames its classes as in `data.class_names`. Raises `UserError`.

    With `data.intensity: auto` all images wider than 8 bits are read, unless that is known of their hashes.
    """
    dataset: ImageDataset = recipe.data.build()
    words = recipe.data_common.class_names
    for name in words:
        if name not in dataset.class_names:
            hint = did_you_mean(name, list(dataset.class_names))
            raise UserError(f'{recipe.name}: data.class_names: the data has no class "{name}"{hint}')
    if (least := recipe.data_common.domain_min) is not None:
        dataset = without_small_domains(dataset, least, recipe.data_common.small_domains)
    renamed = tuple(words.get(name, name) for name in dataset.class_names)
    if len(set(renamed)) < len(renamed):
        raise UserError(f"{recipe.name}: data.class_names: two classes have the same name; give each its own")
    dataset.class_names = renamed
    intensity = recipe.data_common.intensity
    if intensity == "auto":
        index, show = index_folder(recipe), os.environ.get("RANK", "0") == "0"
        dataset.intensity = automatic(extremes_of(dataset, hash_files(dataset, index, show), index, show))
        logger.info("data.intensity: auto: %s", dataset.intensity or "no image is wider than 8 bits")
    elif isinstance(intensity, Range):
        dataset.intensity = intensity
    return dataset


def index_folder(recipe: Recipe) -> Path | None:
    """Returns the folder of the hashes, or None if it cannot be used and no method reads what is cached there."""
    try:
        return cache_folder(recipe.features)
    except UserError:
        if not all(recipe.trains_on_images(item) for item in recipe.methods):
            raise
        return None


def make_plan(recipe: Recipe, dataset: ImageDataset, unreadable: Collection[int] = ()) -> Plan:
    """Plans every model, in the order of the recipe's methods. Raises `UserError` if data and recipe do not fit."""
    if recipe.protocol.folds is not None:
        recipe = dataclasses.replace(recipe, protocol=recipe.protocol.with_folds(dataset))
    by_seed = {seed: splits(dataset, recipe.protocol, seed, unreadable) for seed in recipe.protocol.seeds}
    models = []
    for item in recipe.methods:
        # nothing is drawn for class embeddings: more seeds would be copies, with a standard deviation of 0
        seeds = recipe.protocol.seeds[:1] if item.is_text else recipe.protocol.seeds
        for number in range(len(by_seed[seeds[0]])):
            for seed in seeds:
                models += _plan_models(recipe, item, by_seed[seed][number], seed, dataset)
    every = [split for of_seed in by_seed.values() for split in of_seed]
    notes = list(dict.fromkeys(note for split in every for note in split.notes))
    notes += note_sites(recipe, dataset, by_seed[recipe.protocol.seeds[0]])
    # which training domains have validation images on which the metric is undefined
    metric, annotations, undefined = recipe.protocol.metric, annotations_of(dataset), Counter[int]()
    rule, none, validated = recipe.protocol.selection, torch.empty(0, dtype=torch.int64), 0
    for seed, split in ((seed, split) for seed, drawn in by_seed.items() for split in drawn):
        defined, others = defined_domains(split.evaluation.get(BY_DOMAIN, none), annotations, metric)
        undefined.update(others)
        validated += BY_DOMAIN in split.evaluation
        rows = split.evaluation.get(rule, none)  # `cross_domain` has other splits
        if len(rows) and not (defined if rule == BY_DOMAIN else is_defined(metric, annotations.labels[rows])):
            raise _unmeasured(recipe, split.test_domains, seed)
    for domain, count in sorted(undefined.items())[:NAMED_AT_MOST]:
        where = f"{dataset.domain_names[domain]}, where {metric} is not defined, in {count} of {validated} splits"
        notes.append(f"{BY_DOMAIN} leaves out {where}")
    if (more := len(undefined) - NAMED_AT_MOST) > 0:
        notes.append(f"and {plural(more, 'more domain')} like these")
    if dataset.soft_labels is not None:
        trained = [item for item in recipe.methods if not item.is_text]
        alone = [item.label for item in trained if not item.algorithm.cls.reads_soft_labels]
        if len(alone) < len(trained):
            votes = int((dataset.soft_labels.max(1) < 1).sum())
            notes.append(
                f"soft labels (columns p:CLASS) are not one-hot for {votes} of {plural(len(dataset), 'image')}"
            )
        if alone:
            notes.append(f"reads the label alone, not p:CLASS: {' / '.join(alone)}")
    if recipe.search.trials > 1:
        draws = "the same hyper-parameter draws for every held-out domain and seed"
        notes.append(f"{draws} (DomainBed draws anew for each seed)")
    extra = _extra_models(recipe, dataset, models) if recipe.protocol.selection == "cross_domain" else ()
    if recipe.protocol.final_fit:
        all_domains(dataset, unreadable)  # raises its faults before any training
    return Plan(recipe, dataset, tuple(models), extra, rules_of(recipe.protocol, every), tuple(notes))


def _unmeasured(recipe: Recipe, test_domains: Sequence[str], seed: int) -> UserError:
    """Returns the error that all models without these domains would train, and then fail to pick a step."""
    protocol, held_out = recipe.protocol, join_names(test_domains, NAMED_AT_MOST)
    more = "raise protocol.val_fraction, or " * (protocol.selection == BY_DOMAIN and protocol.name != "official")
    return UserError(
        f"protocol.metric: {protocol.metric} is not defined with {held_out} held out (seed {seed}): every part of the "
        f"images by which {protocol.selection} picks a step is of one class; {more}use accuracy"
    )


def note_sites(recipe: Recipe, dataset: ImageDataset, planned: Sequence[Split]) -> list[str]:
    """Returns notes on domains of one class, and on held-out sets of domains where the metric is not defined.

    Raises `UserError` if it is defined on none of them.
    """
    metric, notes, labels = recipe.protocol.metric, list[str](), torch.as_tensor(dataset.labels)
    if small := dataset.small_domains:
        became = f'became the domain "{JOINED}"' if JOINED in dataset.domain_names else "are left out"
        notes.append(f"{plural(len(small), 'domain')} below data.domain_min {became}")
    if dataset.never_held_out:
        notes.append(f'"{JOINED}" trains only, as it is still too small or of one class')
    one_class = np.flatnonzero((images_per_class(dataset) > 0).sum(1) == 1)
    if names := [dataset.domain_names[domain] for domain in one_class]:
        notes.append(f"images of one class only in {join_names(names, NAMED_AT_MOST)}")
    tested = {set_name(held): rows for split in planned for held, rows in split.sites(dataset).items()}
    undefined = [name for name, rows in tested.items() if not is_defined(metric, labels[rows])]
    if len(undefined) == len(tested):
        raise UserError(
            f"protocol.metric: {metric} is not defined where all test images are of one class, as everywhere here; "
            "use accuracy"
        )
    if undefined:
        where = f"{len(undefined)} of {len(tested)} held-out sets ({join_names(undefined, NAMED_AT_MOST)})"
        notes.append(f"{metric} is not defined on {where}: means leave them out")
    return notes


def _extra_models(recipe: Recipe, dataset: ImageDataset, models: list[PlannedModel]) -> tuple[PlannedModel, ...]:
    """Returns, for each planned model and each of its training domains, the model with that domain held out too.

    Domains that `protocol.together` holds out as one are left out as one here too.

    Two planned models can need the same extra model (held out a, then b; or b, then a): it is trained once for both.
    """
    extra: dict[tuple[str, int, int, int, frozenset[str]], PlannedModel] = {}
    for model in models:
        for names in () if model.skipped else recipe.protocol.sets_of(model.split.train_domains):
            split = without(dataset, model.split, *names)
            key = model.key._replace(test_domains=split.test_domains)
            alike = (model.item.label, key.seed, key.trial, model.steps, frozenset(split.test_domains))
            if alike in extra:
                needed_by = (*extra[alike].needed_by, model.key)
                both = also_measuring(extra[alike].split, split.evaluation[LEFT_OUT[0]])
                extra[alike] = dataclasses.replace(extra[alike], split=both, needed_by=needed_by)
            else:
                extra[alike] = PlannedModel(key, model.item, model.training, split, model.steps, needed_by=(model.key,))
    # a domain where the metric is not defined says nothing, and what is measured on none is not trained
    kept, labels, served = list[PlannedModel](), torch.as_tensor(dataset.labels), set[ModelKey]()
    for model in extra.values():
        parts = model.split.evaluation
        defined = {part: rows for part, rows in parts.items() if is_defined(recipe.protocol.metric, labels[rows])}
        if defined:
            kept.append(dataclasses.replace(model, split=dataclasses.replace(model.split, evaluation=defined)))
            served |= {key for part, key in zip(parts, model.needed_by, strict=True) if part in defined}
    for model in models:
        if not model.skipped and model.key not in served:
            raise _unmeasured(recipe, model.key.test_domains, model.key.seed)
    return tuple(kept)


def domains_needed(item: MethodItem) -> int:
    """Returns the number of training domains that a method needs."""
    cls, settings = item.algorithm.cls, item.algorithm.kwargs()
    needs_two = any(settings[name] == value for name, value in cls.two_domains_if.items())
    return max(int(cls.min_domains), 2 if needs_two else 1)


def _plan_models(
    recipe: Recipe, item: MethodItem, split: Split, seed: int, dataset: ImageDataset
) -> list[PlannedModel]:
    """Returns a planned model per trial of one method, split and seed, or one that is skipped."""
    needed = domains_needed(item)
    # extra models of cross_domain train without one more domain, or set of domains
    sets = recipe.protocol.sets_of(split.train_domains)
    crossed = max(map(len, sets)) if recipe.protocol.selection == "cross_domain" else 0
    have = len(split.train_domains) - crossed
    skipped = item.skipped
    if skipped is None and have < needed:
        more = {0: "", 1: " and one more for cross_domain"}.get(crossed, " and one more set for cross_domain")
        held_out = ", ".join(split.test_domains) + more
        skipped = f"needs {needed} training domains; with {held_out} held out there is {have}"

    def planned(trial: int, item: MethodItem, training: Training, skipped: str | None = None) -> PlannedModel:
        rows = sum(len(pool) for pool in split.train)
        steps = steps_of(training.steps, training.epochs, rows, training.images_per_step(len(split.train)))
        key = ModelKey(item.label, split.test_domains, seed, trial)
        return PlannedModel(key, item, training, split, steps, skipped)

    if skipped is not None:
        return [planned(0, item, recipe.training, skipped)]
    draws = [recipe.search_of(item).drawn(trial) for trial in range(recipe.search.trials)]
    if item.is_solver and all(draw_item(item, recipe.search.drawn(n)) is item for n in range(recipe.search.trials)):
        draws = draws[:1]  # a solver does not read `training`
    if not item.is_solver and not any(find_searched(recipe, item)):
        draws = draws[:1]  # all trials would be equal
    models, checked = [], dict[int, MethodItem]()  # items that were checked, by their number of steps
    for trial, drawn in enumerate(draws):
        model = planned(trial, draw_item(item, drawn), draw_training(recipe.training, item, drawn))
        if not item.is_solver and checked.get(model.steps) is not model.item:  # a draw may leave it as it is
            _check_settings(recipe, model.item, split, dataset, model.steps)
            checked[model.steps] = model.item
        models.append(model)
    return models


def find_searched(recipe: Recipe, item: MethodItem) -> Iterator[tuple[str, Distribution]]:
    """Yields the searched keys that apply to a method of the recipe, including those of `training`."""
    for key, distribution in recipe.search_of(item).distributions.items():
        if key == "encoder_lr" and item.block.encoder_lr is not None:
            continue
        # drawn_item returns the item itself if the key is not one of its settings; the value does not matter
        if key in TRAINING_KEYS or draw_item(item, {key: distribution.at(0.5)}) is not item:
            yield key, distribution


def unsearched_line(recipe: Recipe) -> str:
    """Returns the line on methods that a search leaves as they are, with one trial; "" if there are none."""
    trained = [item for item in recipe.methods if not item.is_solver]
    labels = (
        [item.label for item in trained if not any(find_searched(recipe, item))] if recipe.search.trials > 1 else []
    )
    if not labels:
        return ""
    remedy = "add a range, such as search.space.lr, to search it too"
    return f"search: has no range for {', '.join(labels)}, so one trial each trains; {remedy}"


def drawn_value(values: Mapping[str, Any], key: str) -> Any:
    """Returns the value of a searched key (KEY or METHOD.KEY) in the `hparams` of a model, or None."""
    return values.get(key, values.get(key.rpartition(".")[2]))


def _check_settings(recipe: Recipe, item: MethodItem, split: Split, dataset: ImageDataset, steps: int) -> None:
    """Raises `UserError` for settings that do not fit the split, or the number of steps (which epochs may define)."""
    from xdm_ft.algorithms import Setup

    task = Task(dataset.class_names, split.train_domains)
    item.algorithm.build(Setup(task, width=2, steps=steps, seed=0))  # constructors check settings; any width will do
    unfreeze_at = item.encoder_common.unfreeze_at
    if unfreeze_at >= steps:
        raise UserError(f"{recipe.name}: encoder.unfreeze_at: {unfreeze_problem(unfreeze_at, steps)}")
    if item.averaging is not None and recipe.protocol.selection == "cross_domain":
        raise UserError(
            f"{recipe.name}: protocol.selection: cross_domain selects a single step, but {item.label} averages "
            "over steps; remove this method, or use train_val"
        )
    reader = f"+{item.averaging.name}" if item.averaging is not None and item.averaging.cls.reads_loss else None
    if recipe.protocol.selection == "cross_domain" and item.varied_by_finish:
        reader = item.algorithm.name
    if reader is not None and len(split.evaluation.get(LOSS_SPLIT, ())) == 0:
        raise UserError(
            f"{recipe.name}: {item.label}: {reader} needs validation images of the training domains "
            f"(the split {LOSS_SPLIT}), and there are none; remove {reader}"
        )


def costs(plan: Plan) -> dict[str, Any]:
    """Returns the number of models, and what training them costs."""
    recipe, trained_images = plan.recipe, 0
    trained = [model for model in (*plan.models, *plan.extra) if not model.skipped and not model.item.is_solver]
    if end_to_end := [model for model in trained if model.item.trainable is not False]:
        passes = sum(model.steps * (2 if model.item.sharpness else 1) for model in end_to_end)
        trained_images = passes * recipe.training.images_per_step(max(len(model.split.train) for model in end_to_end))
    return {
        "images": len(plan.dataset),
        "classes": len(plan.dataset.class_names),
        "domains": tuple(plan.dataset.domain_names),
        "models": len(plan.models),  # methods × held-out domains × seeds × trials
        "trials": recipe.search.trials,  # at most, per method
        "skipped_models": sum(model.skipped is not None for model in plan.models),
        "extra_models": len(plan.extra),  # of `cross_domain`
        "steps": sum(model.steps for model in trained),
        "gradient_evaluations": sum(
            model.item.gradient_evaluations(model.steps, len(model.split.train)) for model in trained
        ),
        # all images, also those that never train: the cache must not depend on the split
        "feature_passes": sum(map(partial(_passes, recipe), recipe.encoders)) * recipe.has_images,
        "trained_images": trained_images,  # that pass forward and backward through the encoder, without evaluations
    }


def _passes(recipe: Recipe, encoder: Component) -> int:
    """Returns how often the whole encoder sees each image: plain, and in the views of every augmentation."""
    items = [item for item in recipe.runnable_methods if item.encoder is encoder and item.trainable is False]
    kinds = recipe.cached_augmentations(items)
    return (1 + recipe.features.views * len(kinds)) * recipe.needs_features(encoder)


def describe(plan: Plan) -> str:
    """Returns the plan as text: the number of models, and the cost of training them."""
    cost, recipe = costs(plan), plan.recipe
    lines = [
        f"data: {plural(cost['images'], 'image')}, {plural(cost['classes'], 'class')}",
        f"domains: {', '.join(cost['domains'])}",
        f"models: {cost['models']} = methods × held-out domains × seeds"
        + (f" × up to {cost['trials']} trials" if cost["trials"] > 1 else "")
        + (f", {cost['skipped_models']} of them skipped" if cost["skipped_models"] else ""),
        *(f"skipped: {', '.join(labels)}: {reason}" for reason, labels in plan.skipped.items()),
        *([extra_models(plan)] if plan.extra else []),
        f"steps: {cost['steps']}, gradient evaluations: {cost['gradient_evaluations']}",
        augmentation_line(recipe),
        *([line] if (line := unsearched_line(recipe)) else []),
    ]
    if passes := cost["feature_passes"]:
        encoders = sum(map(recipe.needs_features, recipe.encoders))
        text = "one pass" if passes == 1 else plural(passes, "pass")
        text += f" ({encoders} plain, {passes - encoders} augmented)" if passes > encoders else ""
        text += f" of {encoders} encoders" if encoders > 1 else ""
        lines.append(f"encoder: {text} over {cost['images']} images unless their features are cached")
    if cost["trained_images"]:
        lines.append(f"encoder: {cost['trained_images']} images forward and backward, without evaluations")
    return "\n".join(lines)


def augmentation(recipe: Recipe, item: MethodItem) -> str:
    """Returns the augmentation of the images that a method trains on, in words."""
    views, words = recipe.features.views, str(recipe.augmentation_of(item))
    if words == "none" or not views or recipe.trains_on_images(item):
        return words
    return f"{words}, {views} cached view{'s' if views > 1 else ''} per image"


def augmentations(recipe: Recipe) -> str:
    """Returns the augmentation, and which methods have it, if not all. Solvers always read the plain images."""
    trained = [item for item in recipe.methods if not item.is_solver]
    kinds = dict.fromkeys(augmentation(recipe, item) for item in trained) or {"none": None}
    if len(kinds) == 1:
        [words] = kinds
        plain = words != "none" and len(trained) < len(recipe.methods)
        way = "by gradient steps" if recipe.features.views else "on images"
        return words + (f" of what trains {way}" if plain else "")
    rows = dict[str, list[str]]()
    for item in recipe.methods:
        rows.setdefault(augmentation(recipe, item), []).append(item.label)
    return " and ".join(f"{words} of {' / '.join(labels)}" for words, labels in rows.items())


def augmentation_line(recipe: Recipe) -> str:
    """Returns the line of the plan on augmentation; it says why some methods have none if others have one."""
    trained = [item for item in recipe.methods if not item.is_solver]
    kinds = {recipe.augmentation_of(item) for item in trained}
    once = any(not recipe.augmentation_of(item) and not recipe.trains_on_images(item) for item in trained)
    why = "; images of rows without one are encoded once" * (once and len(kinds) > 1)
    why += ", features.views caches augmented ones" * (bool(why) and not recipe.features.views)
    return f"augmentation: {augmentations(recipe)}{why}"


def extra_models(plan: Plan) -> str:
    return f"extra models: {len(plan.extra)}, trained first, because protocol.selection is cross_domain"


def hparams(item: MethodItem, training: Training) -> dict[str, Any]:
    """Returns the hyper-parameters of one model, for results.json."""
    of_method: dict[str, Any] = {}
    for part in item.parts:
        of_method |= part.settings()
    if item.head.name != "linear" and not item.is_solver:
        of_method["head"] = item.head.name
    if item.block.prompts is not None:
        of_method["prompts"] = list(item.block.prompts)
    if item.block.class_weights is not None:
        of_method["class_weights"] = item.block.class_weights
    if item.block.train_augmentation is not None:
        of_method["train_augmentation"] = str(item.block.train_augmentation)
    if item.block.normalize or item.block.start:
        of_method["normalize"] = item.reads_normalized
    if item.is_solver:
        return of_method
    if item.takes_anchor:
        of_method["anchor"] = item.block.anchor
    common = {"lr": training.lr, "weight_decay": training.weight_decay, "batch_size": training.batch_size}
    if training.optimizer == "sgd":
        common["momentum"] = training.momentum
    else:
        common |= {"beta1": training.beta1, "beta2": training.beta2}
    common |= {key: value for key in ("clip_norm", "patience") if (value := getattr(training, key)) is not None}
    if item.trainable is not False:
        of_method["trainable"] = item.record_fields["trainable"]
        common |= {"encoder_lr": training.encoder_lr, "layer_decay": training.layer_decay}
        common["unfreeze_at"] = item.encoder_common.unfreeze_at
    return {**common, "head_init": item.head_init, **of_method}
