"""Linear heads on cached features, trained as a recipe trains ERM, on its splits and on parts of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from xdm_ft.core import Criteria, ModelKey
from xdm_ft.experiment.plan import Plan, PlannedModel
from xdm_ft.experiment.prepare import Prepared, make_job
from xdm_ft.features.cache import Features
from xdm_ft.images import ImageDataset
from xdm_ft.new_site.reference import linear_erm
from xdm_ft.protocol.samplers import steps_of
from xdm_ft.protocol.splits import SELECTION_SPLIT, Split, images_per_class, split_of_rows
from xdm_ft.recipe.method import MethodCommon, MethodItem
from xdm_ft.recipe.search import Search
from xdm_ft.recipe.settings import Cluster, Recipe
from xdm_ft.runtime.errors import UserError, plural
from xdm_ft.runtime.progress import progress
from xdm_ft.training import Job, Schedule, Trained, Training
from xdm_ft.training.bank.data import CachedPredictor
from xdm_ft.training.bank.train import chunks, train_chunk
from xdm_ft.training.selection import FINAL_FIT, split_of

STEPS = 300  # of a head at most: longer training names the same twins
TRAINS = ("train_val", "val_domain")  # evaluation splits that pick the step of a head


class HeadRequest(NamedTuple):
    """A head to train on the training images of `split`, and the images whose answers are wanted."""

    split: Split
    rows: Tensor  # int64 [n]
    seed: int
    labels: Tensor | None = None  # int64 [N], to train with; None: those of the data


@dataclass(frozen=True)
class Study:
    """The images of a recipe, and the heads that show what a part of them changes."""

    plan: Plan  # its only method is linear ERM
    prepared: Prepared
    copies: Sequence[Sequence[int]] = ()  # rows of equal files
    problem: str = ""  # why the protocol can't split the data: there are no held-out domains

    @property
    def dataset(self) -> ImageDataset:
        return self.plan.dataset

    @property
    def item(self) -> MethodItem:
        return self.plan.recipe.methods[0]

    @property
    def seeds(self) -> tuple[int, ...]:
        return self.plan.recipe.protocol.seeds

    @cached_property
    def features(self) -> Features:
        """As the heads read them."""
        features = self.prepared.for_method(self.item).features
        assert features is not None, "the encoder is frozen"
        return features.normalized() if self.item.reads_normalized else features

    @cached_property
    def readable(self) -> np.ndarray:
        """The rows of the images that decode and have a label, int64 [n]."""
        readable = np.ones(len(self.dataset), bool)
        readable[list(self.prepared.unreadable)] = False
        return np.flatnonzero(readable)

    @cached_property
    def description(self) -> str:
        """What the heads are, for readers."""
        training = self.plan.recipe.training
        length = f"{training.epochs:g} epochs" if training.steps is None else f"{training.steps} steps"
        return f"linear ERM, {length}, {plural(len(self.seeds), 'seed')}"

    @property
    def heads(self) -> list[tuple[int, Split]]:
        """The seed and the split of each head of the recipe."""
        return [(model.key.seed, model.split) for model in self.plan.models]

    def with_heads(self, training: Training) -> Study:
        """Returns the same with other training, of heads that read features of length √K, as standardised ones have."""
        plan = replace(self.plan, recipe=replace(self.plan.recipe, training=training))
        unit, zero = self.features.normalized(), torch.zeros(self.features.width)
        features = unit.standardized(zero, torch.full_like(zero, self.features.width**-0.5))
        encoder = replace(self.prepared.for_method(self.item), features=features)
        return replace(self, plan=plan, prepared=replace(self.prepared, encoders={self.item.encoder_label: encoder}))

    def answers(self, wanted: Sequence[HeadRequest], task: str) -> Iterator[tuple[int, Tensor]]:
        """Trains heads and yields, for each of `wanted` in any order, its number and the logits float32 [n,C].

        Heads on the same images, labels and seed are trained once. the `task` they are for is shown with the progress.
        Raises `UserError` if a head's loss or logits are not finite.
        """
        same: dict[tuple[bytes, int, int], list[int]] = {}  # numbers of heads that are equal
        for number, head in enumerate(wanted):
            same.setdefault((_digest(head.split), head.seed, id(head.labels)), []).append(number)
        together: dict[tuple[str, int], dict[int, tuple[Job, list[int]]]] = {}  # {id of a job: it, and whom it serves}
        for numbers in same.values():
            first = wanted[numbers[0]]
            rule = self._rule(first.split)
            job = self._job(first.split, first.seed, rule)
            together.setdefault((rule, id(first.labels)), {})[id(job)] = job, numbers
        with progress(f"heads, {task}", len(same), "heads") as bar:
            for (rule, _), jobs in together.items():
                labels = wanted[next(iter(jobs.values()))[1][0]].labels
                for chunk in chunks([job for job, _ in jobs.values()], self.features.device):
                    for trained, predictor in self._trained(chunk, rule, labels):
                        for number in jobs[id(trained.job)][1]:
                            yield number, predictor.logits(trained.selected[rule].state, wanted[number].rows)
                        bar.advance()

    def predictions(self, wanted: Sequence[HeadRequest], task: str) -> list[np.ndarray]:
        """Returns the predicted classes of each of `wanted`, int64 [n]; the rest as `answers`."""
        predicted = dict[int, np.ndarray]()
        for number, logits in self.answers(wanted, task):
            predicted[number] = logits.argmax(1).numpy()
        return [predicted[number] for number in range(len(wanted))]

    def _trained(self, chunk: list[Job], rule: str, labels: Tensor | None) -> Iterator[tuple[Trained, CachedPredictor]]:
        annotations = replace(self.plan.annotations, soft_labels=None)  # an audit measures the labels
        annotations = annotations if labels is None else replace(annotations, labels=labels)
        annotations, criteria = annotations.to(self.features.device), Criteria((rule,), self.plan.criteria.metric)
        predictor = CachedPredictor(chunk[0], self.features)
        for trained in train_chunk(chunk, self.features, annotations, criteria, record=_no_curve):
            if trained.failure is not None:
                raise UserError(f"audit: {trained.job.key}: the head has failed: {trained.failure}")
            yield trained, predictor

    def without(self, split: Split, rows: np.ndarray) -> Split | None:
        """Returns a split without the images `rows` in training and validation; None if too few are left to train on.

        Training domains of which nothing is left are none of its own.
        """
        train, validation = torch.cat([*split.train]).numpy(), split.evaluation.get(self._rule_split(split))
        train = train[~np.isin(train, rows)]
        counts = images_per_class(self.dataset, train)
        numbers = [self.dataset.domain_names.index(name) for name in split.train_domains]
        numbers = [number for number in numbers if counts[number].any()]
        if np.count_nonzero(counts.sum(0)) < 2:
            return None
        evaluation = dict[str, np.ndarray]()
        if validation is not None:
            kept = validation.numpy()[~np.isin(validation.numpy(), rows)]
            if self._rule(split) == "train_val":  # of domains that train
                kept = kept[np.isin(self.dataset.domains[kept], numbers)]
            evaluation = {self._rule_split(split): kept} if len(kept) else {}
        return split_of_rows(self.dataset, split.test_domains, numbers, train, evaluation)

    def matched(self, split: Split, rows: np.ndarray, key: Sequence[int]) -> Split | None:
        """Returns a split without as many random images of training and validation as `without` leaves out.

        `key`: of the draw.
        """
        drawn, parts = np.random.default_rng(key), [torch.cat([*split.train])]
        parts += [split.evaluation[name] for name in (self._rule_split(split),) if name in split.evaluation]
        random = [drawn.choice(part, int(np.isin(part, rows).sum()), replace=False) for part in map(np.asarray, parts)]
        return self.without(split, np.concatenate(random))

    def _rule(self, split: Split) -> str:
        """The selection rule of a head: the recipe's, if it is honest, else train_val, else the last step."""
        of_recipe = self.plan.recipe.protocol.selection
        for rule in (of_recipe, "train_val", "val_domain"):
            if rule in ("train_val", "val_domain") and len(split.evaluation.get(SELECTION_SPLIT[rule], ())):
                return rule
        return FINAL_FIT

    def _rule_split(self, split: Split) -> str:
        return split_of(self._rule(split))

    def model(self, split: Split, seed: int) -> PlannedModel:
        training = self.plan.recipe.training
        rows = sum(map(len, split.train))
        steps = steps_of(training.steps, training.epochs, rows, training.images_per_step(len(split.train)))
        if self._rule(split) == FINAL_FIT:
            training = training.model_copy(update={"patience": None})
        return PlannedModel(ModelKey(self.item.label, split.test_domains, seed, 0), self.item, training, split, steps)

    def _job(self, split: Split, seed: int, rule: str) -> Job:
        model = self.model(split, seed)
        return make_job(self.plan, self.prepared, model, {FINAL_FIT: {model.steps: 1.0}} if rule == FINAL_FIT else {})


