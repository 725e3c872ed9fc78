"""The queue of a run: pieces of work, each of which a process takes, trains and saves."""

from __future__ import annotations

import dataclasses
import json
import re
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from xdm_ft.algorithms import Solver
from xdm_ft.core import Criteria, ModelKey
from xdm_ft.encoders import Encoder
from xdm_ft.experiment.cluster import TaskPart, Tasks, device_of, fitting
from xdm_ft.experiment.plan import Plan
from xdm_ft.experiment.prepare import Prepared, build_encoder
from xdm_ft.experiment.results import Outcome, RunResults, save
from xdm_ft.experiment.resume import comparable, of_method, resolved_for
from xdm_ft.experiment.tracking import write_curves
from xdm_ft.experiment.work import NOTHING, RunProgress, WorkDone, one_thread, run_forked
from xdm_ft.features.key import weights_digest
from xdm_ft.protocol.splits import Split
from xdm_ft.recipe.method import MethodItem
from xdm_ft.recipe.settings import Recipe
from xdm_ft.results.model import Record
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.interrupt import stop_requested
from xdm_ft.runtime.machine import libraries_left_out, out_of_memory_as_user_error, own_cores
from xdm_ft.runtime.watchdog import wait_for_everyone
from xdm_ft.storage import digest, json_digest
from xdm_ft.storage.atomic import replace_file
from xdm_ft.storage.names import file_name
from xdm_ft.storage.run_directory import RunDirectory
from xdm_ft.training import Job, Predictor, Trained, Training
from xdm_ft.training.bank.data import CachedPredictor
from xdm_ft.training.bank.train import chunks, solve, train_chunk
from xdm_ft.training.end_to_end.model import FULL_ENCODER, EncoderPart
from xdm_ft.training.end_to_end.prediction import EndToEndPredictor
from xdm_ft.training.end_to_end.train import train_model
from xdm_ft.training.selection import FINAL_FIT
from xdm_ft.version import __version__

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.profiler import profile

SOLVER_PASSES = 100  # of linear_probe over its training images, roughly; other solvers make fewer
HEADS_PER_FILE = 32  # as many as train together on a CPU; they wait in memory until the file is written
ENCODER_PASSES = 1000  # passes of an image through a head that cost as much as one through an encoder, roughly
WAIT, WARM_UP, RECORDED = 3, 2, 5  # steps of a profile: the first ones also set up what later ones use again


@dataclass(frozen=True)
class RunContext:
    """What the parts of a run work with."""

    plan: Plan
    prepared: Prepared
    directory: RunDirectory
    accelerator: Accelerator


class Piece(NamedTuple):
    """The unit of work: a chunk of heads, one model of a solver, or one model that trains end to end."""

    item: MethodItem
    jobs: Sequence[Job]
    criteria: Criteria
    wanted: frozenset[ModelKey]  # a chunk is trained whole: which heads train together affects the rounding of each
    cost: int

    @property
    def is_end_to_end(self) -> bool:
        return self.item.trainable is not False

    @property
    def name(self) -> str:
        """The file name for its training."""
        return f"{file_name(self.jobs[0].method, safe='+ ')}-{digest(json.dumps(self.identity(self.jobs)))}"

    def shared_file(self, key: ModelKey) -> str:
        """Returns the name of the file that a head of a large run shares with others of its chunk."""
        first = [job.key for job in self.jobs].index(key) // HEADS_PER_FILE * HEADS_PER_FILE
        return digest(json.dumps(self.identity(self.jobs[first : first + HEADS_PER_FILE])))

    def identity(self, jobs: Sequence[Job]) -> list[Any]:
        """Returns what no other models that train together have, as JSON values."""
        # lists throughout: a checkpoint is compared with what JSON makes of this
        models = [[job.method, list(job.test_domains), job.seed, job.trial, job.setup.steps] for job in jobs]
        return [models, list(self.criteria.rules)]


MeasureFunction = Callable[[RunContext, Piece, Trained, Predictor], Outcome]


