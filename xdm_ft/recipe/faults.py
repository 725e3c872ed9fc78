"""The faults of a recipe: collects them with their places, and finds those that concern several blocks."""

from __future__ import annotations

import os
import sys

from pydantic import ValidationError

from xdm_ft.algorithms import Algorithm, Setup
from xdm_ft.recipe.checked import Recipe
from xdm_ft.recipe.method_item import (
    MethodItem,
    drawn_item,
    drawn_training,
    encoder_common,
    text_faults,
    unfreeze_problem,
)
from xdm_ft.recipe.search import TRAINING_KEYS
from xdm_ft.recipe.text import Key, RecipeText
from xdm_ft.runtime.errors import UserError, did_you_mean
from xdm_ft.runtime.tensors import Task
from xdm_ft.training import Training
from xdm_ft.weights.pooling import outside_text_space

# keys that other blocks depend on
PROTOCOL: Key = ("protocol", "name")
TRAINABLE: Key = ("encoder", "trainable")
METHODS: Key = ("methods",)
STEPS: Key = ("training", "steps")
SAMPLER: Key = ("training", "sampler")
LOSS_AVERAGE: Key = ("training", "loss_average")
SPACE: Key = ("search", "space")
WHOLE_BATCH = (TRAINABLE, SAMPLER, LOSS_AVERAGE, ("training", "accumulation"), ("training", "class_weights"))


class Faults:
    """Collects every fault with its place, so that all are reported together."""

    def __init__(self, text: RecipeText) -> None:
        self.text, self.found = text, dict[str, None]()

    def add(self, key: Key, problem: str, *causes: Key) -> None:
        """Adds a fault of `key`. Its place is the command line if an override sets one of `causes`."""
        overridden = any(self.text.is_overridden(cause) for cause in causes)
        place = self.text.overrides if overridden else self.text.where(key)
        self.found[f"{place}: {self.text.name(key)}: {problem}"] = None

    def raise_if_any(self) -> None:
        if self.found:
            raise UserError(*self.found)


def check_together(faults: Faults, recipe: Recipe) -> None:
    """Adds the faults that concern several blocks."""
    training, protocol = recipe.training, recipe.protocol
    if (training.steps is None) == (training.epochs is None):
        both = "both steps and epochs are given; keep one" if training.steps else "give steps or epochs"
        faults.add(("training", "epochs" if training.steps else "steps"), both)
    if training.epochs is not None and training.sampler != "pooled":
        faults.add(
            ("training", "epochs"),
            f"an epoch needs sampler: pooled; {training.sampler} draws with replacement, give steps",
            SAMPLER,
        )
    if protocol.name == "official" and protocol.test_domains is not None:
        faults.add(("protocol", "test_domains"), "is only for leave_one_domain_out; leave it out", PROTOCOL)
    if protocol.final_fit and protocol.selection == "oracle":
        problem = "needs an unbiased estimate; selection: oracle has none, use train_val"
        faults.add(("protocol", "final_fit"), problem, ("protocol", "selection"))
    _check_report(faults, recipe)
    _check_encoders(faults, recipe)
    if protocol.name == "official" and protocol.split_rule != "stratified":
        problem = "the official split defines the validation images; leave it out"
        faults.add(("protocol", "split_rule"), problem, PROTOCOL)
    if not recipe.trains_encoders:
        for key in ("mixed_precision", "accumulation", "layer_decay"):
            if getattr(training, key) not in (Training.model_fields[key].default, "no"):
                problem = "has no effect with a frozen encoder; leave it out (for precision set features.precision)"
                faults.add(("training", key), problem, TRAINABLE)
    if training.compile and all(item.trainable is False and _has_no_compiled_step(item) for item in recipe.methods):
        problem = "has no effect on these methods, which have kernels of their own or take no steps; leave it out"
        faults.add(("training", "compile"), problem)
    if training.steps is not None and training.schedule.warmup_steps >= training.steps:
        problem = f"{training.schedule.warmup_steps} is not below training.steps: {training.steps}; lower it"
        faults.add(("training", "schedule", "warmup_steps"), problem, STEPS)
    for item in recipe.own_methods:
        if item.averaging is not None and training.patience is not None:
            problem = f"+{item.averaging.name} decides itself which steps it averages; leave training.patience out"
            faults.add(("methods", item.place), problem, ("training", "patience"))
    if training.amsgrad and training.optimizer == "sgd":
        problem = "is only for adam and adamw; leave it out, or use one of them"
        faults.add(("training", "amsgrad"), problem, ("training", "optimizer"))
    _check_views(faults, recipe)
    _check_search(faults, recipe)
    for item in recipe.methods:
        _check_method(faults, ("methods", item.place), item, recipe)


