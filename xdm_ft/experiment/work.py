"""Trains what the plan lists, by the engine that fits, and turns each model into its record."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from xdm_ft.algorithms import Algorithm, Setup
from xdm_ft.data.loading.splits import SELECTION_SPLIT
from xdm_ft.evaluation.metrics import metric as metric_of
from xdm_ft.evaluation.metrics import per_image, score
from xdm_ft.evaluation.predictions import Prediction
from xdm_ft.experiment.material import Material, build_encoder
from xdm_ft.experiment.plan import Plan, PlannedModel, hparams
from xdm_ft.experiment.run_directory import Identity, RunDirectory, make_prediction
from xdm_ft.features.cache import Features
from xdm_ft.progress import progress
from xdm_ft.tensors import Task
from xdm_ft.training import Job, Selected, Trained
from xdm_ft.training.interpolation import on_the_line

if TYPE_CHECKING:
    from accelerate import Accelerator

    from xdm_ft.encoders import Encoder

logger = logging.getLogger("xdm_ft")
Logits = Callable[[Selected, Tensor], Tensor]  # (what a rule selected, rows) → float32 logits [n,C]
Finished = tuple[dict[str, Any], list[Prediction]]


def finished_models(
    plan: Plan, material: Material, directory: RunDirectory, accelerator: Accelerator
) -> Iterator[Finished]:
    """The record and test predictions of every model that the run directory does not have yet."""
    work = _Work(plan, material, directory, accelerator)
    done = directory.done
    for item in plan.recipe.methods:
        models = [model for model in plan.models if model.item is item and model.key not in done]
        yield from ((_skipped(plan, model), []) for model in models if model.skipped)
        jobs = [work.job(model) for model in models if not model.skipped]
        if not jobs:
            continue
        logger.info("%s: %d models", item.label, len(jobs))
        if plan.recipe.trainable and not item.is_solver:
            yield from work.end_to_end(jobs)
        elif accelerator.is_main_process:
            yield from work.solved(jobs) if item.is_solver else work.banked(jobs)


def _skipped(plan: Plan, model: PlannedModel) -> dict[str, Any]:
    return {
        **_identity(model.key, hparams(plan.recipe, model.item)),
        "status": "skipped",
        "reason": model.skipped,
        "selected": {},
    }


def _identity(key: Identity, values: dict[str, Any]) -> dict[str, Any]:
    method, test_domains, seed, trial = key
    return {"method": method, "test_domains": list(test_domains), "seed": seed, "trial": trial, "hparams": values}


@dataclasses.dataclass(frozen=True)
class _Work:
    plan: Plan
    material: Material
    directory: RunDirectory
    accelerator: Accelerator

    @property
    def rules(self) -> tuple[str, ...]:
        return (self.plan.recipe.protocol.selection,)

    def job(self, model: PlannedModel) -> Job:
        recipe, item = self.plan.recipe, model.item
        features = self.material.features
        setup = Setup(
            task=Task(self.plan.dataset.class_names, model.split.train_domains, recipe.protocol.metric),
            width=features.width if features is not None else 0,
            steps=model.steps,
            seed=model.seed,
            loss_average=recipe.training.loss_average,
            head_init=item.head_init,
            text_weight=self.material.text_weights[item.block.prompts] if item.reads_text else None,
        )
        return Job(
            method=item.label,
            test_domains=model.split.test_domains,
            seed=model.seed,
            trial=0,
            split=model.split,
            setup=setup,
            make=item.algorithm.build,
            sharpness=item.sharpness.build() if item.sharpness else None,
            lr=recipe.training.lr,
            weight_decay=recipe.training.weight_decay,
            averaging=item.averaging.build() if item.averaging else None,
            normalized=item.reads_normalized,
        )

    def banked(self, jobs: list[Job]) -> Iterator[Finished]:
        """All jobs of a method together, on cached features."""
        from xdm_ft.training.bank import head_logits, train_bank

        features = self.features_of(jobs[0])
        for trained in train_bank(
            jobs,
            features,
            self.plan.labels,
            self.plan.domains,
            self.plan.recipe.training,
            self.rules,
            self.plan.recipe.protocol.metric,
            record=self.record,
            show=self.accelerator.is_main_process,
        ):
            logits = _logits_of(features, head_logits)
            yield self.finished(self.interpolated(trained, logits), logits)

    def solved(self, jobs: list[Job]) -> Iterator[Finished]:
        """Methods that find their head without gradient steps."""
        from xdm_ft.training.bank import head_logits
        from xdm_ft.training.solvers import solve

        plan, metric = self.plan, self.plan.recipe.protocol.metric
        with progress(jobs[0].method, len(jobs), "models", self.accelerator.is_main_process) as bar:
            for job in jobs:
                features = self.features_of(job)
                trained = solve(job, features, plan.labels, plan.domains, self.rules, metric)
                yield self.finished(trained, _logits_of(features, head_logits))
                bar.advance()

    def end_to_end(self, jobs: list[Job]) -> Iterator[Finished]:
        """One model after another, its encoder trained too."""
        from xdm_ft.training.loop import predict, train_model

        training = self.plan.recipe.training
        for job in jobs:
            encoder = build_encoder(self.plan.recipe, job.seed)
            job = dataclasses.replace(job, setup=dataclasses.replace(job.setup, width=encoder.width))
            trained = train_model(
                job,
                encoder,
                self.plan.dataset,
                self.plan.labels,
                self.plan.domains,
                training,
                self.rules,
                self.plan.recipe.protocol.metric,
                self.plan.recipe.encoder_common.batch_norm,
                self.accelerator,
                record=self.record,
                show=self.accelerator.is_main_process,
                unfreeze_at=self.plan.recipe.encoder_common.unfreeze_at,
            )

            def logits(selected: Selected, rows: Tensor, encoder: Encoder = encoder) -> Tensor:
                return predict(encoder, selected.state, self.plan.dataset, rows, self.accelerator, training.batch_size)

            yield self.finished(self.interpolated(trained, logits, encoder), logits)

    def interpolated(self, trained: Trained, logits: Logits, encoder: Encoder | None = None) -> Trained:
        """Where its method asks for it, the model on the line from the weights that it and `encoder` started from."""
        job = trained.job
        algorithm = job.make(job.setup)
        assert isinstance(algorithm, Algorithm)
        share = algorithm.interpolated
        if share is None or trained.failure is not None:
            return trained
        start = algorithm.state_dict()
        if encoder is not None:
            start |= {f"encoder.{name}": value for name, value in encoder.state_dict().items()}
        metric = self.plan.recipe.protocol.metric

        def evaluate(selected: Selected) -> dict[str, float]:
            return {name: self.value(logits(selected, rows).cpu(), rows) for name, rows in job.split.evaluation.items()}

        picked = {}
        for rule, selected in trained.selected.items():
            here = on_the_line(selected, start, share, metric, SELECTION_SPLIT[rule], evaluate)
            if here is None:
                reason = f"{metric} is not defined by {rule} at any share of the fine-tuned weights"
                return dataclasses.replace(trained, selected={}, failure=reason)
            picked[rule] = here
        return dataclasses.replace(trained, selected=picked)

    def value(self, logits: Tensor, rows: Tensor) -> float:
        """The protocol's metric; nan where a logit is not finite."""
        if not logits.isfinite().all():
            return float("nan")
        return metric_of(self.plan.recipe.protocol.metric, logits, self.plan.labels[rows], self.plan.domains[rows])

    def features_of(self, job: Job) -> Features:
        features = self.material.features
        assert features is not None, "the plan gathers features for every method that reads them"
        return features.normalized() if job.normalized else features

    def record(self, job: Job, step: int, values: dict[str, float]) -> None:
        self.directory.record_scalars(f"{job.method}/{','.join(job.test_domains)}/seed{job.seed}", step, values)

    def finished(self, trained: Trained, logits: Logits) -> Finished:
        """The record of results.json (DESIGN: R), its weights written, and its predictions on the test domain."""
        job, plan = trained.job, self.plan
        item = next(item for item in plan.recipe.methods if item.label == job.method)
        key = (job.method, job.test_domains, job.seed, job.trial)
        record = _identity(key, hparams(plan.recipe, item)) | {"status": "ok", "selected": {}}
        if trained.mixed_steps is not None:
            record["mixed_steps"] = trained.mixed_steps
        record["train_seconds"] = round(trained.seconds, 3)
        if trained.failure is not None:
            logger.warning(
                "%s, %s held out, seed %d: %s", job.method, ", ".join(job.test_domains), job.seed, trained.failure
            )
            return record | {"status": "failed", "reason": trained.failure}, []
        predictions = []
        for rule, selected in trained.selected.items():
            scores = {name: logits(selected, rows).cpu() for name, rows in job.split.evaluation.items()}
            broken = [name for name, values in scores.items() if not values.isfinite().all()]
            if broken:
                reason = f"the logits of {', '.join(broken)} images are not finite at the selected step {selected.step}"
                return record | {"status": "failed", "reason": reason, "selected": {}}, []
            record["selected"][rule] = self.selection(key, rule, selected, scores, job)
            predictions.append(self.prediction(key, rule, job.split.evaluation["test"], scores["test"]))
        return record, predictions

    def prediction(self, key: Identity, rule: str, rows: Tensor, logits: Tensor) -> Prediction:
        values = per_image(self.plan.recipe.protocol.metric, logits, self.plan.labels[rows])
        predicted = logits.argmax(-1).numpy().astype(np.int64)
        return make_prediction(key, self.plan.dataset, rule, rows.numpy(), predicted, values)

    def selection(
        self, key: Identity, rule: str, selected: Selected, logits: dict[str, Tensor], job: Job
    ) -> dict[str, Any]:
        dataset = self.plan.dataset
        metrics = {}
        for name, rows in job.split.evaluation.items():
            labels, domains = self.plan.labels[rows], self.plan.domains[rows]
            values = score(logits[name], labels, domains, dataset.class_names, dataset.domain_names)
            metrics[name] = dataclasses.asdict(values)
        weights = ""
        if self.accelerator.is_main_process:
            normalized = self.material.normalize or job.normalized
            metadata = {"normalize": str(normalized).lower(), "step": str(selected.step)}
            weights = self.directory.save_weights(key, rule, selected.state, metadata)
        curve = {"curve": selected.curve} if selected.curve else {}
        return {"step": selected.step, **selected.hparams, "weights": weights, "metrics": metrics, **curve}


def _logits_of(features: Features, head_logits: Callable[[Features, Tensor, dict[str, Tensor]], Tensor]) -> Logits:
    return lambda selected, rows: head_logits(features, rows, selected.state)
