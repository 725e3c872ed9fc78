"""`xdm-ft retrain`: one model of a run once more, beside what the run recorded of it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from xdm_ft.errors import UserError, did_you_mean
from xdm_ft.experiment.machine import start, stop
from xdm_ft.experiment.plan import make_plan, read_data
from xdm_ft.experiment.prepared import build_encoder, prepare
from xdm_ft.experiment.records import Work
from xdm_ft.experiment.run_directory import RunDirectory, identity
from xdm_ft.recipe.read import load
from xdm_ft.storage.checksummed import Damaged, read_results
from xdm_ft.training import Identity


def retrain(run_directory: str, method: str, held_out: str, seed: int, trial: int, alone: bool) -> str:
    """Trains the model again, from its recorded hyper-parameters and seed; returns what differs, a line per part.

    Heads train in the chunk that they trained in, which gives the same bits on the same kind of machine, or `alone`,
    which gives the same numbers at least to rounding. `held_out` is the test domains, joined by commas.
    """
    folder = Path(run_directory)
    recorded = _recorded(folder, (method, tuple(held_out.split(",")), seed, trial))
    with tempfile.TemporaryDirectory() as scratch:
        recipe = load(str(folder / "recipe.yaml"), [f"output.dir={json.dumps(scratch)}"])
        accelerator, dataset = start(recipe), read_data(recipe)
        prepared = prepare(recipe, dataset, build_encoder(recipe, recipe.protocol.seeds[0]), accelerator)
        plan = make_plan(recipe, dataset, prepared.unreadable)
        key = identity(recorded)
        planned = {model.key: model for model in plan.models if model.item.label == method and not model.skipped}
        if alone:
            planned = {key: planned[key]}
        with RunDirectory(recipe, accelerator) as directory:
            work = Work(plan, prepared, directory, accelerator)
            known = work.known(planned.keys())
            work.train_planned(planned, known, {key})
            (again,) = (run for run in directory.remembered_runs().values() if identity(run) == key)
            told = _compared(folder, recorded, directory.path, again)
        stop(accelerator)
    return told


def _recorded(folder: Path, key: Identity) -> dict[str, Any]:
    path = folder / "results.json"
    try:
        runs = read_results(path)["runs"]
    except Damaged as error:
        raise UserError(f"{path}: is not the results of a run ({error}); name a run directory") from error
    names = {_name(identity(run)): run for run in runs}
    found: dict[str, Any] | None = names.get(_name(key))
    if found is None:
        raise UserError(f'{path}: no model "{_name(key)}"{did_you_mean(_name(key), list(names))}')
    if found["status"] != "ok":
        raise UserError(f"{path}: {_name(key)} has no weights to compare with ({found['status']}: {found['reason']})")
    return found


def _name(key: Identity) -> str:
    method, test_domains, seed, trial = key
    return f"{method} {','.join(test_domains)} {seed} {trial}"


def _compared(folder: Path, recorded: dict[str, Any], scratch: Path, again: dict[str, Any]) -> str:
    if again["status"] != "ok":
        return f"now {again['status']}: {again['reason']}"
    lines = []
    for rule, before in recorded["selected"].items():
        now = again["selected"][rule]
        same = (folder / before["weights"]).read_bytes() == (scratch / now["weights"]).read_bytes()
        lines.append(
            f"{rule}: step {before['step']}, now {now['step']}; weights {'the same bits' if same else 'differ'}"
        )
        for split, metrics in before["metrics"].items():
            old, new = metrics["accuracy"], now["metrics"][split]["accuracy"]
            lines.append(f"  {split} accuracy {100 * old:.2f}, now {100 * new:.2f} ({100 * (new - old):+.2f})")
    return "\n".join(lines)
