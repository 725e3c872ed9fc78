"""Tests touch no network, and compute on one thread, as banks of heads do.

Their products are small: a second thread gains nothing, and waits for its core for ever where others want it too.
"""

import contextlib
import gc
import os
import shutil
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before huggingface_hub is imported anywhere
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch is: as the command does

from collections.abc import Callable, Generator, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from hypothesis import settings
from torch.utils.data import _utils as of_loaders

# a loader that an error has ended waits so long for each of its workers, in whichever test it is collected: 5 s
of_loaders.MP_STATUS_CHECK_INTERVAL = 0.2
# a slow machine is no failure, and no run draws other examples than the one before
settings.register_profile("tests", deadline=None, derandomize=True)
settings.load_profile("tests")


def pytest_configure(config: pytest.Config) -> None:
    """Tests leave nothing in the user's cache. All processes of the tests share one."""
    if "XDM_FT_CACHE" not in os.environ:
        folder = tempfile.mkdtemp(prefix="xdm-ft-tests-")
        os.environ["XDM_FT_CACHE"] = folder
        config.add_cleanup(partial(shutil.rmtree, folder, ignore_errors=True))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test marked `needs(PACKAGE, …)` is skipped where one is missing."""
    for mark in item.iter_markers("needs"):
        missing = [package for package in mark.args if find_spec(package) is None]
        if missing:
            pytest.skip(f"needs {', '.join(missing)}: pip install -e '.[full]'")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """A third of the time of collecting tests was spent on looking for garbage, of which it makes little."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def small_pacs(in_folder: Path, made_once: Callable[[str, Callable[[], object]], Path]) -> None:
    """In a folder of its own, with miniature PACS under data/."""
    import miniature

    folder = made_once("pacs", lambda: miniature.domainbed(Path("data"), "pacs"))
    shutil.copytree(folder, in_folder, copy_function=shutil.copyfile, dirs_exist_ok=True)


@pytest.fixture
def no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages have no charts, which take most of the time of a page."""
    monkeypatch.setattr("xdm_ft.report.charts.Figure.svg", lambda _: "<svg></svg>")


@pytest.fixture
def few_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digits of the package, fewer of them; and no workers, whose start takes longer than a few images."""
    import sklearn.datasets
    from sklearn.utils import Bunch

    every = sklearn.datasets.load_digits()
    few = Bunch(images=every.images[:320], target=every.target[:320])
    monkeypatch.setattr("sklearn.datasets.load_digits", lambda: few)
    monkeypatch.setattr("xdm_ft.training.end_to_end.inputs.worker_count", lambda accelerator: 0)


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Callable[[str, Callable[[], object]], Path]:
    """made_once(name, make): the folder that `make()`, called inside, has filled for all processes of the tests.

    Only for reading: who writes takes a copy.
    """
    base = tmp_path_factory.getbasetemp()
    base = (base if worker_id == "master" else base.parent) / "made_once"
    base.mkdir(exist_ok=True)

    def made_once(name: str, make: Callable[[], object]) -> Path:
        folder, made = base / name, base / f"{name}.made"
        with FileLock(base / f"{name}.lock"):
            if not made.exists():
                shutil.rmtree(folder, ignore_errors=True)  # what a process left that failed
                folder.mkdir()
                with contextlib.chdir(folder):
                    make()
                made.touch()
        return folder

    return made_once


@pytest.fixture(autouse=True, scope="module")
def unseen_libraries() -> None:
    """A run collects garbage more than once, and each collection looks at all that libraries have made: half a second.

    What there is before the tests of a file is left out of it, after a last collection of the garbage of earlier ones.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)  # a run in an earlier test has set as many as there are cores


@pytest.fixture(autouse=True)
def no_accelerator() -> Iterator[None]:
    """Accelerate keeps the precision of an earlier test for the whole process, also for what the next file prepares."""
    _forget_accelerator()
    yield
    _forget_accelerator()


def _forget_accelerator() -> None:
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # libraries that count their objects at the end miss none


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    """What tests print about paths that are not UTF-8 goes from the processes of the tests to the one that reports."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report
