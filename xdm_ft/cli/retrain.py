"""`xdm-ft retrain`: trains one model of a run again and compares it with the recorded one."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from xdm_ft.cli import Answer
from xdm_ft.evaluation import Record
from xdm_ft.experiment.faults import faults
from xdm_ft.experiment.models import common_files, measure, planned_pieces
from xdm_ft.experiment.pieces import RunContext, do_pieces
from xdm_ft.experiment.plan import make_plan, read_data
from xdm_ft.experiment.prepare import build_encoders, prepare
from xdm_ft.experiment.results import RunResults, data_facts, environment, inputs, read_records
from xdm_ft.experiment.resume import edited_rows, grown_from, open_run_directory, written_recipe
from xdm_ft.experiment.work import launched
from xdm_ft.recipe.check import check
from xdm_ft.recipe.settings import Cluster, Output
from xdm_ft.recipe.text import apply_override
from xdm_ft.report.finished import read_run
from xdm_ft.runtime.errors import UserError, did_you_mean, one_form, signed
from xdm_ft.storage import tensors_digest
from xdm_ft.storage.atomic import disk_errors
from xdm_ft.storage.names import expand_user
from xdm_ft.storage.run_directory import RunDirectory


def main(arguments: argparse.Namespace) -> Answer:
    """Trains the model again from the run's recipe, in a temporary folder, and compares it with the run's model.

    A head trains together with the other heads of its chunk, which gives the same bits on the same kind of machine, or
    `alone`, which gives the same numbers up to rounding. `keep`: a folder that becomes a run directory of the same
    recipe, with this model alone. Raises `UserError` if the folder holds no run, or the run no such model.
    """
    folder, keep = Path(arguments.run_dir), None
    if arguments.keep is not None:
        path = expand_user(arguments.keep, "--keep")
        with disk_errors(path):
            keep = path.resolve()
            if keep.exists() and not (keep.is_dir() and not any(keep.iterdir())):
                raise UserError(f"--keep {keep}: exists and is not an empty folder; name a new one")
    run = read_run(folder)
    before = _recorded_model(folder, run.every, arguments)
    text = written_recipe(folder, run.results)
    if keep is not None:
        # JSON is YAML: the quotes keep a path with any characters one text
        for name, value in (("name", keep.name), ("output.dir", str(keep.parent))):
            apply_override(text, f"{name}={json.dumps(value)}")
    recipe = replace(check(text), cluster=Cluster())  # this machine is asked whether it agrees
    parent = None if keep is None else keep.parent  # so that a finished run directory can be renamed to `keep`
    with ExitStack() as stack:
        with disk_errors(parent or Path(tempfile.gettempdir())):
            if parent is not None:
                parent.mkdir(parents=True, exist_ok=True)
            scratch = stack.enter_context(tempfile.TemporaryDirectory(dir=parent, prefix=".xdm-ft-retrain-"))
        accelerator = stack.enter_context(launched(recipe))
        dataset = read_data(recipe)
        plan = make_plan(recipe, dataset)
        prepared = prepare(recipe, dataset, build_encoders(recipe, dataset), accelerator, run.results["environment"])
        plan = plan.without(prepared.unreadable)
        with open_run_directory(replace(recipe, output=Output(dir=scratch)), accelerator) as directory:
            # nothing counts as trained yet
            results = RunResults(recipe, directory, grown_from(run.results, recipe.resolved()))
            facts = environment(accelerator) | inputs(dataset, prepared)
            results.begin(facts, data_facts(plan, faults(plan, show=True)))
            context = RunContext(plan, prepared, directory, accelerator)
            group = results.chunk_group(before.key)  # heads of one group share a chunk
            of_group = [m.key for m in plan.models if results.chunk_group(m.key) == group and not m.skipped]
            keys = [before.key] if arguments.alone else of_group
            pieces = planned_pieces(context, keys, {before.key}, results)
            do_pieces(context, pieces, measure, results, what="training")
            now = read_records(directory)[before.key]
            rules, lines = dict[str, Any](), [f"now {now.status}: {now.reason}"]
            if now.status == "ok":
                rules, lines = _compare(folder, before, directory.path, now)
            else:
                keep = None
            if before.method in edited_rows(recipe, run.results["environment"].get("code", {})):
                lines.insert(0, f"the code of {before.method} has changed since the run trained it")
            if keep is not None:
                splits = [split for split in plan.splits if split.test_domains == before.test_domains]
                results.common = common_files(context, splits, {})
                directory.write_text("recipe.yaml", recipe.as_yaml())  # which names its folder
                results.records = {now.key: now}
                results.write()
                directory.complete()  # without reports: one model makes no table
        if keep is not None:
            with disk_errors(keep):
                os.replace(directory.path, keep)
            lines.append(f"kept in {keep}")
    model = dict(zip(("method", "test_domains", "seed", "trial"), now.key, strict=True))
    return Answer({**model, "status": now.status, "reason": now.reason, "rules": rules, "kept": keep}, lines)


def _recorded_model(folder: Path, records: Sequence[Record], arguments: argparse.Namespace) -> Record:
    """Returns the record of the model. Raises `UserError` if it has no weights, or damaged ones, to compare with."""
    path = folder / "results.json"
    name = one_form(f"{arguments.method} {arguments.test_domain} {arguments.seed} {arguments.trial}")
    by_name = {one_form(" ".join(map(str, (r.method, ",".join(r.test_domains), r.seed, r.trial)))): r for r in records}
    if name not in by_name:
        raise UserError(f'{path}: no model "{name}"{did_you_mean(name, list(by_name))}')
    record = by_name[name]
    if record.status != "ok":
        raise UserError(f"{path}: {name} has no weights to compare ({record.status}: {record.reason})")
    directory = RunDirectory(folder)
    for pick in record.selected.values():
        directory.require_tensors(pick.weights, record.files)
    return record


def _compare(folder: Path, before: Record, scratch: Path, now: Record) -> tuple[dict[str, Any], list[str]]:
    """Returns {selection rule: steps, weights and accuracies in the run and now}, and the same as lines."""
    rules, lines = {}, []
    for rule, old in before.selected.items():
        new = now.selected[rule]
        # not the bytes of the files: their metadata also name the versions of libraries
        read = (RunDirectory(path).tensors(pick.weights)[0] for path, pick in ((folder, old), (scratch, new)))
        digests = [*map(tensors_digest, read)]
        same_bits = digests[0] == digests[1]
        weights = "the same bits" if same_bits else "differ"
        lines.append(f"{rule}: step {old.step}, now {new.step}; weights {weights}")
        accuracies = {split: (score.accuracy, new.metrics[split].accuracy) for split, score in old.metrics.items()}
        for split, (first, second) in accuracies.items():
            change = signed(100 * second - 100 * first, 2)
            lines.append(f"  {split} accuracy {100 * first:.2f}, now {100 * second:.2f} ({change})")
        accuracy = {split: {"before": first, "now": second} for split, (first, second) in accuracies.items()}
        rules[rule] = {"step_before": old.step, "step_now": new.step, "same_bits": same_bits, "accuracy": accuracy}
    return rules, lines