def _check_report(faults: Faults, recipe: Recipe) -> None:
    """Adds the faulty pairs of `report.compare`, and looks that could have no end."""
    if recipe.auto_seeds and recipe.report.margin is None:
        problem = "auto needs report.margin, to know when a row is settled; set it, e.g. 1.0, or give a number of seeds"
        faults.add(("protocol", "seeds"), problem, ("report", "margin"))
    rows, labels = {item.label for item in recipe.methods}, recipe.labels
    seen = set[frozenset[str]]()
    for place, pair in enumerate(recipe.report.compare):
        key: Key = ("report", "compare", place)
        known = [label for label in pair if label in labels]
        for label in pair:
            if label not in known:
                faults.add(key, f'no row "{label}"{did_you_mean(label, labels)}', METHODS)
        if len(known) == 2 and (pair[0] in rows) != (pair[1] in rows):
            problem = f"{pair[0]} and {pair[1]}: one of the two names an encoder; write METHOD @ ENCODER for both"
            faults.add(key, f"{problem}, or for none")
        elif pair[0] == pair[1]:
            faults.add(key, f"compares {pair[0]} with itself; name two rows")
    for first, second in recipe.declared:
        if (both := frozenset((first, second))) in seen:
            faults.add(("report", "compare"), f"{first} and {second} are compared twice; keep one of the pairs")
        seen.add(both)


def _has_no_compiled_step(item: MethodItem) -> bool:
    return item.is_solver or item.algorithm.cls.has_kernels


def _check_encoders(faults: Faults, recipe: Recipe) -> None:
    """Adds the faults of what trains in the encoders, and of what is cached below it."""
    steps = recipe.training.steps
    for place, encoder in enumerate(recipe.encoders):
        key: Key = ("encoders", place) if recipe.several_encoders else ("encoder",)
        items = [item for item in recipe.methods if item.encoder is encoder]
        unfreeze_at = encoder_common(encoder).unfreeze_at
        if unfreeze_at and all(item.trainable is False for item in items):
            problem = "has no effect with a frozen encoder; leave it out, or set trainable: true"
            faults.add((*key, "unfreeze_at"), problem, TRAINABLE)
        elif steps is not None and unfreeze_at >= steps:
            faults.add((*key, "unfreeze_at"), unfreeze_problem(unfreeze_at, steps), STEPS)
    if recipe.features.cut != "auto" and not any(item.is_cut for item in recipe.methods):
        problem = "is for a partly trained encoder; leave it out, or set trainable: {blocks: k}"
        faults.add(("features", "cut"), problem, TRAINABLE)
    for item in recipe.own_methods:
        if item.is_solver and item.block.trainable not in (None, False):
            problem = f"{item.label} computes a head from features of the frozen encoder; leave it out"
            faults.add(("methods", item.place, "trainable"), problem)
        under_each = [other for other in recipe.methods if other.place == item.place]
        if item.block.encoder_lr is not None and all(other.trainable is False for other in under_each):
            problem = f"{item.label} trains no encoder; leave it out, or set it for a row with trainable, by its label"
            faults.add(("methods", item.place, "encoder_lr"), problem, TRAINABLE)


