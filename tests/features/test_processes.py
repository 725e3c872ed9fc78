"""Who computes: ranks divide the shards, runs wait for each other, tasks elsewhere, and what a kill leaves."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cache_scenario import SHARD, Pixels, Tiny, digest, features_of, write_images
from encoded_images import write_parquet
from range_server import Served, served

from xdm_ft.data.parquet import Parquet
from xdm_ft.features import FeatureSettings
from xdm_ft.features import extract as extraction
from xdm_ft.features.cache import lock_file
from xdm_ft.features.extract import Extraction, RemoteExtraction, extract, frozen_copy
from xdm_ft.features.hashes import hash_files
from xdm_ft.features.key import key_of, key_parts
from xdm_ft.images.loader import ImageRows, image_loader, iterate_batches
from xdm_ft.images.transforms import evaluation_transform
from xdm_ft.runtime.errors import UserError
from xdm_ft.runtime.progress import Progress

SCENARIO = Path(__file__).with_name("cache_scenario.py")
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "remote.py"
SHARDS = 8
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDM_FT_CACHE", str(tmp_path / "indexes"))


# ---- Ranks of a run


class Ranks:
    """Collective operations of threads that stand for ranks."""

    def __init__(self, count: int) -> None:
        self.barrier, self.values = threading.Barrier(count), dict[int, object]()

    def exchange(self, rank: int, value: object) -> list[object]:
        self.values[rank] = value
        self.barrier.wait(30)
        found = [self.values[number] for number in range(self.barrier.parties)]
        self.barrier.wait(30)
        return found


def ranks_of(caches: list[Path], monkeypatch: pytest.MonkeyPatch, rows: int = 5 * SHARD + 3) -> list[object]:
    """What the rank with each of these caches returns: its features, or what it raises."""
    ranks = Ranks(len(caches))

    def gather(rank: SimpleNamespace, names: list[str]) -> list[str]:
        return [name for of_rank in ranks.exchange(rank.process_index, names) for name in of_rank]

    def run(rank: int) -> object:
        settings = FeatureSettings(dir=caches[rank], batch_size=16, workers=0)
        hashes, given = hash_files(Pixels(rows), None, show=False), {"on_bad_image": "error", "device": "cpu"}
        own = SimpleNamespace(process_index=rank, num_processes=len(caches))
        try:
            return extract(Tiny(), Pixels(rows), hashes, settings, show=False, accelerator=own, **given)
        except UserError as error:
            return error

    monkeypatch.setattr(extraction, "from_main", lambda rank, value: ranks.exchange(rank.process_index, value)[0])
    monkeypatch.setattr(extraction, "gather", gather)
    with ThreadPoolExecutor(len(caches)) as pool:
        return list(pool.map(run, range(len(caches))))


def test_ranks_divide_the_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = features_of(Pixels(5 * SHARD + 3), tmp_path / "alone")
    first, second = ranks_of([tmp_path / "cache"] * 2, monkeypatch)
    assert first.extracted == second.extracted == 5 * SHARD + 3, "the images of all ranks"
    assert digest(first) == digest(second) == digest(expected) and first.key == expected.key
    names = [sorted(path.name for path in (tmp_path / name / first.key).iterdir()) for name in ("alone", "cache")]
    assert names[0] == names[1], "shards do not depend on the number of ranks"
    assert [found.extracted for found in ranks_of([tmp_path / "cache"] * 3, monkeypatch)] == [0, 0, 0]
    assert not list((tmp_path / "cache").glob("*.lock"))


@pytest.mark.parametrize("main_is_complete", [False, True])
def test_ranks_must_share_the_cache(main_is_complete: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of the same name on another machine is found out, also if the first rank lacks nothing in its own."""
    if main_is_complete:
        features_of(Pixels(5 * SHARD + 3), tmp_path / "a")
    count = 5 * SHARD + 3 if main_is_complete else 3 * SHARD
    for fault in map(str, ranks_of([tmp_path / "a", tmp_path / "b"], monkeypatch)):
        assert f"lacks features of {count} images, which another process wrote; share this" in fault


# ---- Processes


