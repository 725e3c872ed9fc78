"""A disk that is full, or that is taken away during a run: one line, and the same command goes on."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from what_runs_leave import fill, numbers

from xdm_ft.cli.parser import main
from xdm_ft.evaluation.records import Record
from xdm_ft.experiment import pieces, plan
from xdm_ft.experiment.results import Outcome
from xdm_ft.experiment.work import run_forked
from xdm_ft.runtime.errors import UserError
from xdm_ft.storage import checkpoint
from xdm_ft.storage.atomic import replace_text
from xdm_ft.storage.lines import append_lines
from xdm_ft.storage.run_directory import RunDirectory
from xdm_ft.storage.tensorboard import EventFile
from xdm_ft.storage.tensors import write_tensors

SIZE = 4 * 2**20
METHODS = "methods=[erm, vrex, linear_probe]"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("finished"), False)


@pytest.fixture(scope="module")
def never_full(finished: Path) -> Path:
    assert main(["run", str(finished / "small.yaml"), f"output.dir={finished / 'never_full'}", METHODS]) == 0
    return finished / "never_full"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of `SIZE` bytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small disk needs more rights")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def leave(disk: Path, free: int) -> Path:
    """Fills the disk up to so many bytes, and returns the file that does."""
    filling = disk / "filling"
    pages = os.statvfs(disk).f_bavail - free // 4096
    filling.write_bytes(bytes(4096 * pages))
    return filling


def one_line(text: str) -> str:
    assert "Traceback" not in text and "Exception" not in text, text
    [line] = [line for line in text.splitlines() if line.startswith("xdm-ft: ")]
    return line


def events(folder: Path) -> None:
    file = EventFile(folder, "0")
    for step in range(500):
        file.write(step, {"train/loss": 0.1})


WRITERS: dict[str, Callable[[Path], object]] = {
    "weights": lambda folder: write_tensors(folder / "w", {"w": torch.ones(5000)}, {}),
    "text": lambda folder: replace_text(folder / "t", "x" * 20_000),
    "line": lambda folder: append_lines(folder / "l", ["x" * 20_000]),
    "checkpoint": lambda folder: checkpoint.write(folder / "c", {"a": torch.ones(5000)}, {}),
    "events": lambda folder: events(folder / "e"),
}


@pytest.mark.parametrize("what", WRITERS)
def test_every_kind_of_file(what: str, small_disk: Path) -> None:
    filling = leave(small_disk, 8192)
    with pytest.raises(UserError, match="the disk is full") as caught:
        WRITERS[what](small_disk)
    assert str(caught.value).startswith(str(small_disk)) and "\n" not in str(caught.value)
    if what in ("weights", "checkpoint"):
        assert "(0.0 MB are needed for it)" in str(caught.value)
    filling.unlink()
    left = [path for path in small_disk.rglob(".*")]
    assert left == [], "nothing unfinished stays"


@pytest.mark.parametrize("what", ["weights", "text", "line", "checkpoint", "events"])
def test_an_error_of_the_disk_that_is_not_its_size(what: str, tmp_path: Path) -> None:
    """A limit on the size of files stands for all of them: safetensors reports it as one of its own errors."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(UserError, match=f"can not be written: {os.strerror(errno.EFBIG)}"):
            WRITERS[what](tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    ("free", "shares"),
    [
        (40_960, True),
        *(
            pytest.param(n, n == 98_304, marks=pytest.mark.slow)
            for n in (12_288, 28_672, 40_960, 65_536, 98_304, 131_072)
        ),
    ],
)
def test_a_run_on_a_full_disk_goes_on_when_there_is_space(
    free: int,
    shares: bool,
    processes: int,
    finished: Path,
    never_full: Path,
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """`processes`: with two, both of them meet the full disk. `shares`: heads that train together share a file."""
    monkeypatch.setattr(plan, "MOST_MODELS", 0 if shares else 200)
    monkeypatch.setattr(pieces, "own_cores", lambda: processes)
    command = ["run", str(finished / "small.yaml"), f"output.dir={small_disk}", METHODS]
    filling = leave(small_disk, free)
    assert main(command) == 2
    line = one_line(capfd.readouterr().err)
    assert "the disk is full" in line and "run the same command to resume" in line and str(small_disk) in line
    filling.unlink()
    assert main(command) == 0
    assert numbers(small_disk / "small")["summary"] == numbers(never_full / "small")["summary"]


def test_an_error_of_two_processes_is_one_error() -> None:
    def work(number: int) -> None:
        raise UserError(f"the disk is full for process {number}")

    with pytest.raises(UserError, match="the disk is full for process"):
        run_forked(work, 2)


@pytest.mark.parametrize(
    ("replaced", "at"),
    [(False, 1), (True, 0), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((False, 0), (True, 1)))],
)
def test_a_run_directory_that_is_deleted_during_the_run(
    at: int,
    replaced: bool,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`replaced`: another run has begun in its place."""
    monkeypatch.setattr(pieces, "own_cores", lambda: 1)
    saves, save = [], pieces.save
    other = '{"run": "of another"}'

    def deleting(outcomes: Iterable[Outcome], directory: RunDirectory, writes: bool) -> list[Record]:
        saves.append(outcomes)
        if len(saves) == at + 1:
            shutil.rmtree(tmp_path / "small")
            if replaced:
                (tmp_path / "small").mkdir()
                (tmp_path / "small" / "run.lock").touch()
                (tmp_path / "small" / "results.json").write_text(other)
        return save(outcomes, directory, writes)

    command = ["run", str(finished / "small.yaml"), f"output.dir={tmp_path}", METHODS]
    with monkeypatch.context() as patch:
        patch.setattr(pieces, "save", deleting)
        assert main(command) == 2
    assert "was deleted or replaced during the run" in one_line(capsys.readouterr().err)
    if replaced:
        assert {path.name for path in (tmp_path / "small").iterdir()} <= {"run.lock", "results.json"}
        assert (tmp_path / "small" / "results.json").read_text() == other
    else:
        assert not (tmp_path / "small").exists(), "it is not created again"
        assert main(command) == 0


@pytest.mark.parametrize("name", ["events", "events/erm", "models", "models/erm", "state", "results.md"])
def test_what_can_not_be_written_is_found_before_training(
    name: str,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = tmp_path / "small" / name
    place.parent.mkdir(parents=True)
    if name == "results.md":
        place.mkdir()
    elif name == "events":
        place.symlink_to(tmp_path / "gone" / "events")  # of a disk that is not mounted
        (tmp_path / "gone").write_text("")
    else:
        place.write_text("")
    if name == "state":
        shutil.copy(finished / "out/small/recipe.yaml", tmp_path / "small")

    def trained(*_: object) -> None:
        raise AssertionError("training has begun")

    monkeypatch.setattr("xdm_ft.experiment.pieces.do_piece", trained)
    assert main(["run", str(finished / "small.yaml"), f"output.dir={tmp_path}"]) == 2
    assert str(tmp_path / "small") in one_line(capsys.readouterr().err)
