"""Runs that no training made: a directory with predictions, and a run in memory with a search, curves and analysis."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from example_runs import OF_MODELS, run_of, whole
from PIL import Image

from xdm_ft.core import ModelKey
from xdm_ft.evaluation.metrics import metric, per_image, score
from xdm_ft.evaluation.predictions import HeldOutImages, Prediction, arrays_of, test_images
from xdm_ft.images import ImageDataset
from xdm_ft.results.measured import RunMeasures, predictions_of
from xdm_ft.results.model import Pick, Record
from xdm_ft.results.run import Run, read_run
from xdm_ft.results.summary import summarise
from xdm_ft.storage.names import images_file, predictions_in
from xdm_ft.storage.run_directory import RunDirectory
from xdm_ft.storage.tensorboard import Scalars, sub_run

Json = dict[str, Any]
DOMAINS, CLASSES, METHODS = ("art", "photo", "sketch"), ("cat", "dog", "hen"), ("zero_shot", "erm", "xdomainmix", "sam")
RULE, DETERMINISTIC = "train_val", "zero_shot"
HOSTILE = (
    "<script>alert(1)</script>", "a|b\nc", "\u202egnp.exe", "\x1b[31mred\x07", "שלום 漢字 😀", "$x_1$ & \"q\" 'p'",
    "n" * 300, "-->]]></style></svg><img src=x onerror=alert(1)>",
)  # fmt: skip


class Named(ImageDataset):
    """A data set of given names, with equally many images of every class in every domain, and no image files."""

    def __init__(self, domains: Sequence[str] = DOMAINS, classes: Sequence[str] = CLASSES, each: int = 12) -> None:
        self.domain_names, self.class_names = tuple(domains), tuple(classes)
        cells = [(d, c) for d in range(len(domains)) for c in range(len(classes)) for _ in range(each)]
        self.domains, self.labels = (np.array(column, np.int64) for column in zip(*cells, strict=True))

    def image(self, row: int) -> Image.Image:
        return Image.new("RGB", (4, 4))

    def name(self, row: int) -> str:
        return f"folder/image-{row}.png"

    def content(self, row: int) -> bytes:
        return bytes(3)


def write_run(
    path: Path,
    dataset: ImageDataset | None = None,
    methods: Sequence[str] = METHODS,
    seeds: Iterable[int] = range(3),
    probabilities: str = "all",
    rules: Sequence[str] = (RULE, "oracle"),
    together: bool = False,
    **changes: Any,
) -> Run:
    """Writes the directory of a run that held out each domain in turn, or all of them `together`, and reads it.

    Later methods are somewhat better. `probabilities`: all | predicted. `changes`: keys of the block `protocol`,
    or of results.json.
    """
    dataset, seeds = dataset or Named(), list(seeds)
    protocol = {"selection": RULE, "metric": "accuracy"}
    protocol |= {key: changes.pop(key) for key in ("metric", "selection") if key in changes}
    records = []
    with RunDirectory(path) as directory:
        directory.lock()
        numbers = range(len(dataset.domain_names))
        for held_out in [tuple(numbers)] if together else [(number,) for number in numbers]:
            rows = np.flatnonzero(np.isin(dataset.domains, held_out))
            held = tuple(dataset.domain_names[number] for number in held_out)
            labels, domains = torch.as_tensor(dataset.labels[rows]), torch.as_tensor(dataset.domains[rows])
            names = {"class_names": json.dumps(dataset.class_names)}
            file = images_file(held)
            shared = {file: directory.write_arrays(file, test_images(dataset, rows), names)}
            models = [(i, m, s) for i, m in enumerate(methods) for s in ([0] if m == DETERMINISTIC else seeds)]
            for i, method, seed in models:
                drawn = np.random.default_rng([i, seed, int(rows[0])]).normal(
                    size=(len(rows), len(dataset.class_names))
                )
                drawn[np.arange(len(rows)), dataset.labels[rows]] += 1.0 + 0.2 * i
                logits = torch.tensor(2 * drawn, dtype=torch.float32)
                tested = score(logits, labels, domains, dataset.class_names, dataset.domain_names)
                value = metric(protocol["metric"], logits, labels, domains)
                picks = {rule: Pick(step=10, weights="w", metrics={"test": tested}, value=value) for rule in rules}
                fixed = method == DETERMINISTIC or None
                record = Record(
                    ModelKey(method, held, seed, 0), {}, "ok", selected=picks, deterministic=fixed, train_seconds=0.0,
                    **OF_MODELS,
                )  # fmt: skip
                softmax = logits.softmax(1).numpy()
                kept = {"all": softmax, "predicted": softmax.max(1)}
                images, values = HeldOutImages.of(dataset, rows), per_image(protocol["metric"], logits, labels)
                own = [
                    Prediction(
                        *record.key[:3], rule, images, logits.argmax(1).numpy(), values,
                        kept[probabilities] if rule == protocol["selection"] else None,
                    )
                    for rule in rules
                ]  # fmt: skip
                own_file = predictions_in(record.folder)
                files = shared | {own_file: directory.write_predictions(record.folder, arrays_of(own))}
                records.append(dataclasses.replace(record, files=files))
        made = summarise(
            records,
            partial(predictions_of, directory),
            methods=methods,
            rules={rule: f"made up; step picked by {rule}" for rule in rules},
            metric=protocol["metric"],
            references={method: methods[0] for method in methods[1:]},
            deterministic=[DETERMINISTIC],
        )
        assert made.measured is not None
        made.measured.write(directory)
        images = np.zeros((len(dataset.domain_names), len(dataset.class_names)), np.int64)
        np.add.at(images, (dataset.domains, dataset.labels), 1)
        counts = dict(zip(dataset.domain_names, images.tolist(), strict=True))
        results = whole({
            "schema": 1,
            "recipe": {
                "name": "made_up",
                "data": {
                    "name": "folder",
                    "root": "nowhere",
                    "class_names": {},
                    "group": None,
                    "on_bad_image": "error",
                },
                "protocol": protocol,
                "encoder": {"name": "timm", "model": "test_vit"},
                "methods": [{"name": method} for method in methods],
            },
            "environment": {"python": "3.11.7", "data": {"images": len(dataset)}},
            "data": {"classes": list(dataset.class_names), "images": counts},
            "runs": [record.to_json() for record in records],
            "summary": [row.to_json() for row in made.rows],
            "comparisons": [row.to_json() for row in made.comparisons],
        })  # fmt: skip
        directory.write_results(results | changes)
    return read_run(path)


def label_curve(method: str = "erm", domains: Sequence[str] = DOMAINS) -> Json:
    """What labels of a new site bring; the last of the domains has too few images for 50 labels."""
    points = []
    for how, labels in [(None, 0), *((how, labels) for how in ("label", "random") for labels in (10, 20, 50))]:
        gains = {name: labels * (i + 1) / 600 - 0.01 * (how == "random") for i, name in enumerate(domains)}
        gains = dict([*gains.items()][: None if labels < 50 else -1])
        accuracies = {name: 0.6 + gain for name, gain in gains.items()}
        gain = fmean(gains.values())
        interval = {"low": gain - 0.05, "high": gain + 0.05} if how and labels < 50 else None
        point = {"chosen": how, "labels": labels, "accuracy": 0.6 + gain, "gain": gain, "interval": interval}
        points.append({**point, "accuracies": accuracies, "past_gains": gains})
    return {"of": "0123456789abcdef", "method": method, "selection": RULE, "points": points}


# ------------------------------------------------------------------------------------------------------ runs in memory

HELD = (("art",), ("sketch",))
ALPHAS = (0.0, 0.1, 0.5, 1.0)  # of WiSE-FT's curve
PARTS = ("art", "sketch", "photo", "cartoon")  # the domains of the analysis


def run_in_memory(
    methods: Sequence[Any] = ("erm", "xdomainmix"),
    held: Sequence[tuple[str, ...]] = HELD,
    seeds: Iterable[int] = (0, 1),
    trials: int = 1,
    alphas: Sequence[float] = (),
    domains: Sequence[str] = PARTS,
    selection: str = RULE,
    metric: str = "accuracy",
    **recipe: Any,
) -> Run:
    """A run with curves and, of its picked models, an analysis; values differ everywhere, and there is no summary.

    `methods` are items of the recipe. One whose label begins with wise_ft has a curve over `alphas`.
    """
    labels = [item if isinstance(item, str) else item["label"] for item in methods]
    keys = [(label, where, seed, i) for label in labels for where in held for seed in seeds for i in range(trials)]
    protocol = {"selection": selection, "metric": metric}
    block = {"name": "made up", "data": {"name": "folder"}, "methods": list(methods), "protocol": protocol}
    entries = [_entry(*key, alphas, selection) for key in keys]
    data = {"classes": list(CLASSES), "images": {}}
    results = {
        "recipe": block | recipe,
        "environment": {"python": "3.11"},
        "summary": [],
        "data": data,
        "runs": entries,
    }
    run = run_of(results, Path("nowhere"))
    measured = [record.key for record in run.picked]
    run.__dict__.update({"class_names": list(CLASSES), "measured": RunMeasures("", {}, {}), "scalars": curves_of(run)})
    run.__dict__["analysis"] = analysis(measured, domains)
    return run


def selection_value(label: str, where: tuple[str, ...], seed: int, trial: int) -> float:
    return round(0.5 + 0.01 * len(label) + 0.02 * len(where[0]) + 0.003 * seed + 0.0004 * (trial * 7 % 11), 6)


def value_on_test(label: str, where: tuple[str, ...], seed: int, trial: int) -> float:
    return round(0.9 - selection_value(label, where, seed, trial) / 2, 6)


def _entry(
    label: str, where: tuple[str, ...], seed: int, trial: int, alphas: Sequence[float], selection: str
) -> dict[str, Any]:
    value, test = selection_value(label, where, seed, trial), value_on_test(label, where, seed, trial)
    scores = [
        {"accuracy": v, "balanced_accuracy": v, "macro_f1": v, "auroc": None, "worst_domain_accuracy": None,
         "nll": 1 - v, "ece": 0.1, "n": 50, "per_class_recall": {}, "per_domain": {}}
        for v in (value, test)
    ]  # fmt: skip
    pick = {"step": 100, "weights": "x", "metrics": {RULE: scores[0], "test": scores[1]}, "value": value}
    if label.startswith("wise_ft") and alphas:
        curve = [{"alpha": a, RULE: value - (a - 0.3) ** 2, "test": test - (a - 0.6) ** 2} for a in alphas]
        pick |= {"alpha": 0.3, "curve": curve}
    hparams = {
        "lr": 10 ** (-4 + 3 * (trial * 7 % 11) / 11),
        "weight_decay": 0.0 if trial == 0 else 10.0 ** -(1 + trial % 7),
        "kind": ["a", "b", None][trial % 3],
        "same": 3,
    }
    key = {"method": label, "test_domains": list(where), "seed": seed, "trial": trial, "hparams": hparams}
    return {**key, "status": "ok", "selected": {selection: pick}}


def curves_of(run: Run, steps: Sequence[int] = range(10, 210, 10), heads: bool = False) -> dict[str, Scalars]:
    """A loss, a part of it, one that is 0, and the selection metric of every picked model, as in `events/`.

    `heads`: of heads that trained together, two chunks of 3 and 1 heads per method and held-out set.
    """
    curves: dict[str, Scalars] = {}
    for i, record in enumerate(run.picked):
        if not heads:
            curves[sub_run(*record.key)] = {
                "train/loss": [(step, 2.0 / step + 0.01 * i) for step in steps],
                "train/auxiliary_loss": [(step, 1.0 / step) for step in steps],
                "train/nothing": [(step, 0.0) for step in steps],
                "train/lr": [(step, 0.001) for step in steps],
                "val/accuracy": [(step, min(0.9, step / 250 + 0.001 * i)) for step in steps],
            }
        for chunk, (count, loss) in enumerate(((3.0, 1.0), (1.0, 2.0)) if heads else ()):
            scalars = {"train/heads": [(step, count) for step in steps]}
            for tag, value in (("train/loss", loss), ("val/accuracy", loss / 4)):
                for prefix, factor in (("", 1.0), ("lowest/", 0.5), ("highest/", 1.5)):
                    scalars[f"{prefix}{tag}"] = [(step, factor * value) for step in steps]
            curves[sub_run(record.method, record.test_domains, 0, chunk, heads=True)] = scalars
    return curves


# -------------------------------------------------------------------------------------------------------- analysis.json

SHARES = [step / 10 for step in range(10)]


def analysis(models: Sequence[ModelKey], domains: Sequence[str]) -> Json:
    """An analysis.json with numbers that differ everywhere; `xdomainmix` has augmented points and two divergences."""
    sizes = {"training": 900, "used": 900, "validation": 300, "validation_used": 300, "test": 400, "test_used": 400}
    notes = ["frozen encoder: the features, and so the representation invariance, are the same for all methods"]
    images = {",".join(key.test_domains): sizes for key in models}
    head = {"schema": 1, "selection": "train_val", "seed": 0, "images": images, "notes": notes}
    return {**head, "models": [_model(i + 100 * key.seed, key, domains) for i, key in enumerate(models)]}


def _model(k: int, key: ModelKey, domains: Sequence[str]) -> Json:
    mixing, first = "xdomainmix" in key.method, key.seed == 0
    train = [domain for domain in domains if domain not in key.test_domains]
    measured = {domain: _calibration(k + i, "validation") for i, domain in enumerate(train)}
    measured |= {domain: _calibration(k + 7 + i, "test") for i, domain in enumerate(key.test_domains)}
    pairs = {"class_specific_vs_generic": len(CLASSES), "domain_specific_vs_generic": len(train)}
    pairs |= {"original_vs_augmented": len(CLASSES)} if mixing else {}
    plots = {name: {"map": _plot(k, n, 3.0), "pca": _plot(k + 1, n, 1.0)} for name, n in pairs.items()}
    divergence = {"published_mmd": 0.4375 + 0.0001 * k, "batch_size": 32, "stderr": 0.0011, "n": 1000,
                  "bandwidths": [8.1, 16.2, 32.4]}  # fmt: skip
    return {
        "method": key.method,
        "test_domains": list(key.test_domains),
        "seed": key.seed,
        "trial": key.trial,
        "representation_invariance": {
            "paper": 1.234 + 0.01 * k, "published_code": 0.00234 + 0.0001 * k, "classes": len(CLASSES),
            "domains": len(train), "paper_noise": 0.5 + 0.01 * k, "published_code_noise": 0.001 + 0.0001 * k,
        },
        "prediction_invariance": {
            "risk_variance": 0.0456 + 0.001 * k, "risk": {d: 0.3 + 0.1 * i + 0.001 * k for i, d in enumerate(train)},
        },
        "calibration": {"temperature": 1.2 + 0.01 * k, "domains": measured},
        "domain_head": ("own" if mixing else "fitted") if first else None,
        "importance": _importance(k, mixing) if first else None,
        "embedding": {"pairs": plots} if first else None,
        "divergence": [
            divergence | {"quantile": q, "unbiased_mmd2": 0.012 + 0.001 * k + 0.02 * q} for q in (0.5, 0.9)
        ] if mixing else None,
        "normalized": False,
        "weights": None,
        "inputs": f"{k:016x}",
    }  # fmt: skip


def _calibration(k: int, role: str) -> Json:
    before = 0.05 + 0.002 * k
    losses = {"nll": 0.9 + 0.01 * k, "nll_scaled": 0.8 + 0.01 * k}
    bins = {"reliability": _bins(before), "reliability_scaled": _bins(before / 2)}
    return {"role": role, "n": 330 + k, "ece": before, "ece_scaled": before / 2, **losses, **bins}


def _bins(off: float) -> list[Json]:
    """The first bins are empty, the next one has too few images to be drawn."""
    bins: list[Json] = [{"confidence": None, "accuracy": None, "n": 0} for _ in range(4)]
    bins.append({"confidence": 0.3, "accuracy": 0.99, "n": 3})
    centres = [(i + 0.5) / 15 for i in range(5, 15)]
    return bins + [{"confidence": c, "accuracy": max(c - off, 0.0), "n": 110 + 20 * i} for i, c in enumerate(centres)]


def _importance(k: int, own_head: bool) -> Json:
    curves = {
        "score": [0.9 * (1 - share) ** 3 + 0.1 for share in SHARES],
        "gradient_norm": [0.9 * (1 - share) ** 1.5 + 0.1 - 0.001 * k / 10 for share in SHARES],
        "random": [0.95 - 0.4 * share**3 for share in SHARES],
    }
    area = {order: 0.4 + 0.1 * i + 0.0003 * k for i, order in enumerate(curves)}
    both = {order: [0.9 * value for value in values] for order, values in curves.items()} if own_head else None
    areas = {"class": area, "domain": {order: value / 2 for order, value in area.items()} if own_head else None}
    return {"shares": SHARES, "images": 1588, "class": curves, "domain": both, "area": areas}


def _plot(k: int, labels: int, apart: float) -> Json:
    """200 images, each as two points; labels lie apart among points of kind 0 only."""
    label, kind = [i % labels for i in range(200)] * 2, [0] * 200 + [1] * 200
    points = []
    for i, (number, part) in enumerate(zip(label, kind, strict=True)):
        turn, radius, centre = 2.4 * i + k, 0.05 * math.sqrt(i % 200), apart * (1 - part)
        angle = 2 * math.pi * number / labels
        x, y = centre * math.cos(angle) + radius * math.cos(turn), centre * math.sin(angle) + radius * math.sin(turn)
        points.append([round(x, 3), round(y, 3)])
    silhouettes = {"silhouette": 0.11 + 0.001 * k, "silhouette_of_labels": [0.61 + 0.001 * k, 0.02 - 0.001 * k]}
    return {"points": points, "kind": kind, "label": label, **silhouettes}
