"""`xdm-ft retrain`: trains one model of a run again and compares it with the recorded one."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from xdm_ft.cli.answer import Answer
from xdm_ft.evaluation.records import ModelKey, Record
from xdm_ft.experiment.faults import faults
from xdm_ft.experiment.machine import launched
from xdm_ft.experiment.models import cross_domain_values, keep_references, keep_test_images, train_planned
from xdm_ft.experiment.pieces import Engines
from xdm_ft.experiment.plan import make_plan, read_data
from xdm_ft.experiment.prepare import build_encoders, prepare
from xdm_ft.experiment.results import ResultsFile, about, environment, inputs
from xdm_ft.experiment.resume import Earlier, grown_from, opened, recorded, written_recipe
from xdm_ft.recipe.check import check
from xdm_ft.recipe.settings import Cluster, Output
from xdm_ft.recipe.text import apply_override
from xdm_ft.report.finished import read_run
from xdm_ft.runtime.errors import UserError, did_you_mean, printable
from xdm_ft.storage.atomic import disk_errors
from xdm_ft.storage.digests import tensors_digest
from xdm_ft.storage.lines import Damaged
from xdm_ft.storage.names import expanded
from xdm_ft.storage.run_directory import RunDirectory


class Accuracy(NamedTuple):
    """A fraction, in the run and now."""

    before: float
    now: float


@dataclass(frozen=True)
class Repeated:
    """The weights of one selection rule, in the run and now."""

    step_before: int
    step_now: int
    same_bits: bool
    accuracy: dict[str, Accuracy]  # {split: …}


@dataclass(frozen=True)
class Comparison(Answer):
    model: ModelKey
    state: str  # of the model that was trained now
    reason: str | None  # why it has no weights
    rules: dict[str, Repeated]  # {selection rule: …}
    kept: Path | None = None  # the run directory with the model that was trained now

    def text(self) -> str:
        if self.state != "ok":
            return f"now {self.state}: {self.reason}"
        lines = []
        for rule, found in self.rules.items():
            weights = "the same bits" if found.same_bits else "differ"
            lines.append(f"{rule}: step {found.step_before}, now {found.step_now}; weights {weights}")
            for split, (before, now) in found.accuracy.items():
                lines.append(
                    f"  {split} accuracy {100 * before:.2f}, now {100 * now:.2f} ({100 * (now - before):+.2f})"
                )
        return "\n".join([*lines, *([] if self.kept is None else [f"kept in {printable(self.kept)}"])])

    def to_json(self) -> dict[str, Any]:
        method, test_domains, seed, trial = self.model
        model = {"method": method, "test_domains": test_domains, "seed": seed, "trial": trial}
        rules = {
            rule: {**vars(one), "accuracy": {split: pair._asdict() for split, pair in one.accuracy.items()}}
            for rule, one in self.rules.items()
        }
        return model | {"status": self.state, "reason": self.reason, "rules": rules, "kept": self.kept}


def retrain(run_directory: str, key: ModelKey, alone: bool, keep: str | None = None) -> Comparison:
    """Trains the model again from the run's recipe, in a temporary folder. Returns the comparison with the run's model.

    A head trains together with the other heads of its chunk, which gives the same bits on the same kind of machine, or
    `alone`, which gives the same numbers up to rounding. `keep`: a folder that becomes a run directory of the same
    recipe, with this model alone. Raises `UserError` if the folder holds no run, or the run no such model.
    """
    folder, kept = Path(run_directory), None if keep is None else _new_folder(keep)
    run = read_run(folder)
    results, before = run.results, _recorded(folder, run.every, key)
    text = written_recipe(folder, results)
    _check_weights(RunDirectory(folder), before)
    if kept is not None:
        # JSON is YAML: the quotes keep a path with any characters one text
        for name, value in (("name", kept.name), ("output.dir", str(kept.parent))):
            apply_override(text, f"{name}={json.dumps(value)}")
    recipe = dataclasses.replace(check(text), cluster=Cluster())  # this machine is asked whether it agrees
    with _scratch(kept) as scratch, launched(recipe) as accelerator:
        dataset = read_data(recipe)
        plan = make_plan(recipe, dataset)
        prepared = prepare(recipe, dataset, build_encoders(recipe), accelerator, results["environment"])
        plan = plan.without(prepared.unreadable)
        with opened(dataclasses.replace(recipe, output=Output(dir=scratch)), accelerator) as directory:
            earlier = Earlier(generations=grown_from(results, recipe.resolved()))  # nothing counts as trained yet
            trained_on = environment(accelerator) | inputs(dataset, prepared)
            again = ResultsFile(recipe, directory, earlier, trained_on, about(plan, faults(plan, show=True)))
            now = _trained(Engines(plan, prepared, directory, accelerator), before.key, alone, again)
            compared = _compared(folder, before, directory.path, now)
            if kept is not None and now.status == "ok":
                own = [one for one in plan.splits if one.test_domains == before.test_domains]
                keep_test_images(plan.dataset, own, directory)
                keep_references(plan, prepared, own, directory)
                directory.write_text("recipe.yaml", recipe.as_yaml())  # which names its folder
                again.records = {now.key: now}
                again.write()
                directory.complete()  # without reports: one model makes no table
        if kept is not None and now.status == "ok":
            with disk_errors(kept):
                os.replace(directory.path, kept)
            compared = dataclasses.replace(compared, kept=kept)
    return compared


def _new_folder(keep: str) -> Path:
    """Returns the absolute path of `--keep`. Raises `UserError` if it is a file, or a folder that is not empty."""
    path = expanded(keep, "--keep")
    with disk_errors(path):
        path = path.resolve()
        if path.exists() and not (path.is_dir() and not any(path.iterdir())):
            raise UserError(f"--keep {path}: exists and is not an empty folder; name a new one")
    return path


@contextmanager
def _scratch(kept: Path | None) -> Iterator[str]:
    """Yields a temporary folder; beside `kept`, so that a finished run directory can be renamed to it."""
    with ExitStack() as stack:
        parent = None
        if kept is not None:
            parent = kept.parent
            with disk_errors(parent):
                parent.mkdir(parents=True, exist_ok=True)
        with disk_errors(parent or Path(tempfile.gettempdir())):
            scratch = stack.enter_context(tempfile.TemporaryDirectory(dir=parent, prefix=".xdm-ft-retrain-"))
        yield scratch


def _trained(engines: Engines, key: ModelKey, alone: bool, results: ResultsFile) -> Record:
    """Trains the model, with the heads of its chunk unless `alone`, and returns its record."""
    planned = {
        model.key: model
        for model in engines.plan.models
        # those that determine which heads share a chunk
        if results.chunk_group(model.key) == results.chunk_group(key) and not model.skipped
    }
    if alone:
        planned = {key: planned[key]}
    known = cross_domain_values(engines, planned.keys(), results)
    train_planned(engines, planned, known, {key}, results)
    return recorded(engines.directory)[key]


def _recorded(folder: Path, records: Sequence[Record], key: ModelKey) -> Record:
    path = folder / "results.json"
    names = {_name(record.key): record for record in records}
    found = names.get(_name(key))
    if found is None:
        raise UserError(f'{path}: no model "{_name(key)}"{did_you_mean(_name(key), list(names))}')
    if found.status != "ok":
        raise UserError(f"{path}: {_name(key)} has no weights to compare ({found.status}: {found.reason})")
    return found


def _check_weights(directory: RunDirectory, record: Record) -> None:
    """Raises `UserError` if weights of the record are damaged: comparing with it would say nothing."""
    for pick in record.selected.values():
        try:
            directory.tensors(pick.weights)
        except (Damaged, FileNotFoundError) as error:
            what = f"{directory.path / pick.weights}: is damaged ({error})"
            raise UserError(f"{what}; run the run's recipe again to train this model again") from error


def _name(key: ModelKey) -> str:
    method, test_domains, seed, trial = key
    return f"{method} {','.join(test_domains)} {seed} {trial}"


def _compared(folder: Path, recorded: Record, scratch: Path, again: Record) -> Comparison:
    rules = {}
    for rule, before in recorded.selected.items() if again.status == "ok" else ():
        now = again.selected[rule]
        # not the bytes of the files: their metadata also name the versions of libraries
        kept, found = (RunDirectory(run).tensors(one.weights)[0] for run, one in ((folder, before), (scratch, now)))
        scores = {split: Accuracy(was.accuracy, now.metrics[split].accuracy) for split, was in before.metrics.items()}
        rules[rule] = Repeated(before.step, now.step, tensors_digest(kept) == tensors_digest(found), scores)
    return Comparison(recorded.key, again.status, again.reason, rules)
