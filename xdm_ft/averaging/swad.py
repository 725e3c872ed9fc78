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

    Algorithm 1, with E_k the k-th evaluation, N_s = n_converge, N_e = n_tolerance and r = 1 + tolerance_ratio: t_s is
    the first k with E_k = min(E_k … E_{k+N_s−1}), and the threshold l = r mean(E_k … E_{k+N_s−1}). Once N_e evaluations
    in a row are above l, t_e is the one before them; until then it is the last one. An evaluation stands for the steps
    since the one before, so evaluated at every step this is algorithm 1 to the letter (for N_e < N_s it may end
    earlier, within the first N_s). Defaults are the paper's. E is the mean cross-entropy on the validation images of
    the training domains.

    Where no t_s is found, the last segment is averaged and a warning says so, as in the authors' code. That code also
    takes in segments before t_s where N_e > N_s; the algorithm is followed instead.

    Selection has nothing to pick: every rule gets θ_SWAD. Training goes on after t_e, so that budgets stay equal.
    Running batch-norm statistics do not fit averaged weights: with `batch_norm: train` they are gathered anew over up
    to 500 training batches, as the authors do; with `frozen` they stay what they are.
    """

    source = "Cha et al. 2021, SWAD: Domain Generalization by Seeking Flat Minima, algorithm 1"

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
    """Keeps N_s segments at most before t_s, two afterwards."""

    def __init__(self, settings: SWAD) -> None:
        self.settings = settings
        self.before: list[tuple[Segment, float]] = []  # while t_s is unknown: the last N_s
        self.threshold: float | None = None  # l, once t_s is known
        self.inside: Segment | None = None  # from t_s to the last evaluation that is not above l
        self.above: Segment | None = None  # what follows it: part of the average unless t_e is found
        self.in_a_row = 0  # evaluations in `above`
        self.ended = False

    def add(self, segment: Segment, loss: float) -> None:
        if self.threshold is None:
            self._look_for_start(segment, loss)
        elif not self.ended:
            self._go_on(segment, loss)

    def result(self) -> Segment:
        if self.inside is None:
            last = self.before[-1][0]
            logger.warning(
                "swad: the validation loss has no valley of %d evaluations; averaging steps %d to %d only",
                self.settings.n_converge, last.first, last.last,
            )  # fmt: skip
            return last
        return self.inside if self.ended or self.above is None else self.inside.joined(self.above)

    def state(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "settings"}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.before = [(Segment(*segment), loss) for segment, loss in state["before"]]
        self.inside, self.above = (
            None if state[name] is None else Segment(*state[name]) for name in ("inside", "above")
        )
        self.threshold, self.in_a_row, self.ended = state["threshold"], state["in_a_row"], state["ended"]

    def _look_for_start(self, segment: Segment, loss: float) -> None:
        patience = self.settings.n_converge
        self.before = [*self.before, (segment, loss)][-patience:]
        losses = [loss for _, loss in self.before]
        if len(losses) < patience or losses[0] > min(losses):
            return
        self.threshold = (1 + self.settings.tolerance_ratio) * sum(losses) / patience
        self.inside = self.before[0][0]
        for later in self.before[1:]:
            self._go_on(*later)
        self.before = []

    def _go_on(self, segment: Segment, loss: float) -> None:
        assert self.threshold is not None and self.inside is not None
        self.above = segment if self.above is None else self.above.joined(segment)
        self.in_a_row += 1
        if loss <= self.threshold:
            self.inside, self.above, self.in_a_row = self.inside.joined(self.above), None, 0
        elif self.in_a_row == self.settings.n_tolerance:
            self.ended = True
