"""The run directory: the paths of its files, and a lock that lets only one run write at a time.

During a run, `state/` holds its checkpoints, the names of the trainings that processes have taken, and append-only
files of JSON lines, one per process and kind of line (records of models, …).
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
from xdm_ft.storage.atomic import remove_unfinished, replace_text
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
PREDICTIONS = "predictions.safetensors"  # a model's predictions on its test images
TAKEN = "taken"  # folder of `state/`, with one empty file per training that a process of this run has taken
WRITING_SHARE = 0.01  # largest share of the training time for writing results.json


class RunDirectory:
    """The run directory as one process uses it.

    `main`: this process writes the files that exist once per run. Every process writes weights and lines.
    """

    def __init__(self, path: Path, process: str = "0", main: bool = True) -> None:
        self.path, self.process, self.main = path, process, main
        self._lock, self._pace = FileLock(path / "run.lock"), Pace()
        self._next_write = 0.0  # time.monotonic() from which results.json may be written again
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
        """Creates the directory and locks it until the end of the run. Raises `UserError` if another run writes it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(blocking=False)
        except Timeout as error:
            raise UserError(f"{self.path}: another run is writing here; wait for it, or set output.dir") from error
        except OSError as error:
            raise UserError(f"{self.path}: can not be used as a run directory: {error.strerror}") from error
        remove_unfinished(self.path)
        shutil.rmtree(self.path / "state" / TAKEN, ignore_errors=True)  # those of the interrupted run

    @contextmanager
    def in_fork(self, number: int) -> Iterator[RunDirectory]:
        """Yields the run directory for a forked process; number 0 is the process that forks."""
        if number == 0:
            yield self
        else:
            with RunDirectory(self.path, f"{self.process}.{number}", main=False) as own:
                yield own

    @property
    def is_begun(self) -> bool:
        """Whether an earlier run has written to the directory."""
        return any((self.path / kept).exists() for kept in ("results.json", "state"))

    def take(self, name: str) -> bool:
        """Returns whether this process does the training `name`: True for the first process that calls this."""
        folder = self.path / "state" / TAKEN
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).touch(exist_ok=False)  # atomic: of several processes exactly one creates the file
        except FileExistsError:
            return False
        except OSError as error:
            raise UserError(f"{folder}: can not be written: {error.strerror}") from error
        return True

    def checkpoint(self, name: str, about: Mapping[str, Any], writes: bool = True) -> Checkpoint:
        """Returns the checkpoint of the training `name`; `about` and `writes` as for `Checkpoint`."""
        file = self.path / "state" / "checkpoints" / f"{name}.safetensors"
        return Checkpoint(file, about, self._pace, writes)

    def append(self, kind: str, value: Any) -> None:
        """Appends a JSON line to this process's file of that kind, and returns when it is on the disk."""
        append_line(self.path / "state" / kind / f"{self.process}.jsonl", value)

    def lines(self, kind: str) -> Iterator[Any]:
        """Yields the lines of that kind of all processes. Raises `UserError` if one is damaged."""
        for path in sorted((self.path / "state" / kind).glob("*.jsonl")):
            try:
                yield from read_lines(path)
            except Damaged as error:
                raise UserError(f"{path}: is damaged ({error}); delete it to train its models again") from error

    @staticmethod
    def model_folder(method: str, test_domains: tuple[str, ...], seed: int, trial: int) -> str:
        """Returns the folder of a model, relative to the run directory."""
        # quoted, because labels and domains may contain slashes
        names = [quote(method, safe="+ "), quote(",".join(test_domains), safe=", "), f"seed{seed}-trial{trial}"]
        return "/".join(["models", *names])

    def write_weights(self, relative: str, state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        write_tensors(self.path / relative, state, metadata)

    def write_predictions(self, folder: str, arrays: Arrays) -> None:
        write_arrays(self.path / folder / PREDICTIONS, arrays)

    def predictions(self, folder: str) -> Arrays:
        """Returns a model's predictions. Raises `UserError` if the file is damaged or missing."""
        pulse.beat()
        path = self.path / folder / PREDICTIONS
        try:
            return read_arrays(path)
        except (Damaged, FileNotFoundError) as error:
            raise UserError(f"{path}: is damaged ({error}); run the same command to train its model again") from error

    def is_intact(self, relative: str) -> bool:
        """Returns whether a file of weights or predictions exists and is not damaged. Logs a damaged one."""
        pulse.beat()
        file = self.path / relative
        if not file.is_file():
            return False
        try:
            read_arrays(file) if file.name == PREDICTIONS else check_tensors(file)
        except Damaged as error:
            if self.main:
                logger.warning("%s: is damaged (%s); its model will be trained again", file, error)
            return False
        return True

    def write_scalars(self, tag: str, step: int, values: Mapping[str, float]) -> None:
        """Writes the TensorBoard scalars `<tag>/<name>`."""
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
        """Returns results.json as an earlier run wrote it, or None without a file. Raises `UserError` if damaged."""
        path = self.path / "results.json"
        if not path.exists():
            return None
        try:
            return read_results(path)
        except Damaged as error:
            raise UserError(f"{path}: is damaged ({error}); delete it to train its models again") from error

    @property
    def results_are_due(self) -> bool:
        """Whether to write results.json now, between two models. With thousands of models this takes long."""
        return self.main and time.monotonic() >= self._next_write

    def write_results(self, results: Mapping[str, Any]) -> None:
        started = time.monotonic()
        whole = {**results, "checksum": results_digest(results)}
        text = json.dumps(whole, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        replace_text(self.path / "results.json", text)
        ended = time.monotonic()
        self._next_write = ended + (ended - started) / WRITING_SHARE  # the more models, the longer a write takes

    def write_text(self, name: str, text: str) -> None:
        replace_text(self.path / name, text)

    def complete(self, table: str) -> None:
        """Ends the run: writes results.md and removes `state/`, as nothing is left to resume."""
        self.write_text("results.md", table)
        shutil.rmtree(self.path / "state", ignore_errors=True)
