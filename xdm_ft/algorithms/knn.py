"""kNN: the k nearest training features vote."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import product
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from xdm_ft.algorithms import Candidate, PickRule, Setup, Solver
from xdm_ft.core import Batch
from xdm_ft.runtime.settings import OneOrMany

LARGE = 1 << 30  # bytes of training features of which a log line warns
logger = logging.getLogger("xdm_ft")


class KNN(Solver):
    """p_c ∝ Σ_{i ∈ N_k(z), y_i = c} exp(cos(z, z_i) / T): a vote of the k nearest training features, by cosine.

    DINO evaluates encoders so, with T = 0.07 and the best k. Here selection picks k and T among all pairs. Candidates
    run from the largest k and, for each k, the largest T: of equally good ones the smoothest is picked. A k above the
    number of training images means all of them. One vote is spread over all classes (`heads/neighbours.py`), so that
    probabilities are above 0. Every training image has one vote: `loss_average` and `class_weights` have no effect.

    Its head is the training features, `head: neighbours`, of 4 n K bytes for n images: so large is every weights file.
    Selection computes the cosines of validation and training images anew for every candidate.
    """

    source = "Wu et al. 2018, section 3.4; as in DINO (Caron et al. 2021), evaluation with a k-NN classifier"
    two_domains_if = {"pick": "cross_domain"}
    head_kind = "neighbours"

    def __init__(
        self,
        setup: Setup,
        *,
        neighbours: Annotated[
            tuple[Annotated[int, Field(ge=1)], ...],
            OneOrMany,
            Field(min_length=1, description="numbers k of neighbours to try"),
        ] = (1, 5, 10, 20, 50, 100, 200),
        temperatures: Annotated[
            tuple[Annotated[float, Field(gt=0)], ...],
            OneOrMany,
            Field(min_length=1, description="T to try: a neighbour's vote is exp(cosine / T)"),
        ] = (0.03, 0.07, 0.2),
        pick: PickRule = "protocol",
    ) -> None:
        super().__init__(setup)
        self.pick = pick
        self.pairs = list(product(sorted(neighbours, reverse=True), sorted(temperatures, reverse=True)))
        self.candidates = len(self.pairs)

    def solve(self, z: Tensor, batch: Batch) -> Iterable[Candidate]:
        keys, labels = F.normalize(z.float(), dim=-1).cpu(), batch.y.cpu()
        if keys.nbytes > LARGE:
            logger.warning("knn: each of its weights files holds all training features, %.1f GB", keys.nbytes / 1e9)
        for index, (k, temperature) in enumerate(self.pairs):
            head = {"keys": keys, "labels": labels, "k": torch.tensor(k), "temperature": torch.tensor(temperature)}
            yield Candidate(index, head, {"k": k, "vote_temperature": temperature})
