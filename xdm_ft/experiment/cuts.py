"""The cuts of a recipe: which activations are cached, what they take on the disk, and which are computed anew."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from xdm_ft.cut.cut import Below, Cut
from xdm_ft.cut.trainable import LastBlocks, LowRank, Trainable
from xdm_ft.encoders import Encoder
from xdm_ft.features import FeatureSettings
from xdm_ft.features.cache import cached_views
from xdm_ft.features.file_hashes import FileHashes
from xdm_ft.features.forward import DTYPES
from xdm_ft.features.lookup import cached_images
from xdm_ft.features.store import cache_path, is_writable
from xdm_ft.images.dataset import ImageDataset
from xdm_ft.recipe.method import MethodItem
from xdm_ft.recipe.settings import Recipe
from xdm_ft.training.end_to_end.model import cut_of

logger = logging.getLogger("xdm_ft")
LARGEST_SHARE = 0.5  # of the free disk that `features.cut: auto` takes, for all cuts of an encoder together


class Activations(NamedTuple):
    """The number of activations at a cut, one per image and view."""

    all: int
    missing: int  # in the cache


@dataclass(frozen=True)
class RecipeCut:
    """One cut of an encoder, which several methods may share."""

    below: Below
    serves: tuple[Trainable, ...]  # what trains above it
    activations: Activations
    dtype: torch.dtype  # of cached activations
    why_computed: str = ""  # at every step; empty: they are cached

    @property
    def is_cached(self) -> bool:
        return not self.why_computed

    @property
    def shape(self) -> str:
        return "×".join(map(str, self.below.cut.shape))

    @property
    def bytes(self) -> int:
        """Bytes on the disk of all activations, cached or not."""
        return self.activations.all * self._bytes_each

    @property
    def missing_bytes(self) -> int:
        return self.activations.missing * self._bytes_each

    @property
    def _bytes_each(self) -> int:
        return math.prod(self.below.cut.shape) * self.dtype.itemsize

    def text(self) -> str:
        which = f"cut before {self.below.cut.name}: activations {self.shape}"
        if not self.is_cached:
            return f"{which}, computed at every step ({self.why_computed})"
        missing = f", {self.missing_bytes / 1e6:,.1f} MB of it to be computed" if self.activations.missing else ""
        return f"{which}, cached: {self.activations.all} of them take {self.bytes / 1e6:,.1f} MB{missing}"


def cuts_of(
    recipe: Recipe,
    encoder: Encoder,
    items: Sequence[MethodItem],
    count: Callable[[Below], Activations],
    earlier: Mapping[str, bool] | None = None,
) -> list[RecipeCut]:
    """Returns the cuts below the methods of one encoder. Raises `UserError` if the encoder can not be cut there.

    `earlier`: as `decided` returns it, for a run that goes on.
    """
    cuts, serves = dict[str, Cut](), dict[str, list[Trainable]]()
    for trainable in dict.fromkeys(item.trainable for item in items):
        if isinstance(trainable, LastBlocks | LowRank):
            cut = cut_of(encoder, trainable)
            cuts.setdefault(cut.name, cut)
            serves.setdefault(cut.name, []).append(trainable)
    on_images = any(item.is_cut and recipe.trains_on_images(item) for item in items)
    found, planned = list[RecipeCut](), 0
    for cut in sorted(cuts.values(), key=lambda cut: -cut.number):
        below, of_cut = Below(cut), tuple(serves[cut.name])
        one = RecipeCut(below, of_cut, count(below), DTYPES[recipe.features.precision])
        before = (earlier or {}).get(cut.name)
        one = replace(one, why_computed=_why_computed(recipe, one, on_images, planned, before))
        found.append(one)
        planned += one.missing_bytes if one.is_cached else 0
    return found


def _why_computed(recipe: Recipe, cut: RecipeCut, on_images: bool, planned: int, before: bool | None) -> str:
    """Returns why activations are computed at every step; empty if they are cached.

    `planned`: bytes that other cuts will take. `before`: whether they were cached when the run started.
    """
    settings = recipe.features
    if settings.cut == "compute":
        return "features.cut: compute"
    if on_images:
        return f"data.train_augmentation: {recipe.train_augmentation} draws anew each time; features.views caches draws"
    if before is False and settings.cut == "auto":
        return "features.cut: auto, as when this run started"
    if before or settings.cut == "cache" or not cut.activations.missing:
        return ""
    folder, free = cache_path(settings), free_bytes(settings)
    if folder.exists() and not is_writable(folder):
        return f"features.cut: auto, as {folder} can not be written"
    if cut.missing_bytes + planned > LARGEST_SHARE * free:
        needs = f"{cut.missing_bytes / 1e6:,.1f} MB do not fit in half of the {free / 1e6:,.1f} MB that are free"
        return f"features.cut: auto, as {needs}"
    return ""


def free_bytes(settings: FeatureSettings) -> int:
    """Returns the free bytes on the disk of the cache, whose folder may not exist."""
    folder = cache_path(settings)
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def counted(
    recipe: Recipe, dataset: ImageDataset, hashes: FileHashes, device: torch.device
) -> Callable[[Below], Activations]:
    """Returns the function that counts activations by the hashes of the images: copies of an image are one."""
    images = hashes.images

    def count(below: Below) -> Activations:
        views = cached_views(below, dataset, images, recipe.features, recipe.train_augmentation, device)
        return Activations(len(views) * len(images.contents), sum(len(store.missing()) for _, store in views))

    return count


def counted_unhashed(recipe: Recipe, dataset: ImageDataset, device: torch.device) -> Callable[[Below], Activations]:
    """Returns the function that counts activations as if all images were different, and those that are cached theirs.

    It reads no image and writes nothing.
    """

    def count(below: Below) -> Activations:
        found = cached_images(below, dataset.decoder, recipe.features, recipe.train_augmentation, device)
        return Activations(len(found) * len(dataset), sum(max(0, len(dataset) - cached) for cached in found))

    return count


def decided(environment: Mapping[str, Any] | None, label: str | None) -> dict[str, bool]:
    """Returns {module above a cut: whether the activations below it are cached} of an earlier run.

    `environment`: of its results.json, None if there is none. `label`: of the encoder. A run that goes on follows it,
    whatever the disk looks like now, so that all its models are trained on the same numbers.
    """
    features = (environment or {}).get("features", {})
    own = features if label is None else features.get(label, {})
    return {name: key is not None for name, key in own.get("cuts", {}).items()}
