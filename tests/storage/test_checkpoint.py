"""Checkpoint files: what goes in comes out, damage is found, and saving takes its hundredth of the time."""

from __future__ import annotations

import logging
import math
import os
import random
from pathlib import Path

import pytest
import torch

from xdm_ft.storage import checkpoint
from xdm_ft.storage.checkpoint import Checkpoint, Pace, State, read, write
from xdm_ft.storage.lines import Damaged

ABOUT = {"recipe": {"training": {"lr": 0.1}}, "processes": 2}


def some_state() -> State:
    tied, flat = torch.randn(3, 4), torch.arange(10.0)
    return {
        "numbers": [1, 2.5, math.inf, -1e-300, True, None, "τ"],
        3: {"empty": {}, "none": []},
        "tensors": {
            "float": torch.randn(2, 3, 4), "transposed": torch.randn(3, 5).T, "tied": tied, "again": tied.detach(),
            "views": [flat[:4], flat[4:]], "scalar": torch.tensor(7), "bool": torch.tensor([True, False]),
            "half": torch.randn(3).bfloat16(), "nothing": torch.zeros(0, 3),
        },
    }  # fmt: skip


def assert_equal(got: object, expected: object) -> None:
    assert type(got) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype and torch.equal(got, expected)
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        assert_equal([*got.values()], [*expected.values()])
    elif isinstance(expected, list):
        for one, other in zip(got, expected, strict=True):
            assert_equal(one, other)
    else:
        assert got == expected


def test_round_trip_and_what_can_not_be_saved(tmp_path: Path) -> None:
    state = some_state()
    write(tmp_path / "c", state, ABOUT)
    with pytest.raises(AssertionError, match="can not be saved"):
        write(tmp_path / "c", {"n": object()}, ABOUT)
    got, about = read(tmp_path / "c")
    assert_equal(got, state)
    assert about == ABOUT and os.listdir(tmp_path) == ["c"], "the last one stays"


def test_every_damage_is_found_or_harmless(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state, path, draw = some_state(), tmp_path / "c", random.Random(0)
    write(path, state, ABOUT)
    whole = path.read_bytes()
    places = [draw.randrange(len(whole)) for _ in range(300)] + list(range(8))
    damaged = [whole[:p] + bytes([whole[p] ^ 1 << draw.randrange(8)]) + whole[p + 1 :] for p in places]
    damaged += [whole[: draw.randrange(len(whole))] for _ in range(50)] + [b"", whole + b"x", b"\0" * len(whole)]
    found = 0
    for content in damaged:
        path.write_bytes(content)
        try:
            got = read(path)
        except Damaged:
            found += 1
        else:
            assert_equal(got[0], state)
            assert got[1] == ABOUT
    assert found > len(damaged) - 20
    path.write_bytes(whole[:-1])
    with caplog.at_level(logging.WARNING, "xdm_ft"):
        assert Checkpoint(path, ABOUT, Pace()).load({}) is None
    [message] = caplog.messages
    assert message.startswith(f"{path}: is damaged (") and "\n" not in message


def test_it_is_read_for_what_it_was_written_for(tmp_path: Path) -> None:
    """And counts how often its training started again."""
    Checkpoint(tmp_path / "c", ABOUT, Pace()).save(lambda: {"n": 1})
    assert Checkpoint(tmp_path / "c", ABOUT, Pace()).load({}) == {"n": 1}
    assert Checkpoint(tmp_path / "other", ABOUT, Pace()).load({}) is None
    reasons = []
    for processes, fits in ((1, False), (2, False), (2, True), (1, False)):
        own = Checkpoint(tmp_path / "c", ABOUT, Pace())
        assert (own.load({"processes": processes}) is not None) == fits
        reasons.append(own.restarts)
        own.save(lambda: {"n": 2})
    assert [len(found) for found in reasons] == [1, 2, 2, 3], "one that goes on knows of those before"
    start = "its checkpoint was written for other settings"
    assert reasons[-1][-2:] == [f"{start} (processes was 1, is 2)", f"{start} (processes was 2, is 1)"]


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    other = Checkpoint(tmp_path / "c", ABOUT, Pace(), writes=False)
    other.save(lambda: {"n": 1})
    assert not (tmp_path / "c").exists()
    Checkpoint(tmp_path / "c", ABOUT, Pace()).save(lambda: {"n": 1})
    other.remove()
    assert other.load({}) == {"n": 1}


@pytest.mark.parametrize("duration", [0.001, 0.1, 3.0])
def test_saving_takes_a_hundredth_of_the_time(monkeypatch: pytest.MonkeyPatch, duration: float) -> None:
    now, saved = 0.0, []
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now)
    pace = Pace()
    while now < 3600:
        now += 0.5  # a step
        if pace.is_due():
            now += duration
            pace.saved(duration)
            saved.append(now)
    assert saved[0] <= 20.5 + duration, "a run that is killed every minute advances"
    assert duration * (len(saved) - 1) <= 0.01 * 3600
    assert len(saved) > 0.9 * 3600 / max(20.5, 100 * duration)


def test_after_something_dear_it_is_due_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now)
    pace = Pace()
    now = 6.0
    assert pace.is_due(event=True) and not pace.is_due()
    pace.saved(1.0)
    now += 99.0
    assert not pace.is_due(event=True)
    now += 2.0
    assert pace.is_due()
