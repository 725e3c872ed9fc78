"""What results.json says beside its records: the environment, and one summary row per method."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import TYPE_CHECKING, Any

from xdm_ft.evaluation.predictions import Prediction
from xdm_ft.evaluation.summary import protocol_line, summarise
from xdm_ft.experiment.material import Material
from xdm_ft.experiment.plan import Plan

if TYPE_CHECKING:
    from accelerate import Accelerator

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
        "versions": {name: importlib.metadata.version(name) for name in LIBRARIES},
    }


def summary_of(
    plan: Plan, material: Material, runs: list[dict[str, Any]], predictions: list[Prediction]
) -> list[dict[str, Any]]:
    """One row per selection rule and method, in the recipe's order; differences are to the recipe's plain ERM."""
    methods = plan.recipe.methods
    plain = [
        item.label
        for item in methods
        if item.algorithm.name == "erm" and item.sharpness is None and item.averaging is None
    ]
    return summarise(
        runs,
        predictions,
        methods=[item.label for item in methods],
        rules=plan.rules,
        metric=plan.recipe.protocol.metric,
        protocol_line=lambda rule: _protocol_line(plan, material, rule),
        reference=plain[0] if plain else "erm",
    )


def _protocol_line(plan: Plan, material: Material, rule: str) -> str:
    recipe, dataset = plan.recipe, plan.dataset
    split = "official split" if recipe.protocol.name == "official" else "leave one domain out"
    notes = [*plan.notes, f"encoder {material.pretraining}, {'trained end to end' if recipe.trainable else 'frozen'}"]
    if material.unreadable:
        notes.append(f"{len(material.unreadable)} unreadable images left out")
    return protocol_line(
        data=f"{recipe.data.name}, {len(dataset)} images, {len(dataset.class_names)} classes, "
        f"{len(dataset.domain_names)} domains",
        split=split,
        notes=notes,
        selection=rule,
        metric=recipe.protocol.metric,
        augmentation="none",
        draws=1,
    )
