"""The metadata of weights: all that loading its model needs besides the weights, and how it was made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from xdm_ft.experiment.plan import Plan, PlannedModel, hparams
from xdm_ft.experiment.prepared import Prepared, PreparedEncoder
from xdm_ft.experiment.summary import protocol_of
from xdm_ft.recipe.method import MethodItem
from xdm_ft.training import Selected
from xdm_ft.weights.prompts import expand_templates

FEW = 10  # images: the mean of fewer says much about each of them


def weights_metadata(
    plan: Plan,
    prepared: Prepared,
    planned: PlannedModel,
    rule: str,
    selected: Selected,
    measured: Mapping[str, Any],
    temperature: float | None,
) -> dict[str, str]:
    """Returns the metadata of weights. Every value is JSON; equal runs give equal texts, wherever they write.

    `rule` is the selection rule that picked the weights. `measured` is what is known of their quality. `temperature`
    divides their logits for calibrated probabilities; None: not known.
    """
    item = planned.item
    described = {
        "class_names": plan.dataset.class_names,
        "encoder": _encoder(plan, prepared.of(item), item, selected),
        "head": {"name": item.head.name, "settings": item.head.kwargs()},
        "few_images": _few_images(plan, planned),
        "class_means": getattr(item.algorithm.cls, "class_means", False),  # algorithms that take steps lack it
        "method": {
            "label": item.label,
            "test_domains": planned.split.test_domains,
            "train_domains": planned.split.train_domains,
            "seed": planned.seed,
            "trial": planned.trial,
            "steps": planned.steps,
            "hparams": hparams(plan.recipe, item, planned.training) | selected.hparams,
        },
        # whether the head reads L2-normalised features
        "normalize": prepared.of(item).encoder.normalize or item.reads_normalized,
        "preprocessing": prepared.of(item).encoder.preprocessing.model_dump(mode="json"),
        "prompts": _prompts(plan, planned),
        "protocol": {
            **plan.recipe.protocol.model_dump(mode="json"),
            "selected_by": rule,
            "description": protocol_of(plan, prepared, rule),
        },
        "results": measured,
        "step": selected.step,
        "temperature": temperature,
    }
    return {key: json.dumps(value, allow_nan=False) for key, value in described.items()}


def _few_images(plan: Plan, planned: PlannedModel) -> dict[str, int]:
    """Returns {class: number of training images}, where it is below `FEW`."""
    counts = plan.annotations.labels[torch.cat(planned.split.train)].bincount(minlength=len(plan.dataset.class_names))
    return {name: n for name, n in zip(plan.dataset.class_names, counts.tolist(), strict=True) if 0 < n < FEW}


def _encoder(plan: Plan, prepared: PreparedEncoder, item: MethodItem, selected: Selected) -> dict[str, Any]:
    """Describes the encoder: its block of the recipe, which builds it, and what its weights are.

    "in_this_file": "all" of its weights, a "part", whose others are those of the named encoder, or None.
    """
    recipe, is_trained = plan.recipe, any(name.startswith("encoder.") for name in selected.state)
    whole = is_trained and not item.is_cut
    return {
        "label": item.encoder_label,  # of several encoders
        "settings": item.encoder.block.model_dump(mode="json"),
        "identity": prepared.encoder.identity(),
        "width": prepared.width,
        "pretraining": prepared.encoder.pretraining,
        "trainable": item.trainable if isinstance(item.trainable, bool) else item.trainable.model_dump(mode="json"),
        "in_this_file": "all" if whole else "part" if is_trained else None,
        # of what is frozen; random weights are drawn from the seed
        "xxh3": None if whole else prepared.weights,
        "seed": None if whole else recipe.protocol.seeds[0],
        "precision": recipe.training.mixed_precision if is_trained else recipe.features.precision,
    }


def _prompts(plan: Plan, planned: PlannedModel) -> list[str] | None:
    """Returns the templates of the class embeddings that the head was computed or started from; None if it was not."""
    if not planned.item.reads_text:
        return None
    return expand_templates(planned.item.block.prompts or planned.item.encoder.kwargs()["prompts"])
