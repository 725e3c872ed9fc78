"""Checkpoints: the state of an unfinished training on the disk, from which an interrupted run resumes."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from xdm_ft.runtime.errors import UserError
from xdm_ft.storage.atomic import disk_errors
from xdm_ft.storage.lines import Damaged
from xdm_ft.storage.tensors import read_checked, write_checked

logger = logging.getLogger("xdm_ft")

State = dict[str, Any]
"""Tensors, numbers, text and None, in lists and dicts with keys of text or integers. Tuples are read back as lists."""

EVERY_SECONDS = 20.0  # between two saves: short, so that a run which is killed every minute still advances
EVENT_SECONDS = 5.0  # the same after expensive work, such as an evaluation
SHARE = 0.01  # largest share of the time that saving may take; slow saves make both intervals longer
RESTARTS = "restarts"  # key of a file for the reasons of earlier restarts


class Pace:
    """Decides when to save, for all trainings of a process one after the other.

    If the last save took t seconds, the next one comes at least t / SHARE seconds after it. Before the first save t is
    unknown and counts as 0.
    """

    def __init__(self) -> None:
        self.last, self.duration = time.monotonic(), 0.0

    def is_due(self, event: bool = False) -> bool:
        wait = max(EVENT_SECONDS if event else EVERY_SECONDS, self.duration / SHARE)
        return time.monotonic() - self.last >= wait

    def saved(self, duration: float) -> None:
        self.last, self.duration = time.monotonic(), duration


@dataclass
class Checkpoint:
    """The checkpoint file of one training. It is ignored if it was written for other settings than it is read for."""

    path: Path
    settings: Mapping[str, Any]  # those that change the numbers, as JSON values
    pace: Pace
    writes: bool = True  # whether this process writes it
    before_writing: Callable[[], object] = lambda: None  # may raise `UserError`
    restarts: list[str] = field(default_factory=list)  # one reason per restart of the training

    def load(self, engine_settings: Mapping[str, Any]) -> State | None:
        """Returns the last saved state, or None if there is none or it does not fit, and logs why it does not.

        `engine_settings`: those of the engine, which are added.
        """
        self.settings = {**self.settings, **engine_settings}
        if self.path.is_dir():  # found now, and not when the first state is to be written
            raise UserError(
                f"{self.path}: cannot be written because it is a folder; remove it and run the same command to resume"
            )
        try:
            state, settings = read(self.path)
        except FileNotFoundError:
            return None
        except Damaged as error:
            fault = f"is damaged ({error})"
        else:
            self.restarts = settings.pop(RESTARTS, [])
            changed = differences(settings, self.settings)
            if not changed:
                return state
            named = ", ".join(f"{key} was {_at(settings, key)}, is {_at(self.settings, key)}" for key in changed[:3])
            fault = f"was written for other settings ({named})"
        self.restarts.append(f"its checkpoint {fault}")
        if self.writes:
            logger.warning("%s: %s; this training starts again", self.path, fault)
        return None

    def save_if_due(self, state: Callable[[], State], event: bool = False) -> None:
        if self.writes and self.pace.is_due(event):
            self.save(state)

    def save(self, state: Callable[[], State]) -> None:
        if self.writes:
            started = time.monotonic()
            self.before_writing()
            write(self.path, state(), {**self.settings, RESTARTS: self.restarts})
            self.pace.saved(time.monotonic() - started)

    def remove(self) -> None:
        """Deletes the file; the results of the training must be on the disk."""
        if self.writes:
            with disk_errors(self.path):
                self.path.unlink(missing_ok=True)


def write(path: Path, state: State, settings: Mapping[str, Any]) -> None:
    """Writes a checkpoint atomically: the earlier file stays until the new one is complete."""
    numbered: dict[tuple[Any, ...], tuple[int, Tensor]] = {}
    header = json.dumps([_pack(state, numbered), settings])
    tensors = {str(number): tensor for number, tensor in numbered.values()}
    write_checked(path, tensors, {"header": header})


def read(path: Path) -> tuple[State, dict[str, Any]]:
    """Returns the state and the settings it was written for. Raises `Damaged` or `FileNotFoundError`."""
    loaded, metadata = read_checked(path)
    if "header" not in metadata:
        raise Damaged("it is not a checkpoint")
    # clone, because the tensors are memory-mapped and the next save replaces the file
    tensors = {name: tensor.clone() for name, tensor in loaded.items()}
    state, settings = json.loads(metadata["header"])
    return _unpack(state, tensors), settings


def differences(before: Any, now: Any, key: str = "") -> list[str]:
    """Returns the dotted keys whose values differ between two nested dicts."""
    if isinstance(before, dict) and isinstance(now, dict):
        names = [*now, *(name for name in before if name not in now)]
        dot = f"{key}." if key else ""
        return [d for name in names for d in differences(before.get(name), now.get(name), f"{dot}{name}")]
    return [] if before == now else [key]


def _at(value: Any, key: str) -> Any:
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _pack(value: Any, numbered: dict[tuple[Any, ...], tuple[int, Tensor]]) -> Any:
    """Returns the value for JSON, and adds its tensors to `numbered`. A tensor that occurs twice is stored once."""
    if isinstance(value, Tensor):
        # equal memory and layout: the same tensor under two names
        same = (value.data_ptr(), value.shape, value.stride(), value.dtype, value.device)
        return {"tensor": numbered.setdefault(same, (len(numbered), value))[0]}
    if isinstance(value, Mapping):
        return {"items": [[key, _pack(inner, numbered)] for key, inner in value.items()]}
    if isinstance(value, list | tuple):
        return [_pack(element, numbered) for element in value]
    assert value is None or isinstance(value, bool | int | float | str), f"{type(value)} cannot be saved"
    return value


def _unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, dict) and "tensor" in value:
        return tensors[str(value["tensor"])]
    if isinstance(value, dict):
        return {key: _unpack(inner, tensors) for key, inner in value["items"]}
    if isinstance(value, list):
        return [_unpack(element, tensors) for element in value]
    return value
