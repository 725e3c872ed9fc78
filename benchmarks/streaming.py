"""Measures memory and speed of training heads on features that are larger than memory.

python benchmarks/streaming.py [--images 10000000] writes float16 features in the format of the cache, trains a chunk of
ERM heads and one of XDomainMix heads on these files, and deletes them. The last line is JSON:

    gigabytes                        size of the files
    anonymous_gigabytes              peak of this process's memory that is not backed by a file, after opening the files
    <method>_head_steps_per_second   including preparation of the chunk, excluding evaluations
    <method>_evaluation_seconds      one evaluation of all heads of the chunk
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from xdm_ft.algorithms import Method, Setup
from xdm_ft.algorithms.erm import ERM
from xdm_ft.algorithms.xdomainmix import XDomainMix
from xdm_ft.core import Annotations, Criteria, ModelKey, Task
from xdm_ft.features import cache
from xdm_ft.features.cache import Contents, Features, Store, contents_of, write_shard
from xdm_ft.features.key import key_of
from xdm_ft.protocol.splits import Split
from xdm_ft.training import Job, Training
from xdm_ft.training.bank.data import BankValidation
from xdm_ft.training.bank.train import CHUNK_HEADS, chunks, train_chunk

DOMAINS, CLASSES, KEY = 4, 10, key_of({})
SHARD = 10_000  # images
METHODS = {"erm": ERM, "xdomainmix": XDomainMix}
GIGABYTE = 1e9


class AnonymousMemory(threading.Thread):
    """Records the peak of RssAnon in bytes, which does not include mapped files."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self.over = 0, threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.005):
            self.peak = max(self.peak, anonymous())


