"""How fast heads train on cached features: ERM and XDomainMix, one head and banks of many.

    python benchmarks/heads.py                        everything, under 3 minutes
    python benchmarks/heads.py --heads 1 64 --seconds 0.2
    python benchmarks/heads.py --device cuda          the banks on a GPU, against a copy on that GPU
    python benchmarks/heads.py --counts               operators and host time, and nothing else
    python benchmarks/heads.py --chunks 8 16 32 64    compares chunk sizes, to choose CHUNK_HEADS of the bank

All timings are taken in this process, in turns, so that other programs disturb all of them alike; a number is the
median over the turns. With one thread it is processor time, without time spent waiting for other programs; with more
threads it is wall time. A step is: gather the batch, loss, gradients, update (Adam). Every XDomainMix step mixes (no
warm-up).

single heads    XDomainMix ÷ the faster of two ERM steps: this package's, and a plain loop (index, nn.Linear,
                cross_entropy, backward, Adam with fused=True).
banks           Head-steps per second of H heads, trained in the same chunks as in a run, and the speed-up over H
                trainings one after the other. Each chunk size is timed once. Building models, drawing the first
                batches and evaluation are not timed.
counts          What a step asks of the processor that drives a GPU. Operators: launched by one step of a bank, whatever
                its number of heads, counted on the device `meta`, which takes the code path of a GPU and computes
                nothing; views do not count, and the Triton kernel of the masks counts as one. (A step that reads a
                value back fails there, as `meta` has none.) Host: milliseconds of a step of one head with 2 samples per
                domain and 4 features on a CPU, which is nearly all Python and dispatch. Evaluation: operators, values
                read back and milliseconds of an evaluation of 32 heads on 1,500 images, by the accuracy of two rules.
memory          Bytes that a head-step moves, counted by hand in `moved`, divided by the bytes that every implementation
                must move: the features of the batch once; weights and Adam's moments, read and written once. Also moved
                bytes per second, divided by the bandwidth of a copy of 256 MB (caches can be faster).

benchmarks/results.md, "Speed", has measured numbers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from xdm_ft.algorithms import Algorithm, Setup
from xdm_ft.algorithms.erm import ERM
from xdm_ft.algorithms.xdomainmix import XDomainMix
from xdm_ft.core import Annotations, Batch, Criteria, ModelKey, Task
from xdm_ft.features.cache import Features
from xdm_ft.protocol.splits import Split
from xdm_ft.runtime.machine import retain_freed_memory
from xdm_ft.sharpness.sam import SAM
from xdm_ft.training import Job, Training
from xdm_ft.training.bank.data import BankValidation, CachedData, batches
from xdm_ft.training.bank.step import Bank, step
from xdm_ft.training.bank.train import chunk_heads
from xdm_ft.xdomainmix import masks as xdomainmix_masks

IMAGES = 10_000
STEPS = 100_000  # of the schedule; more than are timed
TURNS = 7
METHODS: dict[str, type[Algorithm]] = {"erm": ERM, "xdomainmix": XDomainMix}
COUNTED = [*METHODS, "erm+sam", "xdomainmix+sam"]


EVALUATED = Criteria(("train_val", "oracle"), "accuracy")


class Shape(NamedTuple):
    batch: int
    width: int
    classes: int
    domains: int

    def __str__(self) -> str:
        return "B {} K {} C {} D {}".format(*self)


SHAPES = [Shape(32, 512, 2, 3), Shape(96, 1280, 7, 3), Shape(256, 512, 62, 11)]


def clock() -> float:
    """Seconds, after the GPU has finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def timed(runs: Mapping[str, Callable[[int], None]], seconds: float) -> dict[str, float]:
    """Returns the median seconds per step of each `run(n)`, which takes n steps. Each one runs for about `seconds`."""
    steps: dict[str, int] = {}
    turns: dict[str, list[float]] = {name: [] for name in runs}
    for name, run in runs.items():
        run(2)
        started = clock()
        run(2)
        steps[name] = max(1, int(seconds / TURNS / (clock() - started) * 2))
    for _ in range(TURNS):
        for name, run in runs.items():
            started = clock()
            run(steps[name])
            turns[name].append((clock() - started) / steps[name])
    return {name: statistics.median(taken) for name, taken in turns.items()}


