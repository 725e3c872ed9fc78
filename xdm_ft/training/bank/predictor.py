"""Logits of heads on cached features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from xdm_ft.training import Job
from xdm_ft.training.bank.data import cached_logits

if TYPE_CHECKING:
    from xdm_ft.features.cache import Features


class CachedPredictor:
    """The `Predictor` of heads and solvers. Those of one chunk differ in their weights only, and share it."""

    def __init__(self, job: Job, features: Features) -> None:
        self.job, self._features = job, features
        self._model = job.new_method().eval()

    def logits(self, state: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        # assign, because a copy could have another memory layout, and with it products that round differently
        self._model.load_state_dict(state, assign=True)
        return cached_logits(self._features, rows, self._model.to(self._features.device)).cpu()

    def features(self, state: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        return self._features[rows.to(self._features.device)].cpu()

    def starting_weights(self) -> dict[str, Tensor]:
        return self.job.new_method().state_dict()
