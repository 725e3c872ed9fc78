"""Prototypes: the nearest class mean of frozen features, by cosine."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from xdm_ft.algorithms import Candidate, LossAverage, Setup, Solver
from xdm_ft.core import Batch
from xdm_ft.runtime.progress import pulse

SCALES = (1.0, 100.0)  # limits of the fitted scale; CLIP limits its own to 100
HALVINGS = 40  # of the logarithm of that range: far below float32's rounding
ROWS = 4096  # images that are added to the class means at a time, in float64


def class_means(z: Tensor, batch: Batch, num_classes: int, num_domains: int, loss_average: LossAverage) -> Tensor:
    """Returns the mean feature of each class, [C,K] float64; 0 for a class without images.

    `domain`: the mean over the domains that have images of the class, of the mean in each. `sample`: over its images.
    """
    cell = batch.y * num_domains + batch.domain  # [n]
    sums = z.new_zeros(num_classes * num_domains, z.shape[1], dtype=torch.float64)
    for rows, of_rows in zip(z.split(ROWS), cell.split(ROWS), strict=True):
        sums += F.one_hot(of_rows, len(sums)).T.double() @ rows.double()  # index_add is not deterministic on GPUs
        pulse.beat()
    count = cell.bincount(minlength=len(sums)).view(num_classes, num_domains, 1).double()
    sums = sums.view(num_classes, num_domains, -1)
    if loss_average == "sample":
        return sums.sum(1) / count.sum(1).clamp(min=1)
    return (sums / count.clamp(min=1)).sum(1) / (count > 0).sum(1).clamp(min=1)


def best_scale(cosines: Tensor, y: Tensor, weight: Tensor, limits: tuple[float, float] = SCALES) -> float:
    """Returns the scale s within `limits` at which Σ_i w_i ℓ(s cos_i, y_i) is lowest, ℓ the cross-entropy.

    The loss is convex in s, and its derivative Σ_i w_i (Σ_c p_ic cos_ic − cos_iy) rises with s: the range is halved,
    in the logarithm, until the derivative changes its sign there. `cosines` float [n,C], `weight` float64 [n].
    """
    true = cosines.gather(1, y[:, None])[:, 0]
    low, high = map(math.log, limits)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        expected = ((math.exp(middle) * cosines).softmax(1) * cosines).sum(1)
        low, high = (low, middle) if float((expected - true).double() @ weight) > 0 else (middle, high)
        pulse.beat()
    return math.exp((low + high) / 2)


class Prototypes(Solver):
    """logits_c = s · cos(z, μ_c): μ_c is the mean of class c's L2-normalised training features, normalised again.

    Cosine ranks classes as the squared Euclidean distance to normalised prototypes does, ‖ẑ − μ̂_c‖² = 2 − 2 cos. With
    `training.loss_average: domain` (the default) μ_c is the mean over training domains of the class means in each, so
    that a large domain counts as a small one; with `sample` it is the mean over the class's images. A class without
    training images has the cosine −1, the lowest.

    s has no effect on accuracy. Unless it is given, s is fitted for probabilities: it has the lowest mean loss on the
    training images (by `loss_average` and `class_weights`), within 1…100. These images are in their own means, so
    probabilities are somewhat too sure; `temperature` of the record, fitted on validation images, corrects them.
    """

    source = "Mensink et al. 2013 (nearest class mean); Snell et al. 2017, Prototypical Networks, eq. (1) and (2)"
    normalized = True
    class_means = True
    weighs_images = True

    def __init__(
        self,
        setup: Setup,
        *,
        scale: Annotated[
            float | None,
            Field(gt=0, description="s, 1 / temperature; null: the one with the lowest mean loss on training images"),
        ] = None,
    ) -> None:
        super().__init__(setup)
        self.scale = scale

    def solve(self, z: Tensor, batch: Batch) -> Iterable[Candidate]:
        setup, task, y = self.setup, self.setup.task, batch.y.to(z.device)
        batch = batch._replace(y=y, domain=batch.domain.to(z.device))
        means = class_means(z, batch, task.num_classes, task.num_domains, setup.loss_average)
        prototypes = F.normalize(means, dim=1).float()  # [C,K]
        missing = y.bincount(minlength=task.num_classes) == 0
        scale = self.scale
        if scale is None:
            weight = self.image_weight(batch)
            scale = best_scale((z @ prototypes.T).masked_fill(missing, -1.0), y, weight)
        # the prototype of a class without images is 0: its bias alone gives the cosine −1
        yield Candidate.linear(0, scale * prototypes, torch.where(missing, -scale, 0.0), {"scale": scale})
