"""What a user would pick instead, against this package: ratios of things that are measured in turns in one run.

    python benchmarks/peers.py                                     everything
    python benchmarks/peers.py --parts timm --images FOLDER --weights FILE --model-kwargs '{"bn_eps": 1e-3}'
    python benchmarks/peers.py --parts probe_2k probe_10k heads --rounds 1

A number is the median over rounds, in each of which all ways run one after the other; so is a ratio.

timm, open_clip        Features of image files, by whole processes, in wall time: the loop of these libraries' READMEs
                       (DataLoader with a worker per core, batches of 64, float32, `torch.save`) against `xdm-ft
                       features` from an empty cache. MobileNetV2 of timm, CLIP ViT-B/32 of open_clip. Start: a process
                       on 64 images. Images/s: the other images ÷ the seconds that a process on all images takes longer.
                       With start: all images ÷ all seconds. Peak: the resident memory of a way's largest process,
                       workers not added. The cosine is that of an image's features less the mean of the loop's.
probe_2k, probe_10k, probe_100k
                       A linear probe with the whole path of penalties and the choice by validation images:
                       `linear_probe` against scikit-learn's LogisticRegression (lbfgs, each fit started from the one
                       before) with the same penalties, at its default `tol` and at a smaller one. Objective above: how
                       far it is above the lowest of all ways, relative to it; the largest of the path.
heads                  60 heads (20 seeds, 3 learning rates), one after the other by a loop as DomainBed's on cached
                       features (32 images per domain by index, nn.Linear, autograd, fused Adam; XDomainMix as the
                       paper writes it), against the bank, chunk after chunk. 60% of the steps of XDomainMix are its
                       warm-up. One evaluation at the end is included, compilation of kernels is not.

Probes and heads use one thread and made-up features, and are measured in processor time. The accuracies only show that
both ways learn the same. benchmarks/results.md, "Beside other ways", has measured numbers. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import xxhash
import yaml
from features import chosen_images, made_up_images
from heads import clock
from safetensors.torch import load_file
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits
from torch import Tensor, nn

from xdm_ft.algorithms import Setup
from xdm_ft.algorithms.erm import ERM
from xdm_ft.algorithms.linear_probe import LinearProbe
from xdm_ft.algorithms.xdomainmix import XDomainMix
from xdm_ft.core import Annotations, Batch, Criteria, ModelKey, Task
from xdm_ft.features.cache import Features
from xdm_ft.protocol.splits import Split
from xdm_ft.training import Job, Training
from xdm_ft.training.bank.train import chunks, solve, train_chunk
from xdm_ft.xdomainmix.masks import domain_quantile

START = 64  # images of a process that is timed for its start
TOLS = (1e-6, 1e-4)  # of scikit-learn; the second is its default
PROBLEMS = {  # images, width, classes
    "probe_2k": (2_238, 1280, 10),
    "probe_10k": (10_000, 1280, 7),
    "probe_100k": (100_000, 512, 10),
}
DOMAINS, PER_DOMAIN = 3, 32
HEADS, LRS = 60, (3e-4, 1e-3, 3e-3)
WIDTHS, CLASSES, IMAGES = (512, 1280), 7, 10_000  # of the features that heads train on
PARTS = ("timm", "open_clip", *PROBLEMS, "heads")
METHODS = {"erm": ERM, "xdomainmix": XDomainMix, "linear_probe": LinearProbe}
CRITERIA = Criteria(("train_val",), "accuracy")

# what the README of each library shows, given a file of weights
PEERS = {
    "timm": """
import timm
model = timm.create_model(name, num_classes=0, **kwargs)
timm.models.load_checkpoint(model, weights, strict=False)
config = timm.data.resolve_model_data_config(model)
transform, encode = timm.data.create_transform(**config, is_training=False), model
""",
    "open_clip": """
import open_clip
model, _, transform = open_clip.create_model_and_transforms(name, pretrained=weights, **kwargs)
encode = model.encode_image
""",
}
LOOP = """
import json, os, sys
import torch
from torchvision.datasets import ImageFolder
name, weights, kwargs, out = json.loads(sys.argv[1])
{model}
model.eval()
images = ImageFolder(".", transform)
loader = torch.utils.data.DataLoader(images, batch_size=64, num_workers=len(os.sched_getaffinity(0)))
with torch.inference_mode():
    features = torch.cat([encode(pixels) for pixels, _ in loader])
