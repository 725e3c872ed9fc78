"""`xdm-ft features`: computes the features of a recipe and caches them, without training."""

from __future__ import annotations

import argparse
from typing import Any

from xdm_ft.cli import CommandResult
from xdm_ft.cli.run import load_recipe
from xdm_ft.experiment.cluster import check_cluster
from xdm_ft.experiment.plan import read_data
from xdm_ft.experiment.prepare import build_encoders, prepare
from xdm_ft.experiment.results import trained_words
from xdm_ft.experiment.work import launched
from xdm_ft.features.cache import cache_folder
from xdm_ft.features.given import NO_IMAGES
from xdm_ft.recipe.settings import Recipe
from xdm_ft.runtime.errors import UserError, plural
from xdm_ft.runtime.progress import pulse
from xdm_ft.runtime.watchdog import heartbeat


def main(arguments: argparse.Namespace) -> CommandResult:
    return fill_cache(load_recipe(arguments))


def fill_cache(recipe: Recipe) -> CommandResult:
    """Computes the features and activations that the recipe caches. Raises `UserError` if there are none."""
    if all(recipe.trains_on_images(item) for item in recipe.methods):
        problem = "it trains its encoder, and no method of it uses cached features; use `xdm-ft run`"
        raise UserError(f"{recipe.name}: {problem}")
    if not recipe.has_images:
        raise UserError(f"{recipe.name}: {NO_IMAGES}; nothing to compute; use `xdm-ft run`")
    with launched(recipe) as accelerator, heartbeat(accelerator):
        check_cluster(recipe)
        with pulse.waiting():
            dataset = read_data(recipe)
            recipe, encoders = build_encoders(recipe, dataset)
        prepared = prepare(recipe, dataset, encoders, accelerator)
    sets: list[dict[str, Any]] = []
    for label, inputs in prepared.encoders.items():
        cached = {"features": inputs.features}
        cached |= {f"activations, {trained_words(cut)}": tensors for cut, tensors in inputs.activations.items()}
        for what, tensors in cached.items():
            if tensors is not None:
                name = what if label is None else f"{label}, {what}"
                computed = tensors.extracted  # by this process or its tasks, in all views; equal images count once
                sets.append({"what": name, "key": tensors.key, "width": tensors.width, "computed": computed})
    images = plural(len(dataset), "image")
    lines = [f"{s['what']}: {images} of width {s['width']}, {s['computed']} of them extracted now" for s in sets]
    document = {
        "sets": sets,
        "folder": cache_folder(recipe.features),
        "images": len(dataset),
        "views": recipe.features.views,
        "unreadable": {dataset.name(row): reason for row, reason in prepared.unreadable.items()},
        "computed": sum(part["computed"] for part in sets),
    }
    return CommandResult(document, lines)
