"""What benchmarks print behind their ±, computed from our seeds, so that like can be compared with like."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Convention(NamedTuple):
    """One benchmark's spread of the means of n seeds, held-out domains averaged within a seed."""

    kind: str
    ddof: int
    of_the_mean: bool  # divided by √n

    def value(self, means: Sequence[float]) -> float | None:
        """The spread in the unit of the metric; None for fewer than two seeds."""
        if len(means) < 2:
            return None
        return float(np.std(means, ddof=self.ddof) / (len(means) ** 0.5 if self.of_the_mean else 1))


DOMAINBED = Convention("standard error over seeds, ddof 0 (DomainBed)", ddof=0, of_the_mean=True)
"""`format_mean` of domainbed/scripts/collect_results.py: np.std(values) / √n."""
WILDS = Convention("standard deviation over seeds, ddof 1 (WILDS)", ddof=1, of_the_mean=False)
"""The leaderboards' standard deviation over replicates, as in examples/evaluate.py of wilds."""
