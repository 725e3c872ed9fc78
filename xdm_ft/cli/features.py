"""`xdm-ft features`: computes the features of a recipe and caches them, without training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from xdm_ft.cli.answer import Answer
from xdm_ft.experiment.cluster_connection import check_cluster
from xdm_ft.experiment.machine import launched
from xdm_ft.experiment.plan import read_data
from xdm_ft.experiment.prepare import build_encoders, prepare
from xdm_ft.experiment.summary import trained_words
from xdm_ft.features.cache import Features, cache_folder
from xdm_ft.recipe.settings import Recipe
from xdm_ft.runtime.errors import UserError, plural
from xdm_ft.runtime.progress import pulse
from xdm_ft.runtime.watchdog import heartbeat


class CachedSet(NamedTuple):
    """Features, or the activations of a cut, of all images under one encoder."""

    what: str  # and of what
    key: str  # of the plain view: the name of its folder in the cache
    width: int
    computed: int  # by this process or its tasks, in all views; equal images count once


@dataclass(frozen=True)
class Filled(Answer):
    """The features and activations of a recipe, which are now in the cache."""

    sets: list[CachedSet]
    folder: Path  # of the cache
    images: int
    views: int  # augmented views of each image
    unreadable: dict[str, str]  # {image: why it does not decode}

    @property
    def computed(self) -> int:
        """Number of images, in all sets and views, that this process or its tasks computed."""
        return sum(one.computed for one in self.sets)

    def text(self) -> str:
        return "\n".join(
            f"{one.what}: {plural(self.images, 'image')} of width {one.width}, {one.computed} of them extracted now"
            for one in self.sets
        )

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {"sets": [one._asdict() for one in self.sets], "computed": self.computed}


def fill_cache(recipe: Recipe) -> Filled:
    """Computes the features and activations that the recipe caches. Raises `UserError` if there are none."""
    if all(recipe.trains_on_images(item) for item in recipe.methods):
        raise UserError(
            f"{recipe.name}: it trains its encoder, and no method of it uses cached features; use `xdm-ft run`"
        )
    with launched(recipe) as accelerator, heartbeat(accelerator):
        if recipe.cluster.name is not None:
            check_cluster(recipe)
        with pulse.waiting():
            encoders, dataset = build_encoders(recipe), read_data(recipe)
        prepared = prepare(recipe, dataset, encoders, accelerator)
    found = []
    for label, own in prepared.encoders.items():
        of_encoder = "" if label is None else f"{label}, "
        if own.features is not None:
            found.append(_set(f"{of_encoder}features", own.features))
        for cut, cached in own.activations.items():
            if cached is not None:
                found.append(_set(f"{of_encoder}activations, {trained_words(cut)}", cached))
    unreadable = {dataset.name(row): reason for row, reason in prepared.unreadable.items()}
    return Filled(found, cache_folder(recipe.features), len(dataset), recipe.features.views, unreadable)


def _set(what: str, features: Features) -> CachedSet:
    return CachedSet(what, features.key, features.width, features.extracted)
