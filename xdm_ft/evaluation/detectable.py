"""The smallest difference that a table finds with 80% probability, what limits it, and what more seeds would find."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from scipy.special import stdtrit

from xdm_ft.evaluation.comparison import PAIRED_SEEDS, Comparison, Term, here
from xdm_ft.evaluation.versus import FEWEST_SETS

POWER = 0.8


def smallest(alpha: float, comparisons: int, freedom: float, error: float) -> float:
    """Returns (t_{1 − α/2M} + t_{0.8}) · error: the difference that Holm's first step finds with probability 0.8."""
    return float(stdtrit(freedom, 1 - alpha / (2 * comparisons)) + stdtrit(freedom, POWER)) * error


@dataclass(frozen=True)
class Family:
    """The comparisons of one family that have a p and an error: what they could have found, in the metric's unit."""

    rows: Sequence[Comparison]
    alpha: float
    count: int  # M, comparisons that Holm's correction counts

    @classmethod
    def of(cls, comparisons: Iterable[Comparison], alpha: float) -> Family | None:
        """Returns the family of comparisons under one selection rule; None if none of them could be tested."""
        counted = [row for row in comparisons if row.p_here is not None and row.p_here.holm is not None]
        tested = [row for row in counted if row.error]  # equal predictions have a p of 1, and no error
        return cls(tested, alpha, len(counted)) if tested else None

    @property
    def seeds(self) -> int | None:
        """The smallest number of complete seeds of the sides that vary; None: no side does."""
        return min((row.seeds for row in self.rows if row.seeds is not None), default=None)

    @property
    def sets(self) -> int:
        return self.rows[0].sets

    @property
    def images_limit(self) -> bool:
        """Whether the variance over test images is larger than that over seeds."""
        return median(row.share_images or 0.0 for row in self.rows) > 0.5

    def here(self, seeds: int | None = None) -> float:
        """Returns the smallest difference here, at the median error; with another number of seeds, a forecast."""
        if seeds is None:
            return self._smallest([Term((row.error or 0.0) ** 2, row.freedom or 0.0) for row in self.rows])
        return self._smallest([_with_seeds(row, seeds) for row in self.rows])

    @property
    def other(self) -> float | None:
        """The same in the other regime, paired by seed or not; None unless there are 9 or 10 seeds."""
        terms = [Term(r.other_error**2, r.other_freedom) for r in self.rows if r.other_error and r.other_freedom]
        return self._smallest(terms) if terms else None

    def elsewhere(self, comparisons: int | None = None) -> float | None:
        """Returns the smallest difference on new domains; None with fewer than three held-out sets.

        `comparisons`: as if so many were declared.
        """
        if self.sets < FEWEST_SETS:
            return None
        error = median(row.error_elsewhere or 0.0 for row in self.rows)
        return smallest(self.alpha, comparisons or self.count, self.sets - 1, error)

    def _smallest(self, terms: Sequence[Term]) -> float:
        freedom, variance = median(f for _, f in terms), median(v for v, _ in terms)
        return smallest(self.alpha, self.count, freedom, variance**0.5)


def _with_seeds(row: Comparison, seeds: int) -> Term:
    """Returns V and its degrees of freedom with another number of seeds: V_S·S/S' + V_I, and f_S·(S' − 1)/(S − 1).

    From below ten seeds to above, the rows count as not paired.
    """
    total = (row.error or 0.0) ** 2
    of_seeds, of_images = Term(0.0, 0.0), Term(total * (row.share_images or 0.0), row.freedom_images or 0.0)
    if row.seeds is not None and row.freedom_seeds is not None:
        freedom = row.freedom_seeds * (seeds - 1) / (row.seeds - 1)
        of_seeds = Term(total * (row.share_seeds or 0.0) * row.seeds / seeds, freedom)
    _, error, freedom = here(0.0, of_seeds, of_images, sets=row.sets, paired=row.paired)
    return Term(error**2, freedom)


def more_seeds(seeds: int) -> int:
    """Returns the number of seeds to forecast: 10, where rows are paired, or twice as many."""
    return PAIRED_SEEDS if seeds < PAIRED_SEEDS else 2 * seeds