def data_of(shape: Shape, device: str) -> CachedData:
    """Random features like those of a CNN after pooling: positive, with a different scale in each dimension."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(IMAGES, shape.width, generator=generator).abs() * torch.rand(shape.width, generator=generator)
    labels = torch.randint(0, shape.classes, (IMAGES,), generator=generator)
    domains = torch.arange(IMAGES) % shape.domains
    return CachedData(Features([z.to(device)]), Annotations(labels, domains, domains).to(torch.device(device)))


def job_of(method: str, shape: Shape, data: CachedData, seed: int) -> Job:
    names = tuple(str(d) for d in range(shape.domains))
    domains = data.annotations.domains.cpu()
    pools = tuple((domains == d).nonzero()[:, 0] for d in range(shape.domains))
    evaluation = {"train_val": torch.arange(1000), "test_val": torch.arange(1000, 1500)}
    split = Split(("held out",), names, train=pools, evaluation=evaluation, domain_of=torch.arange(shape.domains))
    task = Task(tuple(str(c) for c in range(shape.classes)), names)
    name, _, sharpness = method.partition("+")
    settings = {"warmup_steps": 0, "quantile_steps": 10} if name == "xdomainmix" else {}
    return Job(
        ModelKey(method, ("held out",), seed, 0), split, Setup(task, shape.width, STEPS, seed),
        lambda setup: METHODS[name](setup, **settings), SAM() if sharpness else None, training_of(shape),
    )  # fmt: skip


def training_of(shape: Shape) -> Training:
    return Training(batch_size=shape.batch, sampler="pooled", optimizer="adam", lr=1e-3, weight_decay=1e-4)


def bank(method: str, shape: Shape, data: CachedData, heads: int, compiles: bool = False) -> Callable[[int], None]:
    """Returns a function that takes n steps of a bank of `heads` heads."""
    jobs = [job_of(method, shape, data, seed) for seed in range(heads)]
    trained, coming = Bank(jobs, data.features.device, compiles), enumerate(batches(jobs, data))

    def run(steps: int) -> None:
        for _ in range(steps):
            number, batch = next(coming)
            step(trained, batch, number)

    return run


class Operators(TorchDispatchMode):
    """Counts the operators that compute or copy something."""

    number = 0

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        # what detaches or allocates computes nothing either
        self.number += not (function.is_view or function.overloadpacket.__name__ in {"detach", "empty", "empty_like"})
        return function(*given, **(named or {}))


class Reads(TorchFunctionMode):
    """Counts the reads of values by Python, each of which waits for a GPU."""

    READING = {"cpu", "item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__"}
    number = 0

    def __torch_function__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        self.number += getattr(function, "__name__", "") in self.READING
        return function(*given, **(named or {}))


def operators(method: str) -> int:
    """Operators of a step of two heads on the device `meta`."""
    shape = SHAPES[0]
    data = data_of(shape, "cpu")
    jobs = [job_of(method, shape, data, seed) for seed in range(2)]
    batch = next(iter(batches(jobs, data)))
    on_meta = Batch(**{name: value.to("meta") for name, value in batch.fields().items()})
    trained = Bank(jobs, torch.device("meta"))
    masks = patch.object(
        xdomainmix_masks, "exceeds_by_sorting", lambda rows, ranks: rows > 0
    )  # the Triton kernel needs values
    no_autocast = patch.object(torch, "autocast", lambda *given, **named: nullcontext())  # it does not know `meta`
    with masks, no_autocast, Operators() as counted:
        step(trained, on_meta, 0)
    return counted.number


def counts(seconds: float) -> dict[str, dict[str, float]]:
    """{method: operators per step, milliseconds of the host per step}, and the same of an evaluation of 32 heads."""
    tiny = Shape(6, 4, 2, 3)
    data = data_of(tiny, "cpu")
    host = timed({method: bank(method, tiny, data, 1) for method in COUNTED}, seconds)
    found: dict[str, dict[str, float]] = {
        method: {"operators": operators(method), "host_ms": 1e3 * host[method]} for method in COUNTED
    }
    shape = SHAPES[1]
    data = data_of(shape, "cpu")
    jobs = [job_of("erm", shape, data, seed) for seed in range(32)]
    trained, validation = Bank(jobs, torch.device("cpu")), BankValidation(jobs, data, EVALUATED)

    def evaluate(times: int) -> None:
        for _ in range(times):
            validation.values(trained.template, trained.main)

    with Operators() as launched, Reads() as read:
        evaluate(1)
    took = timed({"evaluation": evaluate}, seconds)["evaluation"]
    return found | {"evaluation": {"operators": launched.number, "reads": read.number, "host_ms": 1e3 * took}}


def plain_loop(shape: Shape, data: CachedData) -> Callable[[int], None]:
    """Returns a function that takes n steps of ERM, written by hand."""
    device = data.features.device
    features, labels = data.features[torch.arange(IMAGES, device=device)], data.annotations.labels
    head = nn.Linear(shape.width, shape.classes, device=device)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-3, weight_decay=1e-4, fused=True)
    rows = torch.randint(0, IMAGES, (512, shape.batch), device=device)

    def run(steps: int) -> None:
        for number in range(steps):
            index = rows[number % len(rows)]
            optimizer.zero_grad()
            F.cross_entropy(head(features[index]), labels[index]).backward()
            optimizer.step()

    return run


def parameters(method: str, shape: Shape) -> int:
    outputs = shape.classes + (shape.domains if method == "xdomainmix" else 0)
    return outputs * (shape.width + 1)


def must_move(method: str, shape: Shape) -> int:
    """Bytes that every implementation of a head-step moves: features once; weights and Adam's two moments twice."""
    return 4 * (shape.batch * shape.width + 6 * parameters(method, shape))


