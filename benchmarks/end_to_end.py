"""How fast models train end to end: each method ÷ ERM, and ERM against a bare loop on tensors in memory.

    python benchmarks/end_to_end.py                                       a small ResNet at 96 px
    python benchmarks/end_to_end.py --model resnet50 --size 224 --batch 32 --precision bf16 --set compile=true
    python benchmarks/end_to_end.py --methods erm xdomainmix erm+sam --turns 9

Every method trains by `train_model`, as in a run: loader workers, transforms, draws, logging. Images are made up and
lie in memory, so decoding is not counted. A step's time is that between two advances of the progress bar; the first two
steps of a training and its evaluation are not counted. In each turn the methods train one after the other, and so does
the bare loop; ratios are medians over the turns. It is wall time, as the loader works in other processes.

step       a method's step ÷ ERM's step
memory     the most that torch allocates in a training ÷ ERM's, weights and optimizer included
bare       images per second of ERM ÷ those of: encoder, linear head, cross-entropy, backward, Adam, on batches that
           are tensors on the device already, in the same memory layout

The last line is JSON.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from accelerate import Accelerator
from PIL import Image
from torch import nn

from xdm_ft.algorithms import Algorithm, Setup
from xdm_ft.averaging.swad import SWAD
from xdm_ft.core import Annotations, Criteria, ModelKey, Task
from xdm_ft.encoders import Encoder
from xdm_ft.encoders.timm import Timm
from xdm_ft.images import ImageDataset
from xdm_ft.images.transforms import PreprocessingOverrides
from xdm_ft.protocol.splits import Split
from xdm_ft.recipe.components import find
from xdm_ft.runtime.machine import retain_freed_memory
from xdm_ft.runtime.progress import Progress
from xdm_ft.sharpness.sagm import SAGM
from xdm_ft.sharpness.sam import SAM
from xdm_ft.training import Job, Trained, Training
from xdm_ft.training.end_to_end.model import is_cnn
from xdm_ft.training.end_to_end.train import train_model

CLASSES, DOMAINS, IMAGES = 7, 3, 1200
METHODS = (
    "erm", "groupdro", "irm", "vrex", "coral", "rsc", "mixup", "lisa", "mixstyle", "dsu", "fish", "xdomainmix",
    "erm+sam", "erm+sagm", "erm+swad", "xdomainmix+sam",
)  # fmt: skip
SHARPNESS = {"sam": SAM, "sagm": SAGM}


class MadeUp(ImageDataset):
    """Random images in memory."""

    def __init__(self, side: int) -> None:
        drawn = np.random.default_rng(0)
        self.pixels = drawn.integers(0, 256, (64, side, side, 3), dtype=np.uint8)
        self.class_names = tuple(map(str, range(CLASSES)))
        self.domain_names = tuple(map(str, range(DOMAINS)))
        self.labels, self.domains = drawn.integers(0, CLASSES, IMAGES), np.arange(IMAGES) % DOMAINS

    def image(self, row: int) -> Image.Image:
        return Image.fromarray(self.pixels[row % len(self.pixels)])

    def name(self, row: int) -> str:
        return str(row)

    def content(self, row: int) -> bytes:
        return bytes(self.pixels[row % len(self.pixels)])


class Stamps(Progress):
    """A progress bar that keeps the time of each step."""

    def __init__(self) -> None:
        super().__init__("", None, "steps")
        self.at: list[float] = []

    def advance(self, n: int = 1, note: str = "") -> None:
        self.at.append(time.perf_counter())


class Bench:
    def __init__(self, arguments: argparse.Namespace) -> None:
        torch.manual_seed(0)
        retain_freed_memory()  # for the bare loop, too
        size = PreprocessingOverrides(size=arguments.size)
        self.encoder: Encoder = Timm(model=arguments.model, weights=None, preprocessing=size)
        self.dataset, self.steps = MadeUp(arguments.size), arguments.steps + 3
        self.accelerator = Accelerator(mixed_precision=arguments.precision)
        changes = {key: yaml.safe_load(value) for key, value in (one.split("=", 1) for one in arguments.set)}
        self.training = Training(batch_size=arguments.batch, evaluate_every=self.steps, **changes)
        labels, domains = torch.from_numpy(self.dataset.labels), torch.from_numpy(self.dataset.domains)
        self.annotations = Annotations(labels, domains, domains)
        pools = tuple((domains == d).nonzero()[:, 0] for d in range(DOMAINS))
        few = {"train_val": torch.arange(8)}
        self.split = Split(("none",), self.dataset.domain_names, pools, few, domain_of=torch.arange(DOMAINS))

    @property
    def batch(self) -> int:
        return self.training.images_per_step(DOMAINS)

    def job(self, method: str) -> Job:
        name, _, addition = method.partition("+")
        task = Task(self.dataset.class_names, self.dataset.domain_names)
        settings = {"warmup_steps": 0} if name == "xdomainmix" else {}

        def make(setup: Setup) -> Algorithm:
            return find("algorithms", name)(setup, **settings)

        return Job(
            ModelKey(method, ("none",), 0, 0), self.split, Setup(task, self.encoder.width, self.steps, 0), make,
            SHARPNESS[addition]() if addition in SHARPNESS else None, self.training,
            SWAD() if addition == "swad" else None,
        )  # fmt: skip

    def train(self, method: str, bar: Progress) -> Trained:
        return train_model(
            self.job(method), self.encoder, self.dataset, self.annotations, Criteria(("train_val",), "accuracy"),
            self.accelerator, batch_norm="train", record=lambda step, models: None, bar=bar,
        )  # fmt: skip

    def step_seconds(self, method: str) -> float:
        """Returns the median time of a step in one training."""
        stamps = Stamps()
        trained = self.train(method, stamps)
        assert trained.failure is None, trained.failure
        return statistics.median(np.diff(stamps.at)[1:-1])

    def bare_seconds(self) -> float:
        """Returns the median time of a step of a loop that does nothing else."""
        device = self.accelerator.device
        layout = torch.channels_last if is_cnn(self.encoder) else torch.contiguous_format  # as `train_model`
        encoder = copy.deepcopy(self.encoder).to(device, memory_format=layout).train()
        head = nn.Linear(self.encoder.width, CLASSES).to(device)
        for parameter in encoder.parameters():
            parameter.requires_grad_()
        optimizer = torch.optim.Adam([*encoder.parameters(), *head.parameters()], lr=1e-4)
        side = self.encoder.preprocessing.size
        x = [torch.randn(self.batch, 3, side, side, device=device).to(memory_format=layout) for _ in range(4)]
        y = torch.arange(self.batch, device=device) % CLASSES
        taken = []
        for step in range(self.steps):
            started = time.perf_counter()
            with self.accelerator.autocast():
                z = encoder(x[step % len(x)])
            F.cross_entropy(head(z.float()), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if device.type == "cuda":
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - started)
        return statistics.median(taken[2:])

    def peak(self, method: str) -> int:
        """Returns the most bytes that torch allocates in a training, weights and optimizer included."""
        if self.accelerator.device.type == "cuda":
            return self.train(method, Stamps()).peak_memory or 0
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            self.train(method, Stamps())
        events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
        return int(np.cumsum(sizes).max())


def measured(bench: Bench, methods: Sequence[str], turns: int) -> dict[str, dict[str, Any]]:
    runs: dict[str, Callable[[], float]] = {"bare loop": bench.bare_seconds}
    runs |= {method: lambda method=method: bench.step_seconds(method) for method in methods}
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns):
        for name, run in runs.items():
            taken[name].append(run())
            print(f"turn {turn + 1}: {name} {1e3 * taken[name][-1]:.0f} ms", end="\r", flush=True)
    found = {}
    for name, seconds in taken.items():
        ratios = [own / erm for own, erm in zip(seconds, taken["erm"], strict=True)]
        middle = statistics.median(seconds)
        found[name] = {"ms": 1e3 * middle, "images_per_second": bench.batch / middle, "step": statistics.median(ratios)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet10t", help="of timm, with random weights (default: resnet10t)")
    parser.add_argument("--size", type=int, default=96, help="pixels (default: 96)")
    parser.add_argument("--batch", type=int, default=8, help="images per domain and step (default: 8, of 3 domains)")
    parser.add_argument("--precision", default="no", help="no (default), bf16 or fp16")
    parser.add_argument("--methods", nargs="+", default=METHODS, help="erm is needed")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys of `training`")
    parser.add_argument("--steps", type=int, default=10, help="steps to time in each turn (default: 10)")
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    bench = Bench(arguments)
    found = measured(bench, arguments.methods, arguments.turns)
    bench.peak("erm")  # the first one counts what libraries keep for the others
    erm = bench.peak("erm")
    for method in arguments.methods:
        found[method]["memory"] = bench.peak(method) / erm
    print(f"{arguments.model}, {arguments.size} px, batch {bench.batch}, {torch.get_num_threads()} threads" + " " * 20)
    print("| method | ms | images per second | step ÷ ERM | memory ÷ ERM |\n|---|---:|---:|---:|---:|")
    for name, row in found.items():
        memory = f"{row['memory']:.2f}" if "memory" in row else ""
        print(f"| {name} | {row['ms']:.0f} | {row['images_per_second']:.0f} | {row['step']:.2f} | {memory} |")
    over = found["bare loop"]["step"]
    print(f"ERM reaches {100 * over:.0f}% of the images per second of the bare loop")
    about = {"threads": torch.get_num_threads(), "device": bench.accelerator.device.type, **vars(arguments)}
    print(json.dumps(about | {"bare": over, "methods": found}))


if __name__ == "__main__":
    main()