def _check_views(faults: Faults, recipe: Recipe) -> None:
    """Adds the faults of `features.views`, which needs an augmentation and a method that trains on cached features."""
    given, views = recipe.data_common.train_augmentation, recipe.features.views
    augmentation, count = ("data", "train_augmentation"), ("features", "views")
    trained = [item for item in recipe.methods if not item.is_solver]
    on_images = [item for item in trained if recipe.trains_on_images(item)]
    if not on_images and not views and given not in (None, "none"):
        what = "a frozen encoder" if not any(item.is_cut for item in trained) else "cached activations"
        problem = f"has no effect with {what}: each image is computed only once"
        remedy = "leave it out, or set features.views, or trainable: true"
        if any(item.is_cut for item in trained):
            remedy += ", or features.cut: compute"
        faults.add(augmentation, f"{problem}; {remedy}", TRAINABLE, count)
    if views and trained and len(on_images) == len(trained):
        problem = "has no effect with encoder.trainable: true, which augments at every step; leave it out"
        faults.add(count, problem, TRAINABLE)
    elif views and not trained:
        problem = "has no effect on methods without gradient steps, which read the plain images"
        faults.add(count, f"{problem}; leave it out", METHODS)
    elif views and recipe.train_augmentation == "none":
        own = "" if given else ", the default of this data set,"
        problem = f"none{own} gives no views to cache; set domainbed, or leave features.views out"
        faults.add(augmentation, problem, count)


def _check_search(faults: Faults, recipe: Recipe) -> None:
    """Adds faulty keys of the search space, and the first trial whose settings are not allowed."""
    search, items = recipe.search, recipe.methods
    parts = {part.name: part for item in items for part in item.parts}
    known = [*TRAINING_KEYS, *(f"{name}.{key}" for name, part in parts.items() for key in part.own)]
    for key in search.space:
        if key not in known:
            problem = f"is no searchable hyper-parameter of this recipe's methods{did_you_mean(key, known)}"
            faults.add(("search", "space", key), problem, METHODS)
        elif key in ("encoder_lr", "layer_decay") and not recipe.trains_encoders:
            faults.add(("search", "space", key), "has no effect with a frozen encoder; leave it out", TRAINABLE)
        elif key in ("momentum", "beta1", "beta2") and (key == "momentum") != (recipe.training.optimizer == "sgd"):
            problem = f"has no effect on {recipe.training.optimizer}; leave it out"
            faults.add(("search", "space", key), problem, ("training", "optimizer"))
    averaging = [item.averaging.name for item in items if item.averaging is not None]
    if averaging and "patience" in search.distributions:
        problem = f"+{averaging[0]} decides itself which steps it averages; leave it out"
        faults.add(("search", "space", "patience"), problem, METHODS)
    if search.space and search.trials == 1:
        problem = "1 uses no value of search.space, as the first trial draws none; raise it"
        faults.add(("search", "trials"), problem, SPACE)
    if search.preset != "none" and search.trials == 1:
        problem = f"1 uses no value of the preset {search.preset}, as the first trial draws none; raise it"
        faults.add(("search", "trials"), problem, ("search", "preset"))
    if search.trials > 1 and not search.distributions:
        problem = f"{search.trials} would train each model {search.trials} times with the same settings"
        remedy = "set search.preset (frozen or domainbed), or ranges in search.space"
        faults.add(("search", "trials"), f"{problem}; {remedy}", ("search", "preset"), SPACE)
    for trial in range(search.trials):
        try:
            draws = [recipe.search_of(item).drawn(trial) for item in items]
            for item, values in zip(items, draws, strict=True):
                drawn_training(recipe.training, item, values)
            drawn = [drawn_item(item, values) for item, values in zip(items, draws, strict=True)]
        except ValidationError as error:
            fault = error.errors()[0]
            problem = f"trial {trial} draws {'.'.join(map(str, fault['loc']))} = {fault['input']!r}: {fault['msg']}"
            faults.add(SPACE, problem)
            return  # one faulty trial is enough: thousands may follow
        for item in drawn:
            if item in items or item.is_solver:  # items without drawn settings are checked by _check_method
                continue
            try:
                reason = _parts_reason(checked_algorithm(item, recipe), item, recipe)
            except UserError as error:
                reason = str(error)
            if reason:
                faults.add(SPACE, f"trial {trial} of {item.label}: {reason}", *WHOLE_BATCH)
                return


