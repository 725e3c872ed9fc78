"""One bar for all models: counts of all processes, resumed work, and work that is not needed."""

from __future__ import annotations

import logging
import mmap
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from xdm_ft.experiment import work as module
from xdm_ft.experiment.work import SLOT, Counts, Overall, overall, run_forked
from xdm_ft.storage.run_directory import RunDirectory


class Shown:
    """A display that keeps what it was given."""

    def __init__(self) -> None:
        self.all: list[tuple[Counts, str]] = []

    def show(self, counts: Counts, note: str) -> None:
        self.all.append((counts, note))

    def close(self) -> None:
        pass


def made(monkeypatch: pytest.MonkeyPatch, cost: float = 100.0, models: int = 4) -> tuple[Overall, Shown]:
    monkeypatch.setattr(module, "REFRESH_SECONDS", 0.0)
    shown = Shown()
    return Overall("training", cost, models, mmap.mmap(-1, 64 * SLOT.itemsize), 0, shown), shown


def test_forks_are_counted_and_none_of_their_counts_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    bar, shown = made(monkeypatch)

    def work(number: int) -> None:
        bar.in_process(number)
        for _ in range(200):
            bar.add(done=0.5)
        bar.add(models=1)

    run_forked(work, 3, bar.watched)
    assert bar.counts == Counts(300.0, 0.0, 3)
    # the forks themselves show nothing: what is shown grows
    assert shown.all == sorted(shown.all, key=lambda one: one[0].done) and shown.all[-1][0].done > 100


def test_a_part_that_ends_early_is_whole_but_did_not_take_time(monkeypatch: pytest.MonkeyPatch) -> None:
    bar, shown = made(monkeypatch)
    with bar.share("erm (2 models)", 40.0, 20) as part:
        part.skip(5)  # steps of a checkpoint
        for _ in range(5):
            part.advance(1, "loss 0.5")
    assert bar.counts == Counts(10.0, 30.0, 0)  # ten more steps were spared, by patience
    assert shown.all[0][1] == "erm (2 models)" and shown.all[-2][1] == "erm (2 models), loss 0.5"
    with pytest.raises(ValueError), bar.share("mlp", 60.0, 6) as part:
        part.advance(3)
        raise ValueError
    assert bar.counts == Counts(40.0, 30.0, 0), "what failed is not done"


@contextmanager
def whole(directory: RunDirectory, ranks: int = 1, rank: int = 0) -> Iterator[Overall]:
    accelerator = SimpleNamespace(num_processes=ranks, process_index=rank, is_main_process=rank == 0)
    with overall("training", 100.0, 4, accelerator, directory) as bar:  # type: ignore[arg-type]
        yield bar


def test_a_log_gets_few_lines_and_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REFRESH_SECONDS", 0.0)
    caplog.set_level(logging.INFO, "xdm_ft")
    with whole(RunDirectory(tmp_path)) as bar:
        bar.add(spared=50, models=2)
        bar.add(done=25, models=1, note="erm, sketch, seed 0")
        assert caplog.messages == []  # not before 30 s
        monkeypatch.setattr(module, "LOG_EVERY_SECONDS", 0.0)
        bar.add(done=5)
    line, end = caplog.messages
    assert re.fullmatch(r"training: 80%, 3 of 4 models, about 0 s left, now erm, sketch, seed 0", line)
    assert end == "training: 3 of 4 models in 0 s"
    with pytest.raises(ValueError), whole(RunDirectory(tmp_path)):
        raise ValueError
    assert len(caplog.messages) == 2, "a run that is interrupted has not ended"


def test_launched_processes_share_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "xdm_ft")
    main, other = RunDirectory(tmp_path), RunDirectory(tmp_path, "1", main=False)
    with whole(main, ranks=2) as first, whole(other, ranks=2, rank=1) as second:
        first.add(done=1, models=1)
        second.add(done=2)
        second.in_process(3)  # a fork of it
        second.add(models=2)
        assert first.counts == Counts(3.0, 0.0, 3)
    assert caplog.messages == ["training: 3 of 4 models in 0 s"], "one process says it"
    main.lock()
    with whole(main, ranks=2) as first:
        assert first.counts == Counts(), "those of an interrupted run are gone"
    main.__exit__(None, None, None)
