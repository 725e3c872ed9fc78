"""Run directories with made-up predictions: what a run would have written, without training."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from xdm_ft.evaluation.metrics import metric, per_image, score
from xdm_ft.evaluation.predictions import HeldOutImages, Prediction, arrays_of, test_images
from xdm_ft.evaluation.records import ModelKey, Pick, Record
from xdm_ft.evaluation.summary import Summary, summarise
from xdm_ft.images.dataset import ImageDataset
from xdm_ft.report.finished import Run, read_run
from xdm_ft.storage.names import images_file
from xdm_ft.storage.run_directory import RunDirectory

DOMAINS, CLASSES = ("art", "photo", "sketch"), ("cat", "dog", "hen")
DETERMINISTIC = "zero_shot"


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


def recipe(methods: Sequence[str], **protocol: Any) -> dict[str, Any]:
    return {
        "name": "made_up",
        "data": {"name": "folder", "root": "nowhere", "group": None, "on_bad_image": "error"},
        "protocol": {"name": "leave_one_domain_out", "selection": "train_val", "metric": "accuracy"} | protocol,
        "encoder": {"name": "timm", "model": "test_vit"},
        "methods": [{"name": method} for method in methods],
        "search": {"trials": 1},
        "output": {"dir": "output"},
    }


def logits_of(dataset: ImageDataset, rows: np.ndarray, place: int, seed: int) -> torch.Tensor:
    """Logits float32 [n,C] of the method at that place of the recipe: later methods are somewhat better."""
    generator = np.random.default_rng([place, seed, int(rows[0])])
    drawn = generator.normal(size=(len(rows), len(dataset.class_names)))
    drawn[np.arange(len(rows)), dataset.labels[rows]] += 1.0 + 0.2 * place
    return torch.tensor(2 * drawn, dtype=torch.float32)


def write_run(
    path: Path,
    dataset: ImageDataset | None = None,
    methods: Sequence[str] = ("erm", "xdomainmix", "sam"),
    seeds: int | Sequence[int] = 3,
    probabilities: str = "all",
    rules: Sequence[str] = ("train_val", "oracle"),
    together: bool = False,
    **changes: Any,
) -> Run:
    """Writes the directory of a run that held out each domain in turn, or all of them `together`, and reads it.

    `probabilities`: all | predicted | none. `changes`: keys of the block `protocol`, or of results.json.
    """
    dataset = dataset or Named()
    made = recipe(methods, **{key: changes.pop(key) for key in ("metric", "selection") if key in changes})
    protocol, directory = made["protocol"], RunDirectory(path)
    seeds_of = range(seeds) if isinstance(seeds, int) else seeds
    records, predictions = [], []
    with directory:
        directory.lock()
        numbers = range(len(dataset.domain_names))
        for held_out in [tuple(numbers)] if together else [(number,) for number in numbers]:
            rows = np.flatnonzero(np.isin(dataset.domains, held_out))
            about = {"class_names": json.dumps(dataset.class_names)}
            held = tuple(dataset.domain_names[number] for number in held_out)
            directory.write_arrays(images_file(held), test_images(dataset, rows), about)
            for place, method in enumerate(methods):
                for seed in [0] if method == DETERMINISTIC else seeds_of:
                    logits = logits_of(dataset, rows, place, seed)
                    record = _record(dataset, rows, ModelKey(method, held, seed, 0), logits, rules, protocol["metric"])
                    own = [_prediction(dataset, rows, record, logits, rule, protocol, probabilities) for rule in rules]
                    directory.write_predictions(record.folder, arrays_of(own))
                    records.append(record)
                    predictions += [dataclasses.replace(one, probabilities=None) for one in own]
        found = _summary(records, predictions, made, rules)
        directory.write_results(document(dataset, made, records, found) | changes)
    return read_run(path)


def _record(
    dataset: ImageDataset, rows: np.ndarray, key: ModelKey, logits: torch.Tensor, rules: Sequence[str], name: str
) -> Record:
    labels, domains = torch.as_tensor(dataset.labels[rows]), torch.as_tensor(dataset.domains[rows])
    found = score(logits, labels, domains, dataset.class_names, dataset.domain_names)
    value = metric(name, logits, labels, domains)
    picks = {rule: Pick(step=10, weights="w", metrics={"test": found}, value=value) for rule in rules}
    return Record(key, {}, "ok", selected=picks, deterministic=key[0] == DETERMINISTIC or None)


def _prediction(
    dataset: ImageDataset,
    rows: np.ndarray,
    record: Record,
    logits: torch.Tensor,
    rule: str,
    protocol: dict[str, Any],
    kind: str,
) -> Prediction:
    found = logits.softmax(1).numpy()
    kept = {"all": found, "predicted": found.max(1), "none": None}[kind if rule == protocol["selection"] else "none"]
    values = per_image(protocol["metric"], logits, torch.as_tensor(dataset.labels[rows]))
    return Prediction(*record.key[:3], rule, HeldOutImages.of(dataset, rows), logits.argmax(1).numpy(), values, kept)


def _summary(
    records: list[Record], predictions: list[Prediction], made: dict[str, Any], rules: Sequence[str]
) -> Summary:
    methods = [item["name"] for item in made["methods"]]
    every = [
        summarise(
            records,
            [one for one in predictions if one.rule == rule],
            methods=methods,
            rule=rule,
            metric=made["protocol"]["metric"],
            protocol=f"made up; step picked by {rule}",
            references={method: methods[0] for method in methods[1:]},
            deterministic=[DETERMINISTIC],
        )
        for rule in rules
    ]
    return Summary([row for one in every for row in one.rows], [row for one in every for row in one.comparisons])


def document(dataset: ImageDataset, made: dict[str, Any], records: Sequence[Record], found: Summary) -> dict[str, Any]:
    images = np.zeros((len(dataset.domain_names), len(dataset.class_names)), np.int64)
    np.add.at(images, (dataset.domains, dataset.labels), 1)
    return {
        "schema": 1,
        "recipe": made,
        "environment": {"python": "3.11.7", "data": {"images": len(dataset)}},
        "data": {
            "classes": list(dataset.class_names),
            "images": dict(zip(dataset.domain_names, images.tolist(), strict=True)),
        },
        "tested_on": "domains never trained on",
        "findings": [],
        "runs": [record.to_json() for record in records],
        "summary": [row.to_json() for row in found.rows],
        "comparisons": [row.to_json() for row in found.comparisons],
        "looks": [],
    }
