"""What a run keeps until it is complete: the state of trainings, what was measured, and who trains what."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import xxhash
import yaml

from xdm_ft import __version__
from xdm_ft.errors import UserError
from xdm_ft.experiment.same_recipe import comparable
from xdm_ft.recipe.read import Recipe
from xdm_ft.storage.checkpoint import Checkpoint, Pace
from xdm_ft.storage.checksummed import Damaged, read_value, write_value

if TYPE_CHECKING:
    from xdm_ft.training import Job

TAKEN = "taken"  # folder that says which models some process of this run trains, or has trained


class RunState:
    """`state/` of the run directory `path`, which all processes of the run read and write."""

    def __init__(self, path: Path, recipe: Recipe) -> None:
        self.path, self.recipe, self._pace = path, recipe, Pace()

    def forget_taken(self) -> None:
        """At the start of a run, by one process: none of an earlier run trains anything now."""
        shutil.rmtree(self.path / "state" / TAKEN, ignore_errors=True)

    def take(self, jobs: Sequence[Job], rules: Sequence[str]) -> bool:
        """Whether this process trains these models: the first one of the run that asks for them does."""
        folder = self.path / "state" / TAKEN
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / _name_of(jobs, rules)).touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError as error:
            raise UserError(f"{folder}: can not be written: {error.strerror}") from error
        return True

    def checkpoint(self, jobs: Sequence[Job], rules: Sequence[str], writes: bool = True) -> Checkpoint:
        """Of one training, of one model or of several together, until the run is complete."""
        import torch

        about = {
            "recipe": comparable(yaml.safe_load(self.recipe.as_yaml())),
            "models": _models(jobs, rules),
            "xdm_ft": __version__,
            "torch": torch.__version__,
        }
        file = self.path / "state" / "checkpoints" / f"{_name_of(jobs, rules)}.safetensors"
        return Checkpoint(file, about, self._pace, writes)

    def recall(self, name: str) -> Any:
        """What was remembered under a name; None where nothing was."""
        path = self._state_path(name)
        return self._read_state(path, "to measure it again") if path.exists() else None

    def remember(self, name: str, value: Any) -> None:
        """Keeps what an interrupted run would otherwise have to do again, until the run is complete."""
        write_value(self._state_path(name), value)

    def _state_path(self, name: str) -> Path:
        return self.path / "state" / Path(*(quote(part, safe="+ ,") for part in f"{name}.json".split("/")))

    def _read_state(self, path: Path, why: str) -> Any:
        try:
            return read_value(path)
        except Damaged as error:
            raise UserError(f"{path}: is damaged ({error}); delete it {why}") from error


def _models(jobs: Sequence[Job], rules: Sequence[str]) -> Any:
    """What models train together, as JSON has it."""
    keys = [[*job.key, job.setup.steps] for job in jobs]
    return json.loads(json.dumps([keys, list(rules)]))


def _name_of(jobs: Sequence[Job], rules: Sequence[str]) -> str:
    """Of a training, in file names."""
    digest = xxhash.xxh3_64_hexdigest(json.dumps(_models(jobs, rules)).encode())
    return f"{quote(jobs[0].method, safe='+ ')}-{digest}"
