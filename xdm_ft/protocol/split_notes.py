"""What the protocol line says of a split: whether test domains are unseen, and which groups are on both sides."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xdm_ft.data import ImageDataset


def seen_or_unseen(test_domains: Sequence[str], train_domains: Sequence[str]) -> str:
    """How to go on after "tested on": an official split need not hold out whole domains."""
    seen = [name for name in test_domains if name in train_domains]
    if not seen:
        return "domains never trained on"
    if len(seen) == len(test_domains):
        return "domains that are also trained on, none of them unseen"
    return f"domains of which {', '.join(seen)} {'is' if len(seen) == 1 else 'are'} also trained on"


def independence(dataset: ImageDataset, train: np.ndarray, evaluation: dict[str, np.ndarray]) -> str:
    """Whether groups are known, and how many groups and images of each evaluated part are of groups that also train."""
    if dataset.groups is None:
        return "images assumed independent"
    overlaps = []
    for part, rows in evaluation.items():
        if part == "test_val":  # a part of the test images
            continue
        shared = rows[np.isin(dataset.groups[rows], dataset.groups[train])]
        if len(shared):
            of_part, both = len(np.unique(dataset.groups[rows])), len(np.unique(dataset.groups[shared]))
            overlaps.append(f"{both} of {of_part} groups of {part} also train ({len(shared)} of {len(rows)} images)")
    return ", ".join(overlaps) or "groups kept together"