def checked_algorithm(item: MethodItem, recipe: Recipe) -> Algorithm:
    """Builds the method for two classes, two domains and two features, so that it checks its own settings."""
    # with epochs the number of steps is not known before the data; the plan checks these settings again
    steps, task = recipe.training.steps or sys.maxsize, Task(("a", "b"), ("a", "b"))
    setup = Setup(task, width=2, steps=steps, seed=0, loss_average=recipe.training.loss_average)
    algorithm: Algorithm = item.algorithm.build(setup)
    return algorithm


def _parts_reason(algorithm: Algorithm, item: MethodItem, recipe: Recipe) -> str:
    """Returns why the method can not train on batches in parts (accumulation, several processes); "" if it can."""
    training, processes = recipe.training, int(os.environ.get("WORLD_SIZE", "1"))
    if item.trainable is False or processes * training.accumulation == 1:
        return ""
    adds_up = training.class_weights == "none" and algorithm.parts_add_up(training.sampler == "pooled")
    if algorithm.loss_over == "part" and not adds_up:
        return (
            "partners: local averages the loss over each part of a batch, and these means do not add up to the batch's "
            "with class_weights or, in pooled batches, loss_average: domain; use partners: global"
        )
    return algorithm.parts_reason


def _check_method(faults: Faults, key: Key, item: MethodItem, recipe: Recipe) -> None:
    if item.sharpness is not None and item.trainable is not False and recipe.training.mixed_precision == "fp16":
        problem = f"fp16 scales the loss, which makes the second pass of {item.sharpness.name} wrong"
        faults.add(("training", "mixed_precision"), f"{problem}; use bf16 or no with {item.label}", key)
    if not item.is_solver:
        try:
            algorithm = checked_algorithm(item, recipe)
        except UserError as error:
            faults.add(key, str(error), key, STEPS, LOSS_AVERAGE)
        else:
            if item.trainable is False and algorithm.frozen_reason:
                faults.add(key, f"{item.label}: {algorithm.frozen_reason}", TRAINABLE)
            if encoder_common(item.encoder).unfreeze_at and not any(p.requires_grad for p in algorithm.parameters()):
                problem = "its class head is fixed, so that no step can train the head alone; leave unfreeze_at out"
                faults.add(key, f"{item.label}: {problem}", ("encoder", "unfreeze_at"))
            if item.is_cut and algorithm.cut_reason:
                faults.add(key, f"{item.label}: {algorithm.cut_reason}", TRAINABLE)
            if recipe.training.sampler == "pooled" and algorithm.pooled_reason:
                faults.add(key, f"{item.label}: {algorithm.pooled_reason}", SAMPLER)
            if reason := _parts_reason(algorithm, item, recipe):
                faults.add(key, f"{item.label}: {reason}", key, *WHOLE_BATCH)
    if item.block.normalize and item.trainable is not False:
        problem = "is for cached features, but this method trains its encoder; set encoder.normalize: true"
        faults.add((*key, "normalize"), problem, TRAINABLE)
    normalized = item.reads_normalized or getattr(item.encoder.block, "normalize", False)
    only_skipped = all(other.skipped is not None for other in recipe.methods)
    for setting, problem in text_faults(item, normalized) if item.skipped is None or only_skipped else ():
        faults.add((*key, *setting), problem, ("encoder", "name"), ("encoder", "normalize"))
    elsewhere = outside_text_space(getattr(item.encoder.block, "pooling", None))
    if item.reads_text and elsewhere:
        faults.add(key, f"{item.label} needs class embeddings, but {elsewhere}", ("encoder", "pooling"))
