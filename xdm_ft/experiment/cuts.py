"""The cuts of a recipe: which activations are cached, what they take on disk, and which are computed anew."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xdm_ft.data import ImageDataset
from xdm_ft.encoders import Encoder
from xdm_ft.encoders._cut import Below, Cut
from xdm_ft.encoders._trainable import Trainable, blocks_above
from xdm_ft.experiment.heartbeat import from_main
from xdm_ft.features.cache import cached_views, distinct_images
from xdm_ft.features.file_hashes import FileHashes
from xdm_ft.features.forward import DTYPES
from xdm_ft.features.store import cache_folder
from xdm_ft.recipe.checked import Recipe
from xdm_ft.recipe.method_item import MethodItem

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger("xdm_ft")
LARGEST_SHARE = 0.5  # of the free disk that `features.cut: auto` takes


@dataclass(frozen=True)
class RecipeCut:
    """One cut of an encoder, which several methods may share."""

    below: Below
    serves: tuple[Trainable, ...]  # what trains above it
    size: int  # bytes of the activations of all images and views
    missing: int  # bytes that are not in the cache yet
    free: int  # bytes on the cache's disk
    is_cached: bool

    def text(self) -> str:
        shape = "×".join(map(str, self.below.cut.shape))
        how = "cached" if self.is_cached else "computed at every step"
        needs = f", {self.missing / 1e6:,.1f} MB of it to be computed" if self.is_cached and self.missing else ""
        return f"cut before {self.below.cut.name}: activations {shape}, {self.size / 1e6:,.1f} MB, {how}{needs}"


def cuts_of(
    recipe: Recipe,
    encoder: Encoder,
    items: Sequence[MethodItem],
    dataset: ImageDataset,
    hashes: FileHashes,
    accelerator: Accelerator,
) -> list[RecipeCut]:
    """Returns the cuts below the methods of one encoder. Raises `UserError` if the encoder can not be cut there."""
    serves: dict[int, list[Trainable]] = {}
    for item in items:
        if item.is_cut:
            above = blocks_above(item.trainable)
            of_cut = serves.setdefault(max(1, len(encoder.block_names)) if above is None else above, [])
            if item.trainable not in of_cut:
                of_cut.append(item.trainable)
    found, images = [], distinct_images(hashes)
    settings, augmentation = recipe.features, recipe.train_augmentation
    of_images = {item.trainable for item in items if item.is_cut and recipe.trains_on_images(item)}
    for above, of_cut in sorted(serves.items()):
        below = Below(Cut(encoder, above))
        size = (1 + settings.views) * len(images.contents) * math.prod(below.cut.shape)
        size *= DTYPES[settings.precision].itemsize
        missing, free, cached = size, 0, False
        if not of_images.intersection(of_cut):
            views = cached_views(below, dataset, images, settings, augmentation, accelerator.device)
            for _, store in views:
                store.missing()
            missing, free = (
                sum(store.bytes_needed for _, store in views),
                shutil.disk_usage(cache_folder(settings)).free,
            )
            cached = settings.cut == "cache" or missing <= LARGEST_SHARE * free
        cached = from_main(accelerator, cached)  # by the time that another process looks, the disk may be fuller
        found.append(RecipeCut(below, tuple(of_cut), size, missing, free, cached))
    return found


def log_cut(cut: RecipeCut, show: bool) -> None:
    if show:
        logger.info("%s", cut.text())
