"""Miniature data, and finished runs that tests share."""

import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import clusters
import miniature
import pytest
import small_runs


@pytest.fixture(autouse=True)
def no_loader_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """To start a process takes longer than to read a few images."""
    monkeypatch.setattr("xdm_ft.training.end_to_end.inputs.worker_count", lambda accelerator: 0)


@pytest.fixture(autouse=True)
def quick_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The learned maps of an analysis take a few steps: their quality is tested where they are."""
    monkeypatch.setattr("xdm_ft.analysis.embedding.STEPS", 5)


def analysed(*overrides: str) -> None:
    """A run on miniature PACS, with few steps for the maps of embeddings."""
    miniature.domainbed(Path("data"), "pacs", per_class=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("xdm_ft.analysis.embedding.STEPS", 5)
        patch.setattr("xdm_ft.training.end_to_end.inputs.worker_count", lambda accelerator: 0)
        small_runs.results(*overrides)


@pytest.fixture(scope="session")
def bank(made_once: Callable[..., Path]) -> Path:
    """The folder of a finished run on cached features, small_runs.BANK. Only for reading."""
    return made_once("bank", partial(analysed, *small_runs.BANK))


@pytest.fixture(scope="session")
def end_to_end(made_once: Callable[..., Path]) -> Path:
    """The folder of a finished run that trained its encoder, small_runs.END_TO_END. Only for reading."""
    return made_once("end_to_end", partial(analysed, *small_runs.END_TO_END))


@pytest.fixture
def bank_copy(bank: Path, in_folder: Path) -> Path:
    """A copy of the bank's folder, for tests that write."""
    return Path(shutil.copytree(bank, in_folder, dirs_exist_ok=True))


@pytest.fixture
def one_core() -> Iterator[None]:
    """This process and what it starts compute on one core, so that a run forks no other process."""
    before = os.sched_getaffinity(0)
    clusters.keep_to_one_core()
    yield
    os.sched_setaffinity(0, before)
