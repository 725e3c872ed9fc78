"""A TensorBoard file of scalars.

torch's SummaryWriter writes in a thread of its own, where an error of the disk ends in a traceback on the terminal.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from xdm_ft.storage.atomic import disk_errors


class EventFile:
    """One process's file in the folder of TensorBoard's events. Raises `UserError` if it can not be written."""

    def __init__(self, folder: Path, process: str) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        # TensorBoard finds files by this beginning, and reads them in the order of their names
        begin = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self.path = folder / f"{begin}.{time.monotonic_ns()}.{process}"
        with disk_errors(self.path):
            folder.mkdir(parents=True, exist_ok=True)
            self._records = RecordWriter(self.path.open("wb"))
        self._append(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())

    def write(self, tag: str, step: int, values: Mapping[str, float]) -> None:
        """Writes the scalars `<tag>/<name>` of one step."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=f"{tag}/{name}", simple_value=value) for name, value in values.items()]
        self._append(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)).SerializeToString())

    def _append(self, record: bytes) -> None:
        with disk_errors(self.path):
            self._records.write(record)
            self._records.flush()

    def close(self) -> None:
        with disk_errors(self.path):
            self._records.close()
