"""Files that a kill leaves whole or names as damaged: atomic writes, lines of JSON, checkpoints."""

from __future__ import annotations

import errno
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.interrupt import announce_resume
from xdm_ft.storage import atomic, checkpoint
from xdm_ft.storage.atomic import (
    UNFINISHED,
    Together,
    disk_errors,
    order_metadata,
    remove_unfinished,
    replace_file,
    replace_text,
)
from xdm_ft.storage.checkpoint import Checkpoint, Pace, State, read, write
from xdm_ft.storage.lines import Damaged, append_lines, read_lines
from xdm_ft.storage.run_directory import RunDirectory

# ---- Atomic writes


def test_what_a_killed_process_leaves_is_removed_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    replace_text(folder / "kept.json", "{}")
    (folder / ".hidden").touch()
    child = os.fork()
    if child == 0:
        replace_file(folder / "new.json", lambda path: (path.write_text("half"), os._exit(0)))
    os.waitpid(child, 0)
    (folder / ".tmpA1b2C3").touch()  # of safetensors
    assert len([*folder.glob(f".new.json.*{UNFINISHED}")]) == 1
    (tmp_path / f".folder{UNFINISHED}").mkdir()  # a folder is none of ours
    remove_unfinished(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == [".hidden", "kept.json"]


def test_the_same_metadata_in_another_order_is_the_same_file(tmp_path: Path) -> None:
    metadata, contents = {"step": "3", "normalize": "true", "τ": 'a "quoted" word', "b": "{}"}, set()
    for number in range(20):
        path = tmp_path / str(number)
        save_file({"w": torch.arange(5.0), "a": torch.ones(2, 3)}, path, metadata)
        order_metadata(path)
        contents.add(path.read_bytes())
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == metadata and torch.equal(file.get_tensor("w"), torch.arange(5.0))
    assert len(contents) == 1


def test_files_written_together_are_safe_before_any_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All fsyncs of files come before all renames, and those before the fsyncs of the folders, one of each."""
    events, replace = list[tuple[Any, ...]](), os.replace

    def renamed(old: Path, new: Path) -> None:
        events.append(("rename", Path(new).name))
        replace(old, new)

    monkeypatch.setattr(atomic, "sync", lambda path: events.append(("sync", path.is_dir(), path.parent.name)))
    monkeypatch.setattr(os, "replace", renamed)
    with Together() as files:
        for name in ("a/1", "a/2", "b/3"):
            files.add(tmp_path / name, lambda path, name=name: path.write_text(name))
        assert not list(tmp_path.glob("*/[0-9]"))
        files.replace()
        files.replace()  # nothing is left to do
    assert sorted(events[:3]) == [("sync", False, "a"), ("sync", False, "a"), ("sync", False, "b")]
    assert events[3:6] == [("rename", "1"), ("rename", "2"), ("rename", "3")]
    assert events[6:] == [("sync", True, tmp_path.name)] * 2
    contents = {path.name: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert contents == {"1": "a/1", "2": "a/2", "3": "b/3"}


def test_a_full_disk_leaves_no_temporary_file_and_says_how_to_resume(tmp_path: Path) -> None:
    def broken(path: Path) -> None:
        raise OSError(errno.ENOSPC, "")

    (tmp_path / "a").write_text("before")
    message = r"b: the disk is full.* and run the same command to resume"
    with pytest.raises(UserError, match=message), Together() as files:
        files.add(tmp_path / "a", lambda path: path.write_text("after"))
        files.add(tmp_path / "b", broken)
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_text() == "before"
    with pytest.raises(UserError, match="space and add --again"), announce_resume("add --again"), disk_errors(tmp_path):
        broken(tmp_path)


# ---- Lines of JSON

VALUES = [{"a": 1, "τ": [0.1, None]}, "text\nwith a newline", {"3": {"4": 5.5}}]


def test_lines_are_read_back_and_on_the_disk_when_the_call_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so is the name of a new file."""
    synced, fsync, path = list[str](), os.fsync, tmp_path / "new" / "lines"

    def recorded(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", recorded)
    for number, value in enumerate(VALUES, start=1):
        append_lines(path, [value])
        assert list(read_lines(path)) == VALUES[:number]
    assert synced == [str(path), str(path.parent), str(path), str(path)]
    append_lines(tmp_path / "numbers", [{3: {4: 5.5}}])
    assert list(read_lines(tmp_path / "numbers")) == VALUES[2:], "keys are texts in JSON, and the checksum holds"


def test_wherever_the_last_line_is_torn_the_others_stay_and_it_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append_lines(path, VALUES)
    content = path.read_bytes()
    last = content.rindex(b"\n", 0, -1) + 1
    for length in range(len(content)):
        path.write_bytes(content[:length])
        kept = VALUES[: content[:length].count(b"\n")]
        assert list(read_lines(path)) == kept
        if length in (0, 5, last, last + 1, len(content) - 1):
            append_lines(path, ["next"])
            assert list(read_lines(path)) == [*kept, "next"]
    path.write_bytes(content + b"x" * 10_000)  # more than what is read at once
    append_lines(path, ["next"])
    assert list(read_lines(path)) == [*VALUES, "next"]


@pytest.mark.parametrize("line", [0, 1, 2])
def test_a_damaged_line_is_named(tmp_path: Path, line: int) -> None:
    directory = RunDirectory(tmp_path)
    directory.append("records", *VALUES)
    [path] = tmp_path.rglob("*.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    changed, renamed = lines[line].replace(b"e", b"f", 1), lines[line].replace(b'"xxh3"', b'"x"')
    for broken in (changed, renamed, b"\xff\n", b"\n", b"[1]\n"):
        path.write_bytes(b"".join([*lines[:line], broken, *lines[line + 1 :]]))
        with pytest.raises(Damaged, match=f"^line {line + 1}: "):
            list(read_lines(path))
        with pytest.raises(UserError, match=r"0\.jsonl: is damaged \(line .*delete it"):
            list(directory.lines("records"))


def test_each_process_has_a_file_of_its_own_and_all_are_read(tmp_path: Path) -> None:
    main = RunDirectory(tmp_path)
    main.append("records", "by the main process")
    with main.in_fork(0) as same, main.in_fork(1) as fork:
        same.append("records", "by it too")
        assert not fork.main
        fork.append("records", "by a fork")
    RunDirectory(tmp_path, "1", main=False).append("records", "by another rank")
    main.append("other", "kind")
    files = sorted(path.name for path in (tmp_path / "state" / "records").iterdir())
    assert files == ["0.1.jsonl", "0.jsonl", "1.jsonl"]
    assert sorted(main.lines("records")) == ["by a fork", "by another rank", "by it too", "by the main process"]
    (tmp_path / "file").mkdir()
    (tmp_path / "file/state").touch()
    with pytest.raises(UserError, match="cannot be written"):
        RunDirectory(tmp_path / "file").append("records", 1)


# ---- Checkpoints

SETTINGS = {"recipe": {"training": {"lr": 0.1}}, "processes": 2}


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
        for value, other in zip(got, expected, strict=True):
            assert_equal(value, other)
    else:
        assert got == expected


def test_a_checkpoint_is_read_back_and_every_damage_is_found_or_harmless(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state, path, draw = some_state(), tmp_path / "c", random.Random(0)
    write(path, state, SETTINGS)
    with pytest.raises(AssertionError, match="cannot be saved"):
        write(path, {"n": object()}, SETTINGS)
    assert_equal([*read(path)], [state, SETTINGS])
    assert os.listdir(tmp_path) == ["c"], "the last one stays"
    whole = path.read_bytes()
    places = [draw.randrange(len(whole)) for _ in range(120)] + list(range(8))
    damaged = [whole[:p] + bytes([whole[p] ^ 1 << draw.randrange(8)]) + whole[p + 1 :] for p in places]
    damaged += [whole[: draw.randrange(len(whole))] for _ in range(20)] + [b"", whole + b"x", b"\0" * len(whole)]
    harmless = 0
    for content in damaged:
        path.write_bytes(content)
        try:
            assert_equal([*read(path)], [state, SETTINGS])
            harmless += 1
        except Damaged:
            pass
    assert harmless < 20
    path.write_bytes(whole[:-1])
    assert Checkpoint(path, SETTINGS, Pace()).load({}) is None
    [message] = caplog.messages
    assert message.startswith(f"{path}: is damaged (") and "\n" not in message


def test_a_checkpoint_is_read_for_the_settings_it_was_written_for(tmp_path: Path) -> None:
    """And counts how often its training started again. Processes that do not write it only read it."""
    path, reasons = tmp_path / "c", list[list[str]]()
    other = Checkpoint(path, SETTINGS, Pace(), writes=False)
    other.save(lambda: {"n": 0})
    assert not path.exists()
    Checkpoint(path, SETTINGS, Pace()).save(lambda: {"n": 1})
    other.remove()
    assert other.load({}) == Checkpoint(path, SETTINGS, Pace()).load({}) == {"n": 1}
    assert Checkpoint(tmp_path / "none", SETTINGS, Pace()).load({}) is None
    for processes, fits in ((1, False), (2, False), (2, True), (1, False)):
        training = Checkpoint(path, SETTINGS, Pace())
        assert (training.load({"processes": processes}) is not None) == fits
        reasons.append(training.restarts)
        training.save(lambda: {"n": 2})
    assert [len(restarts) for restarts in reasons] == [1, 2, 2, 3], "one that goes on knows of those before"
    start = "its checkpoint was written for other settings"
    assert reasons[-1][-2:] == [f"{start} (processes was 1, is 2)", f"{start} (processes was 2, is 1)"]


@pytest.mark.parametrize("duration", [0.001, 0.1, 3.0])
def test_saving_takes_a_hundredth_of_the_time(monkeypatch: pytest.MonkeyPatch, duration: float) -> None:
    now, saved = 0.0, list[float]()
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


def test_after_expensive_work_it_is_due_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
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
