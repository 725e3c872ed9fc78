"""Logits of heads on cached features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from xdm_ft.training import Job
from xdm_ft.training.bank.data import cached_logits

if TYPE_CHECKING:
    from xdm_ft.features.cache import Features

KEPT_BYTES = 1 << 28  # features that a predictor keeps for the next weights


class CachedPredictor:
    """The `Predictor` of heads and solvers. Those of one chunk differ in their weights only, and share it."""

    def __init__(self, job: Job, features: Features) -> None:
        self.job, self._features = job, features
        self._model = job.new_method().eval()
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # id of rows → these rows, their features
        self._bytes_left = KEPT_BYTES

    @torch.no_grad()
    def logits(self, state: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        # assign, because a copy could have another memory layout, and with it products that round differently
        self._model.load_state_dict(state, assign=True)
        model = self._model.to(self._features.device)
        if self._keep(rows):
            return model.logits(self._kept[id(rows)][1]).cpu()
        return cached_logits(self._features, rows, model).cpu()

    def _keep(self, rows: Tensor) -> bool:
        """Gathers the rows once for all weights. Returns whether their features are kept: there is a limit."""
        size = 4 * len(rows) * self._features.width
        if id(rows) not in self._kept and size <= self._bytes_left:
            self._kept[id(rows)] = rows, self._features[rows.to(self._features.device)]
            self._bytes_left -= size
        return id(rows) in self._kept

    def features(self, state: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        return self._features[rows.to(self._features.device)].cpu()

    def starting_weights(self) -> dict[str, Tensor]:
        return self.job.new_method().state_dict()