def start(cache: Path, images: Path, seconds_per_batch: float, views: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCENARIO), str(cache), str(images), str(seconds_per_batch), str(views)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCENARIO.parents[2])}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Waits for the process and returns the number of images that it computed, and the hash of all features."""
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0
    extracted, of_all = output.split()
    return int(extracted), of_all


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < until, "waited five minutes"
        time.sleep(0.01)


def done(cache: Path) -> int:
    return len(list(cache.glob("*/shard-*.safetensors")))


@pytest.mark.slow
def test_of_two_runs_one_waits_and_takes_over_when_the_other_is_killed(tmp_path: Path) -> None:
    """The other one wants some of the same images, and more views of them; what it reads is as without interruption."""
    images, cache, more = write_images(tmp_path / "images", SHARDS * SHARD), tmp_path / "cache", tmp_path / "more"
    more.mkdir()
    for path in sorted(images.iterdir())[SHARD + 7 :]:
        (more / path.name).hardlink_to(path)
    undisturbed = start(tmp_path / "undisturbed", images, 0.0, views=1)
    killed = start(cache, images, 0.4)
    wait_for(lambda: done(cache) >= 2)
    other = start(cache, more, 0.02, views=1)
    wait_for(lambda: done(cache) >= 3)
    killed.kill()
    killed.communicate()
    kept = done(cache)
    assert 3 <= kept < SHARDS
    views = len(list(more.iterdir()))
    assert finish(other)[0] == (SHARDS - kept) * SHARD + views, "it waited, and computed what the killed run left"
    extracted, features = finish(start(cache, images, 0.0, views=1))
    assert (extracted, features) == (SHARDS * SHARD - views, finish(undisturbed)[1])
    assert not list(cache.glob("*.lock")) and not list(cache.rglob(".*unfinished")), "nothing of it is left"


# ---- Elsewhere


def test_features_have_the_key_of_the_device_there_and_are_read_here(tmp_path: Path) -> None:
    seen, encoder = list[int](), Tiny()  # images in each part that was computed

    def run(extraction: Extraction, numbers: np.ndarray, size: int, bar: Progress) -> int:
        assert lock_file(extraction.store.folder).exists()
        there: Extraction = pickle.loads(pickle.dumps(extraction))
        for part in (there.part(numbers[:SHARD]), there.part(numbers[SHARD:])):
            own = replace(part, encoder=frozen_copy(part.encoder, "fp32", CPU), device=CPU)
            seen.append(own.run(own.store.missing(), SHARD, bar))
        return sum(seen[-2:])

    elsewhere = RemoteExtraction(GPU, run)
    features_of(Pixels(SHARD), tmp_path, elsewhere=elsewhere)
    found = features_of(Pixels(70), tmp_path, encoder, elsewhere=elsewhere)
    assert encoder.seen == [0] and seen == [SHARD, 0, SHARD, 70 - 2 * SHARD] and found.extracted == 70 - SHARD
    assert found.key == key_of(key_parts(Tiny(), Pixels(1).decoder, "fp32", GPU)) and found.device == CPU
    here = features_of(Pixels(70), tmp_path)
    assert here.key != found.key and digest(here) == digest(found)
    assert features_of(Pixels(70), tmp_path, elsewhere=elsewhere).extracted == 0
    assert done(tmp_path) == 6 and not list(tmp_path.glob("*.lock"))


# ---- Images on a server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    (tmp_path / "data").mkdir()
    with served(tmp_path / "data") as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.soak), 2])
def test_extraction_reads_each_row_group_once(workers: int, server: Served, tmp_path: Path) -> None:
    for number in range(2):  # four shards of 32 images each, eight row groups
        write_parquet(tmp_path / "data" / f"{number}.parquet", range(128 * number, 128 * number + 128), 32)
    local = features_of(Parquet(file=tmp_path / "data"), tmp_path / "local")
    hashes = hash_files(Parquet(file=server.address), None, show=False)
    data = Parquet(file=server.address)  # that has read nothing
    server.requests.clear()
    settings = FeatureSettings(dir=tmp_path / "cache", batch_size=16, workers=workers)
    features = extract(Tiny(), data, hashes, settings, on_bad_image="error", device="cpu", show=False)
    assert digest(features) == digest(local) and features.extracted == 256
    counts: dict[tuple[str, int, int], int] = {}
    for span in server.bodies():
        if span[1]:  # a file that is small is read from its beginning for its footer
            counts[span] = counts.get(span, 0) + 1
    assert len(counts) == 8 and set(counts.values()) == {1}
    failing, server.ranges = Parquet(file=server.address), False
    settings = settings.model_copy(update={"dir": tmp_path / "other"})
    with pytest.raises(UserError, match=r"0.parquet: the server cannot send a part") as caught:
        extract(Tiny(), failing, hashes, settings, on_bad_image="error", device="cpu", show=False)
    assert "\n" not in str(caught.value)


def test_a_file_that_changes_while_features_are_computed(server: Served, tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "data" / "0.parquet", range(64), 32)
    data = Parquet(file=server.address)
    hashes = hash_files(data, None, show=False)
    os.utime(path, ns=(7, 7))
    settings = FeatureSettings(dir=tmp_path / "cache", batch_size=16, workers=0)
    with pytest.raises(UserError, match=r"0.parquet: this file was changed while features were computed; run the same"):
        extract(Tiny(), data, hashes, settings, on_bad_image="error", device="cpu", show=False)


def measured(folder: Path, *more: str) -> subprocess.Popen[str]:
    images = ["--images", "6000", "--row-group", "100", "--size", "96", "--cache-mb", "4"]  # 27 kB each
    command = [sys.executable, str(BENCHMARK), *images, "--folder", str(folder), *more]
    memory = {"LOCAL_WORLD_SIZE": str(len(os.sched_getaffinity(0))), "MALLOC_ARENA_MAX": "1"}  # whatever the cores:
    memory |= {"ARROW_DEFAULT_MEMORY_POOL": "system"}  # one thread decodes, and nobody keeps what it has freed
    environment = {**os.environ, **memory, "PYTHONPATH": str(BENCHMARK.parents[1])}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.soak
def test_extraction_over_http_killed_and_resumed_at_flat_memory(tmp_path: Path) -> None:
    """The benchmark with few images: its second start resumes the first one, which is killed."""
    killed = measured(tmp_path, "--seconds-per-batch", "0.2")
    wait_for(lambda: done(tmp_path / "cache") >= 2)
    killed.kill()
    killed.communicate()
    kept = 256 * done(tmp_path / "cache")
    found, warm = (json.loads(measured(tmp_path).communicate(timeout=400)[0].splitlines()[-1]) for _ in range(2))
    assert found["extracted"] == 6000 - kept > 0
    assert found["distinct"] == 6000 and found["hashed_requests"] == 0
    first, _, last = found["thirds_megabytes"]
    assert last - first < 60, "of 166 MB of images; the libraries reach their size at some batch, and differ by 30"
    assert warm["extracted"] == 0 and warm["requests"] == 0, "a warm start opens no file"
    assert np.isclose(warm["mean"], found["mean"])


@pytest.mark.slow
def test_random_rows_through_the_workers_of_a_loader(server: Served, tmp_path: Path) -> None:
    """As end-to-end training draws them: each process reads the row groups that it needs, and keeps them."""
    for number in range(2):
        write_parquet(tmp_path / "data" / f"{number}.parquet", range(80 * number, 80 * number + 80), 20)
    local, found = Parquet(file=tmp_path / "data"), Parquet(file=server.address)
    rows = np.random.default_rng(0).integers(0, 160, 400).tolist()
    server.requests.clear()
    batches = []
    for data in (local, found):
        images = ImageRows(data, evaluation_transform(Tiny().preprocessing))
        loader = image_loader(images, 2, CPU, batch_size=20, sampler=rows)
        batches.append(torch.cat([x for x, _ in iterate_batches(loader, "a", "b")]))
    assert torch.equal(*batches) and len(batches[0]) == 400
    footers = 2 * 2
    assert len(server.bodies()) == 2 * 8 + footers, "eight row groups in each of two processes"
