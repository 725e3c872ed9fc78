"""Domains with too few images, or images of one class, to be held out: joined to one, or left out."""

from __future__ import annotations

import copy
from typing import Literal

import numpy as np
from PIL import Image

from xdm_ft.data.features import FeatureTable
from xdm_ft.images import ImageDataset
from xdm_ft.images.decode import EncodedImages
from xdm_ft.protocol.site_class import images_per_class
from xdm_ft.runtime.errors import UserError

JOINED = "small sites"  # the domain that small ones become


class _Rows(ImageDataset):
    """Some rows of a data set, in its order."""

    def __init__(self, dataset: ImageDataset, rows: np.ndarray) -> None:
        """`rows`: int64 [n], sorted. Domains without a row are left out; classes stay."""
        vars(self).update(vars(dataset))
        keep_rows(self, rows)
        self.dataset, self.rows, self.container = dataset, rows, None  # a table's content is that of all of its rows

    def name(self, row: int) -> str:
        return self.dataset.name(int(self.rows[row]))

    def name_in_data(self, row: int) -> str:
        return self.dataset.name_in_data(int(self.rows[row]))

    def content(self, row: int) -> str | bytes:
        return self.dataset.content(int(self.rows[row]))


class Part(_Rows):
    """Rows whose images the data set makes or decodes."""

    @property
    def decoder(self) -> str:
        return self.dataset.decoder

    def image(self, row: int) -> Image.Image:
        return self.dataset.image(int(self.rows[row]))


class EncodedPart(_Rows, EncodedImages):
    """Rows of images in files, which are decoded here: `data.intensity` is set after the rows are chosen."""


def keep_rows(dataset: ImageDataset, rows: np.ndarray) -> None:
    """Takes the annotations of other rows, and domains without a row, from a data set."""
    for name in ("labels", "domains", "groups", "soft_labels", "splits", "worst_of"):
        if (values := getattr(dataset, name)) is not None:
            setattr(dataset, name, values[rows])
    kept, dataset.domains = np.unique(dataset.domains, return_inverse=True)
    dataset.domain_names = tuple(dataset.domain_names[number] for number in kept)


def part_of(dataset: ImageDataset, rows: np.ndarray) -> ImageDataset:
    """Returns the data set with these rows alone."""
    if not isinstance(dataset, FeatureTable):
        return EncodedPart(dataset, rows) if isinstance(dataset, EncodedImages) else Part(dataset, rows)
    part = copy.copy(dataset)
    keep_rows(part, rows)
    part.features = dataset.features[rows]
    part.ids = dataset.ids and (dataset.ids[0], dataset.ids[1][rows])
    return part


def without_small_domains(dataset: ImageDataset, least: int, how: Literal["join", "drop"]) -> ImageDataset:
    """Returns the data set whose domains have `least` images or more and two classes; `small_domains` names the others.

    They are left out, or become the last domain. If that is still small, it trains, but is not held out. Raises
    `UserError`.
    """

    def small(counts: np.ndarray) -> np.ndarray:
        return (counts.sum(-1) < least) | ((counts > 0).sum(-1) < 2)

    counts = images_per_class(dataset)
    is_small = small(counts)  # bool [D]
    dataset.small_domains = tuple(name for name, of in zip(dataset.domain_names, is_small, strict=True) if of)
    if not is_small.any():
        return dataset
    if is_small.all():
        problem = f"all {len(is_small)} domains have fewer than {least} images, or one class"
        raise UserError(f"data.domain_min: {problem}; lower it, or leave it out")
    if how == "drop":
        return part_of(dataset, np.flatnonzero(~is_small[dataset.domains]))
    kept = [name for name, of in zip(dataset.domain_names, is_small, strict=True) if not of]
    if JOINED in kept:
        raise UserError(f'data.domain_min: a domain of the data is called "{JOINED}" already; rename it')
    number = np.where(is_small, len(kept), np.cumsum(~is_small) - 1)
    dataset.domains, dataset.domain_names = number[dataset.domains], (*kept, JOINED)
    dataset.never_held_out = (JOINED,) if small(counts[is_small].sum(0)) else ()
    return dataset
