"""`xdm-ft retrain`: trains one model of a run again and compares it with the recorded one."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xdm_ft.errors import UserError, did_you_mean
from xdm_ft.evaluation.records import Identity, Record
from xdm_ft.experiment.cross_domain import cross_domain_values
from xdm_ft.experiment.engines import Engines
from xdm_ft.experiment.machine import launched
from xdm_ft.experiment.plan import make_plan, read_data
from xdm_ft.experiment.prepared import build_encoder, prepare
from xdm_ft.experiment.records import train_planned
from xdm_ft.experiment.results import ResultsFile
from xdm_ft.experiment.resume import Earlier, opened, recorded, records_in, written_recipe
from xdm_ft.recipe.read import check
from xdm_ft.recipe.text import apply_override
from xdm_ft.storage.checksummed import Damaged, read_results
from xdm_ft.storage.digests import tensors_digest
from xdm_ft.storage.run_directory import RunDirectory


def retrain(run_directory: str, method: str, held_out: str, seed: int, trial: int, alone: bool) -> str:
    """Trains the model again from the run's recipe, in a temporary folder. Returns the comparison as lines of text.

    A head trains together with the other heads of its chunk, which gives the same bits on the same kind of machine, or
    `alone`, which gives the same numbers up to rounding. `held_out` holds the test domains, joined by commas. Raises
    `UserError` if the folder holds no run, or the run no such model.
    """
    folder = Path(run_directory)
    results = _results(folder)
    before = _recorded(folder, results, (method, tuple(held_out.split(",")), seed, trial))
    text = written_recipe(folder, results)
    _check_weights(RunDirectory(folder), before)
    with tempfile.TemporaryDirectory() as scratch:
        # JSON is YAML: the quotes keep a path with any characters one text
        apply_override(text, f"output.dir={json.dumps(scratch)}")
        recipe = check(text)
        with launched(recipe) as accelerator:
            dataset = read_data(recipe)
            plan = make_plan(recipe, dataset)
            prepared = prepare(recipe, dataset, build_encoder(recipe, recipe.protocol.seeds[0]), accelerator)
            plan, key = plan.without(prepared.unreadable), before.key
            # all models of the method, because they determine which heads share a chunk
            planned = {model.key: model for model in plan.models if model.item.label == method and not model.skipped}
            if alone:
                planned = {key: planned[key]}
            with opened(recipe, accelerator) as directory:
                engines = Engines(plan, prepared, directory, accelerator)
                again = ResultsFile(recipe, directory, Earlier(), {}, {})  # nothing counts as trained yet
                known = cross_domain_values(engines, planned.keys(), again)
                train_planned(engines, planned, known, {key}, again)
                compared = _compared(folder, before, directory.path, recorded(directory)[key])
    return compared


def _results(folder: Path) -> dict[str, Any]:
    path = folder / "results.json"
    try:
        return read_results(path)
    except Damaged as error:
        raise UserError(f"{path}: can not be read as the results of a run ({error}); name a run directory") from error


def _recorded(folder: Path, results: Mapping[str, Any], key: Identity) -> Record:
    path = folder / "results.json"
    records = records_in(path, results["runs"])
    names = {_name(record.key): record for record in records}
    found = names.get(_name(key))
    if found is None:
        raise UserError(f'{path}: no model "{_name(key)}"{did_you_mean(_name(key), list(names))}')
    if found.status != "ok":
        raise UserError(f"{path}: {_name(key)} has no weights to compare ({found.status}: {found.reason})")
    return found


def _check_weights(directory: RunDirectory, record: Record) -> None:
    """Raises `UserError` if a weights file of the record is damaged: comparing with it would say nothing."""
    for pick in record.selected.values():
        try:
            directory.tensors(pick.weights)
        except (Damaged, FileNotFoundError) as error:
            what = f"{directory.path / pick.weights}: is damaged ({error})"
            raise UserError(f"{what}; run the run's recipe again to train this model again") from error


def _name(key: Identity) -> str:
    method, test_domains, seed, trial = key
    return f"{method} {','.join(test_domains)} {seed} {trial}"


def _compared(folder: Path, recorded: Record, scratch: Path, again: Record) -> str:
    if again.status != "ok":
        return f"now {again.status}: {again.reason}"
    lines = []
    for rule, before in recorded.selected.items():
        now = again.selected[rule]
        # not the bytes of the files: their metadata also name the versions of libraries
        kept, found = (RunDirectory(run).tensors(one.weights)[0] for run, one in ((folder, before), (scratch, now)))
        same = tensors_digest(kept) == tensors_digest(found)
        lines.append(f"{rule}: step {before.step}, now {now.step}; weights {'the same bits' if same else 'differ'}")
        for split, score in before.metrics.items():
            old, new = score.accuracy, now.metrics[split].accuracy
            lines.append(f"  {split} accuracy {100 * old:.2f}, now {100 * new:.2f} ({100 * (new - old):+.2f})")
    return "\n".join(lines)
