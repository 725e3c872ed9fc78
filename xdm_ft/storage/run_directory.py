"""The run directory: where its files lie, and that only one run writes them at a time.

While a run lasts `state/` holds its checkpoints, which training some process has taken, and lines of JSON of several
kinds (records of models, …), one file per process, which are only ever added to.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

from filelock import FileLock, Timeout
from torch import Tensor

from xdm_ft.errors import UserError
from xdm_ft.progress import pulse
from xdm_ft.storage.atomic import replace_text, sweep
from xdm_ft.storage.checkpoint import Checkpoint, Pace
from xdm_ft.storage.checksummed import (
    Arrays,
    Damaged,
    append_line,
    check_tensors,
    read_arrays,
    read_lines,
    read_results,
    results_digest,
    write_arrays,
    write_tensors,
)

logger = logging.getLogger("xdm_ft")
PREDICTIONS = "predictions.safetensors"  # of a model, on its test images
TAKEN = "taken"  # folder of the state that says which training some process of this run has taken
WRITING_SHARE = 0.01  # of the time, that writing results.json may take while models are trained


class RunDirectory:
    """One process's view of it. `main`: this process writes what there is once; all write weights and lines."""

    def __init__(self, path: Path, process: str = "0", main: bool = True) -> None:
        self.path, self.process, self.main = path, process, main
        self._lock, self._pace = FileLock(path / "run.lock"), Pace()
        self._next_write = 0.0  # of results.json, in time.monotonic()
        self._scalars: Any = None

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._scalars is not None:
            self._scalars.close()
        self._lock.release()

    def lock(self) -> None:
        """Makes the directory this run's own until it ends. Raises `UserError` where another run writes it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(blocking=False)
        except Timeout as error:
            raise UserError(f"{self.path}: another run is writing here; wait for it, or set output.dir") from error
        except OSError as error:
            raise UserError(f"{self.path}: can not be used as a run directory: {error.strerror}") from error
        sweep(self.path)
        shutil.rmtree(self.path / "state" / TAKEN, ignore_errors=True)  # by processes of an earlier run

    @contextmanager
    def in_fork(self, number: int) -> Iterator[RunDirectory]:
        """The view of one of the processes that this one forks into; 0 is this one itself."""
        if number == 0:
            yield self
        else:
            with RunDirectory(self.path, f"{self.process}.{number}", main=False) as own:
                yield own

    @property
    def is_begun(self) -> bool:
        """Whether a run has been here before."""
        return any((self.path / kept).exists() for kept in ("results.json", "state"))

    def take(self, name: str) -> bool:
        """Whether this process does the training of that name: the first one of the run that asks does."""
        folder = self.path / "state" / TAKEN
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError as error:
            raise UserError(f"{folder}: can not be written: {error.strerror}") from error
        return True

    def checkpoint(self, name: str, about: Mapping[str, Any], writes: bool = True) -> Checkpoint:
        """The state of the training of that name, until the run is complete; `about` as for `Checkpoint`."""
        file = self.path / "state" / "checkpoints" / f"{name}.safetensors"
        return Checkpoint(file, about, self._pace, writes)

    def append(self, kind: str, value: Any) -> None:
        """Adds a line of JSON to this process's file of that kind. It is on the disk when this returns."""
        append_line(self.path / "state" / kind / f"{self.process}.jsonl", value)

    def lines(self, kind: str) -> Iterator[Any]:
        """The lines of that kind, of every process. Raises `UserError` where one is damaged."""
        for path in sorted((self.path / "state" / kind).glob("*.jsonl")):
            try:
                yield from read_lines(path)
            except Damaged as error:
                raise UserError(f"{path}: is damaged ({error}); delete it to train its models again") from error

    @staticmethod
    def model_folder(method: str, test_domains: tuple[str, ...], seed: int, trial: int) -> str:
        """The folder of a model, relative to the run directory."""
        names = [quote(method, safe="+ "), quote(",".join(test_domains), safe=", "), f"seed{seed}-trial{trial}"]
        return "/".join(["models", *names])

    def write_weights(self, relative: str, state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        write_tensors(self.path / relative, state, metadata)

    def write_predictions(self, folder: str, arrays: Arrays) -> None:
        write_arrays(self.path / folder / PREDICTIONS, arrays)

    def predictions(self, folder: str) -> Arrays:
        """Raises `UserError` where they are damaged."""
        pulse.beat()
        path = self.path / folder / PREDICTIONS
        try:
            return read_arrays(path)
        except (Damaged, FileNotFoundError) as error:
            raise UserError(f"{path}: is damaged ({error}); the same command trains its model again") from error

    def is_sound(self, relative: str) -> bool:
        """Whether a file of weights, or of predictions, is there and whole; a damaged one is logged."""
        pulse.beat()
        file = self.path / relative
        if not file.is_file():
            return False
        try:
            read_arrays(file) if file.name == PREDICTIONS else check_tensors(file)
        except Damaged as error:
            if self.main:
                logger.warning("%s: is damaged (%s); its model is trained again", file, error)
            return False
        return True

    def write_scalars(self, tag: str, step: int, values: Mapping[str, float]) -> None:
        """TensorBoard scalars `<tag>/<name>`."""
        if self._scalars is None:
            from torch.utils.tensorboard import SummaryWriter

            events = self.path / "events"
            try:
                # each process has a file of its own
                self._scalars = SummaryWriter(str(events), filename_suffix=f".{self.process}")
            except OSError as error:
                raise UserError(f"{events}: can not be written: {error.strerror}") from error
        for name, value in values.items():
            self._scalars.add_scalar(f"{tag}/{name}", value, step)

    def results(self) -> dict[str, Any] | None:
        """results.json as an earlier run has left it; None where there is none. Raises `UserError` where damaged."""
        path = self.path / "results.json"
        if not path.exists():
            return None
        try:
            return read_results(path)
        except Damaged as error:
            raise UserError(f"{path}: is damaged ({error}); delete it to train its models again") from error

    @property
    def results_are_due(self) -> bool:
        """Whether to write results.json between two models: with thousands of them it is long."""
        return self.main and time.monotonic() >= self._next_write

    def write_results(self, results: Mapping[str, Any]) -> None:
        started = time.monotonic()
        whole = {**results, "checksum": results_digest(results)}
        text = json.dumps(whole, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        replace_text(self.path / "results.json", text)
        ended = time.monotonic()
        self._next_write = ended + (ended - started) / WRITING_SHARE

    def write_text(self, name: str, text: str) -> None:
        replace_text(self.path / name, text)

    def complete(self, table: str) -> None:
        """Ends the run: results.md, and nothing to resume."""
        self.write_text("results.md", table)
        shutil.rmtree(self.path / "state", ignore_errors=True)
