"""results.json: its content, how it is written during a run, and the `Results` that a run returns."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from xdm_ft.cut.trainable import LastBlocks, LowRank
from xdm_ft.evaluation.records import Entries, ModelKey, Record, SummaryRow
from xdm_ft.evaluation.summary import Summary
from xdm_ft.evaluation.trials import MethodChoice, choose_method
from xdm_ft.evaluation.verdicts import Comparison
from xdm_ft.experiment.faults import Finding, images_of
from xdm_ft.experiment.plan import Plan
from xdm_ft.experiment.prepare import Prepared
from xdm_ft.experiment.resume import GROWN_FROM, Earlier, comparable, generation
from xdm_ft.images.dataset import ImageDataset
from xdm_ft.recipe.settings import Recipe
from xdm_ft.report.finished import Run, read_run
from xdm_ft.runtime.errors import UserError, did_you_mean
from xdm_ft.storage.digests import digest
from xdm_ft.storage.run_directory import RunDirectory
from xdm_ft.storage.tensors import Arrays, TensorFiles
from xdm_ft.training.end_to_end.model import cut_of

if TYPE_CHECKING:
    from accelerate import Accelerator

KEEP_SECONDS = 5.0  # outcomes are made safe on the disk together, after this time at the latest
KEEP_SHARED_SECONDS = 30.0  # those in a shared file, which is written whole each time
MOST_WAITING = 128_000_000  # bytes of a shared file's entries in memory
LIBRARIES = ("xdm_ft", "torch", "torchvision", "timm", "open_clip_torch", "accelerate", "numpy", "pillow")


@dataclass(frozen=True)
class Results:
    """The results of a run, as in its results.json. Accuracies are fractions."""

    path: Path  # the run directory
    records: list[Record]  # one per model, in the recipe's order
    rows: list[SummaryRow]  # one per selection rule and method, the recipe's own rule first
    final_fit: dict[str, Any] | None  # the method that validation prefers, trained on all images
    final_fits: dict[str, dict[str, Any]]  # {method: its final fit}
    streamed: dict[str, Any] = field(repr=False)  # all of results.json; its models are made when they are read

    @property
    def document(self) -> dict[str, Any]:
        """All of results.json."""
        return self.streamed | {"runs": [*self.streamed["runs"]]}

    @property
    def failed(self) -> bool:
        """Whether the training of a model failed."""
        statuses = [record.status for record in self.records] + [fit["status"] for fit in self.final_fits.values()]
        return "failed" in statuses

    @property
    def comparisons(self) -> list[Comparison]:
        """The comparisons between the rows, with both verdicts; none in a run of an earlier version."""
        return [Comparison.from_json(entry) for entry in self.streamed.get("comparisons", ())]

    @property
    def as_read(self) -> Run:
        """These results as reports read them from the run directory."""
        return Run(self.path, self.streamed, self.records, self.rows)

    def table(self, selection: str | None = None) -> list[dict[str, Any]]:
        """Returns the rows of one selection rule as flat dicts: `pandas.DataFrame(results.table())`.

        `selection`: by default the recipe's own rule; "oracle", which reads test labels, and the run's other rules on
        request. Raises `UserError` for a rule that the run does not have.
        """
        own = self.as_read.own_rule
        known = list(dict.fromkeys([own, *(row.selection for row in self.rows)]))
        if selection is not None and selection not in known:
            raise UserError(
                f'{self.path}: selection: the run has no rule "{selection}"{did_you_mean(selection, known)}'
            )
        return [row.flat() for row in self.rows if row.selection == (own if selection is None else selection)]


def read_results(path: Path) -> Results:
    """Returns the results of a finished run. Raises `UserError` if the folder holds none, or damaged ones."""
    run = read_run(path)
    run.refuse_unfinished()
    document = {key: value for key, value in run.results.items() if key != "checksum"}
    return Results(run.path, run.every, run.rows, document.get("final_fit"), run.final_fits, document)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a training: a line, which marks the model as done, and the files that the line refers to."""

    kind: str  # of the line, as in `RunDirectory.append`
    line: Record | dict[str, Any]
    weights: Mapping[str, tuple[Mapping[str, Tensor], dict[str, str]]] = field(default_factory=dict)
    """{address: (weights, metadata)}"""
    predictions: Mapping[str, Arrays] = field(default_factory=dict)
    """{folder of the model, or what stands for it: predictions}"""
    references: Mapping[str, Arrays] = field(default_factory=dict)
    """{file, relative to the run directory: the reference for distances of a model with an encoder of its own}"""


