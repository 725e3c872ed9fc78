"""What `doctor` says of the data: found, counts, broken images, doubles and groups on both sides of a split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from xdm_ft.data import ImageDataset
from xdm_ft.data.loading.images import NAMED_AT_MOST, scan
from xdm_ft.data.loading.splits import Split, splits
from xdm_ft.errors import UserError
from xdm_ft.experiment.findings import Finding, fault
from xdm_ft.experiment.machine import cores
from xdm_ft.experiment.plan import read_data
from xdm_ft.features.content import read_contents
from xdm_ft.features.store import cache_folder

if TYPE_CHECKING:
    from xdm_ft.features.content import Contents
    from xdm_ft.recipe import Recipe

Checked = Generator[Finding, None, tuple[ImageDataset, "Contents"] | None]
WITHIN_TRAINING_DOMAINS = {"train", "train_val"}  # what they share blurs the choice of a step, not the test
SAME_IMAGES = {"test", "test_val"}  # the oracle's part is one of the test


def check_data(recipe: Recipe) -> Checked:
    """→ the data and a hash of every image, or None where the data can not be read at all."""
    dataset: ImageDataset | None
    try:
        dataset = read_data(recipe)
    except UserError as error:
        yield from fault("data", error)
        dataset = _in_any_number(recipe)
    if dataset is None:
        return None
    yield Finding("data", f"{len(dataset)} images, {len(dataset.domain_names)} domains, images per class and domain:")
    yield from counts(dataset)
    unreadable = scan(dataset, cores())
    yield from broken(dataset, unreadable)
    contents = read_contents(dataset, cache_folder(recipe.features), show=True)
    yield from leaks(recipe, dataset, contents, unreadable)
    return dataset, contents


def _in_any_number(recipe: Recipe) -> ImageDataset | None:
    """A known data set that is short can still be looked through for its other faults."""
    settings = recipe.data.kwargs()
    if settings.get("counts") != "published":
        return None
    try:
        dataset: ImageDataset = recipe.data.cls(**(settings | {"counts": "any"}))
    except UserError:  # it was told already, in stricter words
        return None
    return dataset


def counts(dataset: ImageDataset) -> Iterator[Finding]:
    """A line per class; a class that a domain lacks is a fault where the data set is not known to be so."""
    images = np.zeros((len(dataset.class_names), len(dataset.domain_names)), np.int64)
    np.add.at(images, (dataset.labels, dataset.domains), 1)
    yield Finding("domains", ", ".join(f"{d} {n}" for d, n in zip(dataset.domain_names, images.sum(0), strict=True)))
    for name, row in zip(dataset.class_names, images, strict=True):
        without = [d for d, n in zip(dataset.domain_names, row, strict=True) if n == 0]
        remedy = None
        if without and not dataset.as_published:
            remedy = f"add images of {name} to {', '.join(without)}, or remove the class from the other domains"
        yield Finding(f"class {name}", " ".join(map(str, row)), remedy)


def broken(dataset: ImageDataset, unreadable: dict[int, str]) -> Iterator[Finding]:
    if not unreadable:
        yield Finding("images", "all decode")
    for row, reason in unreadable.items():
        yield Finding(
            "image",
            f"{dataset.name(row)} does not decode: {reason}",
            "mend or remove it, or set data.on_bad_image: skip",
        )


def leaks(recipe: Recipe, dataset: ImageDataset, contents: Contents, unreadable: dict[int, str]) -> Iterator[Finding]:
    """Equal images and groups that two parts of a split share, told once however many splits show them."""
    seed = recipe.protocol.seeds[0]
    try:
        found = splits(dataset, recipe.protocol, seed, unreadable)
    except UserError as error:
        yield from fault("split", error)
        return
    digests = np.unique(contents.digests, axis=0, return_inverse=True)[1].reshape(-1)
    kinds = {"image": digests} | ({} if dataset.groups is None else {"group": dataset.groups})
    for kind, ids in kinds.items():
        shared: dict[tuple[str, int], tuple[int, int]] = {}
        harmless: Counter[str] = Counter()
        for split in found:
            for first, second, pairs in _shared(split, ids):
                if {first, second} == WITHIN_TRAINING_DOMAINS:
                    harmless[", ".join(split.test_domains)] += len(pairs)
                    continue
                for number, rows in pairs.items():
                    shared.setdefault((f"{first} and {second}", number), rows)
        yield from _leaks_of(kind, dataset, shared)
        for held_out, number in harmless.items():
            yield Finding("split", f"with {held_out} held out, train_val shares {number} {kind}s with training")
        if not shared:
            yield Finding("split", f"no {kind} lies on both sides of a split")


def _leaks_of(kind: str, dataset: ImageDataset, shared: dict[tuple[str, int], tuple[int, int]]) -> Iterator[Finding]:
    by_parts: dict[str, list[tuple[int, int]]] = {}
    for (parts, _), rows in shared.items():
        by_parts.setdefault(parts, []).append(rows)
    for parts, pairs in by_parts.items():
        named = "; ".join(f"{dataset.name(a)} and {dataset.name(b)}" for a, b in pairs[:NAMED_AT_MOST])
        more = f" and {len(pairs) - NAMED_AT_MOST} more" if len(pairs) > NAMED_AT_MOST else ""
        if kind == "image":
            remedy = "remove one of each pair, or both where their labels differ"
            yield Finding("leak", f"{len(pairs)} images are the same in {parts}: {named}{more}", remedy)
        else:
            remedy = "change the split so that a group lies on one side, or correct the groups"
            yield Finding("leak", f"{len(pairs)} groups are in {parts}: {named}{more}", remedy)


def _shared(split: Split, ids: np.ndarray) -> Iterator[tuple[str, str, dict[int, tuple[int, int]]]]:
    """For each two parts that share something: its number → one row of it in each."""
    rows_of = {"train": np.concatenate([part.numpy() for part in split.train])}
    rows_of |= {name: rows.numpy() for name, rows in split.evaluation.items()}
    for first, second in combinations(rows_of, 2):
        if {first, second} == SAME_IMAGES:
            continue
        one, a = np.unique(ids[rows_of[first]], return_index=True)
        other, b = np.unique(ids[rows_of[second]], return_index=True)
        both, at_a, at_b = np.intersect1d(one, other, assume_unique=True, return_indices=True)
        if len(both):
            pairs = zip(rows_of[first][a[at_a]].tolist(), rows_of[second][b[at_b]].tolist(), strict=True)
            yield first, second, dict(zip(both.tolist(), pairs, strict=True))
