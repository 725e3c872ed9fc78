"""What `training.compile` gains for heads on cached features, and what it costs once.

    python benchmarks/compiled_heads.py                    32 heads, ERM and XDomainMix with and without SAM;
                                                           runs do not compile XDomainMix, as its kernels are faster
    python benchmarks/compiled_heads.py --device cuda --heads 256

ms          of a step of all heads, plain and compiled, in turns in this process: medians
ratio       plain ÷ compiled
seconds     of the first compiled step: compilation
steps       after which a training has earned its compilation; −: never

Batches and problems are those of `heads.py`, and so is the clock. The last line is JSON.
benchmarks/results.md, "Speed", has measured numbers.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from heads import SHAPES, Shape, bank, data_of, timed

METHODS = ("erm", "erm+sam", "xdomainmix", "xdomainmix+sam")


def measured(method: str, shape: Shape, device: str, heads: int, seconds: float) -> dict[str, float | None]:
    data = data_of(shape, device)
    plain, compiled = (bank(method, shape, data, heads, compiles) for compiles in (False, True))
    started = time.perf_counter()
    compiled(1)
    first = time.perf_counter() - started
    took = timed({"plain": plain, "compiled": compiled}, seconds)
    saved = took["plain"] - took["compiled"]
    return {
        "plain_ms": 1e3 * took["plain"],
        "compiled_ms": 1e3 * took["compiled"],
        "ratio": took["plain"] / took["compiled"],
        "seconds": first,
        "steps": first / saved if saved > 0 else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=2.0, help="time to measure each number")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    results = {}
    print(f"{given.heads} heads: plain ms, compiled ms, ratio, seconds, steps")
    for shape in SHAPES:
        for method in METHODS:
            found = measured(method, shape, given.device, given.heads, given.seconds)
            results[f"{method}, {shape}"] = found
            values = [f"{value:.2f}" if value is not None else "−" for value in found.values()]
            print(f"{method}, {shape}:", *values, flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