def recipe_of_heads(recipe: Recipe) -> Recipe:
    """Returns a recipe whose only method is linear ERM on the features of the first encoder, frozen."""
    item = next(item for item in recipe.methods if item.encoder is recipe.encoder)
    block = MethodCommon(name="erm", normalize=True if item.block.normalize else None, trainable=False)
    erm = linear_erm(replace(item, label="erm", block=block, skipped=None, index=0))
    protocol = recipe.protocol.model_copy(update={"final_fit": False})
    if protocol.selection == "cross_domain":  # it trains further models, to pick a step alone
        protocol = protocol.model_copy(update={"selection": "train_val"})
    return replace(
        recipe,
        methods=(erm,),
        encoders=(recipe.encoder,),
        protocol=protocol,
        features=recipe.features.model_copy(update={"views": 0}),
        training=_shorten(recipe.training).model_copy(update={"compile": False, "profile": False}),
        search=Search(),
        cluster=Cluster(),
        report=recipe.report.model_copy(update={"compare": []}),
        label_curve=False,
    )


def _shorten(training: Training) -> Training:
    if training.steps is not None and training.steps <= STEPS:
        return training
    shorter = {"steps": STEPS, "epochs": None, "evaluate_every": None, "schedule": Schedule()}
    return training.model_copy(update=shorter)


def _digest(split: Split) -> bytes:
    """A digest of the images that train and select a head."""
    parts = (*split.train, *(split.evaluation[name] for name in sorted(split.evaluation) if name in TRAINS))
    return hashlib.blake2b(b"|".join(rows.numpy().tobytes() for rows in parts)).digest()


def _no_curve(step: int, values: object) -> None:
    """No curve is kept of these heads."""
