"""How long the intervals and verdicts of a table take, with a million test images and a hundred models.

    python benchmarks/intervals.py                                   1,000,000 images, 10 methods × 10 seeds, 2 minutes
    python benchmarks/intervals.py --images 100000 --seeds 3

A row is `summarise`, as a run calls it at its end: it reads the predictions of each model, checks their checksum, and
computes the metric without each group of images, the differences to ERM and their verdicts. Images are independent, or
in groups of unequal sizes. `reading` is the same files read and compared with the labels, and nothing else; both are
timed in this process, in turns, and the ratio is the median of the turns' ratios. Memory is the peak above what the
process had before. With one thread (OMP_NUM_THREADS=1) it is processor time, else wall time.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from xdm_ft.core import ModelKey, Score
from xdm_ft.evaluation.predictions import HeldOutImages, Prediction, arrays_of
from xdm_ft.results.model import Pick, Record
from xdm_ft.results.summary import summarise
from xdm_ft.runtime.machine import PeakMemory
from xdm_ft.storage.run_directory import RunDirectory

CLASSES, GROUPS, RULE, HELD = 62, 5000, "val_domain", ("site",)
FILES = 10  # different files of predictions; each one serves several models
METRICS = [("accuracy", False), ("nll", False), ("macro_f1", False), ("accuracy", True), ("macro_f1", True)]


def clock() -> float:
    return time.process_time() if os.environ.get("OMP_NUM_THREADS") == "1" else time.perf_counter()


def seconds_of(work: Callable[[], object]) -> float:
    started = clock()
    work()
    return clock() - started


class Run:
    """Made-up models of one held-out set, with their predictions in files."""

    def __init__(self, folder: Path, images: int, methods: int, seeds: int) -> None:
        drawn = np.random.default_rng(0)
        self.labels = drawn.integers(0, CLASSES, images)
        self.groups = (GROUPS * drawn.random(images) ** 2).astype(np.int64)
        self.directory, self.seeds = RunDirectory(folder), seeds
        self.methods = ["erm", *(f"method{number}" for number in range(1, methods))]
        for number in range(FILES):
            wrong = drawn.random(images) < 0.2 + 0.01 * number
            predicted = np.where(wrong, drawn.integers(0, CLASSES, images), self.labels)
            one = Prediction("erm", HELD, number, RULE, self.images(False), predicted, drawn.random(images))
            self.directory.write_predictions(str(number), arrays_of([one]))

    def images(self, grouped: bool) -> HeldOutImages:
        """Returns the test images anew, so that nothing is known about them yet."""
        rows = np.arange(len(self.labels))
        return HeldOutImages(rows, self.labels, self.labels % 5, self.groups if grouped else None)

    def predictions(self, grouped: bool) -> Iterator[Prediction]:
        images = self.images(grouped)
        for number, (method, seed) in enumerate((m, s) for m in self.methods for s in range(self.seeds)):
            arrays = self.directory.predictions(str(number % FILES))
            yield Prediction.from_arrays(arrays, images, (method, HELD, seed, 0), RULE)

    def summary(self, metric: str, grouped: bool) -> None:
        value = Score(0.8, 0.8, 0.8, 0.9, 0.7, 0.5, 0.1, len(self.labels), {}, {"site": {"accuracy": 0.8, "n": 1}})
        pick = Pick(1, "", {"test": value})
        records = [
            Record(ModelKey(method, HELD, seed, 0), {}, "ok", selected={RULE: pick}, encoder="", trainable=False)
            for method in self.methods
            for seed in range(self.seeds)
        ]
        compared = summarise(
            records, lambda _: self.predictions(grouped), methods=self.methods, rules={RULE: ""}, metric=metric,
            references=dict.fromkeys(self.methods[1:], "erm"),
        ).comparisons  # fmt: skip
        assert all(row.share_images == 1 for row in compared), "a variance is missing"

    def read(self) -> None:
        for one in self.predictions(False):
            (one.predicted == one.images.labels).mean()


def rows_of(run: Run, turns: int) -> Iterator[dict[str, Any]]:
    run.read()
    for metric, grouped in METRICS:
        took, ratios = [], []
        memory = PeakMemory(torch.device("cpu"))
        for _ in range(turns):
            took.append(seconds_of(lambda metric=metric, grouped=grouped: run.summary(metric, grouped)))
            ratios.append(took[-1] / seconds_of(run.read))
        yield {
            "what": f"{metric}, {'groups' if grouped else 'independent images'}",
            "seconds": statistics.median(took),
            "over_reading": statistics.median(ratios),
            "peak_mb": (memory.peak or 0) / 1e6,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1_000_000)
    parser.add_argument("--methods", type=int, default=10, help="methods, ERM included (default: 10)")
    parser.add_argument("--seeds", type=int, default=10, help="seeds of each method (default: 10)")
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), arguments.images, arguments.methods, arguments.seeds)
        print("| what | seconds | ÷ reading | peak, MB |\n|---|---:|---:|---:|")
        found = []
        for row in rows_of(run, arguments.turns):
            found.append(row)
            print(
                f"| {row['what']} | {row['seconds']:.1f} | {row['over_reading']:.1f} | {row['peak_mb']:.0f} |",
                flush=True,
            )
    print(json.dumps({**vars(arguments), "rows": found}))


if __name__ == "__main__":
    main()
