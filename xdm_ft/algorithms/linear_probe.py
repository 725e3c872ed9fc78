"""Linear probe: multinomial logistic regression on frozen features, to the optimum."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from xdm_ft.algorithms import Candidate, Setup, Solver, mean_loss
from xdm_ft.tensors import Batch

MOST_ITERATIONS = 2000
MEMORY = 20  # pairs of steps and gradient changes that L-BFGS keeps
logger = logging.getLogger("xdm_ft")


class LinearProbe(Solver):
    """min over W, b of L(W, b) + ½ l2 ‖W‖² for a path of strengths l2; selection picks among them.

    L is the training loss over all training images, averaged as `training.loss_average` says; b is not penalised.
    Features are used as they are, neither centred nor scaled, so that l2 weighs them as the encoder gives them.

    The optimum does not depend on how it is reached: L-BFGS in float64 from the strongest penalty to the weakest, each
    from the optimum before, in coordinates in which the problem is well-conditioned (`_Problem`).
    """

    source = "multinomial logistic regression by L-BFGS, as CLIP's linear probe (Radford et al. 2021, appendix A.3)"

    def __init__(
        self,
        setup: Setup,
        *,
        strengths: Annotated[
            tuple[Annotated[float, Field(gt=0)], ...],
            Field(min_length=1, description="l2 of the penalty ½ l2 ‖W‖² beside the mean loss; selection picks one"),
        ] = (1.0, 0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5),
        tolerance: Annotated[
            float, Field(gt=0, description="largest gradient entry at the optimum, in well-conditioned coordinates")
        ] = 1e-5,
    ) -> None:
        super().__init__(setup)
        self.strengths, self.tolerance = tuple(sorted(strengths, reverse=True)), tolerance

    def solve(self, z: Tensor, batch: Batch) -> Iterable[Candidate]:
        x = torch.cat([z.double(), z.new_ones(len(z), 1, dtype=torch.float64)], dim=1)  # [n,K+1]; 1 for the bias
        y, weight = batch.y.to(z.device), self._weights(batch).to(z.device)
        gram = (x.T * weight) @ x  # [K+1,K+1]
        coefficients = x.new_zeros(self.setup.task.num_classes, x.shape[1])  # [C,K+1]
        for place, l2 in enumerate(self.strengths):
            problem = _Problem(x, y, weight, _penalty(l2, x), gram, coefficients)
            coefficients = self._minimum(problem, l2)
            head = coefficients.float().cpu()
            yield Candidate(place, head[:, :-1].clone(), head[:, -1].clone(), {"l2": l2})

    def _weights(self, batch: Batch) -> Tensor:
        """What each image counts in the mean loss, its derivative by the image's own: float64 [n]."""
        per_sample = torch.zeros(len(batch.y), dtype=torch.float64, device=batch.y.device, requires_grad=True)
        loss = mean_loss(per_sample, batch.domain, self.setup.task.num_domains, self.setup.loss_average)
        return torch.autograd.grad(loss, per_sample)[0]

    def _minimum(self, problem: _Problem, l2: float) -> Tensor:
        """L-BFGS from the problem's start; a warning where it ends before the tolerance."""
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
                "linear_probe, l2 %g: stopped at a gradient of %.1e, not %.0e, after %d iterations",
                l2, largest, self.tolerance, end.nit,
            )  # fmt: skip
        return problem.coefficients(end.x)


class _Problem:
    """f(A) = Σ_i w_i ℓ(A x_i, y_i) + ½ Σ_k penalty_k ‖A_k‖² in coordinates V with A = V L⁻¹, L Lᵀ = M.

    With a penalty far below the features' scale, f is badly conditioned in A. M = p̄ Σ_i w_i x_i x_iᵀ + diag(penalty) is
    its Hessian with every p(1−p) replaced by their mean p̄ at the start, so that in V the Hessian is near the identity:
    some 20 iterations instead of hundreds, and a gradient whose size means the same for every scale of features.
    """

    def __init__(
        self, x: Tensor, y: Tensor, weight: Tensor, penalty: Tensor, gram: Tensor, coefficients: Tensor
    ) -> None:
        self.x, self.y, self.weight, self.penalty = x, y, weight, penalty
        probability = (x @ coefficients.T).softmax(1)  # [n,C]
        spread = (weight @ (probability * (1 - probability))).mean().clamp(min=1e-9)  # p̄
        diagonal = torch.diag(penalty + 1e-12 * spread * gram.diagonal().mean())  # keeps M regular in float64
        lower = torch.linalg.cholesky(spread * gram + diagonal)  # L
        self.inverse = torch.linalg.solve_triangular(lower, torch.eye(len(lower)).to(lower), upper=False)
        self.start = self._to_numpy(coefficients @ lower)

    def coefficients(self, v: np.ndarray) -> Tensor:
        return torch.from_numpy(v).to(self.x.device).view(-1, self.x.shape[1]) @ self.inverse  # [C,K+1]

    def value_and_gradient(self, v: np.ndarray) -> tuple[float, np.ndarray]:
        coefficients = self.coefficients(v)
        log_probability = (self.x @ coefficients.T).log_softmax(1)  # [n,C]
        true = F.one_hot(self.y, len(coefficients))
        loss = -(self.weight @ (log_probability * true).sum(1)) + (coefficients.square() @ self.penalty).sum() / 2
        residual = (log_probability.exp() - true) * self.weight[:, None]  # [n,C]
        gradient = residual.T @ self.x + coefficients * self.penalty
        return float(loss), self._to_numpy(gradient @ self.inverse.T)

    @staticmethod
    def _to_numpy(values: Tensor) -> np.ndarray:
        return values.flatten().cpu().numpy()


def _penalty(l2: float, x: Tensor) -> Tensor:
    penalty = x.new_full((x.shape[1],), l2)  # [K+1]
    penalty[-1] = 0  # the bias
    return penalty
