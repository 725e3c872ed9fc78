"""What both MMDs say about samples of one distribution, and whether the standard error of the unbiased one holds.

    python benchmarks/divergence.py                    Gaussian samples, one minute
    python benchmarks/divergence.py --features DIR     features of images too: DIR is a folder of the feature cache with
                                                       a manifest.json (`xdm-ft cache ls` lists them)

Each row draws pairs of samples of n each. The kernel's bandwidths come from 500 other samples, so that the kernel does
not depend on the data. `mean ± its error` of unbiased MMD² should agree with the truth; `error` (the root mean square
of the stated standard errors) with `spread` (the standard deviation of the estimates); `covered` is the share of pairs
whose MMD² is within 1.96 standard errors of the truth. The truth of a shift is a closed form.

With images a second table follows: features of one half of them against those of the other half plus Gaussian noise
("apart"), and each batch of the other half against itself plus noise ("paired", as the authors' program compares).

benchmarks/results.md, "Divergence of two samples of one distribution", has measured numbers.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from xdm_ft.analysis.divergence import median_bandwidths, published_mmd, published_mmd_of_batches, unbiased_mmd2
from xdm_ft.features.cache import open_shard

REPETITIONS = {8: 2000, 32: 1000, 128: 400, 512: 100}
FOR_BANDWIDTHS = 500
Draw = Callable[[int], tuple[Tensor, Tensor]]


def stored(folder: Path) -> Tensor:
    """Returns the features [n,K] of all images in a folder of the cache."""
    manifest = json.loads((folder / "manifest.json").read_text())
    shards = sorted(folder.glob("shard-*.safetensors"))
    return torch.cat([open_shard(path, folder.name, manifest["width"], torch.float32).features for path in shards])


def of_images(z: Tensor, source: torch.Generator) -> Draw:
    def draw(n: int) -> tuple[Tensor, Tensor]:
        rows = torch.randperm(len(z), generator=source)[: 2 * n]
        return z[rows[:n]], z[rows[n:]]

    return draw


def gaussian(width: int, shift: float, source: torch.Generator) -> Draw:
    def draw(n: int) -> tuple[Tensor, Tensor]:
        a, b = (torch.randn(n, width, generator=source) for _ in range(2))
        b[:, 0] += shift
        return a, b

    return draw


def truth(width: int, shift: float, bandwidths: list[float]) -> float:
    """MMD² of N(0, I) and N(shift e₁, I): E exp(−‖x − y‖²/2σ²) = (σ²/(σ²+2))^{K/2} exp(−shift²/2(σ²+2))."""
    terms = ((s**2 / (s**2 + 2)) ** (width / 2) * (1 - math.exp(-(shift**2) / (2 * (s**2 + 2)))) for s in bandwidths)
    return 2 * sum(terms) / len(bandwidths)


def row(name: str, draw: Draw, true: float, bandwidths: list[float], n: int) -> str:
    pairs = REPETITIONS[n]
    found = [(unbiased_mmd2(a, b, bandwidths), published_mmd(a, b)) for a, b in (draw(n) for _ in range(pairs))]
    values, errors, published = torch.tensor([(m.value, m.stderr, p) for m, p in found], dtype=torch.float64).T
    spread, covered = float(values.std()), float(((values - true).abs() < 1.96 * errors).double().mean())
    mean, rms = float(values.mean()), float(errors.square().mean().sqrt())
    return (
        f"| {name} | {n} | {true:.5f} | {mean:.5f} ± {spread / pairs**0.5:.5f} | {spread:.5f} | {rms:.5f} "
        f"| {100 * covered:.1f}% | {float(published.mean()):.4f} | {14 / n:.4f} |"
    )


def noisy(z: Tensor, source: torch.Generator) -> None:
    z = z[torch.randperm(len(z), generator=source)]
    original, other = z[: len(z) // 2], z[len(z) // 2 :]
    print("\n| noise, in median distances | unbiased MMD² | published, apart, n = 32 | paired, 32 | paired, 96 |")
    print("|---:|---:|---:|---:|---:|")
    distance = median_bandwidths(z[:FOR_BANDWIDTHS])[1]
    for share in (0.0, 0.03, 0.1, 0.3):
        scale = share * distance / z.shape[1] ** 0.5  # per feature: noise of `share` median distances
        changed = other + scale * torch.randn(other.shape, generator=source)
        mmd = unbiased_mmd2(original, changed)
        published = [
            published_mmd_of_batches(original, changed, 32),
            *(published_mmd_of_batches(other, changed, size) for size in (32, 96)),
        ]
        print(
            f"| {share} | {mmd.value:.5f} ± {mmd.stderr:.5f} | " + " | ".join(f"{x:.4f}" for x in published) + " |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", type=Path, help="folder of the feature cache")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    source = torch.Generator().manual_seed(0)
    cases: list[tuple[str, Draw, int, float]] = []
    if arguments.features:
        z = stored(arguments.features)
        cases.append((f"images, {len(z)} × {z.shape[1]}", of_images(z, source), z.shape[1], 0.0))
    for width, shift in ((1280, 0.0), (1, 0.0), (1280, 3.0), (20, 1.0), (1, 0.3)):
        name = f"Gaussian, K = {width}" + (f", shifted by {shift:g}" if shift else "")
        cases.append((name, gaussian(width, shift, source), width, shift))
    print("| samples | n | truth | unbiased MMD², mean | spread | error | covered | published | 14/n |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for name, draw, width, shift in cases:
        bandwidths = median_bandwidths(draw(FOR_BANDWIDTHS)[0])
        for n in REPETITIONS:
            print(row(name, draw, truth(width, shift, bandwidths), bandwidths, n), flush=True)
    if arguments.features:
        noisy(z, source)


if __name__ == "__main__":
    main()
