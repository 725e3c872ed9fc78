"""Linear probe: multinomial logistic regression on frozen features, solved to the optimum."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from xdm_ft.algorithms import Candidate, Setup, Solver, mean_loss
from xdm_ft.progress import pulse
from xdm_ft.settings import OneOrMany
from xdm_ft.tensors import Batch

MOST_ITERATIONS = 2000
MEMORY = 20  # pairs of steps and gradient changes that L-BFGS keeps
FINEST_IN_FLOAT32 = 1e-5  # tolerance that products in float32 still reach
GRAM_ROWS = 4096  # images that are added to the Gram matrix at a time, in float64
logger = logging.getLogger("xdm_ft")


class LinearProbe(Solver):
    """min over W, b of L(W, b) + ½ l2 ‖W‖² for a path of strengths; selection picks one of them.

    L is the mean loss of all training images, by `training.loss_average` and `class_weights`; b is not penalised. A
    strength is l2 divided by the features' mean square (averaged in the same way), so that one path fits every scale of
    features. The features are neither centred nor standardised.

    L-BFGS solves from the strongest penalty to the weakest, in coordinates in which the problem is well-conditioned
    (`_Problem`). Each solution starts on the line through the two before it. The optimum does not depend on the start.
    """

    source = "multinomial logistic regression by L-BFGS, as CLIP's linear probe (Radford et al. 2021, appendix A.3)"

    def __init__(
        self,
        setup: Setup,
        *,
        strengths: Annotated[
            tuple[Annotated[float, Field(gt=0)], ...],
            OneOrMany,
            Field(min_length=1, description="penalties to try: l2 / mean square of the features, as in ½ l2 ‖W‖²"),
        ] = (1.0, 0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5),
        tolerance: Annotated[
            float,
            Field(gt=0, description="largest gradient entry at which L-BFGS stops, at a curvature of about 1"),
        ] = 1e-4,
    ) -> None:
        super().__init__(setup)
        self.strengths, self.tolerance = tuple(sorted(strengths, reverse=True)), tolerance
        self.candidates = len(self.strengths)

    def solve(self, z: Tensor, batch: Batch) -> Iterable[Candidate]:
        dtype = torch.float32 if self.tolerance >= FINEST_IN_FLOAT32 else torch.float64
        x = torch.cat([z.to(dtype), z.new_ones(len(z), 1, dtype=dtype)], dim=1)  # [n,K+1], 1 for the bias
        y, weight = batch.y.to(z.device), self._sample_weight(batch).to(z.device)
        gram = _gram(x, weight)
        unit = float(gram.diagonal()[:-1].mean())  # the features' mean square
        path: list[Tensor] = []
        for place, strength in enumerate(self.strengths):
            start = self._start(path, x)
            path.append(self._minimum(_Problem(x, y, weight, strength * unit, gram, start), strength))
            head = path[-1].float().cpu()
            hparams = {"strength": strength, "l2": strength * unit}
            yield Candidate.linear(place, head[:, :-1].clone(), head[:, -1].clone(), hparams)

    def _sample_weight(self, batch: Batch) -> Tensor:
        """Returns each image's factor in the mean loss, float64 [n]: the derivative of the mean by the image's loss."""
        per_sample = torch.zeros(len(batch.y), dtype=torch.float64, device=batch.y.device, requires_grad=True)
        of_class = self.setup.class_weight
        weight = None if of_class is None else of_class.to(per_sample)[batch.y]
        loss = mean_loss(per_sample, batch.domain, self.setup.task.num_domains, self.setup.loss_average, weight)
        return torch.autograd.grad(loss, per_sample)[0]

    def _start(self, path: list[Tensor], x: Tensor) -> Tensor:
        """Returns a guess of the next optimum, [C,K+1]: the last two, extrapolated linearly in log l2."""
        if not path:
            return x.new_zeros(self.setup.task.num_classes, x.shape[1], dtype=torch.float64)
        if len(path) == 1:
            return path[0]
        before, last, now = (math.log(strength) for strength in self.strengths[len(path) - 2 : len(path) + 1])
        # a recipe may list a strength twice: two equal ones define no line
        reach = (now - last) / (last - before) if last != before else 0.0
        return path[-1] + reach * (path[-1] - path[-2])

    def _minimum(self, problem: _Problem, strength: float) -> Tensor:
        """Returns the optimum [C,K+1] by L-BFGS; logs a warning if it stops before the tolerance is reached."""
        from scipy.optimize import minimize

        end = minimize(
            problem.value_and_gradient,
            problem.start,
            jac=True,
            method="L-BFGS-B",
            options={"gtol": self.tolerance, "ftol": 0, "maxiter": MOST_ITERATIONS, "maxcor": MEMORY, "maxls": 50},
        )
        largest = float(np.abs(end.jac).max())
        if largest > self.tolerance:
            logger.warning(
                "linear_probe, strength %g: stopped at a gradient of %.1e after %d iterations, above the tolerance of "
                "%.0e; the candidate is used as it is; raise linear_probe.tolerance to accept it",
                strength, largest, end.nit, self.tolerance,
            )  # fmt: skip
        return problem.coefficients(end.x)


class _Problem:
    """f(A) = Σ_i w_i ℓ(A x_i, y_i) + ½ l2 ‖A without the bias‖² in coordinates V with A = V L⁻¹, L Lᵀ = M.

    If l2 is far below the features' scale, f is badly conditioned in A. M = p̄ Σ_i w_i x_i x_iᵀ + diag(penalty) is the
    Hessian of f with every p(1−p) replaced by their mean p̄ at the start. The Hessian in V is therefore near the
    identity: L-BFGS needs a tenth of the iterations, and one tolerance of the gradient fits features of every scale.
    All computation is in float64, except the products with x in x's own type: they are nearly all of the work.
    """

    def __init__(self, x: Tensor, y: Tensor, weight: Tensor, l2: float, gram: Tensor, start: Tensor) -> None:
        self.x, self.y, self.weight = x, y, weight
        self.penalty = torch.full_like(gram[0], l2)  # [K+1]
        self.penalty[-1] = 0
        probability = self._logits(start).softmax(0)  # [C,n]
        spread = ((probability * (1 - probability)) @ weight).mean().clamp(min=1e-9)  # p̄
        # a small multiple of the mean diagonal keeps M invertible in float64
        diagonal = torch.diag(self.penalty + 1e-12 * spread * gram.diagonal().mean())
        lower = torch.linalg.cholesky(spread * gram + diagonal)  # L
        self.inverse = torch.linalg.solve_triangular(lower, torch.eye(len(lower)).to(lower), upper=False)
        self.start = _to_numpy(start @ lower)

    def coefficients(self, v: np.ndarray) -> Tensor:
        return torch.from_numpy(v).to(self.x.device).view(-1, self.x.shape[1]) @ self.inverse  # [C,K+1]

    def value_and_gradient(self, v: np.ndarray) -> tuple[float, np.ndarray]:
        pulse.beat()  # one candidate may need many of these calls, each of them long
        coefficients = self.coefficients(v)
        log_probability = self._logits(coefficients).log_softmax(0)  # [C,n]
        true = F.one_hot(self.y, len(coefficients)).T
        loss = -((log_probability * true).sum(0) @ self.weight) + (coefficients.square() @ self.penalty).sum() / 2
        residual = (log_probability.exp() - true) * self.weight  # [C,n]
        gradient = (residual.to(self.x.dtype) @ self.x).double() + coefficients * self.penalty
        return float(loss), _to_numpy(gradient @ self.inverse.T)

    def _logits(self, coefficients: Tensor) -> Tensor:
        return (coefficients.to(self.x.dtype) @ self.x.T).double()  # [C,n]


def _gram(x: Tensor, weight: Tensor) -> Tensor:
    """Returns Σ_i w_i x_i x_iᵀ in float64, [K+1,K+1]."""
    gram = x.new_zeros(x.shape[1], x.shape[1], dtype=torch.float64)
    for rows, of_rows in zip(x.split(GRAM_ROWS), weight.split(GRAM_ROWS), strict=True):
        gram += (rows.double().T * of_rows) @ rows.double()
    return gram


def _to_numpy(values: Tensor) -> np.ndarray:
    return values.flatten().cpu().numpy()
