"""TensorBoard's table of hyper-parameters (its plugin hparams): one session per row, in a sub-run of `storage.events`.

TensorBoard collects names and types of the columns from the sessions of all runs below its folder. A session has one
file, whose name holds the checksum of its content, so a run that is started again writes the new ones only.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from xdm_ft.storage.atomic import disk_errors, replace_file
from xdm_ft.storage.digests import digest
from xdm_ft.storage.events import BEGINNING

ENDING = ".hparams"
LAST = "9999999999"  # in place of the time in a file's name: what training writes again does not replace it


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

    Raises `UserError` if it can not be written.
    """
    name = f"{BEGINNING}{LAST}.{digest(json.dumps(asdict(session)), bits=128)}{ENDING}"
    if not _is_whole(folder / name):
        replace_file(folder / name, lambda temporary: _write(temporary, session))
    with disk_errors(folder):
        for other in folder.glob(f"{BEGINNING}{LAST}.*{ENDING}"):
            if other.name != name:
                other.unlink()


def _is_whole(path: Path) -> bool:
    """Returns whether the file has the three records of `_write`: each has a checksum, and a damaged one ends it."""
    from google.protobuf.message import DecodeError
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    try:
        return path.is_file() and len([*LegacyEventFileLoader(str(path)).Load()]) == 3
    except DecodeError:
        return False


def _write(path: Path, session: Session) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import api_pb2, metadata
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo, SessionStartInfo
    from tensorboard.summary.writer.record_writer import RecordWriter

    # `tensorboard.plugins.hparams.summary` makes the same messages, but needs TensorFlow
    now = time.time()
    start = SessionStartInfo(group_name=session.row, start_time_secs=now)
    for name, value in session.hparams.items():
        kind = "bool_value" if isinstance(value, bool) else "string_value" if isinstance(value, str) else "number_value"
        setattr(start.hparams[name], kind, value)
    status = api_pb2.STATUS_FAILURE if session.failed else api_pb2.STATUS_SUCCESS
    of_plugin = {
        metadata.SESSION_START_INFO_TAG: HParamsPluginData(session_start_info=start),
        metadata.SESSION_END_INFO_TAG: HParamsPluginData(
            session_end_info=SessionEndInfo(status=status, end_time_secs=now)
        ),
    }
    values = [
        Summary.Value(tag=tag, metadata=metadata.create_summary_metadata(data), tensor=metadata.NULL_TENSOR)
        for tag, data in of_plugin.items()
    ]
    scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in session.scalars.items()]
    with path.open("wb") as file:
        writer = RecordWriter(file)
        for event in (
            Event(wall_time=now, file_version="brain.Event:2"),
            Event(wall_time=now, summary=Summary(value=values)),
            Event(wall_time=now, step=session.step, summary=Summary(value=scalars)),
        ):
            writer.write(event.SerializeToString())
