"""Real processes: killed in the middle, several at once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cache_scenario import SHARD, Files, digest, features_of, write_images

SCENARIO = Path(__file__).with_name("cache_scenario.py")
SHARDS = 8

pytestmark = pytest.mark.slow


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return write_images(tmp_path / "images", SHARDS * SHARD)


@pytest.fixture
def expected(images: Path, tmp_path: Path) -> str:
    """Hash of the features as one process computes them without interruption."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    features = features_of(Files(images), tmp_path / "undisturbed")
    torch.set_num_threads(threads)
    return digest(features)


def start(cache: Path, images: Path, seconds_per_batch: float, views: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCENARIO), str(cache), str(images), str(seconds_per_batch), str(views)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCENARIO.parents[2])}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Waits for the process and returns the number of images that it computed, and the hash of all features."""
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    extracted, of_all = output.split()
    return int(extracted), of_all


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, "waited a minute"
        time.sleep(0.01)


def done(cache: Path) -> int:
    return len(list(cache.glob("*/shard-*.safetensors")))


def test_killed_extraction_resumes_at_the_next_shard(tmp_path: Path, images: Path, expected: str) -> None:
    cache = tmp_path / "cache"
    killed = start(cache, images, 0.1)
    wait_for(lambda: done(cache) >= 3)
    killed.kill()
    killed.communicate()
    kept = done(cache)
    assert 3 <= kept < SHARDS
    (folder,) = (path for path in cache.iterdir() if path.is_dir())

    extracted, resumed = finish(start(cache, images, 0.0))
    assert extracted == (SHARDS - kept) * SHARD
    assert resumed == expected
    assert len(list(folder.iterdir())) == SHARDS + 1  # nothing is left of the killed process


def test_two_processes_share_one_extraction(tmp_path: Path, images: Path, expected: str) -> None:
    processes = [start(tmp_path / "cache", images, 0.05) for _ in range(2)]
    (first, first_digest), (second, second_digest) = map(finish, processes)
    assert first + second == SHARDS * SHARD
    assert first_digest == second_digest == expected


def test_two_sets_with_common_images_share_one_extraction(tmp_path: Path, images: Path, expected: str) -> None:
    part = tmp_path / "part"
    part.mkdir()
    for path in sorted(images.iterdir())[SHARD + 7 :]:
        (part / path.name).hardlink_to(path)
    processes = [start(tmp_path / "cache", folder, 0.05) for folder in (images, part)]
    (first, of_first), (second, _) = map(finish, processes)
    assert first + second == SHARDS * SHARD and of_first == expected


def test_another_process_computes_the_shards_of_a_killed_one(tmp_path: Path, images: Path, expected: str) -> None:
    cache = tmp_path / "cache"
    killed, other = start(cache, images, 0.1), start(cache, images, 0.1)
    wait_for(lambda: done(cache) >= 2)
    killed.kill()
    killed.communicate()
    _, of_other = finish(other)
    assert of_other == expected
    assert features_of(Files(images), cache).extracted == 0


def test_views_killed_and_shared_equal_those_of_one_uninterrupted_process(tmp_path: Path, images: Path) -> None:
    _, expected = finish(start(tmp_path / "undisturbed", images, 0.0, views=2))
    cache = tmp_path / "cache"
    killed = start(cache, images, 0.05, views=2)
    wait_for(lambda: done(cache) >= SHARDS + 2)  # in the first augmented pass
    killed.kill()
    killed.communicate()
    kept = done(cache)
    assert SHARDS + 2 <= kept < 3 * SHARDS
    both = [start(cache, images, 0.05, views=2) for _ in range(2)]
    (first, first_digest), (second, second_digest) = map(finish, both)
    assert first + second == (3 * SHARDS - kept) * SHARD
    assert first_digest == second_digest == expected
