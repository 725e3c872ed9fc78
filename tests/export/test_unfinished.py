"""The file of predictions that are not complete: kills, two commands at once, and what other programs do to it."""

import csv
import errno
import os
import re
import signal
import time
from functools import partial

import pytest
from PIL import Image
from warm_processes import begin, server, xdm_ft

from xdm_ft.export import predict as unfinished
from xdm_ft.export import predictor as inference
from xdm_ft.export.predict import Unfinished, open_unfinished
from xdm_ft.export.sources import Item
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.interrupt import end_with_parent
from xdm_ft.storage.atomic import disk_errors
from xdm_ft.storage.lines import checked_line

ABOUT = {"model": "m"}
HELD_AT = 3000  # bytes
ROWS = [["a.png", "cat", 0.5, None], ["b.png", None, None, "no"], ["c.png", "dog", 0.75, None]]


@pytest.fixture
def table(small_model, tmp_path):
    """A table of 120 rows, some of images that do not decode, and the arguments that predict it."""
    images = sorted(small_model.data.rglob("*/photo/*/*"))[:9]
    assert len(images) == 9
    for number, path in enumerate(images):
        Image.open(path).rotate(90).save(tmp_path / f"{number}.png")
    (tmp_path / "9.png").write_text("no image")
    (tmp_path / "table.csv").write_text("\n".join(["path", *(f"{number % 10}.png" for number in range(120))]))
    return ["predict", str(small_model.model), "table.csv", "--batch-size", "4", "--quiet", "--out"]


def write_every_batch():
    unfinished.SECONDS, unfinished.LOCK_SECONDS = 0, 0.2


