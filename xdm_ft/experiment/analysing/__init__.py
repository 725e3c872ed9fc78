"""The measures of a run's models: which models are measured, and how the work is shared and resumed.

Each model's entry is appended to a file of JSON lines when it is done, so that an interrupted analysis loses at most
the models that were being measured. Entries of an earlier analysis.json are kept if nothing that they depend on has
changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, NamedTuple

from xdm_ft.evaluation.records import Identity, Record
from xdm_ft.experiment.analysing.document import KIND, document, finished_entries, plain
from xdm_ft.experiment.analysing.images import FROZEN, TRAINED, Limits, SplitImages, split_images
from xdm_ft.experiment.analysing.measures import entry
from xdm_ft.experiment.analysing.model import is_frozen, read_model
from xdm_ft.experiment.analysing.seen import Seen
from xdm_ft.experiment.parallel import run_forked
from xdm_ft.experiment.plan import Plan, PlannedModel
from xdm_ft.experiment.prepared import Prepared
from xdm_ft.experiment.results import inputs
from xdm_ft.images.loader import own_cores
from xdm_ft.report.finished import Run
from xdm_ft.runtime.progress import Progress, progress
from xdm_ft.storage.digests import json_digest
from xdm_ft.storage.run_directory import RunDirectory
from xdm_ft.version import __version__

if TYPE_CHECKING:
    from accelerate import Accelerator


Group = tuple[tuple[str, ...], int, bool]
"""Test domains, seed, and whether the encoder is frozen: models of a group are measured on the same images."""


class Task(NamedTuple):
    """A model to measure."""

    record: Record
    planned: PlannedModel
    frozen: bool  # whether it reads cached features
    first: bool  # of the seeds of its method and test domains
    inputs: str  # digest of all that its entry depends on

    @property
    def group(self) -> Group:
        return self.record.test_domains, self.record.seed, self.frozen

    @property
    def limits(self) -> Limits:
        return FROZEN if self.frozen else TRAINED


def analyse(
    run: Run,
    plan: Plan,
    prepared: Prepared,
    directory: RunDirectory,
    accelerator: Accelerator,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Measures the models that the recipe's own rule picked, writes analysis.json, and returns its content.

    `directory` is locked, and `plan` has no unreadable images. One process calls this, whatever their number: it
    computes without the others. Raises `UserError` if a weights file is damaged.
    """
    tasks = _tasks(run, plan, prepared)
    wanted = {task.record.key: task.inputs for task in tasks}
    known = finished_entries(directory, wanted)
    missing = [task for task in tasks if task.record.key not in known]
    images = {task.group: split_images(plan, task.planned, task.limits) for task in tasks}
    if missing:
        with progress("analysis", len(tasks), "models") as bar:
            bar.skip(len(tasks) - len(missing))
            Measuring(plan, prepared, directory, accelerator, images, bar).all(missing)
        known = finished_entries(directory, wanted)
    found = document(run, plan, [known[task.record.key] for task in tasks], images, notes)
    directory.write_analysis(found)
    return found


def _tasks(run: Run, plan: Plan, prepared: Prepared) -> list[Task]:
    """Returns the models to measure, in the order of results.json."""
    planned = {model.key: model for model in plan.models}
    order = {seed: place for place, seed in enumerate(plan.recipe.protocol.seeds)}
    first: dict[tuple[str, tuple[str, ...]], Identity] = {}
    for record in sorted(run.picked, key=lambda record: order[record.seed]):
        first.setdefault((record.method, record.test_domains), record.key)
    same, found = [__version__, inputs(plan.dataset, prepared)], []
    for record in run.picked:
        is_first = record.key == first[record.method, record.test_domains]
        model = planned[record.key]
        depends_on = [*same, record.key, is_first, record.selected[run.own_rule].to_json()]
        found.append(Task(record, model, is_frozen(model), is_first, json_digest(depends_on)))
    return found


@dataclass(frozen=True)
class Measuring:
    """Measures models, and appends a line for each one."""

    plan: Plan
    prepared: Prepared
    directory: RunDirectory
    accelerator: Accelerator
    images: Mapping[Group, SplitImages]
    bar: Progress

    def all(self, tasks: Sequence[Task]) -> None:
        """Models on cached features are measured in forked processes, one group after the other in each of them."""
        pieces: dict[Group, list[Task]] = {}
        for task in sorted(tasks, key=lambda task: not task.first):  # the longest first
            pieces.setdefault(task.group, []).append(task)
        frozen = [piece for piece in pieces.values() if piece[0].frozen]
        begun, done = self.bar.done, get_context("fork").Value("i", 0)

        def work(number: int) -> None:
            with self.directory.in_fork(number) as own:
                for place, piece in enumerate(frozen):
                    if own.take(f"{KIND}-{place}"):
                        for _ in self._measured(piece, own):
                            with done.get_lock():
                                done.value += 1
                            if number == 0:
                                self.bar.advance(begun + done.value - self.bar.done)

        if frozen:
            # a CUDA context can not be used in a forked process
            forks = 1 if self.accelerator.device.type != "cpu" else own_cores()
            run_forked(work, min(forks, len(frozen)))
            self.bar.advance(begun + done.value - self.bar.done)
        for piece in pieces.values():
            if not piece[0].frozen:
                for _ in self._measured(piece, self.directory):
                    self.bar.advance()

    def _measured(self, piece: Sequence[Task], directory: RunDirectory) -> Iterator[None]:
        """Measures models of one group, and yields after each line."""
        shared: dict[tuple[str | None, bool], Seen] = {}
        dataset, rule = self.plan.dataset, self.plan.recipe.protocol.selection
        for task in piece:
            model = read_model(self.plan, self.prepared, task.planned, task.record, directory, self.accelerator)
            seen = Seen(self.images[task.group], model.features, len(dataset.class_names))
            if task.frozen:  # models on the same features share what follows from them
                seen = shared.setdefault((task.planned.item.encoder_label, task.planned.item.reads_normalized), seen)
            found = entry(model, seen, task.limits, dataset.domain_names, task.first, rule)
            directory.append(KIND, plain(found | {"inputs": task.inputs}))
            yield
