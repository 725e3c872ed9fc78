"""Gaussian discriminant analysis on frozen features, beside zero-shot: no training."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from xdm_ft.algorithms import Candidate, PickRule, Setup, Solver, normalised_sample_weight
from xdm_ft.algorithms.prototypes import ROWS, best_scale
from xdm_ft.core import Batch
from xdm_ft.runtime.progress import pulse

ALPHAS = tuple(10.0**power for power in range(-4, 3))


class GDA(Solver):
    """logits = s z Tᵀ + α (W z + b): zero-shot plus a Gaussian discriminant with one covariance for all classes.

    On L2-normalised features z [N,K], with w_i each image's factor in the mean by `training.loss_average` (class
    weights do not enter) and μ_c the weighted class means:

        Σ̂ = N / (N−1) Σ_i w_i (z_i − μ_y)(z_i − μ_y)ᵀ,  Σ⁻¹ = K [(N−1) Σ̂ + tr(Σ̂) I]⁻¹,  K I where tr(Σ̂) is 0,
        W = μ Σ⁻¹,  b = −log C − ½ diag(μ Σ⁻¹ μᵀ).

    A class without images takes the mean of the others' rows of W and b. Selection picks α among 0, which is
    zero-shot, 1e-4, …, 1e2, and (N−1)/K if that is larger; ties fall to the smallest. Without class embeddings T there
    is one candidate, α (W z + b), whose α has the lowest mean loss on the training images, as the s of `prototypes`.
    """

    source = "Wang et al. 2024, A Hard-to-Beat Baseline for Training-free CLIP-based Adaptation, eq. (4) to (7)"
    takes_text = True
    normalized = True
    class_means = True
    weighs_images = True
    keeps_curve = True
    two_domains_if = {"pick": "cross_domain"}
    inverses = 1

    def __init__(self, setup: Setup, *, pick: PickRule = "protocol") -> None:
        super().__init__(setup)
        self.pick = pick
        self.candidates = 1 if setup.text_weight is None else 1 + len(ALPHAS)

    def solve(self, z: Tensor, batch: Batch) -> Iterable[Candidate]:
        task, text, y = self.setup.task, self.setup.text_weight, batch.y.to(z.device)
        w = normalised_sample_weight(batch.domain, task.num_domains, self.setup.loss_average, dtype=torch.float64)
        weight, bias = discriminant(z, w.to(z.device), y, task.num_classes)
        largest = max(ALPHAS[-1], (len(z) - 1) / z.shape[1])
        if text is None:
            scores = (z.double() @ weight.T + bias).float()
            alphas = [best_scale(scores, y, self.image_weight(batch).to(z.device), (ALPHAS[0], largest))]
        else:
            alphas = [0.0, *dict.fromkeys((*ALPHAS, largest))]
        start = torch.zeros_like(weight) if text is None else text.to(weight)
        self.candidates = len(alphas)
        for index, alpha in enumerate(alphas):
            head, offset = (start + alpha * weight).float().cpu(), (alpha * bias).float().cpu()
            yield Candidate.linear(index, head, offset, {"gda_alpha": alpha})


def discriminant(z: Tensor, w: Tensor, y: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Returns W [C,K] and b [C], float64, of the Gaussian discriminant of features z [N,K]: see `GDA`.

    `w` float64 [N], sum 1; `y` int64 [N].
    """
    n, width = z.shape
    blocks = list(zip(z.split(ROWS), w.split(ROWS), y.split(ROWS), strict=True))
    sums, mass = z.new_zeros(num_classes, width, dtype=torch.float64), w.new_zeros(num_classes)
    for rows, of_rows, classes in blocks:
        members = F.one_hot(classes, num_classes) * of_rows[:, None]  # index_add is not deterministic on GPUs
        sums += members.T @ rows.double()
        mass += members.sum(0)
        pulse.beat()
    present = mass > 0
    means = sums / torch.where(present, mass, 1)[:, None]  # [C,K]
    scatter = z.new_zeros(width, width, dtype=torch.float64)  # Σ_i w_i (z_i − μ_y)(z_i − μ_y)ᵀ
    for rows, of_rows, classes in blocks:
        centred = rows.double() - means[classes]
        scatter += (centred.T * of_rows) @ centred
        pulse.beat()
    scatter *= n / max(1, n - 1)
    trace = float(scatter.trace())
    # one image a class: what is left is rounding
    if trace > 1e-12:
        shrunk = (n - 1) * scatter + trace * torch.eye(width).to(scatter)
        weight = width * torch.cholesky_solve(means.T, torch.linalg.cholesky(shrunk)).T
    else:
        weight = width * means
    bias = -math.log(num_classes) - (weight * means).sum(1) / 2
    weight = torch.where(present[:, None], weight, weight[present].mean(0))
    return weight, torch.where(present, bias, bias[present].mean())
