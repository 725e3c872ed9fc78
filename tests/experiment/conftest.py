"""What the tests of runs share."""

from pathlib import Path

import miniature
import pytest


@pytest.fixture
def small_pacs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of its own, with miniature PACS under data/."""
    monkeypatch.chdir(tmp_path)
    miniature.domainbed(tmp_path / "data", "pacs")
