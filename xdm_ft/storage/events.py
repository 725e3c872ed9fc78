"""TensorBoard's files of a run, in its folder `events/`. Each folder with such files is a sub-run, and has a curve of
its own in every chart.

| sub-run | of |
|---|---|
| `METHOD/HELD_OUT/seed0`, of later trials of a search `METHOD/HELD_OUT/seed0-trial3` | a model (`sub_run`) |
| `METHOD/+final_fit/seed0` | a model of the final fit (`sub_run` without test domains) |
| `METHOD/HELD_OUT/heads-from-seed0-trial12` | heads that train together, summarised (`heads_sub_run`) |
| `METHOD/+trials/trial3` | the table entry of a trial, if models are summarised (`trial_sub_run`) |

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

`test/` and `selection/` are in a file of their own beside TensorBoard's table of hyper-parameters (`storage.sessions`).
A metric that is undefined has no point. Older runs have one sub-run, `events/` itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from xdm_ft.runtime.errors import UserError
from xdm_ft.storage.atomic import disk_errors
from xdm_ft.storage.names import file_name

Scalars = dict[str, list[tuple[int, float]]]  # {tag: [(step, value), …] by rising step}
BEGINNING = "events.out.tfevents."  # of the names by which TensorBoard finds its files


def sub_run(method: str, test_domains: tuple[str, ...], seed: int, trial: int) -> str:
    """Returns the sub-run of a model; without test domains that of the final fit."""
    return f"{_folder(method, test_domains)}/{_name(seed, trial)}"


def heads_sub_run(method: str, test_domains: tuple[str, ...], seed: int, trial: int) -> str:
    """Returns the sub-run of heads that train together, given seed and trial of the first one."""
    return f"{_folder(method, test_domains)}/heads-from-{_name(seed, trial)}"


def trial_sub_run(method: str, trial: int) -> str:
    return f"{file_name(method, safe='+ ')}/+trials/trial{trial}"


def _folder(method: str, test_domains: tuple[str, ...]) -> str:
    # no domain has a name with +, which would be percent-encoded
    held_out = file_name(*test_domains, safe=" ") if test_domains else "+final_fit"
    return f"{file_name(method, safe='+ ')}/{held_out}"


def _name(seed: int, trial: int) -> str:
    return f"seed{seed}-trial{trial}" if trial else f"seed{seed}"


def read_scalars(folder: Path) -> dict[str, Scalars]:
    """Returns {sub-run: its scalars}. A sub-run is a folder below `folder` with event files, "" is `folder` itself.

    A file that a resumed training began replaces all values of its sub-run from its first step on, as in TensorBoard;
    of several values of one step the last one counts. A damaged record, or one that was cut off by a kill, ends its
    file. Without a folder there is nothing. Raises `UserError` if a file can not be read.
    """
    from google.protobuf.message import DecodeError
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    from tensorboard.compat.proto.event_pb2 import SessionLog

    found: dict[str, dict[str, dict[int, float]]] = {}
    for path in sorted(path for path in folder.rglob(f"{BEGINNING}*") if path.is_file()):
        name = path.parent.relative_to(folder).as_posix()
        values = found.setdefault("" if name == "." else name, {})
        try:
            for event in LegacyEventFileLoader(str(path)).Load():
                if event.session_log.status == SessionLog.START:
                    for tag, points in values.items():
                        values[tag] = {step: value for step, value in points.items() if step < event.step}
                for scalar in event.summary.value:
                    if scalar.HasField("simple_value"):
                        values.setdefault(scalar.tag, {})[event.step] = scalar.simple_value
        except DecodeError:
            continue
        except OSError as error:
            raise UserError(f"{path}: can not be read: {error.strerror}") from error
    return {
        name: {tag: sorted(points.items()) for tag, points in values.items() if points}
        for name, values in found.items()
    }


class EventFile:
    """A process's file of one sub-run. It is open only while it is written, as a run may have thousands of them."""

    def __init__(self, folder: Path, process: str) -> None:
        # TensorBoard reads the files of a sub-run in the order of their names
        seconds, fraction = divmod(time.time_ns(), 10**9)
        begin = f"{BEGINNING}{seconds:010d}.{fraction:09d}.{os.getpid()}"
        self.path = folder / f"{begin}.{process}"
        self._last = -1  # step

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Appends the values of the tags after `step` steps. They survive a kill of this process.

        The first write, and one of an earlier step, declares that older values from this step on do not count any
        more, as the training was resumed before it. Raises `UserError` if the file can not be written.
        """
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        now = time.time()
        events = [Event(wall_time=now, step=step, summary=Summary(value=scalars))]
        with disk_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                if file.tell() == 0 or step <= self._last:
                    restart = Event(wall_time=now, step=step, session_log=SessionLog(status=SessionLog.START))
                    events = [Event(wall_time=now, file_version="brain.Event:2"), restart, *events]
                writer = RecordWriter(file)
                for event in events:
                    writer.write(event.SerializeToString())
        self._last = step
