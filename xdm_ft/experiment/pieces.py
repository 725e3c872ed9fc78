"""Jobs → trained models. The method and the recipe decide the engine: head bank, solver, or training end to end."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from xdm_ft.algorithms import Algorithm, Solver
from xdm_ft.evaluation.records import ModelKey
from xdm_ft.experiment.plan import Plan
from xdm_ft.experiment.prepare import Prepared, build_encoder
from xdm_ft.experiment.resume import comparable, of_method
from xdm_ft.experiment.tracking import write_curves
from xdm_ft.experiment.work import Overall
from xdm_ft.features.cache import Features
from xdm_ft.protocol.splits import Split
from xdm_ft.recipe.method import MethodItem
from xdm_ft.runtime.machine import out_of_memory_as_user_error
from xdm_ft.runtime.progress import Progress
from xdm_ft.runtime.tensors import Criteria
from xdm_ft.storage.atomic import replace_file
from xdm_ft.storage.checkpoint import Checkpoint
from xdm_ft.storage.digests import digest
from xdm_ft.storage.names import file_name
from xdm_ft.storage.run_directory import RunDirectory
from xdm_ft.training import Job, Selected, Trained, Training
from xdm_ft.training.selection import FINAL_FIT
from xdm_ft.version import __version__

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from torch.profiler import profile

    from xdm_ft.encoders import Encoder
    from xdm_ft.training.end_to_end.model import EncoderPart


SOLVER_PASSES = 100  # of linear_probe over its training images, roughly; other solvers make fewer
HEADS_PER_FILE = 32  # as many as train together on a CPU; they wait in memory until the file is written
ENCODER_PASSES = 1000  # passes of an image through a head that cost as much as one through an encoder, roughly
Logits = Callable[[Selected, Tensor], Tensor]  # (selected weights, rows) → float32 logits [n,C]


class Model(NamedTuple):
    """A trained model and the function that computes its logits."""

    trained: Trained
    logits: Logits
    encoder: Encoder | None = None  # before training; None if it is frozen
    features: Logits | None = None  # of the trained encoder, float32 [n,K]; None if it is frozen
    shared: str | None = None  # name of the file that it shares with other heads; None: it has files of its own

    def starting_weights(self) -> dict[str, Tensor]:
        """Returns the weights before training: those of the head, and of the encoder if it is trained too."""
        from xdm_ft.training.end_to_end.model import EndToEnd

        algorithm = self.trained.job.make(self.trained.job.setup)
        if self.encoder is None:
            return algorithm.state_dict()
        assert isinstance(algorithm, Algorithm)
        return EndToEnd(copy.deepcopy(self.encoder), algorithm, "frozen").weights()


def cost(item: MethodItem, training: Training, split: Split, steps: int, trains_encoder: bool) -> int:
    """Returns the number of images that pass forward and backward through a head to train one model.

    It orders the queue and measures progress; a pass through an encoder counts as ENCODER_PASSES.
    """
    if item.is_solver:
        return SOLVER_PASSES * sum(map(len, split.train))
    domains = len(split.train)
    images = training.images_per_step(domains) * item.gradient_evaluations(steps, domains)
    return images * (ENCODER_PASSES if trains_encoder else 1)


class Request(NamedTuple):
    """Models of one method to train."""

    item: MethodItem
    jobs: Sequence[Job]  # all of the method and generation, wanted or not: together they determine the chunks of heads
    criteria: Criteria
    wanted: Collection[ModelKey]


class Piece(NamedTuple):
    """The unit of work: a chunk of heads, one model of a solver, or one model that trains end to end."""

    request: Request
    jobs: Sequence[Job]
    cost: int

    @property
    def note(self) -> str:
        """What trains now, for the bar."""
        if self.is_end_to_end:
            [job] = self.jobs
            return f"{job.method}, {', '.join(job.test_domains)}, seed {job.seed}"
        return self.jobs[0].method + (f" ({len(self.jobs)} models)" if len(self.jobs) > 1 else "")

    @property
    def name(self) -> str:
        """The file name for its training."""
        return training_name(self.jobs, self.request.criteria.rules)

    @property
    def is_end_to_end(self) -> bool:
        return self.request.item.trainable is not False


@dataclasses.dataclass(frozen=True)
class Engines:
    plan: Plan
    prepared: Prepared
    directory: RunDirectory
    accelerator: Accelerator

    def pieces(self, requests: Sequence[Request], device: torch.device) -> list[Piece]:
        """Returns the pieces of work on cached features, the longest first.

        A chunk with a wanted model is trained whole: which heads train together affects the rounding of each, and the
        kind of the device that they train on decides it.
        """
        from xdm_ft.training.bank.train import chunks

        found = list[Piece]()
        for request in requests:
            item = request.item
            if item.trainable is not False:
                continue
            each = ([job] for job in request.jobs)
            for jobs in each if item.is_solver else chunks(request.jobs, device):
                if any(job.key in request.wanted for job in jobs):
                    found.append(Piece(request, jobs, len(jobs) * self._cost(jobs[0], item)))
        # with the longest first, all processes end at about the same time
        return sorted(found, key=lambda piece: -piece.cost)

    def pieces_end_to_end(self, requests: Sequence[Request]) -> list[Piece]:
        """Returns the wanted models that train end to end, in their order."""
        return [
            Piece(request, [job], self._cost(job, request.item))
            for request in requests
            if request.item.trainable is not False
            for job in request.jobs
            if job.key in request.wanted
        ]

    def _cost(self, job: Job, item: MethodItem) -> int:
        return cost(item, job.training, job.split, job.setup.steps, item.trainable is not False)

    def train_pieces(self, queue: Sequence[Piece], overall: Overall) -> Iterator[list[Model]]:
        """Takes the next piece that no other process has taken, until none is left. Yields its wanted models.

        They must be saved before the next piece is requested. The numbers of a piece do not depend on the process that
        trains it.
        """
        for piece in queue:
            if self.directory.take(piece.name):
                yield from self.train_piece(piece, overall)

    def train_piece(self, piece: Piece, overall: Overall) -> Iterator[list[Model]]:
        """Trains a piece and yields its wanted models. All processes train a model end to end together."""
        request, jobs, _ = piece
        train, units = self._banked, sum(job.setup.steps for job in jobs)
        # all processes do the same work end to end, which counts once
        counts = not piece.is_end_to_end or self.accelerator.is_main_process
        if piece.is_end_to_end:
            train = self._end_to_end
        elif isinstance(solver := jobs[0].make(jobs[0].setup), Solver):
            train, units = self._solved, solver.candidates
        profile = self._profile(jobs[0].method) if counts else None
        worth = piece.cost if counts else 0
        with overall.share(piece.note, worth, units) as bar, profiled(bar, profile) as watched:
            yield from train(jobs, request, watched)

    def _banked(self, jobs: Sequence[Job], request: Request, bar: Progress) -> Iterator[list[Model]]:
        """Trains a chunk of heads on cached features, and yields its wanted models."""
        from xdm_ft.training.bank.train import train_chunk

        features = self.prepared.of(request.item).features_of(jobs[0])
        together = f"{len(jobs)} heads together" if len(jobs) > 1 else "one head"
        named = partial(out_of_memory_as_user_error, f"{jobs[0].method}, {together}", "lower training.batch_size")
        rules = request.criteria.rules
        checkpoint = self._checkpoint(jobs, rules)
        with named():
            trained = train_chunk(
                jobs,
                features,
                self.plan.annotations,
                request.criteria,
                record=partial(write_curves, self.plan, jobs, directory=self.directory),
                bar=bar,
                checkpoint=checkpoint,
            )
            logits = _cached_logits(jobs[0], features, named)  # heads that train together differ in their state only
            file_of = _shared_files(jobs, rules) if self.plan.is_large else {}
            wanted = [one for one in trained if one.job.key in request.wanted]
            yield [Model(one, logits, shared=file_of.get(one.job.key)) for one in wanted]
        checkpoint.remove()  # the caller has saved these models when it asks for the next ones

    def _solved(self, jobs: Sequence[Job], request: Request, bar: Progress) -> Iterator[list[Model]]:
        """Computes the head of a solver, which takes no gradient steps, and yields its model in a list."""
        from xdm_ft.training.solvers import solve

        [job] = jobs
        features = self.prepared.of(request.item).features_of(job)
        remedy = "a solver needs all training features in memory; train on fewer images or free some memory"
        named = partial(out_of_memory_as_user_error, f"{job.method}, {', '.join(job.test_domains)} held out", remedy)
        with named():
            trained = solve(job, features, self.plan.annotations, request.criteria, bar)
            yield [Model(trained, _cached_logits(job, features, named))]

    def _end_to_end(self, jobs: Sequence[Job], request: Request, bar: Progress) -> Iterator[list[Model]]:
        """Trains a model with its encoder, in all processes, and yields it in a list."""
        from xdm_ft.training.end_to_end.train import predict, train_model

        [job], plan, accelerator, item = jobs, self.plan, self.accelerator, request.item
        common, batch_size = item.encoder_common, plan.recipe.training.batch_size
        encoder, part = self._part(item, job.seed)
        checkpoint = self._checkpoint([job], request.criteria.rules, writes=accelerator.is_main_process)
        name = f"{job.method}, {', '.join(job.test_domains)} held out, seed {job.seed}"
        named = partial(out_of_memory_as_user_error, name, "lower training.batch_size or raise training.accumulation")
        with named():
            trained = train_model(
                job,
                encoder,
                plan.dataset,
                plan.annotations,
                request.criteria,
                accelerator,
                batch_norm=common.batch_norm,
                record=partial(write_curves, plan, [job], directory=self.directory),
                bar=bar,
                unfreeze_at=common.unfreeze_at,
                augmentation=plan.recipe.augmentation_of(item),
                checkpoint=checkpoint,
                part=part,
            )

        def logits(selected: Selected, rows: Tensor) -> Tensor:
            with named():
                return predict(job, encoder, selected.state, plan.dataset, rows, accelerator, batch_size, part=part)

        def features(selected: Selected, rows: Tensor) -> Tensor:
            with named():
                state, images = selected.state, plan.dataset
                return predict(job, encoder, state, images, rows, accelerator, batch_size, of="features", part=part)

        yield [Model(trained, logits, encoder, features)]
        checkpoint.remove()  # the caller has saved this model when it asks for the next one

    def _part(self, item: MethodItem, seed: int) -> tuple[Encoder, EncoderPart]:
        """Returns the encoder before training, and the part of it that trains.

        Random weights are drawn from the seed. What lies below a cut is the same for all seeds, as it is cached.
        """
        from xdm_ft.training.end_to_end.model import FULL_ENCODER, EncoderPart

        if not item.is_cut:
            return build_encoder(item.encoder, seed), FULL_ENCODER
        prepared = self.prepared.of(item)
        return prepared.encoder, EncoderPart(item.trainable, prepared.activations[item.trainable])

    def _profile(self, method: str) -> Path | None:
        """Returns the file for the trace of a method's training; None: the recipe wants none, or there is one."""
        if not self.plan.recipe.training.profile:
            return None
        file = self.directory.profile_file(method)
        return None if file.exists() else file

    def _checkpoint(self, jobs: Sequence[Job], rules: Sequence[str], writes: bool = True) -> Checkpoint:
        """Returns the checkpoint of jobs that train together."""
        import torch

        whole = self.plan.recipe
        item = next(item for item in whole.methods if item.label == jobs[0].method)
        # its own augmentation, as the recipe's becomes null when it gains methods that have another default
        recipe = whole.with_augmentation(whole.augmentation_of(item)).resolved()
        about = {
            # what the final fit trains follows from all results; other trainings stay valid in a recipe that grows
            "recipe": comparable(recipe) if FINAL_FIT in rules else of_method(recipe, jobs[0].method),
            "models": _models(jobs, rules),
            "xdm_ft": __version__,
            "torch": torch.__version__,
        }
        return self.directory.checkpoint(training_name(jobs, rules), about, writes)


