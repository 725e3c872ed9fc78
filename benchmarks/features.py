"""How fast features are extracted, against what the machine could do, and how soon cached ones can be used.

    python benchmarks/features.py                              MobileNetV2 with random weights on made-up JPEG images
    python benchmarks/features.py --images FOLDER --weights FILE --model-kwargs '{"bn_eps": 1e-3, "pad_type": "same"}'
    python benchmarks/features.py --rounds 0 --rows 0 --sizes mobilenetv2_100 resnet50     batch sizes alone
    python benchmarks/features.py --rows 1000000 --rounds 0 --keep FOLDER    a warm start alone

Extraction. Every round measures, one after the other, so that other programs disturb all alike:

f           images per second of the forward pass alone, on preprocessed images in memory: of batch sizes from 2 to 64,
            both memory layouts, and one thread or one per core, those that were fastest on a few images; freed memory
            is kept. `--sizes` prints the speeds of all batch sizes in the layout channels last
d           images per second of reading, decoding and preprocessing alone, by as many processes as there are cores
workers n   images per second of `extract` with that number of workers, from an empty cache to features in memory;
            "default": `features.workers: null`
bound       on a CPU, where both need the cores, 1 / (1/f + 1/d); on a GPU the smaller of f and d
share       images per second of `extract` / bound, of the same round

A number is the median over the rounds. With `--threads 1` all is processor time instead of wall time: it shows the work
that extraction adds to decoding and encoding, but not what is lost by waiting. Other programs disturb it less.

Warm start. `--rows` tiny files in folders, with made-up features of 512 numbers in the cache. Timed are the steps of a
run up to its first batch that depend on the number of images, in seconds and in seconds per million rows; the files are
in the cache of the system. With `--keep FOLDER` the second run of the same command measures a process that has made
nothing. Memory that a virtual machine uses for the first time may be slow, 2 s per GB on one: see a third run, too.

benchmarks/results.md, "Speed of extraction", has measured numbers. The last line is JSON.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

from xdm_ft.data.folder import Folder
from xdm_ft.encoders import Encoder, Portable
from xdm_ft.encoders.timm import Timm
from xdm_ft.features import FeatureSettings
from xdm_ft.features.cache import Features, cache_folder
from xdm_ft.features.extract import cached_views, extract, frozen_copy
from xdm_ft.features.hashes import hash_files
from xdm_ft.image_files.files import ImageFiles
from xdm_ft.images import ImageDataset
from xdm_ft.images.loader import DTYPES, image_loader, iterate_batches
from xdm_ft.images.transforms import Preprocessing, PreprocessingOverrides, evaluation_transform
from xdm_ft.protocol.splits import Protocol, splits
from xdm_ft.runtime.machine import retain_freed_memory

SHARD = 1024  # rows of a made-up shard: as extraction cuts a million
WIDTH = 512  # of made-up features
BATCH = 96  # of the first step
BATCH_SIZES = (2, 4, 8, 16, 32, 64)
LAYOUTS = (torch.channels_last, torch.contiguous_format)
FEW = 64  # images that choose among them


class Some(ImageFiles):
    """The first image files of a list, all of one class and domain."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths, self.shown, self.base = list(paths), list(paths), ""
        self.class_names, self.domain_names = ("all",), ("all",)
        self.labels = self.domains = np.zeros(len(paths), np.int64)


class Decoded(Dataset[Tensor]):
    """Item `rows` is a batch of preprocessed images, written as plainly as possible."""

    def __init__(self, dataset: ImageDataset, preprocessing: Preprocessing) -> None:
        self.dataset, self.transform = dataset, evaluation_transform(preprocessing)

    def __getitem__(self, rows: list[int]) -> Tensor:
        return torch.stack([self.transform(self.dataset.image(row)) for row in rows])


