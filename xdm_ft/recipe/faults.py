"""The faults of a recipe: collected with their places, and those that no block can see alone."""

from __future__ import annotations

import os
import sys

from pydantic import ValidationError

from xdm_ft.algorithms import Algorithm, Setup
from xdm_ft.encoders import TextEncoder
from xdm_ft.errors import UserError, did_you_mean, printable
from xdm_ft.recipe.blocks import MethodItem, Recipe, drawn_item, drawn_training, text_faults, unfreezes_too_late
from xdm_ft.recipe.search import TRAINING_KEYS
from xdm_ft.recipe.text import Key, RecipeText, dotted
from xdm_ft.tensors import Task


class Faults:
    """Collects every fault with its place, so that all are shown at once."""

    def __init__(self, text: RecipeText) -> None:
        self.text, self.found = text, dict[str, None]()

    def add(self, key: Key, problem: str) -> None:
        self.found[printable(f"{self.text.where(key)}: {dotted(key)}: {problem}")] = None

    def raise_if_any(self) -> None:
        if self.found:
            raise UserError("\n".join(self.found))


def check_together(faults: Faults, recipe: Recipe) -> None:
    """What no block can see alone."""
    training, protocol = recipe.training, recipe.protocol
    if (training.steps is None) == (training.epochs is None):
        both = "both steps and epochs are given; keep one" if training.steps else "give steps or epochs"
        faults.add(("training", "epochs" if training.steps else "steps"), both)
    if training.epochs is not None and training.sampler != "pooled":
        faults.add(
            ("training", "epochs"),
            f"an epoch needs sampler: pooled; {training.sampler} draws with replacement, give steps",
        )
    if protocol.name == "official" and protocol.test_domains is not None:
        faults.add(("protocol", "test_domains"), "only leave_one_domain_out chooses test domains; leave it out")
    if protocol.final_fit and protocol.selection == "oracle":
        faults.add(("protocol", "final_fit"), "needs an unbiased estimate; selection: oracle has none, use train_val")
    unfreeze_at = recipe.encoder_common.unfreeze_at
    if unfreeze_at and not recipe.trainable:
        faults.add(("encoder", "unfreeze_at"), "has no meaning with a frozen encoder; leave it out, or set trainable")
    elif training.steps is not None and unfreeze_at >= training.steps:
        faults.add(("encoder", "unfreeze_at"), unfreezes_too_late(unfreeze_at, training.steps))
    if protocol.name == "official" and protocol.split_rule != "stratified":
        faults.add(("protocol", "split_rule"), "the official split decides what validates; leave it out")
    if not recipe.trainable:
        for key, idle in (("mixed_precision", (None, "no")), ("accumulation", (1,))):
            if getattr(training, key) not in idle:
                problem = "has no meaning with a frozen encoder; leave it out (features.precision exists)"
                faults.add(("training", key), problem)
    if training.steps is not None and training.schedule.warmup_steps >= training.steps:
        problem = f"{training.schedule.warmup_steps} steps of warm-up leave none of {training.steps}; lower them"
        faults.add(("training", "schedule", "warmup_steps"), problem)
    for i, item in enumerate(recipe.methods):
        if item.averaging is not None and training.patience is not None:
            problem = f"+{item.averaging.name} ends its average by itself; leave training.patience out"
            faults.add(("methods", i), problem)
    if training.amsgrad and training.optimizer == "sgd":
        faults.add(("training", "amsgrad"), "is a variant of adam and adamw; leave it out, or choose one of them")
    _check_views(faults, recipe)
    _check_search(faults, recipe)
    has_text = issubclass(recipe.encoder.cls, TextEncoder)
    for i, item in enumerate(recipe.methods):
        _check_method(faults, ("methods", i), item, recipe, has_text)


def _check_views(faults: Faults, recipe: Recipe) -> None:
    """`features.views` needs an augmentation, and something that trains on what is cached."""
    given, views = recipe.data_common.train_augmentation, recipe.features.views
    augmentation, count = ("data", "train_augmentation"), ("features", "views")
    if not recipe.trainable and not views and given not in (None, "none"):
        problem = "has no meaning with a frozen encoder, whose features of every image are computed once"
        faults.add(augmentation, f"{problem}; leave it out, or set features.views, or encoder.trainable: true")
    if views and recipe.trainable:
        faults.add(count, "has no meaning with encoder.trainable, which augments at every step; leave it out")
    elif views and all(item.is_solver for item in recipe.methods):
        problem = "has no meaning for methods without gradient steps, which read the plain images"
        faults.add(count, f"{problem}; leave it out")
    elif views and recipe.train_augmentation == "none":
        own = "" if given else ", as usual with this data set,"
        faults.add(augmentation, f"none{own} makes no views to cache; set domainbed, or leave features.views out")