def _models(jobs: Sequence[Job], rules: Sequence[str]) -> list[Any]:
    """Returns the identities of models that train together, as JSON values."""
    return [[[job.method, list(job.test_domains), job.seed, job.trial, job.setup.steps] for job in jobs], list(rules)]


def training_name(jobs: Sequence[Job], rules: Sequence[str]) -> str:
    """Returns the file name for the training of these models."""
    return f"{file_name(jobs[0].method, safe='+ ')}-{chunk_name(jobs, rules)}"


def chunk_name(jobs: Sequence[Job], rules: Sequence[str]) -> str:
    """Returns the name of jobs that train together, which no other jobs of their method have."""
    return digest(json.dumps(_models(jobs, rules)))


def _shared_files(jobs: Sequence[Job], rules: Sequence[str]) -> dict[ModelKey, str]:
    """Returns for each head of a chunk the name of the file that it shares with others."""
    files = [jobs[first : first + HEADS_PER_FILE] for first in range(0, len(jobs), HEADS_PER_FILE)]
    return {job.key: chunk_name(of_file, rules) for of_file in files for job in of_file}


def _cached_logits(job: Job, features: Features, named: Callable[[], Any]) -> Logits:
    """Returns the function that computes the logits of selected weights from cached features."""
    from xdm_ft.training.bank.data import cached_logits

    model = job.make(job.setup).eval()

    def logits(selected: Selected, rows: Tensor) -> Tensor:
        # assign, because a copy could have another memory layout, and with it products that round differently
        model.load_state_dict(selected.state, assign=True)
        with named():
            return cached_logits(features, rows, model.to(features.device))

    return logits