def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def die(where):
    """Kills this process at its third batch: when its rows are on the disk, or half of their line is."""
    write_every_batch()
    unfinished.LOCK_SECONDS = 20  # a busy machine may take long to end what was killed
    flush, append, batches = Unfinished.flush, unfinished.append_lines, []

    def flush_and_count(self):
        batches.append(self)
        flush(self)
        if where == "after a line" and len(batches) == 3:
            kill()

    def append_half(path, values):
        if where == "in a line" and len(batches) == 3:
            text = b"".join(map(checked_line, values))
            with path.open("ab") as file:
                file.write(text[: len(text) // 2])
            kill()
        append(path, values)

    Unfinished.flush, unfinished.append_lines = flush_and_count, append_half
    if where == "before the end":
        Unfinished.remove = kill


def status(process):
    process.join(120)
    return process.exitcode


@pytest.mark.slow
def test_ten_kills_each_followed_at_once_by_resume(table, tmp_path):
    done = xdm_ft(*table, "undisturbed.csv", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr.startswith("12 images can not be read: 9.png")
    command, log = [*table, "out.csv"], tmp_path / "log"
    for number in range(9):
        where = ("after a line", "in a line")[number % 2]
        process = begin(command, tmp_path, log, log, first=partial(die, where))
        assert status(process) == -signal.SIGKILL, log.read_text()
        assert not (tmp_path / "out.csv").exists()
        command = [*table, "out.csv", "--resume"]
    process = begin(command, tmp_path, log, log, first=partial(die, "before the end"))
    assert status(process) == -signal.SIGKILL and not log.read_text()
    resumed = xdm_ft(*command, "--json", cwd=tmp_path)
    assert resumed.returncode == 0 and '"resumed": 120' in resumed.stdout and '"unreadable": 12' in resumed.stdout
    assert resumed.stderr == done.stderr, "errors of earlier commands are counted again"
    assert (tmp_path / "out.csv").read_bytes() == (tmp_path / "undisturbed.csv").read_bytes()
    assert not [path for path in tmp_path.iterdir() if "unfinished" in path.name]


def wait_with_some_rows():
    """Lets the command wait for a file `go` when it has written some rows."""
    write_every_batch()
    decode = inference.decode

    def wait_and_decode(*given):
        while os.stat("out.csv.unfinished").st_size > HELD_AT and not os.path.exists("go"):
            time.sleep(0.01)
        return decode(*given)

    inference.decode = wait_and_decode


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--resume"]])
def test_a_second_command_is_refused_and_the_first_loses_nothing(table, tmp_path, options):
    log, file = tmp_path / "log", tmp_path / "out.csv.unfinished"
    first = begin([*table, "out.csv"], tmp_path, log, log, first=wait_with_some_rows)
    while not file.exists() or file.stat().st_size <= HELD_AT:
        assert first.is_alive(), log.read_text()
        time.sleep(0.05)
    for _ in range(2):
        second = xdm_ft(*table, "out.csv", *options, cwd=tmp_path, first=write_every_batch)
        assert second.returncode == 2 and second.stderr == (
            "xdm-ft: out.csv.unfinished: another command is writing to it; wait for it, or name another file\n"
        )
        assert file.exists() and first.is_alive()
    (tmp_path / "go").touch()
    assert status(first) == 0, log.read_text()
    with open(tmp_path / "out.csv", newline="") as out:
        assert [row["path"] for row in csv.DictReader(out)] == [f"{number % 10}.png" for number in range(120)]
    late = xdm_ft(*table, "out.csv", *options, cwd=tmp_path)
    assert late.returncode == 2 and "out.csv: exists already" in late.stderr and not file.exists()


def leave_a_child(folder):
    """Adds a row, forks a process that stays, as those that decode images do for a moment, and is killed."""
    with open_unfinished(folder / "o.csv", ABOUT, resume=False) as found:
        found.add(ROWS[:1])
        found.flush()
        child = os.fork()
        if not child:
            end_with_parent(os.getppid())
            time.sleep(600)
        (folder / "child").write_text(str(child))
        kill()


def test_what_a_killed_command_leaves_behind_holds_no_lock(tmp_path):
    process = server.Process(target=leave_a_child, args=(tmp_path,))
    process.start()
    assert status(process) == -signal.SIGKILL
    try:
        with open_unfinished(tmp_path / "o.csv", ABOUT, resume=True) as found:
            found.skip_done(iter([Item("a.png", "a.png")]))
            assert found.tally.images == 1
    finally:
        pass


def fill_the_disk():
    write_every_batch()
    append, lines = unfinished.append_lines, []

    def append_if_there_is_space(path, values):
        lines.append(values)
        if len(lines) > 3:
            with disk_errors(path):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(path, values)

    unfinished.append_lines = append_if_there_is_space


def test_a_full_disk_is_resumed_with_resume(table, tmp_path):
    done = xdm_ft(*table, "out.csv", cwd=tmp_path, first=fill_the_disk)
    assert done.returncode == 2 and done.stderr == (
        "xdm-ft: out.csv.unfinished: the disk is full; free some space and run the same command with --resume to "
        "resume\n"
    )
    assert xdm_ft(*table, "out.csv", "--resume", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize("resume", [False, True])
def test_a_link_or_a_pipe_is_refused(tmp_path, resume):
    target, file = tmp_path / "mine.txt", tmp_path / "o.csv.unfinished"
    target.write_text("mine")
    file.symlink_to(target)
    with pytest.raises(UserError, match=r"o\.csv\.unfinished: can not be written: .* symbolic links"):
        open_unfinished(tmp_path / "o.csv", ABOUT, resume).__enter__()
    assert target.read_text() == "mine" and file.is_symlink()
    target.unlink()
    with pytest.raises(UserError, match="symbolic links"):
        open_unfinished(tmp_path / "o.csv", ABOUT, resume).__enter__()
    assert not target.exists(), "nor is it made where the link points"
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(UserError, match=r"o\.csv\.unfinished: is damaged \(it is no file\)"):
        open_unfinished(tmp_path / "o.csv", ABOUT, resume).__enter__()
    assert file.exists()


@pytest.mark.parametrize("text", [b"mine", b"mine\n", b'{"value": 1, "xxh3": "x"}\n'])
def test_a_file_of_another_program_stays(tmp_path, text):
    file = tmp_path / "o.csv.unfinished"
    file.write_bytes(text)
    with pytest.raises(UserError, match=r"is damaged .*; delete it to begin anew"):
        open_unfinished(tmp_path / "o.csv", ABOUT, resume=True).__enter__()
    assert file.read_bytes() == text


@pytest.mark.parametrize("place", [0, 1])
def test_a_line_that_is_not_where_it_was_written_is_damage(tmp_path, place):
    file = tmp_path / "o.csv.unfinished"
    with open_unfinished(tmp_path / "o.csv", ABOUT, resume=False) as found:
        found.add(ROWS)
        found.flush()
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([lines[place], lines[place], *lines[1:]]))
    with (
        pytest.raises(UserError, match=rf"is damaged \(line {2 - place}: it is not where it was written\)"),
        open_unfinished(tmp_path / "o.csv", ABOUT, resume=True) as again,
    ):
        again.skip_done(iter([Item(row[0], row[0]) for row in ROWS]))
    assert file.exists()


@pytest.mark.parametrize("other", [None, b"mine"])
def test_a_file_that_was_deleted_or_replaced_is_not_written(tmp_path, other):
    file = tmp_path / "o.csv.unfinished"

    def lose():
        file.unlink()
        if other is not None:
            file.write_bytes(other)

    with pytest.raises(UserError, match="deleted or replaced"), open_unfinished(tmp_path / "o.csv", ABOUT, False) as a:
        a.add(ROWS)
        lose()
        a.flush()
    assert not file.exists() if other is None else file.read_bytes() == other, "what one does not hold is not removed"
    file.unlink(missing_ok=True)
    with pytest.raises(UserError, match="deleted or replaced"), open_unfinished(tmp_path / "o.csv", ABOUT, False) as a:
        a.add(ROWS)
        a.flush()
        lose()
        a.complete(lambda path: path.touch())
    assert not (tmp_path / "o.csv").exists()


@pytest.mark.parametrize("change", ["a line is gone", "a line is there twice"])
def test_rows_are_counted_before_the_file_is_complete(tmp_path, change):
    file = tmp_path / "o.csv.unfinished"
    with open_unfinished(tmp_path / "o.csv", ABOUT, resume=False) as found:
        for row in ROWS:
            found.add([row])
            found.flush()
        lines = file.read_bytes().splitlines(keepends=True)
        file.write_bytes(b"".join([*lines[:2], *lines[3:]] if change == "a line is gone" else [*lines, lines[-1]]))
        with pytest.raises(UserError, match=re.escape("unfinished: is damaged (")):
            found.complete(lambda path: path.write_text(str(list(found.rows()))))
        file.write_bytes(b"".join(lines[:-1]))
        with pytest.raises(UserError, match="unfinished: has 2 rows of 3 images"):
            found.complete(lambda path: path.write_text(str(list(found.rows()))))
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_a_table_that_another_command_completed_meanwhile_is_not_replaced(tmp_path, monkeypatch):
    lock = unfinished._lock

    def complete_first(file):
        (tmp_path / "o.csv").write_text("theirs")
        return lock(file)

    monkeypatch.setattr(unfinished, "_lock", complete_first)
    with pytest.raises(UserError, match="exists already"), open_unfinished(tmp_path / "o.csv", ABOUT, True):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["o.csv"]


def test_a_lock_of_a_removed_file_is_none(tmp_path, monkeypatch):
    """The command that held it has completed: the next one begins a file of its own."""
    locked, lockf = [], unfinished.fcntl.flock

    def remove_first(handle, how):
        if not locked:
            (tmp_path / "o.csv.unfinished").unlink()
        locked.append(handle)
        lockf(handle, how)

    monkeypatch.setattr(unfinished.fcntl, "flock", remove_first)
    with open_unfinished(tmp_path / "o.csv", ABOUT, resume=False) as found:
        found.add(ROWS)
        found.flush()
        assert list(found.rows()) == ROWS and (tmp_path / "o.csv.unfinished").stat().st_size
    assert len(locked) == 2


def test_only_what_a_killed_command_left_is_removed(tmp_path):
    theirs = tmp_path / ".o.csv.abcdefgh.unfinished"  # the temporary file of a table `o.csv`
    theirs.touch()
    with open_unfinished(tmp_path / "o", ABOUT, resume=False) as found:
        (tmp_path / ".o.abcdefgh.unfinished").touch()
        found.add(ROWS)
        found.flush()
        found.complete(lambda path: path.write_text("done"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [theirs.name, "o"]
