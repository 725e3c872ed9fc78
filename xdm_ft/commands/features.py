"""`xdm-ft features`: computes the features of a recipe and caches them, without training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from xdm_ft.commands.answer import Answer
from xdm_ft.errors import UserError, plural
from xdm_ft.experiment.heartbeat import heartbeat
from xdm_ft.experiment.machine import launched
from xdm_ft.experiment.plan import read_data
from xdm_ft.experiment.prepared import build_encoder, prepare
from xdm_ft.features.store import cache_folder
from xdm_ft.progress import pulse
from xdm_ft.recipe.read import Recipe


@dataclass(frozen=True)
class Filled(Answer):
    """The features of a recipe, which are now in the cache."""

    key: str  # of the plain view: the name of its folder inside `folder`
    folder: Path  # of the cache
    images: int
    views: int  # augmented views of each image
    width: int
    computed: int  # by this process, in all views; equal images count once
    unreadable: dict[str, str]  # {image: why it does not decode}

    def text(self) -> str:
        return f"{plural(self.images, 'feature')} of width {self.width}, {self.computed} of them extracted now"


def fill_cache(recipe: Recipe) -> Filled:
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
    return Filled(
        features.key,
        cache_folder(recipe.features),
        len(features),
        features.views,
        features.width,
        features.extracted,
        {dataset.name(row): reason for row, reason in features.unreadable.items()},
    )
