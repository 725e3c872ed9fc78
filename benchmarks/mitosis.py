"""A real site: atypical mitoses of six laboratories, a frozen ViT-Ti and its last blocks, with augmentations.

    python benchmarks/mitosis.py IMAGES.csv WEIGHTS [colours | frozen | cut …] > tables.md
    python benchmarks/mitosis.py IMAGES.csv WEIGHTS chain METHOD BUDGET > chain.md

IMAGES.csv is a table (path, label, domain, group) of the material of AMi-Br; WEIGHTS are a file of
`vit_tiny_patch16_224`. `colours` is a control: heads on mean, deviation and quantiles of RGB alone. `frozen` trains
heads with and without views of each augmentation; `cut` trains the last blocks, without augmentation and with the one
that BEST names, SAM and LoRA, and judges what COMPARED declares. Each domain is held out once, slides are groups. Runs
are made in the working directory by `xdm-ft run`; balanced accuracy in %, mean over held-out domains and seeds ± its
standard error.
`chain` takes each domain once as the new site of a METHOD of the frozen run: what `assess` expects, which BUDGET of
images `label` chooses, what `evaluate` and `adapt` make of their labels, and what all images show.
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

BEST = "flip"  # of the frozen run
AUGMENTATIONS = {
    "flip": "flip", "crop": "crop", "colour": "colour", "grey": "grey", "blur": "blur", "jpeg": "jpeg",
    "stain": "stain", "stain 0.2": "{stain: {strength: 0.2}}", "all": "[flip, crop, colour, stain, blur, jpeg]",
}  # fmt: skip
HEADS = "erm", "xdomainmix", "xdomainmix+sam", "sam", "groupdro", "mixup"
AUGMENTED = "erm", "xdomainmix", "groupdro", "sam"
SOLVERS = "linear_probe", "gda", "prototypes", "knn"
CUTS = {
    "erm 2 blocks": "name: erm, trainable: {blocks: 2}",
    "xdomainmix 2 blocks": "name: xdomainmix, trainable: {blocks: 2}",
    "erm 4 blocks": "name: erm, trainable: {blocks: 4}",
    "xdomainmix 4 blocks": "name: xdomainmix, trainable: {blocks: 4}",
    "erm+sam 2 blocks": "name: erm+sam, trainable: {blocks: 2}",
}
ALONE = {  # rows without augmentation only
    "erm LoRA": "name: erm, trainable: {lora: {rank: 8}}, encoder_lr: 3.0e-4",
    "erm head": "name: erm",
    "gda": "name: gda",
}
COMPARED = "[[erm LoRA, gda], [erm 4 blocks, erm head], [xdomainmix 4 blocks, erm 4 blocks]]"
"""Pairs of rows of `cut`: is the encoder worth training, with LoRA or in blocks, and does the method count there?"""


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
    # of two references of a row the declared one, which has the verdict
    ordered = sorted(results["comparisons"], key=lambda entry: str(entry["here"]) != "no verdict")
    compared = {entry["first"]: entry for entry in ordered if entry["selection"] == "train_val"}
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
    methods = list[str]()
    for label, keys in CUTS.items():
        methods += [f"{keys}, label: {label}", f"{keys}, label: {label} {BEST}, train_augmentation: {BEST}"]
    methods += [f"{keys}, label: {label}" for label, keys in ALONE.items()]
    encoder = f"encoder: {{name: timm, model: vit_tiny_patch16_224, weights: {weights}}}\nfeatures: {{views: 4}}\n"
    encoder += f"report: {{compare: {COMPARED}}}\n"
    training = "batch_size: 32, sampler: pooled, steps: 200, evaluate_every: 50, optimizer: adam, lr: 1.0e-3"
    training += ", mixed_precision: bf16"
    return recipe("mitosis_cut", f"{{name: table, file: {table}}}", encoder, methods, training, seeds=3)


def control(table: Path, weights: Path) -> Path:
    methods = [f"name: {name}" for name in ("erm", "linear_probe", "knn")]
    training = "batch_size: 32, sampler: per_domain, steps: 600, optimizer: adam, lr: 1.0e-3"
    return recipe("mitosis_colours", f"{{name: features, file: {colours(table)}}}", "", methods, training, seeds=10)


def verb(*words: object) -> dict[str, Any]:
    """Runs a verb and returns the document of its --json."""
    command = [sys.executable, "-m", "xdm_ft", *map(str, words), "--json", "--quiet"]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def site_table(name: str, rows: list[dict[str, str]], labelled: bool = True) -> Path:
    columns = ["path", "group", *(["label"] if labelled else [])]
    with (path := Path(f"{name}.csv")).open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def chain(table: Path, weights: Path, method: str, budget: int) -> Iterator[list[str]]:
    """Yields a row per domain: the verbs of docs/new_site.md on a model that never saw it."""
    with table.open(newline="") as file:
        every = [row | {"path": str(table.parent / row["path"])} for row in csv.DictReader(file)]
    label_of = {row["path"]: row["label"] for row in every}
    for domain in sorted({row["domain"] for row in every}):
        model, rows = Path(f"model-{domain}"), [row for row in every if row["domain"] == domain]
        if not model.exists():
            verb("export", "output/mitosis_frozen", model, "--method", method, "--held-out", domain)
        expected = verb("assess", model, site_table(f"{domain}-unlabelled", rows, labelled=False))
        chosen, images = Path(f"{domain}-to_label.csv"), f"{domain}-unlabelled.csv"
        chosen.unlink(missing_ok=True)
        verb("label", model, images, "--budget", budget, "--out", chosen)
        with chosen.open(newline="") as file:
            to_label = [*csv.DictReader(file)]
        with chosen.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*to_label[0]])
            writer.writeheader()
            writer.writerows(row | {"label": label_of[row["path"]]} for row in to_label)
        seen = verb("evaluate", model, chosen, "--risk", "10%")
        out = Path(f"adapted-{domain}")
        adapted = verb("adapt", model, chosen, "--out", out)
        rest = site_table(f"{domain}-rest", [row for row in rows if row["path"] not in {r["path"] for r in to_label}])
        before = verb("evaluate", model, rest)["whole"]["metrics"]
        after = verb("evaluate", out, rest)["whole"]["metrics"] if adapted["kept"] else None
        ends = f"{percent(expected['estimate'])} ({percent(expected['low'])} to {percent(expected['high'])})"
        risk = seen["at_risk"]
        yield [
            domain, str(len(rows)), ends, expected["verdict"], percent(before["accuracy"]["value"]),
            percent(before["balanced_accuracy"]["value"]),
            percent(seen["whole"]["metrics"]["balanced_accuracy"]["value"]),
            "none" if risk["threshold"] is None else f"{risk['threshold']:.2f}",
            f"{100 * (adapted['metric_after'] - adapted['metric_before']):+.1f}, p {adapted['p']:.2f}",
            "kept the old one" if after is None else percent(after["balanced_accuracy"]["value"]),
        ]  # fmt: skip


CHAIN = (
    "site", "images", "assess: accuracy", "verdict", "accuracy", "balanced accuracy", "of the labelled",
    "threshold for 10%", "adapt, cross-validated", "adapted, on the rest",
)  # fmt: skip


def main() -> None:
    table, weights = (Path(path).resolve() for path in sys.argv[1:3])
    if sys.argv[3:4] == ["chain"]:
        print("|", " | ".join(CHAIN), "|\n" + "|---" * len(CHAIN) + "|")
        for values in chain(table, weights, sys.argv[4], int(sys.argv[5])):
            print("|", " | ".join(values), "|", flush=True)
        return
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