def cost(item: MethodItem, training: Training, split: Split, steps: int) -> int:
    """Returns the number of images that pass forward and backward through a head to train one model.

    It orders the queue and measures progress; a pass through an encoder counts as ENCODER_PASSES.
    """
    domains = len(split.train)
    if item.is_solver:
        return SOLVER_PASSES * sum(map(len, split.train))
    images = training.images_per_step(domains) * item.gradient_evaluations(steps, domains)
    return images * (1 if item.trainable is False else ENCODER_PASSES)


def pieces_of(
    context: RunContext, item: MethodItem, jobs: Sequence[Job], criteria: Criteria, wanted: Collection[ModelKey]
) -> list[Piece]:
    """Returns the pieces with a wanted model. All `jobs` of the method determine which heads share a chunk, as does the
    kind of the device.
    """
    pieces = list[Piece]()
    device = device_of(context.plan.recipe.cluster, context.accelerator.device)
    alone = item.is_solver or item.trainable is not False
    for together in [[job] for job in jobs] if alone else chunks(jobs, device):
        keys = frozenset(job.key for job in together if job.key in wanted)
        if keys:
            first = together[0]
            of_job = cost(item, first.training, first.split, first.setup.steps)
            pieces.append(Piece(item, together, criteria, keys, len(together) * of_job))
    return pieces


def work_of(pieces: Sequence[Piece]) -> dict[str, WorkDone]:
    return {piece.name: WorkDone(len(piece.wanted), piece.cost) for piece in pieces}


