"""Jobs → trained models, by the engine that fits: the head bank, a solver, or the loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from xdm_ft.algorithms import Algorithm
from xdm_ft.experiment.machine import cores, local_processes
from xdm_ft.experiment.material import Material, build_encoder
from xdm_ft.experiment.plan import Plan
from xdm_ft.experiment.run_directory import RunDirectory
from xdm_ft.experiment.team import share_out
from xdm_ft.features.cache import Features
from xdm_ft.progress import progress
from xdm_ft.recipe_blocks import MethodItem
from xdm_ft.training import Identity, Job, Selected, Trained
from xdm_ft.training.selection import FINAL_FIT

if TYPE_CHECKING:
    from accelerate import Accelerator

    from xdm_ft.encoders import Encoder

Logits = Callable[[Selected, Tensor], Tensor]  # (what a rule selected, rows) → float32 logits [n,C]


class Model(NamedTuple):
    """What an engine returns, and how to ask it."""

    trained: Trained
    logits: Logits
    owned: bool  # by this process: it writes what there is to keep
    encoder: Encoder | None = None  # as it was before training, where it was trained too


@dataclasses.dataclass(frozen=True)
class Engines:
    plan: Plan
    material: Material
    directory: RunDirectory
    accelerator: Accelerator

    def train(
        self,
        item: MethodItem,
        jobs: Sequence[Job],
        rules: Sequence[str],
        wanted: Collection[Identity],
        keep: Callable[[Model], None],
    ) -> None:
        """Trains the wanted ones of all jobs of one method; `keep` is called with each model, where it was trained.

        What is not trained end to end the processes share out, and on a CPU each of them to its cores.
        """
        if self.plan.recipe.trainable and not item.is_solver:
            for model in self._end_to_end([job for job in jobs if job.key in wanted], rules):
                keep(model)
            return
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        here = 1 if self.accelerator.device.type != "cpu" else max(1, cores() // local_processes())

        def share(number: int) -> None:
            self.directory.begin(number)
            process = rank * here + number, ranks * here
            if not item.is_solver:
                trained = self._banked(jobs, rules, wanted, process)
            else:
                trained = self._solved([job for job in jobs if job.key in wanted][process[0] :: process[1]], rules)
            for model in trained:
                keep(model)

        share_out(share, here)

    def _banked(
        self, jobs: Sequence[Job], rules: Sequence[str], wanted: Collection[Identity], process: tuple[int, int]
    ) -> Iterator[Model]:
        """All jobs of a method together, on cached features."""
        from xdm_ft.training.bank import head_logits, train_bank

        plan, features = self.plan, self._features_of(jobs[0])
        logits = _logits_of(features, head_logits)
        for trained in train_bank(
            jobs,
            features,
            plan.labels,
            plan.domains,
            plan.recipe.training,
            rules,
            plan.recipe.protocol.metric,
            record=self._record,
            show=process[0] == 0,
            worst_of=plan.worst_of,
            wanted=wanted,
            process=process,
            checkpoint=partial(self.directory.checkpoint, rules=rules),
        ):
            yield Model(trained, logits, owned=True)

    def _solved(self, jobs: Sequence[Job], rules: Sequence[str]) -> Iterator[Model]:
        """Methods that find their head without gradient steps."""
        from xdm_ft.training.bank import head_logits
        from xdm_ft.training.solvers import solve

        if not jobs:
            return
        plan, metric = self.plan, self.plan.recipe.protocol.metric
        with progress(jobs[0].method, len(jobs), "models", self.accelerator.is_main_process) as bar:
            for job in jobs:
                features = self._features_of(job)
                trained = solve(job, features, plan.labels, plan.domains, rules, metric, plan.worst_of)
                yield Model(trained, _logits_of(features, head_logits), owned=True)
                bar.advance()

    def _end_to_end(self, jobs: Sequence[Job], rules: Sequence[str]) -> Iterator[Model]:
        """One model after another, its encoder trained too."""
        from xdm_ft.training.loop import predict, train_model

        plan, training = self.plan, self.plan.recipe.training
        for job in jobs:
            encoder = build_encoder(plan.recipe, job.seed)
            job = dataclasses.replace(job, setup=dataclasses.replace(job.setup, width=encoder.width))
            checkpoint = self.directory.checkpoint([job], rules, writes=self.accelerator.is_main_process)
            trained = train_model(
                job,
                encoder,
                plan.dataset,
                plan.labels,
                plan.domains,
                training,
                rules,
                plan.recipe.protocol.metric,
                plan.recipe.encoder_common.batch_norm,
                self.accelerator,
                record=self._record,
                show=self.accelerator.is_main_process,
                unfreeze_at=plan.recipe.encoder_common.unfreeze_at,
                augmentation=plan.recipe.train_augmentation,
                worst_of=plan.worst_of,
                checkpoint=checkpoint,
            )

            def logits(selected: Selected, rows: Tensor, encoder: Encoder = encoder) -> Tensor:
                return predict(encoder, selected.state, plan.dataset, rows, self.accelerator, training.batch_size)

            yield Model(trained, logits, self.accelerator.is_main_process, encoder)
            checkpoint.remove()  # whoever asks for the next model has kept this one

    def _features_of(self, job: Job) -> Features:
        features = self.material.features
        assert features is not None, "the plan gathers features for every method that reads them"
        return features.normalized() if job.normalized else features

    def _record(self, job: Job, step: int, values: dict[str, float]) -> None:
        place = f"{job.method}/{','.join(job.test_domains) or FINAL_FIT}/seed{job.seed}"
        trial = f"-trial{job.trial}" if self.plan.recipe.search.trials > 1 else ""
        measured = {name: value for name, value in values.items() if not name.startswith(f"{FINAL_FIT}/")}
        self.directory.record_scalars(f"{place}{trial}", step, measured)


def starting_weights(model: Model) -> dict[str, Tensor]:
    """What the training of a model started from: its head, and its encoder where that was trained too."""
    job = model.trained.job
    algorithm = job.make(job.setup)
    assert isinstance(algorithm, Algorithm)
    start = algorithm.state_dict()
    if model.encoder is not None:
        start |= {f"encoder.{name}": value for name, value in model.encoder.state_dict().items()}
    return start


def _logits_of(features: Features, head_logits: Callable[[Features, Tensor, dict[str, Tensor]], Tensor]) -> Logits:
    return lambda selected, rows: head_logits(features, rows, selected.state)
