"""How fast JPEG decoders are, and how far their pixels are from Pillow's, with which images are decoded.

    python benchmarks/decoders.py --images FOLDER        its images, encoded as JPEG of quality 90 at each of --sizes
    pip install "pyvips[binary]" simplejpeg              decoders that are left out where they are missing

decode      images per second from bytes to RGB pixels (Pillow's draft mode: to pixels of at least the wanted size)
whole       images per second from bytes to the encoder's input of 224 × 224, resized by Pillow in all cases
mean, most  differences of the input's pixels (0 to 255) from those with Pillow: mean of all, and the greatest

All on one core, in processor time: medians over rounds that measure one decoder after the other. The last line is JSON.
benchmarks/results.md, "Decoders", has measured numbers.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from xdm_ft.images.transforms import Preprocessing, resizing_transform

Decoder = Callable[[bytes], Image.Image]
SIDE = 224


def pillow(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def pillow_draft(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    image.draft("RGB", (2 * SIDE, 2 * SIDE))
    return image.convert("RGB")


def torchvision(data: bytes) -> Image.Image:
    from torchvision.io import ImageReadMode, decode_jpeg

    pixels = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)  # [3,H,W]
    return Image.fromarray(pixels.permute(1, 2, 0).numpy())


def turbojpeg(data: bytes) -> Image.Image:
    return Image.fromarray(library("simplejpeg").decode_jpeg(data))


def vips(data: bytes) -> Image.Image:
    return Image.fromarray(library("pyvips").Image.new_from_buffer(data, "").numpy())


def library(name: str) -> Any:
    return importlib.import_module(name)


DECODERS: dict[str, tuple[Decoder, str]] = {
    "Pillow": (pillow, "PIL"),
    "Pillow, draft mode": (pillow_draft, "PIL"),
    "torchvision.io": (torchvision, "torchvision"),
    "simplejpeg (libjpeg-turbo)": (turbojpeg, "simplejpeg"),
    "pyvips": (vips, "pyvips"),
}


def made(folder: Path, size: int, count: int) -> list[bytes]:
    """Returns images of the folder as JPEG, the shorter side scaled to `size` pixels."""
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in Image.registered_extensions())
    found = []
    for path in files[:: max(1, len(files) // count)][:count]:
        image = Image.open(path).convert("RGB")
        scale = size / min(image.size)
        buffer = io.BytesIO()
        image.resize([round(side * scale) for side in image.size], Image.Resampling.BICUBIC).save(
            buffer, "JPEG", quality=90
        )
        found.append(buffer.getvalue())
    return found


def seconds(work: Callable[[bytes], object], images: list[bytes]) -> float:
    began = time.process_time()
    for data in images:
        work(data)
    return time.process_time() - began


def measure(images: list[bytes], rounds: int) -> list[dict[str, Any]]:
    resize = resizing_transform(Preprocessing(size=SIDE, mean=(0.5,) * 3, std=(0.5,) * 3))
    decoders = {name: decode for name, (decode, needs) in DECODERS.items() if importlib.util.find_spec(needs)}
    plain = [np.asarray(resize(pillow(data)), np.int16) for data in images]
    rows = []
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in decoders}
    for _ in range(rounds):
        for name, decode in decoders.items():
            whole = seconds(lambda data, decode=decode: resize(decode(data)), images)  # type: ignore[misc]
            times[name].append((seconds(decode, images), whole))
    for name, decode in decoders.items():
        apart = [np.abs(np.asarray(resize(decode(data)), np.int16) - x) for data, x in zip(images, plain, strict=True)]
        decoded, whole = (len(images) / statistics.median(each) for each in zip(*times[name], strict=True))
        most, mean = max(int(x.max()) for x in apart), float(np.mean([x.mean() for x in apart]))
        rows.append({"decoder": name, "decode": decoded, "whole": whole, "mean": mean, "most": most})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True, help="folder with images")
    parser.add_argument("--sizes", type=int, nargs="+", default=[227, 1000, 2000], help="shorter sides, pixels")
    parser.add_argument("--count", type=int, default=60, help="images of each size")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for size in options.sizes:
        found[size] = measure(made(options.images, size, options.count), options.rounds)
        print(f"shorter side {size} px\n{'decoder':28}{'decode/s':>10}{'whole/s':>10}{'mean':>8}{'most':>6}")
        for row in found[size]:
            print("{decoder:28}{decode:10.0f}{whole:10.0f}{mean:8.3f}{most:6d}".format(**row))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