class Nothing(Encoder):
    """The encoder of the made-up features, which no image passes through."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        nn.init.ones_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)
        self.width, self.preprocessing = WIDTH, Preprocessing(mean=(0.5,) * 3, std=(0.5,) * 3, size=8)
        self.stage_names, self.pretraining, self.normalize = (), "none", False

    def forward(self, images: Tensor) -> Tensor:
        raise AssertionError("every feature is in the cache")

    def identity(self) -> dict[str, object]:
        return {"component": "nothing"}

    def portable(self) -> Portable:
        return Portable({}, self.state_dict())


def made_up_images(folder: Path, count: int) -> list[str]:
    """Writes smooth JPEG images of 256 pixels, which take about as long to decode as photographs. Returns the paths."""
    generator, paths = np.random.default_rng(0), []
    for number in range(count):
        coarse = Image.fromarray(generator.integers(0, 256, (16, 16, 3), dtype=np.uint8))
        paths.append(str(folder / f"{number:05d}.jpg"))
        coarse.resize((256, 256), Image.Resampling.BICUBIC).save(paths[-1], quality=90)
    return paths


def chosen_images(root: Path, count: int) -> list[str]:
    """Returns `count` images below a folder, from all over it."""
    paths = sorted(str(path) for path in root.rglob("*") if path.is_file())
    return [paths[place] for place in np.linspace(0, len(paths) - 1, min(count, len(paths))).astype(int)]


def seconds() -> float:
    """Wall time; with one thread the processor time of this process and of its workers that have ended."""
    return sum(os.times()[:4]) if torch.get_num_threads() == 1 else time.perf_counter()


class Forward(NamedTuple):
    """A way to compute the forward pass. `model`: of `frozen_copy`, in the layout of `pixels` [B,3,S,S]."""

    model: Encoder
    pixels: Tensor
    threads: int

    def rate(self, images: int) -> float:
        """Images per second; the pixels pass through as often as `images` need."""
        passes, before = max(1, images // len(self.pixels)), torch.get_num_threads()
        torch.set_num_threads(self.threads)
        with torch.inference_mode():
            self.model(self.pixels).cpu()
            started = seconds()
            for _ in range(passes):
                z = self.model(self.pixels)
            z.cpu()  # waits for a GPU
        took = seconds() - started
        torch.set_num_threads(before)
        return passes * len(self.pixels) / took

    def __str__(self) -> str:
        layout = "channels last" if self.pixels.is_contiguous(memory_format=torch.channels_last) else "contiguous"
        return f"{len(self.pixels)} images, {layout}, {self.threads} thread(s)"


def fastest(model: Encoder, pixels: Tensor) -> Forward:
    """Returns the fastest way of all batch sizes, layouts and numbers of threads; `pixels` [64,3,S,S]."""
    threads = sorted({1, torch.get_num_threads()})
    models = [copy.deepcopy(model).to(memory_format=layout) for layout in LAYOUTS]
    ways = [
        Forward(own, pixels[:size].contiguous(memory_format=layout), number)
        for (own, layout), size, number in itertools.product(zip(models, LAYOUTS, strict=True), BATCH_SIZES, threads)
    ]
    return max(ways, key=lambda way: way.rate(FEW))


def batch_sizes(given: argparse.Namespace) -> dict[str, list[float]]:
    """Measures f of models with random weights at each batch size, and prints a table."""
    found: dict[str, list[float]] = {}
    print("| images in a pass | " + " | ".join(map(str, BATCH_SIZES)) + " |\n|---|" + "---:|" * len(BATCH_SIZES))
    for name in given.sizes:
        encoder = Timm(model=name, weights=None, preprocessing=PreprocessingOverrides(size=given.size))
        model = frozen_copy(encoder, given.precision, torch.device("cpu"))
        pixels = torch.randn(max(BATCH_SIZES), 3, given.size, given.size, dtype=DTYPES[given.precision])
        pixels = pixels.contiguous(memory_format=torch.channels_last)
        ways = [Forward(model, pixels[:size], torch.get_num_threads()) for size in BATCH_SIZES]
        found[name] = [way.rate(FEW) for way in ways]
        print(f"| {name} | " + " | ".join(f"{rate:.1f}" for rate in found[name]) + " |", flush=True)
    return found


def decoding_rate(dataset: ImageDataset, preprocessing: Preprocessing, batch: int) -> float:
    """Images per second of as many processes as there are cores, which have been started before."""
    rows = list(range(len(dataset)))
    batches = [rows[first : first + batch] for first in range(0, len(rows), batch)]
    workers = 0 if torch.get_num_threads() == 1 else len(os.sched_getaffinity(0))
    loader = image_loader(
        Decoded(dataset, preprocessing), workers, torch.device("cpu"), batch_size=None, sampler=batches,
        persistent_workers=workers > 0,
    )  # fmt: skip
    for again in (False, True):
        started = seconds()
        for _ in loader if again else iterate_batches(loader, "benchmark", ""):
            pass
    return len(dataset) / (seconds() - started)


def extraction_rate(
    encoder: Encoder, dataset: ImageDataset, device: torch.device, settings: dict[str, object]
) -> float:
    """Images per second of `extract` into an empty cache. The files were hashed before."""
    with tempfile.TemporaryDirectory() as cache:
        block = FeatureSettings.model_validate({"dir": cache, **settings})
        hashes = hash_files(dataset, cache_folder(block), show=False)
        started = seconds()
        found = extract(encoder, dataset, hashes, block, on_bad_image="error", device=device, show=False)
        return found.extracted / (seconds() - started)


def extraction(given: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Measures extraction, and prints its table."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    overrides = PreprocessingOverrides(size=given.size, crop=1.0, mean=(0.5,) * 3, std=(0.5,) * 3)
    encoder = Timm(model=given.model, weights=given.weights, kwargs=given.model_kwargs, preprocessing=overrides)
    paths = chosen_images(given.images, given.count) if given.images else made_up_images(folder, given.count)
    dataset, stored = Some(paths), DTYPES[given.precision]
    model = frozen_copy(encoder, given.precision, device)
    first = Decoded(dataset, encoder.preprocessing)[list(range(max(BATCH_SIZES)))]
    forward = fastest(model, first.to(device, stored))
    found: dict[str, list[float]] = {}
    for _ in range(given.rounds):
        f = forward.rate(len(dataset))
        d = decoding_rate(dataset, encoder.preprocessing, given.batch)
        bound = min(f, d) if device.type == "cuda" else 1 / (1 / f + 1 / d)
        speeds = {"f": f, "d": d, "bound": bound}
        for workers in given.workers:
            settings = {"workers": workers, "batch_size": given.batch, "precision": given.precision}
            speed = extraction_rate(encoder, dataset, device, settings)
            name = "workers_default" if workers is None else f"workers_{workers}"
            speeds |= {name: speed, f"{name}_share": speed / bound}
        for name, value in speeds.items():
            found.setdefault(name, []).append(value)
    medians = {name: statistics.median(values) for name, values in found.items()}
    print(f"f: {forward}; extraction: {given.batch} images\n")
    print("| | images/s | share | shares of the rounds |\n|---|---:|---:|---|")
    for name, value in medians.items():
        if not name.endswith("_share"):
            shares = found.get(f"{name}_share", [])
            share = f"{statistics.median(shares):.3f}" if shares else ""
            print(f"| {name} | {value:.1f} | {share} | {' '.join(f'{one:.3f}' for one in shares)} |")
    about = {"device": str(device), "threads": torch.get_num_threads(), "images": len(dataset), "model": given.model}
    return {**about, "precision": given.precision, "batch": given.batch, "forward": str(forward), **medians}


def made_up_tree(root: Path, rows: int) -> None:
    """Writes tiny files that all differ, as <domain>/<class>/<number>.png."""
    for place in range(20):
        folder = root / "abcd"[place % 4] / str(place // 4)
        folder.mkdir(parents=True)
        for number in range(place, rows, 20):
            (folder / f"{number:08d}.png").write_bytes(b"%d" % number)


def made_up_features(dataset: ImageDataset, settings: FeatureSettings) -> None:
    """Fills the cache."""
    images = hash_files(dataset, cache_folder(settings), show=False).images
    ((_, store),) = cached_views(Nothing(), dataset, images, settings, (), torch.device("cpu"))
    features = torch.randn(SHARD, WIDTH)
    with store.filling():
        missing = store.missing()
        for first in range(0, len(missing), SHARD):
            numbers = missing[first : first + SHARD]
            store.add(store.write(numbers, features[: len(numbers)], {}), numbers)


class Timer:
    """Seconds of named steps, and how many of them processors spent on this process and its children."""

    def __init__(self) -> None:
        self.seconds: dict[str, tuple[float, float]] = {}

    @contextmanager
    def of(self, step: str) -> Iterator[None]:
        started = time.perf_counter(), sum(os.times()[:4])
        yield
        self.seconds[step] = time.perf_counter() - started[0], sum(os.times()[:4]) - started[1]


def warm_start(rows: int, folder: Path) -> dict[str, object]:
    """Measures a warm start, and prints its table."""
    settings, made = FeatureSettings(dir=folder / "cache"), folder / "made"
    if not made.exists():
        made_up_tree(folder / "images", rows)
        made_up_features(Folder(root=folder / "images"), settings)
        os.sync()  # or the system would write them to the disk meanwhile
        made.touch()
    timer = Timer()
    with timer.of("list the files"):
        dataset = Folder(root=folder / "images")
    with timer.of("splits of a seed"):
        splits(dataset, Protocol(), seed=0)
    with timer.of("hashes"):
        hashes = hash_files(dataset, cache_folder(settings), show=False)
    with timer.of("copies of images"):
        hashes.duplicates()
    with timer.of("features"):
        features: Features = extract(
            Nothing(), dataset, hashes, settings, on_bad_image="error", device="cpu", show=False
        )
    with timer.of("first batch"):
        features[torch.randint(0, rows, (BATCH,))]
    wall, processor = zip(*timer.seconds.values(), strict=True)
    timer.seconds["all"] = sum(wall), sum(processor)
    print("\n| warm start | seconds | processor | per million rows | processor |\n|---|---:|---:|---:|---:|")
    per_million = {step: [1e6 * one / rows for one in seconds] for step, seconds in timer.seconds.items()}
    for step, seconds in timer.seconds.items():
        print(f"| {step} | {' | '.join(f'{one:.2f}' for one in (*seconds, *per_million[step]))} |")
    return {"rows": rows, "width": WIDTH, "in_memory": features.in_memory, "seconds_per_million": per_million}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    number_or_default: Callable[[str], int | None] = lambda text: None if text == "default" else int(text)  # noqa: E731
    parser.add_argument("--images", type=Path, help="folder of images (default: made-up ones)")
    parser.add_argument("--count", type=int, default=512, help="images of each measurement (default: 512)")
    parser.add_argument("--model", default="mobilenetv2_100", help="of timm (default: mobilenetv2_100)")
    parser.add_argument("--model-kwargs", type=json.loads, default={}, help="its arguments, as JSON")
    parser.add_argument("--weights", help="file with its weights (default: random)")
    parser.add_argument("--size", type=int, default=224, help="pixels (default: 224)")
    own = FeatureSettings().batch_size
    parser.add_argument("--batch", type=int, default=own, help=f"features.batch_size (default: {own} here)")
    parser.add_argument("--precision", default="fp32", choices=sorted(DTYPES))
    parser.add_argument("--sizes", nargs="+", metavar="MODEL", help="models of timm whose batch sizes are measured")
    parser.add_argument("--given-back", action="store_true", help="keep no freed memory before the first extraction")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of PyTorch (default: cores)")
    parser.add_argument("--workers", type=number_or_default, nargs="+", default=[None, 0, 1, 2])
    parser.add_argument("--rounds", type=int, default=3, help="0: no measurement of extraction")
    parser.add_argument("--rows", type=int, default=100_000, help="of the warm start; 0: none")
    parser.add_argument("--keep", help="folder for the files of the warm start, which the same command uses again")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if not given.given_back:
        retain_freed_memory()
    results: dict[str, object] = {"cores": len(os.sched_getaffinity(0)), "torch": torch.__version__}
    if given.sizes:
        results["sizes"] = batch_sizes(given)
    if given.rounds:
        with tempfile.TemporaryDirectory() as folder:
            results["extraction"] = extraction(given, Path(folder))
    if given.rows:
        with nullcontext(given.keep) if given.keep else tempfile.TemporaryDirectory() as folder:
            results["warm_start"] = warm_start(given.rows, Path(folder))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
