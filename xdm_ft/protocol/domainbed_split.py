"""DomainBed's own seeded split of a domain (Gulrajani & Lopez-Paz 2021, `lib/misc.py` and `scripts/train.py`)."""

from __future__ import annotations

import hashlib

import numpy as np


def seed_hash(*numbers: int) -> int:
    """Returns DomainBed's seed for a trial seed and the number of a domain: md5 of the tuple's text, modulo 2³¹."""
    return int(hashlib.md5(str(numbers).encode(), usedforsecurity=False).hexdigest(), 16) % 2**31


def split_keys(images: int, validation: int, seed: int) -> tuple[list[int], list[int]]:
    """Returns 0…images−1, shuffled with `seed`, in two lists: the first `validation` of them, and the rest."""
    keys = list(range(images))  # a list, as DomainBed shuffles one
    np.random.RandomState(seed).shuffle(keys)
    return keys[:validation], keys[validation:]


def validation_rows(domains: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Returns the validation rows of all domains, sorted. `domains` int64 [N] are numbered in DomainBed's order.

    A key is an index into the rows of a domain. For folders these are in torchvision's order, which DomainBed uses.
    """
    parts = []
    for number in range(int(domains.max()) + 1):
        rows = np.flatnonzero(domains == number)
        keys, _ = split_keys(len(rows), int(len(rows) * fraction), seed_hash(seed, number))
        parts.append(rows[keys])
    return np.sort(np.concatenate(parts))
