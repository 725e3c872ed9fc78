"""Lines of JSON that are only ever added to: what a kill cuts short is dropped, and damage is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from xdm_ft.runtime.errors import UserError
from xdm_ft.storage.lines import Damaged, append_lines, read_lines
from xdm_ft.storage.run_directory import RunDirectory

VALUES = [{"a": 1, "τ": [0.1, None]}, "text\nwith a newline", {"3": {"4": 5.5}}]


def written(path: Path) -> bytes:
    for value in VALUES:
        append_lines(path, [value])
    return path.read_bytes()


def test_round_trip(tmp_path: Path) -> None:
    written(tmp_path / "new" / "lines")
    assert list(read_lines(tmp_path / "new" / "lines")) == VALUES
    append_lines(tmp_path / "numbers", [{3: {4: 5.5}}])
    assert list(read_lines(tmp_path / "numbers")) == VALUES[2:], "keys are texts in JSON, and the checksum holds"


def test_wherever_the_last_line_is_torn_the_others_stay_and_it_is_cut_off(tmp_path: Path) -> None:
    path, short = tmp_path / "lines", tmp_path / "short"
    content = written(path)
    last = content.rindex(b"\n", 0, -1) + 1
    for length in range(len(content)):
        short.write_bytes(content[:length])
        kept = VALUES[: content[:length].count(b"\n")]
        assert list(read_lines(short)) == kept
        if length in (0, 5, last, last + 1, len(content) - 1):
            append_lines(short, ["next"])
            assert list(read_lines(short)) == [*kept, "next"]
    path.write_bytes(content + b"x" * 10_000)  # more than what is read at once
    append_lines(path, ["next"])
    assert list(read_lines(path)) == [*VALUES, "next"]


@pytest.mark.parametrize("line", [0, 1, 2])
def test_a_damaged_line_is_named(tmp_path: Path, line: int) -> None:
    directory = RunDirectory(tmp_path)
    for value in VALUES:
        directory.append("records", value)
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
    with main.in_fork(0) as own:
        own.append("records", "by it too")
    with main.in_fork(1) as fork:
        assert not fork.main
        fork.append("records", "by a fork")
    RunDirectory(tmp_path, "1", main=False).append("records", "by another rank")
    main.append("other", "kind")
    assert sorted(path.name for path in (tmp_path / "state" / "records").iterdir()) == [
        "0.1.jsonl",
        "0.jsonl",
        "1.jsonl",
    ]
    assert sorted(main.lines("records")) == ["by a fork", "by another rank", "by it too", "by the main process"]


def test_a_line_is_on_the_disk_when_the_call_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so is the name of a new file."""
    synced = list[str]()
    fsync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda handle: (synced.append(os.readlink(f"/proc/self/fd/{handle}")), fsync(handle))
    )
    for number in range(3):
        append_lines(tmp_path / "lines", [number])
        assert list(read_lines(tmp_path / "lines")) == list(range(number + 1))
    path = str(tmp_path / "lines")
    assert synced == [path, str(tmp_path), path, path]


def test_a_disk_that_takes_nothing_is_the_users_to_mend(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    with pytest.raises(UserError, match="can not be written"):
        RunDirectory(tmp_path).append("records", 1)