class ResultsFile:
    """results.json during a run. The main process writes it from memory and never reads it again."""

    def __init__(
        self,
        recipe: Recipe,
        directory: RunDirectory,
        before: Earlier,
        environment: dict[str, Any],
        about: dict[str, Any],
    ) -> None:
        self.recipe, self.directory, self.environment, self.about = recipe, directory, environment, about
        self.records: dict[ModelKey, Record] = dict(before.records)
        self.summary = Summary([], [], before.looks)
        self.final_fits, self.generations = before.final_fits, before.generations
        same = before.recipe is not None and comparable(before.recipe) == comparable(recipe.resolved())
        if directory.main and not same:
            # before training: `cache prune --unreferenced` reads from it which features are in use, and a run that
            # grows again reads from it which models this recipe has planned
            self.write()

    def chunk_group(self, key: ModelKey) -> tuple[str, int]:
        """Returns method and generation of a model. Only models with equal ones share chunks of heads."""
        return key[0], generation(key, self.generations)

    def add(self, records: Iterable[Record]) -> None:
        """Adds records that are in the run directory, and rewrites results.json unless that would take too long."""
        new = {record.key: record for record in records}
        self.records |= new
        if new and self.directory.results_are_due:
            self.write()

    def write(self) -> Results:
        results = self.results()
        if self.directory.main:
            self.directory.write_results(results.streamed)
        return results

    @property
    def choice(self) -> MethodChoice | None:
        """The method that validation prefers; None if no method has a value, as long as models train."""
        protocol = self.recipe.protocol
        rows = [row for row in self.summary.rows if row.selection == protocol.selection]
        return choose_method([*self.records.values()], rows, protocol.selection, protocol.metric)

    def results(self) -> Results:
        records, rows = [*self.records.values()], self.summary.rows
        choice = self.choice if self.final_fits else None
        final_fit = None if choice is None else self.final_fits.get(choice.method)
        document = {
            "schema": 1,
            "recipe": self.recipe.resolved(),
            "environment": self.environment,
            **self.about,
            **({GROWN_FROM: [one.to_json() for one in self.generations]} if self.generations else {}),
            "runs": Entries(records),
            "summary": [row.to_json() for row in rows],
            "comparisons": [one.to_json() for one in self.summary.comparisons],
            "looks": [one.to_json() for one in self.summary.looks],
            **({} if final_fit is None else {"final_fit": final_fit}),
            **({"final_fits": self.final_fits} if self.final_fits else {}),
        }
        return Results(self.directory.path, records, rows, final_fit, self.final_fits, document)


def save(outcomes: Iterable[Outcome], directory: RunDirectory, writes: bool = True) -> list[Record]:
    """Writes the files of outcomes, then their lines, so that a line never refers to a missing file.

    Outcomes that come within `KEEP_SECONDS`, or `KEEP_SHARED_SECONDS` if they share a file, are made safe on the disk
    together; a killed run loses those only. `writes` False: another process writes, and all compute the outcomes.

    Returns the records among the outcomes.
    """
    records, written, began = list[Record](), list[Outcome](), time.monotonic()
    with TensorFiles() as files:
        for outcome in outcomes:
            if not writes:
                continue
            for file, (state, metadata) in outcome.weights.items():
                directory.write_tensors(file, state, metadata, files)
            for folder, arrays in outcome.predictions.items():
                directory.write_predictions(folder, arrays, files)
            for file, arrays in outcome.references.items():
                directory.write_arrays(file, arrays, {}, files)
            written.append(Outcome(outcome.kind, outcome.line))  # without the arrays, which need memory
            records += [outcome.line] if isinstance(outcome.line, Record) else []
            waiting = files.waiting_bytes
            latest = began + (KEEP_SHARED_SECONDS if waiting else KEEP_SECONDS)
            if time.monotonic() > latest or waiting > MOST_WAITING:
                _keep(files, written, directory)
                written, began = [], time.monotonic()
        _keep(files, written, directory)
    return records


def _keep(files: TensorFiles, written: Sequence[Outcome], directory: RunDirectory) -> None:
    """Makes files safe on the disk, then the lines that refer to them."""
    files.replace()
    for kind in dict.fromkeys(outcome.kind for outcome in written):
        lines = [outcome.line for outcome in written if outcome.kind == kind]
        directory.append(kind, *(line.to_json() if isinstance(line, Record) else line for line in lines))


def environment(accelerator: Accelerator) -> dict[str, Any]:
    """Returns the software and hardware of the run, for results.json."""
    import torch

    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "device": accelerator.device.type,
        "processes": accelerator.num_processes,
        "threads": torch.get_num_threads(),
        "mixed_precision": accelerator.mixed_precision,
        "versions": {name: importlib.metadata.version(name) for name in LIBRARIES},
    }


def inputs(dataset: ImageDataset, prepared: Prepared) -> dict[str, Any]:
    """Returns the identity of all that models are trained on: annotations, images, weights, and the cached features."""
    names = json.dumps([dataset.class_names, dataset.domain_names])
    annotations = (dataset.labels, dataset.domains, dataset.groups, dataset.splits)
    texts = ("-" if values is None else json.dumps(np.asarray(values).tolist()) for values in annotations)
    data = {"images": len(dataset), "annotations": digest(names, *texts), "content": prepared.content}
    found: dict[str, Any] = {"data": data}
    for label, own in prepared.encoders.items():
        keys = {} if own.features is None else {"key": own.features.key}
        cuts = {
            cut_of(own.encoder, trainable).name: None if cached is None else cached.key
            for trainable, cached in own.activations.items()
            if isinstance(trainable, LastBlocks | LowRank)
        }
        features = keys | ({"cuts": cuts} if cuts else {})
        for name, value in (("encoder", {"weights": own.weights}), ("features", features)):
            if value and label is None:
                found[name] = value
            elif value:
                found.setdefault(name, {})[label] = value
    return found


def about(plan: Plan, faults: Sequence[Finding]) -> dict[str, Any]:
    """Returns the other facts on the data in results.json: its size, whether test domains are unseen, its faults."""
    dataset = plan.dataset
    counts = dict(zip(dataset.domain_names, images_of(dataset).T.tolist(), strict=True))
    groups = {} if dataset.groups is None else {"groups": len(np.unique(dataset.groups))}
    data = {"classes": list(dataset.class_names), "images": counts, **groups}
    return {
        "data": data,
        "tested_on": plan.splits[0].tested_on,
        "findings": [finding.line for finding in faults],
    }


def in_order(plan: Plan, records: Iterable[Record]) -> dict[ModelKey, Record]:
    """Returns the records of planned models, in the order of the recipe, with what earlier versions did not write."""
    found = {record.key: record for record in records}
    planned = {model.key: model.item.of_records for model in plan.models if model.key in found}
    return {key: dataclasses.replace(found[key], **of_row) for key, of_row in planned.items()}
