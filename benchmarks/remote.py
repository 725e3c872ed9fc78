"""Measures time and memory of features of images in Parquet files that a server on this machine sends in ranges.

python benchmarks/remote.py [--images 1000000] makes small PNG files that all differ, in Parquet files, and starts a
server for them in another process. Then it does what a run does before training: it opens the data, hashes the images
and extracts features with a small encoder. A second start on the same --folder resumes the first one. With
--index-only it opens the data and stops: images are empty, so that 10 million rows take little time.

The last line is JSON. Memory is anonymous, that is, not backed by a file:

    opened_megabytes    held by the data set: labels, domains, groups, row groups
    thirds_megabytes    peak growth since then in each third of the extraction, hashes and libraries included
    requests            of bytes of files, in all; hashed_requests: while the images were hashed
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pyarrow
import torch
from PIL import Image
from pyarrow.parquet import ParquetWriter
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "data"))
from range_server import served

from xdm_ft.data.parquet import Parquet
from xdm_ft.encoders import Encoder, Portable
from xdm_ft.features import FeatureSettings
from xdm_ft.features.extract import extract
from xdm_ft.features.hashes import hash_files
from xdm_ft.image_files.tables import Columns
from xdm_ft.images.transforms import Preprocessing

ROWS_PER_FILE = 100_000
SIZE, WIDTH = 8, 16
MEGABYTE = 1e6


class Small(Encoder):
    """One linear layer. Each batch takes `seconds` longer."""

    begun = threading.Event()  # of all of them: at the first batch the libraries are loaded

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(3 * SIZE * SIZE, WIDTH)
        nn.init.normal_(self.linear.weight, generator=torch.Generator().manual_seed(0))
        nn.init.zeros_(self.linear.bias)
        self.width, self.seconds = WIDTH, seconds
        self.preprocessing = Preprocessing(mean=(0.5,) * 3, std=(0.5,) * 3, size=SIZE)
        self.stage_names, self.pretraining, self.normalize = (), "none", False

    def forward(self, images: Tensor) -> Tensor:
        self.begun.set()
        time.sleep(self.seconds)
        return self.linear(images.flatten(1))

    def identity(self) -> dict[str, object]:
        return {"component": "small"}

    def portable(self) -> Portable:
        return Portable({}, self.state_dict())


def png(number: int, size: int) -> bytes:
    """An image whose first pixel holds the number. Those of 8 pixels take 70 bytes; larger ones are noise."""
    pixels = np.full((size, size, 3), 100, np.uint8)
    if size > SIZE:
        pixels[:] = np.random.default_rng(number).integers(0, 256, pixels.shape, np.uint8)
    pixels[0, 0] = number & 255, number >> 8 & 255, number >> 16 & 255
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "png", compress_level=1)
    return stream.getvalue()


def make(folder: Path, arguments: argparse.Namespace) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for first in range(0, arguments.images, ROWS_PER_FILE):
        rows = range(first, min(first + ROWS_PER_FILE, arguments.images))
        table = pyarrow.table(
            {
                "image": [b"" if arguments.index_only else png(row, arguments.size) for row in rows],
                "label": [f"class {row % 62}" for row in rows],
                "domain": [f"site {row // 7 % 5}" for row in rows],
                "group": [f"patient {row // 100}" for row in rows],
            }
        )
        with ParquetWriter(folder / f"{first // ROWS_PER_FILE:04d}.parquet", table.schema) as writer:
            writer.write_table(table, arguments.row_group)


def serve(folder: Path, port: int, pipe: Connection) -> None:
    """Serves the folder until the pipe closes. Answers every message with the number of requests of bytes."""
    with served(folder, port) as server:
        pipe.send(server.address)
        while True:
            try:
                pipe.recv()
            except EOFError:
                os._exit(0)
            pipe.send(len(server.bodies()))


class Memory(threading.Thread):
    """Records anonymous memory in bytes, 50 times a second, from the first batch on."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples, self.over = list[int](), threading.Event()

    def run(self) -> None:
        Small.begun.wait()
        while not self.over.wait(0.02):
            self.samples.append(anonymous())


def anonymous() -> int:
    """Bytes of this process's memory that are not backed by a file (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    data_folder, cache = folder / "data", folder / "cache"
    context = multiprocessing.get_context("spawn")
    if not data_folder.exists():
        process = context.Process(target=make, args=(folder / "unfinished", arguments))
        process.start()  # of its own: its memory is not that of the data set
        process.join()
        (folder / "unfinished").rename(data_folder)
    os.environ["XDM_FT_CACHE"] = str(cache)
    cache.mkdir(exist_ok=True)
    pipe, other = multiprocessing.Pipe()
    # the address of an earlier start, as what is remembered of a file is remembered of its address
    kept = folder / "port"
    port = int(kept.read_text()) if kept.exists() else 0
    context.Process(target=serve, args=(data_folder, port, other), daemon=True).start()
    other.close()
    address = pipe.recv()
    kept.write_text(address.rsplit(":", 1)[1])

    def requests() -> int:
        pipe.send("count")
        return int(pipe.recv())

    before, started = anonymous(), time.perf_counter()
    data = Parquet(file=address, columns=Columns(group="group"), cache_mb=arguments.cache_mb)
    held = anonymous() - before
    found: dict[str, object] = {
        "images": len(data),
        "row_groups": len(data.pieces.ends),
        "opened_seconds": round(time.perf_counter() - started, 1),
        "opened_megabytes": round(held / MEGABYTE, 1),
    }
    if not arguments.index_only:
        found |= extracted(data, cache, arguments, requests)
    return {**found, "requests": requests()}


def extracted(data: Parquet, cache: Path, arguments: argparse.Namespace, requests) -> dict[str, object]:  # type: ignore[no-untyped-def]
    memory, before, opened = Memory(), anonymous(), requests()
    started = time.perf_counter()
    hashes = hash_files(data, cache, show=True)
    hashed, hashed_requests = time.perf_counter() - started, requests() - opened
    settings = FeatureSettings(dir=cache, batch_size=arguments.batch_size, workers=arguments.workers)
    encoder, started = Small(arguments.seconds_per_batch), time.perf_counter()
    memory.start()
    features = extract(encoder, data, hashes, settings, on_bad_image="error", device="cpu", show=True)
    seconds = time.perf_counter() - started
    Small.begun.set()  # if nothing was left to compute
    memory.over.set()
    memory.join()
    thirds = np.array_split(np.array(memory.samples), 3)
    return {
        "hashed_seconds": round(hashed, 1),
        "hashed_requests": hashed_requests,
        "distinct": len(hashes.images.rows),
        "extracted": features.extracted,
        "extracted_seconds": round(seconds, 1),
        "thirds_megabytes": [round((max(part) - before) / MEGABYTE, 1) for part in thirds if len(part)],
        "mean": float(features[torch.arange(len(data))].mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--row-group", type=int, default=1000)
    parser.add_argument("--size", type=int, default=SIZE, help="pixels of a side")
    parser.add_argument("--cache-mb", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seconds-per-batch", type=float, default=0.0)
    parser.add_argument("--index-only", action="store_true")
    parser.add_argument("--folder", type=Path, help="for data and cache, kept there (default: temporary)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        print(json.dumps(measure(arguments, arguments.folder or Path(temporary))))


if __name__ == "__main__":
    main()