torch.save({{"features": features, "paths": [path for path, _ in images.samples]}}, out)
"""
RANDOM = """
import json, sys
import {library} as library
from safetensors.torch import save_file
name, kwargs, out = json.loads(sys.argv[1])
save_file(library.create_model(name, **kwargs).state_dict(), out)
"""


class Ran(NamedTuple):
    seconds: float
    peak: int  # bytes


def process(command: Sequence[str], where: Path, cache: Path) -> Ran:
    """Runs a program with an empty cache."""
    shutil.rmtree(cache, ignore_errors=True)
    started = time.perf_counter()
    environment = {**os.environ, "XDM_FT_CACHE": str(cache)}
    child = subprocess.Popen(command, cwd=where, env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    seconds, child.returncode = time.perf_counter() - started, os.waitstatus_to_exitcode(status)
    assert child.returncode == 0, command
    # the system counts what this process took before the program replaced its copy
    assert usage.ru_maxrss > resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, "this process is the larger one"
    return Ran(seconds, 1024 * usage.ru_maxrss)


def image_tree(root: Path, paths: Sequence[str]) -> int:
    """Copies images as <domain>/<class>/<number>.<type>, equal ones once. Returns their number."""
    different = {Path(path).read_bytes(): Path(path).suffix for path in paths}
    for number, (content, suffix) in enumerate(different.items()):
        folder = root / f"domain{number % 4}" / f"class{number // 4 % 7}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:05d}{suffix}").write_bytes(content)
    return len(different)


def lowest_cosine(saved: Path, images: Path, cache: Path) -> float:
    """Compares what the loop has saved with the shards of the cache, image by image."""
    plain, ours = torch.load(saved), dict[bytes, Tensor]()
    for shard in cache.rglob("*.safetensors"):
        tensors = load_file(shard)
        ours |= zip((bytes(row.tolist()) for row in tensors["contents"]), tensors["features"], strict=True)
    digests = [xxhash.xxh3_128_digest((images / path).read_bytes()) for path in plain["paths"]]
    cached, features = torch.stack([ours[digest] for digest in digests]).float(), plain["features"]
    mean = features.mean(0)
    return float(F.cosine_similarity(features - mean, cached - mean).min())


def ways_of(library: str, name: str, kwargs: object, weights: Path, folder: Path) -> dict[str, list[str]]:
    """Returns the command of each way, which reads the images in the current folder."""
    encoder = {"name": library, "model": name, "weights": str(weights), "kwargs": kwargs}
    recipe = {"name": "peers", "data": {"name": "folder", "root": "."}, "encoder": encoder, "methods": ["erm"]}
    (folder / "peers.yaml").write_text(yaml.safe_dump(recipe | {"training": {"steps": 1}}))
    about = json.dumps([name, str(weights), kwargs, str(folder / "plain.pt")])
    ours = [sys.executable, "-m", "xdm_ft", "features", str(folder / "peers.yaml"), "--quiet"]
    return {
        "plain loop": [sys.executable, "-c", LOOP.format(model=PEERS[library]), about],
        "xdm-ft, batch 64": [*ours, "features.batch_size=64"],
        "xdm-ft": ours,
    }


def extraction(given: argparse.Namespace, library: str, name: str, kwargs: object, count: int) -> dict[str, object]:
    """Measures one encoder and prints its rows."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "made").mkdir()
        paths = chosen_images(given.images, count) if given.images else made_up_images(folder / "made", count)
        images = {root: image_tree(folder / root, paths[:most]) for root, most in (("start", START), ("all", count))}
        weights = given.weights.resolve() if given.weights and library == "timm" else folder / "weights.safetensors"
        if not weights.exists():
            program = [sys.executable, "-c", RANDOM.format(library=library), json.dumps([name, kwargs, str(weights)])]
            subprocess.run(program, check=True)
        rounds: dict[str, list[dict[str, float]]] = {}
        for _ in range(given.rounds):
            for way, command in ways_of(library, name, kwargs, weights, folder).items():
                start, whole = (process(command, folder / root, folder / "cache") for root in images)
                rate = (images["all"] - images["start"]) / (whole.seconds - start.seconds)
                row = {"start": start.seconds, "rate": rate, "whole": images["all"] / whole.seconds, "peak": whole.peak}
                rounds.setdefault(way, []).append(row)
        cosine = lowest_cosine(folder / "plain.pt", folder / "all", folder / "cache")
    found: dict[str, object] = {"images": images["all"], "cosine": cosine}
    for way, rows in rounds.items():
        middle = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        over = {
            key: statistics.median(row[key] / plain[key] for row, plain in zip(rows, rounds["plain loop"], strict=True))
            for key in middle
        }
        found[way] = middle | {f"{key}_ratio": value for key, value in over.items()}
        print(
            f"| {name} | {way} | {middle['start']:.1f} | {middle['rate']:.1f} | {over['rate']:.2f} "
            f"| {middle['whole']:.1f} | {over['whole']:.2f} | {middle['peak'] / 1e9:.2f} | {over['peak']:.2f} |",
            flush=True,
        )
    return found


