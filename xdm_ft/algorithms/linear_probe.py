"""Linear probe: multinomial logistic regression on frozen features, solved to the optimum."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from threadpoolctl import threadpool_limits
from torch import Tensor

from xdm_ft.algorithms import Candidate, PickRule, Setup, Solver
from xdm_ft.core import Batch
from xdm_ft.runtime.progress import pulse
from xdm_ft.runtime.settings import OneOrMany

MAX_ITERATIONS = 2000
MEMORY = 20  # pairs of steps and gradient changes that L-BFGS keeps
FINEST_IN_FLOAT32 = 1e-5  # tolerance that products in float32 still reach
GRAM_ROWS = 256  # made at a time: nobody needs what is above the diagonal
BLOCK_BYTES = 1 << 23  # of a block of images: its features, or its probabilities of all classes, in float64
logger = logging.getLogger("xdm_ft")


Center = Literal["zero", "zero_shot"]
STRENGTHS = {
    "zero": (1.0, 0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5),
    "zero_shot": (10.0, 1.0, 0.1, 0.01, 1e-3, 1e-4, 1e-5, 1e-6),
}


class LinearProbe(Solver):
    """min over W, b of L(W, b) + ½ l2 ‖W‖² (`center: zero`), or of L(W, b) + ½ l2 (‖W − s T‖² + ‖b‖²) (`zero_shot`).

    L is the mean loss of all training images, by `training.loss_average` and `class_weights`; selection picks one of a
    path of strengths. The features are neither centred nor standardised.

    Around zero b is not penalised, and a strength is l2 divided by the features' mean square (averaged as L is), so
    that one path fits every scale of features.

    Around the class embeddings T [C,K] × the logit scale s, on L2-normalised features, the path is one road from
    zero-shot (l2 → ∞) to the plain probe (l2 → 0), and a strength is l2. Its first candidate is the zero-shot head
    itself, without a strength: ties fall to it. b is penalised too, else it would fit the training classes' shares at
    any l2. results.json has the metric of every candidate on every split under `curve`.

    L-BFGS solves from the strongest penalty to the weakest, in coordinates in which the problem is well-conditioned
    (`_Problem`). Each solution starts on the line through the two before it. The optimum does not depend on the start.
    """

    two_domains_if = {"pick": "cross_domain"}
    weighs_images = True
    inverses = 3  # as long as a Cholesky factor for each of the default strengths takes
    keeps_curve = True
    source = "multinomial logistic regression by L-BFGS, as CLIP's linear probe (Radford et al. 2021, appendix A.3)"

    def __init__(
        self,
        setup: Setup,
        *,
        center: Annotated[
            Center | None,
            Field(
                description="where the penalty pulls to: zero, or the zero_shot head, on L2-normalised features; null: "
                "zero_shot if the encoder has class embeddings, else zero"
            ),
        ] = None,
        strengths: Annotated[
            Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1)] | None,
            OneOrMany,
            Field(
                description="penalties to try: l2 / mean square of the features, with center: zero_shot l2; null: ten "
                "from 1 to 3e-5, with center: zero_shot eight from 10 to 1e-6"
            ),
        ] = None,
        tolerance: Annotated[
            float,
            Field(
                gt=0,
                description="largest gradient entry at which L-BFGS stops, at a curvature of about 1. At 1e-4 "
                "selection may pick another of two nearly equal strengths than at the optimum; 3e-5 takes 1.5 × the "
                "iterations, 1e-6 4 ×",
            ),
        ] = 1e-4,
        pick: PickRule = "protocol",
    ) -> None:
        super().__init__(setup)
        self.pick = pick
        self.from_text = center == "zero_shot"
        self.strengths = tuple(sorted(strengths or STRENGTHS[center or "zero"], reverse=True))
        self.tolerance, self.candidates = tolerance, len(self.strengths) + self.from_text

    def solve(self, z: Tensor, batch: Batch) -> Iterable[Candidate]:
        dtype = torch.float32 if self.tolerance >= FINEST_IN_FLOAT32 else torch.float64
        y, weight, classes = batch.y.to(z.device), self.image_weight(batch).to(z.device), self.setup.task.num_classes
        center = None
        if self.from_text:
            assert self.setup.text_weight is not None, "the plan skips center: zero_shot without a text side"
            center = self.setup.text_weight.to(z.device).double()
            hparams: dict[str, float | None] = {"strength": None, "l2": None}
            yield Candidate.linear(0, self.setup.text_weight.float(), torch.zeros(classes), hparams)
        with ThreadPoolExecutor(self.threads) as pool:
            images = _Images(center, z, y, weight, classes, dtype, self.threads, pool)
            gram = _gram(images)
            unit = 1.0 if self.from_text else float(gram.diagonal()[:-1].mean())  # the features' mean square
            penalty = torch.ones_like(gram[0])  # [K+1]
            penalty[-1] = self.from_text
            path: list[Tensor] = []
            for index, strength in enumerate(self.strengths, start=int(self.from_text)):
                start = self._start(path, gram)
                path.append(self._minimum(_Problem(images, strength * unit * penalty, gram, start), strength))
                weights, bias = path[-1][:, :-1], path[-1][:, -1]
                weights = weights if center is None else center + weights
                hparams = {"strength": strength, "l2": strength * unit}
                yield Candidate.linear(index, weights.float().cpu(), bias.float().cpu(), hparams)

    def _start(self, path: list[Tensor], gram: Tensor) -> Tensor:
        """Returns a guess of the next optimum, [C,K+1]: the last two, extrapolated linearly in log l2."""
        if not path:
            return gram.new_zeros(self.setup.task.num_classes, len(gram))
        if len(path) == 1:
            return path[0]
        before, last, now = (math.log(strength) for strength in self.strengths[len(path) - 2 : len(path) + 1])
        # a recipe may list a strength twice: two equal ones define no line
        reach = (now - last) / (last - before) if last != before else 0.0
        return path[-1] + reach * (path[-1] - path[-2])

    def _minimum(self, problem: _Problem, strength: float) -> Tensor:
        """Returns the optimum [C,K+1] by L-BFGS; logs a warning if it stops before the tolerance is reached."""
        from scipy.optimize import minimize

        # ftol 0: with a weak penalty scipy would stop at a small decrease of the loss, far from the optimum
        options = {"gtol": self.tolerance, "ftol": 0, "maxiter": MAX_ITERATIONS, "maxcor": MEMORY, "maxls": 50}
        # scipy's own threads would wait for cores that other processes use; torch's setting does not reach them
        with threadpool_limits(1, "blas"):
            end = minimize(problem.value_and_gradient, problem.start, jac=True, method="L-BFGS-B", options=options)
        largest = float(np.abs(end.jac).max())
        if largest > self.tolerance:
            logger.warning(
                "linear_probe.tolerance: strength %g has a gradient of %.1e after %d iterations, above %.0e; "
                "the head stays; raise the tolerance to accept it",
                strength, largest, end.nit, self.tolerance,
            )  # fmt: skip
        return problem.coefficients(end.x)


class _Images(NamedTuple):
    """The n training images, which passes read in blocks: nothing else has the features' size."""

    center: Tensor | None  # A₀, float64 [C,K], without a bias; None: zero
    z: Tensor  # [n,K]
    y: Tensor  # int64 [n]
    weight: Tensor  # float64 [n], each image's factor in the mean loss
    classes: int
    dtype: torch.dtype  # of the products with z
    threads: int  # blocks at a time
    pool: ThreadPoolExecutor

    def logits(self, coefficients: Tensor, z: Tensor) -> Tensor:
        """Returns the logits float64 [C,b] of A₀ + A, `coefficients` A [C,K+1], on features z [b,K]."""
        logits = (coefficients[:, :-1].to(z.dtype) @ z.T).double().add_(coefficients[:, -1:])
        # apart: A₀ is large, and a sum in float32 would round differently at every step
        return logits if self.center is None else logits.add_(self.center.to(z.dtype) @ z.T)

    def sums(self, work: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]) -> list[Tensor]:
        """Returns the sums, in the order of the blocks, of what `work` returns of z [b,K], y [b] and weight [b]."""

        def of_block(block: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return work(block[0].to(self.dtype), block[1], block[2])

        rows, totals = max(1, BLOCK_BYTES // (8 * max(self.z.shape[1], self.classes))), list[Tensor]()
        blocks = list(zip(*(field.split(rows) for field in (self.z, self.y, self.weight)), strict=True))
        run = self.pool.map if self.threads > 1 else map
        for first in range(0, len(blocks), self.threads):  # not all at once: results wait in memory
            for parts in run(of_block, blocks[first : first + self.threads]):
                totals = [total.add_(part) for total, part in zip(totals, parts, strict=True)] if totals else [*parts]
        return totals


class _Problem:
    """f(A) = Σ_i w_i ℓ((A₀ + A) x_i, y_i) + ½ Σ_ck penalty_k A²_ck in coordinates V with A = V L⁻¹, L Lᵀ = M.

    x_i are the features z_i with a 1 for the bias. If l2 is far below the features' scale, f is badly conditioned in A.
    M = p̄ Σ_i w_i x_i x_iᵀ + diag(penalty) is the Hessian of f with every p(1−p) replaced by their mean p̄ at the start.
    The Hessian in V is therefore near the identity: L-BFGS needs a tenth of the iterations, and one tolerance of the
    gradient fits features of every scale. V L⁻¹ is a triangular solve: on few images, making L⁻¹ would take longer than
    all products with z. All computation is in float64, except these, which are in their own type.
    """

    def __init__(self, images: _Images, penalty: Tensor, gram: Tensor, start: Tensor) -> None:
        self.images, self.penalty = images, penalty  # [K+1]
        matrix = self._spread(start) * gram
        # a small multiple of the mean diagonal keeps M invertible in float64
        matrix.diagonal().add_(penalty + 1e-12 * matrix.diagonal().mean())
        self.lower = torch.linalg.cholesky(matrix)  # L
        self.start = _to_numpy(start @ self.lower)

    def coefficients(self, v: np.ndarray) -> Tensor:
        rows = torch.from_numpy(v).to(self.lower.device).view(-1, len(self.lower))
        return torch.linalg.solve_triangular(self.lower.T, rows.T, upper=True).T  # [C,K+1]

    def value_and_gradient(self, v: np.ndarray) -> tuple[float, np.ndarray]:
        pulse.beat()  # one candidate may need many of these calls, each of them long
        coefficients = self.coefficients(v)
        loss, product, bias = self.images.sums(partial(self._of_block, coefficients))
        loss += (coefficients.square() @ self.penalty).sum() / 2
        gradient = torch.cat([product, bias[:, None]], 1) + coefficients * self.penalty  # [C,K+1]
        return float(loss), _to_numpy(torch.linalg.solve_triangular(self.lower, gradient.T, upper=False).T)

    def _of_block(self, coefficients: Tensor, z: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns Σ_i w_i ℓ_i of a block, and its gradient by W [C,K] and b [C], in float64."""
        log_probability = self.images.logits(coefficients, z).log_softmax(0)  # [C,b]
        true = y[None]  # [1,b]
        loss = -(log_probability.gather(0, true)[0] @ weight)
        residual = log_probability.exp_().scatter_add_(0, true, torch.full_like(weight, -1.0)[None]).mul_(weight)
        return loss, (residual.to(z.dtype) @ z).double(), residual.sum(1)

    def _spread(self, start: Tensor) -> Tensor:
        """Returns p̄: the mean over classes of Σ_i w_i p_i (1 − p_i), in float64."""

        def of_block(z: Tensor, _: Tensor, weight: Tensor) -> tuple[Tensor]:
            probability = self.images.logits(start, z).softmax(0)  # [C,b]
            return ((probability * (1 - probability)) @ weight,)  # [C]

        [total] = self.images.sums(of_block)
        # if the start separates the classes, p(1 − p) is about 0, and M singular in the bias, which has no penalty
        return total.mean().clamp(min=1e-9)


def _gram(images: _Images) -> Tensor:
    """Returns Σ_i w_i x_i x_iᵀ in float64, [K+1,K+1]; what is above the diagonal, which nothing reads, is partly 0."""

    def of_block(z: Tensor, _: Tensor, weight: Tensor) -> tuple[Tensor]:
        x = F.pad(z.double(), (0, 1), value=1.0)  # [b,K+1], 1 for the bias
        weighted, gram = x.T * weight, x.new_zeros(x.shape[1], x.shape[1])
        for end in range(GRAM_ROWS, len(gram) + GRAM_ROWS, GRAM_ROWS):
            gram[end - GRAM_ROWS : end, :end] = weighted[end - GRAM_ROWS : end] @ x[:, :end]
        return (gram,)

    return images.sums(of_block)[0]


def _to_numpy(values: Tensor) -> np.ndarray:
    return values.flatten().cpu().numpy()
