"""Measures the speed of streaming prediction against what the same cores could do.

python benchmarks/prediction.py MODEL IMAGES… (a model directory or run directory, and images as `xdm-ft predict` takes
them) measures, in turns, f: the forward pass on images that are in memory; d: reading, decoding and transforming, in as
many processes as there are cores; s: `stream`, which does both, for each number of workers. The cache of features is
not used. Were no moment of any core lost, s would be 1 / (1/f + 1/d). The last line is JSON:

    forward, decode            images per second, the median of the rounds
    workers_<n>                images per second of `stream` with n workers
    workers_<n>_ratio          the same as a share of 1 / (1/f + 1/d), the median of the rounds' shares
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import islice

import torch

import xdm_ft
from xdm_ft.export.predictor import Model, read_batches, stream
from xdm_ft.export.sources import Item, Sources
from xdm_ft.features import fast_batch_size
from xdm_ft.images.transforms import normalize
from xdm_ft.runtime.machine import retain_freed_memory


def forward(model: Model, items: Sequence[Item], batch_size: int) -> Callable[[], float]:
    """Returns a function that measures images per second of the forward pass; as many images as `items`."""
    [batch] = read_batches(model, [list(items[:batch_size])], batch_size, 0)
    pixels = normalize(batch.pixels.to(model.device), model.config.preprocessing)

    @torch.inference_mode()
    def measured() -> float:
        started = time.perf_counter()
        passes = len(items) // batch_size
        for _ in range(passes):
            model.module(pixels).cpu()
        return passes * batch_size / (time.perf_counter() - started)

    return measured


def decode(model: Model, items: Sequence[Item], batch_size: int, workers: int) -> float:
    """Returns images per second of reading, decoding and transforming."""
    batches = [list(items[first : first + batch_size]) for first in range(0, len(items), batch_size)]
    started = time.perf_counter()
    for _ in read_batches(model, batches, batch_size, workers):
        pass
    return len(items) / (time.perf_counter() - started)


def streamed(model: Model, items: Sequence[Item], batch_size: int, workers: int) -> float:
    started = time.perf_counter()
    for _ in stream(model, items, batch_size=batch_size, workers=workers):
        pass
    return len(items) / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("images", nargs="+")
    parser.add_argument("--count", type=int, default=1024, help="images of each measurement")
    parser.add_argument("--batch-size", type=int, help="default: as `xdm-ft predict` has it")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    model = xdm_ft.load(arguments.model)
    batch_size = arguments.batch_size or fast_batch_size(model.device.type)
    items = list(islice(Sources(arguments.images), arguments.count // batch_size * batch_size))
    cores = len(os.sched_getaffinity(0))
    retain_freed_memory()
    measured_forward = forward(model, items, batch_size)
    measured_forward()
    found: dict[str, list[float]] = {}
    for _ in range(arguments.rounds):
        f, d = measured_forward(), decode(model, items, batch_size, cores)
        speeds = {"forward": f, "decode": d}
        for workers in arguments.workers:
            speed = streamed(model, items, batch_size, workers)
            speeds |= {f"workers_{workers}": speed, f"workers_{workers}_ratio": speed * (1 / f + 1 / d)}
        print({name: round(value, 3) for name, value in speeds.items()}, flush=True)
        for name, value in speeds.items():
            found.setdefault(name, []).append(value)
    medians = {name: round(statistics.median(values), 3) for name, values in found.items()}
    print(json.dumps({"images": len(items), "cores": cores, "threads": torch.get_num_threads(), **medians}))


if __name__ == "__main__":
    main()
