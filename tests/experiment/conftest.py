"""Miniature data, and finished runs that tests share."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import clusters
import miniature
import pytest
import small_runs


@pytest.fixture(autouse=True)
def quick_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The learned maps of an analysis take a few steps: their quality is tested where they are."""
    monkeypatch.setattr("xdm_ft.analysis.embedding.STEPS", 5)


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def small_pacs(in_folder: Path) -> None:
    """In a folder of its own, with miniature PACS under data/."""
    miniature.domainbed(in_folder / "data", "pacs")


def finished(folder: Path, *overrides: str) -> Path:
    """The folder of a run that was analysed, with few steps for the maps of embeddings."""
    miniature.domainbed(folder / "data", "pacs", per_class=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("xdm_ft.analysis.embedding.STEPS", 5)
        small_runs.results(*overrides)
    return folder


@pytest.fixture(scope="session")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run on cached features, small_runs.BANK. Only for reading."""
    return finished(tmp_path_factory.mktemp("bank"), *small_runs.BANK)


@pytest.fixture(scope="session")
def end_to_end(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run that trained its encoder, small_runs.END_TO_END. Only for reading."""
    return finished(tmp_path_factory.mktemp("end_to_end"), *small_runs.END_TO_END)


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