WAIT, WARM_UP, RECORDED = 3, 2, 5  # steps: the first ones also set up what later ones use again


@contextmanager
def profiled(bar: Progress, file: Path | None) -> Iterator[Progress]:
    """Context of a training that yields its progress bar; every advance of it is a step.

    Steps 6 to 10 are traced, and the trace is written to `file`, for chrome://tracing or ui.perfetto.dev. A training of
    fewer steps leaves none. The trace does not name the machine. `file` None: nothing is traced.
    """
    if file is None:
        yield bar
        return
    from torch.profiler import profile, schedule

    def export(traced: profile, path: Path) -> None:
        traced.export_chrome_trace(str(path))
        path.write_bytes(re.sub(rb'("host_name": )"[^"]*"', rb'\1""', path.read_bytes(), count=1))

    def write(traced: profile) -> None:
        replace_file(file, lambda path: export(traced, path))

    steps = schedule(wait=WAIT, warmup=WARM_UP, active=RECORDED, repeat=1)
    with profile(schedule=steps, on_trace_ready=write) as tracer:
        yield _Traced(bar, tracer)


class _Traced(Progress):
    """A bar whose advances are the profiler's steps too."""

    def __init__(self, bar: Progress, tracer: profile) -> None:
        super().__init__(bar.description, bar.total, "")
        self.bar, self.tracer = bar, tracer

    def skip(self, n: int) -> None:
        self.bar.skip(n)

    def advance(self, n: int = 1, note: str = "") -> None:
        self.bar.advance(n, note)
        self.tracer.step()
