"""The run directory: the paths of its files, and a lock that lets only one run write at a time.

During a run, `state/` holds its checkpoints, the names of the trainings that processes have taken, and append-only
files of JSON lines, one per process and kind of line (records of models, …).
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout
from torch import Tensor

from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.progress import pulse
from xdm_ft.storage.atomic import UNFINISHED, disk_errors, remove_unfinished, replace_bytes
from xdm_ft.storage.checkpoint import Checkpoint, Pace
from xdm_ft.storage.lines import Damaged, OtherRun, append_lines, read_lines, read_object, with_checksum
from xdm_ft.storage.names import file_name, images_file, parts_of, predictions_in
from xdm_ft.storage.results_file import read_results, write_results
from xdm_ft.storage.tensorboard import EventFile, Session, write_session
from xdm_ft.storage.tensors import Arrays, TensorFiles, read_unchecked, read_with_checksum, tensors_of

logger = logging.getLogger("xdm_ft")
TAKEN = "taken"  # folder of `state/`, with a file per training that a process of this run has taken: its name
FINISHED = "finished"  # with an empty file per training that is done
LOCK = "run.lock"
ANALYSIS = "analysis.json"
AUDIT = "audit/audit.json"
RESULTS, MARKDOWN, TABLE, PAGE = "results.json", "results.md", "results.csv", "report.html"
MEASURED = "measured.safetensors"  # what the predictions of picked models come to
MODELS = "models.parquet"  # of a run with many models
REPORTS = "reports.json"  # checksums of the reports
COPIES = "copies.csv"  # of a run whose images have copies
# files that exist once per run
WRITTEN = ("recipe.yaml", RESULTS, MEASURED, MARKDOWN, TABLE, MODELS, PAGE, REPORTS, COPIES)
FILE_KEY = "file"  # key of the metadata of weights, predictions and other tensors: their address
Digests = Mapping[str, str]
"""{address of tensors: their checksum} of a model in results.json."""
TRAIN_AGAIN, WRITE_AGAIN = "train this model again", "write it again"  # what running the recipe again does
WRITING_SHARE = 0.01  # largest share of the training time for writing results.json


class RunDirectory:
    """The run directory as one process uses it.

    `main`: this process writes the files that exist once per run. Every process writes weights and lines.
    """

    def __init__(self, path: Path, process: str = "0", main: bool = True) -> None:
        self.path, self.process, self.main = path, process, main
        self._lock, self._pace = FileLock(path / LOCK), Pace()
        self._next_write = 0.0  # time.monotonic() from which results.json may be written again
        self._events: dict[str, EventFile] = {}  # by sub-run
        self._locked: tuple[int, int] | None = None  # the lock file, as `begin` found it
        self._reported: set[tuple[str, str]] = set()  # file, damage
        self.others = set[str]()  # processes on other machines that write lines

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def lock(self, otherwise: str = "") -> None:
        """Creates the directory and locks it until the end of the work. Raises `UserError` if another process has it.

        `otherwise`: another remedy than to wait, for the message.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(blocking=False)
            # only with the lock: before, they could be files that another run is writing
            remove_unfinished(self.path)
        except Timeout as error:
            verbs = "xdm-ft run, analyse, audit or report"
            problem = f"another process ({verbs}) is writing here"
            raise UserError(f"{self.path}: {problem}; wait until it ends and try again{otherwise}") from error
        except OSError as error:
            raise UserError(f"{self.path}: cannot be used as a run directory: {error.strerror}") from error
        for kind in (TAKEN, FINISHED):  # those of the interrupted run
            shutil.rmtree(self.path / "state" / kind, ignore_errors=True)

    def begin(self) -> None:
        """Remembers the directory that is locked now, so that a deleted one is not created again by the next write."""
        self._locked = self._lock_file()

    def _lock_file(self) -> tuple[int, int] | None:
        """Returns device and number of the lock file: no other file has them as long as the run keeps it open."""
        try:
            status = (self.path / LOCK).stat()
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def _checked(self, relative: str = "") -> Path:
        """Returns the path of a file to use. Raises `UserError` if the directory was deleted since `begin`."""
        if self._locked is not None and self._lock_file() != self._locked:
            raise UserError(f"{self.path}: was deleted or replaced during the run; run the same command to start again")
        return self.path / relative

    def require_writable(self, folders: Iterable[str]) -> None:
        """Creates folders of the run directory, and a file in each for a moment.

        So a path that is too long, not permitted or of another kind is found before training. Raises `UserError`.
        """
        for name in WRITTEN:
            _refuse_folder(self.path / name)
        for relative in folders:
            folder = self._checked(relative)
            with disk_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
                # the prefix is longer than those of temporary files
                handle, name = tempfile.mkstemp(dir=folder, prefix=f".{'x' * 30}", suffix=UNFINISHED)
                os.close(handle)
                os.unlink(name)

    @contextmanager
    def in_fork(self, number: int) -> Iterator[RunDirectory]:
        """Yields the run directory for a forked process; number 0 is the process that forks."""
        if number == 0:
            yield self
        else:
            with RunDirectory(self.path, f"{self.process}.{number}", main=False) as of_fork:
                of_fork._locked = self._locked
                yield of_fork

    @property
    def is_begun(self) -> bool:
        """Whether an earlier run has written to the directory."""
        return any((self.path / name).exists() for name in (RESULTS, "state"))

    def claim(self, name: str) -> bool:
        """Returns whether this process does the training `name`: True for the first process that calls this."""
        folder = self._checked(f"state/{TAKEN}")
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                with (folder / name).open(
                    "x", encoding="utf-8"
                ) as file:  # of several processes exactly one creates the file
                    file.write(self.process)
            except FileExistsError:
                return False
        return True

    def release_claims_of(self, process: str) -> None:
        """Gives back the trainings that a process, which has died, took and did not finish."""
        finished = set(self.finished())
        for file in (self.path / "state" / TAKEN).glob("*"):
            # one without a name is being taken, or its process died at that moment: `unclaim` is for those
            with suppress(FileNotFoundError):  # another process has released its own
                if file.name not in finished and file.read_text(encoding="utf-8") == process:
                    file.unlink()

    def unclaim(self, name: str) -> None:
        """Lets another process take a training."""
        (self.path / "state" / TAKEN / name).unlink(missing_ok=True)

    def is_finished(self, name: str) -> bool:
        return (self.path / "state" / FINISHED / name).exists()

    def finish(self, name: str) -> None:
        """Marks a training as done: its models are saved."""
        file = self._checked(f"state/{FINISHED}/{name}")
        with disk_errors(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            # without fsync: the next start removes all marks, and goes by the records alone
            file.touch()

    def finished(self) -> list[str]:
        """Returns the trainings of this run that are done."""
        folder = self.path / "state" / FINISHED
        return os.listdir(folder) if folder.is_dir() else []

    def checkpoint(self, name: str, settings: Mapping[str, Any], writes: bool = True) -> Checkpoint:
        """Returns the checkpoint of the training `name`; `settings` and `writes` as for `Checkpoint`."""
        file = self.path / "state" / "checkpoints" / f"{name}.safetensors"
        # `_checked` before each save: it would create a deleted run directory again, with nothing else in it
        return Checkpoint(file, settings, self._pace, writes, self._checked)

    def profile_file(self, method: str) -> Path:
        """Returns the file for the profiler's trace of a method's training, in a folder that exists."""
        file = self._checked(f"profiles/{file_name(method, safe='+ ')}.json")
        with disk_errors(file):
            file.parent.mkdir(exist_ok=True)
        return file

    def append(self, kind: str, *values: Any) -> None:
        """Appends JSON lines to this process's file of that kind, and returns when they are on the disk."""
        append_lines(self._checked(f"state/{kind}/{self.process}.jsonl"), values)

    def lines(self, kind: str) -> Iterator[Any]:
        """Yields the lines of that kind of all processes. Raises `UserError` if one is damaged."""
        folder = self._checked(f"state/{kind}")
        # a network disk may list a file only a minute after it was written
        expected = {path for process in self.others if (path := folder / f"{process}.jsonl").exists()}
        for path in sorted({*folder.glob("*.jsonl"), *expected}):
            try:
                yield from read_lines(path)
            except Damaged as error:
                raise UserError(f"{path}: is damaged ({error}); delete it to train its models again") from error

    def write_tensors(
        self,
        address: str,
        tensors: Mapping[str, Tensor],
        metadata: Mapping[str, str],
        files: TensorFiles | None = None,
    ) -> str:
        """Writes tensors now, or adds them to `files`, which replaces its files together. Returns their checksum."""
        if files is not None:
            return files.put(self._checked(), address, tensors, {**metadata, FILE_KEY: address})
        with TensorFiles() as alone:
            checksum = self.write_tensors(address, tensors, metadata, alone)
            alone.replace()
        return checksum

    def write_arrays(self, address: str, arrays: Arrays, metadata: Mapping[str, str]) -> str:
        return self.write_tensors(address, tensors_of(arrays), metadata)

    def write_predictions(self, folder: str, arrays: Arrays) -> str:
        return self.write_arrays(predictions_in(folder), arrays, {})

    def tensors(self, address: str, files: Digests | None = None) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Returns the checked tensors and metadata at an address. `files`: of its model in results.json.

        Raises `Damaged`, also for those of another model or run, or `FileNotFoundError`.
        """
        file, entry = parts_of(address)
        tensors, metadata, checksum = read_with_checksum(self._checked(file), entry)
        if metadata.get(FILE_KEY) != address:
            raise Damaged(f"it was written as {metadata.get(FILE_KEY)}")
        if files is not None and files.get(address) != checksum:
            raise OtherRun
        return tensors, metadata

    def require_tensors(
        self, address: str, files: Digests | None, does: str = TRAIN_AGAIN
    ) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Returns what `tensors` does. Raises `UserError` if that raises: running the recipe again `does` help."""
        pulse.beat()
        try:
            return self.tensors(address, files)
        except (Damaged, FileNotFoundError) as error:
            fault = error.fault if isinstance(error, Damaged) else "is damaged (it does not exist)"
            raise UserError(f"{self.path / address}: {fault}; run the run's recipe again to {does}") from error

    def arrays(self, address: str) -> tuple[Arrays, dict[str, str]]:
        """Returns the checked arrays and metadata at an address. Raises as `tensors`."""
        tensors, metadata = self.tensors(address)
        return arrays_of(tensors), metadata

    def predictions(self, folder: str, files: Digests | None = None) -> Arrays:
        """Returns a model's predictions. Raises as `require_tensors`."""
        return arrays_of(self.require_tensors(predictions_in(folder), files)[0])

    def predictions_size(self, folder: str) -> int:
        """Returns the bytes of a model's predictions, roughly; 0 if there are none, which reading them reports."""
        file, entry = parts_of(predictions_in(folder))
        try:
            if entry is None:
                return (self.path / file).stat().st_size
            return sum(tensor.nbytes for tensor in read_unchecked(self.path / file, entry).values())
        except (OSError, Damaged):
            return 0

    def test_images(self, test_domains: tuple[str, ...], files: Digests | None = None) -> Arrays:
        """Returns the test images of these domains. Raises as `require_tensors`."""
        return arrays_of(self.require_tensors(images_file(test_domains), files, WRITE_AGAIN)[0])

    def verify_or_warn(self, address: str, files: Digests | None = None, remedy: str | None = None) -> bool:
        """Returns whether the tensors at an address are those of the run. Logs what is wrong, and what will be done.

        Raises `UserError` if there is a folder in the place of the file.
        """
        pulse.beat()
        name, entry = parts_of(address)
        file = self.path / name
        _refuse_folder(file)
        try:
            self.tensors(address, files)
        except FileNotFoundError:
            return False
        except Damaged as error:
            damage = str(file), error.fault
            if self.main and damage not in self._reported:  # of a file that many heads share
                self._reported.add(damage)
                models = "model" if entry is None or entry in str(error) else "models"
                logger.warning("%s: %s; %s", file, error.fault, remedy or f"its {models} will be trained again")
            return False
        return True

    def write_scalars(self, sub_run: str, step: int, values: Mapping[str, float]) -> None:
        """Writes TensorBoard's scalars {tag: value} of a sub-run after `step` steps (`storage.tensorboard`)."""
        folder = self._checked("events") / sub_run
        file = self._events.setdefault(sub_run, EventFile(folder, self.process))  # each process has one of its own
        file.write(step, values)

    def write_session(self, sub_run: str, session: Session) -> None:
        """Writes the row of a sub-run in TensorBoard's table of hyper-parameters."""
        write_session(self._checked("events") / sub_run, session)

    def results(self, entry: Callable[[dict[str, Any]], Any]) -> dict[str, Any] | None:
        """Returns results.json as an earlier run wrote it, or None without a file. Raises `UserError` if damaged.

        `runs` are what `entry` makes of each model.
        """
        path = self.path / RESULTS
        if not path.exists():
            return None
        try:
            return read_results(path, entry)
        except Damaged as error:
            raise UserError(f"{path}: {error.fault}; delete it to train its models again") from error

    @property
    def results_are_due(self) -> bool:
        """Whether to write results.json now, between two models. With thousands of models this takes long."""
        return self.main and time.monotonic() >= self._next_write

    def write_results(self, results: Mapping[str, Any]) -> None:
        """Writes results.json, unless it holds these results already: then it is no younger than its reports."""
        started = time.monotonic()
        write_results(self._checked(RESULTS), results)
        ended = time.monotonic()
        self._next_write = ended + (ended - started) / WRITING_SHARE  # the more models, the longer a write takes

    def analysis(self) -> dict[str, Any] | None:
        """Returns analysis.json, or None without a file. Raises `Damaged`."""
        path = self.path / ANALYSIS
        return read_object(path) if path.exists() else None

    def write_analysis(self, analysis: Mapping[str, Any]) -> None:
        """Writes analysis.json, unless it has this content: reports that are made from it would be made again."""
        path, text = self._checked(ANALYSIS), json.dumps(with_checksum(analysis), ensure_ascii=False, allow_nan=False)
        content = f"{text}\n".encode()
        if not path.is_file() or path.read_bytes() != content:
            replace_bytes(path, content)

    def write_text(self, name: str, text: str) -> None:
        replace_bytes(self._checked(name), text.encode())

    def write_bytes(self, relative: str, content: bytes) -> None:
        replace_bytes(self._checked(relative), content)

    def complete(self) -> None:
        """Ends the run: removes `state/`, as nothing is left to resume."""
        shutil.rmtree(self.path / "state", ignore_errors=True)


def arrays_of(tensors: Mapping[str, Tensor]) -> Arrays:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def _refuse_folder(file: Path) -> None:
    if file.is_dir():
        raise UserError(f"{file}: cannot be written because it is a folder; remove it and run the same command")