def do_pieces(
    context: RunContext,
    pieces: Sequence[Piece],
    measure: MeasureFunction,
    results: RunResults,
    *,
    activity: str,
    done: WorkDone = NOTHING,
) -> None:
    """Does all pieces, in all processes of the run, and returns when every process is done.

    Those on cached features come first, the longest ones first, so that all processes end at about the same time. All
    processes take pieces of them from one queue, the run directory; on a CPU each process also forks, to use all of its
    cores. Then all processes together train one model end to end after the other. `activity` names the work on the bar,
    which counts the `done` models too.
    """
    if not pieces:
        return
    accelerator, main = context.accelerator, bool(context.accelerator.is_main_process)
    queue = sorted((piece for piece in pieces if not piece.is_end_to_end), key=lambda piece: -piece.cost)
    together = [piece for piece in pieces if piece.is_end_to_end]
    # a CUDA context cannot be used in a forked process
    processes = 1 if accelerator.device.type != "cpu" else min(own_cores(), max(1, len(queue)))
    with RunProgress(activity, work_of(pieces), done, context.directory, processes, shows=main) as progress:
        if context.plan.recipe.cluster.name is not None:
            _do_on_cluster(context, queue, 1, measure, progress)
            _do_on_cluster(context, together, context.plan.recipe.cluster.cpus_per_model, measure, progress)
            return

        def take_pieces(number: int) -> None:
            progress.in_process(number)
            with context.directory.in_fork(number) as directory:
                in_process = dataclasses.replace(context, directory=directory)
                for piece in queue:
                    if directory.claim(piece.name):
                        records = do_piece(in_process, piece, measure, progress, own_cores() // processes)
                        if number == 0:  # a fork's are in the run directory
                            results.add(records)

        if queue and processes == 1:
            with one_thread():
                take_pieces(0)
        elif queue:
            run_forked(take_pieces, processes, progress.watched)
        with progress.watched():
            wait_for_everyone(accelerator)  # other processes may still train their last piece
        with libraries_left_out() if together else nullcontext():
            for piece in together:
                results.add(do_piece(context, piece, measure, progress))
        wait_for_everyone(accelerator)


def do_piece(
    context: RunContext, piece: Piece, measure: MeasureFunction, progress: RunProgress, threads: int = 1
) -> list[Record]:
    """Trains a piece, saves the outcome that `measure` returns for each wanted model, then forgets the checkpoint.

    The numbers do not depend on the process that does it, nor on the `threads` of a solver. A model that trains end to
    end is saved by the main process.
    """
    plan, accelerator, item, job = context.plan, context.accelerator, piece.item, piece.jobs[0]
    prepared, data = context.prepared.for_method(item), (plan.annotations, piece.criteria)
    saves = not piece.is_end_to_end or bool(accelerator.is_main_process)
    resolved, features = resolved_for(plan.recipe, item.label), prepared.features
    follows_from = {  # a checkpoint of other settings is not resumed
        # what the final fit trains follows from all results; other trainings stay valid in a recipe that grows
        "recipe": comparable(resolved) if FINAL_FIT in piece.criteria.rules else of_method(resolved, item.label),
        "models": piece.identity(piece.jobs),
        "data": [plan.annotations_digest, context.prepared.content],
        "encoder": [prepared.weights, features and features.key],
        "xdm_ft": __version__,
        "torch": torch.__version__,
    }
    checkpoint = context.directory.checkpoint(piece.name, follows_from, saves)
    record = partial(write_curves, plan, piece.jobs, directory=context.directory)
    note, units, together = job.method, sum(job.setup.steps for job in piece.jobs), "one head"
    if piece.is_end_to_end:
        note = str(job.key)
        too_large = note, "lower training.batch_size or raise training.accumulation"
    elif item.is_solver:
        method, remedy = job.new_method(), "train on fewer images or free some memory"
        assert isinstance(method, Solver)
        units = method.candidates
        title = f"{job.method}, {', '.join(job.test_domains)} held out"
        too_large = title, f"a solver needs all training features in memory; {remedy}"
    else:
        if len(piece.jobs) > 1:
            note, together = f"{job.method} ({len(piece.jobs)} models)", f"{len(piece.jobs)} heads together"
        too_large = f"{job.method}, {together}", "lower training.batch_size"
    trace = context.directory.profile_file(job.method) if saves and plan.recipe.training.profile else None
    predictor: Predictor
    with (
        out_of_memory_as_user_error(*too_large),
        profile_training(trace) as traced_step,
        progress.of_piece(piece.name, note, units, traced_step) as bar,
    ):
        if item.is_solver:
            features = prepared.features_of(job)
            trained = [solve(job, features, *data, bar, threads)]
            predictor = CachedPredictor(job, features)
        elif not piece.is_end_to_end:
            features = prepared.features_of(job)
            trained = train_chunk(piece.jobs, features, *data, record=record, bar=bar, checkpoint=checkpoint)
            predictor = CachedPredictor(job, features)  # heads that train together differ in their weights only
        else:
            # what lies below a cut is the same for all seeds, as it is cached
            encoder, part = prepared.encoder, FULL_ENCODER
            if item.is_cut:
                part = EncoderPart(item.trainable, prepared.activations_of(job, item.trainable))
            else:
                encoder = build_encoder(item.encoder, job.seed)  # random weights are drawn from the seed
            common = item.encoder_common
            trained = [
                train_model(
                    job, encoder, plan.dataset, *data, accelerator, batch_norm=common.batch_norm, record=record,
                    bar=bar, unfreeze_at=common.unfreeze_at, checkpoint=checkpoint, part=part,
                )
            ]  # fmt: skip
            batch_size = plan.recipe.training.batch_size
            predictor = EndToEndPredictor(job, encoder, plan.dataset, accelerator, batch_size, part)
        # in every process: all of them predict together end to end
        outcomes = (measure(context, piece, model, predictor) for model in trained if model.job.key in piece.wanted)
        of = json_digest(of_method(resolved, item.label))
        records = save(outcomes, context.directory, writes=saves, of=of)
    # after the records are on the disk: a kill between the two would lose the training
    checkpoint.remove()
    if saves:
        # after the records too, as nobody does a piece again that is marked as finished
        context.directory.finish(piece.name)
    return records


class _ClusterTraining(NamedTuple):
    """The `ClusterWork` of tasks that train: each takes pieces from the run directory until none is left."""

    plan: Plan
    prepared: Prepared
    path: Path  # of the run directory
    pieces: Sequence[Piece]
    measure: MeasureFunction

    @property
    def recipe(self) -> Recipe:
        return self.plan.recipe

    @property
    def encoders(self) -> list[Encoder]:
        return [prepared.encoder for prepared in self.prepared.encoders.values()]

    def on(self, device: torch.device) -> _ClusterTraining:
        return self._replace(prepared=self.prepared.to(device))

    def do(self, part: TaskPart, accelerator: Accelerator) -> list[str]:
        """Returns the names of the pieces that this task has done."""
        done, checked = list[str](), set[Any]()
        # under its own name: a file of lines has one writer, and it finds what it had taken if it was lost
        with RunDirectory(self.path, part.name, main=False) as directory:
            directory.release_claims_of(part.name)
            context = RunContext(self.plan, self.prepared, directory, accelerator)
            progress = RunProgress("", work_of(self.pieces), NOTHING, directory, processes=1, shows=False)
            for piece in self.pieces:
                if not stop_requested() and directory.claim(piece.name):
                    inputs = piece.item.encoder_label, piece.item.trainable
                    if inputs not in checked:  # once: it hashes the encoder's weights
                        self._require_inputs(piece.item)
                        checked.add(inputs)
                    do_piece(context, piece, self.measure, progress)
                    done.append(piece.name)
        return done

    def _require_inputs(self, item: MethodItem) -> None:
        """Raises `UserError` if this node does not see the images and weights that a training end to end reads."""
        plan, dataset = self.plan, self.plan.dataset
        if not plan.recipe.trains_on_images(item):
            return
        for domain, name in enumerate(dataset.domain_names):
            rows = [row for row in (dataset.domains == domain).nonzero()[0] if row not in self.prepared.unreadable]
            try:
                if rows:
                    dataset.image(int(rows[0]))
            except (UserError, OSError) as error:
                raise UserError(
                    f"data: an image of {name} is unreadable ({error}); all nodes must see the data"
                ) from error
        if not item.is_cut:
            encoder = build_encoder(item.encoder, plan.recipe.protocol.seeds[0])
            if weights_digest(encoder) != self.prepared.for_method(item).weights:
                raise UserError(
                    "encoder: its weights on this node differ from the run's; put the same file on all nodes"
                )


def _do_on_cluster(
    context: RunContext, queue: Sequence[Piece], threads: int, measure: MeasureFunction, progress: RunProgress
) -> None:
    """Does the pieces in tasks of the cluster, which write into the run directory."""
    settings, directory, done = context.plan.recipe.cluster, context.directory, set[str]()
    while queue:
        tasks = min(len(queue), 4 * max(1, fitting(settings, threads)))  # more than fit: nodes may come
        names = [f"worker-{uuid.uuid4().hex[:12]}" for _ in range(tasks)]
        directory.others.update(names)
        work = _ClusterTraining(context.plan, context.prepared, directory.path.absolute(), queue, measure)
        with progress.watched():
            shared = ("output.dir", directory.path.absolute() / "state")
            Tasks(work, threads, shared, done=done.update).do([TaskPart(name, None) for name in names])
        # a network disk may have shown too late that a dead task had taken a piece
        queue = [piece for piece in queue if piece.name not in done and not directory.is_finished(piece.name)]
        for piece in queue:
            directory.unclaim(piece.name)


@contextmanager
def profile_training(file: Path | None) -> Iterator[Callable[[], object]]:
    """Context of a training that yields a function, to be called after each step.

    Steps 6 to 10 are traced, and the trace is written to `file`, for chrome://tracing or ui.perfetto.dev. A training of
    fewer steps leaves none. The trace does not name the machine. Nothing is traced if `file` is None or exists.
    """
    if file is None or file.exists():
        yield lambda: None
        return
    from torch.profiler import profile, schedule

    def write(tracer: profile) -> None:
        def export(path: Path) -> None:
            tracer.export_chrome_trace(str(path))
            path.write_bytes(re.sub(rb'("host_name": )"[^"]*"', rb'\1""', path.read_bytes(), count=1))

        replace_file(file, export)

    steps = schedule(wait=WAIT, warmup=WARM_UP, active=RECORDED, repeat=1)
    with profile(schedule=steps, on_trace_ready=write) as tracer:
        yield tracer.step
