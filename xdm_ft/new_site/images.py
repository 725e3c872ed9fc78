"""The images of a site: each of them once, those that trained the model known, and their features, which are cached."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from xdm_ft.export.choose import training_images
from xdm_ft.export.predictor import Model, cache_of, store_of, stream
from xdm_ft.export.rows import items_of
from xdm_ft.export.sources import Item, Sources
from xdm_ft.features.cache import Contents, Store, contents_of
from xdm_ft.features.extract import IMAGES_PER_SHARD
from xdm_ft.features.hashes import ListedImages, hash_files
from xdm_ft.image_files.files import count_files
from xdm_ft.results.run import is_run, read_run
from xdm_ft.runtime.errors import UserError, did_you_mean, one_form, plural
from xdm_ft.runtime.progress import progress

logger = logging.getLogger("xdm_ft")
SHARE = r"\s*({})\s*=([^=,]*)(?:,|$)"  # of a class: its name and its share
MAX_ROUNDING = 0.01  # of the sum of class shares


class Distinct(NamedTuple):
    """Those of some images that count: of images with the same bytes the first one."""

    rows: np.ndarray  # int64 [m]: the images that count
    items: list[Item]  # they themselves, with their hashes
    trained: np.ndarray | None  # bool [m], whether they trained the model; None: unknown
    first: np.ndarray  # int64 [n]: of each image, the one that counts for it
    copies: int
    training_images: int | None

    def untrained(self) -> Distinct:
        """Returns those that did not train the model, or of which that is unknown."""
        if self.trained is None:
            return self
        new = np.flatnonzero(~self.trained)
        return self._replace(rows=self.rows[new], items=[self.items[i] for i in new], trained=self.trained[new])


def distinct(items: Sequence[Item], known: np.ndarray | None, cache: Path) -> Distinct:
    """Hashes images, with the index in the folder `cache`. Those whose bytes cannot be read are different ones.

    `known`: checksums of the images that trained the model, uint8 [k,16]; None: unknown.
    """
    hashes = hash_files(ListedImages([item.content for item in items]), cache, show=True)
    _, first_rows, number_of = hashes.images
    is_hashed, first = number_of >= 0, np.arange(len(items))
    first[is_hashed] = first_rows[number_of[is_hashed]]
    rows = np.flatnonzero(first == np.arange(len(items)))
    hashed = [
        items[row]._replace(hashed=hashes.digests[row].tobytes() if is_hashed[row] else b"") for row in rows.tolist()
    ]
    trained = None if known is None else np.isin(contents_of(hashes.digests[rows]), contents_of(known))
    count = None if trained is None else int(trained.sum())
    return Distinct(rows, hashed, trained, first, len(items) - len(rows), count)


def contents_of_items(items: Sequence[Item]) -> Contents:
    """Returns the hashes of images, empty where they are unknown."""
    return np.array([item.hashed for item in items], "S16")


def unlabelled_images(model: Model, name: str, sources: Sources) -> Distinct:
    """Lists the images of a site, but those that trained the model. `name`: the directory of the model.

    Raises `UserError` if there are none.
    """
    encoder = model.config.encoder
    sources.of_model(encoder).count()  # first, as it refuses a folder, glob or table without images
    items = [*items_of(sources, encoder, sources.with_group)]
    if not items:
        raise UserError("PATH: no image is listed on standard input")
    if sources.others:
        logger.warning("%s", count_files(sources.others))
    left = distinct(items, known_training_images(model, name), cache_of(name)).untrained()
    if not left.items:
        trained = plural(left.training_images or 0, "image")
        raise UserError(f"{sources.paths[0]}: all {trained} trained the model; give new ones")
    return left


class Readable(NamedTuple):
    """Some images of a site that can be read."""

    rows: list[int]  # among those that were asked for
    items: list[Item]
    encoded: Tensor  # float32 [n,K], features of the encoder, on the CPU
    logits: Tensor  # float32 [n,C]


def readable(
    model: Model,
    name: str,
    path: str,
    items: Sequence[Item],
    unreadable: dict[str, str],
    *,
    what: str,
    batch_size: int | None = None,
) -> Iterator[Readable]:
    """Yields the images that can be read, in their order, and adds the others to `unreadable`: {image: why}.

    Features of a frozen encoder are cached, so that the next command about the site reads them. `items`: no two
    have the same hash. `path`: what the user gave. Raises `UserError` if no image can be read.
    """
    cache, start = cache_of(name), 0
    contents = contents_of_items(items)
    added = _Added(store_of(model, cache, contents[contents != b""]), contents)
    with progress(what, len(items), "images") as bar:
        for batch in stream(model, items, batch_size=batch_size, cache=cache):
            of_batch = batch.readable
            rows = [start + position for position in of_batch]
            start += len(batch.items)
            unreadable |= {batch.items[i].path: reason for i, reason in batch.unreadable.items()}
            bar.advance(len(batch.items))
            if of_batch:
                added.add(rows, batch.encoded[of_batch])
                yield Readable(
                    rows, [batch.items[i] for i in of_batch], batch.encoded[of_batch], batch.logits[of_batch]
                )
    added.write()
    if items and len(unreadable) == len(items):
        image, reason = next(iter(unreadable.items()))
        raise UserError(f"{path}: no image can be read, the first: {image}: {reason}")


class _Added:
    """Adds features that the cache lacks, a shard at a time. What cannot be written is computed again next time."""

    def __init__(self, store: Store | None, contents: Contents) -> None:
        self.store, self.numbers, self.parts = store, list[int](), list[Tensor]()
        is_hashed = contents != b""
        self.number_of = np.where(is_hashed, np.cumsum(is_hashed) - 1, -1)  # int64 [n]: in the store
        self.missing = set[int]() if store is None else set(store.missing().tolist())

    def add(self, rows: Sequence[int], encoded: Tensor) -> None:
        new = [i for i, row in enumerate(rows) if int(self.number_of[row]) in self.missing]
        if new:
            self.numbers += [int(self.number_of[rows[i]]) for i in new]
            self.parts.append(encoded[new])
        if len(self.numbers) >= IMAGES_PER_SHARD:
            self.write()

    def write(self) -> None:
        if self.store is None or not self.numbers:
            return
        try:
            with self.store.filling():
                self.store.write(np.array(self.numbers), torch.cat(self.parts).to(self.store.dtype), {})
        except UserError as error:
            logger.warning("features are not cached: %s", error)
            self.missing = set()
        self.numbers, self.parts = [], []


def group_numbers(items: Sequence[Item]) -> np.ndarray | None:
    """Returns the number of each image's group, int64 [n]; None without groups.

    Raises `UserError` if some images have no group.
    """
    without = sum(not item.group for item in items)
    if without == len(items):
        return None
    if without:
        first = next(item.path for item in items if not item.group)
        of = f"{without} of {plural(len(items), 'image')}"
        raise UserError(f"--group: {of} have no group, the first: {first}; fill in the column group")
    return np.unique([item.group for item in items], return_inverse=True)[1]


def prevalence_of(text: str, class_names: Sequence[str]) -> np.ndarray:
    """Returns the class shares float64 [C] that `a=.3,b=.7` says. Raises `UserError` unless it has all, of sum 1."""
    text, class_names = one_form(text), [*map(one_form, class_names)]
    # a class name may hold commas and equal signs: the longest one that fits
    names = "|".join(map(re.escape, sorted(class_names, key=len, reverse=True)))
    pairs, end = list[tuple[str, str]](), 0
    while match := re.compile(SHARE.format(names)).match(text, end):
        pairs.append((match[1], match[2].strip()))
        end = match.end()
    if end < len(text) or not pairs or len(dict(pairs)) < len(pairs):
        rest = text[end:] or text
        name = rest.partition("=")[0].strip()
        meant = "" if name in class_names else did_you_mean(name, list(class_names))
        problem = "names a class twice" if end == len(text) and pairs else f"{rest} is no CLASS=SHARE{meant}"
        raise UserError(f"--prevalence: {problem}; give a=.3,b=.7")
    try:
        shares = {name: float(number) for name, number in pairs}
    except ValueError:
        raise UserError(f"--prevalence: {text}: a share is not a number; give a=.3,b=.7") from None
    lacking = [name for name in class_names if name not in shares]
    if lacking:
        raise UserError(f"--prevalence: has no share of {', '.join(lacking[:8])}; name all classes, with 0 if need be")
    values = np.array([shares[name] for name in class_names])
    if not (np.isfinite(values).all() and (values >= 0).all() and abs(values.sum() - 1) <= MAX_ROUNDING):
        raise UserError(f"--prevalence: shares must be 0 or more, and their sum 1, not {values.sum():.4g}")
    normalized: np.ndarray = values / values.sum()
    return normalized


def known_training_images(model: Model, name: str) -> np.ndarray | None:
    """Returns the checksums of the images that trained the model, uint8 [n,16]; None: unknown."""
    if model.training_images is None and is_run(run := Path(name).expanduser()):
        return training_images(read_run(run), model.config)
    return model.training_images
