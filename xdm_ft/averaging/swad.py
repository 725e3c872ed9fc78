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

    E_k is the loss at the k-th evaluation: the cross-entropy on validation images, averaged over the training domains.
    N_s = n_converge, N_e = n_tolerance, r = 1 + tolerance_ratio. Evaluation k stands for the steps after evaluation
    k − 1 up to its own. The defaults of the three are the paper's (its commands have r = 1.2 on VLCS). How often to
    evaluate is not: a training has 20 evaluations here, and the authors' commands evaluate every 100 of 5,000 steps (on
    VLCS 50, on DomainNet 500 of 15,000), so that N_s and N_e span more steps here. `training.evaluate_every: 100` is
    theirs.

    *Start*: s is the first k with E_k = min(E_k … E_{k+N_s−1}). The threshold is l = r mean(E_s … E_{s+N_s−1}). If
    N_e > N_s, the average starts up to N_e − N_s − 1 evaluations before s: it moves back as long as the evaluation it
    moves to and the one before that are not above l.
    *End*: when N_e evaluations in a row are above l, and the last of them comes after s+N_s−1, the average ends before
    the first of them. If training ends earlier, the evaluations above l at its very end are left out.

    Start and end follow the authors' code (khanrc/swad, `LossValley`). Algorithm 1 of the paper starts at s and ends
    with the training unless N_e evaluations are above l. These properties of the code's queues are not followed:

    * evaluations near s count two or three times, and an evaluation counts the same however many steps it stands for;
      here every step counts once;
    * if N_e ≤ N_s, s itself is left out; algorithm 1 includes it, and so does this class;
    * if N_e < N_s, some evaluations above l among the N_s are included;
    * if s comes before the N_e-th evaluation, or within N_e of the last, the bounds shift.

    If there is no s, the steps of the last evaluation are averaged, with a warning, as in that code.

    Every selection rule gets θ_SWAD. Training continues after t_e, so that all methods have the same budget. Running
    batch-norm statistics do not fit averaged weights: with `batch_norm: train` they are computed again over up to 500
    training batches, as the authors do; with `frozen` they are not changed.
    """

    source = "Cha et al. 2021, SWAD: Domain Generalization by Seeking Flat Minima, algorithm 1, as its code has it"

    def __init__(
        self,
        *,
        n_converge: Annotated[
            int,
            Field(
                ge=1, description="N_s, the average starts at an evaluation that is the lowest of the N_s from it on"
            ),
        ] = 3,
        n_tolerance: Annotated[
            int, Field(ge=1, description="N_e, number of evaluations in a row above the threshold that end the average")
        ] = 6,
        tolerance_ratio: Annotated[
            float,
            Field(ge=0, description="the threshold is (1 + tolerance_ratio) times the mean of those n_converge losses"),
        ] = 0.3,
    ) -> None:
        self.n_converge, self.n_tolerance, self.tolerance_ratio = n_converge, n_tolerance, tolerance_ratio

    def begin(self) -> Average:
        return _Valley(self)


class _Valley(Average):
    """The average of one model. Keeps at most max(N_s, N_e) segments until s is known, and two afterwards."""

    def __init__(self, settings: SWAD) -> None:
        self.settings = settings
        self.before: list[tuple[Segment, float]] = []  # segments and losses while s is unknown: the last max(N_s, N_e)
        self.threshold: float | None = None  # l, once s is known
        self.inside: Segment | None = None  # the average: from t_s to the last evaluation that is not above l
        self.above: Segment | None = (
            None  # the segments after it; merged into it by the next evaluation that is not above l
        )
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
        start = len(losses) - window  # position of s in `losses`, if it is found now
        if start < 0 or losses[start] > min(losses[start:]):
            return
        self.threshold = (1 + self.settings.tolerance_ratio) * sum(losses[start:]) / window
        first = start  # E_{first−1} may join only if E_{first−2} exists and is not above l either, as in `LossValley`
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
