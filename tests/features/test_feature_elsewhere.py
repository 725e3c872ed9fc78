"""Features that another process computes for the one that has claimed them."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cache_scenario import SHARD, Pixels, Tiny, digest, features_of

from xdm_ft.features import extract as extraction
from xdm_ft.features.extract import Elsewhere, Extraction, frozen_copy
from xdm_ft.features.key import key_of, key_parts
from xdm_ft.runtime.progress import Progress

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def seen() -> list[int]:
    """Images in each part that was computed."""
    return []


@pytest.fixture
def elsewhere(seen: list[int]) -> Elsewhere:
    def run(extraction: Extraction, numbers: np.ndarray, size: int, bar: Progress) -> int:
        assert extraction.store.lock_file.exists() or not len(numbers)
        there: Extraction = pickle.loads(pickle.dumps(extraction))
        computed = 0
        for part in (there.part(numbers[:SHARD]), there.part(numbers[SHARD:])):
            own = replace(part, encoder=frozen_copy(part.encoder, "fp32", CPU), device=CPU)
            seen.append(own.run(own.store.missing(), SHARD, bar))
            computed += seen[-1]
        return computed

    return Elsewhere(GPU, run)


def test_they_have_the_key_of_the_device_there_and_are_read_here(
    tmp_path: Path, elsewhere: Elsewhere, seen: list[int]
) -> None:
    encoder = Tiny()
    found = features_of(Pixels(70), tmp_path, encoder, elsewhere=elsewhere)
    assert encoder.seen == [0] and seen == [SHARD, 70 - SHARD] and found.extracted == 70
    assert found.key == key_of(key_parts(Tiny(), Pixels(1).decoder, "fp32", GPU))
    assert found.device == CPU
    here = features_of(Pixels(70), tmp_path)
    assert here.key != found.key and digest(here) == digest(found)
    assert features_of(Pixels(70), tmp_path, elsewhere=elsewhere).extracted == 0


def test_what_is_there_is_not_computed_again(
    tmp_path: Path, elsewhere: Elsewhere, seen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extraction, "IMAGES_PER_SHARD", SHARD)
    features_of(Pixels(SHARD), tmp_path, elsewhere=elsewhere)
    found = features_of(Pixels(70), tmp_path, elsewhere=elsewhere)
    assert seen == [SHARD, 0, SHARD, 70 - 2 * SHARD] and found.extracted == 70 - SHARD
    assert len(list((tmp_path / found.key).glob("shard-*"))) == 3
    assert not list((tmp_path / found.key).glob("*.lock"))
