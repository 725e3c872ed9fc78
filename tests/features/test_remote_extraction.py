"""Features of images that lie on a server: killed and resumed, each row group read once, at flat memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from cache_scenario import Tiny, digest, features_of
from encoded_images import write_parquet
from range_server import Served, served

from xdm_ft.data.parquet import Parquet
from xdm_ft.features import FeatureSettings
from xdm_ft.features.cache import cache_path
from xdm_ft.features.extract import extract
from xdm_ft.features.hashes import hash_files
from xdm_ft.images.loader import ImageRows, image_loader, loaded
from xdm_ft.images.transforms import evaluation_transform
from xdm_ft.runtime.errors import UserError

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "remote.py"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDM_FT_CACHE", str(tmp_path / "indexes"))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    (tmp_path / "data").mkdir()
    with served(tmp_path / "data") as found:
        yield found


def of_images(server: Served) -> dict[tuple[str, int, int], int]:
    """How often each row group was read."""
    counts: dict[tuple[str, int, int], int] = {}
    for span in server.bodies():
        if span[1]:  # a file that is small is read from its beginning for its footer
            counts[span] = counts.get(span, 0) + 1
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_extraction_reads_each_row_group_once(workers: int, server: Served, tmp_path: Path) -> None:
    for number in range(2):  # four shards of 32 images each, eight row groups
        write_parquet(tmp_path / "data" / f"{number}.parquet", range(128 * number, 128 * number + 128), 32)
    data, cache = Parquet(file=server.address), tmp_path / "cache"
    local = features_of(Parquet(file=tmp_path / "data"), tmp_path / "local")
    hashes = hash_files(data, None, show=False)
    server.requests.clear()
    data = Parquet(file=server.address)  # that has read nothing
    settings = FeatureSettings(dir=cache, batch_size=16, workers=workers)
    features = extract(Tiny(), data, hashes, settings, on_bad_image="error", device="cpu", show=False)
    assert digest(features) == digest(local) and features.extracted == 256
    counts = of_images(server)
    assert len(counts) == 8 and set(counts.values()) == {1}


def test_a_file_that_changes_while_features_are_computed(server: Served, tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "data" / "0.parquet", range(64), 32)
    data = Parquet(file=server.address)
    hashes = hash_files(data, None, show=False)
    os.utime(path, ns=(7, 7))
    settings = FeatureSettings(dir=tmp_path / "cache", batch_size=16, workers=0)
    with pytest.raises(UserError, match=r"0.parquet: this file was changed while features were computed; run the same"):
        extract(Tiny(), data, hashes, settings, on_bad_image="error", device="cpu", show=False)


@pytest.mark.slow
def test_a_server_that_fails_in_a_worker_is_one_line(server: Served, tmp_path: Path) -> None:
    write_parquet(tmp_path / "data" / "0.parquet", range(64), 32)
    data = Parquet(file=server.address)
    hashes = hash_files(data, None, show=False)
    data, server.ranges = Parquet(file=server.address), False
    settings = FeatureSettings(dir=tmp_path / "cache", batch_size=16, workers=1)
    with pytest.raises(UserError) as caught:
        extract(Tiny(), data, hashes, settings, on_bad_image="error", device="cpu", show=False)
    assert "0.parquet: the server sends no ranges" in str(caught.value) and "\n" not in str(caught.value)


def test_a_cache_at_an_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    line = r"features.dir: s3:/+bucket/features is an address; the cache needs a file system with locks"
    with pytest.raises(UserError, match=line):
        cache_path(FeatureSettings.model_validate({"dir": "s3://bucket/features"}))
    monkeypatch.setenv("XDM_FT_CACHE", "gs://bucket/features")
    with pytest.raises(UserError, match="XDM_FT_CACHE: gs://bucket/features is an address"):
        cache_path(FeatureSettings())


def measured(folder: Path, *more: str) -> subprocess.Popen[str]:
    images = ["--images", "3000", "--row-group", "100", "--size", "96", "--cache-mb", "4"]  # 27 kB each
    command = [sys.executable, str(BENCHMARK), *images, "--folder", str(folder), *more]
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARK.parents[1])}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow
def test_extraction_over_http_killed_and_resumed_at_flat_memory(tmp_path: Path) -> None:
    """The benchmark with few images: its second start resumes the first one, which is killed."""
    killed = measured(tmp_path, "--seconds-per-batch", "0.05")
    until = time.monotonic() + 300
    while len(list(tmp_path.glob("cache/*/shard-*"))) < 2:
        assert time.monotonic() < until and killed.poll() is None
        time.sleep(0.02)
    killed.kill()
    killed.communicate()
    kept = 256 * len(list(tmp_path.glob("cache/*/shard-*")))
    output, _ = measured(tmp_path).communicate(timeout=400)
    found = json.loads(output.splitlines()[-1])
    assert found["extracted"] == 3000 - kept > 0
    assert found["distinct"] == 3000 and found["hashed_requests"] == 0
    first, _, last = found["thirds_megabytes"]
    assert last - first < 25, "of 83 MB of images"
    again, _ = measured(tmp_path).communicate(timeout=400)
    warm = json.loads(again.splitlines()[-1])
    assert warm["extracted"] == 0 and warm["requests"] == 0, "a warm start opens no file"
    assert np.isclose(warm["mean"], found["mean"])


@pytest.mark.slow
def test_random_rows_through_the_workers_of_a_loader(server: Served, tmp_path: Path) -> None:
    """As end-to-end training draws them: each process reads the row groups that it needs, and keeps them."""
    for number in range(2):
        write_parquet(tmp_path / "data" / f"{number}.parquet", range(80 * number, 80 * number + 80), 20)
    local, found = Parquet(file=tmp_path / "data"), Parquet(file=server.address)
    preprocessing = Tiny().preprocessing
    rows = np.random.default_rng(0).integers(0, 160, 400).tolist()
    server.requests.clear()
    batches = []
    for data in (local, found):
        images = ImageRows(data, evaluation_transform(preprocessing))
        loader = image_loader(images, 2, torch.device("cpu"), batch_size=20, sampler=rows)
        batches.append(torch.cat([x for x, _ in loaded(loader, "a", "b")]))
    assert torch.equal(*batches) and len(batches[0]) == 400
    footers = 2 * 2
    assert len(server.bodies()) == 2 * 8 + footers, "eight row groups in each of two processes"
