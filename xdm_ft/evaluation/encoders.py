"""A run of several encoders: the labels of its rows, and which of them are compared with each other.

There a row is a method under an encoder, and its label is `METHOD @ ENCODER`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import combinations
from typing import NamedTuple

SEPARATOR = " @ "


def split_label(label: str, encoders: Collection[str]) -> tuple[str, str | None]:
    """Returns (METHOD, ENCODER) of the label of a row; the encoder is None if none of `encoders` stands in it.

    A method's own label may hold the separator, and so may an encoder's: the longest encoder that fits is returned.
    """
    fitting = [name for name in encoders if label.endswith(f"{SEPARATOR}{name}")]
    if not fitting:
        return label, None
    encoder = max(fitting, key=len)
    return label.removesuffix(f"{SEPARATOR}{encoder}"), encoder


def with_encoder(label: str, encoder: str) -> str:
    """Returns the label in results of a method under one of several encoders."""
    return f"{label}{SEPARATOR}{encoder}"


class EncoderPair(NamedTuple):
    """One method under two encoders."""

    method: str  # without the encoder
    first: str  # label of an encoder; its models are compared with …
    second: str  # … those of this one

    @property
    def rows(self) -> tuple[str, str]:
        """The labels of the rows of both encoders."""
        return with_encoder(self.method, self.first), with_encoder(self.method, self.second)


def encoder_pairs(labels: Sequence[str], encoders: Sequence[str]) -> list[EncoderPair]:
    """Returns all pairs of encoders under each method, in the order of both; pairs that lack a row are left out."""
    methods = dict.fromkeys(method for method, encoder in (split_label(one, encoders) for one in labels) if encoder)
    pairs = [EncoderPair(method, *two) for method in methods for two in combinations(encoders, 2)]
    return [pair for pair in pairs if all(row in labels for row in pair.rows)]