def _check_search(faults: Faults, recipe: Recipe) -> None:
    """The keys of the space, and that every draw makes settings that their blocks take."""
    search, items = recipe.search, recipe.methods
    parts = {part.name: part for item in items for part in item.parts}
    known = [*TRAINING_KEYS, *(f"{name}.{key}" for name, part in parts.items() for key in part.own)]
    for key in search.space:
        if key not in known:
            problem = f"no hyper-parameter of this recipe's methods that can be searched{did_you_mean(key, known)}"
            faults.add(("search", "space", key), problem)
        elif key == "encoder_lr" and not recipe.trainable:
            faults.add(("search", "space", key), "has no meaning with a frozen encoder; leave it out")
        elif key in ("momentum", "beta1", "beta2") and (key == "momentum") != (recipe.training.optimizer == "sgd"):
            faults.add(("search", "space", key), f"has no meaning to {recipe.training.optimizer}; leave it out")
    averaging = [item.averaging.name for item in items if item.averaging is not None]
    if averaging and "patience" in search.distributions:
        problem = f"+{averaging[0]} ends its average by itself; leave it out"
        faults.add(("search", "space", "patience"), problem)
    if search.space and search.trials == 1:
        faults.add(("search", "trials"), "1 trial draws nothing from search.space; raise it")
    if search.preset != "none" and search.trials == 1:
        faults.add(("search", "trials"), f"1 trial draws nothing from the preset {search.preset}; raise it")
    for trial in range(search.trials):
        try:
            drawn_training(recipe.training, search.drawn(trial))
            drawn = [drawn_item(item, search.drawn(trial)) for item in items]
        except ValidationError as error:
            fault = error.errors()[0]
            problem = f"trial {trial} draws {'.'.join(map(str, fault['loc']))} = {fault['input']!r}: {fault['msg']}"
            faults.add(("search", "space"), problem)
            return
        for item in drawn:
            if item in items or item.is_solver:
                continue
            try:
                reason = _parts_reason(_built(item, recipe), recipe)
            except UserError as error:
                reason = str(error)
            if reason:
                faults.add(("search", "space"), f"trial {trial} of {item.label}: {reason}")
                return


def _built(item: MethodItem, recipe: Recipe) -> Algorithm:
    """The method on two classes, two domains and two features, enough for it to check its own settings."""
    steps, task = recipe.training.steps or sys.maxsize, Task(("a", "b"), ("a", "b"))
    setup = Setup(task, width=2, steps=steps, seed=0, loss_average=recipe.training.loss_average)
    algorithm: Algorithm = item.algorithm.build(setup)
    return algorithm


def _parts_reason(algorithm: Algorithm, recipe: Recipe) -> str:
    """Why the method can not train on batches that are cut into parts; "" where it can, or where none are."""
    training, processes = recipe.training, int(os.environ.get("WORLD_SIZE", "1"))
    if not recipe.trainable or processes * training.accumulation == 1:
        return ""
    adds_up = training.class_weights == "none" and algorithm.parts_add_up(training.sampler == "pooled")
    if algorithm.loss_over == "part" and not adds_up:
        return (
            "partners: local takes the loss of each part of a batch, whose means are not that of the batch with "
            "class_weights or, in pooled batches, loss_average: domain; use partners: global"
        )
    return algorithm.parts_reason


def _check_method(faults: Faults, key: Key, item: MethodItem, recipe: Recipe, has_text: bool) -> None:
    if item.sharpness is not None and recipe.training.mixed_precision == "fp16":
        problem = f"fp16 scales the loss, which falsifies the second pass of {item.sharpness.name}"
        faults.add(("training", "mixed_precision"), f"{problem}; use bf16 or no with {item.label}")
    if not item.is_solver:
        try:
            algorithm = _built(item, recipe)
        except UserError as error:
            faults.add(key, str(error))
        else:
            frozen_reason = "" if recipe.trainable else algorithm.frozen_reason
            pooled_reason = algorithm.pooled_reason if recipe.training.sampler == "pooled" else ""
            for reason in filter(None, (frozen_reason, pooled_reason, _parts_reason(algorithm, recipe))):
                faults.add(key, f"{item.label}: {reason}")
    if item.block.normalize and recipe.trainable and not item.is_solver:
        problem = "is for cached features, and this method trains its encoder; set encoder.normalize: true"
        faults.add((*key, "normalize"), problem)
    normalized = item.reads_normalized or getattr(recipe.encoder.block, "normalize", False)
    for setting, problem in text_faults(item, has_text, normalized):
        faults.add((*key, *setting), problem)