def ratio(taken: Mapping[str, Sequence[float]], way: str, over: str) -> float:
    """Returns the median over the rounds of way ÷ over."""
    return statistics.median(one / other for one, other in zip(taken[way], taken[over], strict=True))


def in_turns(
    ways: Mapping[str, Callable[[], float]], rounds: int, clock: Callable[[], float]
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Returns the seconds of each way in each round, and what each way returned last."""
    taken: dict[str, list[float]] = {way: [] for way in ways}
    last = dict[str, float]()
    for _ in range(rounds):
        for way, run in ways.items():
            started = clock()
            last[way] = run()
            taken[way].append(clock() - started)
    return taken, last


def made_up_features(images: int, width: int, classes: int) -> tuple[Tensor, Annotations]:
    """Returns features [n,K], and their labels and domains.

    They are like those of a MobileNetV2 on photographs: positive, a quarter of them 0, half of their mean square that
    of their means, the k-th eigenvalue of their covariance near 1/k. Classes and domains differ in their means.
    """
    generator = torch.Generator().manual_seed(0)
    labels, domains = (torch.randint(0, number, (images,), generator=generator) for number in (classes, DOMAINS))
    latent = torch.randn(images, width, generator=generator)
    for index in (labels, domains):
        latent += (24 / width) ** 0.5 * torch.randn(int(index.max()) + 1, width, generator=generator)[index]
    latent *= torch.arange(1, width + 1) ** -0.5
    z = latent @ torch.linalg.qr(torch.randn(width, width, generator=generator))[0]
    return (z / z.std() + 1.2 * torch.rand(width, generator=generator)).relu_(), Annotations(labels, domains, domains)


def job_of(method: str, z: Tensor, about: Annotations, steps: int = 0, seed: int = 0, lr: float = 1e-3) -> Job:
    """The last tenth of the images is for validation."""
    most, names = len(z) * 9 // 10, tuple(map(str, range(DOMAINS)))
    pools = tuple((about.domains[:most] == domain).nonzero()[:, 0] for domain in range(DOMAINS))
    split = Split(("none",), names, pools, {"train_val": torch.arange(most, len(z))}, domain_of=torch.arange(DOMAINS))
    training = Training(batch_size=PER_DOMAIN, lr=lr, evaluate_every=max(1, steps), loss_average="sample")
    classes = tuple(map(str, range(int(about.labels.max()) + 1)))
    setup = Setup(Task(classes, names), z.shape[1], steps, seed, training.loss_average)
    return Job(ModelKey(method, ("none",), seed, 0), split, setup, METHODS[method], None, training)


def probe(images: int, width: int, classes: int, rounds: int) -> dict[str, object]:
    """Measures one problem, of which nine tenths are training images, and prints its rows."""
    z, about = made_up_features(images, width, classes)
    job, features, most = job_of("linear_probe", z, about), Features([z]), images * 9 // 10
    x, y = z.numpy(), about.labels.numpy()
    # validation accuracy is the mean over domains
    validation = [most + np.flatnonzero(about.domains[most:].numpy() == domain) for domain in range(DOMAINS)]
    rows = torch.cat(job.split.train)
    batch = Batch(z[rows], about.labels[rows], about.domains[rows], rows, rows)
    solver = LinearProbe(job.setup)
    heads = list(solver.solve(batch.x, batch))
    l2s = [candidate.hparams["l2"] for candidate in heads]
    paths = {"linear_probe": [(head["weight"].numpy(), head["bias"].numpy()) for _, head, _ in heads]}

    def ours() -> float:
        (selected,) = solve(job, features, about, CRITERIA).selected.values()
        return float(selected.value or 0)

    def scikit_learn(way: str, tol: float) -> float:
        model, scores, paths[way] = LogisticRegression(warm_start=True, tol=tol, max_iter=100_000), [], []
        for l2 in l2s:
            model.set_params(C=1 / (l2 * most)).fit(x[:most], y[:most])
            scores.append(statistics.mean(float(model.score(x[of], y[of])) for of in validation))
            paths[way].append((model.coef_.copy(), model.intercept_.copy()))
        return max(scores)

    tols = {f"scikit-learn, tol {tol:.0e}": tol for tol in TOLS}
    ways = {way: partial(scikit_learn, way, tol) for way, tol in tols.items()} | {"linear_probe": ours}
    taken, score = in_turns(ways, rounds, clock)
    values = {way: [objective(*head, l2, batch) for head, l2 in zip(paths[way], l2s, strict=True)] for way in ways}
    lowest = np.min(list(values.values()), axis=0)
    found: dict[str, object] = {}
    for way in ways:
        above = float(np.max(values[way] / lowest - 1))
        row = {"seconds": statistics.median(taken[way]), "above": above, "accuracy": score[way]}
        found[way] = row | {"ratio": ratio(taken, way, "linear_probe")}
        print(
            f"| {images:,} × {width:,}, {classes} classes | {way} | {row['seconds']:.2f} | {found[way]['ratio']:.1f} "
            f"| {above:.0e} | {100 * score[way]:.1f} |",
            flush=True,
        )
    return found


def objective(weight: np.ndarray, bias: np.ndarray, l2: float, batch: Batch) -> float:
    """Returns the mean loss + ½ l2 ‖W‖² in float64."""
    w, b, total = torch.from_numpy(weight).double(), torch.from_numpy(bias).double(), 0.0
    for z, y in zip(batch.x.split(8192), batch.y.split(8192), strict=True):
        total += float(F.cross_entropy(z.double() @ w.T + b, y, reduction="sum"))
    return total / len(batch.y) + l2 / 2 * float(w.square().sum())


def plain_erm(z: Tensor, about: Annotations, job: Job) -> nn.Linear:
    """Returns a trained head."""
    torch.manual_seed(job.seed)
    head = nn.Linear(z.shape[1], job.setup.task.num_classes)
    optimizer = torch.optim.Adam(head.parameters(), lr=job.training.lr, fused=True)
    for _ in range(job.setup.steps):
        rows = torch.cat([pool[torch.randint(len(pool), (PER_DOMAIN,))] for pool in job.split.train])
        loss = F.cross_entropy(head(z[rows]), about.labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head


def plain_xdomainmix(z: Tensor, about: Annotations, job: Job) -> nn.Linear:
    """Returns a trained head."""
    torch.manual_seed(job.seed)
    head, domain_head = nn.Linear(z.shape[1], job.setup.task.num_classes), nn.Linear(z.shape[1], DOMAINS)
    optimizer = torch.optim.Adam([*head.parameters(), *domain_head.parameters()], lr=job.training.lr, fused=True)
    warmup, every = job.setup.steps * 3 // 5, max(1, job.setup.steps // 50)
    for step in range(job.setup.steps):
        rows = torch.cat([pool[torch.randint(len(pool), (PER_DOMAIN,))] for pool in job.split.train])
        x, y, d = z[rows], about.labels[rows], about.domains[rows]
        class_loss = F.cross_entropy(head(x), y)
        if step >= warmup:
            mixed = plain_mix(x, y, d, head, domain_head, domain_quantile(step - warmup, every))
            class_loss = (class_loss + F.cross_entropy(head(mixed), y)) / 2
        loss = class_loss + F.cross_entropy(domain_head(x), d)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head


def plain_mix(z: Tensor, y: Tensor, d: Tensor, head: nn.Linear, domain_head: nn.Linear, quantile: float) -> Tensor:
    """Returns z̃ [B,K] by equations (1) to (7) of the paper, as they are written."""
    masks = []
    for scored, target, q in ((head, y, 0.5), (domain_head, d, quantile)):
        leaf = z.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(scored(leaf).gather(1, target[:, None]).sum(), leaf)
        scores = gradient * z
        masks.append(scores > scores.quantile(q, dim=1, keepdim=True))
    by_class, by_domain = masks
    csds, csdg = z * by_class * by_domain, z * by_class * ~by_domain
    cgds, cgdg = z * ~by_class * by_domain, z * ~by_class * ~by_domain
    elsewhere, itself = d[:, None] != d, torch.eye(len(z), dtype=torch.bool)
    partners = []
    for valid in ((y[:, None] == y) & elsewhere, (y[:, None] != y) & elsewhere):
        # a sample without a partner is its own
        partners.append(torch.where(valid.any(1, keepdim=True), valid, itself).float().multinomial(1)[:, 0])
    same, other = partners
    lam_1, lam_2, kept = torch.rand(len(z), 1), torch.rand(len(z), 1), torch.rand(len(z), 1) >= 0.2
    specific = lam_1 * csds + (1 - lam_1) * csds[same]
    generic = lam_2 * cgds + (1 - lam_2) * cgds[other]
    return kept * specific + csdg + generic + cgdg


PLAIN = {"erm": plain_erm, "xdomainmix": plain_xdomainmix}


def heads(method: str, width: int, given: argparse.Namespace) -> dict[str, object]:
    """Measures one method and prints its row."""
    z, about = made_up_features(IMAGES, width, CLASSES)
    features, validation = Features([z]), slice(IMAGES * 9 // 10, None)

    def jobs(steps: int) -> list[Job]:
        return [job_of(method, z, about, steps, head // len(LRS), LRS[head % len(LRS)]) for head in range(HEADS)]

    def loop(jobs: Sequence[Job]) -> float:
        right = list[float]()
        for job in jobs:
            head = PLAIN[method](z, about, job)
            with torch.no_grad():
                right.append(float((head(z[validation]).argmax(1) == about.labels[validation]).float().mean()))
        return statistics.mean(right)

    def bank(jobs: Sequence[Job]) -> float:
        trained = [
            one
            for chunk in chunks(jobs, features.device)
            for one in train_chunk(chunk, features, about, CRITERIA, record=lambda step, values: None)
        ]
        return statistics.mean(float(one.selected["train_val"].value or 0) for one in trained)

    for run in (loop, bank):
        run(jobs(2))  # compiles kernels
    ways = {"loop": partial(loop, jobs(given.steps)), "bank": partial(bank, jobs(given.steps))}
    taken, score = in_turns(ways, given.rounds, clock)
    ms = {way: 1e3 * statistics.median(seconds) / given.steps / HEADS for way, seconds in taken.items()}
    times = ratio(taken, "loop", "bank")
    print(
        f"| {method} | {width:,} | {ms['loop']:.2f} | {ms['bank']:.2f} | {times:.1f} "
        f"| {100 * score['loop']:.1f} | {100 * score['bank']:.1f} |",
        flush=True,
    )
    return {"ms": ms, "ratio": times, "accuracy": score}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument("--rounds", type=int, default=3, help="of every part (default: 3)")
    parser.add_argument("--images", type=Path, help="folder of images (default: made-up ones)")
    parser.add_argument("--weights", type=Path, help="file of MobileNetV2's weights (default: random)")
    parser.add_argument("--model-kwargs", type=json.loads, default={}, help="its arguments, as JSON")
    parser.add_argument("--count", type=int, default=384, help="images for MobileNetV2 (default: 384)")
    parser.add_argument("--clip-count", type=int, default=192, help="images for CLIP (default: 192)")
    parser.add_argument("--steps", type=int, default=50, help="of each head (default: 50)")
    given = parser.parse_args()
    results: dict[str, object] = {"cores": len(os.sched_getaffinity(0)), "torch": torch.__version__}
    encoders = {
        "timm": ("mobilenetv2_100", given.model_kwargs, given.count),
        "open_clip": ("ViT-B-32", {}, given.clip_count),
    }
    if not encoders.keys().isdisjoint(given.parts):
        print("\n| encoder | | start, s | images/s | ÷ plain | with start | ÷ plain | peak, GB | ÷ plain |")
        print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
        for library, about in encoders.items():
            if library in given.parts:
                results[library] = extraction(given, library, *about)
    torch.set_num_threads(1)  # `clock` then measures processor time
    threadpool_limits(1)  # of NumPy and scikit-learn
    if not PROBLEMS.keys().isdisjoint(given.parts):
        print("\n| features, training and validation | | s | ÷ linear_probe | objective above | accuracy |")
        print("|---|---|---:|---:|---:|---:|")
        for part in PROBLEMS:
            if part in given.parts:
                results[part] = probe(*PROBLEMS[part], given.rounds)
    if "heads" in given.parts:
        print("\n| method | width | loop, ms per head-step | bank | loop ÷ bank | accuracy, loop | bank |")
        print("|---|---:|---:|---:|---:|---:|---:|")
        results["heads"] = {f"{method}, {width}": heads(method, width, given) for width in WIDTHS for method in PLAIN}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
