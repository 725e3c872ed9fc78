"""What benchmarks print behind ±, computed from our seeds, so that it can be compared with published numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Convention(NamedTuple):
    """How a benchmark measures the spread over n seeds. Held-out domains are averaged within a seed first."""

    kind: str  # in words, for tables
    ddof: int
    of_the_mean: bool  # a standard error: the standard deviation divided by √n

    def value(self, means: Sequence[float]) -> float | None:
        """Returns the spread in the unit of the metric; None for fewer than two seeds."""
        if len(means) < 2:
            return None
        return float(np.std(means, ddof=self.ddof) / (len(means) ** 0.5 if self.of_the_mean else 1))


DOMAINBED = Convention("standard error over seeds, ddof 0 (DomainBed)", ddof=0, of_the_mean=True)
"""np.std(values) / √n, as `format_mean` in domainbed/scripts/collect_results.py computes it."""
WILDS = Convention("standard deviation over seeds, ddof 1 (WILDS)", ddof=1, of_the_mean=False)
"""The standard deviation over replicates that WILDS leaderboards print, as in examples/evaluate.py of wilds."""
