"""What the tests of runs share."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import clusters
import miniature
import pytest


@pytest.fixture
def small_pacs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of its own, with miniature PACS under data/."""
    monkeypatch.chdir(tmp_path)
    miniature.domainbed(tmp_path / "data", "pacs")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A cluster on this machine: a head without cores, and two nodes with one core each."""
    with clusters.cluster() as found:
        yield found


@pytest.fixture
def one_core() -> Iterator[None]:
    with clusters.one_core():
        yield
