"""Zero-shot CLIP: no training at all."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from xdm_ft.algorithms import Candidate, Solver
from xdm_ft.core import Batch


class ZeroShot(Solver):
    """logits = logit scale × cosine(z, t_c), t_c the embedding of class c's prompts. It has no settings."""

    source = "Radford et al. 2021, Learning Transferable Visual Models From Natural Language Supervision"
    needs_text = True
    normalized = True

    def solve(self, z: Tensor, batch: Batch) -> Iterable[Candidate]:
        weight = self.setup.text_weight
        assert weight is not None, "the plan refuses zero_shot without a text side"
        yield Candidate.linear(0, weight.float(), torch.zeros(len(weight)), {})
