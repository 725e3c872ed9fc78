"""Jobs → trained models, by the engine that fits: the head bank, a solver, or the loop."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from xdm_ft.algorithms import Algorithm
from xdm_ft.experiment.heartbeat import wait_for_everyone
from xdm_ft.experiment.machine import cores, local_processes
from xdm_ft.experiment.parallel import share_out
from xdm_ft.experiment.plan import Plan
from xdm_ft.experiment.prepared import Prepared, build_encoder
from xdm_ft.experiment.run_directory import RunDirectory
from xdm_ft.features.cache import Features
from xdm_ft.progress import progress
from xdm_ft.recipe.blocks import MethodItem
from xdm_ft.tensors import Criteria
from xdm_ft.training import Identity, Job, Selected, Trained
from xdm_ft.training.memory import running_out_named
from xdm_ft.training.selection import FINAL_FIT

if TYPE_CHECKING:
    from accelerate import Accelerator

    from xdm_ft.encoders import Encoder

SOLVER_PASSES = 100  # of a solver over its training images, to order it among heads (linear_probe; others take fewer)
Logits = Callable[[Selected, Tensor], Tensor]  # (what a rule selected, rows) → float32 logits [n,C]


class Model(NamedTuple):
    """What an engine returns, and how to ask it."""

    trained: Trained
    logits: Logits
    owned: bool  # by this process: it writes what there is to keep
    encoder: Encoder | None = None  # as it was before training, where it was trained too


class Request(NamedTuple):
    """Models of one method to train."""

    item: MethodItem
    jobs: Sequence[Job]  # all that may share a chunk of heads, the unwanted ones too
    criteria: Criteria
    wanted: Collection[Identity]
    keep: Callable[[Model], None]  # called with each wanted model, where it was trained


class Piece(NamedTuple):
    """What one process trains at a time: a chunk of heads, or one model of a solver."""

    request: Request
    jobs: Sequence[Job]
    images: int  # that pass forward and backward through its heads: what it costs


@dataclasses.dataclass(frozen=True)
class Engines:
    plan: Plan
    prepared: Prepared
    directory: RunDirectory
    accelerator: Accelerator

    def train(self, requests: Sequence[Request]) -> None:
        """Trains the wanted models of all requests.

        What is not trained end to end comes first, in one queue, the longest piece first: the processes take pieces
        from it, and on a CPU each of them for all of its cores. Who trains a piece changes no number of it.
        """
        apart, together = list[Request](), list[Request]()
        for request in requests:
            (together if self.plan.recipe.trainable and not request.item.is_solver else apart).append(request)
        self._share_out([piece for request in apart for piece in self._pieces(request)])
        if together:
            wait_for_everyone(self.accelerator)  # another one may still be at its last piece
        for request in together:
            self._end_to_end([job for job in request.jobs if job.key in request.wanted], request)

    def _pieces(self, request: Request) -> Iterator[Piece]:
        """Those with a wanted model. A chunk of heads is then trained whole, as numbers depend on it to rounding."""
        from xdm_ft.training.bank.train import chunks

        item = request.item
        parts = [[job] for job in request.jobs] if item.is_solver else chunks(request.jobs)
        for jobs in parts:
            if not any(job.key in request.wanted for job in jobs):
                continue
            setup, pools = jobs[0].setup, jobs[0].split.train
            if item.is_solver:
                images = SOLVER_PASSES * sum(map(len, pools))
            else:
                batch = jobs[0].training.images_per_step(len(pools))
                images = len(jobs) * batch * item.gradient_evaluations(setup.steps, len(pools))
            yield Piece(request, jobs, images)

    def _share_out(self, pieces: Sequence[Piece]) -> None:
        """Every process takes the longest piece that none has taken yet, until none is left."""
        if not pieces:
            return
        queue = sorted(pieces, key=lambda piece: -piece.images)
        processes = 1 if self.accelerator.device.type != "cpu" else max(1, cores() // local_processes())

        def share(number: int) -> None:
            self.directory.begin(number)
            for place, (request, jobs, _) in enumerate(queue, start=1):
                if self.directory.take(jobs, request.criteria.rules):
                    show = number == 0 and self.accelerator.is_main_process
                    train = self._solved if request.item.is_solver else self._banked
                    train(jobs, request, f" ({place} of {len(queue)})", show)

        share_out(share, min(processes, len(queue)))

    def _banked(self, jobs: Sequence[Job], request: Request, place: str, show: bool) -> None:
        """A chunk of heads, on cached features."""
        from xdm_ft.training.bank.train import train_bank

        plan, features = self.plan, self._features_of(jobs[0])
        together = f"{len(jobs)} heads together" if len(jobs) > 1 else "one head"
        with running_out_named(f"{jobs[0].method}, {together}", "lower training.batch_size"):
            for trained in train_bank(
                jobs,
                features,
                plan.annotations,
                request.criteria,
                record=self._record,
                show=show,
                place=place,
                checkpoint=partial(self.directory.checkpoint, rules=request.criteria.rules),
            ):
                if trained.job.key in request.wanted:
                    request.keep(Model(trained, _cached_logits(trained.job, features), owned=True))

    def _solved(self, jobs: Sequence[Job], request: Request, place: str, show: bool) -> None:
        """A model of a method that finds its head without gradient steps."""
        from xdm_ft.training.solvers import solve

        [job] = jobs
        features = self._features_of(job)
        remedy = "it needs all training features at once; train on fewer images or free some memory"
        with (
            running_out_named(f"{job.method}, {', '.join(job.test_domains)} held out", remedy),
            progress(f"{job.method}{place}", 1, "models", show) as bar,
        ):
            trained = solve(job, features, self.plan.annotations, request.criteria)
            request.keep(Model(trained, _cached_logits(job, features), owned=True))
            bar.advance()

    def _end_to_end(self, jobs: Sequence[Job], request: Request) -> None:
        """One model after another, its encoder trained too."""
        for job in jobs:
            name = f"{job.method}, {', '.join(job.test_domains)} held out, seed {job.seed}"
            with running_out_named(name, "lower training.batch_size or raise training.accumulation"):
                self._one_end_to_end(job, request)

    def _one_end_to_end(self, job: Job, request: Request) -> None:
        from xdm_ft.training.end_to_end.train import predict, train_model

        plan, batch_size = self.plan, self.plan.recipe.training.batch_size
        encoder = build_encoder(plan.recipe, job.seed)
        checkpoint = self.directory.checkpoint([job], request.criteria.rules, writes=self.accelerator.is_main_process)
        trained = train_model(
            job,
            encoder,
            plan.dataset,
            plan.annotations,
            request.criteria,
            self.accelerator,
            batch_norm=plan.recipe.encoder_common.batch_norm,
            record=self._record,
            show=self.accelerator.is_main_process,
            unfreeze_at=plan.recipe.encoder_common.unfreeze_at,
            augmentation=plan.recipe.train_augmentation,
            checkpoint=checkpoint,
        )

        def logits(selected: Selected, rows: Tensor) -> Tensor:
            return predict(job, encoder, selected.state, plan.dataset, rows, self.accelerator, batch_size)

        request.keep(Model(trained, logits, self.accelerator.is_main_process, encoder))
        checkpoint.remove()

    def _features_of(self, job: Job) -> Features:
        features = self.prepared.features
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
    if model.encoder is None:
        return algorithm.state_dict()
    from xdm_ft.training.end_to_end.gradients import EndToEnd

    assert isinstance(algorithm, Algorithm)
    return EndToEnd(copy.deepcopy(model.encoder), algorithm, "frozen").weights()


def _cached_logits(job: Job, features: Features) -> Logits:
    """Logits of what a rule selected, from cached features."""
    from xdm_ft.training.bank.cached_data import cached_logits

    model = job.make(job.setup).eval()

    def logits(selected: Selected, rows: Tensor) -> Tensor:
        # without a copy: products depend on the layout in memory too, by rounding
        model.load_state_dict(selected.state, assign=True)
        return cached_logits(features, rows, model.to(features.device))

    return logits