def moved(method: str, shape: Shape) -> int:
    """Bytes that our head-step moves: every large tensor, each time it is read or written."""
    features, mask = 4 * shape.batch * shape.width, shape.batch * shape.width
    gather = 2 * features
    passes = gather + 2 * features  # the product with the head, forward and for its gradient
    if method == "xdomainmix":
        augmenting = features + 2 * mask + features  # z is read; both masks and z̃ are written
        # and z̃ goes through the class head, z through the domain head
        passes += augmenting + 2 * 2 * features
    weights = 4 * parameters(method, shape)
    return passes + weights * (1 + 1 + 7)  # forward, gradient, and the update: 4 tensors read, 3 written


def copy_bandwidth(device: str) -> float:
    """Bytes per second that a copy reads and writes."""
    source = torch.ones(1 << 26, device=device)
    target = torch.empty_like(source)

    def run(steps: int) -> None:
        for _ in range(steps):
            target.copy_(source)

    seconds = timed({"copy": run}, 0.5)["copy"]
    return 2 * source.nbytes / seconds


def single_heads(shape: Shape, data: CachedData, seconds: float) -> dict[str, float]:
    """Milliseconds per step of one head, and XDomainMix ÷ the faster ERM."""
    runs = {"plain_erm": plain_loop(shape, data)} | {method: bank(method, shape, data, 1) for method in METHODS}
    found = {name: 1e3 * value for name, value in timed(runs, seconds).items()}
    return found | {"ratio": found["xdomainmix"] / min(found["plain_erm"], found["erm"])}


def banks(method: str, shape: Shape, data: CachedData, heads: Sequence[int], seconds: float) -> list[dict[str, float]]:
    """For each number of heads: head-steps per second, and the speed-up over separate trainings."""
    at_once = chunk_heads(job_of(method, shape, data, 0), data.features.device)
    cuts = {number: [at_once] * (number // at_once) + [number % at_once] * (number % at_once > 0) for number in heads}
    sizes = sorted({1, *(size for cut in cuts.values() for size in cut)})
    took = timed({str(size): bank(method, shape, data, size) for size in sizes}, seconds)
    rows = []
    for number, cut in cuts.items():
        rate = number / sum(took[str(size)] for size in cut)
        rows.append({"heads": number, "head_steps_per_second": rate, "times_separate": rate * took["1"]})
    return rows


def chunk_sweep(method: str, shape: Shape, data: CachedData, sizes: Sequence[int], seconds: float) -> dict[str, float]:
    """{number of heads trained at once: milliseconds per head-step}"""
    took = timed({str(size): bank(method, shape, data, size) for size in sizes}, seconds)
    return {size: 1e3 * value / int(size) for size, value in took.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--heads", type=int, nargs="+", default=[1, 16, 64, 240, 1000], help="sizes of banks")
    parser.add_argument("--chunks", type=int, nargs="+", help="compare these chunk sizes, and nothing else")
    parser.add_argument("--seconds", type=float, default=1.5, help="time to measure each number")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--counts", action="store_true", help="count operators and host time, and nothing else")
    given = parser.parse_args()
    retain_freed_memory()
    torch.set_num_threads(given.threads)
    results: dict[str, object] = {"threads": given.threads, "device": given.device, "torch": torch.__version__}
    if not given.chunks:
        counted = results["counts"] = counts(given.seconds)
        for name, row in counted.items():
            print(f"  {name:<15} " + "  ".join(f"{key} {value:.4g}" for key, value in row.items()))
    if given.counts:
        print(json.dumps(results))
        return
    copy = copy_bandwidth(given.device)
    results["copy_gb_per_second"] = copy / 1e9
    print(f"{given.device}, threads {given.threads}, copy {copy / 1e9:.1f} GB/s")
    for shape in SHAPES:
        data = data_of(shape, given.device)
        found: dict[str, object] = {}
        print(f"\n{shape}")
        if given.chunks:
            for method in METHODS:
                swept = found[method] = chunk_sweep(method, shape, data, given.chunks, given.seconds)
                print(f"  {method:<11} " + "  ".join(f"{size}: {ms:.3f} ms" for size, ms in swept.items()))
            results[str(shape)] = found
            continue
        one = found["single"] = single_heads(shape, data, given.seconds)
        print(
            f"  one head: plain ERM {one['plain_erm']:.3f} ms, ERM {one['erm']:.3f} ms, "
            f"XDomainMix {one['xdomainmix']:.3f} ms = {one['ratio']:.1f} × the faster ERM"
        )
        for method in METHODS:
            rows = found[method] = banks(method, shape, data, given.heads, given.seconds)
            excess = moved(method, shape) / must_move(method, shape)
            for row in rows:
                row["moved_over_needed"] = excess
                row["bandwidth_over_copy"] = row["head_steps_per_second"] * moved(method, shape) / copy
                print(
                    f"  {method:<11} {row['heads']:>5} heads {row['head_steps_per_second']:>9.0f} head-steps/s "
                    f"{row['times_separate']:>5.1f} × separate, moved {excess:.1f} × needed, "
                    f"{row['bandwidth_over_copy']:.2f} × copy bandwidth"
                )
        results[str(shape)] = found
    print()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
