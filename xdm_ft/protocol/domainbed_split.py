"""DomainBed's own seeded split of a domain (Gulrajani & Lopez-Paz 2021, `lib/misc.py` and `scripts/train.py`)."""

from __future__ import annotations

import hashlib

import numpy as np


def seed_hash(*numbers: int) -> int:
    """The seed that DomainBed derives from trial and number of the domain: md5 of the tuple's text, modulo 2³¹."""
    return int(hashlib.md5(str(numbers).encode(), usedforsecurity=False).hexdigest(), 16) % 2**31


def split_keys(images: int, held_out: int, seed: int) -> tuple[list[int], list[int]]:
    """0…images−1, shuffled by `seed`: the first `held_out` of them, and the rest."""
    keys = list(range(images))
    np.random.RandomState(seed).shuffle(keys)
    return keys[:held_out], keys[held_out:]


def validation_rows(domains: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """The validation rows of every domain (int64 [N], numbered in DomainBed's order), sorted.

    Keys count the rows of a domain in the order of the data set, which for folders is torchvision's.
    """
    parts = []
    for number in range(int(domains.max()) + 1):
        rows = np.flatnonzero(domains == number)
        keys, _ = split_keys(len(rows), int(len(rows) * fraction), seed_hash(seed, number))
        parts.append(rows[keys])
    return np.sort(np.concatenate(parts))
