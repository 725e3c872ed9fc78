"""What the paper measures on trained models: one file per measure, its function and its part of analysis.json."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Encoded(NamedTuple):
    """Images with their features."""

    z: Tensor  # float32 [n,K]
    y: Tensor  # int64 [n]
    domain: Tensor  # int64 [n]: 0…D−1 of the training domains; of test images as in the data set
    rows: Tensor  # int64 [n], in the data set

    def at(self, index: Tensor) -> Encoded:
        """Returns the images at these positions, or where a mask bool [n] is true."""
        return Encoded(*(field[index] for field in self))
