"""One bar for all models: pieces that any process has finished, and steps of those that this one and its forks do."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path

import pytest

from xdm_ft.experiment import work as module
from xdm_ft.experiment.work import NOTHING, RunProgress, Work, run_forked
from xdm_ft.runtime.progress import Progress
from xdm_ft.storage.run_directory import RunDirectory

PIECES = {"a": Work(2, 40), "b": Work(1, 60)}


def made(directory: RunDirectory, done: Work = NOTHING, processes: int = 1, shows: bool = True) -> RunProgress:
    return RunProgress("training", PIECES, done, directory, processes, shows)


def test_what_an_earlier_run_did_is_no_part_of_the_rate(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = RunDirectory(tmp_path)
    with made(directory, done=Work(3, 100)) as run:
        run.started -= 30.0
        with run.of_piece("b", "erm (2 models)", 20) as part:
            part.skip(5)  # steps of a checkpoint
            part.advance(10, "loss 0.5")
        assert (run.resumed[0], run.begun[0]) == (15.0, 0.0)
        with run.of_piece("b", "erm (2 models)", 20) as part:
            part.advance(10, "loss 0.5")
            caplog.set_level(logging.INFO, "xdm_ft")
            run._last = float("-inf")
            run.show()
    # 130 of 200 are done, 15 of them now in 30 s: 70 more take 140 s
    assert caplog.messages[0] == "training: 65%, 3 of 6 models, about 2 min left, now erm (2 models), loss 0.5"


def test_any_process_finishes_a_piece(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "xdm_ft")
    monkeypatch.setattr(module, "LOG_EVERY_SECONDS", 0.0)
    main, other = RunDirectory(tmp_path), RunDirectory(tmp_path, "1", main=False)
    with made(main) as run, made(other, shows=False) as hidden:
        with hidden.of_piece("a", "erm", 10) as part:
            part.advance(10)
        other.finish("a")
        other.finish("of other work")
        run.note = "other processes"
        run.show()
        assert run.finished == Work(2, 40)
    line, end = caplog.messages
    assert line == "training: 40%, 2 of 3 models, about 0 s left, now other processes"
    assert end == "training: 2 of 3 models in 0 s", "one process says it"


def test_forks_count_for_themselves_in_shared_memory(tmp_path: Path) -> None:
    with made(RunDirectory(tmp_path), processes=3) as run:

        def work(number: int) -> None:
            run.in_process(number)
            assert run.shows == (number == 0)
            with run.of_piece("a", "erm", 4) as part:
                part.advance(number + 1)
                until = time.monotonic() + 60
                while [*run.begun] != [10.0, 20.0, 30.0] and time.monotonic() < until:
                    time.sleep(0.01)
                (tmp_path / f"{number}").write_text(str([*run.begun]))
                while len([*tmp_path.glob("[012]")]) < 3 and time.monotonic() < until:
                    time.sleep(0.01)

        run_forked(work, 3, run.watched)
    assert {(tmp_path / f"{number}").read_text() for number in range(3)} == {"[10.0, 20.0, 30.0]"}


def test_a_log_gets_few_lines_and_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "xdm_ft")
    with made(RunDirectory(tmp_path)) as run, run.of_piece("a", "erm", 10) as part:
        part.advance(5)
        assert caplog.messages == []  # not before 30 s
    assert re.fullmatch(r"training: 0 of 3 models in \d s", caplog.messages[0])
    with pytest.raises(ValueError), made(RunDirectory(tmp_path)):
        raise ValueError
    assert len(caplog.messages) == 1, "a run that is interrupted has not ended"


def test_nothing_new_is_a_line_without_a_forecast(caplog: pytest.LogCaptureFixture) -> None:
    bar = Progress("extracting", 100, "images")
    bar.skip(40)
    bar.last_line = float("-inf")
    with caplog.at_level(logging.INFO, "xdm_ft"):
        bar.advance(0)
    assert caplog.messages == ["extracting: 40 of 100 images, 0.0/s"]
