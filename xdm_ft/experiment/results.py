"""What results.json says beside its records: the environment, and one summary row per method."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from xdm_ft.data import ImageDataset
from xdm_ft.evaluation.predictions import Prediction
from xdm_ft.evaluation.summary import protocol_line, summarise
from xdm_ft.evaluation.trials import picked_trials
from xdm_ft.experiment.findings import Finding
from xdm_ft.experiment.plan import Plan
from xdm_ft.experiment.prepared import Prepared
from xdm_ft.recipe.blocks import MethodItem
from xdm_ft.recipe.read import Recipe
from xdm_ft.report.published import BENCHMARKS, benchmark_of

if TYPE_CHECKING:
    from accelerate import Accelerator

Record = Mapping[str, Any]
LIBRARIES = ("xdm_ft", "torch", "torchvision", "timm", "open_clip_torch", "accelerate", "numpy", "pillow")


def environment(accelerator: Accelerator) -> dict[str, Any]:
    """What the numbers were made with."""
    import torch

    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "device": accelerator.device.type,
        "processes": accelerator.num_processes,
        "threads": torch.get_num_threads(),
        "mixed_precision": accelerator.mixed_precision,
        "versions": {name: importlib.metadata.version(name) for name in LIBRARIES},
    }


def inputs(dataset: ImageDataset, prepared: Prepared) -> dict[str, Any]:
    """What models are trained on: the data's annotations by a hash, cached features by their key."""
    hasher = xxhash.xxh3_64(json.dumps([dataset.class_names, dataset.domain_names]).encode())
    for values in (dataset.labels, dataset.domains, dataset.groups, dataset.splits):
        hasher.update(b"-" if values is None else json.dumps(np.asarray(values).tolist()).encode())
    data = {"images": len(dataset), "annotations": hasher.hexdigest()}
    features = {} if prepared.features is None else {"features": {"key": prepared.features.key}}
    return {"data": data, **features}


def about(plan: Plan, faults: Sequence[Finding]) -> dict[str, Any]:
    """What results.json says of the data beside their hash: whether test domains are unseen, and faults found."""
    return {"tested_on": plan.splits[0].tested_on, "findings": [finding.line for finding in faults]}


def summary_of(
    plan: Plan, prepared: Prepared, runs: Sequence[Record], prediction_of: Callable[[Record, str], Prediction]
) -> list[dict[str, Any]]:
    """One row per selection rule and method, in the recipe's order; differences are to `references`.

    Of several trials each rule picks its own, of which alone `prediction_of(record, rule)` is asked.
    """
    methods, metric = plan.recipe.methods, plan.recipe.protocol.metric
    benchmark = benchmark_of(plan.recipe.data.block.model_dump(mode="json"), runs)
    rows = []
    for rule in plan.rules:
        picked = picked_trials(runs, rule, metric)
        of_rule = summarise(
            picked,
            [prediction_of(record, rule) for record in picked if rule in record["selected"]],
            methods=[item.label for item in methods],
            rules=[rule],
            metric=metric,
            protocol_line=lambda rule: _protocol_line(plan, prepared, rule),
            references=references(methods),
            convention=BENCHMARKS[benchmark].convention if benchmark else None,
        )
        for row in of_rule:
            trials = {record["trial"] for record in runs if record["method"] == row["method"]}
            budget = row["budget"] | {"draws": len(trials)}
            rows.append(row | {"budget": budget} | _flags(runs, picked, row["method"], rule))
    return rows


def references(methods: Sequence[MethodItem]) -> dict[str, str]:
    """Method → what it is compared with: plain ERM with the same class head, and ERM itself with ERM on linear.

    Methods with nothing to compare with are left out.
    """

    def head(item: MethodItem) -> tuple[Any, ...]:
        return item.head.name, *item.head.settings().items()

    plain: dict[tuple[Any, ...], str] = {}  # head → label of the recipe's first plain ERM with it
    for item in methods:
        if item.is_plain_erm:
            plain.setdefault(head(item), item.label)
    found = {item.label: plain.get(("linear",) if item.is_plain_erm else head(item)) for item in methods}
    return {label: reference for label, reference in found.items() if reference not in (None, label)}


def _flags(runs: Sequence[Record], picked: Sequence[Record], method: str, rule: str) -> dict[str, Any]:
    """What the picks of a method were flagged for, and how many of them; and the trials that failed beside them."""
    selected = [r["selected"][rule] for r in picked if r["method"] == method and rule in r["selected"]]
    counts = Counter(flag for one in selected for flag in one.get("flags", ()))
    flags = [f"{flag} in {n} of {len(selected)} picks" for flag, n in counts.items()]
    trials = [run for run in runs if run["method"] == method and run["trial"] > 0]
    failed = [run["reason"] for run in trials if run["status"] == "failed"]
    if failed:
        flags.append(f"{len(failed)} of {len(trials)} drawn trials failed, the first: {failed[0]}")
    return {"flags": flags} if flags else {}


def _augmentation(recipe: Recipe) -> str:
    """Of training by gradient steps: solvers read the plain view, whatever the others of the recipe do."""
    words: str = recipe.train_augmentation
    if words == "none":
        return words
    if recipe.features.views:
        words += f", {recipe.features.views} cached view{'s' if recipe.features.views > 1 else ''} per image"
    if any(item.is_solver for item in recipe.methods):
        words += " of what trains " + ("end to end" if recipe.trainable else "by gradient steps")
    return words


def _protocol_line(plan: Plan, prepared: Prepared, rule: str) -> str:
    recipe, dataset = plan.recipe, plan.dataset
    split = "official split" if recipe.protocol.name == "official" else "leave one domain out"
    notes = [*plan.notes, f"encoder {prepared.pretraining}, {'trained end to end' if recipe.trainable else 'frozen'}"]
    notes.append(f"training loss averaged by {recipe.training.loss_average}")
    if prepared.unreadable:
        notes.append(f"{len(prepared.unreadable)} unreadable images left out")
    return protocol_line(
        data=f"{recipe.data.name}, {len(dataset)} images, {len(dataset.class_names)} classes, "
        f"{len(dataset.domain_names)} domains",
        split=split,
        notes=notes,
        selection=rule,
        metric=recipe.protocol.metric,
        augmentation=_augmentation(recipe),
        draws=recipe.search.trials,
    )
