from __future__ import annotations

import pytest
from cache_scenario import SHARD

from xdm_ft.features import extract as extraction


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extraction, "IMAGES_PER_SHARD", SHARD)
