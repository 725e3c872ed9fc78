from pathlib import Path

import pytest

from xdm_ft.image_files import remote


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that another test has remembered is known, and an attempt after a failure comes at once."""
    monkeypatch.setenv("XDM_FT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "SECONDS_BETWEEN", 0.01)
    (tmp_path / "cache").mkdir()
