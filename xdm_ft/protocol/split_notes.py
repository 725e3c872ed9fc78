"""Notes on a split for the protocol line: whether test domains are unseen, and which groups are on both sides."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xdm_ft.images.dataset import ImageDataset
from xdm_ft.images.decode import NAMED_AT_MOST


def seen_or_unseen(test_domains: Sequence[str], train_domains: Sequence[str]) -> str:
    """Returns what follows "tested on" in the note. An official split may train and test on the same domain."""
    seen = [name for name in test_domains if name in train_domains]
    if not seen:
        return "domains never trained on"
    if len(seen) == len(test_domains):
        return "domains that are also trained on, none of them unseen"
    return f"domains of which {', '.join(seen)} {'is' if len(seen) == 1 else 'are'} also trained on"


def independence(dataset: ImageDataset, train: np.ndarray, evaluation: dict[str, np.ndarray]) -> str:
    """Returns the note on groups: unknown, kept together, or how many groups and images of each part also train."""
    if dataset.groups is None:
        return "images assumed independent"
    overlaps = []
    for part, rows in evaluation.items():
        if part == "test_val":  # a part of the test images, which are counted already
            continue
        shared = rows[np.isin(dataset.groups[rows], dataset.groups[train])]
        if len(shared):
            groups, both = len(np.unique(dataset.groups[rows])), len(np.unique(dataset.groups[shared]))
            overlaps.append(f"{both} of {groups} groups of {part} also train ({len(shared)} of {len(rows)} images)")
    return ", ".join(overlaps) or "groups kept together"


def gaps(dataset: ImageDataset, train: np.ndarray, evaluation: dict[str, np.ndarray], numbers: list[int]) -> list[str]:
    """Returns a note for every class and every validation part that a training domain (of `numbers`) lacks."""
    lacking = [
        f"no training image of {dataset.class_names[c]} in {dataset.domain_names[numbers[d]]}"
        for d, c in np.argwhere(images_per_class(dataset, train)[numbers] == 0).tolist()
    ]
    notes = lacking[:NAMED_AT_MOST]
    if len(lacking) > NAMED_AT_MOST:
        notes.append(f"and {len(lacking) - NAMED_AT_MOST} more classes missing from a training domain")
    if "train_val" in evaluation:
        validated = set(dataset.domains[evaluation["train_val"]].tolist())
        without = [dataset.domain_names[d] for d in numbers if d not in validated]
        notes += [f"no validation image of {name}, which train_val ignores" for name in without]
    return notes


def images_per_class(dataset: ImageDataset, rows: np.ndarray) -> np.ndarray:
    """Returns the number of images of every class in every domain: int64 [domains, classes]."""
    num_domains, num_classes = len(dataset.domain_names), len(dataset.class_names)
    stratum = dataset.domains[rows] * num_classes + dataset.labels[rows]
    return np.bincount(stratum, minlength=num_domains * num_classes).reshape(num_domains, num_classes)
