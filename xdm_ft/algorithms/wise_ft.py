"""WiSE-FT: interpolates fine-tuned weights with the zero-shot ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from xdm_ft.algorithms import Finish, Setup
from xdm_ft.algorithms.erm import ERM

ALPHAS = tuple(tenth / 10 for tenth in range(11))  # not tenth * 0.1, which gives 0.30000000000000004


def interpolate(start: Mapping[str, Tensor], end: Mapping[str, Tensor], alpha: float) -> dict[str, Tensor]:
    """Returns θ_α = (1 − α) θ_start + α θ_end of parameters and buffers; integers (counters) are those of `end`.

    Exactly `start` at α = 0 and `end` at α = 1.
    """
    return {
        name: (1 - alpha) * start[name].to(value) + alpha * value if value.is_floating_point() else value
        for name, value in end.items()
    }


class WiseFT(ERM):
    """θ_α = (1 − α) θ_zero-shot + α θ_ERM: ERM that starts from the class embeddings, then a point on the line.

    θ is the class head if the encoder is frozen, else encoder and head. ERM's step is selected first, then α among
    0, 0.1, …, 1 by the same rule, the smallest of equally good ones; `alpha: 0.5` is the authors' choice without
    validation. A recipe compares both with two items: `wise_ft` and `{name: wise_ft, alpha: 0.5, label: …}`.
    results.json has the metric at every α and on every split under `curve`; no row uses the α that is best on the test
    domain.

    Running batch-norm statistics are interpolated like weights: the authors' code interpolates the whole state dict.
    """

    source = "Wortsman et al. 2022, Robust fine-tuning of zero-shot models (WiSE-FT), eq. (1)"
    needs_text = True
    varied_by_finish = {"alpha": "interpolation weight of the fine-tuned weights"}

    def __init__(
        self,
        setup: Setup,
        *,
        alpha: Annotated[
            Literal["select"] | Annotated[float, Field(ge=0, le=1)],
            Field(description="α: 0 is zero-shot, 1 is fine-tuned; select: the best by the protocol's selection rule"),
        ] = "select",
    ) -> None:
        super().__init__(setup)
        self.alpha = alpha

    def finish(self, start: Mapping[str, Tensor], end: Mapping[str, Tensor]) -> Iterator[Finish]:
        """Yields θ_α for all α; if `alpha` is a number, only that one can be picked."""
        for alpha in sorted({*ALPHAS, *(() if self.alpha == "select" else (self.alpha,))}):
            yield Finish({"alpha": alpha}, interpolate(start, end, alpha), self.alpha in ("select", alpha))
