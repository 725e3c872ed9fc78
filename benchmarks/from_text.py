"""What the class embeddings are worth as a start: probes, GDA, WiSE-FT and ERM from the text and from zero.

    python benchmarks/from_text.py FOLDER [pair | caltech | imagenet | shift …] > tables.md

FOLDER holds features of a CLIP with the embeddings of its text, which `data.file` and `data.class_embeddings` read:
`shift_pair.npz` (two domains, each held out once), `caltech_22.npz` (splits train, val and test; 1, 4 or 16 training
images a class are drawn, ten times), `imagenet_shots.npz` (domains with 1, 2 and 4 images a class; one is for
training, one for selection, one for the test), and `NAME.text.npz` of each. `shift` simulates its features. Runs are
made in the working directory by `xdm-ft run`; accuracy in %, mean over seeds, or over draws of images, ± its standard
error.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

SEEDS = 10
METHODS = """\
  - zero_shot
  - linear_probe
  - {name: linear_probe, center: zero, label: linear_probe from zero}
  - wise_ft
  - gda
  - {name: erm, start: zero_shot, label: erm from text}
  - {name: erm, start: zero_shot, head: cosine, label: cosine from text}
  - {name: erm, start: zero_shot, head: cosine, anchor: 1.0, label: "cosine from text, anchor 1"}
  - {name: erm, start: zero_shot, head: cosine, anchor: clap, label: "cosine from text, anchor clap"}
  - erm
"""


PICKS = """\
  - zero_shot
  - linear_probe
  - {name: linear_probe, pick: cross_domain, label: "linear_probe, pick: cross_domain"}
  - gda
  - {name: gda, pick: cross_domain, label: "gda, pick: cross_domain"}
"""


def recipe(name: str, text: Path, protocol: str, methods: str = METHODS) -> Path:
    """Writes a recipe about the features NAME.npz of the working directory."""
    path = Path(f"{name}.yaml")
    path.write_text(
        f"name: {name}\ndata: {{name: features, file: {name}.npz, class_embeddings: {text}}}\nprotocol: {protocol}\n"
        f"methods:\n{methods}training: {{batch_size: 32, steps: 500, lr: 1.0e-3}}\n"
        "report: {page: false}\n"
    )
    return path


def accuracies(path: Path) -> dict[str, Mapping[str, float | None]]:
    """Runs a recipe and returns {method: its row of the summary}."""
    subprocess.run([sys.executable, "-m", "xdm_ft", "run", str(path), "--quiet"], check=True, stdout=subprocess.DEVNULL)
    results = json.loads(Path("output", path.stem, "results.json").read_text())
    return {row["method"]: row for row in results["summary"] if row["selection"] == "train_val"}


def of_seeds(found: Mapping[str, Mapping[str, float | None]]) -> dict[str, str]:
    return {method: shown(row["mean"], row["stderr"]) for method, row in found.items()}


def shown(mean: float | None, error: float | None) -> str:
    if mean is None:
        return "–"
    return f"{100 * mean:.1f}" + (f" ± {100 * error:.1f}" if error is not None and error > 0 else "")


def pair(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields a column for each of the two domains."""
    link("pair", folder / "shift_pair.npz")
    protocol = f"{{name: leave_one_domain_out, seeds: {SEEDS}}}"
    found = accuracies(recipe("pair", folder / "shift_pair.text.npz", protocol))
    for domain in ("caltech101", "imagenet"):
        values = {method: row["per_test_domain"][domain] for method, row in found.items()}  # type: ignore[index]
        columns = {m: shown(v["mean"], v["std"] and v["std"] / math.sqrt(SEEDS)) for m, v in values.items()}
        yield f"{domain} held out", columns


def few_images(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields a column for each number of training images a class; each draw is a run of one seed."""
    every, text = np.load(folder / "caltech_22.npz"), folder / "caltech_22.text.npz"
    for images in (1, 4, 16):
        draws = list[dict[str, Mapping[str, float | None]]]()
        for draw in range(SEEDS):
            rng, kept = np.random.default_rng(draw), every["split"] != "train"
            for name in np.unique(every["label"]):
                rows = np.flatnonzero((every["label"] == name) & (every["split"] == "train"))
                kept[rng.choice(rows, min(images, len(rows)), replace=False)] = True
            name = f"caltech-{images}-{draw}"
            np.savez(f"{name}.npz", **{key: every[key][kept] for key in every})
            draws.append(accuracies(recipe(name, text, f"{{name: official, seeds: [{draw}]}}")))
        columns = dict[str, str]()
        for method in draws[0]:
            values = np.array([of[method]["mean"] for of in draws], float)
            columns[method] = shown(float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values))))
        yield f"Caltech101, {images} a class", columns


def shots(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields a column for each of the draws as training images; selection sees another, and the test the third."""
    every, text = np.load(folder / "imagenet_shots.npz"), folder / "imagenet_shots.text.npz"
    for train, validation, test in ((1, 2, 4), (2, 1, 4), (4, 1, 2)):
        name, split_of = (
            f"imagenet-{train}",
            {f"draw_{train}": "train", f"draw_{validation}": "val", f"draw_{test}": "test"},
        )
        split = np.array([split_of[domain] for domain in every["domain"]])
        arrays = {"domain": np.full(len(split), "imagenet"), "split": split}
        np.savez(f"{name}.npz", features=every["features"], label=every["label"], **arrays)
        found = accuracies(recipe(name, text, f"{{name: official, seeds: {SEEDS}}}"))
        yield f"ImageNet, {train} a class", of_seeds(found)


def shifts(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields a column for each of three simulated data sets, in which every domain moves every class its own way."""
    classes, width, domains, images = 10, 64, 4, 30
    names, text = np.array([f"class {c}" for c in range(classes)]), Path("shift.text.npz").resolve()
    y, domain = np.tile(np.repeat(np.arange(classes), images), domains), np.repeat(np.arange(domains), classes * images)
    for draw in range(3):
        rng = np.random.default_rng(draw)
        embeddings = rng.normal(size=(classes, width))
        embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
        moves = rng.normal(size=(domains, classes, width)) * 3 / math.sqrt(width)
        features = embeddings[y] + moves[domain, y] + rng.normal(size=(len(y), width)) / math.sqrt(width)
        np.savez(f"shift-{draw}.npz", features=features.astype(np.float32), label=names[y], domain=domain.astype(str))
        np.savez(text, features=embeddings, label=names)
        protocol = f"{{name: leave_one_domain_out, seeds: {SEEDS}}}"
        yield f"simulated, draw {draw}", of_seeds(accuracies(recipe(f"shift-{draw}", text, protocol, PICKS)))


def link(name: str, source: Path) -> None:
    Path(f"{name}.npz").unlink(missing_ok=True)
    Path(f"{name}.npz").symlink_to(source)


def main() -> None:
    folder, makers = (
        Path(sys.argv[1]).resolve(),
        {"pair": pair, "caltech": few_images, "imagenet": shots, "shift": shifts},
    )
    for name in sys.argv[2:] or makers:
        columns = [*makers[name](folder)]
        print("\n| method |", " | ".join(heading for heading, _ in columns), "|")
        print("|---" + "|---:" * len(columns) + "|")
        for method in columns[0][1]:
            print(f"| {method} |", " | ".join(values[method] for _, values in columns), "|", flush=True)


if __name__ == "__main__":
    main()
