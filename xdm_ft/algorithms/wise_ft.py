"""WiSE-FT: fine-tuned weights, interpolated with the zero-shot ones."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from xdm_ft.algorithms import Setup
from xdm_ft.algorithms.erm import ERM


class WiseFT(ERM):
    """θ_α = (1 − α) θ_zero-shot + α θ_ERM: ERM that starts from the class embeddings, then a point on the line.

    With a frozen encoder θ is the class head, end to end the encoder and the head. ERM's step is selected first, then
    α among 0, 0.1, …, 1 by the same rule, the smallest of equally good ones; `alpha: 0.5` is the authors' choice
    without validation. Two items of a recipe show both: `wise_ft` and `{name: wise_ft, alpha: 0.5, label: …}`. The
    metric at every α and on every split is in results.json under `curve`; the best α on the test domain is in no row.

    Running batch-norm statistics are interpolated like weights, as the authors' code does with all of a state dict.
    """

    source = "Wortsman et al. 2022, Robust fine-tuning of zero-shot models (WiSE-FT), eq. (1)"
    needs_text = True

    def __init__(
        self,
        setup: Setup,
        *,
        alpha: Annotated[
            Literal["select"] | Annotated[float, Field(ge=0, le=1)],
            Field(description="share of the fine-tuned weights; select: the best by the protocol's selection rule"),
        ] = "select",
    ) -> None:
        super().__init__(setup)
        self.interpolated = alpha
