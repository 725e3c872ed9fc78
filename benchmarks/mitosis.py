"""A real site: atypical mitoses of six laboratories, a frozen ViT-Ti and its last blocks, with augmentations.

    python benchmarks/mitosis.py IMAGES.csv WEIGHTS [colours | frozen | cut …] > tables.md

IMAGES.csv is a table (path, label, domain, group) of the material of AMi-Br; WEIGHTS are a file of
`vit_tiny_patch16_224`. `colours` is a control: heads on mean, deviation and quantiles of RGB alone. `frozen` trains
heads with and without views of each augmentation; `cut` trains the last blocks and LoRA on images, without
augmentation and with the one that BEST names. Each domain is held out once, slides are groups. Runs are made in the
working directory by `xdm-ft run`; balanced accuracy in %, mean over held-out domains and seeds ± its standard error.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

BEST = "[flip, crop, colour, stain, blur, jpeg]"
AUGMENTATIONS = {
    "flip": "flip", "crop": "crop", "colour": "colour", "grey": "grey", "blur": "blur", "jpeg": "jpeg",
    "stain": "stain", "stain 0.2": "{stain: {strength: 0.2}}", "all": BEST,
}  # fmt: skip
HEADS = "erm", "xdomainmix", "xdomainmix+sam", "sam", "groupdro", "mixup"
AUGMENTED = "erm", "xdomainmix", "groupdro", "sam"
SOLVERS = "linear_probe", "gda", "prototypes", "knn"
CUTS = {
    "erm 2 blocks": "name: erm, trainable: {blocks: 2}",
    "xdomainmix 2 blocks": "name: xdomainmix, trainable: {blocks: 2}",
    "erm+sam 2 blocks": "name: erm+sam, trainable: {blocks: 2}",
    "erm 4 blocks": "name: erm, trainable: {blocks: 4}",
    "xdomainmix 4 blocks": "name: xdomainmix, trainable: {blocks: 4}",
    "erm LoRA": "name: erm, trainable: {lora: {rank: 8}}, encoder_lr: 3.0e-4",
}


def colours(table: Path) -> Path:
    """Writes what a shortcut alone gives: mean, deviation and nine quantiles of each channel of every image."""
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    features = []
    for row in rows:
        pixels = np.asarray(Image.open(table.parent / row["path"]).convert("RGB"), np.float32).reshape(-1, 3)
        features.append(np.concatenate([pixels.mean(0), pixels.std(0), *np.quantile(pixels, np.arange(1, 10) / 10, 0)]))
    z = np.stack(features)
    names = {name: np.array([row[name] for row in rows]) for name in ("label", "domain", "group")}
    np.savez("colours.npz", features=((z - z.mean(0)) / z.std(0)).astype(np.float32), **names)
    return Path("colours.npz").resolve()


def recipe(name: str, data: str, encoder: str, methods: list[str], training: str, seeds: int) -> Path:
    path = Path(f"{name}.yaml")
    path.write_text(
        f"name: {name}\ndata: {data}\nprotocol: {{name: leave_one_domain_out, metric: balanced_accuracy, "
        f"seeds: {seeds}}}\n{encoder}methods:\n" + "".join(f"  - {{{method}}}\n" for method in methods)
        + f"training: {{{training}, class_weights: balanced}}\n"
    )  # fmt: skip
    return path


def summary(path: Path) -> Iterator[dict[str, Any]]:
    """Runs a recipe and yields the rows of its summary, with their comparisons."""
    subprocess.run([sys.executable, "-m", "xdm_ft", "run", str(path), "--quiet"], check=True, stdout=subprocess.DEVNULL)
    results = json.loads(Path("output", path.stem, "results.json").read_text())
    compared = {entry["first"]: entry for entry in results["comparisons"] if entry["selection"] == "train_val"}
    for row in results["summary"]:
        if row["selection"] == "train_val":
            yield row | {"compared": compared.get(row["method"])}


def frozen(table: Path, weights: Path) -> Path:
    methods = [f"name: {name}, train_augmentation: none" for name in HEADS]
    methods += [f"name: {name}" for name in SOLVERS]
    methods += [
        f"name: {name}, label: {name} unweighted, class_weights: none" + ", train_augmentation: none" * (name in HEADS)
        for name in ("erm", "xdomainmix", "groupdro", "linear_probe", "prototypes")
    ]
    methods += [
        f"name: {name}, label: {name} {label}, train_augmentation: {augmentation}"
        for label, augmentation in AUGMENTATIONS.items()
        for name in AUGMENTED
    ]
    encoder = f"encoder: {{name: timm, model: vit_tiny_patch16_224, weights: {weights}}}\nfeatures: {{views: 4}}\n"
    training = "batch_size: 32, sampler: per_domain, steps: 600, optimizer: adam, lr: 1.0e-3"
    return recipe("mitosis_frozen", f"{{name: table, file: {table}}}", encoder, methods, training, seeds=10)


def cut(table: Path, weights: Path) -> Path:
    methods = [f"{keys}, label: {label}" for label, keys in CUTS.items()]
    methods += [f"{keys}, label: {label} augmented, train_augmentation: {BEST}" for label, keys in CUTS.items()]
    encoder = f"encoder: {{name: timm, model: vit_tiny_patch16_224, weights: {weights}}}\n"
    training = "batch_size: 32, sampler: pooled, steps: 200, optimizer: adam, lr: 1.0e-3"
    return recipe("mitosis_cut", f"{{name: table, file: {table}}}", encoder, methods, training, seeds=3)


def control(table: Path, weights: Path) -> Path:
    methods = [f"name: {name}" for name in ("erm", "linear_probe", "knn")]
    training = "batch_size: 32, sampler: per_domain, steps: 600, optimizer: adam, lr: 1.0e-3"
    return recipe("mitosis_colours", f"{{name: features, file: {colours(table)}}}", "", methods, training, seeds=10)


def main() -> None:
    table, weights = (Path(path).resolve() for path in sys.argv[1:3])
    makers: dict[str, Callable[[Path, Path], Path]] = {"colours": control, "frozen": frozen, "cut": cut}
    for name in sys.argv[3:] or makers:
        rows = [*summary(makers[name](table, weights))]
        domains = [*rows[0]["per_test_domain"]]
        print("\n| method | mean | ", " | ".join(domains), "| compared with | difference | verdict here |")
        print("|---|---:" + "|---:" * len(domains) + "|---|---:|---|")
        for row in rows:
            values = [f"{100 * row['per_test_domain'][domain]['mean']:.1f}" for domain in domains]
            mean, found = f"{100 * row['mean']:.1f} ± {100 * (row['stderr'] or 0):.1f}", row["compared"]
            verdict = [found["second"], f"{100 * found['difference']:+.1f}", found["here"]] if found else ["", "", ""]
            print(f"| {row['method']} | {mean} |", " | ".join(values), "|", " | ".join(verdict), "|", flush=True)


if __name__ == "__main__":
    main()
