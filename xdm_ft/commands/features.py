"""`xdm-ft features`: computes the features of a recipe and caches them, without training."""

from __future__ import annotations

import logging

from xdm_ft.errors import UserError
from xdm_ft.experiment.heartbeat import heartbeat
from xdm_ft.experiment.machine import launched
from xdm_ft.experiment.plan import read_data
from xdm_ft.experiment.prepared import build_encoder, prepare
from xdm_ft.progress import pulse
from xdm_ft.recipe.read import Recipe

logger = logging.getLogger("xdm_ft")


def fill_cache(recipe: Recipe) -> None:
    """Extracts the features that the recipe needs. Raises `UserError` if it needs none."""
    if not recipe.needs_features:
        raise UserError(
            f"{recipe.name}: it trains its encoder, and no method of it uses cached features; use `xdm-ft run`"
        )
    with launched(recipe) as accelerator, heartbeat(accelerator):
        with pulse.waiting():
            encoder, dataset = build_encoder(recipe, recipe.protocol.seeds[0]), read_data(recipe)
        features = prepare(recipe, dataset, encoder, accelerator).features
    assert features is not None, "the recipe needs features"
    logger.info("%d features of width %d, %d of them extracted now", len(features), features.width, features.extracted)
