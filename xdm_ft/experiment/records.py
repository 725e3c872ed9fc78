"""Trains what the plan lists and turns each model into its record."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from xdm_ft.algorithms import Algorithm, Setup
from xdm_ft.evaluation.metrics import per_image, score
from xdm_ft.evaluation.predictions import Prediction
from xdm_ft.experiment.engines import Engines, Model, Request, starting_weights
from xdm_ft.experiment.heartbeat import wait_for_everyone
from xdm_ft.experiment.plan import ExtraModel, Plan, PlannedModel, drawn_value, extra_models, hparams, searched
from xdm_ft.experiment.prepared import Prepared
from xdm_ft.experiment.run_directory import RunDirectory, make_prediction
from xdm_ft.protocol.derived_splits import LEFT_OUT, mean_course
from xdm_ft.protocol.splits import Split
from xdm_ft.recipe.search import at_the_edge
from xdm_ft.tensors import Criteria, Task
from xdm_ft.training import Identity, Job, Selected, Trained
from xdm_ft.training.class_weights import balanced
from xdm_ft.training.interpolation import on_the_line
from xdm_ft.training.rule_images import RuleImages, rule_images
from xdm_ft.training.selection import split_of

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger("xdm_ft")
Finished = tuple[dict[str, Any], list[Prediction]]
Known = Mapping[str, Mapping[int, float]]


def train_models(plan: Plan, prepared: Prepared, directory: RunDirectory, accelerator: Accelerator) -> None:
    """Trains every model that the run directory lacks, and adds its record and its predictions to it."""
    work = Work(plan, prepared, directory, accelerator)
    if accelerator.is_main_process:
        for model in plan.models:
            if model.skipped:
                directory.add(_skipped(plan, model), [])
    planned = {model.key: model for model in plan.models if not model.skipped}
    wanted = planned.keys() - directory.done
    if not wanted:
        return
    count = Counter(key[0] for key in planned if key in wanted)  # a chunk of heads has models of one method
    known = work.known({key for key in planned if key[0] in count})
    logger.info("%s", ", ".join(f"{label}: {n} models" for label, n in count.items()))
    work.train_planned(planned, known, wanted)


def _skipped(plan: Plan, model: PlannedModel) -> dict[str, Any]:
    return {
        **_identity(model.key, hparams(plan.recipe, model.item, model.training)),
        "status": "skipped",
        "reason": model.skipped,
        "selected": {},
    }


def _identity(key: Identity, values: dict[str, Any]) -> dict[str, Any]:
    method, test_domains, seed, trial = key
    return {"method": method, "test_domains": list(test_domains), "seed": seed, "trial": trial, "hparams": values}


@dataclasses.dataclass(frozen=True)
class Work:
    plan: Plan
    prepared: Prepared
    directory: RunDirectory
    accelerator: Accelerator

    @property
    def engines(self) -> Engines:
        return Engines(self.plan, self.prepared, self.directory, self.accelerator)

    def train_planned(
        self,
        planned: Mapping[Identity, PlannedModel],
        known: Mapping[Identity, Known],
        wanted: Collection[Identity],
    ) -> None:
        """Trains the wanted ones of the planned models, in the chunks that all of them make."""

        def keep(model: Model) -> None:
            finished = self.finished(planned[model.trained.job.key], self.interpolated(model), model)
            if model.owned:
                self.directory.add(*finished)

        of_method: dict[str, list[PlannedModel]] = {}
        for model in planned.values():
            of_method.setdefault(model.item.label, []).append(model)
        self.engines.train(
            [
                Request(
                    models[0].item,
                    [self.job(model, known.get(model.key, {})) for model in models],
                    self.plan.criteria,
                    wanted,
                    keep,
                )
                for models in of_method.values()
                if any(model.key in wanted for model in models)
            ]
        )

    def job(self, model: PlannedModel | ExtraModel, known: Known) -> Job:
        recipe, item, split = self.plan.recipe, model.item, model.split
        setup = Setup(
            task=Task(self.plan.dataset.class_names, split.train_domains, recipe.protocol.metric),
            width=self.prepared.width,
            steps=model.steps,
            seed=model.seed,
            loss_average=recipe.training.loss_average,
            head_init=item.head_init,
            text_weight=self.prepared.text_weights[item.block.prompts] if item.reads_text else None,
            class_weight=self.class_weight(split),
            head=item.head.build,
        )
        return Job(
            method=item.label,
            test_domains=split.test_domains,
            seed=model.seed,
            trial=model.trial,
            split=split,
            setup=setup,
            make=item.algorithm.build,
            sharpness=item.sharpness.build() if item.sharpness else None,
            training=model.training,
            averaging=item.averaging.build() if item.averaging else None,
            normalized=item.reads_normalized,
            known=known,
        )

    def class_weight(self, split: Split) -> Tensor | None:
        if self.plan.recipe.training.class_weights == "none":
            return None
        return balanced(self.plan.annotations.labels[torch.cat(split.train)], len(self.plan.dataset.class_names))

    def known(self, wanted: Collection[Identity]) -> dict[Identity, Known]:
        """What `cross_domain` needs of each wanted model: its extra models' metric by step, measured now or before."""
        extra = [model for model in self.plan.extra if any(key in wanted for key in model.serves)]
        if not extra:
            return {}
        jobs = [self.job(model, {}) for model in extra]
        missing = {job.key for job in jobs if self.directory.recall(_name(job)) is None}
        wait_for_everyone(self.accelerator)  # all know what is missing before one of them adds to it
        alike: dict[tuple[str, tuple[str, ...]], list[tuple[ExtraModel, Job]]] = {}
        for model, job in zip(extra, jobs, strict=True):
            alike.setdefault((job.method, tuple(job.split.evaluation)), []).append((model, job))
        metric = self.plan.recipe.protocol.metric
        requests = [
            Request(
                models[0][0].item,
                [job for _, job in models],
                Criteria(parts, metric),
                missing,
                partial(self._measure, parts),
            )
            for (_, parts), models in alike.items()
            if any(job.key in missing for _, job in models)
        ]
        if requests:
            logger.info("%s; %d are missing", extra_models(self.plan), len(missing))
        self.engines.train(requests)
        wait_for_everyone(self.accelerator)
        courses: dict[Identity, list[Mapping[int, float]]] = {}
        for model, job in zip(extra, jobs, strict=True):
            course = self.directory.recall(_name(job))
            for part, key in zip(LEFT_OUT, model.serves, strict=False):
                courses.setdefault(key, []).append({int(step): value for step, value in course[part].items()})
        return {key: {"cross_domain": mean_course(measured)} for key, measured in courses.items()}

    def _measure(self, parts: Sequence[str], model: Model) -> None:
        """Remembers of an extra model: left-out part → steps → metric, where defined."""
        trained, job = model.trained, model.trained.job
        if trained.failure is not None:
            logger.warning("%s without %s: %s", job.method, ", ".join(job.test_domains), trained.failure)
        if model.owned:
            course = {} if trained.failure else trained.course
            defined = {part: {s: v for s, v in course.get(part, {}).items() if math.isfinite(v)} for part in parts}
            self.directory.remember(_name(job), defined)

    def interpolated(self, model: Model) -> Trained:
        """Where its method asks for it, the model on the line from the weights that it started from."""
        trained, job = model.trained, model.trained.job
        algorithm = job.make(job.setup)
        share = algorithm.interpolated if isinstance(algorithm, Algorithm) else None
        if share is None or trained.failure is not None:
            return trained
        start, metric = starting_weights(model), self.plan.recipe.protocol.metric
        images = {name: self.measured(name, rows) for name, rows in job.split.evaluation.items()}

        def evaluate(selected: Selected) -> dict[str, float]:
            logits = {name: model.logits(selected, rows).cpu() for name, rows in job.split.evaluation.items()}
            return {
                name: images[name].value(values) if values.isfinite().all() else math.nan
                for name, values in logits.items()
            }

        picked = {}
        for rule, selected in trained.selected.items():
            here = on_the_line(selected, start, share, metric, split_of(rule), evaluate)
            if here is not None:
                picked[rule] = here
            elif rule == self.plan.rules[0]:
                reason = f"{metric} is not defined by {rule} at any share of the fine-tuned weights"
                return dataclasses.replace(trained, selected={}, failure=reason)
        return dataclasses.replace(trained, selected=picked)

    def measured(self, split: str, rows: Tensor) -> RuleImages:
        """The images of a split as selection measures them in the protocol's metric."""
        plan = self.plan
        metric, classes = plan.recipe.protocol.metric, len(plan.dataset.class_names)
        return rule_images(split, rows, plan.annotations, metric, classes)

    def finished(self, planned: PlannedModel, trained: Trained, model: Model) -> Finished:
        """The record of results.json (DESIGN: R), its weights written, and its predictions on the test domain."""
        job, key = trained.job, planned.key
        values = hparams(self.plan.recipe, planned.item, planned.training)
        record = _identity(key, values) | {"status": "ok", "selected": {}}
        if trained.mixed_steps is not None:
            record["mixed_steps"] = trained.mixed_steps
        taken = planned.steps if trained.stopped_at is None else trained.stopped_at
        record["gradient_evaluations"] = planned.item.gradient_evaluations(taken, len(job.split.train))
        if trained.stopped_at is not None:
            record["stopped_at"] = trained.stopped_at
        record["train_seconds"] = round(trained.seconds, 3)
        record |= restarted(trained)
        if trained.failure is not None:
            logger.warning(
                "%s, %s held out, seed %d: %s", job.method, ", ".join(job.test_domains), job.seed, trained.failure
            )
            return record | {"status": "failed", "reason": trained.failure}, []
        predictions = []
        told: dict[int, tuple[dict[str, Tensor], dict[str, Any]]] = {}  # rules that picked the same share it
        for rule, selected in trained.selected.items():
            if id(selected.state) not in told:
                scores = {name: model.logits(selected, rows).cpu() for name, rows in job.split.evaluation.items()}
                broken = [name for name, values in scores.items() if not values.isfinite().all()]
                if broken:
                    reason = f"the logits of {', '.join(broken)} images are not finite at the step {selected.step}"
                    return record | {"status": "failed", "reason": reason, "selected": {}}, []
                told[id(selected.state)] = scores, self.selection(planned, rule, selected, scores, model)
            scores, own = told[id(selected.state)]
            record["selected"][rule] = own | self.value(job, rule, selected, scores)
            predictions.append(self.prediction(key, rule, job.split.evaluation["test"], scores["test"]))
        return record, predictions

    def prediction(self, key: Identity, rule: str, rows: Tensor, logits: Tensor) -> Prediction:
        values = per_image(self.plan.recipe.protocol.metric, logits, self.plan.annotations.labels[rows])
        predicted = logits.argmax(-1).numpy().astype(np.int64)
        return make_prediction(key, self.plan.dataset, rule, rows.numpy(), predicted, values)

    def selection(
        self, planned: PlannedModel, rule: str, selected: Selected, logits: dict[str, Tensor], model: Model
    ) -> dict[str, Any]:
        job, weights = model.trained.job, ""
        metrics = self.metrics(job.split, logits)
        if model.owned:
            weights = self.directory.save_weights(planned.key, rule, selected.state, self.metadata(selected, job))
        curve = {"curve": selected.curve} if selected.curve else {}
        own = {"step": selected.step, **selected.hparams, "weights": weights, "metrics": metrics, **curve}
        flags = self.flags(planned, selected)
        return own | ({"flags": flags} if flags else {})

    def value(self, job: Job, rule: str, selected: Selected, logits: Mapping[str, Tensor]) -> dict[str, float]:
        """What the rule saw of its pick, as `value`; of averaged weights, which it did not see, the same on them."""
        value = job.known[rule].get(selected.step) if rule in job.known else selected.value
        if value is None:
            name = split_of(rule)
            value = self.measured(name, job.split.evaluation[name]).value(logits[name])
        return {"value": value} if math.isfinite(value) else {}

    def flags(self, planned: PlannedModel, selected: Selected) -> list[str]:
        """What makes a pick doubtful: a better one may lie beyond the steps or beyond a searched range."""
        found = []
        if not planned.item.is_solver and planned.item.averaging is None and selected.step == planned.steps:
            found.append("last step picked")
        search, values = self.plan.recipe.search, hparams(self.plan.recipe, planned.item, planned.training)
        item = next(item for item in self.plan.recipe.methods if item.label == planned.item.label)
        for key, _ in searched(self.plan.recipe, item):
            if at_the_edge(search, key, drawn_value(values, key)):
                found.append(f"{key} at the edge of its range")
        return found

    def metrics(self, split: Split, logits: Mapping[str, Tensor]) -> dict[str, Any]:
        plan, about, metrics = self.plan, self.plan.annotations, {}
        for name, rows in split.evaluation.items():
            names = plan.dataset.class_names, plan.dataset.domain_names
            values = score(logits[name], about.labels[rows], about.domains[rows], *names, worst_of=about.worst_of[rows])
            metrics[name] = dataclasses.asdict(values)
        return metrics

    def metadata(self, selected: Selected, job: Job) -> dict[str, str]:
        """What a weights file says of itself: who uses it must treat images and features alike."""
        normalized = self.prepared.normalize or job.normalized
        preprocessing = self.prepared.preprocessing.model_dump_json()
        return {"normalize": str(normalized).lower(), "preprocessing": preprocessing, "step": str(selected.step)}


def restarted(trained: Trained) -> dict[str, Any]:
    """What a record says of a training that could not go on where it was interrupted, and started again."""
    if not trained.restarts:
        return {}
    return {"restarted": {"times": len(trained.restarts), "reasons": list(trained.restarts)}}


def _name(job: Job) -> str:
    """Of an extra model, for what is remembered of it."""
    return f"cross_domain/{job.method}/{','.join(job.test_domains)}/seed{job.seed}-trial{job.trial}-{job.setup.steps}"