def anonymous() -> int:
    """Bytes of this process's memory that are not backed by a file (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def annotations_of(rows: int) -> Annotations:
    row = torch.arange(rows)
    domains = row // CLASSES % DOMAINS
    return Annotations(row % CLASSES, domains, domains)


def make(folder: Path, rows: int, width: int) -> None:
    """Writes shards of float16 [rows, K]: the sum of a class mean, a domain mean and noise."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(SHARD, width, generator=generator)
    of_class, of_domain = (0.1 * torch.randn(n, width, generator=generator) for n in (CLASSES, DOMAINS))
    about = annotations_of(rows)
    for first in range(0, rows, SHARD):
        own = slice(first, min(first + SHARD, rows))
        # each shard reuses the same noise, shifted: drawing billions of numbers would take most of the time
        z = noise.roll(first // SHARD, dims=1)[: own.stop - first] + of_class[about.labels[own]]
        write_shard(folder, KEY, contents(rows)[own], (z + of_domain[about.domains[own]]).half(), {})


def contents(rows: int) -> Contents:
    """Row numbers in place of hashes."""
    return contents_of(np.arange(2 * rows).reshape(rows, 2).view(np.uint8))


def opened(cache: Path, rows: int, width: int) -> Features:
    cached = Store(cache, {}, contents(rows), width, torch.float16)
    assert not len(cached.missing())
    ends = np.cumsum([0, *(len(shard.contents) for shard in cached.shards)])
    places = torch.from_numpy(ends[cached.shard_of] + cached.row_of)
    return Features([shard.features for shard in cached.shards], places[None])


def split_of(domains: Tensor) -> Split:
    """The last domain is held out; a fifth of every other domain is for validation."""
    validates = torch.arange(len(domains)) // (CLASSES * DOMAINS) % 5 == 0
    inside = domains < DOMAINS - 1
    return Split(
        test_domains=("held out",),
        train_domains=tuple(f"domain {d}" for d in range(DOMAINS - 1)),
        train=tuple(((domains == d) & ~validates).nonzero()[:, 0] for d in range(DOMAINS - 1)),
        evaluation={"train_val": (inside & validates).nonzero()[:, 0], "test": (~inside).nonzero()[:, 0]},
        domain_of=torch.tensor([*range(DOMAINS - 1), -1]),
    )


def jobs_of(method: str, heads: int, split: Split, width: int, training: Training) -> list[Job]:
    """Trials of one split with different learning rates, four per seed."""
    task = Task(tuple(f"class {c}" for c in range(CLASSES)), split.train_domains)
    assert training.steps is not None
    setups = [Setup(task, width=width, steps=training.steps, seed=head // 4) for head in range(heads)]
    return [
        Job(
            ModelKey(method, split.test_domains, setup.seed, head % 4),
            split,
            setup,
            METHODS[method],
            None,
            training.model_copy(update={"lr": 1e-3 * (1 + head)}),
        )
        for head, setup in enumerate(setups)
    ]


def train(features: Features, training: Training, heads: int) -> dict[str, float]:
    """Returns speed, evaluation time and the best head's accuracy of each method."""
    about = annotations_of(len(features))
    split, found = split_of(about.domains), {}
    assert training.steps is not None
    for method in METHODS:
        jobs = jobs_of(method, heads, split, features.width, training)
        evaluating: list[float] = []
        started = time.perf_counter()
        with timed_evaluations(evaluating):
            criteria, trained = Criteria(("train_val",), "accuracy"), []
            for chunk in chunks(jobs, features.device):
                trained += train_chunk(chunk, features, about, criteria, record=lambda *_: None)
        seconds = time.perf_counter() - started - sum(evaluating)
        assert all(one.failure is None for one in trained)
        found[f"{method}_head_steps_per_second"] = round(heads * training.steps / seconds, 1)
        found[f"{method}_evaluation_seconds"] = round(sum(evaluating) / len(evaluating), 1)
        found[f"{method}_accuracy"] = round(max(max(one.course["train_val"].values()) for one in trained), 4)
    return found


@contextmanager
def timed_evaluations(seconds: list[float]) -> Iterator[None]:
    original = BankValidation.values

    def values(self: BankValidation, model: Method, state: dict[str, Tensor]) -> list[dict[str, float] | None]:
        started = time.perf_counter()
        found = original(self, model, state)
        seconds.append(time.perf_counter() - started)
        return found

    with patch.object(BankValidation, "values", values):
        yield


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    started = time.perf_counter()
    (folder / KEY).mkdir()
    make(folder / KEY, arguments.images, arguments.width)
    size = sum(path.stat().st_size for path in (folder / KEY).iterdir())
    print(f"{size / GIGABYTE:.2f} GB of features made in {time.perf_counter() - started:.0f} s", flush=True)
    cache.MEMORY_FRACTION = 0.25 if arguments.in_memory else 0.0
    memory = AnonymousMemory()
    memory.start()
    started = time.perf_counter()
    features = opened(folder, arguments.images, arguments.width)
    print(f"opened and checked in {time.perf_counter() - started:.0f} s", flush=True)
    training = Training(
        batch_size=arguments.batch_size,
        sampler=arguments.sampler,
        steps=arguments.steps,
        evaluate_every=max(1, arguments.steps // arguments.evaluations),
    )
    speeds = train(features, training, arguments.heads)
    memory.over.set()
    memory.join()
    return {
        "images": arguments.images,
        "width": arguments.width,
        "gigabytes": round(size / GIGABYTE, 2),
        "in_memory": features.in_memory,
        "heads": arguments.heads,
        "steps": arguments.steps,
        "threads": torch.get_num_threads(),
        "anonymous_gigabytes": round(memory.peak / GIGABYTE, 2),
        **speeds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=200_000)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=CHUNK_HEADS)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=32, help="images per training domain; in all if pooled")
    parser.add_argument("--sampler", choices=["per_domain", "class_balanced", "pooled"], default="per_domain")
    parser.add_argument("--evaluations", type=int, default=2, help="number of evaluations")
    parser.add_argument("--in-memory", action="store_true", help="for comparison: load features if they fit")
    parser.add_argument("--folder", type=Path, help="where to write the files, then deleted (default: temporary)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        print(json.dumps(measure(arguments, Path(folder))))


if __name__ == "__main__":
    main()
