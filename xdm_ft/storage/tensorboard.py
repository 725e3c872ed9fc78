"""TensorBoard's files of a run, in its folder `events/`. Each folder with such files is a sub-run, and has a curve of
its own in every chart.

| sub-run | of |
|---|---|
| `METHOD/HELD_OUT/seed0`, of later trials of a search `METHOD/HELD_OUT/seed0-trial3` | a model (`sub_run`) |
| `METHOD/+final_fit/seed0` | a model of the final fit (`sub_run` without test domains) |
| `METHOD/HELD_OUT/heads-from-seed0-trial12` | heads that train together, summarised (`sub_run`) |

METHOD and HELD_OUT are file names of the method and of all test domains (`storage.names.file_name`), in which a +
follows from a method alone. The first trial of a search is `seed0`, as it is without a search.

| tag | value after a number of steps |
|---|---|
| `train/loss`, `train/NAME`, `train/lr` | means since the last evaluation of loss and other scalars; learning rate |
| `val/METRIC` | the metric by which the recipe's selection rule compares steps |
| `val/RULE/METRIC` | the same of another rule |
| `oracle/METRIC` | the metric on images of the held-out domain, whichever rule the recipe selects by |
| `train/heads`, `lowest/TAG`, `highest/TAG` | of summarised heads: number, and the range around `TAG`, their mean |
| `test/METRIC` | of the selected weights, once, at their step: on the test images |
| `selection/METRIC`, `selection/NAME` | the value that selected them; what else was selected with them |

`test/` and `selection/` are in a file of their own beside TensorBoard's table of hyper-parameters (its plugin hparams):
one session per row. TensorBoard collects names and types of the columns from the sessions of all runs below its folder.
A metric that is undefined has no point. Older runs have one sub-run, `events/` itself.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from xdm_ft.runtime.errors import UserError, undocumented
from xdm_ft.storage import digest
from xdm_ft.storage.atomic import disk_errors, replace_file
from xdm_ft.storage.names import file_name

logger = logging.getLogger("xdm_ft")
Scalars = dict[str, list[tuple[int, float]]]  # {tag: [(step, value), …] by rising step}
BEGINNING = "events.out.tfevents."  # of the names by which TensorBoard finds its files
ENDING = ".hparams"
FRAME = 16  # bytes of a record besides its event: length and two checksums
LAST = "9999999999"  # in place of the time in a session's file name: what training writes again does not replace it


def sub_run(method: str, test_domains: tuple[str, ...], seed: int, trial: int, heads: bool = False) -> str:
    """Returns the sub-run of a model; without test domains that of the final fit.

    `heads`: of heads that train together, given seed and trial of the first one.
    """
    # no domain has a name with +, which would be percent-encoded
    held_out = file_name(*test_domains, safe=" ") if test_domains else "+final_fit"
    name = ("heads-from-" if heads else "") + (f"seed{seed}-trial{trial}" if trial else f"seed{seed}")
    return f"{file_name(method, safe='+ ')}/{held_out}/{name}"


def read_scalars(folder: Path, damaged: list[Path] | None = None) -> dict[str, Scalars]:
    """Returns {sub-run: its scalars}. A sub-run is a folder below `folder` with event files, "" is `folder` itself.

    A file that a resumed training began replaces all values of its sub-run from its first step on, as in TensorBoard;
    of several values of one step the last one counts. A damaged record, or one that was cut off by a kill, ends its
    file: a warning names it, unless a later file of its sub-run goes on from there, and adds it to `damaged`. Without a
    folder there is nothing. Raises `UserError` if a file cannot be read.
    """
    with undocumented("tensorboard"):
        from tensorboard.compat.proto.event_pb2 import SessionLog

    points_of: dict[str, dict[str, dict[int, float]]] = {}
    cut_off: dict[str, Path] = {}  # {sub-run: its last file, if that lacks records}
    for path in sorted(path for path in folder.rglob(f"{BEGINNING}*") if path.is_file()):
        name = path.parent.relative_to(folder).as_posix()
        values, size = points_of.setdefault("" if name == "." else name, {}), 0
        for event in _read_events(path):
            size += event.ByteSize() + FRAME
            if event.session_log.status == SessionLog.START:
                for tag, points in values.items():
                    values[tag] = {step: value for step, value in points.items() if step < event.step}
            for scalar in event.summary.value:
                if scalar.HasField("simple_value"):
                    values.setdefault(scalar.tag, {})[event.step] = scalar.simple_value
        if not path.name.endswith(ENDING):  # which a run writes again
            cut_off.pop(name, None)
            if not 0 < size == path.stat().st_size:
                cut_off[name] = path
    for path in cut_off.values():
        logger.warning("%s: is damaged, so learning curves lack points; replace it by the file of a copy", path)
    if damaged is not None:
        damaged += cut_off.values()
    return {
        name: {tag: sorted(points.items()) for tag, points in values.items() if points}
        for name, values in points_of.items()
    }


def _read_events(path: Path) -> Iterator[Any]:
    """Yields the records of a file up to one that is damaged: each has a checksum."""
    from google.protobuf.message import DecodeError

    with undocumented("tensorboard"):
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    try:
        yield from LegacyEventFileLoader(str(path)).Load()
    except DecodeError:
        return
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


class EventFile:
    """A process's file of one sub-run. It is open only while it is written, as a run may have thousands of them."""

    def __init__(self, folder: Path, process: str) -> None:
        # TensorBoard reads the files of a sub-run in the order of their names
        seconds, fraction = divmod(time.time_ns(), 10**9)
        self.path = folder / f"{BEGINNING}{seconds:010d}.{fraction:09d}.{os.getpid()}.{process}"
        self._last = -1  # step

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Appends the values of the tags after `step` steps. They survive a kill of this process.

        The first write, and one of an earlier step, declares that older values from this step on do not count any
        more, as the training was resumed before it. Raises `UserError` if the file cannot be written.
        """
        with undocumented("tensorboard"):
            from tensorboard.compat.proto.event_pb2 import SessionLog

        events: list[dict[str, Any]] = [{"step": step, "summary": _scalars(values)}]
        with disk_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                if file.tell() == 0 or step <= self._last:
                    events = [VERSION, {"step": step, "session_log": SessionLog(status=SessionLog.START)}, *events]
                _append_events(file, events)
        self._last = step


VERSION = {"file_version": "brain.Event:2"}


def _scalars(values: Mapping[str, float]) -> Any:
    with undocumented("tensorboard"):
        from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])


def _append_events(file: BinaryIO, events: Iterable[Mapping[str, Any]]) -> None:
    with undocumented("tensorboard"):
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

    writer = RecordWriter(file)
    for event in events:
        writer.write(Event(wall_time=time.time(), **event).SerializeToString())


@dataclass(frozen=True)
class Session:
    """A row of the table, or one of the repetitions whose mean is a row."""

    row: str  # sessions with the same row differ by their seed alone, and are shown as their mean
    hparams: Mapping[str, bool | float | str]
    step: int  # at which the scalars are drawn
    scalars: Mapping[str, float]  # {tag: value}; those of the sub-run's curves become columns too
    failed: bool = False


def write_session(folder: Path, session: Session) -> None:
    """Writes the session of the sub-run in `folder`, unless it is there, undamaged, and removes an earlier one.

    Raises `UserError` if it cannot be written.
    """
    name = f"{BEGINNING}{LAST}.{digest(json.dumps(asdict(session)), bits=128)}{ENDING}"
    if not (folder / name).is_file() or len([*_read_events(folder / name)]) < 3:  # the records of `_write`
        replace_file(folder / name, lambda temporary: _write(temporary, session))
    with disk_errors(folder):
        for other in folder.glob(f"{BEGINNING}{LAST}.*{ENDING}"):
            if other.name != name:
                other.unlink()


def _write(path: Path, session: Session) -> None:
    with undocumented("tensorboard"):
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams import api_pb2, metadata
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo, SessionStartInfo

    # `tensorboard.plugins.hparams.summary` makes the same messages, but needs TensorFlow; torch's have no group
    now = time.time()
    start = SessionStartInfo(group_name=session.row, start_time_secs=now)
    for name, value in session.hparams.items():
        kind = "bool_value" if isinstance(value, bool) else "string_value" if isinstance(value, str) else "number_value"
        setattr(start.hparams[name], kind, value)
    status = api_pb2.STATUS_FAILURE if session.failed else api_pb2.STATUS_SUCCESS
    end = SessionEndInfo(status=status, end_time_secs=now)
    of_plugin = {
        metadata.SESSION_START_INFO_TAG: HParamsPluginData(session_start_info=start),
        metadata.SESSION_END_INFO_TAG: HParamsPluginData(session_end_info=end),
    }
    values = [
        Summary.Value(tag=tag, metadata=metadata.create_summary_metadata(data), tensor=metadata.NULL_TENSOR)
        for tag, data in of_plugin.items()
    ]
    scalars = {"step": session.step, "summary": _scalars(session.scalars)}
    with path.open("wb") as file:
        _append_events(file, [VERSION, {"summary": Summary(value=values)}, scalars])
