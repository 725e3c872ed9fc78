"""SWAD: dense stochastic weight averaging."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from xdm_ft.averaging import Average, Averaging, Segment

logger = logging.getLogger("xdm_ft")


class SWAD(Averaging):
    """θ_SWAD = 1/(t_e − t_s + 1) Σ_{t=t_s…t_e} θ_t, over every step of the valley of the validation loss E.

    With E_k the k-th evaluation, N_s = n_converge, N_e = n_tolerance and r = 1 + tolerance_ratio. An evaluation stands
    for the steps since the one before it. E is the cross-entropy on validation images, the mean over the training
    domains. Defaults are the paper's.

    *Start*: s is the first k with E_k = min(E_k … E_{k+N_s−1}), and the threshold l = r mean(E_k … E_{k+N_s−1}). Where
    N_e > N_s up to N_e − N_s − 1 evaluations before s count too: those from which on every evaluation, and the one
    before them, is not above l. *End*: once N_e evaluations in a row, the last of them after the N_s that found s, are
    above l, the average ends before them. Where training ends first, evaluations above l at its very end are left out.

    Both are the authors' code (khanrc/swad, `LossValley`); algorithm 1 of the paper starts at s and, without N_e
    evaluations above l, ends with the training. What the code's queues do besides is not followed: evaluations near s
    count two or three times, and each like any other however many steps it stands for, where here every step counts
    once; s itself, which algorithm 1 has, is left out where N_e ≤ N_s; for N_e < N_s some evaluations above l among the
    N_s are taken in; and where s comes before the N_e-th evaluation, or within N_e of the last, the bounds shift.

    Where no s is found, the steps of the last evaluation are averaged and a warning says so, as in that code.

    Selection has nothing to pick: every rule gets θ_SWAD. Training goes on after t_e, so that budgets stay equal.
    Running batch-norm statistics do not fit averaged weights: with `batch_norm: train` they are gathered anew over up
    to 500 training batches, as the authors do; with `frozen` they stay what they are.
    """

    source = "Cha et al. 2021, SWAD: Domain Generalization by Seeking Flat Minima, algorithm 1, as its code has it"

    def __init__(
        self,
        *,
        n_converge: Annotated[
            int, Field(ge=1, description="N_s, evaluations that the first of them must not be above, to start there")
        ] = 3,
        n_tolerance: Annotated[
            int, Field(ge=1, description="N_e, evaluations in a row above the threshold that end the average")
        ] = 6,
        tolerance_ratio: Annotated[
            float, Field(ge=0, description="how far the threshold is above the first n_converge losses, as a fraction")
        ] = 0.3,
    ) -> None:
        self.n_converge, self.n_tolerance, self.tolerance_ratio = n_converge, n_tolerance, tolerance_ratio

    def begin(self) -> Average:
        return _Valley(self)


class _Valley(Average):
    """Keeps max(N_s, N_e) segments at most until s is known, two afterwards."""

    def __init__(self, settings: SWAD) -> None:
        self.settings = settings
        self.before: list[tuple[Segment, float]] = []  # while s is unknown: the last max(N_s, N_e)
        self.threshold: float | None = None  # l, once s is known
        self.inside: Segment | None = None  # from t_s to the last evaluation that is not above l: the average
        self.above: Segment | None = None  # what follows it: joins if an evaluation after it is not above l
        self.in_a_row = 0  # evaluations in `above`
        self.ended = False

    def add(self, segment: Segment, loss: float) -> None:
        if self.threshold is None:
            self._look_for_start(segment, loss)
        elif not self.ended:
            self._extend(segment, loss)
            self.ended = self.in_a_row >= self.settings.n_tolerance

    def result(self) -> Segment:
        if self.inside is None:
            last = self.before[-1][0]
            logger.warning(
                "swad: the validation loss has no valley of %d evaluations; averaging steps %d to %d only",
                self.settings.n_converge, last.first, last.last,
            )  # fmt: skip
            return last
        return self.inside

    def state(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "settings"}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.before = [(Segment(*segment), loss) for segment, loss in state["before"]]
        self.inside, self.above = (
            None if state[name] is None else Segment(*state[name]) for name in ("inside", "above")
        )
        self.threshold, self.in_a_row, self.ended = state["threshold"], state["in_a_row"], state["ended"]

    def _look_for_start(self, segment: Segment, loss: float) -> None:
        window, most = self.settings.n_converge, max(self.settings.n_converge, self.settings.n_tolerance)
        self.before = [*self.before, (segment, loss)][-most:]
        losses = [loss for _, loss in self.before]
        start = len(losses) - window  # of s, from 0
        if start < 0 or losses[start] > min(losses[start:]):
            return
        self.threshold = (1 + self.settings.tolerance_ratio) * sum(losses[start:]) / window
        first = start
        while first >= 2 and max(losses[first - 2 : first]) <= self.threshold:
            first -= 1
        self.inside = self.before[first][0]
        for later in self.before[first + 1 :]:
            self._extend(*later)
        self.before = []

    def _extend(self, segment: Segment, loss: float) -> None:
        assert self.threshold is not None and self.inside is not None
        self.above = segment if self.above is None else self.above.merged_with(segment)
        self.in_a_row += 1
        if loss <= self.threshold:
            self.inside, self.above, self.in_a_row = self.inside.merged_with(self.above), None, 0
