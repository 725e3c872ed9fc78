"""A training step above a cached cut against one that computes what lies below the cut, and what arithmetic predicts.

    python benchmarks/cut.py                          MobileNetV2 and ViT-Ti/16 with random weights, 3 minutes
    python benchmarks/cut.py --models mobilenetv2_100 --weights FILE --turns 9

A step is: activations, forward and backward above the cut, Adam. `cached` reads activations from memory-mapped files in
the format of the cache, ahead of the step, as training does. `computed` has decoded images in memory and sends them
through the part below, so decoding, which it needs too, is not counted. Both are timed in this process, one after the
other in every turn, so that other programs disturb both alike; the ratio is the median of the turns' ratios. With one
thread (OMP_NUM_THREADS=1) it is processor time, else wall time.

predicted by times    above / (below + above), of the forward pass below and forward and backward above, measured alone
predicted by count    3a / (n + 2a) for the last a of n blocks, if all cost the same and a backward pass costs two
                      forward ones
of all                cached step / step that trains the whole encoder

The last line is JSON. benchmarks/results.md, "Above a cut", has measured numbers.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from xdm_ft.algorithms import Setup
from xdm_ft.algorithms.erm import ERM
from xdm_ft.core import Task
from xdm_ft.cut import LastBlocks, Trainable
from xdm_ft.encoders import Encoder
from xdm_ft.encoders.timm import Timm
from xdm_ft.features.cache import Features, contents_of, open_shard, write_shard
from xdm_ft.features.key import key_of
from xdm_ft.images.transforms import PreprocessingOverrides
from xdm_ft.training.end_to_end.inputs import CachedActivations
from xdm_ft.training.end_to_end.model import EndToEnd

CLASSES, IMAGES = 7, 64  # images in the files; steps draw from them
LAST = (1, 2, 4)
TASK = Task(tuple(map(str, range(CLASSES))), ("a", "b", "c"))
Step = Callable[[Tensor], None]


class Row(NamedTuple):
    model: str
    blocks: int
    of_blocks: int
    shape: str
    kilobytes: float  # of an image's activation
    cached: float  # seconds of a step
    computed: float
    ratio: float
    by_times: float
    by_count: float
    of_all: float


def clock() -> float:
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def seconds_of(work: Callable[[], object]) -> float:
    started = clock()
    work()
    return clock() - started


def step_of(model: EndToEnd, labels: Tensor) -> Step:
    """Returns a function that takes one step on x."""
    optimizer = torch.optim.Adam([*model.trainable, *model.algorithm.parameters()], lr=1e-4)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model.algorithm.logits(model.encode(x)), labels[: len(x)]).backward()
        optimizer.step()

    return step


def model_of(encoder: Encoder, trainable: Trainable) -> EndToEnd:
    return EndToEnd(copy.deepcopy(encoder), ERM(Setup(TASK, encoder.width, 100, 0)), "frozen", trainable).train()


def stored(folder: Path, activations: Tensor, shape: tuple[int, ...]) -> CachedActivations:
    """Writes activations [n,*shape] as a shard, and returns what reads them from there."""
    contents = contents_of(np.arange(2 * len(activations)).reshape(len(activations), 2).view(np.uint8))
    path = write_shard(folder, key_of({}), contents, activations.flatten(1), {})
    shard = open_shard(path, key_of({}), activations[0].numel(), activations.dtype)
    return CachedActivations(Features([shard.features], streamed=True), shape)


def batches(inputs: CachedActivations, batch: int) -> Iterator[Tensor]:
    """Yields batches of random rows for ever."""
    generator = torch.Generator().manual_seed(0)
    while True:
        rows = torch.randperm(IMAGES, generator=generator).tolist()
        yield from inputs.of_rows(rows[: IMAGES // batch * batch], batch)


def measured(name: str, encoder: Encoder, blocks: int, images: Tensor, turns: int, whole: float, folder: Path) -> Row:
    """`images` [B,3,S,S]; `whole`: seconds of a step that trains all of the encoder."""
    model = model_of(encoder, LastBlocks(blocks=blocks))
    cut, labels = model.cut, torch.arange(len(images)) % CLASSES
    assert cut is not None
    activations = cut.below(images)
    reads = batches(stored(folder, activations.repeat(IMAGES, *[1] * len(cut.shape))[:IMAGES], cut.shape), len(images))
    step = step_of(model, labels)
    ways = {
        "cached": lambda: step(next(reads)),
        "computed": lambda: step(cut.below(images)),
        "below": lambda: cut.below(images),
        "above": lambda: step(activations),
    }
    for work in ways.values():
        work()
    taken = {way: [] for way in ways}
    for _ in range(turns):
        for way, work in ways.items():
            taken[way].append(seconds_of(work))
    middle = {way: statistics.median(seconds) for way, seconds in taken.items()}
    count = len(encoder.block_names)
    return Row(
        name, blocks, count, "×".join(map(str, cut.shape)), activations[0].nbytes / 1e3,
        middle["cached"], middle["computed"],
        statistics.median(a / b for a, b in zip(taken["cached"], taken["computed"], strict=True)),
        middle["above"] / (middle["below"] + middle["above"]),
        3 * blocks / (count + 2 * blocks), middle["cached"] / whole,
    )  # fmt: skip


def rows_of(name: str, arguments: argparse.Namespace) -> Iterator[Row]:
    torch.manual_seed(0)
    weights = arguments.weights if name == arguments.models[0] else None
    encoder = Timm(model=name, weights=weights, preprocessing=PreprocessingOverrides(size=arguments.size))
    images = torch.randn(arguments.batch, 3, arguments.size, arguments.size)
    step = step_of(model_of(encoder, True), torch.arange(len(images)) % CLASSES)
    step(images)
    whole = statistics.median(seconds_of(lambda: step(images)) for _ in range(arguments.turns))
    for blocks in LAST:
        with tempfile.TemporaryDirectory() as folder:
            yield measured(name, encoder, blocks, images, arguments.turns, whole, Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mobilenetv2_100", "vit_tiny_patch16_224"], help="of timm")
    parser.add_argument("--weights", help="file with the weights of the first model (default: random)")
    parser.add_argument("--batch", type=int, default=16, help="images per step (default: 16)")
    parser.add_argument("--size", type=int, default=224, help="pixels (default: 224)")
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    print(
        "| model, images | last blocks | activation | kB | cached, ms | computed, ms | ratio | by times | by count "
        "| of all |"
    )
    print("|---|---|---|---:|---:|---:|---:|---:|---:|---:|")
    found = []
    for name in arguments.models:
        for row in rows_of(name, arguments):
            found.append(row._asdict())
            print(
                f"| {name}, {arguments.batch} | {row.blocks} of {row.of_blocks} | {row.shape} | {row.kilobytes:.0f} "
                f"| {1e3 * row.cached:.0f} | {1e3 * row.computed:.0f} | {row.ratio:.3f} | {row.by_times:.3f} "
                f"| {row.by_count:.3f} | {row.of_all:.3f} |",
                flush=True,
            )
    print(json.dumps({"threads": torch.get_num_threads(), "rows": found}))


if __name__ == "__main__":
    main()
